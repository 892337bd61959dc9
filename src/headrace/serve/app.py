"""The HTTP server: routes, health, metrics, and `serve`, which puts tokenizer, engine client and uvicorn together.

This is a composition root. `gates.limits` reads every POST body, `errors` shapes every error, and `routing` ends the
requests of clients that hang up. The engine runs in another process; nothing here imports torch. Called by the commands
`serve` and `run-batch`.
"""

from __future__ import annotations

import contextlib
import logging
import secrets
import sys
import time
from collections.abc import Callable, Mapping, Sequence

import msgspec
from msgspec import UNSET, UnsetType
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

from headrace import __version__, env
from headrace.engine import logs
from headrace.engine.client import EngineClient
from headrace.engine.library.model_folder import ModelFolder
from headrace.engine.library.model_settings import with_adapter
from headrace.engine.tenants import Limits, Rates
from headrace.fleet.engines.local import client_of
from headrace.insight.explainer import Explainers
from headrace.insight.llama_metrics import LlamaMetrics
from headrace.insight.metrics import render
from headrace.protocol.config import EngineConfig, ServerConfig
from headrace.protocol.errors import HeadraceError, RequestError
from headrace.serve import aliases, fleet, openapi, process, routing, tokenize
from headrace.serve.apis.anthropic import paths as anthropic
from headrace.serve.apis.llama_server import paths as llama_server
from headrace.serve.apis.llama_server.slots import Folder
from headrace.serve.apis.ollama import service as ollama
from headrace.serve.apis.openai import adapters, scores, vllm
from headrace.serve.apis.openai import completions as openai_completions
from headrace.serve.apis.openai.scores import ScoreRoutes
from headrace.serve.apis.openai.storage import Storage
from headrace.serve.apis.openai.storage import add_routes as add_storage_routes
from headrace.serve.apis.tei import paths as tei
from headrace.serve.call.parsing import seconds_of
from headrace.serve.call.sleeping import IdleSleep
from headrace.serve.call.states import ASLEEP, State
from headrace.serve.errors import CallError, api_of, error_response, json_response
from headrace.serve.gates.auth import ApiKeyGate, KeyRing
from headrace.serve.gates.calls import CallGate, HeaderGate, allowed_hosts, allowed_origins, is_loopback
from headrace.serve.inspection import Inspection
from headrace.serve.inspection import add_routes as add_inspection_routes
from headrace.serve.inspector import explanations, live, page, planning
from headrace.serve.lifespan import Lifespan
from headrace.serve.loading import Loader, ModelParts, RunningModel, RunningModels
from headrace.serve.reach import Reach
from headrace.serve.shedding import Shedding

logger = logging.getLogger("headrace.server")

MakeClient = Callable[[EngineConfig, ServerConfig], EngineClient]


def create_app(
    client: EngineClient | None,
    server: ServerConfig,
    model: str,
    parts: ModelParts | None = None,
    folder: ModelFolder | None = None,
) -> Starlette:
    """Return the application, which starts `client` at startup and closes it at shutdown.

    Args:
        client: the engine of the model that stays loaded; None: all models are in `folder`.
        model: the name of the model, if `server` has none.
        parts: the other parts of the model that stays. Their `engine` holds the settings for engines of the folder's
            models.
        folder: the models folder; None: there is none.
    """
    parts = parts or ModelParts()
    engine = parts.engine
    ring = _open_ring(server)
    if server.any_model_name is None:
        server = msgspec.structs.replace(
            server, any_model_name=not ring and folder is None and not (engine and engine.enable_lora)
        )
    rates = Rates(Limits(server.max_requests_per_minute, server.max_tokens_per_minute), ring.limits)
    default, explainers = None, Explainers()
    if client is not None:
        default = RunningModel(client, server, model, parts, rates, explainers)
    models = RunningModels(default)
    if folder is not None:
        load = Loader(engine or EngineConfig(), server, folder, rates, explainers).load
        keep_alive = seconds_of(server.keep_alive) or 0.0
        models = RunningModels(default, folder, load, keep_alive, server.models_max, server.models_memory)
    max_bytes, shares = server.max_storage_bytes, ring.storage_shares(server.max_storage_bytes)
    shedding = Shedding(server.overload_config)
    concurrency = server.max_batch_concurrency
    storage = Storage(models, server.storage_dir, max_bytes, shares, concurrency, shedding.overload)
    policy = None if engine is None else engine.policy
    idle = None
    if server.sleep_idle_seconds >= 0:
        idle = IdleSleep(models, server.sleep_idle_seconds, lambda: client is not None and client.is_alive)
    lifespan = Lifespan(models, server.log_stats_interval, storage, policy, idle, shedding)
    lifespan.why = parts.why
    app = Starlette(lifespan=lifespan.run)
    # A redirect would go to the host in the client's header, without the proxy's scheme.
    app.router.redirect_slashes = False
    app.state.lifespan = lifespan
    openai_completions.add_routes(app, models)
    anthropic.add_routes(app, models)
    ollama.add_routes(app, models, server.max_blob_bytes)
    slot_files = Folder.of(server.slot_save_path, max_bytes, shares)
    llama_server.add_routes(app, models, slot_files, shows_slots=server.slots)
    tokenize.add_routes(app, models)
    add_storage_routes(app, storage)
    score_routes = models.bind(ScoreRoutes)
    scores.add_routes(app, score_routes)
    vllm.add_routes(app, models, storage.embeddings, score_routes)
    tei.add_routes(app, models, score_routes.rerank)
    adapters.add_routes(app, models)
    _add_operations(app, models, lifespan, LlamaMetrics() if server.metrics else None)
    explanations.add_routes(app, explainers.of_call)
    fleet.add_routes(app, models, lifespan.check_order)
    inspection = Inspection(models, lifespan.check_order)
    live.add_routes(app, lambda: models.running, inspection.watched, shedding.shown)
    add_inspection_routes(app, inspection)
    plans = planning.Planning(models, inspection.machine)
    planning.add_routes(app, plans)
    lifespan.at_end += [inspection.close, plans.close, *([] if folder is None else [folder.close])]
    if server.inspector:
        page.add_routes(app)
    aliases.add_routes(app)
    openapi.add_routes(app, None if default is None or folder is not None else default.served.name, bool(ring))
    lifespan.num_routes = len(routing.operations(app))

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
    hosts, origins = (
        allowed_hosts(server.host, server.allowed_hosts, bool(ring)),
        allowed_origins(server.allowed_origins),
    )
    app.add_middleware(
        CallGate,
        headers=HeaderGate(hosts, origins),
        keys=ApiKeyGate(ring, rates),
        most=server.max_request_timeout,
        apis=apis,
        life=lifespan,
    )
    if not ring and not is_loopback(server.host):
        logger.warning(
            "no API key is set: every client that reaches %s port %d may use the server, by an IP address, localhost, "
            "the machine's name or --allowed-hosts",
            server.host,
            server.port,
        )
    return app


def _open_ring(server: ServerConfig) -> KeyRing:
    """Return the server's keys. If there are none and one is to be made, make it, and show it in the log: nowhere else,
    and only now."""
    ring = ring_of(server)
    if not ring and server.generate_api_key:
        key = secrets.token_hex(16)
        # At the level of the log, so that it is shown at each.
        level = max(logging.WARNING, logger.getEffectiveLevel())
        logger.log(level, "API key of this server, until it ends (HEADRACE_API_KEY sets one of your own): %s", key)
        return KeyRing.of(key, None, None)
    if ring and not ring.has_admin:
        logger.info(
            "no key opens the routes of the class admin; --admin-api-key KEY names one that does, or "
            'classes = ["admin"] in a table of --api-key-file'
        )
    return ring


class Status(msgspec.Struct, kw_only=True):
    """The reply of the probes: one word of `Lifespan.status`, or "live", "serving" or "silent". `overload`: the state
    in which calls are refused, if any are."""

    status: str
    overload: str | UnsetType = UNSET


class Load(msgspec.Struct, kw_only=True):
    """The reply of /load: how many requests are open."""

    server_load: int


class Sleeping(msgspec.Struct, kw_only=True):
    """The reply of /is_sleeping, as vLLM has it."""

    is_sleeping: bool


def _add_operations(
    app: Starlette, models: RunningModels, lifespan: Lifespan, llama_metrics: LlamaMetrics | None = None
) -> None:
    started = int(time.time())

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
            answers = [await model.client.answers() for model in models.running]
            status = "serving" if all(answers) else "silent"
        return probed(status, "serving")

    def probed(status: str, good: str) -> Response:
        overload = lifespan.overload
        refusing = overload.state.word if overload.refused else UNSET
        return json_response(Status(status=status, overload=refusing), 200 if status == good else 503)

    def version() -> routing.Version:
        """headrace's version."""
        return routing.Version(version=__version__)

    def load() -> Load:
        """The number of open requests."""
        return Load(server_load=sum(model.client.num_unfinished for model in models.running))

    def scrape() -> Response:
        """Metrics in Prometheus' text format."""
        metrics = lifespan.metrics()
        whole = render(metrics) + lifespan.shedding.render()
        if llama_metrics is None:
            return Response(whole, media_type=CONTENT_TYPE_LATEST)
        text = llama_metrics.render(each.totals() for each in metrics)
        reply = Response(whole + text, media_type=CONTENT_TYPE_LATEST)
        # Capital letters as llama-server has them, for readers of metrics that compare names letter by letter.
        reply.raw_headers.append((b"Process-Start-Time-Unix", str(started).encode()))
        return reply

    async def sleep(query: Mapping[str, str]) -> Response:
        """End the engines when their answers have ended, and free their memory, until /wake_up."""
        level = query.get("level", "1")
        if level not in ("0", "1", "2"):
            raise RequestError("level", level, "1 or 2, which free the same memory, or 0")
        lifespan.check_order(*ASLEEP)
        if lifespan.idle is not None:
            lifespan.idle.deepen()
        await models.sleep.fall_asleep()
        return Response(media_type="text/plain")

    async def wake_up() -> Response:
        """Start the engine again."""
        lifespan.check_order(*ASLEEP, State.WAKING)
        await models.sleep.wake_up()
        return Response(media_type="text/plain")

    def is_sleeping() -> Sleeping:
        """Reply whether the server sleeps."""
        return Sleeping(is_sleeping=models.is_sleeping)

    routing.get(app, "/health/live", live, gives=Status)
    routing.get(app, "/health/serving", serving, gives=Status)
    routing.get(app, "/health/ready", ready, gives=Status)
    routing.get(app, "/health", ready, gives=Status)
    routing.add(app, "/ping", ready, ("GET", "HEAD", "POST"), gives=Status)
    routing.get(app, "/version", version, gives=routing.Version)
    routing.get(app, "/load", load, gives=Load)
    routing.get(app, "/metrics", scrape, media_type="text/plain")
    routing.post(app, "/sleep", sleep, query=("level",), media_type="text/plain")
    routing.post(app, "/wake_up", wake_up, media_type="text/plain")
    routing.get(app, "/is_sleeping", is_sleeping, gives=Sleeping)


def serve(
    engine: EngineConfig,
    server: ServerConfig,
    notes: Sequence[str] = (),
    has_model: bool = True,
    make_client: MakeClient = client_of,
    reach: Reach = Reach(),
) -> None:
    """Serve until a signal comes. Exits with status 1 if the engine could not start or died too often.

    `notes` are warnings about the command line; they are logged first. Without `has_model`, no model is loaded at the
    start: all are in the models folder. `make_client` makes the client of the model that stays.

    Raises `ModelNotFoundError` or `CheckpointError` if there is no such model or tokenizer, and `RequestError` for a
    file of `reach`.
    """
    logs.set_up(server.uvicorn_log_level, server.log_format)
    for note in notes:
        logger.warning("%s", note)
    try:
        reach.context()
        with contextlib.ExitStack() as stack:
            stack.enter_context(process.ended_by_signals())
            # First: a port in use ends the start at once, and a client that connects from now on waits for its answer.
            sockets = [stack.enter_context(each) for each in process.listen(server.host, server.port)]
            status = process.run(make_app(engine, server, has_model, make_client), server, sockets, reach)
    except HeadraceError as error:
        if server.log_format != "json":
            raise
        # The command would print a line that is not JSON.
        logger.critical("%s", error)
        sys.exit(2 if isinstance(error, RequestError) else 1)
    if status:
        sys.exit(status)


def make_app(
    engine: EngineConfig, server: ServerConfig, has_model: bool = True, make_client: MakeClient = client_of
) -> Starlette:
    """Load the tokenizer, template and other parts of the model, and return the application. For the arguments see
    `serve`.

    Raises `ModelNotFoundError` or `CheckpointError` if there is no such model or tokenizer.
    """
    folder = None if server.models_dir is None else ModelFolder(server.models_dir)
    engine, why = with_policy(engine, len(ring_of(server).holders))
    if not has_model:
        if server.data_parallel_size != "1":
            bound = "1 without MODEL: models of the folder have an engine each"
            raise RequestError("data_parallel_size", server.data_parallel_size, bound)
        return create_app(None, server, engine.model, ModelParts(engine=engine, why=why), folder)
    engine = with_adapter(engine)
    parts = ModelParts.load(engine, server)._replace(why=why)
    return create_app(make_client(engine, server), server, engine.model, parts, folder)


def ring_of(server: ServerConfig) -> KeyRing:
    """Return all keys of the server. Raises `RequestError` as `KeyRing.of`."""
    return KeyRing.of(server.api_key or (env.api_key() or "").split(), server.admin_api_key, server.api_key_file)


def with_policy(engine: EngineConfig, num_holders: int) -> tuple[EngineConfig, str]:
    """Return the engine's settings with a policy in place of auto, and why it has that policy."""
    if engine.scheduling_policy != "auto":
        return engine, "set by --scheduling-policy"
    policy = "fair" if num_holders > 1 else "fcfs"
    why = f"the keys have {num_holders} holders" if num_holders > 1 else "there are no keys of several holders"
    return msgspec.structs.replace(engine, scheduling_policy=policy), why
