"""vLLM's routes of adapters: POST /v1/load_lora_adapter and /v1/unload_lora_adapter, for administrators.

An adapter is a model of its own to clients: `model` names it, and GET /v1/models lists it under its parent. Knows
served models and their engines; must not know files. `add_routes` puts the routes on an app.
"""

from __future__ import annotations

import asyncio
import logging
from typing import Any

from starlette.applications import Starlette
from starlette.responses import PlainTextResponse, Response

from headrace.protocol.errors import ModelNotFoundError, RequestError
from headrace.serve import routing
from headrace.serve.call.models import ModelSet, Running
from headrace.serve.call.parsing import Body
from headrace.serve.call.schema import parse

logger = logging.getLogger("headrace.server")

MAX_NAME = 256


class LoadRequest(Body, kw_only=True):
    """POST /v1/load_lora_adapter. `lora_path`: a folder or file on the server. With `load_inplace` one of the
    same name is replaced for requests to come."""

    lora_name: str
    lora_path: str
    load_inplace: bool = False


class UnloadRequest(Body, kw_only=True):
    """POST /v1/unload_lora_adapter. `lora_int_id` is taken and has no effect: names are enough here."""

    lora_name: str
    lora_int_id: int | None = None


class AdapterRoutes:
    """The routes of the model that stays loaded. One change at a time."""

    def __init__(self, models: ModelSet) -> None:
        self._models = models
        self._lock = asyncio.Lock()

    async def load(self, body: dict[str, Any]) -> Response:
        """Load an adapter, which requests may name from now on.

        Raises `RequestError`, `EngineDeadError`."""
        request = parse(LoadRequest, body)
        running, name = self._running(), request.lora_name
        if not 1 <= len(name) <= MAX_NAME:
            raise RequestError("lora_name", name[:80], f"1 to {MAX_NAME} characters")
        async with self._lock:
            if name in self._models.names() and not (request.load_inplace and name in running.served.adapters):
                raise RequestError("lora_name", name, "a name that no model and no adapter has yet")
            old = running.served.adapters.get(name)
            adapter = await running.client.load_adapter(name, request.lora_path)
            running.served.adapters[name] = adapter
            if old is not None and old.digest != adapter.digest and not self._is_used(running, old.digest):
                await running.client.unload_adapter("", old.digest)
        logger.info("adapter %s loaded", name)
        return PlainTextResponse(f"Success: LoRA adapter '{name}' added successfully.")

    async def unload(self, body: dict[str, Any]) -> Response:
        """Forget an adapter that no request uses.

        Raises `ModelNotFoundError`, `RequestError`, `EngineDeadError`."""
        request = parse(UnloadRequest, body)
        running, name = self._running(), request.lora_name
        async with self._lock:
            adapter = running.served.adapters.get(name)
            if adapter is None:
                raise ModelNotFoundError(f"lora_name: {name[:80]!r} is not loaded")
            del running.served.adapters[name]
            try:
                if not self._is_used(running, adapter.digest):
                    await running.client.unload_adapter(name, adapter.digest)
            except BaseException:
                running.served.adapters[name] = adapter
                raise
        logger.info("adapter %s unloaded", name)
        return PlainTextResponse(f"Success: LoRA adapter '{name}' removed successfully.")

    @staticmethod
    def _is_used(running: Running, digest: str) -> bool:
        """Whether another name has the same adapter."""
        return any(each.digest == digest for each in running.served.adapters.values())

    def _running(self) -> Running:
        if self._models.default is None:
            raise RequestError("lora_name", None, "left out: adapters belong to a model that was named at the start")
        return self._models.default


def add_routes(app: Starlette, models: ModelSet) -> None:
    """Add both routes."""
    routes = AdapterRoutes(models)
    routing.post(app, "/v1/load_lora_adapter", routes.load, takes=LoadRequest, gives=str)
    routing.post(app, "/v1/unload_lora_adapter", routes.unload, takes=UnloadRequest, gives=str)
