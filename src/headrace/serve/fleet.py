"""`GET /fleet`: the engines behind the server, a row for each; `POST /fleet/update`: new ones in their place, while
requests run (`fleet.engines.update`).

Where keys are set, the first needs one of the class metrics, the second an administrator's. Both concern the engines of
the model that stays loaded.
"""

from __future__ import annotations

import asyncio
import contextvars
from collections.abc import Callable
from typing import Any

import msgspec
from starlette.applications import Starlette

from headrace.engine.client import EngineClient
from headrace.fleet.engines.client import Fleet
from headrace.fleet.engines.local import LocalFleet
from headrace.fleet.engines.state import FleetState, state_of
from headrace.fleet.engines.update import PATIENCE_S, RollingUpdate
from headrace.protocol.errors import RequestError
from headrace.serve import routing
from headrace.serve.call.parsing import Body, convert
from headrace.serve.errors import CallError, without_paths
from headrace.serve.loading import RunningModel, RunningModels


class UpdateRequest(Body, kw_only=True):
    """The body of `POST /fleet/update`. `settings` are the settings in which the new engines differ from the server's,
    by the names of the flags: {"max_num_seqs": 64}. For `patience` seconds requests may end in an old engine before
    they go on in another one. With `wait` the reply comes when the update has ended, without it at once."""

    settings: dict[str, Any] = msgspec.field(default_factory=dict)
    patience: float = PATIENCE_S
    wait: bool = True


def add_routes(app: Starlette, models: RunningModels, check_order: Callable[[], None]) -> None:
    """Add the routes. `check_order` raises an error in a state of the server in which no update may begin."""
    tasks: set[asyncio.Task[None]] = set()

    def default() -> RunningModel:
        if models.default is None:
            raise CallError(404, "no_fleet", "all models of this server come and go by themselves, an engine for each")
        return models.default

    def state() -> FleetState:
        """The engines of the server, a row for each, and the progress of an update."""
        model = default()
        fleet = state_of(model.client, model.served.name)
        if fleet.update is not None and fleet.update.error:
            fleet.update = msgspec.structs.replace(fleet.update, error=without_paths(fleet.update.error))
        return fleet

    async def update(body: dict[str, Any]) -> FleetState:
        """Put new engines into the place of the old ones, one after the other. Running answers go on."""
        request = convert(UpdateRequest, body)
        if not 0 <= request.patience <= 86400:
            raise RequestError("patience", request.patience, "from 0 to 86400 seconds")
        model = default()
        updates = updates_of(model.client)
        check_order()
        updates.settings_of(request.settings)
        await model.check_text()

        def ended(task: asyncio.Task[None]) -> None:
            tasks.discard(task)
            if not task.cancelled() and task.exception() is None:
                model.forget_files()

        # The update goes on if the caller leaves, and belongs to no call.
        work = updates.run(request.settings, request.patience)
        task = asyncio.create_task(work, context=contextvars.Context())
        tasks.add(task)
        task.add_done_callback(ended)
        if request.wait:
            await asyncio.shield(task)
        else:
            await asyncio.sleep(0)
        return state()

    routing.get(app, "/fleet", state, gives=FleetState)
    routing.post(app, "/fleet/update", update, takes=UpdateRequest, gives=FleetState)


def updates_of(client: EngineClient) -> RollingUpdate:
    """Return the rolling update of a client's engines. Raises `CallError` where they cannot be replaced."""
    if isinstance(client, LocalFleet):
        return client.updates
    if isinstance(client, Fleet):
        why = "its engines are started elsewhere: replace them there"
    else:
        why = "it has one engine: start it with --data-parallel-size 2 or more, or restart it"
    raise CallError(409, "no_update", f"this server can not update its engines: {why}")
