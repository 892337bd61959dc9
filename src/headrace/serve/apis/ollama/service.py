"""Ollama's API: generate, chat, embed, and the descriptions of the served models.

Options for loading a model are listed in `warnings`: here the command line sets them.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any, Literal, TypeVar

import msgspec
from msgspec import UNSET, UnsetType
from starlette.applications import Starlette
from starlette.responses import Response

from headrace.protocol import bounds
from headrace.protocol.constraints import StructuredOutputs
from headrace.protocol.errors import RequestError, UnsupportedError
from headrace.protocol.parameters import OLLAMA, spelling_of
from headrace.serve import routing
from headrace.serve.apis.ollama import reply
from headrace.serve.apis.ollama.library import Library
from headrace.serve.apis.ollama.library import add_routes as add_library_routes
from headrace.serve.apis.ollama.reply import API, NDJSON, OllamaAnswer, now
from headrace.serve.apis.ollama.request import (
    ChatRequest,
    EmbedRequest,
    GenerateRequest,
    GenerationRequest,
    Options,
    marks_of,
    messages_of,
    read_options,
    warn_of,
)
from headrace.serve.call.call import ChatCall, SamplingFields, TextCall, spelled
from headrace.serve.call.embedding import VectorOptions, vectors
from headrace.serve.call.models import ModelSet
from headrace.serve.call.parsing import Warnings, convert, seconds_of
from headrace.serve.call.schema import UNSUPPORTED
from headrace.serve.call.service import ServedModel
from headrace.text.messages import ChatMessage
from headrace.text.pictures.marks import Pictures
from headrace.text.tools.choice import ToolUse

STAYS = "the model is loaded as long as the server runs"
IGNORED = {
    "template": "prompts are put into the model's own chat template; raw takes them as they are",
    "truncate": "a prompt that does not fit is refused, not cut",
    "shift": "an answer ends where the context does",
}
# The engine's fields, and the fields of Ollama's requests that set them.
SPELLING = spelling_of(OLLAMA, "options.") | {
    "structured_outputs": "format",
    "reasoning_effort": "think",
    "logprobs": "top_logprobs",
    "tool_choice": "tools",
}


OWN = SamplingFields.own_defaults(OLLAMA)
T = TypeVar("T", bound=GenerationRequest)


class Ollama:
    """The routes without HTTP; each takes a body, if it takes anything."""

    def __init__(self, model: ServedModel) -> None:
        self.model = model

    async def chat(self, body: dict[str, Any]) -> OllamaAnswer | reply.LoadReply:
        """Ollama's chat.

        Without messages, as Ollama's clients load a model, the reply states that it is loaded.
        """
        request = self._read(ChatRequest, body)
        if not request.messages:
            return _loaded(request, message=reply.ReplyMessage(content=""))
        pictures = Pictures()
        messages = messages_of(request.messages, pictures)
        call = self._chat_call(request, messages, SPELLING | {"prompt": "messages"})
        call.pictures = pictures
        call.tools = ToolUse.of(request.tools, None, True)
        return OllamaAnswer(await self.model.chat(call), request, chat=True, ids=False)

    async def generate(self, body: dict[str, Any]) -> OllamaAnswer | reply.LoadReply:
        """Ollama's completion of one prompt.

        Without a prompt, as Ollama's clients load a model, the reply states that it is loaded.
        """
        request = self._read(GenerateRequest, body)
        pictures = Pictures()
        marks = marks_of(request.images or [], "images", pictures, True)
        if request.images and (request.raw or request.context):
            raise UnsupportedError("images", "images", "pictures go with a prompt alone, without raw and context")
        if request.suffix:
            raise UnsupportedError("suffix", request.suffix, UNSUPPORTED["suffix"][1])
        if not request.prompt:
            return _loaded(request, response="")
        messages = [ChatMessage(role="system", content=request.system)] if request.system else []
        messages.append(ChatMessage(role="user", content=marks + request.prompt))
        chat = self._chat_call(request, messages, SPELLING | {"messages": "prompt"})
        chat.pictures = pictures
        if not request.raw and not request.context:
            return OllamaAnswer(await self.model.chat(chat), request, chat=False, ids=True)
        if request.raw:
            token_ids = await self.model.encode(request.prompt, True)
        else:
            # Fields that the template does not honour are no warning here: the prompt of this call is token ids.
            _, token_ids = await self.model.chat_prompt(msgspec.structs.replace(chat, warnings=Warnings()))
        call = TextCall(
            model=chat.model,
            sampling=chat.sampling,
            own_defaults=OWN,
            form=chat.form,
            stream=chat.stream,
            cuts_max_tokens=True,
            warnings=request.warnings,
            spelling=chat.spelling,
            prompts=[[*(request.context or []), *token_ids]],
            fills_context=True,
        )
        return OllamaAnswer(await self.model.complete(call), request, chat=False, ids=not request.raw)

    async def embed(self, body: dict[str, Any], older: bool = False) -> reply.EmbedReply | reply.EmbeddingReply:
        """Vectors of texts.

        They have the length 1. `older`: for /api/embeddings, whose one vector has any length.
        """
        start_time = time.monotonic()
        request = convert(EmbedRequest, body)
        self._take_name(request)
        self._stay(request)
        if request.options:
            request.warn("options", "ignored: none of them changes a vector")
        field = "prompt" if older else "input"
        value = getattr(request, field)
        if value is None:
            raise RequestError(field, None, "a text" if older else "a text, or a list of texts")
        if value == [] and not older:
            # By such a body Ollama's clients load the model.
            return reply.EmbedReply(
                model=request.model,
                embeddings=[],
                prompt_eval_count=0,
                total_duration=int((time.monotonic() - start_time) * 1e9),
                load_duration=0,
                warnings=request.warnings.reply(),
            )
        with spelled({"prompt": field}):
            most = None if request.truncate is False else -1
            adapter = self.model.adapter(request.model)
            options = VectorOptions(
                None, request.dimensions, normalize=not older, truncate_prompt_tokens=most, adapter=adapter
            )
            embedded = await vectors(self.model.front, [value] if isinstance(value, str) else value, options, field)
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

    async def older_embed(self, body: dict[str, Any]) -> reply.EmbedReply | reply.EmbeddingReply:
        """Return the vector of one text, for /api/embeddings."""
        return await self.embed(body, older=True)

    def _take_name(self, request: EmbedRequest | GenerationRequest) -> None:
        """Put the model's true name into the request, where the server takes any name. Raises `ModelNotFoundError`
        elsewhere."""
        name = self._name(request.model)
        self.model.check_model(name)
        if name not in self.model.names and name not in self.model.adapters:
            request.model = self.model.name

    def _stay(self, request: EmbedRequest | GenerationRequest) -> None:
        """Note the time that the model must stay loaded. Raises `RequestError`."""
        seconds = seconds_of(request.keep_alive)
        if seconds is not None and self.model.stays_loaded:
            request.warn("keep_alive", f"ignored: {STAYS}")
        elif seconds is not None:
            self.model.keep_alive = seconds

    def _name(self, name: str) -> str:
        """Return a name without the tag `latest`, which Ollama's clients add."""
        bare = name.removesuffix(":latest")
        known = {*self.model.names, *self.model.adapters}
        return bare if name not in known and bare in known else name

    def _read(self, kind: type[T], body: dict[str, Any]) -> T:
        """Return the body of a generation, its options checked. Raises `RequestError`, `ModelNotFoundError`."""
        request = read_options(kind, body, "options", IGNORED)
        with spelled(SPELLING):
            # Checked also where the request only loads the model.
            SamplingFields.of(request.options or Options(), OLLAMA, "options.").params()
        if request.top_logprobs is not None:
            bounds.check("logprobs", request.top_logprobs, "top_logprobs")
        self._take_name(request)
        self._stay(request)
        return request

    def _sampling(self, request: GenerationRequest) -> SamplingFields:
        """Return the sampling parameters of a request; ignored fields are added to the warnings. Raises
        `RequestError`."""
        options = request.options or Options()
        sampling = SamplingFields.of(options, OLLAMA, "options.")
        context = self.model.max_context
        if options.num_ctx is not None and options.num_ctx != context:
            request.warn("options.num_ctx", f"ignored: the context has {context} tokens, as the server was started")
        warn_of(options, "options", request)
        if request.logprobs:
            sampling.logprobs = request.top_logprobs or 0
        elif request.top_logprobs:
            request.warn("top_logprobs", "ignored without logprobs")
        return sampling

    def _chat_call(
        self, request: GenerationRequest, messages: list[ChatMessage], spelling: Mapping[str, str]
    ) -> ChatCall:
        """Return the chat of a request, without tools. Raises `RequestError`."""
        return ChatCall(
            model=self._name(request.model),
            sampling=self._sampling(request),
            own_defaults=OWN,
            form=_form(request.format),
            stream=request.stream is not False,
            cuts_max_tokens=True,
            warnings=request.warnings,
            spelling=spelling,
            messages=messages,
            thinks=None if request.think is None else bool(request.think),
            reasoning_effort=request.think if isinstance(request.think, str) else None,
        )


def _form(value: str | dict[str, Any] | None) -> StructuredOutputs | None:
    """Return the form of an answer that `format` requires. Raises `RequestError`."""
    with spelled(SPELLING):
        if value == "json":
            return StructuredOutputs(json_object=True)
        if isinstance(value, dict):
            return StructuredOutputs(json=value)
    if value:
        raise RequestError("format", value, 'left out, "json", or a JSON schema')
    return None


def _loaded(
    request: GenerationRequest,
    message: reply.ReplyMessage | UnsetType = UNSET,
    response: str | UnsetType = UNSET,
    done_reason: Literal["load", "unload"] = "load",
) -> reply.LoadReply:
    """Return the reply that states that the model is loaded; `message` or `response` is its empty answer."""
    return reply.LoadReply(
        model=request.model,
        created_at=now(),
        message=message,
        response=response,
        done_reason=done_reason,
        warnings=request.warnings.reply(),
    )


def add_routes(app: Starlette, models: ModelSet, max_blob_bytes: int | None = None) -> None:
    """Add `/` and `/api/...`."""
    ollama, library = models.bind(Ollama), Library(models)

    def root() -> Response:
        """Something answers here."""
        return Response("headrace is running\n", media_type="text/plain")

    async def unloaded(
        body: dict[str, Any],
        kind: type[T],
        message: reply.ReplyMessage | UnsetType = UNSET,
        response: str | UnsetType = UNSET,
    ) -> reply.LoadReply | None:
        """Unload the model where a request without a prompt has a `keep_alive` of 0, as Ollama's clients send it;
        return None for other requests."""
        if body.get("prompt") or body.get("messages") or body.get("keep_alive") in (None, ""):
            return None
        request = convert(kind, body, IGNORED)
        if seconds_of(request.keep_alive) != 0 or models.files is None:
            return None
        await library.unload(request.model)
        return _loaded(request, message, response, "unload")

    async def chat(body: dict[str, Any]) -> OllamaAnswer | reply.LoadReply:
        message = reply.ReplyMessage(content="")
        return await unloaded(body, ChatRequest, message=message) or await ollama.chat(body)

    async def generate(body: dict[str, Any]) -> OllamaAnswer | reply.LoadReply:
        return await unloaded(body, GenerateRequest, response="") or await ollama.generate(body)

    # Ollama's own client sends HEAD to the root to see whether a server runs.
    routing.get(app, "/", root, API, media_type="text/plain")
    lines: dict[str, Any] = {"api": API, "streams": NDJSON, "summary": "Ollama's chat."}
    chunks: tuple[Any, ...] = (reply.ChatChunk, reply.ChatReply)
    routing.post(app, "/api/chat", chat, takes=ChatRequest, gives=reply.ChatReply, chunks=chunks, **lines)
    lines["summary"], chunks = "Ollama's completion of one prompt.", (reply.GenerateChunk, reply.GenerateReply)
    routing.post(
        app, "/api/generate", generate, takes=GenerateRequest, gives=reply.GenerateReply, chunks=chunks, **lines
    )
    routing.post(app, "/api/embed", ollama.embed, API, takes=EmbedRequest, gives=reply.EmbedReply)
    older: dict[str, Any] = {"gives": reply.EmbeddingReply, "summary": "The vector of one text."}
    routing.post(app, "/api/embeddings", ollama.older_embed, API, takes=EmbedRequest, **older)
    add_library_routes(app, models, library, max_blob_bytes)
