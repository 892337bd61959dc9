"""Two texts that a reranker reads at once, as token ids: joined by the tokenizer, or put into the text that the model
was trained with.

Called by `LLM` and by `engine.generation`.
"""

from __future__ import annotations

from collections.abc import Callable

from headrace.protocol import bounds
from headrace.protocol.errors import ContextLengthError, RequestError
from headrace.protocol.step import EngineInfo
from headrace.text.inputs import check_bytes
from headrace.text.tokenizer import Tokenizer

INSTRUCTION = "Given a web search query, retrieve relevant passages that answer the query"
"""Of Qwen3-Reranker (Zhang et al. 2025, section 2), where a request has none."""
QWEN3 = (
    "<|im_start|>system\nJudge whether the Document meets the requirements based on the Query and the Instruct "
    'provided. Note that the answer can only be "yes" or "no".<|im_end|>\n<|im_start|>user\n',
    "<Instruct>: {instruction}\n<Query>: {first}\n<Document>: {second}",
    "<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n",
)
"""The parts before, of, and after a pair."""


def pair_ids(
    first: str,
    second: str,
    tokenizer: Tokenizer | None,
    info: EngineInfo,
    truncate_prompt_tokens: int | None = None,
    instruction: str = "",
) -> list[int]:
    """Return the token ids of two texts that a cross-encoder reads at once.

    `truncate_prompt_tokens` keeps at most that many, -1 as many as fit: the longer text is cut at its end, and both
    once they are equally long; in a model's own template the second. instruction: of templates that have one. Raises
    `RequestError`.
    """
    template = "" if info.classes is None else info.classes.pair_template
    form = None if tokenizer is None else tokenizer.pair_form
    if tokenizer is None or (form is None and not template):
        raise RequestError("model", info.model, "a model whose tokenizer joins two texts")
    if instruction and not template:
        raise RequestError("instruction", instruction, "left out: this model's pairs have none")
    for text in (first, second, instruction):
        bounds.check("text", text, "prompt")
        if truncate_prompt_tokens is None:
            check_bytes(text, tokenizer, info.max_model_len)

    def encode(text: str) -> list[int]:
        return tokenizer.encode(text, add_special_tokens=False)

    keep = info.max_prompt_len if truncate_prompt_tokens == -1 else truncate_prompt_tokens
    if template:
        ids = _in_template(encode, first, second, instruction or INSTRUCTION, keep)
    elif form is not None:
        ids, others = encode(first), encode(second)
        if keep is not None:
            room = _room(keep, len(form.before) + len(form.between) + len(form.after))
            ids, others = _cut(ids, others, room)
        raised = info.classes.second_type if info.classes is not None and form.has_types else 0
        ids = [*form.before, *ids, *form.between, *(i + raised for i in (*others, *form.after))]
    if len(ids) > info.max_prompt_len:
        bound = f"at most {info.max_prompt_len} tokens long"
        raise ContextLengthError("prompt", len(ids), bound, info.max_model_len, len(ids))
    if not ids:
        raise RequestError("prompt", first, "at least one token long")
    return ids


def _in_template(
    encode: Callable[[str], list[int]], first: str, second: str, instruction: str, keep: int | None
) -> list[int]:
    before, after = encode(QWEN3[0]), encode(QWEN3[2])
    ids = encode(QWEN3[1].format(instruction=instruction, first=first, second=second))
    return [*before, *(ids if keep is None else ids[: _room(keep, len(before) + len(after))]), *after]


def _room(keep: int, num_own: int) -> int:
    """Return the tokens left for two texts of a pair that has at most `keep`."""
    if keep < num_own + 2:
        raise RequestError("truncate_prompt_tokens", keep, f"at least {num_own + 2}, or -1")
    return keep - num_own


def _cut(ids: list[int], others: list[int], room: int) -> tuple[list[int], list[int]]:
    if len(ids) + len(others) <= room:
        return ids, others
    least = min(len(ids), len(others), room // 2)
    most = room - least
    return (ids[:most], others[:least]) if len(ids) > len(others) else (ids[:least], others[:most])
