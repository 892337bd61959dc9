"""The files that Ollama's clients send to `/api/blobs`, of which `/api/create` makes models.

An upload is written as it comes. Its bytes are promised on the disk before they are written, so that uploads which come
at once leave `RESERVE_BYTES` free together. Knows the models folder. Called by `library`.
"""

from __future__ import annotations

import asyncio
import hashlib
import os
import sys
from pathlib import Path
from typing import NamedTuple

from starlette.requests import Request
from starlette.responses import Response

from headrace.engine.library.model_folder import ModelFolder
from headrace.protocol.errors import RequestError
from headrace.serve.errors import CallError
from headrace.serve.gates.limits import body_pieces
from headrace.serve.storage.space import RESERVE_BYTES, DiskFullError, Room, storing

PIECE_BYTES = 2**20


class UploadedFile(NamedTuple):
    """A file that was sent: where it lies, and its digest."""

    path: Path
    digest: str


class Uploads:
    """The uploads to one folder. `max_bytes` bounds the files that no model was made of, those that come included; None
    for no bound."""

    def __init__(self, files: ModelFolder, max_bytes: int | None) -> None:
        self._files, self._max_bytes = files, max_bytes
        # Bytes that running uploads have announced or sent.
        self._coming = 0

    async def read(self, request: Request) -> UploadedFile:
        """Write a body to a file of the folder. Raises the errors of `limits`, `DiskFullError`, `StorageError`, and
        `RequestError` for a wrong digest."""
        self._files.blob(request.path_params["digest"])
        declared = request.headers.get("content-length", "")
        announced = int(declared[:20]) if declared.isdigit() else 0
        path, num_bytes = None, 0
        digest = hashlib.sha256()
        try:
            with storing("written to"):
                path = await asyncio.to_thread(self._files.new_file)
                with Room(path.parent, RESERVE_BYTES) as room, path.open("wb") as file:

                    def write(piece: bytes) -> None:
                        digest.update(piece)
                        file.write(piece)
                        room.wrote(len(piece))

                    async def promise(num: int) -> None:
                        nonlocal num_bytes
                        if self._max_bytes is not None:
                            num_waiting = await asyncio.to_thread(self._num_bytes)
                            if num_waiting + self._coming + num > self._max_bytes:
                                bound = f"files that no model was made of may take {self._max_bytes} bytes"
                                raise DiskFullError(f"{bound}; make the models, or start the server again")
                        room.take(num)
                        self._coming += num
                        num_bytes += num

                    if announced:
                        await promise(announced)
                    unwritten = bytearray()
                    async for piece in body_pieces(request.scope, request.receive, sys.maxsize):
                        if not announced:
                            await promise(len(piece))
                        unwritten += piece
                        if len(unwritten) >= PIECE_BYTES:
                            await asyncio.to_thread(write, bytes(unwritten))
                            unwritten.clear()
                    write(bytes(unwritten))
        except BaseException:
            if path is not None:
                path.unlink(missing_ok=True)
            raise
        finally:
            self._coming -= num_bytes
        return UploadedFile(path, f"sha256:{digest.hexdigest()}")

    async def keep(self, digest: str, upload: UploadedFile) -> Response:
        """Keep a file of a model that will be created."""
        if upload.digest != digest:
            upload.path.unlink(missing_ok=True)
            raise RequestError("digest", digest, f"that of the bytes that came, which is {upload.digest}")
        with storing("written to"):
            await asyncio.to_thread(os.replace, upload.path, self._files.blob(digest))
        return Response(status_code=201)

    def find(self, digest: str) -> Response:
        """Reply whether a file was uploaded."""
        if not self._files.blob(digest).is_file():
            raise CallError(404, "not_found", f"digest: {digest} was not uploaded")
        return Response()

    def _num_bytes(self) -> int:
        """Return the bytes of the uploaded files that are no model's."""
        return sum(status.st_size for status in self._files.blob_statuses() if status.st_nlink == 1)
