"""The APIs, a folder for each ecosystem with its requests, replies, streams, errors and paths."""
