"""Classes of texts, and scores of pairs, for every API that has them.

A cross-encoder reads both texts of a pair at once; with any other model the score is the likeness of their vectors
(`text.likeness`). Knows no requests and no replies.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import NamedTuple

from headrace.engine.generation import TextClient
from headrace.protocol.errors import RequestError
from headrace.serve.call.embedding import TEXTS_AT_ONCE, VectorOptions, check_options, pooled_in_turns, prompt_list
from headrace.text.inputs import Prompt
from headrace.text.likeness import Scoring, comparison, likeness
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
    bound: str = "prompt_list",
) -> ClassRows:
    """Return the probabilities of the classes of texts or of pairs of texts, or the numbers that they are computed
    from. bound: the row of the bounds for their number. Raises `RequestError` for a model without classes."""
    classes = check_classes(front.info, "classes")
    pairs = [text for text in texts if isinstance(text, tuple)]
    if pairs:
        prompts = await _joined(front, pairs, options, field, bound)
    else:
        prompts = await prompt_list(front, [text for text in texts if not isinstance(text, tuple)], options, field)
    activation = classes.activation if use_activation else "identity"

    def read(state: RequestState) -> list[float]:
        return activated(state.pooled, activation)

    rows, request_ids = await pooled_in_turns(front, prompts, front.info.pooling, options, read)
    return ClassRows(rows, classes.labels, sum(map(len, prompts)), request_ids)


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
        names = [options.prompt_name or name for name in compare.prompt_names]
        ones = await _token_ids(front, firsts, options._replace(prompt_name=names[0]), fields.first)
        others = await _token_ids(front, seconds, options._replace(prompt_name=names[1]), fields.second)
        kind = compare.form.pooling
        rows, first_ids = await pooled_in_turns(front, ones, kind, options, lambda state: compare.of(state.pooled))
        left = iter(rows * len(others) if len(ones) == 1 else rows)

        def rate(state: RequestState) -> float:
            return likeness(next(left), compare.of(state.pooled))

        values, second_ids = await pooled_in_turns(front, others, kind, options, rate)
        num_tokens = sum(map(len, ones)) + sum(map(len, others))
        return Scores(values, compare.scoring, num_tokens, first_ids + second_ids)
    pairs = list(zip([*firsts] * (len(seconds) if len(firsts) == 1 else 1), seconds, strict=True))
    rated = await class_rows(front, pairs, options, fields.second, use_activation=use_activation, bound="scored_texts")
    return Scores([row[0] for row in rated.rows], "cross-encoder", rated.num_tokens, rated.request_ids)


async def _token_ids(front: TextClient, texts: Sequence[Prompt], options: VectorOptions, field: str) -> list[list[int]]:
    listed = prompted(texts, options.prompt_name, front.info)
    return await prompt_list(front, listed, options, field, "scored_texts")


async def _joined(
    front: TextClient, pairs: Sequence[tuple[str, str]], options: VectorOptions, field: str, bound: str
) -> list[list[int]]:
    check_options(front, pairs, options, field, bound)
    cut, instruction = options.truncate_prompt_tokens, options.instruction
    prompts = []
    for place, (first, second) in enumerate(pairs):
        if not place % TEXTS_AT_ONCE:
            await asyncio.sleep(0)
        prompts.append(await front.pair_ids(first, second, cut, instruction))
    return prompts
