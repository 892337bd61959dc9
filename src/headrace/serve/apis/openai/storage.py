"""`Storage`: the data that the server keeps for its clients: files, batches, stored responses and conversations.

`serve.app` passes its numbers. Knows the modules of its folder and no config.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path
from typing import Any

import msgspec
from starlette.applications import Starlette

from headrace.serve.apis.openai import batches, completions, conversations, embeddings, files, responses_paths
from headrace.serve.apis.openai.batches import Batches, StoredBatch
from headrace.serve.apis.openai.conversations import Conversation, Conversations
from headrace.serve.apis.openai.embeddings import Embeddings
from headrace.serve.apis.openai.files import MAX_FILES, Files, StoredFile
from headrace.serve.apis.openai.responses import Responses
from headrace.serve.call.models import ModelSet, Running
from headrace.serve.call.service import ServedModel
from headrace.serve.gates.overload import Overload, Work
from headrace.serve.routing import Readable, large_event, num_entries
from headrace.serve.storage.batch_lines import Answerer, Route
from headrace.serve.storage.store import Store
from headrace.serve.storage.writers import Writers

# Of each holder of a key.
MAX_BATCHES = 1024
MAX_BATCH_BYTES = 16 * 2**20
MAX_RESPONSES = 4096
MAX_CONVERSATIONS = 4096
MAX_KEPT_BYTES = 48 * 2**20
"""Bytes of one response or conversation: a search through more of them holds the interpreter's lock for too long."""
LATEST = 2**31 - 1
"""The lowest priority."""


class Storage:
    """The stores, and the background work on them.

    Args:
        folder: the folder where the data outlive the server; None keeps them in memory.
        max_bytes: of files, of stored responses, and of conversations, for each of the three; a holder of a key has its
            share of `shares`.
        concurrency: lines of batches that are open at once.
        overload: says whether work that can wait is refused.
    """

    def __init__(
        self,
        models: ModelSet,
        folder: str | None,
        max_bytes: int,
        shares: Mapping[str, int],
        concurrency: int,
        overload: Overload,
    ) -> None:
        def place(name: str) -> Path | None:
            return None if folder is None else Path(folder).expanduser() / name

        self.models = models
        most: dict[str, Any] = {"max_bytes": max_bytes, "shares": shares}
        file_store = Store("file-", place("files"), max_items=MAX_FILES, kind=StoredFile, **most)
        batch_store = Store(
            "batch_", place("batches"), max_items=MAX_BATCHES, max_bytes=MAX_BATCH_BYTES, kind=StoredBatch
        )
        most["max_entry_bytes"] = MAX_KEPT_BYTES
        response_store = Store("resp_", place("responses"), max_items=MAX_RESPONSES, evict=True, **most)
        conversation_store = Store(
            "conv_", place("conversations"), max_items=MAX_CONVERSATIONS, kind=Conversation, **most
        )
        self.writers = Writers()
        self.conversations = Conversations(conversation_store, self.writers)
        self.files = Files(file_store)
        self.responses = Responses(response_store, self.writers, self.conversations, overload)
        self.embeddings = models.bind(Embeddings)
        self._answerer = answerer(models, self.responses)
        self.batches = Batches(batch_store, self.files, self.writers, self._answerer, concurrency, models.num_waiting)
        self.batches.is_held_back = lambda: overload.refuses(Work.LATER)

    def start(self, policy: str | None) -> None:
        """Go on with batches, now that the engine runs. `policy` is the order of its waiting requests."""
        if policy == "priority":
            self._answerer.priority = LATEST
        self.batches.start()

    async def close(self) -> None:
        """Stop the background work. Batches go on with the next start, if a folder keeps them."""
        await self.batches.close()
        await self.responses.close()
        await asyncio.to_thread(self.writers.close)
        for store in (self.files.store, self.batches.store, self.responses.store, self.conversations.store):
            store.close()


def answerer(models: ModelSet, responses: Responses) -> Answerer:
    """Return the `Answerer` of the lines of batches."""

    def whole(create: Callable[[ServedModel, dict[str, Any]], Awaitable[Readable]]) -> Route:
        async def route(model: ServedModel, body: dict[str, Any]) -> Any:
            answer = await create(model, body)
            try:
                reply, size = await answer.whole(), answer.answer.size
            finally:
                answer.close()
            return msgspec.Raw(await large_event(reply, size, b"", b""))

        return models.bound(route)

    async def embed(model: ServedModel, body: dict[str, Any]) -> Any:
        reply = await Embeddings(model).create(body)
        return msgspec.Raw(await large_event(reply, num_entries(reply), b"", b""))

    return Answerer(
        {
            "/v1/chat/completions": whole(completions.chat),
            "/v1/completions": whole(completions.complete),
            "/v1/embeddings": models.bound(embed),
            # Not stored unless the line has `store`.
            "/v1/responses": whole(lambda model, body: responses.create(model, {"store": False} | body)),
        }
    )


def offline_answerer(model: Running) -> Answerer:
    """Return the `Answerer` for use without a server: responses are not stored."""
    nowhere = Store("resp_", None, max_items=1, max_bytes=MAX_BATCH_BYTES, evict=True)
    return answerer(ModelSet(model), Responses(nowhere, Writers()))


def add_routes(app: Starlette, storage: Storage) -> None:
    """/v1/files, /v1/batches, /v1/responses, /v1/conversations and /v1/embeddings."""
    files.add_routes(app, storage.files, storage.writers)
    batches.add_routes(app, storage.batches)
    responses_paths.add_routes(app, storage.models, storage.responses)
    conversations.add_routes(app, storage.conversations)
    embeddings.add_routes(app, storage.embeddings)
