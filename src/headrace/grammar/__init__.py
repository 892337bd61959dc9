"""Structured output: from a `StructuredOutputs` to masks over the vocabulary, by llguidance.

`compile` makes a grammar of a constraint, or refuses it by name; `schemas` brings a JSON schema into the form that
llguidance takes; `vocabulary` tells what bytes a token stands for; `matchers` follows the running sequences and gives
masks and forced tokens to the runner. The server compiles every constraint first in a process of bounded time and
memory (`text.grammars`), so what the engine is told to build was built before.

For tool calls: `tags` has the `format` of a structural tag, out of which the server's tool formats put together what
`tool_choice` required or named asks for.
"""
