"""The data that the server keeps for its clients: a bounded store, and the files of OpenAI's batches."""
