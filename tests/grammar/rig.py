"""The built-in model's vocabulary and what the grammar tests ask of it."""

from __future__ import annotations

import functools
import json
from typing import Any

import numpy as np
from numpy.typing import NDArray
from tests.programs.schemas.campaign import Campaign, Case, Found

from headrace.grammar.compile import build_matcher, compile_grammar
from headrace.grammar.matchers import Matchers
from headrace.grammar.vocabulary import Encode, Vocabulary
from headrace.protocol.constraints import StructuredOutputs

EOS = 1


@functools.cache
def campaign() -> Campaign:
    return Campaign()


def load(width: int, eos_token_ids: list[int]) -> tuple[Vocabulary, Encode]:
    tokenizer = campaign().tokenizer
    result = Vocabulary.of(tokenizer.token_bytes, tokenizer.is_special, tokenizer.vocab_size, width, eos_token_ids)
    return result, campaign().encode


def make_matchers(width: int = 2048, **options: Any) -> Matchers:
    return Matchers(load, width, [EOS], **options)


def matcher_of(constraint: StructuredOutputs) -> Any:
    return build_matcher(campaign().ll, compile_grammar(constraint), constraint)


def accepts(constraint: StructuredOutputs, text: str) -> bool:
    """Whether `text` is a whole answer under the constraint, token by token through the masks."""
    matcher = matcher_of(constraint)
    for token_id in campaign().encode(text):
        if not matcher.consume_token(token_id):
            return False
    return bool(matcher.is_accepting())


def judge(schema: Any, *, valid: list[Any] = (), invalid: list[Any] = (), documents: int = 5) -> Found:  # type: ignore[assignment]
    tests = [(True, each) for each in valid] + [(False, each) for each in invalid]
    return campaign().judge(Case(json.dumps(schema), schema, tests), documents)


def allowed(mask: NDArray[np.uint32]) -> list[int]:
    return [int(i) for i in np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little"))]
