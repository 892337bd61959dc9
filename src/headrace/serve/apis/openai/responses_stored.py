"""Responses and their items as they are stored: log-probabilities can be passed over, or read in slices.

A decoder of JSON scans each byte in one call that holds the interpreter's lock, and an answer may have a million
log-probabilities. So a tab stands before and behind each piece of them: outside texts it is white space, and the JSON
that is stored has no other. A tab is found far faster than JSON is read. Called by `responses`, `responses_ends`,
`responses_input` and `conversations`.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import msgspec
from msgspec.structs import replace

from headrace.engine.generation import width
from headrace.serve.apis.openai.files import NotFoundError
from headrace.serve.apis.openai.responses_events import OutputItem
from headrace.serve.apis.openai.responses_replay import EncodedResponse, RawResponse, ResponseItems
from headrace.serve.routing import PIECE, json_pieces
from headrace.serve.storage.store import Store

logger = logging.getLogger("headrace.server")
T = TypeVar("T", EncodedResponse, ResponseItems, RawResponse)
V = TypeVar("V")

TAB = b"\t"


def written(item: Any) -> Iterator[bytes]:
    """Yield the JSON of an item, with tabs around each piece of its log-probabilities if `responses` made it."""
    if isinstance(item, OutputItem) and item.content:
        pieces = list(_pieces(item.part.logprobs))
        item = replace(item, content=[replace(item.part, logprobs=pieces or item.part.logprobs)])
    yield from json_pieces(item)


def written_entry(entry: Any) -> bytes:
    """Return the JSON of a `StoredResponse`."""
    output = [msgspec.Raw(b"".join(written(item))) for item in entry.response.output]
    return b"".join(json_pieces(replace(entry, response=replace(entry.response, output=output))))


def _pieces(rows: Any) -> Iterator[msgspec.Raw]:
    if isinstance(rows, list):
        num = PIECE if width(rows) < PIECE else 1
        for start in range(0, len(rows), num):
            text = b"".join(json_pieces(rows[start : start + num]))
            yield msgspec.Raw(b"".join((TAB, memoryview(text)[1:-1], TAB)))


class StoredText:
    """JSON of `written`, or JSON without tabs, as earlier versions stored it."""

    def __init__(self, text: bytes | msgspec.Raw) -> None:
        view, begin = memoryview(text), 0
        self._segments = []
        for tab in re.finditer(TAB, view):
            self._segments.append(view[begin : tab.start()])
            begin = tab.end()
        self._segments.append(view[begin:])

    def short(self) -> bytes:
        """Return the text with numbers for the pieces of log-probabilities, which `rows` and `full` take."""
        parts = (b"%d" % place if place % 2 else bytes(segment) for place, segment in enumerate(self._segments))
        return TAB.join(parts)

    def rows(self, numbers: list[msgspec.Raw]) -> list[msgspec.Raw]:
        """Return the log-probabilities of a list in the short text, one each."""
        if len(self._segments) == 1:
            return numbers
        rows: list[msgspec.Raw] = []
        for number in numbers:
            text = b"".join((b"[", self._segments[int(bytes(number))], b"]"))
            rows += msgspec.json.decode(text, type=list[msgspec.Raw])
        return rows

    def full(self, short: msgspec.Raw) -> list[memoryview]:
        """Return the JSON of a value in the short text, in parts."""
        parts = bytes(short).split(TAB)
        return [self._segments[int(part)] if place % 2 else memoryview(part) for place, part in enumerate(parts)]


class PastPart(msgspec.Struct, kw_only=True, omit_defaults=True):
    type: Any = None
    text: Any = None
    refusal: Any = None


class PastItem(msgspec.Struct, kw_only=True, omit_defaults=True):
    """The fields of an item that a chat reads."""

    type: Any
    id: Any = None
    role: Any = None
    content: str | list[PastPart] | None = None
    summary: str | list[PastPart] | None = None
    output: str | list[PastPart] | None = None
    call_id: Any = None
    name: Any = None
    arguments: Any = None
    input: Any = None
    namespace: Any = None


def past_item(written: msgspec.Raw) -> dict[str, Any]:
    """Return the fields of a stored item that a chat reads."""
    short = StoredText(written).short()
    try:
        item: dict[str, Any] = msgspec.to_builtins(msgspec.json.decode(short, type=PastItem))
        return item
    except msgspec.ValidationError:
        # A client made the item, with unusual values in fields that are not read; it is no larger than a body.
        return msgspec.json.decode(short, type=dict[str, Any])


class StoredResponses:
    """Reads the responses in a store. Its calls raise `NotFoundError`, also for a body that can not be read, and
    `StorageError`."""

    def __init__(self, store: Store) -> None:
        self._store = store

    def parts(self, response_id: str) -> list[memoryview]:
        """Return the JSON of a response, in parts."""
        return self._read(response_id, RawResponse, lambda text, entry: text.full(entry.response))

    def items(self, response_id: str) -> ResponseItems:
        """Return the items of a response, for `past_item`."""
        return self._read(response_id, ResponseItems, lambda text, entry: entry)

    def entry(self, response_id: str) -> EncodedResponse:
        """Return a response with its log-probabilities."""

        def filled(text: StoredText, entry: EncodedResponse) -> EncodedResponse:
            for item in entry.response.output:
                if item.content and isinstance(item.content[0].logprobs, list):
                    item.content[0].logprobs = text.rows(item.content[0].logprobs)
            return entry

        return self._read(response_id, EncodedResponse, filled)

    def _read(self, response_id: str, kind: type[T], finish: Callable[[StoredText, T], V]) -> V:
        if response_id not in self._store:
            raise NotFoundError("response", response_id)
        try:
            text = StoredText(self._store.body(response_id))
            return finish(text, msgspec.json.decode(text.short(), type=kind))
        except (FileNotFoundError, ValueError, IndexError, msgspec.DecodeError, RecursionError) as error:
            logger.warning("the stored response %s can not be read: %s", response_id, error)
            raise NotFoundError("response", response_id) from error
