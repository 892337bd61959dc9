"""Classes of texts, and scores of pairs, for every API that has them.

A cross-encoder reads both texts of a pair at once; with any other model the score is the likeness of their vectors
(`text.likeness`). Knows no requests and no replies.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from headrace.engine.generation import TextClient, off_loop
from headrace.protocol.errors import RequestError
from headrace.protocol.step import Activation
from headrace.serve.call.embedding import VectorOptions, check_options, pooled, prompt_list
from headrace.text.inputs import Prompt
from headrace.text.likeness import Comparable, Comparison, Scoring, comparison, likeness
from headrace.text.outputs import RequestState
from headrace.text.vectors import activated, check_classes, check_reranker, prompted


class ClassRows(NamedTuple):
    """`rows[i]` has a number for each class of text i, labels[j] being the name of class j; `num_tokens` counts the
    tokens of all."""

    rows: list[list[float]]
    labels: tuple[str, ...]
    num_tokens: int
    request_ids: list[str]

    @property
    def size(self) -> int:
        """The count of numbers in all rows."""
        return len(self.rows) * len(self.labels)


class Scores(NamedTuple):
    """`values[i]` is the score of pair i; `scoring` says how it came about."""

    values: list[float]
    scoring: Scoring
    num_tokens: int
    request_ids: list[str]

    @property
    def order(self) -> list[int]:
        """The pairs by their scores, the best first; of equal ones, the first of the request."""
        return sorted(range(len(self.values)), key=lambda i: (-self.values[i], i))


class Compared(NamedTuple):
    """What is compared of texts; `size` counts their numbers, `num_tokens` their tokens."""

    texts: list[Comparable]
    size: int
    num_tokens: int
    request_ids: list[str]


class Fields(NamedTuple):
    """The names of the two fields of a request that hold a pair's texts."""

    first: str
    second: str


async def class_rows(
    front: TextClient,
    texts: Sequence[Prompt | tuple[str, str]],
    options: VectorOptions,
    field: str,
    *,
    use_activation: bool = True,
) -> ClassRows:
    """Return the probabilities of the classes of texts or of pairs of texts, or the numbers that they are computed
    from. Raises `RequestError` for a model without classes."""
    classes = check_classes(front.info, "classes")
    pairs = [text for text in texts if isinstance(text, tuple)]
    if pairs:
        prompts = await _joined(front, pairs, options, field)
    else:
        prompts = await prompt_list(front, [text for text in texts if not isinstance(text, tuple)], options, field)
    states = await pooled(front, prompts, front.info.pooling, options)
    rows = await _activated(states, classes.activation if use_activation else "identity")
    return ClassRows(rows, classes.labels, sum(map(len, prompts)), [state.request.request_id for state in states])


async def scores(
    front: TextClient,
    firsts: Sequence[str],
    seconds: Sequence[str],
    options: VectorOptions,
    fields: Fields,
    *,
    use_activation: bool = True,
) -> Scores:
    """Return the scores of pairs: of one text with each of `seconds`, or of as many as these. Raises `RequestError`."""
    if check_reranker(front.info) is None:
        if options.instruction:
            raise RequestError("instruction", options.instruction, "left out: this model has no pairs with one")
        compare = comparison(options.pooling, front.info)
        first = await _compared(front, firsts, compare, options, fields.first)
        second = await _compared(front, seconds, compare, options, fields.second)
        ones = first.texts * len(seconds) if len(firsts) == 1 else first.texts
        values = await off_loop(second.size, lambda: [likeness(a, b) for a, b in zip(ones, second.texts, strict=True)])
        num_tokens = first.num_tokens + second.num_tokens
        return Scores(values, compare.scoring, num_tokens, first.request_ids + second.request_ids)
    pairs = list(zip([*firsts] * (len(seconds) if len(firsts) == 1 else 1), seconds, strict=True))
    rated = await class_rows(front, pairs, options, fields.second, use_activation=use_activation)
    return Scores([row[0] for row in rated.rows], "cross-encoder", rated.num_tokens, rated.request_ids)


async def _compared(
    front: TextClient, texts: Sequence[Prompt], compare: Comparison, options: VectorOptions, field: str
) -> Compared:
    prompts = await prompt_list(front, prompted(texts, options.prompt_name, front.info), options, field)
    states = await pooled(front, prompts, compare.form.pooling, options)
    size = sum(len(state.pooled) for state in states)
    rows = await off_loop(size, lambda: [compare.of(state.pooled) for state in states])
    return Compared(rows, size, sum(map(len, prompts)), [state.request.request_id for state in states])


async def _joined(
    front: TextClient, pairs: Sequence[tuple[str, str]], options: VectorOptions, field: str
) -> list[list[int]]:
    check_options(front, pairs, options, field)
    cut, instruction = options.truncate_prompt_tokens, options.instruction
    return [await front.pair_ids(first, second, cut, instruction) for first, second in pairs]


async def _activated(states: Sequence[RequestState], activation: Activation) -> list[list[float]]:
    size = sum(len(state.pooled) for state in states)
    return await off_loop(size, lambda: [activated(state.pooled, activation) for state in states])
