"""`GrammarChecker` checks whether an answer can follow a constraint, in a process of bounded time and memory.

The engine gets only constraints that were built there. Verdicts are cached under the constraint's salt, refusals too.
Knows no requests and no HTTP; held by `generation.TextClient` and by `LLM`.
"""

from __future__ import annotations

import hashlib

import msgspec

from headrace.grammar.salted import SaltedCache
from headrace.grammar.vocabulary import Vocabulary
from headrace.protocol.constraints import StructuredOutputs
from headrace.protocol.errors import HeadraceError, RequestError
from headrace.protocol.params import SamplingParams
from headrace.text.bounded import BoundedProcess
from headrace.text.tokenizer import Tokenizer

MAX_VERDICTS = 1024
MAX_CPU_SECONDS = 1.0
SANDBOX = "headrace.text.grammar_sandbox"
"""The program of the process, by name: without constraints, its imports take no time."""


class Verdict(msgspec.Struct):
    """`refusal` is (field, bound) of a `RequestError`; None: the constraint can be followed."""

    refusal: tuple[str, str] | None = None
    warnings: list[str] = []


class GrammarChecker:
    """Verdicts on constraints for one model.

    Args:
        tokenizer: None refuses every constraint.
        width: number of the model's logits.
        eos_token_ids: the tokens that end an answer; an empty list refuses every constraint.
        max_cpu_seconds: processor time for one constraint.

    Attributes:
        process: builds the constraints.
    """

    def __init__(
        self,
        tokenizer: Tokenizer | None,
        width: int,
        eos_token_ids: list[int],
        max_cpu_seconds: float = MAX_CPU_SECONDS,
    ) -> None:
        self._tokenizer = tokenizer
        self._width = width
        self._eos_token_ids = eos_token_ids
        self.process = BoundedProcess(SANDBOX, max_cpu_seconds, self._vocabulary)
        self._verdicts: SaltedCache[Verdict] = SaltedCache(MAX_VERDICTS)

    def check(self, params: SamplingParams) -> list[str]:
        """Return warnings about parts of the constraint of `params` that are not enforced. Raises `RequestError` if it
        cannot be honoured."""
        constraint = _constraint_of(params)
        if constraint is None:
            return []
        self._check_engine(params, constraint)
        verdict = self._known(constraint)
        if verdict is None:
            verdict = self._try(constraint)
            self._verdicts.put(constraint.cache_salt, _key(constraint), verdict)
        if verdict.refusal is not None:
            field, bound = verdict.refusal
            value = getattr(constraint, constraint.kind)
            raise RequestError(field, value, bound, "unsupported_constraint")
        return verdict.warnings

    def is_known(self, params: SamplingParams) -> bool:
        """Return whether `check` needs no process."""
        constraint = _constraint_of(params)
        return constraint is None or self._known(constraint) is not None

    def require(self, params: SamplingParams) -> None:
        """Raise `HeadraceError` for a constraint that was not checked: a defect of the caller."""
        if params.structured_outputs is not None:
            verdict = self._known(params.structured_outputs)
            if verdict is None or verdict.refusal is not None:
                raise HeadraceError("a constraint was to be followed that was not checked")

    def close(self) -> None:
        """End the process. A later `check` starts another."""
        self.process.close()

    def _known(self, constraint: StructuredOutputs) -> Verdict | None:
        return self._verdicts.get(constraint.cache_salt, _key(constraint))

    def _check_engine(self, params: SamplingParams, constraint: StructuredOutputs) -> None:
        kind = constraint.kind
        if self._tokenizer is None:
            raise RequestError("structured_outputs", kind, "left out: the engine runs without a tokenizer")
        if not self._eos_token_ids:
            raise RequestError("structured_outputs", kind, "left out: the model has no end-of-text token")
        if params.ignore_eos:
            raise RequestError("ignore_eos", True, "false with structured_outputs: an answer ends where its form does")

    def _try(self, constraint: StructuredOutputs) -> Verdict:
        reply = self.process.run(constraint, Verdict)
        if isinstance(reply, str):
            bound = f"one that can be built in bounded time and memory; {reply}"
            return Verdict((f"structured_outputs.{constraint.kind}", bound))
        return reply

    def _vocabulary(self) -> bytes:
        tokenizer = self._tokenizer
        if tokenizer is None:
            raise HeadraceError("there is no tokenizer")
        return msgspec.msgpack.encode(
            Vocabulary.of(
                tokenizer.token_bytes, tokenizer.is_special, tokenizer.vocab_size, self._width, self._eos_token_ids
            )
        )


def _key(constraint: StructuredOutputs) -> bytes:
    return hashlib.sha256(msgspec.msgpack.encode(constraint)).digest()


def _constraint_of(params: object) -> StructuredOutputs | None:
    if not isinstance(params, SamplingParams):
        raise RequestError("sampling_params", params, "a SamplingParams, or a list of them")
    return params.structured_outputs
