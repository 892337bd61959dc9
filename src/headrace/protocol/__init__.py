"""What crosses a border: errors, bounds, the config, parameters of a request, structs of a step, frames of the socket.

Everybody may use `errors` and `bounds`; `step` and `frames` are what processes exchange. Imports nothing of headrace.
"""
