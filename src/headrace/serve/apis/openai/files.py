"""OpenAI's /v1/files: the input files of batches, which clients upload, and the output files, which they fetch.

Owns the names and kinds of files; `serve.storage.store` keeps the bytes, under ids of its making. Raises
`HeadraceError`s; `add_routes` puts it on an app.
"""

from __future__ import annotations

import asyncio
import functools
import time
from collections.abc import Mapping, Sequence
from typing import Any, Literal, TypeVar

import msgspec
from msgspec import UNSET
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response

from headrace.engine.generation import off_loop
from headrace.protocol.errors import HeadraceError, RequestError
from headrace.serve import routing
from headrace.serve.apis.openai.reply import Deleted, Page
from headrace.serve.call.parsing import WarningLines
from headrace.serve.gates.limits import read_body
from headrace.serve.storage.multipart import FormData, parse_form
from headrace.serve.storage.store import Store
from headrace.serve.storage.writers import Writers

MAX_FILE_BYTES = 64 * 2**20
MAX_FILES = 4096
MAX_FILENAME = 256
MAX_PAGE = 10_000
PURPOSES = ("batch", "user_data")
PAGE = ("limit", "order", "after")
"""The parameters in the query of a list: see `page`."""


class NotFoundError(HeadraceError):
    """No object has this id (HTTP 404)."""

    status = 404
    code = "not_found"

    def __init__(self, what: str, entry_id: str) -> None:
        short_id = entry_id if len(entry_id) <= 80 else entry_id[:77] + "..."
        super().__init__(f"{what}: there is none with the id {short_id!r}")


class FileObject(msgspec.Struct, kw_only=True):
    """A file as the API describes it. Sizes in bytes, times in seconds since 1970."""

    id: str
    bytes: int
    created_at: int
    filename: str
    purpose: str
    object: Literal["file"] = "file"
    status: Literal["processed"] = "processed"
    warnings: WarningLines = UNSET


class StoredFile(msgspec.Struct, kw_only=True):
    """The metadata of a file as it is stored."""

    filename: str
    purpose: str
    created_at: int
    hidden: bool = False


class FileList(Page, kw_only=True):
    data: list[FileObject]


P = TypeVar("P", bound=Page)


class Files:
    """Files in `store`. A file that is still being written is hidden from clients until `reveal`."""

    def __init__(self, store: Store) -> None:
        self.store = store

    def create(self, filename: str, purpose: str, content: bytes, hidden: bool = False) -> FileObject:
        """Keep a file. Raises `RequestError`, `StoreFullError`, `StorageError`."""
        if not 0 < len(filename) <= MAX_FILENAME or not filename.isprintable():
            raise RequestError("file", filename, f"named, in 1 to {MAX_FILENAME} printable characters")
        file_id = self.store.new_id()
        metadata = {"filename": filename, "purpose": purpose, "created_at": int(time.time()), "hidden": hidden}
        self.store.put(file_id, metadata, content)
        return self._object(file_id, metadata)

    def get(self, file_id: str) -> FileObject:
        """One file's description.

        Raises `NotFoundError`.
        """
        metadata = self.store.metadata(file_id)
        if metadata is None or metadata.get("hidden"):
            raise NotFoundError("file", file_id)
        return self._object(file_id, metadata)

    def content(self, file_id: str) -> bytes:
        """Return the bytes of a file. Raises `NotFoundError`, `StorageError`."""
        self.get(file_id)
        try:
            return self.store.body(file_id)
        except FileNotFoundError as error:
            raise NotFoundError("file", file_id) from error

    def delete(self, file_id: str) -> Deleted:
        """Delete a file. Raises `NotFoundError`, `StorageError`."""
        self.get(file_id)
        self.store.delete(file_id)
        return Deleted(id=file_id, object="file", deleted=True)

    def reveal(self, file_id: str) -> None:
        """Show a file, which is whole now. Raises KeyError."""
        self.store.set_metadata(file_id, (self.store.metadata(file_id) or {}) | {"hidden": False})

    def listed(self, purpose: str | None = None) -> list[FileObject]:
        """Return all files that clients may see, oldest first."""
        entries = ((file_id, self.store.metadata(file_id) or {}) for file_id in self.store)
        return [
            self._object(file_id, metadata)
            for file_id, metadata in entries
            if not metadata.get("hidden") and purpose in (None, metadata.get("purpose"))
        ]

    def _object(self, file_id: str, metadata: dict[str, Any]) -> FileObject:
        return FileObject(
            id=file_id,
            bytes=self.store.body_size(file_id),
            created_at=int(metadata.get("created_at", 0)),
            filename=str(metadata.get("filename", "")),
            purpose=str(metadata.get("purpose", "")),
        )


def page(kind: type[P], items: list[Any], query: Mapping[str, str], default: int) -> P:
    """Return one page of a list whose oldest item comes first: `limit`, `after` and `order` of the query, as OpenAI's.

    Raises `RequestError`, and `NotFoundError` for an unknown `after`.
    """
    limit, order, after = query.get("limit", str(default)), query.get("order", "desc"), query.get("after")
    if not (limit.isascii() and limit.isdigit() and len(limit) < 9 and 1 <= int(limit) <= MAX_PAGE):
        raise RequestError("limit", limit, f"an integer from 1 to {MAX_PAGE}")
    if order not in ("asc", "desc"):
        raise RequestError("order", order, "asc or desc")
    rows = items if order == "asc" else items[::-1]
    if after:
        ids = [_id(item) for item in rows]
        if after not in ids:
            raise NotFoundError("after", after)
        rows = rows[ids.index(after) + 1 :]
    data = rows[: int(limit)]
    first_id, last_id = (_id(data[0]), _id(data[-1])) if data else (None, None)
    return kind(data=data, has_more=len(rows) > len(data), first_id=first_id, last_id=last_id)


class Named(msgspec.Struct):
    """An item as it was written; the rest of it is passed over."""

    id: Any


def _id(item: Any) -> str:
    return str((msgspec.json.decode(item, type=Named) if isinstance(item, msgspec.Raw) else item).id)


async def large_page(
    kind: type[P], items: list[msgspec.Raw], query: Mapping[str, str], default: int, **more: Any
) -> Response:
    """Return the response of `page`, made and written on a thread if the items are large. `more` are further fields."""
    size = size_of(items)
    reply = await off_loop(size, functools.partial(page, kind, items, query, default))
    return await routing.large_response(msgspec.structs.replace(reply, **more), size)


def size_of(items: Sequence[msgspec.Raw]) -> int:
    """Return an estimate of the number of tokens in the text of items."""
    return sum(map(len, items)) // 16


async def read_form(request: Request) -> FormData:
    """Return the parts of an upload's body. Raises `RequestError` and the errors of `limits`."""
    async with read_body(request.scope, request.receive, MAX_FILE_BYTES) as body:
        return await asyncio.to_thread(parse_form, request.headers.get("content-type", ""), body)


def add_routes(app: Starlette, files: Files, writers: Writers) -> None:
    """/v1/files."""

    async def create(form: FormData) -> FileObject:
        """Upload a file."""
        fields, uploads = form
        purpose = fields.pop("purpose", None)
        if "file" not in uploads:
            raise RequestError("file", None, "given, as a file")
        if purpose not in PURPOSES:
            raise RequestError("purpose", purpose, "one of " + ", ".join(PURPOSES))
        upload = uploads.pop("file")
        file = await writers.run(files.create, upload.filename, purpose, upload.content)
        # `expires_after[seconds]` and the like: files stay until they are deleted.
        file.warnings = [f"{name[:80]}: not honoured, and ignored" for name in (*fields, *uploads)] or UNSET
        return file

    def listed(query: Mapping[str, str]) -> FileList:
        """The files."""
        return page(FileList, files.listed(query.get("purpose")), query, MAX_PAGE)

    async def delete(file_id: str) -> Deleted:
        """Delete a file."""
        return await writers.run(files.delete, file_id)

    async def content(file_id: str) -> Response:
        """One file's bytes."""
        data = await writers.run(files.content, file_id)
        return Response(data, media_type="application/octet-stream", headers={"x-content-type-options": "nosniff"})

    routing.post(app, "/v1/files", create, read=read_form, gives=FileObject)
    routing.get(app, "/v1/files", listed, gives=FileList, query=("purpose", *PAGE))
    routing.get(app, "/v1/files/{file_id}", files.get, gives=FileObject)
    routing.get(app, "/v1/files/{file_id}/content", content, media_type="application/octet-stream")
    routing.add(app, "/v1/files/{file_id}", delete, ("DELETE",), gives=Deleted)
