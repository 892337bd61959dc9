"""Tool calls: the formats in which families of models write them, and their readers, which work while an answer is
generated.

`formats` is the table of the formats; `calls` reads them; `call_grammar` writes the grammar of an answer that must be
calls. `answers` and `parser` drive the reading, `detection` finds a model's format, `choice` checks a request's fields
about tools.
"""
