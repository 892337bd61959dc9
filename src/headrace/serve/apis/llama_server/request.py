"""The bodies of llama-server's requests."""

from __future__ import annotations

from typing import Any

from headrace.protocol.errors import RequestError
from headrace.protocol.parameters import LLAMA_SERVER
from headrace.serve.call.adapters import AdapterScale
from headrace.serve.call.parsing import Body, takes_parameters

IGNORED = {
    "n_keep": "an answer ends where the context does; nothing is shifted out",
    "n_discard": "an answer ends where the context does; nothing is shifted out",
    "n_indent": "answers are not made to indent",
    "min_keep": "filters keep at least one token, and no other number",
    "t_max_predict_ms": "the same request must give the same answer at every speed; use n_predict",
    "n_cache_reuse": "prefixes are always reused token by token",
    "grammar_lazy": "a grammar holds from the first token",
    "grammar_triggers": "a grammar holds from the first token",
    "preserved_tokens": "skip_special_tokens decides about special tokens",
    "backend_sampling": "sampling is where it is",
    "penalize_nl": "penalties know no newline",
}
MAX_PIECES = 64
Prompt = str | list[Any] | dict[str, Any]
"""A text, token ids and texts mixed, an object (`text_in`), or a list of all these."""
MAX_PROMPTS = 256


@takes_parameters(LLAMA_SERVER)
class LlamaCompletionRequest(Body, forbid_unknown_fields=True, kw_only=True):
    """POST /completion."""

    prompt: Prompt
    model: str | None = None
    n_predict: int | None = None
    # The same under OpenAI's name.
    max_tokens: int | None = None
    stream: bool | None = None
    grammar: str | None = None
    json_schema: dict[str, Any] | None = None
    logit_bias: list[list[Any]] | dict[str, Any] | None = None
    n_probs: int | None = None
    cache_prompt: bool | None = None
    return_tokens: bool | None = None
    timings_per_token: bool | None = None
    return_progress: bool | None = None
    response_fields: list[str] | None = None
    id_slot: int | None = None
    lora: list[AdapterScale] | None = None


class InfillRequest(LlamaCompletionRequest, forbid_unknown_fields=True, kw_only=True):
    """POST /infill: the text before the gap and the text after it. `prompt` is the last part of the text before it."""

    input_prefix: str
    input_suffix: str
    input_extra: list[dict[str, Any]] | None = None
    prompt: str = ""


class TemplateRequest(Body, forbid_unknown_fields=True, kw_only=True):
    """POST /apply-template: the fields of a chat that shape its prompt."""

    messages: list[dict[str, Any]]
    model: str | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    reasoning_effort: str | None = None
    chat_template: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None


class SlotRequest(Body, forbid_unknown_fields=True, kw_only=True):
    """POST /slots/{slot_id}: the name of the session file, which action=erase does not need."""

    filename: str | None = None


class EmbeddingRequest(Body, forbid_unknown_fields=True, kw_only=True):
    """POST /embedding."""

    content: str | list[Any]
    model: str | None = None
    embd_normalize: int | None = None


def text_in(prompt: dict[str, Any], field: str) -> str:
    """Return the text of a prompt that is an object, the form in which llama-server's clients send pictures. Raises
    `RequestError` for one with pictures."""
    for name, value in prompt.items():
        if name not in ("prompt_string", "multimodal_data") or (name == "multimodal_data" and value):
            bound = (
                "left out: pictures are read in /v1/chat/completions" if name == "multimodal_data" else "prompt_string"
            )
            raise RequestError(f"{field}.{name[:80]}", "given", bound)
    text = prompt.get("prompt_string")
    if not isinstance(text, str):
        raise RequestError(f"{field}.prompt_string", text, "a text")
    return text


def are_many(prompt: Prompt) -> bool:
    """Return whether `prompt` is a list of prompts; a list with a token id in it is one prompt."""
    return isinstance(prompt, list) and not any(isinstance(piece, int) for piece in prompt)
