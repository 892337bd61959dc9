"""vLLM's routes that OpenAI has not: descriptions of server and tokenizer, the prefix cache, SageMaker's
`/invocations`.

Knows calls and replies; `add_routes` puts the routes on an app.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from typing import Any

import msgspec
from starlette.applications import Starlette

from headrace import __version__
from headrace.protocol.errors import RequestError
from headrace.serve import routing
from headrace.serve.apis.openai import completions
from headrace.serve.apis.openai.embeddings import Embeddings
from headrace.serve.apis.openai.scores import ScoreRoutes
from headrace.serve.call.models import ModelSet
from headrace.serve.call.parsing import Body
from headrace.serve.call.service import ServedModel


class InvocationRequest(Body, kw_only=True):
    """POST /invocations: the body of another route, found by the field that it has: messages (chat), prompt
    (completion), input (embeddings), text_1 (score), or query (rerank)."""

    messages: list[dict[str, Any]] | None = None
    prompt: str | list[Any] | None = None
    input: str | list[Any] | None = None
    text_1: str | list[str] | None = None
    query: str | None = None


class TokenizerInfo(msgspec.Struct, kw_only=True):
    """GET /tokenizer_info. `special_tokens` are texts by role; `chat_template` is the Jinja source."""

    tokenizer_class: str
    vocab_size: int
    model_max_length: int
    special_tokens: dict[str, str]
    chat_template: str | None


class ServerInfo(msgspec.Struct, kw_only=True):
    """GET /server_info. `vllm_config` has the numbers of the engine under vLLM's names, as an object or as its text."""

    version: str
    vllm_config: dict[str, dict[str, Any]] | str


class CacheReset(msgspec.Struct, kw_only=True):
    """POST /reset_prefix_cache."""

    success: bool


def server_info(model: ServedModel, query: Mapping[str, str]) -> ServerInfo:
    """The numbers of the engine, under vLLM's names."""
    form = query.get("config_format", "json")
    if form not in ("json", "text"):
        raise RequestError("config_format", form, "json or text")
    model.check_model(query.get("model"))
    info = model.front.info
    config: dict[str, dict[str, Any]] = {
        "model_config": {
            "model": info.model,
            "served_model_name": list(model.names),
            "max_model_len": info.max_model_len,
            "dtype": info.dtype,
            "quantization": info.quantization,
            "max_logprobs": info.max_logprobs,
        },
        "cache_config": {
            "block_size": info.block_size,
            "num_gpu_blocks": info.num_blocks,
            "cache_dtype": info.kv_cache_dtype,
        },
        "scheduler_config": {
            "max_num_seqs": info.max_num_seqs,
            "max_num_batched_tokens": info.max_num_batched_tokens,
            "policy": info.scheduling_policy,
        },
        "device_config": {"device": info.device, "backend": info.backend},
    }
    text = msgspec.json.encode(config).decode()
    return ServerInfo(version=__version__, vllm_config=config if form == "json" else text)


def tokenizer_info(model: ServedModel, query: Mapping[str, str]) -> TokenizerInfo:
    """The tokenizer's special tokens and chat template."""
    model.check_model(query.get("model"))
    tokenizer = model.tokenizer
    return TokenizerInfo(
        tokenizer_class=type(tokenizer).__name__,
        vocab_size=tokenizer.vocab_size,
        model_max_length=model.max_context,
        special_tokens=dict(tokenizer.special_tokens),
        chat_template=model.template.sources[0] if model.template is not None else None,
    )


def add_routes(app: Starlette, models: ModelSet, embeddings: Embeddings, routes: ScoreRoutes) -> None:
    """Add `/server_info`, `/tokenizer_info`, `/reset_prefix_cache` and `/invocations`."""
    by_field: dict[str, Callable[[dict[str, Any]], Awaitable[Any]]] = {
        "messages": models.bound(completions.chat),
        "prompt": models.bound(completions.complete),
        "input": embeddings.create,
        "text_1": routes.score,
        "query": routes.rerank,
    }

    async def invoke(body: dict[str, Any]) -> Any:
        """Call the route that fits the fields of the body, as SageMaker does."""
        for field, route in by_field.items():
            if body.get(field) is not None:
                return await route(body)
        raise RequestError("body", sorted(body)[:8], "an object with one of " + ", ".join(by_field))

    def reset() -> CacheReset:
        """Forget all cached prefixes that no running request holds."""
        for model in models.running:
            model.client.reset_prefix_cache()
        return CacheReset(success=True)

    routing.post(app, "/invocations", invoke, takes=InvocationRequest, gives=dict[str, Any])
    info, about = models.bound(server_info, wakes=False), models.bound(tokenizer_info, wakes=False)
    routing.get(app, "/server_info", info, gives=ServerInfo, query=("model", "config_format"))
    routing.get(app, "/tokenizer_info", about, gives=TokenizerInfo, query=("model",))
    routing.post(app, "/reset_prefix_cache", reset, gives=CacheReset)
