"""Starts models: engine client, tokenizer, template and metrics of each, put together as a `RunningModel`.

There is the model that the server was started with, and `Loader` starts models of the models folder. A model's
processes, tokenizer and metrics end with it. Called by `serve.app` and `run-batch`; nothing here imports torch.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import functools
import gc
import logging
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple, cast

import msgspec

from headrace import hub
from headrace.engine.client import EngineClient, ProcessClient
from headrace.engine.generation import TextClient
from headrace.engine.library import facts_reader, model_settings
from headrace.engine.library.model_facts import ModelFacts
from headrace.engine.library.model_folder import ModelFolder
from headrace.engine.tenants import Rates
from headrace.insight import audit
from headrace.insight.explainer import Explainer, Explainers
from headrace.insight.metrics import ServerMetrics
from headrace.insight.tracing import Tracer, otlp
from headrace.protocol.adapters import named_adapters
from headrace.protocol.config import EngineConfig, ServerConfig
from headrace.protocol.defaults import sampling_defaults
from headrace.protocol.errors import CheckpointError, RequestError
from headrace.serve.call.adapters import ServedAdapters
from headrace.serve.call.call import ModelDefaults
from headrace.serve.call.dialect import Dialect
from headrace.serve.call.models import ModelSet
from headrace.serve.call.service import RENDER_OPTIONS, ServedModel
from headrace.text import bounded_tokenizer
from headrace.text.bounded import BoundedProcess
from headrace.text.inputs import seed_source
from headrace.text.named_templates import template_of
from headrace.text.pictures.forms import PictureForm, read_form
from headrace.text.pictures.reading import PictureReader
from headrace.text.templates import ChatTemplate, new_process
from headrace.text.tokenizer import Tokenizer

logger = logging.getLogger("headrace.server")

STATM = "/proc/{pid}/statm"


class ModelParts(NamedTuple):
    """The parts of a served model, all but its engine.

    `defaults` are sampling parameters for fields that a request leaves out; `seed` seeds the generator of seeds for
    requests without one, which get them in order of arrival; `audits` are the reports of `insight.audit.find` on the
    weights; `exporter` is an OpenTelemetry `SpanExporter` for the spans of answers. `engine`, the engine's settings,
    names the model's files; None: there are none. `why`: the reason of its scheduling policy, for people. `notes`:
    warnings about its chats, for a model that turns out to have some. `pictures`: the form of its pictures; None for a
    model that reads none.
    """

    tokenizer: Tokenizer | None = None
    template: ChatTemplate | None = None
    defaults: ModelDefaults = ModelDefaults()
    seed: int | None = None
    audits: Sequence[dict[str, Any]] = ()
    exporter: Any = None
    engine: EngineConfig | None = None
    why: str = ""
    notes: Sequence[str] = ()
    pictures: PictureForm | None = None

    @classmethod
    def load(cls, engine: EngineConfig, server: ServerConfig, process: BoundedProcess | None = None) -> ModelParts:
        """Load the parts of the engine's model; for `process` see `load_text`. Raises `ModelNotFoundError` and
        `CheckpointError`."""
        text = load_text(engine, server, process)
        return cls(
            tokenizer=text.tokenizer,
            template=text.template,
            defaults=default_params(engine, server),
            seed=engine.seed,
            audits=load_audits(engine),
            exporter=otlp(server.otlp_traces_endpoint) if server.otlp_traces_endpoint else None,
            engine=engine,
            notes=text.notes,
            pictures=None if text.tokenizer is None else picture_form(engine, text.tokenizer),
        )


class RunningModel:
    """A model in service: its engine, tokenizer, metrics and explanations. The caller starts the engine.

    Args:
        client: its engine.
        model: its name, if `server` has none.
        parts: its other parts.
        rates: the limits of the callers, which all models share.
        explainers: the explainers of all models; they keep the explanations when this model is unloaded.
    """

    def __init__(
        self,
        client: EngineClient,
        server: ServerConfig,
        model: str,
        parts: ModelParts,
        rates: Rates | None = None,
        explainers: Explainers | None = None,
    ) -> None:
        name = (server.served_model_name or [model])[0]
        self.client = client
        self._engine = parts.engine
        self._facts: ModelFacts | None = None
        self._form = parts.pictures
        self.metrics = ServerMetrics(client, name)
        counts = self.metrics.counts
        self.tracer = None if parts.exporter is None else Tracer(parts.exporter, name, counts)
        self.explainer = Explainer(counts, self.tracer or counts, parts.tokenizer, lambda: client.info)
        if self.tracer is not None:
            self.tracer.replica_of = self.explainer.replica_of
        self._explainers = explainers or Explainers()
        self._explainers.add(self.explainer)
        client.observer = self.explainer.observer
        front = TextClient(client, parts.tokenizer, self.explainer.observer, rates)
        self.served = served = served_model(front, server, model, parts)
        served.media_domains = server.allowed_media_domains or ()
        served.quality = functools.partial(audit.of_form, parts.audits)
        served.explain = self.explainer.of_requests
        served.follow_prompt = self.explainer.follow_prompt
        served.digest = self._digest
        served.system = "" if parts.engine is None else model_settings.read(parts.engine.model).system
        self.metrics.num_helper_faults = lambda: served.num_helper_faults
        self.metrics.num_unfilled = lambda block_size: self.explainer.lives.num_unfilled(block_size)

    @property
    def drafter(self) -> str:
        """The method of speculation; "" if there is none."""
        config = None if self._engine is None else self._engine.speculative_config
        return "" if config is None else config.method or "a draft model"

    @property
    def path(self) -> Path | None:
        """The model's directory or GGUF file; None for a model without files."""
        engine = self._engine
        return None if engine is None else hub.resolve(engine.model, engine.revision, weights=False)

    def weights(self) -> Path | None:
        """Return the directory or GGUF file that holds its weights, as the engine reads them. Blocks."""
        engine = self._engine
        return None if engine is None else hub.resolve(engine.model, engine.revision)

    def begin(self) -> None:
        """Take what the engine, which has started, tells of the model: its adapters, and whether it answers. Only then
        are the warnings about chats of use."""
        self.served.adapters.take(self.client.info.adapters)
        if self.client.info.pictures and self._form is not None:
            limits = None if self._engine is None else self._engine.limit_mm_per_prompt
            self.served.read_pictures(PictureReader(self._form, limits))
        notes, self.served.notes = self.served.notes, []
        for note in notes if self.client.info.generates else ():
            logger.warning("%s", note)

    def _digest(self) -> str:
        path = self.path
        return "" if path is None else hub.digest(path)

    def facts(self) -> ModelFacts | None:
        """Return the facts in the model's files, read once; None where there are no files. Blocks."""
        if self._facts is None and (path := self.weights()) is not None:
            self._facts = facts_reader.shared().facts(path)
        return self._facts

    def forget_files(self) -> None:
        """Drop the facts, so that the next call reads the files again: they may be others now."""
        self._facts = None

    async def check_text(self) -> None:
        """Check that the files still hold the tokenizer and templates that were loaded: with other ones, new engines
        would understand the token ids as other texts. Raises `CheckpointError`."""
        old, engine = self.served.front.tokenizer, self._engine
        if old is None or engine is None:
            return
        path = hub.resolve_tokenizer(engine.model, engine.tokenizer, engine.revision)
        new = await asyncio.to_thread(bounded_tokenizer.load_if_present, path)
        is_same = new is not None and await asyncio.to_thread(old.is_same, new)
        if new is not None:
            await asyncio.to_thread(new.close)
        if not is_same:
            raise CheckpointError(f"{path} has another tokenizer or chat template now: restart the server for it")

    def memory(self) -> int:
        """Return the resident bytes of the model's processes, the engine's among them; 0 where the number is
        unknown."""
        pids = [*self.client.pids, *(worker.process.pid for worker in self.served.workers)]
        return sum(_resident(pid) for pid in pids if pid is not None)

    async def close(self, at_once: bool = False) -> None:
        """End its engine, `at_once` in mid-step, and its other processes."""
        # A model that stays loaded renders its templates in a process that other models share.
        workers = [self.served.front.encoder] if self.served.stays_loaded else self.served.workers
        processes = [worker.process for worker in workers if worker is not None]
        self.served.close()
        await self.client.close(at_once)
        self._explainers.retire(self.explainer, await asyncio.to_thread(self.explainer.calls.decoded))
        if processes or self.tracer is not None:
            await asyncio.to_thread(self._close_rest, processes)

    def _close_rest(self, processes: list[BoundedProcess]) -> None:
        for process in processes:
            process.close()
        if self.tracer is not None:
            self.tracer.close()


class RunningModels(ModelSet):
    """A `ModelSet` of which all models are `RunningModel`s."""

    default: RunningModel | None

    @property
    def running(self) -> Sequence[RunningModel]:
        return cast(Sequence[RunningModel], super().running)


class Loader:
    """Loads models of the folder, with the settings that the server was started with.

    Args:
        engine, server: the settings, but for name, tokenizer, revision and further names, which each model has itself.
        folder: the models folder.
        rates, explainers: shared by all models; see `RunningModel`.
    """

    def __init__(
        self, engine: EngineConfig, server: ServerConfig, folder: ModelFolder, rates: Rates, explainers: Explainers
    ) -> None:
        self._engine = msgspec.structs.replace(engine, tokenizer=None, revision=None, record_schedule=None)
        self._server = server
        self._folder = folder
        self._rates = rates
        self._explainers = explainers

    async def load(self, name: str) -> RunningModel:
        """Start a model and wait until it makes tokens. Raises `HeadraceError`s."""
        model: RunningModel | None = None
        try:
            model = await asyncio.to_thread(self._prepare, name)
            await asyncio.gather(model.client.start(), model.served.warm_up())
            model.begin()
            return model
        except BaseException:
            if model is not None:
                await model.close()
            await asyncio.to_thread(free_memory)
            raise

    def _prepare(self, name: str) -> RunningModel:
        path = str(self._folder.path(name))
        engine = msgspec.structs.replace(self._engine, model=path, enable_lora=False, lora_modules=None)
        engine = model_settings.with_adapter(engine)
        # A name that leads here is the model's: `ModelSet` has found it.
        names = [name, *([f"{name}:latest"] if ":" not in name else [])]
        server = msgspec.structs.replace(self._server, served_model_name=names, any_model_name=True)
        parts = ModelParts.load(engine, server, new_process())
        client = ProcessClient(engine, server)
        model = RunningModel(client, server, name, parts, self._rates, self._explainers)
        model.served.stays_loaded = False
        return model


def served_model(front: TextClient, server: ServerConfig, model: str, parts: ModelParts) -> ServedModel:
    """Return the model that answers calls; for the arguments see `RunningModel`."""
    names = server.served_model_name or [model]
    notes = Notes(parts.notes)
    served = ServedModel(
        front,
        names[0],
        template=parts.template,
        defaults=parts.defaults,
        draw=seed_source(parts.seed),
        dialect=Dialect.of(
            parts.template,
            front.tokenizer,
            tool_call_parser=server.tool_call_parser,
            reasoning_parser=server.reasoning_parser,
            enable_auto_tool_choice=server.enable_auto_tool_choice,
            warn=notes.add,
        ),
        names=names,
        takes_any_name=bool(server.any_model_name),
        trusts_templates=server.trust_request_chat_template,
    )
    served.notes = notes
    served.adapters = served_adapters(parts.engine)
    served.template_variables = dict(server.default_chat_template_kwargs or {})
    for name in RENDER_OPTIONS & served.template_variables.keys():
        raise RequestError("default_chat_template_kwargs", name, "a variable of the template's own")
    served.prefills = server.prefill_assistant
    served.tags = [tag for text in server.tags or () for tag in text.split(",") if tag]
    served.is_verbose = server.uvicorn_log_level in ("debug", "trace")
    return served


def served_adapters(engine: EngineConfig | None) -> ServedAdapters:
    """Return the adapters of an engine that is not started, by their scales alone."""
    modules = (engine.lora_modules if engine is not None else None) or ()
    return ServedAdapters({each.name: each.scale for each in named_adapters(modules) if each.scale})


class ModelText(NamedTuple):
    """The parts of a model that know text: None for a model without a tokenizer. notes: warnings about its chats."""

    tokenizer: Tokenizer | None = None
    template: ChatTemplate | None = None
    notes: Sequence[str] = ()


class Notes(list[str]):
    """Warnings that wait until the model's kind is known."""

    def add(self, text: str, *values: object) -> None:
        """Take a warning as a logger does."""
        self.append(text % values)


def load_text(engine: EngineConfig, server: ServerConfig, process: BoundedProcess | None = None) -> ModelText:
    """Load the model's tokenizer and chat template. `process` renders the template; None: the process that all
    templates share. Raises `ModelNotFoundError` and `CheckpointError`."""
    if engine.skip_tokenizer_init:
        return ModelText()
    path = hub.resolve_tokenizer(engine.model, engine.tokenizer, engine.revision)
    tokenizer = bounded_tokenizer.load_if_present(path)
    if tokenizer is None:
        logger.warning("the model has no tokenizer: prompts must be token ids")
        return ModelText()
    source = model_settings.read(engine.model).template or server.chat_template
    notes = Notes()
    return ModelText(tokenizer, template_of(tokenizer, source, process, notes.add), notes)


def picture_form(engine: EngineConfig, tokenizer: Tokenizer) -> PictureForm | None:
    """Return the form of the model's pictures; None, with a warning, where its files make none."""
    try:
        return read_form(hub.resolve(engine.model, engine.revision, weights=False), tokenizer)
    except CheckpointError as error:
        logger.warning("pictures are refused: %s", error)
        return None


def default_params(engine: EngineConfig, server: ServerConfig) -> ModelDefaults:
    """Return the parameters of requests that give none: flags precede the model's files. Raises `CheckpointError`."""
    advised = model_settings.default_params(engine.model, engine.revision, server.generation_config == "auto")
    return ModelDefaults.of(advised | sampling_defaults(server.override_generation_config))


def load_audits(engine: EngineConfig) -> list[dict[str, Any]]:
    """Load the quality reports stored with the weights. A file that cannot be read is logged."""
    return audit.found(hub.resolve(engine.model, engine.revision, weights=False))


def free_memory() -> None:
    """Give memory that is free in this process back to the system."""
    gc.collect()
    with contextlib.suppress(OSError, AttributeError):  # a C library without `malloc_trim` keeps the memory
        ctypes.CDLL(None).malloc_trim(0)


def _resident(pid: int) -> int:
    try:
        return int(Path(STATM.format(pid=pid)).read_text(encoding="ascii").split()[1]) * os.sysconf("SC_PAGESIZE")
    except (OSError, ValueError, IndexError):
        return 0
