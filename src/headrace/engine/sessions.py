"""Session files: cached blocks of the KV cache on disk, with the tokens that they hold.

`move` runs in the engine's process, between two steps. A file is `MAGIC`, the length of the header, the header
(msgpack), the blocks as the backend stores them, and a BLAKE2b of all before. The keys of the prefix cache are secret
to a process, so the file has token ids, and the blocks are published under keys made of them. Blocks are full and
computed, so an answer has the same bits whether they came from a file, from the cache, or from the prompt; the tokens
behind the last full one are kept as ids alone, and computed again. Knows blocks and files, and no requests. Called by
`engine.orders`.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import logging
import os
import secrets
import stat
from pathlib import Path
from typing import BinaryIO, Protocol, runtime_checkable

import msgspec

from headrace.engine.core import EngineCore
from headrace.protocol import bounds
from headrace.protocol.errors import HeadraceError

logger = logging.getLogger("headrace.engine")

MAGIC = b"headrace session 1\n"
MAX_HEADER_BYTES = 64 * 2**20
DIGEST_BYTES = 32
_LENGTH_BYTES = 8


class MoveSession(msgspec.Struct, frozen=True, tag="move_session"):
    """Order: write the cached blocks of `token_ids` under `cache_salt` to a file of at most `max_bytes`, or, with
    `restores`, read the blocks of a file. `weights` is a digest of the model's files."""

    path: str
    weights: str
    cache_salt: str = ""
    token_ids: list[int] = []
    max_bytes: int = 0
    restores: bool = False


class SessionMoved(msgspec.Struct, frozen=True):
    """The tokens in the file and its size in bytes, or in `error` why nothing was done. `lacks_room`: a file of
    `num_bytes` is larger than the order allows, or than the disk. `moves_none`: this engine moves no session at all,
    whatever the file.
    """

    token_ids: list[int] = []
    num_bytes: int = 0
    error: str = ""
    lacks_room: bool = False
    moves_none: bool = False


class SessionError(HeadraceError):
    """A session cannot be saved or restored; the message is for the client and names no path."""


class NoSessionsError(SessionError):
    """This engine has no cache that sessions can be made of."""


class NoRoomError(SessionError):
    """A file of `num_bytes` is larger than it may be."""

    def __init__(self, num_bytes: int, most: int) -> None:
        self.num_bytes = num_bytes
        super().__init__(f"the storage is full: the file takes {num_bytes} bytes, {most} are left")


@runtime_checkable
class BlockMemory(Protocol):
    """Where blocks can be read and written whole."""

    def read_block(self, block: int) -> bytes:
        """Return all that a block holds."""
        ...

    def write_block(self, block: int, data: bytes) -> None:
        """Set a block to the result of `read_block`."""
        ...


class Header(msgspec.Struct, frozen=True, kw_only=True):
    """The properties that a file must share with the engine that restores it, and the tokens that it holds. `weights`
    is a
    digest of the model's files; a version of headrace may compute other bits than the one before."""

    version: str
    weights: str
    backend: str
    dtype: str
    quantization: str
    kv_cache_dtype: str
    block_size: int
    block_bytes: int
    token_ids: list[int] = []


def move(core: EngineCore, order: MoveSession) -> SessionMoved:
    """Save or restore a session as the message says. Failures that the client can know of come in the reply."""
    try:
        token_ids, num_bytes = (_restore if order.restores else _save)(core, order)
    except SessionError as error:
        if isinstance(error, NoRoomError):
            return SessionMoved(num_bytes=error.num_bytes, error=str(error), lacks_room=True)
        return SessionMoved(error=str(error), moves_none=isinstance(error, NoSessionsError))
    except OSError as error:
        logger.warning("a session file can not be %s: %s", "read" if order.restores else "written", error)
        is_full = error.errno in (errno.ENOSPC, errno.EDQUOT)
        return SessionMoved(error=f"the file can not be used: {error.strerror or 'an error'}", lacks_room=is_full)
    return SessionMoved(token_ids, num_bytes)


def _save(core: EngineCore, order: MoveSession) -> tuple[list[int], int]:
    """Write the full cached blocks of the tokens, and the ids behind them. Returns the tokens that the file holds, and
    its size: as many as the cache has, where it has not all full blocks any more."""
    memory, cache = _memory(core), core.scheduler.cache
    size = core.scheduler.block_size
    blocks, num = cache.match(order.token_ids, [cache.root(order.cache_salt)], len(order.token_ids))
    # The last block may agree in part only.
    blocks, num = blocks[: num // size], num // size * size
    token_ids = order.token_ids if len(order.token_ids) - num < size else order.token_ids[:num]
    header = msgspec.structs.replace(_header(core, memory, order), token_ids=token_ids)
    head = msgspec.msgpack.encode(header)
    head = MAGIC + len(head).to_bytes(_LENGTH_BYTES, "little") + head
    num_bytes = len(head) + len(blocks) * header.block_bytes + DIGEST_BYTES
    if num_bytes > order.max_bytes:
        raise NoRoomError(num_bytes, order.max_bytes)
    path = Path(order.path)
    part = path.with_name(f".{secrets.token_hex(8)}.part")
    try:
        with open(os.open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600), "wb") as file:
            hasher = hashlib.blake2b(digest_size=DIGEST_BYTES)
            for piece in (head, *map(memory.read_block, blocks)):
                file.write(piece)
                hasher.update(piece)
            file.write(hasher.digest())
            file.flush()
            os.fsync(file.fileno())
        os.replace(part, path)
    finally:
        with contextlib.suppress(FileNotFoundError):
            part.unlink()
    return token_ids, num_bytes


def _restore(core: EngineCore, order: MoveSession) -> tuple[list[int], int]:
    """Read a file into free blocks, and publish them once its checksum is right. Returns its tokens and its size."""
    memory = _memory(core)
    try:
        descriptor = os.open(order.path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except FileNotFoundError:
        raise SessionError("there is no such file") from None
    with open(descriptor, "rb") as file:
        status = os.fstat(file.fileno())
        if not stat.S_ISREG(status.st_mode):
            raise SessionError("it is no session file")
        hasher = hashlib.blake2b(digest_size=DIGEST_BYTES)
        header = _read_header(file, hasher)
        _check(header, _header(core, memory, order), core, status.st_size - file.tell() - DIGEST_BYTES)
        _read_blocks(core, memory, order.cache_salt, header, file, hasher)
    return header.token_ids, status.st_size


def _memory(core: EngineCore) -> BlockMemory:
    """Return the memory of the engine's cache. Raises `NoSessionsError` where there is none to move blocks of."""
    if not core.scheduler.tables.enable_prefix_caching:
        raise NoSessionsError("the server runs with --no-enable-prefix-caching")
    if not core.scheduler.tables.is_plain:
        raise NoSessionsError("the model's layers keep different things: only a cache of one kind can be moved")
    executor = getattr(core.executor, "inner", core.executor)
    program = getattr(executor, "program", executor)
    memory = getattr(program, "cache", program)
    if not isinstance(memory, BlockMemory):
        raise NoSessionsError("the cache can not be moved while the schedule is recorded")
    return memory


def _header(core: EngineCore, memory: BlockMemory, order: MoveSession) -> Header:
    info = core.info
    return Header(
        version=info.version,
        weights=order.weights,
        backend=info.backend,
        dtype=info.dtype,
        quantization=info.quantization,
        kv_cache_dtype=info.kv_cache_dtype,
        block_size=info.block_size,
        block_bytes=len(memory.read_block(0)),
    )


def _read_header(file: BinaryIO, hasher: hashlib.blake2b) -> Header:
    """Read the beginning of a file. Raises `SessionError`."""
    begin = file.read(len(MAGIC) + _LENGTH_BYTES)
    length = int.from_bytes(begin[len(MAGIC) :], "little")
    if not begin.startswith(MAGIC) or len(begin) < len(MAGIC) + _LENGTH_BYTES or length > MAX_HEADER_BYTES:
        raise SessionError("it is no session file of this version of the format")
    raw = file.read(length)
    for piece in (begin, raw):
        hasher.update(piece)
    try:
        return msgspec.msgpack.decode(raw, type=Header)
    except (msgspec.DecodeError, UnicodeDecodeError):
        raise SessionError("the file is damaged: its header can not be read") from None


def _check(header: Header, fitting: Header, core: EngineCore, num_bytes: int) -> None:
    """Compare a file with the engine; `num_bytes` are those between header and checksum. Raises `SessionError`."""
    for field in Header.__struct_fields__:
        value, bound = getattr(header, field), getattr(fitting, field)
        if field != "token_ids" and value != bound:
            raise SessionError(f"the file does not fit this server: its {field} is {value!r:.80}, not {bound!r:.80}")
    num = len(header.token_ids)
    if num_bytes != num // header.block_size * header.block_bytes:
        raise SessionError("the file is damaged: its length does not fit its tokens")
    if not bounds.are_ids(header.token_ids, core.info.vocab_size - 1):
        raise SessionError("the file is damaged: it has tokens that the model has not")
    if num > core.info.max_model_len:
        raise SessionError(f"the file holds {num} tokens, the context {core.info.max_model_len}")


def _read_blocks(
    core: EngineCore, memory: BlockMemory, salt: str, header: Header, file: BinaryIO, hasher: hashlib.blake2b
) -> None:
    """Read the blocks of a file that are not cached already. Nothing is published unless the checksum is right."""
    cache, pool = core.scheduler.cache, core.scheduler.pool
    tokens, size = header.token_ids, header.block_size
    keys = [cache.root(salt)]
    cached, num = cache.match(tokens, keys, len(tokens))
    table = cached[: num // size]
    # Held, or the blocks for the rest would be taken from them.
    pool.take(table)
    first, last = len(table), len(tokens) // size
    try:
        blocks = pool.allocate(last - first)
        if blocks is None:
            raise SessionError(f"the cache has no room for {len(tokens)} tokens just now")
        table += blocks
        for index, block in enumerate(table):
            data = file.read(header.block_bytes)
            hasher.update(data)
            if index >= first and len(data) == header.block_bytes:
                memory.write_block(block, data)
        if file.read(DIGEST_BYTES + 1) != hasher.digest():
            raise SessionError("the file is damaged: its checksum does not fit")
        cache.publish(tokens, keys, table, first, last)
    finally:
        pool.release(table)
