"""Structured output: from a `StructuredOutputs` to masks over the vocabulary, by llguidance.

`compile` makes a grammar of a constraint, or refuses it by name; `schemas` rewrites a JSON schema into the form that
llguidance takes; `vocabulary` has the bytes of each token; `matchers` follows the running sequences and gives masks and
forced tokens to the runner. The server compiles every constraint first in a process of bounded time and memory
(`text.grammars`), so the engine builds only grammars that were built before.

For tool calls: `tags` has the `format` of a structural tag, from which the server's tool formats put together the
grammar of a required or named `tool_choice`.
"""
