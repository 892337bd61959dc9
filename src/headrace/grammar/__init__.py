"""Structured output: from a `StructuredOutputs` to masks over the vocabulary, by llguidance.

`compile` makes a grammar of a constraint, or refuses it by name; `schemas` brings a JSON schema into the form that
llguidance takes; `vocabulary` tells what bytes a token stands for; `matchers` follows the running sequences and gives
masks and forced tokens to the runner. The server compiles every constraint first in a process of bounded time and
memory (`server.grammars`), so what the engine is told to build was built before.

For tool calls: `calls.tool_calls(calls, opening=..., separator=..., closing=...)` gives the `StructuredOutputs` that
`tool_choice` required or named asks for, out of the tools' parameter schemas and the texts that a format puts around a
call; put it into `SamplingParams.structured_outputs` and let `Front.check` try it.
"""
