"""Ollama's routes for the models themselves: the lists of all models and of loaded ones; create, copy, delete and pull.

Without a models folder they describe the one model, and refuse all changes. Knows the folder by `ModelSet` only.
"""

from __future__ import annotations

import asyncio
import functools
import hashlib
import json
import re
from collections.abc import AsyncGenerator, AsyncIterator, Mapping
from datetime import UTC, datetime, timedelta
from typing import Any

from msgspec import UNSET
from starlette.applications import Starlette
from starlette.responses import Response

from headrace.engine.library.model_facts import ModelFacts
from headrace.engine.library.model_folder import ModelFolder, Progress, plain_name
from headrace.engine.library.model_settings import ModelSettings
from headrace.protocol import bounds
from headrace.protocol.errors import ModelNotFoundError, RequestError, UnsupportedError
from headrace.protocol.parameters import OLLAMA, names_in, spelling_of
from headrace.serve import routing
from headrace.serve.apis.ollama import reply
from headrace.serve.apis.ollama.reply import API, NDJSON, line
from headrace.serve.apis.ollama.request import CopyRequest, CreateRequest, Options, ShowRequest, read_options, warn_of
from headrace.serve.apis.ollama.uploads import Uploads
from headrace.serve.call.call import SamplingFields, spelled
from headrace.serve.call.models import ModelEntry, ModelSet, Running
from headrace.serve.call.parsing import WarningLines, convert
from headrace.serve.errors import CallError
from headrace.serve.storage.space import storing
from headrace.text.templates import check_source

OLLAMA_VERSION = "0.21.0"
"""The version of Ollama whose API this one is; Ollama's clients compare it with the one that they need."""
NO_FOLDER = "the model is named when the server starts: headrace serve MODEL; --models-dir names a folder of models"
NEVER = "9999-12-31T23:59:59Z"
"""The date for a model that never expires; no client takes it for the past."""
SHAPING = {
    "messages": "send them in a request",
    "quantize": "headrace quantize writes quantised checkpoints and GGUF files",
    "modelfile": "send files, or a model in from",
    "path": "send files, or a model in from",
}
"""Fields of Ollama's create that are not supported, each with the alternative."""
GO_TEMPLATE = re.compile(r"\{\{-?\s*([.$]|(if|range|with|define|block|template)\b)")
"""The beginning of an action in Go's templates, which Jinja does not take."""
OLLAMA_NAMES = names_in(OLLAMA)


class ProgressAnswer(routing.Readable):
    """Lines about work as it goes on; without `stream` the last one alone. The work ends when the caller leaves."""

    media_type = NDJSON

    def __init__(self, work: AsyncGenerator[Progress], stream: bool, warnings: WarningLines) -> None:
        super().__init__(_Work(), stream)
        self._work, self._warnings = work, warnings

    async def whole(self) -> reply.PullReply:
        async for _ in self._work:
            pass
        return reply.PullReply(warnings=self._warnings)

    async def events(self) -> AsyncIterator[bytes]:
        """Yield a line for each step, the last one a success. Raises the errors of the work."""
        async for progress in self._work:
            yield line(progress)
        yield line(reply.PullReply(warnings=self._warnings))


class _Work:
    """The answer that a `Readable` needs: without an id, small, and with nothing to abort."""

    id = ""
    size = 0

    def close(self) -> None:
        """Do nothing: the lines are a generator, which the caller's end closes."""


class Library:
    """The routes without HTTP."""

    def __init__(self, models: ModelSet) -> None:
        self.models = models
        self._pulls: dict[str, asyncio.Lock] = {}

    async def tags(self) -> reply.OllamaModels:
        """The models of the server, loaded or not."""
        return reply.OllamaModels(models=[self._card(*each) for each in (await self.models.listed()).items()])

    async def ps(self) -> reply.OllamaModels:
        """The models that are loaded, with the memory that they take now."""
        cards = []
        default = self.models.default
        if default is not None and default.client.is_alive:
            cards.append(await self._loaded_card(default.served.name, default, NEVER))
        for entry in list(self.models.loaded()):
            cards.append(await self._loaded_card(entry.name, entry.running, self._end_of(entry)))
        return reply.OllamaModels(models=cards)

    async def show(self, body: dict[str, Any]) -> reply.ShowReply:
        """The description of one model, which need not be loaded."""
        request = convert(ShowRequest, body)
        name = self._true_name(request.model or request.name)
        facts, running = await self.models.facts(name), self.models.running_as(name)
        card = self._card(name, facts)
        family = card.details.family
        info, template = dict(facts.info), facts.template
        parameters = facts.parameters
        if running is not None:
            tokenizer = running.served.front.tokenizer
            template = template or (tokenizer.chat_template if tokenizer is not None else None) or ""
            parameters = running.served.defaults.shown()
            info = {
                "general.architecture": family,
                f"{family}.context_length": running.served.max_context,
                f"{family}.vocab_size": running.client.info.vocab_size,
            } | info
        abilities = [
            ("vision", running is not None and bool(running.client.info.pictures)),
            ("tools", "tools" in template),
            ("thinking", "<think>" in template or "enable_thinking" in template),
        ]
        return reply.ShowReply(
            modelfile=_modelfile(name, facts),
            parameters="\n".join(_lines_of(dict(parameters) | facts.settings.sampling)),
            template=template,
            system=facts.settings.system or UNSET,
            details=card.details,
            model_info=info,
            capabilities=["completion", *(ability for ability, has in abilities if has)],
            modified_at=card.modified_at,
            warnings=request.warnings.reply(),
        )

    async def pull(self, body: dict[str, Any]) -> ProgressAnswer:
        """Fetch a model from the hub into the models folder; a model that is there stays as it is."""
        request = convert(ShowRequest, body)
        name = _required(request.model or request.name)
        if self.models.files is None:
            self.models.true_name(name)
        return ProgressAnswer(self._pull(name), request.stream is not False, request.warnings.reply())

    async def create(self, body: dict[str, Any]) -> ProgressAnswer:
        """Create a model from uploaded files, or under a second name."""
        request = read_options(CreateRequest, body, "parameters")
        for field, instead in SHAPING.items():
            if getattr(request, field):
                raise UnsupportedError(field, getattr(request, field), instead)
        target = _new_name(request.model or request.name)
        files = self._files()
        if bool(request.files) == bool(request.from_):
            raise RequestError("files", request.files, "the digests of uploaded files by name, or else from")
        settings, adapters = await _settings_of(request), request.adapters or {}
        if request.from_:
            source = self._of_folder(request.from_)
            work = functools.partial(self.models.change, target, files.copy, source, target, settings, adapters)
        else:
            work = functools.partial(
                self.models.change, target, files.create, target, request.files, settings, adapters
            )

        async def lines() -> AsyncGenerator[Progress]:
            yield Progress(status="writing manifest")
            with storing("written to"):
                await work()

        return ProgressAnswer(lines(), request.stream is not False, request.warnings.reply())

    async def copy(self, body: dict[str, Any]) -> Response:
        """Add a second name for a model."""
        request = convert(CopyRequest, body)
        source, target = self._of_folder(request.source, "source"), _new_name(request.destination, "destination")
        with storing("written to"):
            await self.models.change(target, self._files().copy, source, target)
        return Response()

    async def delete(self, body: dict[str, Any]) -> Response:
        """Delete a model; its running answers go on to their end."""
        request = convert(ShowRequest, body)
        name = self._of_folder(_required(request.model or request.name))
        with storing("written to"):
            await self.models.change(name, self._files().delete, name)
        return Response()

    async def unload(self, name: str) -> None:
        """Unload a model when its answers have ended. Raises `ModelNotFoundError`."""
        await self.models.unload(self.models.true_name(name))

    # -- parts

    def _files(self) -> ModelFolder:
        if self.models.files is None:
            raise CallError(501, "not_implemented", f"not supported here: {NO_FOLDER}")
        return self.models.files

    def _true_name(self, name: str | None) -> str:
        return self.models.true_name(_required(name))

    def _of_folder(self, name: str, field: str = "model") -> str:
        """Return the true name of a model of the folder. Raises `ModelNotFoundError`, and `RequestError` for the one
        that stays."""
        self._files()
        name = self.models.true_name(name)
        if self.models.default is not None and name in self.models.default.served.names:
            raise RequestError(field, name, "a model of the models folder; this one was named when the server started")
        return name

    async def _pull(self, name: str) -> AsyncGenerator[Progress]:
        try:
            self.models.true_name(name)
            return
        except ModelNotFoundError:
            files = self.models.files
            if files is None:
                raise
        target = _new_name(name)
        async with self._pulls.setdefault(target, asyncio.Lock()):
            if files.find(target) is None:
                with storing("written to"):
                    async for progress in files.pull(target):
                        yield progress
                await self.models.unload(target)

    def _end_of(self, entry: ModelEntry) -> str:
        seconds = self.models.expires_in(entry)
        try:
            return _date(datetime.now(UTC) + timedelta(seconds=seconds))
        except OverflowError:
            return NEVER

    async def _loaded_card(self, name: str, running: Running | None, end: str) -> reply.OllamaModel:
        card = self._card(name, await self.models.facts(name))
        card.expires_at, card.size_vram = end, 0
        if running is not None:
            card.context_length = running.served.max_context
            card.size = running.memory()
        return card

    def _card(self, name: str, facts: ModelFacts) -> reply.OllamaModel:
        running = self.models.running_as(name)
        if not facts.format and running is not None:
            facts = _facts_of_engine(running)
        stays = running is not None and running is self.models.default
        full = name if stays or ":" in name else f"{name}:latest"
        return reply.OllamaModel(
            name=full,
            model=full,
            modified_at=_date(datetime.fromtimestamp(facts.modified, UTC)),
            size=facts.size,
            digest=facts.digest,
            details=reply.ModelDetails(
                parent_model="",
                format=facts.format,
                family=facts.family,
                families=[facts.family],
                parameter_size=human_number(facts.num_parameters),
                quantization_level=facts.quantization,
            ),
        )


async def _settings_of(request: CreateRequest) -> ModelSettings:
    """Return the settings that a request has for the new model; fields without effect end in its warnings. Raises
    `RequestError`."""
    options, system, template = request.parameters or Options(), request.system or "", request.template or ""
    bounds.check("text", system, "system")
    with spelled(spelling_of(OLLAMA, "parameters.")):
        sampling = SamplingFields.of(options, OLLAMA, "parameters.")
        sampling.params()
    warn_of(options, "parameters", request)
    if options.num_ctx is not None:
        request.warn("parameters.num_ctx", "ignored: the context is that of --max-model-len, or the model's own")
    if request.license:
        request.warn("license", "not kept: that of the model's files holds")
    if template:
        await asyncio.to_thread(_check_template, template)
    values = {field: value for field in OLLAMA_NAMES if (value := getattr(sampling, field)) is not None}
    return ModelSettings(system=system, template=template, sampling=values)


def _check_template(template: str) -> None:
    try:
        check_source(template, "template")
    except RequestError as error:
        if not GO_TEMPLATE.search(template):
            raise
        bound = "a chat template in Jinja, or left out for the model's own; this one is Go's, which is not read here"
        raise RequestError("template", template, bound) from error
    if "messages" not in template or "{" not in template:
        raise RequestError("template", template, "a chat template in Jinja, which writes messages")


def _lines_of(sampling: Mapping[str, Any]) -> list[str]:
    """Return sampling parameters as lines of Ollama's, one for each value of a list."""
    lines = []
    for name, values in sampling.items():
        for value in values if isinstance(values, list) else [values]:
            lines.append(f"{OLLAMA_NAMES.get(name, name)} {json.dumps(value) if isinstance(value, str) else value}")
    return lines


def _modelfile(name: str, facts: ModelFacts) -> str:
    """Return the settings of a model, as Ollama writes them."""
    settings, lines = facts.settings, [f"FROM {name}"]
    if facts.has_adapter:
        lines.append("ADAPTER adapter")
    for word in ("template", "system"):
        if text := getattr(settings, word):
            lines.append(f'{word.upper()} """{text}"""')
    return "\n".join([*lines, *(f"PARAMETER {line}" for line in _lines_of(settings.sampling)), ""])


def _facts_of_engine(running: Running) -> ModelFacts:
    """Return the facts of an engine whose model has no files."""
    info, model = running.client.info, running.served
    return ModelFacts(
        format="headrace",
        family=info.model.rstrip("/").rpartition("/")[2] or info.model,
        size=0,
        digest=hashlib.sha256(model.name.encode()).hexdigest(),
        modified=model.created,
        quantization=info.quantization or info.dtype,
        context_length=info.max_model_len,
    )


def human_number(number: int) -> str:
    """Return a number of parameters as Ollama writes it: 7.6B, 656K; empty for none."""
    for size, letter, digits in ((10**9, "B", 1), (10**6, "M", 2), (10**3, "K", 0)):
        if number >= size:
            return f"{number / size:.{0 if number % size == 0 else digits}f}{letter}"
    return str(number) if number else ""


def _date(time: datetime) -> str:
    return time.isoformat().replace("+00:00", "Z")


def _required(name: str | None) -> str:
    if not name:
        raise RequestError("model", name, "the name of a model")
    return name


def _new_name(name: str | None, field: str = "model") -> str:
    """Return the name of a new model, without the tag that Ollama takes for granted."""
    if not name:
        raise RequestError(field, name, "the name of a model")
    return plain_name(name).removesuffix(":latest")


def add_routes(app: Starlette, models: ModelSet, library: Library, max_blob_bytes: int | None = None) -> None:
    """Add the routes of the models. `max_blob_bytes`: see `Uploads`."""

    def unserved(path: str) -> Response:
        """Not done by this server."""
        instead = "models are pulled from the hub, not pushed" if path == "/api/push" else NO_FOLDER
        raise CallError(501, "not_implemented", f"{path}: not supported here; {instead}")

    def version() -> routing.Version:
        """The version of Ollama whose API this is."""
        return routing.Version(version=OLLAMA_VERSION)

    progress: dict[str, Any] = {"api": API, "gives": reply.PullReply, "streams": NDJSON}
    progress |= {"chunks": (Progress, reply.PullReply)}
    routing.get(app, "/api/version", version, API, gives=routing.Version)
    routing.get(app, "/api/tags", library.tags, API, gives=reply.OllamaModels)
    routing.get(app, "/api/ps", library.ps, API, gives=reply.OllamaModels)
    routing.post(app, "/api/show", library.show, API, takes=ShowRequest, gives=reply.ShowReply)
    routing.post(app, "/api/pull", library.pull, takes=ShowRequest, **progress)
    missing = [("POST", "/api/push")]
    if models.files is None:
        missing += [("POST", "/api/create"), ("POST", "/api/copy"), ("DELETE", "/api/delete")]
    else:
        text: dict[str, Any] = {"api": API, "media_type": "text/plain"}
        routing.post(app, "/api/create", library.create, takes=CreateRequest, **progress)
        routing.post(app, "/api/copy", library.copy, takes=CopyRequest, **text)
        routing.add(app, "/api/delete", library.delete, ("DELETE",), takes=ShowRequest, **text)
        uploads = Uploads(models.files, max_blob_bytes)
        routing.post(app, "/api/blobs/{digest}", uploads.keep, read=uploads.read, **text)
        routing.get(app, "/api/blobs/{digest}", uploads.find, **text)
    for method, path in missing:
        routing.add(app, path, functools.partial(unserved, path), (method,), API, unserved=True)
