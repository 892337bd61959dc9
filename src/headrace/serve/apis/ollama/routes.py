"""Ollama's API: `/api/generate` and `/api/chat` as lines of JSON, and what tells of the one model that is served.

Requests become chats or completions of `serve.apis.openai.completions`'s; options that belong to loading a model are
told in `warnings`, for here the command line sets them. `serve.app` adds the routes.
"""

from __future__ import annotations

import hashlib
import time
from datetime import UTC, datetime
from typing import Any

import msgspec
from fastapi import FastAPI, Request
from starlette.responses import Response

from headrace import __version__
from headrace.protocol import bounds
from headrace.protocol.errors import HeadraceError, RequestError
from headrace.protocol.params import SamplingParams
from headrace.serve import routing
from headrace.serve.apis.ollama.replies import Asked, Lines, Options, failure, line, now, refuse
from headrace.serve.apis.openai.completions import OpenAI
from headrace.serve.apis.openai.embeddings import Embeddings
from headrace.serve.call import reply_forms, translation
from headrace.serve.call.parsing import Body, convert
from headrace.serve.errors import json_response
from headrace.serve.gates.streams import until_gone
from headrace.text.inputs import max_context

NDJSON = "application/x-ndjson"
STAYS = "the model is loaded as long as the server runs"
IGNORED = {
    "keep_alive": STAYS,
    "template": "prompts are put into the model's own chat template; raw takes them as they are",
    "truncate": "a prompt that does not fit is refused, not cut",
    "shift": "an answer ends where the context does",
}
LEVELS = {"low": "low", "medium": "medium", "high": "high", "max": "xhigh"}
NAMES = {"max_tokens": "options.num_predict", "response_format": "format"}
# Set when a server starts, not by a request.
LOADING = (
    "numa", "num_batch", "num_gpu", "main_gpu", "low_vram", "f16_kv", "logits_all", "vocab_only", "use_mmap",
    "use_mlock", "num_thread", "num_keep",
)  # fmt: skip


class UnservedError(HeadraceError):
    """Something of Ollama's that this server does not do."""

    status = 501
    code = "not_implemented"


class Function(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    name: str
    arguments: dict[str, Any] = {}
    index: int | None = None
    description: str | None = None


class Call(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    function: Function
    id: str | None = None
    type: str | None = None


class Message(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    role: str
    content: str | None = None
    thinking: str | None = None
    images: list[Any] | None = None
    tool_calls: list[Call] | None = None
    tool_name: str | None = None
    tool_call_id: str | None = None


class ChatRequest(Asked, forbid_unknown_fields=True, kw_only=True):
    """POST /api/chat."""

    messages: list[Message] | None = None
    tools: list[dict[str, Any]] | None = None


class GenerateRequest(Asked, forbid_unknown_fields=True, kw_only=True):
    """POST /api/generate."""

    prompt: str | None = None
    suffix: str | None = None
    system: str | None = None
    images: list[Any] | None = None
    context: list[int] | None = None
    raw: bool | None = None


class EmbedRequest(Body, forbid_unknown_fields=True, kw_only=True):
    """POST /api/embed, and under its older name /api/embeddings, which has one `prompt`."""

    model: str
    input: str | list[str] | None = None
    prompt: str | None = None
    truncate: bool | None = None
    dimensions: int | None = None
    options: dict[str, Any] | None = None


class ShowRequest(Body, forbid_unknown_fields=True, kw_only=True):
    """POST /api/show and /api/pull; `name` is the older word for `model`."""

    model: str | None = None
    name: str | None = None
    verbose: bool | None = None
    insecure: bool | None = None
    stream: bool | None = None


class Ollama:
    """The routes without HTTP."""

    def __init__(self, api: OpenAI) -> None:
        self.api = api
        self.embeddings = Embeddings(api)

    async def chat(self, body: dict[str, Any]) -> Lines | dict[str, Any]:
        """POST /api/chat; without messages, as Ollama's clients load a model, a dict that says that it is loaded."""
        asked = self._asked(ChatRequest, body)
        if not asked.messages:
            return self._loaded(asked, {"message": {"role": "assistant", "content": ""}})
        messages = [_message(message, f"messages[{index}]") for index, message in enumerate(asked.messages)]
        made = self._common(asked) | {"messages": messages}
        if asked.tools:
            made["tools"] = asked.tools
        with translation.told_as(NAMES, "options."):
            return Lines(await self.api.chat(made), asked, chat=True, ids=False)

    async def generate(self, body: dict[str, Any]) -> Lines | dict[str, Any]:
        """POST /api/generate; without a prompt, as Ollama's clients load a model, a dict that says so."""
        asked = self._asked(GenerateRequest, body)
        if asked.images:
            raise RequestError("images", "images", "left out: the models served here read text")
        if asked.suffix:
            raise RequestError("suffix", asked.suffix, "left out: headrace does not support it yet")
        if not asked.prompt:
            return self._loaded(asked, {"response": ""})
        made = self._common(asked)
        system = [{"role": "system", "content": asked.system}] if asked.system else []
        messages = [*system, {"role": "user", "content": asked.prompt}]
        with translation.told_as(NAMES, "options."):
            if not asked.raw and not asked.context:
                return Lines(await self.api.chat(made | {"messages": messages}), asked, chat=False, ids=True)
            if asked.raw:
                given = (await self.api.tokenize({"prompt": asked.prompt}))["tokens"]
            else:
                shape = {name: made.get(name) for name in ("chat_template_kwargs", "reasoning_effort")}
                _, given = await self.api.chat_prompt({"messages": messages} | shape)
            prompt = [*(asked.context or []), *given]
            for name in ("chat_template_kwargs", "reasoning_effort"):
                made.pop(name, None)
            made["logprobs"] = made.pop("top_logprobs", 0) if made.get("logprobs") else None
            # At least one, so that a prompt without room is told to be too long.
            made.setdefault("max_tokens", max(max_context(self.api.front.info) - len(prompt), 1))
            return Lines(await self.api.completion(made | {"prompt": prompt}), asked, chat=False, ids=not asked.raw)

    async def embed(self, body: dict[str, Any], older: bool) -> dict[str, Any]:
        """POST /api/embed: vectors of length 1. `older`: /api/embeddings, whose one vector has any length."""
        begun = time.monotonic()
        asked = convert(EmbedRequest, body, {"keep_alive": STAYS})
        self.api.card(self._name(asked.model))
        if asked.options:
            asked.warn("options", "ignored: none of them changes a vector")
        field = "prompt" if older else "input"
        given = getattr(asked, field)
        if given is None:
            raise RequestError(field, None, "a text" if older else "a text, or a list of texts")
        texts = [given] if isinstance(given, str) else given
        kept = None if asked.truncate is False else -1
        with translation.told_as({"prompt": field}):
            found = await self.embeddings.vectors(
                texts, dimensions=asked.dimensions, normalize=not older, field=field, truncate_prompt_tokens=kept
            )
        told = translation.warnings(asked)
        if older:
            return {"embedding": found.rows[0]} | told
        times = {"total_duration": int((time.monotonic() - begun) * 1e9), "load_duration": 0}
        return {"model": asked.model, "embeddings": found.rows, "prompt_eval_count": found.num_tokens} | times | told

    def tags(self) -> dict[str, Any]:
        """GET /api/tags."""
        return {"models": [self._card()]}

    def ps(self) -> dict[str, Any]:
        """GET /api/ps. The model never expires; the date is one that no client takes for the past."""
        more = {"expires_at": "9999-12-31T23:59:59Z", "size_vram": 0}
        return {"models": [self._card() | more | {"context_length": max_context(self.api.front.info)}]}

    def show(self, body: dict[str, Any]) -> dict[str, Any]:
        """POST /api/show."""
        asked = convert(ShowRequest, body)
        self.known(asked)
        info, card = self.api.front.info, self._card()
        tokenizer = self.api.front.tokenizer
        template = (tokenizer.chat_template if tokenizer is not None else None) or ""
        family = card["details"]["family"]
        abilities = [
            ("tools", "tools" in template),
            ("thinking", "<think>" in template or "enable_thinking" in template),
        ]
        return {
            "modelfile": f"FROM {self.api.model}\n",
            "parameters": "\n".join(f"{name} {value}" for name, value in self.api.defaults.items()),
            "template": template,
            "details": card["details"],
            "model_info": {
                "general.architecture": family,
                f"{family}.context_length": max_context(info),
                f"{family}.vocab_size": info.vocab_size,
            },
            "capabilities": ["completion", *(name for name, has in abilities if has)],
            "modified_at": card["modified_at"],
        } | translation.warnings(asked)

    def known(self, asked: ShowRequest) -> str:
        """The model that is asked for. Raises `RequestError` or `ModelNotFoundError`."""
        name = asked.model or asked.name
        if not name:
            raise RequestError("model", name, "the name of a model")
        self.api.card(self._name(name))
        return name

    def _card(self) -> dict[str, Any]:
        api, info = self.api, self.api.front.info
        family = info.model.rstrip("/").rpartition("/")[2] or info.model
        details = {
            "parent_model": "",
            "format": "headrace",
            "family": family,
            "families": [family],
            "parameter_size": "",
            "quantization_level": info.quantization or info.dtype,
        }
        return {
            "name": api.model,
            "model": api.model,
            "modified_at": datetime.fromtimestamp(api.created, UTC).isoformat().replace("+00:00", "Z"),
            "size": 0,
            # Of the name: what it stands for is fixed while the server runs.
            "digest": hashlib.sha256(api.model.encode()).hexdigest(),
            "details": details,
        }

    def _name(self, name: str) -> str:
        """Ollama's clients add the tag that Ollama takes for granted."""
        bare = name.removesuffix(":latest")
        return bare if name != self.api.model and bare == self.api.model else name

    def _asked(self, kind: type[Any], body: dict[str, Any]) -> Any:
        options = body.get("options")
        told = {}
        if isinstance(options, dict):
            told = {name: value for name, value in options.items() if name in LOADING}
            body = body | {"options": {name: value for name, value in options.items() if name not in LOADING}}
        asked = convert(kind, body, IGNORED)
        for name in told:
            asked.warn(f"options.{name}", "ignored: set when the server starts")
        with translation.told_as(NAMES, "options."):
            # Also where nothing is asked but to load the model.
            SamplingParams(**translation.sampling(asked.options or Options(), "options."))
        if asked.top_logprobs is not None:
            bounds.check("logprobs", asked.top_logprobs, "top_logprobs")
        self.api.card(self._name(asked.model))
        return asked

    def _loaded(self, asked: Asked, said: dict[str, Any]) -> dict[str, Any]:
        head = {"model": asked.model, "created_at": now()}
        return head | said | {"done": True, "done_reason": "load"} | translation.warnings(asked)

    def _common(self, asked: Asked) -> dict[str, Any]:
        """The fields of OpenAI's that both ways to ask share; adds what is ignored to the warnings."""
        options = asked.options or Options()
        made = {"model": self._name(asked.model), "stream": asked.stream is not False} | translation.sampling(
            options, "options."
        )
        context = max_context(self.api.front.info)
        if options.num_ctx is not None and options.num_ctx != context:
            asked.warn("options.num_ctx", f"ignored: the context has {context} tokens, as the server was started")
        if options.tfs_z not in (None, 1.0):
            asked.warn("options.tfs_z", "ignored: Ollama itself dropped it")
        if options.penalize_newline is False:
            asked.warn("options.penalize_newline", "ignored: penalties know no newline")
        if asked.logprobs:
            made |= {"logprobs": True, "top_logprobs": asked.top_logprobs or 0}
        elif asked.top_logprobs:
            asked.warn("top_logprobs", "ignored without logprobs")
        if asked.think is not None:
            made["chat_template_kwargs"] = {"enable_thinking": bool(asked.think)}
            if isinstance(asked.think, str):
                made["reasoning_effort"] = LEVELS[asked.think]
        if asked.format == "json":
            made["response_format"] = {"type": "json_object"}
        elif isinstance(asked.format, dict):
            schema = {"name": "format", "schema": asked.format, "strict": True}
            made["response_format"] = {"type": "json_schema", "json_schema": schema}
        elif asked.format:
            raise RequestError("format", asked.format, 'left out, "json", or a JSON schema')
        return made


def _message(message: Message, field: str) -> dict[str, Any]:
    if message.images:
        raise RequestError(f"{field}.images", "images", "left out: the models served here read text")
    made: dict[str, Any] = {"role": message.role, "content": message.content or ""}
    if message.thinking:
        made["reasoning_content"] = message.thinking
    if message.tool_calls:
        made["tool_calls"] = [
            {
                "id": call.id or f"call_{index}",
                "type": "function",
                "function": {"name": call.function.name, "arguments": call.function.arguments},
            }
            for index, call in enumerate(message.tool_calls)
        ]
    if message.tool_name:
        made["name"] = message.tool_name
    if message.tool_call_id:
        made["tool_call_id"] = message.tool_call_id
    return made


def add_routes(app: FastAPI, api: OpenAI) -> None:
    """Add `/` and `/api/...`."""
    ollama = Ollama(api)

    async def send(request: Request, made: Lines | dict[str, Any]) -> Any:
        if isinstance(made, dict):
            return json_response(made)
        return await routing.deliver(request, made, NDJSON, lambda error: line(failure(error)))

    async def root(request: Request) -> Response:
        """Something answers here."""
        return Response("headrace is running\n", media_type="text/plain")

    async def chat(request: Request) -> Any:
        """Ollama's chat."""
        return await send(request, await ollama.chat(await routing.body(request)))

    async def generate(request: Request) -> Any:
        """Ollama's completion of one prompt."""
        return await send(request, await ollama.generate(await routing.body(request)))

    async def embed(request: Request) -> Any:
        """Vectors of texts."""
        work = ollama.embed(await routing.body(request), older=False)
        return json_response(await until_gone(request.receive, work))

    async def embeddings(request: Request) -> Any:
        """The vector of one text."""
        work = ollama.embed(await routing.body(request), older=True)
        return json_response(await until_gone(request.receive, work))

    async def tags(request: Request) -> Response:
        """The models that are there."""
        return json_response(ollama.tags())

    async def ps(request: Request) -> Response:
        """The models that are loaded."""
        return json_response(ollama.ps())

    async def version(request: Request) -> Response:
        """headrace's version."""
        return json_response({"version": __version__})

    async def show(request: Request) -> Response:
        """One model."""
        return json_response(ollama.show(await routing.body(request)))

    async def pull(request: Request) -> Response:
        """Nothing to do for the model that is served; others can not be had."""
        asked = convert(ShowRequest, await routing.body(request))
        ollama.known(asked)
        done = {"status": "success"} | translation.warnings(asked)
        return json_response(done) if asked.stream is False else Response(line(done), media_type=NDJSON)

    async def unserved(request: Request) -> Response:
        """Not done by this server, whose one model is named when it starts."""
        raise UnservedError(f"{request.url.path}: not done here; the model is named when the server starts")

    # HEAD on the root is how Ollama's own client asks whether somebody is there.
    routing.get(app, "/", root, refuse, media_type="text/plain")
    routing.post(app, "/api/chat", chat, refuse, takes=ChatRequest, gives=reply_forms.OllamaSaid, streams=NDJSON)
    routing.post(
        app, "/api/generate", generate, refuse, takes=GenerateRequest, gives=reply_forms.OllamaGenerated, streams=NDJSON
    )
    routing.post(app, "/api/embed", embed, refuse, takes=EmbedRequest, gives=reply_forms.OllamaEmbedded)
    routing.post(app, "/api/embeddings", embeddings, refuse, takes=EmbedRequest, gives=reply_forms.OllamaVector)
    routing.post(app, "/api/show", show, refuse, takes=ShowRequest, gives=reply_forms.OllamaShown)
    routing.post(app, "/api/pull", pull, refuse, takes=ShowRequest, gives=reply_forms.OllamaPulled, streams=NDJSON)
    routing.get(app, "/api/tags", tags, refuse, gives=reply_forms.OllamaModels)
    routing.get(app, "/api/ps", ps, refuse, gives=reply_forms.OllamaModels)
    routing.get(app, "/api/version", version, refuse, gives=reply_forms.Version)
    for name in ("push", "create", "copy"):
        routing.post(app, f"/api/{name}", unserved, refuse, unserved=True)
    routing.add(app, "/api/delete", unserved, ("DELETE",), refuse, unserved=True)
