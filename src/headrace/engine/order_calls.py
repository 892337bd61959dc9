"""`Orders`: the server's side of `engine.orders`: sends an order to the engine, and waits for its result.

Knows no files and no HTTP. `engine.replica` owns it and passes on the replies.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import TypeVar

import msgspec

from headrace.engine.orders import Body
from headrace.protocol import frames
from headrace.protocol.errors import EngineDeadError
from headrace.text.inputs import new_request_id

Result = TypeVar("Result")


class NotUpError(EngineDeadError):
    """There is no engine now that could take an order."""

    retry_after = 1


ANSWER_S = 600.0
"""Seconds that the engine has for an order: a session file may be many gigabytes."""


class Orders:
    """The orders that the engine has not answered. `post` sends a message to the engine, which `is_up` or not."""

    def __init__(self, post: Callable[[frames.ToEngine], None], is_up: Callable[[], bool]) -> None:
        self._post = post
        self._is_up = is_up
        self._open: dict[str, asyncio.Future[bytes]] = {}

    async def give(self, order: Body, result_type: type[Result]) -> Result:
        """Send an order, and return its result. Raises `EngineDeadError`, at once while there is no engine."""
        if not self._is_up():
            raise NotUpError("the engine takes no orders while it loads, restarts or sleeps")
        order_id = new_request_id()
        future: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()
        self._open[order_id] = future
        self._post(frames.Order(order_id, msgspec.msgpack.encode(order)))
        try:
            async with asyncio.timeout(ANSWER_S):
                return msgspec.msgpack.decode(await future, type=result_type)
        except TimeoutError:
            raise EngineDeadError(f"the engine has not carried out an order within {ANSWER_S:g} s") from None
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise EngineDeadError(f"the engine's reply to an order is none: {error}") from error
        finally:
            self._open.pop(order_id, None)

    def settle(self, order_id: str, body: bytes) -> None:
        """Pass a reply on, if someone still waits for it."""
        future = self._open.get(order_id)
        if future is not None and not future.done():
            future.set_result(body)

    def fail_all(self) -> None:
        """End all orders: the engine is gone."""
        for future in self._open.values():
            if not future.done():
                future.set_exception(EngineDeadError("the engine died over an order"))
