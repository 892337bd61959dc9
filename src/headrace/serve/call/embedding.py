"""Texts as vectors, for every API that has embeddings.

The vector of a text is made of the model's hidden states after the final norm: of the last or first token, or of all.
Any decoder has one; its use for a search depends on the model's training. Knows no requests and no replies.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from headrace.engine.generation import TextClient, off_loop
from headrace.protocol import bounds
from headrace.protocol.errors import RequestError
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
    front: TextClient, texts: Sequence[Prompt], options: VectorOptions, field: str
) -> list[list[int]]:
    """Return the token ids of texts or lists of ids. Raises `RequestError` for lists and options out of bounds."""
    check_options(front, texts, options, field)
    prompts = []
    for text in texts:
        _, token_ids = await front.prompt_ids(
            text,
            add_special_tokens=options.add_special_tokens,
            truncate_prompt_tokens=options.truncate_prompt_tokens,
        )
        prompts.append(token_ids)
    return prompts


def check_options(front: TextClient, texts: Sequence[object], options: VectorOptions, field: str) -> None:
    """Raise `RequestError` or the errors of `check_room` for a call that is not tokenised yet."""
    bounds.check("prompt_list", texts, field)
    if options.truncate_prompt_tokens is not None:
        bounds.check("truncate_prompt_tokens", options.truncate_prompt_tokens)
    if options.cache_salt:
        bounds.check("cache_salt", options.cache_salt)
    front.check_room(len(texts), EMBEDDING_PARAMS)


async def pooled(
    front: TextClient, prompts: Sequence[list[int]], kind: Pooling, options: VectorOptions
) -> list[RequestState]:
    """Return the state of each prompt, with its pooled numbers. Raises `HeadraceError` if one fails."""
    request_options = RequestOptions(options.priority, options.cache_salt, lambda: 0, kind, adapter=options.adapter)
    async with await front.open(prompts, EMBEDDING_PARAMS, request_options) as generation:
        async for _ in generation:
            pass
    return list(generation.states)
