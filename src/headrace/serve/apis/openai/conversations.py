"""OpenAI's /v1/conversations: lists of items under a lasting id, which responses continue and extend.

Kept in a `Store` like responses, but never evicted: clients delete their conversations. `responses` reads `items` as
the history of a response, and calls `append` when it has ended. `add_routes` puts the routes on an app.
"""

from __future__ import annotations

import logging
import secrets
import time
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import msgspec
from msgspec import UNSET
from starlette.applications import Starlette
from starlette.responses import Response

from headrace.protocol.errors import RequestError
from headrace.serve import routing
from headrace.serve.apis.openai.files import PAGE, Named, NotFoundError, large_page
from headrace.serve.apis.openai.reply import Deleted, Page
from headrace.serve.apis.openai.responses_input import (
    NamedItem,
    ResponsesRequest,
    input_items,
    messages_of,
    without_hosted,
)
from headrace.serve.apis.openai.responses_stored import StoredText, written
from headrace.serve.call.parsing import Body, WarningLines, Warnings, convert
from headrace.serve.call.schema import check_metadata
from headrace.serve.storage.store import Store
from headrace.serve.storage.writers import Writers
from headrace.text.pictures.marks import Pictures

logger = logging.getLogger("headrace.server")

MAX_ITEMS = 8192
"""Items of one conversation."""
MAX_NEW_ITEMS = 20
"""Items that one call adds, as in OpenAI's API."""
DEFAULT_PAGE = 20


class ConversationRequest(Body, forbid_unknown_fields=True, kw_only=True):
    """POST /v1/conversations, and POST /v1/conversations/{conversation_id}, which takes the metadata alone."""

    items: list[Any] | None = None
    metadata: dict[str, str] | None = None


class ConversationItemsRequest(Body, forbid_unknown_fields=True, kw_only=True):
    """POST /v1/conversations/{conversation_id}/items."""

    items: list[Any]


class Conversation(msgspec.Struct, kw_only=True):
    id: str
    object: Literal["conversation"] = "conversation"
    created_at: int
    metadata: dict[str, str]
    warnings: WarningLines = UNSET


class ItemPage(Page, kw_only=True):
    data: list[msgspec.Raw]
    warnings: WarningLines = UNSET


_named = msgspec.json.Decoder(Named)


class Conversations:
    """The routes without HTTP. `store` keeps the object as metadata, and the items as the body, a line each. They stay
    as they were written: the text of one item may be long."""

    def __init__(self, store: Store, writers: Writers) -> None:
        self.store, self._writers = store, writers

    async def create(self, body: dict[str, Any]) -> Conversation:
        """Begin a conversation, with some items or none."""
        request = convert(ConversationRequest, body)
        check_metadata(request.metadata)
        items = _new_items(request.items or [])
        conversation = Conversation(
            id=self.store.new_id(), created_at=int(time.time()), metadata=request.metadata or {}
        )
        metadata = msgspec.to_builtins(conversation)
        await self._writers.run(self.store.put, conversation.id, metadata, _lines(items))
        conversation.warnings = request.warnings.reply()
        return conversation

    async def get(self, conversation_id: str) -> Conversation:
        """A conversation, without its items."""
        metadata = self.store.metadata(conversation_id)
        if metadata is None:
            raise NotFoundError("conversation", conversation_id)
        return msgspec.convert(metadata, Conversation)

    async def update(self, conversation_id: str, body: dict[str, Any]) -> Conversation:
        """Replace the metadata of a conversation."""
        request = convert(ConversationRequest, body)
        check_metadata(request.metadata)
        if request.items is not None:
            raise RequestError("items", len(request.items), "left out: they are added at .../items")
        conversation = await self.get(conversation_id)
        conversation.metadata = request.metadata or {}
        await self._writers.run(self.store.set_metadata, conversation_id, msgspec.to_builtins(conversation))
        conversation.warnings = request.warnings.reply()
        return conversation

    async def delete(self, conversation_id: str) -> Deleted:
        """Delete a conversation and its items."""
        if conversation_id not in self.store:
            raise NotFoundError("conversation", conversation_id)
        await self._writers.run(self.store.delete, conversation_id)
        return Deleted(id=conversation_id, object="conversation.deleted", deleted=True)

    async def items(self, conversation_id: str) -> list[msgspec.Raw]:
        """Return the items, oldest first. Raises `NotFoundError`, `StorageError`."""
        await self.get(conversation_id)
        return await self._writers.run(self._items, conversation_id)

    async def page(self, conversation_id: str, query: Mapping[str, str]) -> Response:
        """The items of a conversation."""
        return await large_page(ItemPage, await self.items(conversation_id), query, DEFAULT_PAGE)

    async def add(self, conversation_id: str, body: dict[str, Any]) -> Response:
        """Add items at the end of a conversation."""
        request = convert(ConversationItemsRequest, body)
        if not request.items:
            raise RequestError("items", request.items, "at least one item")
        items = _new_items(request.items)
        await self.get(conversation_id)
        added = await self.append(conversation_id, items)
        warnings = request.warnings.reply()
        return await large_page(ItemPage, added, {"order": "asc"}, MAX_NEW_ITEMS, warnings=warnings)

    async def item(self, conversation_id: str, item_id: str) -> Response:
        """One item of a conversation."""

        def find() -> memoryview:
            items = self._items(conversation_id)
            return memoryview(items[_place(items, item_id)])

        await self.get(conversation_id)
        return routing.json_in_parts([await self._writers.run(find)])

    async def remove(self, conversation_id: str, item_id: str) -> Conversation:
        """Delete one item of a conversation."""

        def change() -> None:
            items = self._items(conversation_id)
            del items[_place(items, item_id)]
            self.store.set_body(conversation_id, _lines(items))

        conversation = await self.get(conversation_id)
        await self._writers.run(change)
        return conversation

    async def append(self, conversation_id: str, items: Sequence[Any]) -> list[msgspec.Raw]:
        """Add items that have ids, as msgspec writes them. Returns them as they were written. Raises `RequestError` for
        too many, `NotFoundError`, and errors of the store."""

        def change() -> list[msgspec.Raw]:
            added = [msgspec.Raw(b"".join(written(item))) for item in items]
            whole = [*self._items(conversation_id), *added]
            if len(whole) > MAX_ITEMS:
                raise RequestError("items", len(whole), f"at most {MAX_ITEMS} in a conversation")
            self.store.set_body(conversation_id, _lines(whole))
            return added

        return await self._writers.run(change)

    def _items(self, conversation_id: str) -> list[msgspec.Raw]:
        if conversation_id not in self.store:
            raise NotFoundError("conversation", conversation_id)
        body = self.store.body(conversation_id)
        try:
            if body.startswith(b"["):  # written as one list, before items had lines
                return msgspec.json.decode(body, type=list[msgspec.Raw])
            items, begin, view = [], 0, memoryview(body)
            while begin < len(body):
                end = body.index(b"\n", begin)
                items.append(msgspec.Raw(view[begin:end]))
                _named.decode(StoredText(items[-1]).short())
                begin = end + 1
            return items
        except (ValueError, msgspec.DecodeError, RecursionError) as error:
            logger.warning("the stored conversation %s can not be read: %s", conversation_id, error)
            raise NotFoundError("conversation", conversation_id) from error


def _lines(items: Sequence[Any]) -> bytes:
    """Return the JSON of items, a line each: lines are found far faster than JSON is read."""
    return b"".join(piece for item in items for piece in (*written(item), b"\n"))


def _place(items: Sequence[msgspec.Raw], item_id: str) -> int:
    for place, item in enumerate(items):
        if _named.decode(StoredText(item).short()).id == item_id:
            return place
    raise NotFoundError("item", item_id)


def _new_items(entries: list[Any]) -> list[dict[str, Any]]:
    """Return a request's items with ids. Raises `RequestError` for items that no response could continue."""
    if len(entries) > MAX_NEW_ITEMS:
        raise RequestError("items", len(entries), f"at most {MAX_NEW_ITEMS} in one call")
    if not entries:
        return []
    try:
        items = input_items(ResponsesRequest(input=entries), secrets.token_hex(16))
    except RequestError as error:
        raise error.renamed(error.field.replace("input", "items", 1)) from None
    named = [NamedItem(f"items[{index}]", item) for index, item in enumerate(items)]
    # The warnings belong to the response that is made of the items later.
    messages_of(None, without_hosted(named, Warnings()), Warnings(), Pictures())
    return items


def add_routes(app: Starlette, conversations: Conversations) -> None:
    """/v1/conversations."""
    one = "/v1/conversations/{conversation_id}"
    every, single = f"{one}/items", f"{one}/items/{{item_id}}"
    routing.post(app, "/v1/conversations", conversations.create, takes=ConversationRequest, gives=Conversation)
    routing.get(app, one, conversations.get, gives=Conversation)
    routing.post(app, one, conversations.update, takes=ConversationRequest, gives=Conversation)
    routing.add(app, one, conversations.delete, ("DELETE",), gives=Deleted)
    routing.get(app, every, conversations.page, gives=ItemPage, query=PAGE)
    routing.post(app, every, conversations.add, takes=ConversationItemsRequest, gives=ItemPage)
    routing.get(app, single, conversations.item, gives=dict[str, Any])
    routing.add(app, single, conversations.remove, ("DELETE",), gives=Conversation)
