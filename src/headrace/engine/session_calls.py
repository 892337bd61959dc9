"""`SessionCalls`: the server's side of session files. Sends the engine what to move, and waits for its reply.

Knows no files and no HTTP. `engine.client` owns it and passes on the replies; the routes of slots call `move`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

from headrace.protocol.errors import EngineDeadError
from headrace.protocol.frames import MoveSession, SessionMoved
from headrace.text.inputs import new_request_id


class SessionCalls:
    """The orders that the engine has not answered. `post` sends a message to the engine."""

    def __init__(self, post: Callable[[Any], None]) -> None:
        self._post = post
        self._open: dict[str, asyncio.Future[SessionMoved]] = {}

    async def move(self, path: str, weights: str, **fields: Any) -> SessionMoved:
        """Save or restore a session; `fields` are further ones of `MoveSession`. Raises `EngineDeadError`."""
        order = MoveSession(session_id=new_request_id(), path=path, weights=weights, **fields)
        future: asyncio.Future[SessionMoved] = asyncio.get_running_loop().create_future()
        self._open[order.session_id] = future
        self._post(order)
        try:
            return await future
        finally:
            self._open.pop(order.session_id, None)

    def settle(self, moved: SessionMoved) -> None:
        """Pass a reply on, if someone still waits for it."""
        future = self._open.get(moved.session_id)
        if future is not None and not future.done():
            future.set_result(moved)

    def fail_all(self) -> None:
        """End all orders: the engine is gone."""
        for future in self._open.values():
            if not future.done():
                future.set_exception(EngineDeadError("the engine died while it moved a session"))
