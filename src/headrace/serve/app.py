"""The HTTP server: routes, health, metrics, and `serve`, which puts tokenizer, engine client and uvicorn together.

This is a composition root. `gates.limits` reads every POST body, `errors` shapes every error, and `routing` ends the
requests of clients that hang up. The engine runs in another process; nothing here imports torch. Called by the commands
`serve` and `run-batch`.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import gc
import logging
import math
import signal
import sys
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from typing import Any

import msgspec
import uvicorn
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

from headrace import __version__, env, hub
from headrace.engine import logs
from headrace.engine.client import EngineClient, ProcessClient
from headrace.engine.generation import TextClient
from headrace.engine.tenants import Limits, Rates
from headrace.insight import audit
from headrace.insight.metrics import ServerMetrics
from headrace.insight.tracing import Tracer, otlp
from headrace.protocol.config import EngineConfig, ServerConfig
from headrace.protocol.errors import CheckpointError, EngineDeadError, HeadraceError, RequestError
from headrace.serve import openapi, routing
from headrace.serve.apis.anthropic import paths as anthropic
from headrace.serve.apis.llama_server import service as llama_server
from headrace.serve.apis.ollama import service as ollama
from headrace.serve.apis.openai import completions as openai_completions
from headrace.serve.apis.openai.storage import Storage
from headrace.serve.apis.openai.storage import add_routes as add_storage_routes
from headrace.serve.call import schema
from headrace.serve.call.dialect import Dialect
from headrace.serve.call.replies import Tokenized
from headrace.serve.call.service import ServedModel
from headrace.serve.errors import CallError, api_of, error_response, json_response
from headrace.serve.gates.auth import ApiKeyGate, KeyRing
from headrace.serve.gates.calls import CallGate, HeaderGate, allowed_hosts, allowed_origins, is_loopback
from headrace.serve.gates.connection import Connection
from headrace.text.inputs import seed_source
from headrace.text.templates import ChatTemplate
from headrace.text.tokenizer import Tokenizer

logger = logging.getLogger("headrace.server")

# Seconds that a client has to read the last event of its stream after draining ends.
STREAM_END_S = 5.0
LAG_INTERVAL_S = 0.1


def create_app(
    client: EngineClient,
    tokenizer: Tokenizer | None,
    template: ChatTemplate | None,
    server: ServerConfig,
    model: str,
    defaults: Mapping[str, Any] | None = None,
    seed: int | None = None,
    audits: Sequence[dict[str, Any]] = (),
    exporter: Any = None,
) -> Starlette:
    """Return the application, which starts `client` at startup and closes it at shutdown.

    Args:
        model: the served model's name, if `server` has none.
        defaults: sampling parameters for fields that a request leaves out.
        seed: seeds the generator of seeds for requests without one, which get them in order of arrival.
        audits: the reports of `insight.audit.find` on the weights.
        exporter: an OpenTelemetry `SpanExporter` for the spans of answers; None for no spans.
    """
    ring = KeyRing.of(server.api_key or (env.api_key() or "").split(), server.admin_api_key, server.api_key_file)
    if server.any_model_name is None:
        server = msgspec.structs.replace(server, any_model_name=not ring)
    model = (server.served_model_name or [model])[0]
    metrics = ServerMetrics(client, model)
    tracer = None if exporter is None else Tracer(exporter, model, metrics)
    client.observer = metrics
    rates = Rates(Limits(server.max_requests_per_minute, server.max_tokens_per_minute), ring.limits)
    front = TextClient(client, tokenizer, tracer or metrics, rates)
    served = served_model(front, template, server, model, defaults, seed)
    max_bytes, shares = server.max_storage_bytes, ring.storage_shares(server.max_storage_bytes)
    storage = Storage(served, server.storage_dir, max_bytes, shares, server.max_batch_concurrency)
    lifespan = Lifespan(client, served, server.log_stats_interval, storage, metrics.on_lag, tracer)
    app = Starlette(lifespan=lifespan.run)
    # A redirect would go to the host in the client's header, without the proxy's scheme.
    app.router.redirect_slashes = False
    app.state.lifespan = lifespan
    app.state.client = client
    openai_completions.add_routes(app, served, functools.partial(audit.of_form, audits))
    anthropic.add_routes(app, served)
    ollama.add_routes(app, served)
    llama_server.add_routes(app, served)
    _add_tokenize(app, served)
    add_storage_routes(app, storage)
    _add_operations(app, client, metrics, lifespan)
    openapi.add_routes(app, model, bool(ring))

    apis = list(dict.fromkeys(operation.api for operation in routing.operations(app)))

    async def on_http_error(request: Request, error: Exception) -> Response:
        if not isinstance(error, HTTPException):
            return error_response(error)
        code = "not_found" if error.status_code == 404 else "invalid_request_error"
        route_error = CallError(
            error.status_code, code, routing.no_route(app, request, error.status_code), error.headers
        )
        response = error_response(route_error, api_of(apis, request.url.path))
        if error.status_code == 405:
            # Starlette names the methods of one route, and a path may have several.
            response.headers["allow"] = ", ".join(routing.methods(app, request.url.path))
        return response

    app.add_exception_handler(HTTPException, on_http_error)
    hosts, origins = allowed_hosts(server.host, server.allowed_hosts), allowed_origins(server.allowed_origins)
    gates = HeaderGate(hosts, origins), ApiKeyGate(ring, rates)
    app.add_middleware(
        CallGate, *gates, most=server.max_request_timeout, apis=apis, is_ending=lambda: lifespan.draining
    )
    if not ring and not is_loopback(server.host):
        logger.warning(
            "no API key is set: every client that reaches %s port %d may use the server", server.host, server.port
        )
    return app


def served_model(
    front: TextClient,
    template: ChatTemplate | None,
    server: ServerConfig,
    model: str,
    defaults: Mapping[str, Any] | None = None,
    seed: int | None = None,
) -> ServedModel:
    """Return the model that answers calls; for the arguments see `create_app`."""
    parsers = (server.tool_call_parser, server.reasoning_parser, server.enable_auto_tool_choice)
    dialect = Dialect.of(template, front.tokenizer, *parsers)
    names = server.served_model_name or [model]
    any_name = bool(server.any_model_name)
    return ServedModel(front, names[0], template, defaults, seed_source(seed), dialect, names, any_name)


def _add_tokenize(app: Starlette, model: ServedModel) -> None:
    async def tokenize(body: dict[str, Any]) -> Response:
        """Text, or messages, to token ids."""
        # llama-server's body has a content, vLLM's a prompt or messages.
        if body.get("content") is not None:
            reply = await llama_server.tokenize(model, schema.parse(schema.TokenizeRequest, body))
        else:
            reply = await openai_completions.tokenize(model, body)
        return await routing.large_response(reply, reply.count)

    routing.post(app, "/tokenize", tokenize, takes=schema.TokenizeRequest, gives=Tokenized)


class Status(msgspec.Struct, kw_only=True):
    """The reply of the probes: one word of `Lifespan.status`, or "live", "serving" or "silent"."""

    status: str


class Load(msgspec.Struct, kw_only=True):
    """The reply of /load: how many requests are open."""

    server_load: int


def _add_operations(app: Starlette, client: EngineClient, metrics: ServerMetrics, lifespan: Lifespan) -> None:
    def live() -> Status:
        """The process answers."""
        return Status(status="live")

    def ready() -> Response:
        """The engine makes tokens."""
        return probed(lifespan.status(), "ready")

    async def serving() -> Response:
        """The engine makes steps, or answers at once if it has nothing to do."""
        status = lifespan.status()
        if status == "ready":
            status = "serving" if await client.answers() else "silent"
        return probed(status, "serving")

    def probed(status: str, good: str) -> Response:
        return json_response(Status(status=status), 200 if status == good else 503)

    def version() -> routing.Version:
        """headrace's version."""
        return routing.Version(version=__version__)

    def load() -> Load:
        """How many requests are open."""
        return Load(server_load=client.num_unfinished)

    def scrape() -> Response:
        """Metrics in Prometheus' text format."""
        return Response(metrics.render(), media_type=CONTENT_TYPE_LATEST)

    routing.get(app, "/health/live", live, gives=Status)
    routing.get(app, "/health/serving", serving, gives=Status)
    routing.get(app, "/health/ready", ready, gives=Status)
    routing.get(app, "/health", ready, gives=Status)
    routing.add(app, "/ping", ready, ("GET", "HEAD", "POST"), gives=Status)
    routing.get(app, "/version", version, gives=routing.Version)
    routing.get(app, "/load", load, gives=Load)
    routing.get(app, "/metrics", scrape, media_type="text/plain")


class Lifespan:
    """The application's lifespan and its state: loading, ready, restarting, stalled, impaired, dead or draining."""

    def __init__(
        self,
        client: EngineClient,
        model: ServedModel,
        log_stats_interval: float,
        storage: Storage,
        on_lag: Callable[[float], None],
        tracer: Tracer | None = None,
    ) -> None:
        self.client = client
        self.tracer = tracer
        self.storage = storage
        self.failure: BaseException | None = None
        self.draining = False
        self.ended = asyncio.Event()
        self._model = model
        self._on_lag = on_lag
        self._interval = log_stats_interval

    def status(self) -> str:
        """Return the state in one word, for probes; only "ready" means that requests should be sent here."""
        client = self.client
        if self.draining:
            return "draining"
        if self.failure is not None or client.dead.is_set():
            return "dead"
        if not client.is_started:
            return "loading"
        if not client.is_alive:
            return "restarting" if client.num_restarts or client.is_proven_once else "loading"
        if client.watchdog.is_stalled:
            return "stalled"
        return next((worker.status for worker in self._model.workers if worker.status != "ready"), "ready")

    def drain(self, seconds: float) -> None:
        """Refuse new requests, and end the open ones with an error after `seconds`.

        `draining` may be set earlier: then the probes fail and connections end with their replies, and all calls are
        answered."""
        self.draining = True
        self.client.is_draining = True
        error = EngineDeadError("the server is shutting down and could wait no longer")
        asyncio.get_running_loop().call_later(seconds, self.client.fail_all, error)

    @contextlib.asynccontextmanager
    async def run(self, app: Starlette) -> AsyncIterator[None]:
        """Load in the background, so that probes are answered meanwhile."""
        tasks = [asyncio.create_task(work()) for work in (self._start, self._log_stats, self._watch_loop)]
        try:
            yield
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            self._model.close()
            await self.storage.close()
            await self.client.close()
            if self.tracer is not None:
                await asyncio.to_thread(self.tracer.close)

    async def _start(self) -> None:
        try:
            await self._model.warm_up()
            await self.client.start()
            self._log_start()
            self.storage.start()
        except Exception as error:  # of any kind: a server that stays in loading would hide it
            self.failure = error
            expected = isinstance(error, HeadraceError | OSError)
            logger.critical("the engine did not start: %s", error, exc_info=None if expected else error)
            self.ended.set()
            return
        logger.info("ready")
        await self.client.dead.wait()
        self.failure = EngineDeadError("the engine died too often")
        self.ended.set()

    def _log_start(self) -> None:
        info = self.client.info
        num_tokens = info.num_blocks * info.block_size
        logger.info("%s: dtype %s, backend %s, device %s", info.model, info.dtype, info.backend, info.device)
        logger.info("KV cache size: %s tokens", f"{num_tokens:,}")
        length = info.max_model_len
        logger.info("Maximum concurrency for %s tokens per request: %.2fx", f"{length:,}", num_tokens / length)

    async def _watch_loop(self) -> None:
        """Measure how much later than due the event loop runs: something held it, or the interpreter's lock."""
        loop = asyncio.get_running_loop()
        while True:
            due = loop.time() + LAG_INTERVAL_S
            await asyncio.sleep(LAG_INTERVAL_S)
            self._on_lag(max(0.0, loop.time() - due))

    async def _log_stats(self) -> None:
        before = self.client.total
        idle = True
        while self._interval > 0:
            await asyncio.sleep(self._interval)
            total, now = self.client.total, self.client.stats
            prompt = total.num_prompt_tokens - before.num_prompt_tokens
            generated = total.num_generated_tokens - before.num_generated_tokens
            before, was_idle = total, idle
            idle = not (prompt or generated or self.client.num_unfinished)
            if idle and was_idle:
                continue
            hit_rate = total.prefix_cache_hits / total.prefix_cache_queries if total.prefix_cache_queries else 0.0
            logger.info(
                "Avg prompt throughput: %.1f tokens/s, Avg generation throughput: %.1f tokens/s, Running: %d reqs, "
                "Waiting: %d reqs, KV cache usage: %.1f%%, Prefix cache hit rate: %.1f%%",
                prompt / self._interval,
                generated / self._interval,
                now.num_running,
                now.num_waiting,
                100 * now.kv_cache_usage,
                100 * hit_rate,
            )


def advised_params(engine: EngineConfig) -> dict[str, Any]:
    """Return the sampling parameters of the model's generation_config.json, as `vllm serve` applies them.

    Raises `CheckpointError` for a value that no request may have.
    """
    path = hub.resolve(engine.model, engine.revision, weights=False) / "generation_config.json"
    if not path.is_file():
        return {}
    advised = hub.read_json(path)
    names = {name: name for name in ("temperature", "top_k", "top_p", "min_p", "typical_p", "repetition_penalty")}
    names |= {"max_new_tokens": "max_tokens", "no_repeat_ngram_size": "no_repeat_ngram_size"}
    params = {ours: advised[theirs] for theirs, ours in names.items() if advised.get(theirs) is not None}
    for theirs, ours in names.items():
        if ours in params:
            hub.check_field(path, ours, params[ours], theirs)
    if params:
        logger.info("sampling defaults from the model's generation_config.json: %s", params)
    return params


class _Uvicorn(uvicorn.Server):
    """A uvicorn server that exits with success after SIGTERM; uvicorn's own raises the signal again after the drain.

    After SIGTERM it serves on for `delay` seconds, while its probes fail: a load balancer needs that time to notice.
    """

    def __init__(self, config: uvicorn.Config, lifespan: Lifespan, delay: float, drain_seconds: float) -> None:
        super().__init__(config)
        self._lifespan = lifespan
        self._delay = delay
        self._drain_seconds = drain_seconds

    @contextlib.contextmanager
    def capture_signals(self) -> Any:
        loop = asyncio.get_running_loop()
        for name in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(name, self._on_signal, name)
        yield

    def _on_signal(self, name: signal.Signals) -> None:
        if self.should_exit:
            # A signal in the drain ends the server without it.
            self.force_exit = True
        elif self._delay and name == signal.SIGTERM and not self._lifespan.draining:
            self._lifespan.draining = True
            logger.info("draining: the probes fail, and calls are accepted for %g s", self._delay)
            asyncio.get_running_loop().call_later(self._delay, self._end)
        else:
            self._end()

    def _end(self) -> None:
        if not self.should_exit:
            self.should_exit = True
            self._lifespan.drain(self._drain_seconds)


def load_text(engine: EngineConfig, server: ServerConfig) -> tuple[Tokenizer | None, ChatTemplate | None]:
    """Load the model's tokenizer and chat template, None for each it lacks. Raises `ModelNotFoundError` and
    `CheckpointError`."""
    if engine.skip_tokenizer_init:
        return None, None
    path = hub.resolve_tokenizer(engine.model, engine.tokenizer, engine.revision)
    tokenizer = Tokenizer.load_if_present(path)
    if tokenizer is None:
        logger.warning("the model has no tokenizer: prompts must be token ids")
    elif server.chat_template or tokenizer.chat_template:
        return tokenizer, ChatTemplate.of(tokenizer, server.chat_template)
    return tokenizer, None


def load_audits(engine: EngineConfig) -> list[dict[str, Any]]:
    """Load the quality reports stored with the weights. A file that can not be read is logged."""
    try:
        return audit.find(hub.resolve(engine.model, engine.revision, weights=False))
    except (CheckpointError, OSError) as error:
        logger.warning("the quality of the model is not shown: %s", error)
        return []


def serve(engine: EngineConfig, server: ServerConfig, notes: Sequence[str] = ()) -> None:
    """Serve until a signal comes. Exits with status 1 if the engine could not start or died too often.

    `notes` are warnings about the command line; they are logged first.

    Raises `ModelNotFoundError` or `CheckpointError` if there is no such model or tokenizer.
    """
    logs.set_up(server.uvicorn_log_level, server.log_format)
    for note in notes:
        logger.warning("%s", note)
    try:
        _serve(engine, server)
    except HeadraceError as error:
        if server.log_format != "json":
            raise
        # The command would print a line that is not JSON.
        logger.critical("%s", error)
        sys.exit(2 if isinstance(error, RequestError) else 1)


def _serve(engine: EngineConfig, server: ServerConfig) -> None:
    exporter = otlp(server.otlp_traces_endpoint) if server.otlp_traces_endpoint else None
    tokenizer, template = load_text(engine, server)
    defaults = advised_params(engine) if server.generation_config == "auto" else {}
    client = ProcessClient(engine, server)
    audits = load_audits(engine)
    app = create_app(client, tokenizer, template, server, engine.model, defaults, engine.seed, audits, exporter)
    status = run(app, server)
    if status:
        sys.exit(status)


def run(app: Starlette, server: ServerConfig) -> int:
    """Serve `app` until a signal comes: drain, stop the engine, return the exit status."""
    config = uvicorn.Config(
        app,
        host=server.host,
        port=server.port,
        http=Connection.protocol(server.max_connections_per_peer),  # type: ignore[arg-type]
        log_config=None,
        access_log=False,
        server_header=False,
        ws="none",
        lifespan="on",
        timeout_graceful_shutdown=math.ceil(server.shutdown_timeout + STREAM_END_S),
    )
    lifespan = app.state.lifespan
    # Modules, routes and the tokenizer live as long as this process. A garbage collection would walk them all, and
    # delay every call by a tenth of a second.
    gc.collect()
    gc.freeze()
    return asyncio.run(_run(_Uvicorn(config, lifespan, server.shutdown_delay, server.shutdown_timeout), lifespan))


async def _run(server: uvicorn.Server, lifespan: Lifespan) -> int:
    async def stop_when_dead() -> None:
        await lifespan.ended.wait()
        server.should_exit = True

    watch = asyncio.create_task(stop_when_dead())
    try:
        await server.serve()
    finally:
        watch.cancel()
    return 1 if lifespan.failure is not None or not server.started else 0
