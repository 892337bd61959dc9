"""Everything that the server keeps for its clients, put together: files, batches and stored responses.

Handed its numbers by `serve.app`. Knows the modules beside it and no config.
"""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path
from typing import Any

from starlette.applications import Starlette

from headrace.serve.apis.openai import batches, completions, embeddings, files, responses
from headrace.serve.apis.openai.batches import Batches
from headrace.serve.apis.openai.embeddings import Embeddings
from headrace.serve.apis.openai.files import MAX_FILES, Files
from headrace.serve.apis.openai.responses import Responses
from headrace.serve.call.service import ServedModel
from headrace.serve.routing import Readable
from headrace.serve.storage.batch_lines import Answerer, Route
from headrace.serve.storage.store import Store
from headrace.serve.storage.writers import Writers

# Of each holder of a key.
MAX_BATCHES = 1024
MAX_BATCH_BYTES = 16 * 2**20
MAX_RESPONSES = 4096
LATEST = 2**31 - 1
"""The priority that goes last."""


class Storage:
    """What is kept, and who works on it.

    Args:
        folder: where it outlives the server; None keeps it in memory.
        max_bytes: of files, and of stored responses, for each of the two; a holder of a key has its share of `shares`.
        concurrency: lines of batches that are open at once.
    """

    def __init__(
        self, model: ServedModel, folder: str | None, max_bytes: int, shares: Mapping[str, int], concurrency: int
    ) -> None:
        def place(name: str) -> Path | None:
            return None if folder is None else Path(folder).expanduser() / name

        self.model = model
        most: dict[str, Any] = {"max_bytes": max_bytes, "shares": shares}
        file_store = Store("file-", place("files"), max_items=MAX_FILES, **most)
        batch_store = Store("batch_", place("batches"), max_items=MAX_BATCHES, max_bytes=MAX_BATCH_BYTES)
        response_store = Store("resp_", place("responses"), max_items=MAX_RESPONSES, evict=True, **most)
        self.writers = Writers()
        self.files = Files(file_store)
        self.responses = Responses(model, response_store, self.writers)
        self.embeddings = Embeddings(model)
        self._answerer = answerer(model, self.responses, self.embeddings)
        client = model.front.client
        self.batches = Batches(
            batch_store, self.files, self.writers, self._answerer, concurrency, lambda: client.num_waiting
        )

    def start(self) -> None:
        """The engine is there: go on with batches."""
        if self.model.front.info.scheduling_policy == "priority":
            self._answerer.priority = LATEST
        self.batches.start()

    async def close(self) -> None:
        """Stop what runs in the background. Batches go on with the next start, if a folder keeps them."""
        await self.batches.close()
        await self.responses.close()
        await asyncio.to_thread(self.writers.close)
        for store in (self.files.store, self.batches.store, self.responses.store):
            store.close()


def answerer(model: ServedModel, responses: Responses, embeddings: Embeddings) -> Answerer:
    """Return what answers the lines of batches."""

    def whole(create: Callable[[dict[str, Any]], Awaitable[Readable]]) -> Route:
        async def route(body: dict[str, Any]) -> Any:
            answer = await create(body)
            try:
                return await answer.whole()
            except BaseException:
                answer.close()
                raise

        return route

    return Answerer(
        {
            "/v1/chat/completions": whole(functools.partial(completions.chat, model)),
            "/v1/completions": whole(functools.partial(completions.complete, model)),
            "/v1/embeddings": embeddings.create,
            # Not stored unless the line says so.
            "/v1/responses": whole(lambda body: responses.create({"store": False} | body)),
        }
    )


def offline_answerer(model: ServedModel) -> Answerer:
    """Return the same without a server: responses are not stored."""
    nowhere = Store("resp_", None, max_items=1, max_bytes=MAX_BATCH_BYTES, evict=True)
    return answerer(model, Responses(model, nowhere, Writers()), Embeddings(model))


def add_routes(app: Starlette, storage: Storage) -> None:
    """/v1/files, /v1/batches, /v1/responses and /v1/embeddings."""
    files.add_routes(app, storage.files, storage.writers)
    batches.add_routes(app, storage.batches)
    responses.add_routes(app, storage.responses)
    embeddings.add_routes(app, storage.embeddings)
