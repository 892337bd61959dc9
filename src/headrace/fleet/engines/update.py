"""`RollingUpdate`: new engines in the place of a fleet's, one after the other, while requests run.

A new engine starts next to the old ones, from the same model path: the files there may have changed, and so may some of
the engine's settings. Once it has made a token it gets new requests, and the old one whose place it takes gets no more.
Requests that the old one has end there or go on in another of its fingerprint; then it ends. Knows no processes:
`Starter` makes the links. Made by `fleet.engines.local`; called by `serve.fleet`.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Coroutine, Mapping
from typing import Any, Protocol

import msgspec

from headrace.engine.links import Link
from headrace.engine.replica import Replica
from headrace.fleet.engines.client import Fleet
from headrace.protocol.config import EngineConfig
from headrace.protocol.errors import EngineDeadError, HeadraceError, RequestError

logger = logging.getLogger("headrace.engine")

PATIENCE_S = 30.0
"""Seconds that requests may end in an old engine before they go to another one."""
FIXED = frozenset(
    "model tokenizer revision device seed skip_tokenizer_init scheduling_policy record_schedule "
    "max_record_bytes".split()
)
"""Settings that an update leaves as they are: the server has read them, or its queue follows them."""


class Starter(Protocol):
    """Makes the links of engines that take the places of others."""

    def link(self, config: EngineConfig, old: Replica) -> Link:
        """Return the link of an engine that is to take the place of `old`."""
        ...

    def took(self, new: Replica, config: EngineConfig, old: Replica) -> None:
        """Note that `new` has taken the place of `old`."""
        ...


class UpdateProgress(msgspec.Struct, kw_only=True):
    """An update that runs, or the last one. `state`: running, done or failed; `num_replaced` of `num_replicas` engines
    are new. `settings` differ from the server's. `error` says why it failed. `seconds`: how long it took."""

    state: str
    num_replaced: int
    num_replicas: int
    settings: dict[str, Any]
    seconds: float = 0.0
    error: str = ""


class UpdateError(HeadraceError):
    """A rolling update ended early (HTTP 409). The engines that it had replaced stay."""

    status = 409
    code = "update_failed"


class RollingUpdate:
    """Updates `fleet`, whose engines were started with `config`, by links of `starter`."""

    def __init__(self, fleet: Fleet, config: EngineConfig, starter: Starter) -> None:
        self.progress: UpdateProgress | None = None
        self._fleet = fleet
        self._config = config
        self._starter = starter

    @property
    def is_running(self) -> bool:
        return self.progress is not None and self.progress.state == "running"

    def settings_of(self, settings: Mapping[str, Any]) -> EngineConfig:
        """Return the settings of new engines: the server's own, with these in their place. Raises `RequestError`."""
        fields = {field.name: field for field in msgspec.structs.fields(EngineConfig)}
        values: dict[str, Any] = {}
        for name, value in settings.items():
            if name not in fields or name in FIXED:
                raise RequestError(name, value, "left out: the server has to be restarted for it" if name in FIXED else
                                   "a setting of an engine: " + ", ".join(sorted(fields.keys() - FIXED)))  # fmt: skip
            try:
                # Speculation's settings have their own reader.
                is_plain = name != "speculative_config"
                values[name] = msgspec.convert(value, fields[name].type) if is_plain else value
            except msgspec.ValidationError as error:
                raise RequestError(name, value, f"of another type: {error}") from None
        return EngineConfig(**{name: getattr(self._config, name) for name in fields} | values)

    def run(self, settings: Mapping[str, Any], patience: float = PATIENCE_S) -> Coroutine[Any, Any, None]:
        """Begin to replace all engines, which the coroutine does. It ends by itself when the fleet is closed.

        Raises `RequestError` for settings that cannot be, and `UpdateError` if an update is running. The coroutine
        raises `UpdateError` if a new engine does not start."""
        if self.is_running:
            raise UpdateError("an update is running; GET /fleet shows how far it is")
        config = self.settings_of(settings)
        old = list(self._fleet.replicas)
        progress = self.progress = UpdateProgress(
            state="running", num_replaced=0, num_replicas=len(old), settings=dict(settings)
        )
        return self._run(progress, old, config, patience)

    async def _run(self, progress: UpdateProgress, old: list[Replica], config: EngineConfig, patience: float) -> None:
        began = time.monotonic()
        logger.info("an update begins: %d engines are replaced", len(old))
        try:
            for replica in old:
                await self._replace(replica, config, patience)
                progress.num_replaced += 1
                logger.info("%d of %d engines are replaced", progress.num_replaced, len(old))
            progress.state = "done"
        except asyncio.CancelledError:
            progress.state, progress.error = "failed", "it was cancelled"
            raise
        except (HeadraceError, OSError) as error:
            progress.state, progress.error = "failed", str(error)
            logger.error("the update ended after %d of %d engines: %s", progress.num_replaced, len(old), error)
            many = f"{progress.num_replaced} of {len(old)} engines were replaced"
            raise UpdateError(f"{many}; the next one did not start: {error}") from error
        finally:
            progress.seconds = time.monotonic() - began

    async def _replace(self, old: Replica, config: EngineConfig, patience: float) -> None:
        new = self._fleet.add(self._starter.link(config, old))
        self._starter.took(new, config, old)
        await self._fleet.started(new)
        await self._fleet.remove(old.index, patience)
        if self._fleet.is_closed:
            raise EngineDeadError("the server is shutting down")
