"""`Ends`: stores responses that have ended, and adds them to their conversations.

A response is answered whether or not it can be stored, and its caller reads in `store` and `warnings` that it is not.
Knows stores and no engine; called by `responses`.
"""

from __future__ import annotations

import asyncio
import logging
from typing import Protocol

from headrace.protocol.errors import HeadraceError
from headrace.serve.apis.openai.conversations import Conversations
from headrace.serve.apis.openai.responses_events import ConversationRef, ResponseObject
from headrace.serve.apis.openai.responses_input import ResponsesRequest
from headrace.serve.apis.openai.responses_replay import StoredResponse
from headrace.serve.apis.openai.responses_stored import written_entry
from headrace.serve.storage.space import StorageError
from headrace.serve.storage.store import Store, StoreFullError
from headrace.serve.storage.writers import Writers

logger = logging.getLogger("headrace.server")

DISK_AGAIN_S = 5.0
"""Seconds after which the end of a response in the background is stored again, while the disk fails."""


class Ending(Protocol):
    """The answer to a request for a response. `warn` adds a warning to the response."""

    id: str
    request: ResponsesRequest
    response: ResponseObject
    entry: StoredResponse

    def warn(self, field: str, why: str) -> None: ...


class Ends:
    """`store` has the responses. `tasks` write those whose callers are gone, by id."""

    def __init__(self, store: Store, writers: Writers, conversations: Conversations | None) -> None:
        self._store, self._writers, self._conversations = store, writers, conversations
        self.tasks: dict[str, asyncio.Task[None]] = {}

    async def keep(self, answer: Ending) -> None:
        """Store the final state of a response, if it is stored and was not deleted. One in the background waits until
        the disk works again, and can be read meanwhile."""
        waits = False
        while answer.response.store:
            try:
                await self._writers.run(self._keep, answer.entry)
            except (StorageError, StoreFullError) as error:
                if answer.request.background and isinstance(error, StorageError):
                    if not waits:
                        logger.warning("response %s waits: %s", answer.id, error)
                    waits = True
                    await asyncio.sleep(DISK_AGAIN_S)
                    continue
                # A later read would find a part of the response only.
                await self._writers.run(self._store.discard, answer.id)
                is_not_kept(answer, error)
            return

    def keep_later(self, answer: Ending) -> None:
        """Store the final state of a response whose caller is gone."""
        if answer.response.store:
            task = asyncio.ensure_future(self.keep(answer))
            self.tasks[answer.id] = task
            task.add_done_callback(lambda _: self.tasks.pop(answer.id))

    async def add_to_conversation(self, answer: Ending) -> None:
        """Add the input and output of a response to its conversation, if it has one."""
        entry, response = answer.entry, answer.response
        if self._conversations is None or not isinstance(response.conversation, ConversationRef):
            return
        try:
            await self._conversations.append(response.conversation.id, [*entry.input, *response.output])
        except HeadraceError as error:
            logger.warning("response %s is not added to its conversation: %s", response.id, error)
            answer.warn("conversation", f"the response is not added to it: {error}")

    def settle(self, entry: StoredResponse) -> None:
        """Store the end of a response of an earlier server, or forget it."""
        try:
            self._keep(entry)
        except (StorageError, StoreFullError) as error:
            logger.warning("response %s is not kept: %s", entry.response.id, error)
            self._store.discard(entry.response.id)

    def _keep(self, entry: StoredResponse) -> None:
        if entry.response.id in self._store:
            self._store.set_body(entry.response.id, written_entry(entry))


def is_not_kept(answer: Ending, error: HeadraceError) -> None:
    """Note in a response that it is answered and not stored, and why."""
    logger.warning("response %s is not kept: %s", answer.id, error)
    answer.response.store = False
    answer.warn("store", f"the response is not kept: {error}")
