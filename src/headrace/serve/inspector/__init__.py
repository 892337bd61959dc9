"""The web page of the server: the chat at `/`, the engine at work at `/inspect`. Its files lie in this folder.

`page` sends them. They are plain ES modules without a build step; the libraries in `vendor/` are single files.
"""
