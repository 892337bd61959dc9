"""The program that tries to build constraints before the engine does: `python -m headrace.text.grammar_sandbox 1.0`.

A regex, a schema or a grammar of a client's may take any time and memory to build. It is built here first, with the
model's vocabulary (the first frame), in a process with a bound on both; if that succeeds, the engine builds it again,
with the same limits. Started by `grammars.GrammarChecker` only.
"""

from __future__ import annotations

import resource
import sys

import llguidance
import msgspec

from headrace.grammar.compile import build_matcher, compile_grammar, only_whitespace
from headrace.grammar.vocabulary import Vocabulary, make_tokenizer
from headrace.protocol.constraints import StructuredOutputs
from headrace.protocol.errors import RequestError
from headrace.text.bounded import address_space, read_frame, serve, write_frame
from headrace.text.grammars import Verdict

MAX_MEMORY = 256 * 2**20
"""Bytes of address space in addition to the program's and the vocabulary's."""
MAX_STACK = 4 * 2**20
"""Half of the stack of an engine's thread: a constraint that fits here fits there."""


def main(max_cpu_seconds: float) -> None:
    """Answer jobs until stdin ends."""
    resource.setrlimit(resource.RLIMIT_STACK, (MAX_STACK, MAX_STACK))
    greeting = read_frame(sys.stdin.buffer)
    if greeting is None:
        return
    tokenizer = make_tokenizer(msgspec.msgpack.decode(greeting, type=Vocabulary))
    write_frame(sys.stdout.buffer, b"")

    def answer(body: bytes) -> bytes:
        return msgspec.msgpack.encode(_try(tokenizer, body))

    serve(answer, max_cpu_seconds, address_space() + MAX_MEMORY)


def _try(tokenizer: llguidance.LLTokenizer, body: bytes) -> Verdict:
    try:
        constraint = msgspec.msgpack.decode(body, type=StructuredOutputs)
        grammar = compile_grammar(constraint)
        if constraint.whitespace_pattern is not None and not only_whitespace(tokenizer, constraint.whitespace_pattern):
            return Verdict(("whitespace_pattern", "a regex of nothing but spaces, tabs and line breaks"))
        build_matcher(tokenizer, grammar, constraint)
        return Verdict(None, grammar.warnings)
    except RequestError as error:
        return Verdict((error.field, error.bound))
    except RecursionError:
        return Verdict(("structured_outputs", "nested less deeply"))


if __name__ == "__main__":
    main(float(sys.argv[1]))
