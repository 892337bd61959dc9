"""Texts as vectors, for every API that has embeddings.

The vector of a text is the model's hidden state after the final norm, of the last or first token or the mean over all
tokens. Any decoder has one; its use for a search depends on the model's training. Knows no requests and no replies.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from headrace.engine.generation import TextClient, off_loop
from headrace.protocol import bounds
from headrace.text.inputs import Prompt, RequestOptions
from headrace.text.vectors import EMBEDDING_PARAMS, check_form, finished, prompted


class Vectors(NamedTuple):
    """`rows[i]` is the vector of text i, of float32 numbers; `num_tokens` counts the tokens of all."""

    rows: list[list[float]]
    num_tokens: int
    request_ids: list[str]

    @property
    def size(self) -> int:
        """The count of numbers in all vectors."""
        return sum(map(len, self.rows))


class VectorOptions(NamedTuple):
    """The options of a call about its vectors and prompts. normalize: None as the model's files have it. adapter: the
    digest of the one that computes them. prompt_name: as in `text.vectors.prompted`."""

    pooling: str | None = None
    dimensions: int | None = None
    normalize: bool | None = True
    add_special_tokens: bool = True
    truncate_prompt_tokens: int | None = None
    priority: int = 0
    cache_salt: str = ""
    adapter: str = ""
    prompt_name: str | None = None


async def vectors(
    front: TextClient,
    texts: Sequence[Prompt],
    options: VectorOptions = VectorOptions(),
    field: str = "input",
) -> Vectors:
    """Return the vectors of texts or lists of token ids. `field` names them in a `RequestError`."""
    pooling, dimensions, normalize, add_special_tokens, truncate_prompt_tokens, priority, cache_salt, adapter, name = (
        options
    )
    form = check_form(pooling, dimensions, normalize, front.info)
    bounds.check("prompt_list", texts, field)
    if truncate_prompt_tokens is not None:
        bounds.check("truncate_prompt_tokens", truncate_prompt_tokens)
    if cache_salt:
        bounds.check("cache_salt", cache_salt)
    front.check_room(len(texts), EMBEDDING_PARAMS)
    prompts = []
    for text in prompted(texts, name, front.info):
        _, token_ids = await front.prompt_ids(
            text, add_special_tokens=add_special_tokens, truncate_prompt_tokens=truncate_prompt_tokens
        )
        prompts.append(token_ids)
    async with await front.open(
        prompts, EMBEDDING_PARAMS, RequestOptions(priority, cache_salt, lambda: 0, form.pooling, adapter=adapter)
    ) as generation:
        async for _ in generation:
            pass

    def finish() -> list[list[float]]:
        pairs = zip(generation.states, prompts, strict=True)
        return [finished(state.pooled, len(ids), form) for state, ids in pairs]

    rows = await off_loop(sum(len(state.pooled) for state in generation.states), finish)
    return Vectors(rows, sum(map(len, prompts)), [state.request.request_id for state in generation.states])
