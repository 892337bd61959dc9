"""The vocabulary that all parts share: errors, bounds, the config, parameters of a request, structs of a step, frames
of the socket.

Processes exchange `step` and `frames`. Imports nothing of the rest of headrace.
"""
