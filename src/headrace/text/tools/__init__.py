"""Tool calls: how each family of models writes them, and how they are read while an answer comes.

`formats` is the table of the formats; `calls` reads them; `call_grammar` writes the grammar of an answer that must be
calls. `answers` and `parser` drive the reading, `detection` finds a model's format, `choice` checks what a request says
of tools.
"""
