"""Texts as vectors, for every API that has embeddings.

The vector of a text is made of the model's hidden states after the final norm: of the last or first token, or of all.
Any decoder has one; its use for a search depends on the model's training. Knows no requests and no replies.
"""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Callable, Sequence
from typing import NamedTuple, TypeVar

from headrace.engine.generation import TextClient, off_loop
from headrace.protocol import bounds
from headrace.protocol.errors import QueueFullError, RequestError
from headrace.protocol.step import Pooling
from headrace.text.inputs import Prompt, RequestOptions
from headrace.text.outputs import RequestState
from headrace.text.vectors import (
    EMBEDDING_PARAMS,
    WordWeights,
    check_form,
    check_sparse,
    finished,
    prompted,
    token_form,
    token_rows,
    word_weights,
)

T = TypeVar("T")
TURN = 64
"""Texts of a long call that wait in the engine's queue at once."""
TEXTS_AT_ONCE = 16
"""Texts that are tokenised before other calls have their turn on the event loop."""
PATIENCE_S, PAUSE_S = 60.0, 0.1


class Vectors(NamedTuple):
    """`rows[i]` is the vector of text i, of float32 numbers; `num_tokens` counts the tokens of all."""

    rows: list[list[float]]
    num_tokens: int
    request_ids: list[str]

    @property
    def size(self) -> int:
        """The count of numbers in all vectors."""
        return sum(map(len, self.rows))


class TokenVectors(NamedTuple):
    """`rows[i]` has a vector for each token of text i; else as `Vectors`."""

    rows: list[list[list[float]]]
    num_tokens: int
    request_ids: list[str]

    @property
    def size(self) -> int:
        """The count of numbers in all vectors."""
        return sum(len(row) for rows in self.rows for row in rows)


class VectorOptions(NamedTuple):
    """The options of a call about its vectors and prompts. normalize: None as the model's files have it. adapter: the
    digest of the one that computes them. prompt_name: as in `text.vectors.prompted`. instruction: of a reranker whose
    pairs have one."""

    pooling: str | None = None
    dimensions: int | None = None
    normalize: bool | None = True
    add_special_tokens: bool = True
    truncate_prompt_tokens: int | None = None
    priority: int = 0
    cache_salt: str = ""
    adapter: str = ""
    prompt_name: str | None = None
    instruction: str = ""


async def vectors(
    front: TextClient,
    texts: Sequence[Prompt],
    options: VectorOptions = VectorOptions(),
    field: str = "input",
) -> Vectors:
    """Return the vectors of texts or lists of token ids. `field` names them in a `RequestError`."""
    form = check_form(options.pooling, options.dimensions, options.normalize, front.info)
    if form.is_sparse and len(texts) * form.width > (most := int(bounds.BOUNDS["row_numbers"].high)):
        bound = (
            f"of at most {most // form.width} texts: a vector has {form.width} numbers, and a call {most}; "
            "/embed_sparse gives those that are not 0"
        )
        raise RequestError(field, len(texts), bound)
    prompts = await prompt_list(front, prompted(texts, options.prompt_name, front.info), options, field)
    states = await pooled(front, prompts, form.pooling, options)

    def finish() -> list[list[float]]:
        return [finished(state.pooled, form) for state in states]

    rows = await off_loop(sum(len(state.pooled) for state in states), finish)
    return Vectors(rows, sum(map(len, prompts)), [state.request.request_id for state in states])


async def sparse_vectors(
    front: TextClient, texts: Sequence[Prompt], options: VectorOptions, field: str
) -> tuple[list[WordWeights], list[str]]:
    """Return the numbers that are not 0 of the vectors of texts, and the ids of their requests. Raises `RequestError`
    for a model whose vectors are no weights of words."""
    check_sparse(front.info)
    form = check_form(None, None, options.normalize, front.info)
    prompts = await prompt_list(front, prompted(texts, options.prompt_name, front.info), options, field)
    states = await pooled(front, prompts, form.pooling, options)
    size = sum(len(state.pooled) for state in states)
    rows = await off_loop(size, lambda: [word_weights(state.pooled, form) for state in states])
    return rows, [state.request.request_id for state in states]


async def token_vectors(front: TextClient, texts: Sequence[Prompt], options: VectorOptions) -> TokenVectors:
    """Return the vectors of the tokens of each text. Raises `RequestError` for more numbers than a call may have."""
    if options.pooling is not None:
        raise RequestError("pooling", options.pooling, "left out with the task token_embed, whose rows are not pooled")
    form, width = token_form(options.dimensions, options.normalize, front.info), front.info.hidden_size
    prompts = await prompt_list(front, prompted(texts, options.prompt_name, front.info), options, "input")
    num_tokens = sum(map(len, prompts))
    if num_tokens * width > (most := int(bounds.BOUNDS["row_numbers"].high)):
        bound = (
            f"of at most {most // width} tokens in all: token_embed gives {width} numbers for each, and {most} a call"
        )
        raise RequestError("input", num_tokens, bound)
    states = await pooled(front, prompts, form.pooling, options)
    rows = await off_loop(num_tokens * width, lambda: [token_rows(state.pooled, form, width) for state in states])
    return TokenVectors(rows, num_tokens, [state.request.request_id for state in states])


async def prompt_list(
    front: TextClient, texts: Sequence[Prompt], options: VectorOptions, field: str, bound: str = "prompt_list"
) -> list[list[int]]:
    """Return the token ids of texts or lists of ids, at most as many as the row `bound` of the bounds allows. Raises
    `RequestError` for lists and options out of bounds."""
    check_options(front, texts, options, field, bound)
    prompts = []
    for place, text in enumerate(texts):
        if not place % TEXTS_AT_ONCE:
            await asyncio.sleep(0)
        _, token_ids = await front.prompt_ids(
            text,
            add_special_tokens=options.add_special_tokens,
            truncate_prompt_tokens=options.truncate_prompt_tokens,
        )
        prompts.append(token_ids)
    return prompts


def check_options(
    front: TextClient, texts: Sequence[object], options: VectorOptions, field: str, bound: str = "prompt_list"
) -> None:
    """Raise `RequestError` or the errors of `check_room` for a call that is not tokenised yet."""
    bounds.check(bound, texts, field)
    if options.truncate_prompt_tokens is not None:
        bounds.check("truncate_prompt_tokens", options.truncate_prompt_tokens)
    if options.cache_salt:
        bounds.check("cache_salt", options.cache_salt)
    front.check_room(min(len(texts), TURN if bound == "scored_texts" else len(texts)), EMBEDDING_PARAMS)


async def pooled_in_turns(
    front: TextClient,
    prompts: Sequence[list[int]],
    kind: Pooling,
    options: VectorOptions,
    read: Callable[[RequestState], T],
) -> tuple[list[T], list[str]]:
    """Return what `read` makes of the state of each prompt, and the ids of the requests.

    The engine has `TURN` of them at a time, and the calls of others come in between; no more pooled numbers are held.
    Raises as `pooled`; if others fill the queue after the first turn, the rest waits for room, `PATIENCE_S` at most.
    """
    front.rates.check_tokens(sum(map(len, prompts)))  # of all, before any is computed
    results: list[T] = []
    request_ids: list[str] = []
    clock = asyncio.get_running_loop().time
    for start in range(0, len(prompts), TURN):
        began = clock()
        while True:
            try:
                states = await pooled(front, prompts[start : start + TURN], kind, options)
                break
            except QueueFullError as error:
                # Of its kinds, a caller's own limit and an engine that sleeps are no queue that empties.
                if not start or type(error) is not QueueFullError or clock() - began > PATIENCE_S:
                    raise
                await asyncio.sleep(PAUSE_S)
        work = functools.partial(_read_all, states, read)
        results += await off_loop(sum(len(state.pooled) for state in states), work)
        request_ids += [state.request.request_id for state in states]
    return results, request_ids


def _read_all(states: Sequence[RequestState], read: Callable[[RequestState], T]) -> list[T]:
    return [read(state) for state in states]


async def pooled(
    front: TextClient, prompts: Sequence[list[int]], kind: Pooling, options: VectorOptions
) -> list[RequestState]:
    """Return the state of each prompt, with its pooled numbers. Raises `HeadraceError` if one fails."""
    request_options = RequestOptions(options.priority, options.cache_salt, lambda: 0, kind, adapter=options.adapter)
    async with await front.open(prompts, EMBEDDING_PARAMS, request_options) as generation:
        async for _ in generation:
            pass
    return list(generation.states)
