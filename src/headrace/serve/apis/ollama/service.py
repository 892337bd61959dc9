"""Ollama's API: generate, chat, embed, and what describes the one model that is served.

Options that belong to loading a model are listed in `warnings`: here the command line sets them.
"""

from __future__ import annotations

import functools
import hashlib
import time
from datetime import UTC, datetime
from typing import Any, TypeVar

import msgspec
from starlette.applications import Starlette
from starlette.responses import Response

from headrace import __version__
from headrace.protocol import bounds
from headrace.protocol.constraints import StructuredOutputs
from headrace.protocol.errors import RequestError, UnsupportedError
from headrace.protocol.parameters import OLLAMA
from headrace.protocol.params import SamplingParams
from headrace.serve import routing
from headrace.serve.apis.ollama import reply
from headrace.serve.apis.ollama.reply import API, NDJSON, OllamaAnswer, line, now
from headrace.serve.apis.ollama.request import (
    ChatRequest,
    EmbedRequest,
    GenerateRequest,
    GenerationRequest,
    Options,
    ShowRequest,
    message_of,
)
from headrace.serve.call.call import ChatCall, TextCall, spelled
from headrace.serve.call.embedding import vectors
from headrace.serve.call.parsing import Warnings, convert
from headrace.serve.call.sampling import llama_sampling_of, spelling_of
from headrace.serve.call.schema import UNSUPPORTED
from headrace.serve.call.service import ServedModel
from headrace.serve.errors import CallError
from headrace.text.templates import ChatMessage
from headrace.text.tools.choice import ToolUse

STAYS = "the model is loaded as long as the server runs"
IGNORED = {
    "keep_alive": STAYS,
    "template": "prompts are put into the model's own chat template; raw takes them as they are",
    "truncate": "a prompt that does not fit is refused, not cut",
    "shift": "an answer ends where the context does",
}
LEVELS = {"low": "low", "medium": "medium", "high": "high", "max": "xhigh"}
# The engine's fields, and those of Ollama's requests that set them.
SPELLING = spelling_of(OLLAMA, "options.") | {
    "structured_outputs": "format",
    "reasoning_effort": "think",
    "logprobs": "top_logprobs",
    "tool_choice": "tools",
}
# Set when a server starts, not by a request.
LOADING = (
    "numa", "num_batch", "num_gpu", "main_gpu", "low_vram", "f16_kv", "logits_all", "vocab_only", "use_mmap",
    "use_mlock", "num_thread", "num_keep",
)  # fmt: skip


T = TypeVar("T", bound=GenerationRequest)


class Ollama:
    """The routes without HTTP; each takes a body, if it takes anything."""

    def __init__(self, model: ServedModel) -> None:
        self.model = model

    async def chat(self, body: dict[str, Any]) -> OllamaAnswer | reply.LoadReply:
        """Ollama's chat.

        Without messages, as Ollama's clients load a model, the reply says that it is loaded.
        """
        request = self._read(ChatRequest, body)
        if not request.messages:
            return _loaded(request, message=reply.ReplyMessage(content=""))
        bounds.check("messages", request.messages)
        messages = [message_of(turn, f"messages[{index}]") for index, turn in enumerate(request.messages)]
        call = ChatCall(
            **self._fields(request),
            **_template_fields(request),
            messages=messages,
            tools=ToolUse.of(request.tools, None, True),
            spelling=SPELLING | {"prompt": "messages"},
        )
        return OllamaAnswer(await self.model.chat(call), request, chat=True, ids=False)

    async def generate(self, body: dict[str, Any]) -> OllamaAnswer | reply.LoadReply:
        """Ollama's completion of one prompt.

        Without a prompt, as Ollama's clients load a model, the reply says so.
        """
        request = self._read(GenerateRequest, body)
        if request.images:
            raise UnsupportedError("images", "images", "the models served here read text")
        if request.suffix:
            raise UnsupportedError("suffix", request.suffix, UNSUPPORTED["suffix"][1])
        if not request.prompt:
            return _loaded(request, response="")
        fields = self._fields(request) | {"spelling": SPELLING | {"messages": "prompt"}}
        messages = [ChatMessage(role="system", content=request.system)] if request.system else []
        chat = ChatCall(
            **fields,
            **_template_fields(request),
            messages=[*messages, ChatMessage(role="user", content=request.prompt)],
        )
        if not request.raw and not request.context:
            return OllamaAnswer(await self.model.chat(chat), request, chat=False, ids=True)
        if request.raw:
            token_ids = await self.model.encode(request.prompt, True)
        else:
            # What the template does not honour is no warning of this call, whose prompt is token ids.
            _, token_ids = await self.model.chat_prompt(msgspec.structs.replace(chat, warnings=Warnings()))
        call = TextCall(**fields, prompts=[[*(request.context or []), *token_ids]], fills_context=True)
        return OllamaAnswer(await self.model.complete(call), request, chat=False, ids=not request.raw)

    async def embed(self, body: dict[str, Any], older: bool = False) -> reply.EmbedReply | reply.EmbeddingReply:
        """Vectors of texts.

        They have the length 1. `older`: for /api/embeddings, whose one vector has any length.
        """
        start_time = time.monotonic()
        request = convert(EmbedRequest, body, {"keep_alive": STAYS})
        self._take_name(request)
        if request.options:
            request.warn("options", "ignored: none of them changes a vector")
        field = "prompt" if older else "input"
        value = getattr(request, field)
        if value is None:
            raise RequestError(field, None, "a text" if older else "a text, or a list of texts")
        with spelled({"prompt": field}):
            embedded = await vectors(
                self.model.front,
                [value] if isinstance(value, str) else value,
                dimensions=request.dimensions,
                normalize=not older,
                field=field,
                truncate_prompt_tokens=None if request.truncate is False else -1,
            )
        warnings = request.warnings.reply()
        if older:
            return reply.EmbeddingReply(embedding=embedded.rows[0], warnings=warnings)
        return reply.EmbedReply(
            model=request.model,
            embeddings=embedded.rows,
            prompt_eval_count=embedded.num_tokens,
            total_duration=int((time.monotonic() - start_time) * 1e9),
            load_duration=0,
            warnings=warnings,
        )

    def tags(self) -> reply.OllamaModels:
        """The models that are there."""
        return reply.OllamaModels(models=[self._card(name) for name in self.model.names])

    def ps(self) -> reply.OllamaModels:
        """The models that are loaded.

        The model never expires; the date is one that no client takes for the past.
        """
        card = self._card()
        card.expires_at, card.size_vram = "9999-12-31T23:59:59Z", 0
        card.context_length = self.model.max_context
        return reply.OllamaModels(models=[card])

    def show(self, body: dict[str, Any]) -> reply.ShowReply:
        """One model."""
        request = convert(ShowRequest, body)
        self._check_name(request)
        info, card = self.model.front.info, self._card()
        tokenizer = self.model.front.tokenizer
        template = (tokenizer.chat_template if tokenizer is not None else None) or ""
        family = card.details.family
        abilities = [
            ("tools", "tools" in template),
            ("thinking", "<think>" in template or "enable_thinking" in template),
        ]
        return reply.ShowReply(
            modelfile=f"FROM {self.model.name}\n",
            parameters="\n".join(f"{name} {value}" for name, value in self.model.defaults.items()),
            template=template,
            details=card.details,
            model_info={
                "general.architecture": family,
                f"{family}.context_length": self.model.max_context,
                f"{family}.vocab_size": info.vocab_size,
            },
            capabilities=["completion", *(name for name, has in abilities if has)],
            modified_at=card.modified_at,
            warnings=request.warnings.reply(),
        )

    def pull(self, body: dict[str, Any]) -> reply.PullReply | Response:
        """Nothing to do for the model that is served; others can not be had."""
        request = convert(ShowRequest, body)
        self._check_name(request)
        done = reply.PullReply(warnings=request.warnings.reply())
        return done if request.stream is False else Response(line(done), media_type=NDJSON)

    def _check_name(self, request: ShowRequest) -> None:
        """Raises `RequestError` for a request that names no model, and `ModelNotFoundError` for one not served."""
        name = request.model or request.name
        if not name:
            raise RequestError("model", name, "the name of a model")
        self.model.check_model(self._name(name), is_request=False)

    def _card(self, name: str | None = None) -> reply.OllamaModel:
        model, info = self.model, self.model.front.info
        family = info.model.rstrip("/").rpartition("/")[2] or info.model
        details = reply.ModelDetails(
            parent_model="",
            format="headrace",
            family=family,
            families=[family],
            parameter_size="",
            quantization_level=info.quantization or info.dtype,
        )
        return reply.OllamaModel(
            name=name or model.name,
            model=name or model.name,
            modified_at=datetime.fromtimestamp(model.created, UTC).isoformat().replace("+00:00", "Z"),
            size=0,
            # Of the name: what it stands for is fixed while the server runs.
            digest=hashlib.sha256(model.name.encode()).hexdigest(),
            details=details,
        )

    def _take_name(self, request: EmbedRequest | GenerationRequest) -> None:
        """Give the request the model's true name, where any is taken. Raises `ModelNotFoundError` elsewhere."""
        name = self._name(request.model)
        self.model.check_model(name)
        if name not in self.model.names:
            request.model = self.model.name

    def _name(self, name: str) -> str:
        """Ollama's clients add the tag that Ollama takes for granted."""
        bare = name.removesuffix(":latest")
        return bare if name not in self.model.names and bare in self.model.names else name

    def _read(self, kind: type[T], body: dict[str, Any]) -> T:
        """The body of a generation, its options checked. Raises `RequestError`, `ModelNotFoundError`."""
        options = body.get("options")
        loading: list[str] = []
        if isinstance(options, dict):
            loading = [name for name in options if name in LOADING]
            body = body | {"options": {name: value for name, value in options.items() if name not in LOADING}}
        request = convert(kind, body, IGNORED)
        for name in loading:
            request.warn(f"options.{name}", "ignored: set when the server starts")
        with spelled(SPELLING):
            # Also where the request only loads the model.
            SamplingParams(**llama_sampling_of(request.options or Options(), OLLAMA, "options."))
        if request.top_logprobs is not None:
            bounds.check("logprobs", request.top_logprobs, "top_logprobs")
        self._take_name(request)
        return request

    def _fields(self, request: GenerationRequest) -> dict[str, Any]:
        """The fields of a `Call` but its spelling; adds what is ignored to the warnings. Raises `RequestError`."""
        options = request.options or Options()
        sampling = llama_sampling_of(options, OLLAMA, "options.")
        context = self.model.max_context
        if options.num_ctx is not None and options.num_ctx != context:
            request.warn("options.num_ctx", f"ignored: the context has {context} tokens, as the server was started")
        if options.tfs_z not in (None, 1.0):
            request.warn("options.tfs_z", "ignored: Ollama itself dropped it")
        if options.penalize_newline is False:
            request.warn("options.penalize_newline", "ignored: penalties know no newline")
        if request.logprobs:
            sampling["logprobs"] = request.top_logprobs or 0
        elif request.top_logprobs:
            request.warn("top_logprobs", "ignored without logprobs")
        form = None
        with spelled(SPELLING):
            if request.format == "json":
                form = StructuredOutputs(json_object=True)
            elif isinstance(request.format, dict):
                form = StructuredOutputs(json=request.format)
            elif request.format:
                raise RequestError("format", request.format, 'left out, "json", or a JSON schema')
        return {
            "model": self._name(request.model),
            "sampling": sampling,
            "form": form,
            "stream": request.stream is not False,
            "cuts_max_tokens": True,
            "warnings": request.warnings,
        }


def _loaded(request: GenerationRequest, **answer: Any) -> reply.LoadReply:
    """Return the reply that says that the model is loaded; `answer` is its empty answer."""
    return reply.LoadReply(model=request.model, created_at=now(), warnings=request.warnings.reply(), **answer)


def _template_fields(request: GenerationRequest) -> dict[str, Any]:
    """The fields of a `ChatCall` that `think` sets."""
    if request.think is None:
        return {}
    effort = LEVELS[request.think] if isinstance(request.think, str) else None
    return {"template_variables": {"enable_thinking": bool(request.think)}, "reasoning_effort": effort}


def add_routes(app: Starlette, model: ServedModel) -> None:
    """Add `/` and `/api/...`."""
    ollama = Ollama(model)

    def root() -> Response:
        """Something answers here."""
        return Response("headrace is running\n", media_type="text/plain")

    def version() -> routing.Version:
        """headrace's version."""
        return routing.Version(version=__version__)

    def unserved(path: str) -> Response:
        """Not done by this server, whose one model is named when it starts."""
        instead = "the model is named when the server starts: headrace serve MODEL"
        raise CallError(501, "not_implemented", f"{path}: not supported here; {instead}")

    # Ollama's own client sends HEAD to the root to see whether a server runs.
    routing.get(app, "/", root, API, media_type="text/plain")
    lines: dict[str, Any] = {"api": API, "streams": NDJSON}
    chunks: tuple[Any, ...] = (reply.ChatChunk, reply.ChatReply)
    routing.post(app, "/api/chat", ollama.chat, takes=ChatRequest, gives=reply.ChatReply, chunks=chunks, **lines)
    chunks = (reply.GenerateChunk, reply.GenerateReply)
    routing.post(
        app, "/api/generate", ollama.generate, takes=GenerateRequest, gives=reply.GenerateReply, chunks=chunks, **lines
    )
    routing.post(app, "/api/embed", ollama.embed, API, takes=EmbedRequest, gives=reply.EmbedReply)
    older: dict[str, Any] = {"gives": reply.EmbeddingReply, "summary": "The vector of one text."}
    routing.post(app, "/api/embeddings", functools.partial(ollama.embed, older=True), API, takes=EmbedRequest, **older)
    routing.post(app, "/api/show", ollama.show, API, takes=ShowRequest, gives=reply.ShowReply)
    routing.post(
        app, "/api/pull", ollama.pull, takes=ShowRequest, gives=reply.PullReply, chunks=(reply.PullReply,), **lines
    )
    routing.get(app, "/api/tags", ollama.tags, API, gives=reply.OllamaModels)
    routing.get(app, "/api/ps", ollama.ps, API, gives=reply.OllamaModels)
    routing.get(app, "/api/version", version, API, gives=routing.Version)
    for method, name in (("POST", "push"), ("POST", "create"), ("POST", "copy"), ("DELETE", "delete")):
        path = f"/api/{name}"
        routing.add(app, path, functools.partial(unserved, path), (method,), API, unserved=True)
