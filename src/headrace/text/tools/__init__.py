"""Tool calls: how each family of models writes them, and how they are read back while they come.

`registry` knows the formats by name, `parser` drives them, `choice` reads what a request says of tools. A format is
one small file: what opens a call, how to read one, and the grammar of an answer that must be calls.
"""
