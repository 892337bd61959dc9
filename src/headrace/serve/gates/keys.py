"""`KeyRing`: the API keys of the server, with the holder, the classes and the rate limits of each.

A key comes from the command line, the environment or a file, and only its digest is kept. A file is TOML, a table for
each holder. Called by `auth.ApiKeyGate`; knows no HTTP.
"""

from __future__ import annotations

import hashlib
import hmac
import logging
import re
import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import msgspec

from headrace.engine.tenants import Limits
from headrace.protocol.errors import RequestError

logger = logging.getLogger("headrace.server")

CLASSES = ("infer", "metrics", "admin")
"""The classes of paths that a key may open; admin opens all of them."""
MAX_FILE_BYTES = 2**20
HIDDEN = "(not shown)"


class Key(NamedTuple):
    """One API key. `name` is its holder's."""

    name: str
    digest: bytes
    classes: frozenset[str]


class Holder(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """A table of the file: keys, or SHA-256 digests of keys in hex, one or several (the old one and the new)."""

    key: str | list[str] = []
    sha256: str | list[str] = []
    classes: tuple[str, ...] = ("infer",)
    requests_per_minute: int | None = None
    tokens_per_minute: int | None = None


class KeyRing:
    """All keys of the server. With an empty ring every call passes.

    Attributes:
        limits: rate limits of the holders that have their own, by name.
    """

    def __init__(self, keys: Sequence[Key], limits: dict[str, Limits] | None = None) -> None:
        self.keys = tuple(keys)
        self.limits = dict(limits or {})

    def __bool__(self) -> bool:
        return bool(self.keys)

    @classmethod
    def of(cls, api_key: str | Sequence[str] | None, admin_api_key: str | None, file: str | None) -> KeyRing:
        """Return the ring of all keys. Keys of `api_key` have no class admin, unless no other key has it.

        Raises `RequestError` for a key that can not stand in a header, or a file that can not be read.
        """
        keys: list[Key] = []
        limits: dict[str, Limits] = {}
        if file is not None:
            _read(Path(file).expanduser(), keys, limits)
        if admin_api_key is not None:
            keys.append(Key("admin", _digest("admin_api_key", admin_api_key), frozenset(CLASSES)))
        is_only = not any("admin" in key.classes for key in keys)
        for text in [api_key] if isinstance(api_key, str) else api_key or ():
            digest = _digest("api_key", text)
            name = "key-" + hashlib.blake2b(text.encode(), digest_size=8, person=b"headrace name").hexdigest()
            keys.append(Key(name, digest, frozenset(CLASSES if is_only else CLASSES[:2])))
        if len({key.digest for key in keys}) < len(keys):
            raise RequestError("api_key", HIDDEN, "another for each holder: one of them is given twice")
        return cls(keys, limits)

    def find(self, text: bytes) -> Key | None:
        """Return the key with this text, or None. The time does not depend on the keys: digests have one length, and
        all are compared."""
        digest = hashlib.sha256(text).digest()
        match = None
        for key in self.keys:
            if hmac.compare_digest(key.digest, digest):
                match = key
        return match


def _digest(field: str, text: str) -> bytes:
    """Return a key's digest. Raises `RequestError` if the key is not valid in a header."""
    if not re.fullmatch(r"[!-~]{1,512}", text):
        raise RequestError(field, HIDDEN, "1 to 512 visible ASCII characters, without blanks")
    return hashlib.sha256(text.encode("ascii")).digest()


def _read(path: Path, keys: list[Key], limits: dict[str, Limits]) -> None:
    """Add the keys and limits of a file to `keys` and `limits`. Raises `RequestError`."""
    try:
        if path.stat().st_size > MAX_FILE_BYTES:
            raise RequestError("api_key_file", str(path), f"a file of at most {MAX_FILE_BYTES} bytes")
        if path.stat().st_mode & 0o007:
            logger.warning("%s can be read by every user of this machine: chmod o-rwx", path)
        tables = tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise RequestError("api_key_file", str(path), f"a file that can be read: {type(error).__name__}") from error
    except tomllib.TOMLDecodeError as error:
        raise RequestError("api_key_file", str(path), f"TOML: {error}") from error
    for name, table in tables.items():
        holder = _holder(name, table)
        digests = [_digest(f"{name}.key", text) for text in _as_list(holder.key)]
        for text in _as_list(holder.sha256):
            if not re.fullmatch(r"[0-9a-f]{64}", text):
                raise RequestError(f"{name}.sha256", HIDDEN, "64 hexadecimal digits, in small letters")
            digests.append(bytes.fromhex(text))
        classes = frozenset(CLASSES if "admin" in holder.classes else holder.classes)
        if not digests or not classes or not classes <= set(CLASSES):
            raise RequestError(name, sorted(classes), "a holder with a key, and classes of " + ", ".join(CLASSES))
        keys += [Key(name, digest, classes) for digest in digests]
        limits[name] = Limits(holder.requests_per_minute, holder.tokens_per_minute)
        if any(most is not None and most < 1 for most in limits[name]):
            raise RequestError(name, limits[name], "a holder who may use at least 1 a minute")
    if not keys:
        raise RequestError("api_key_file", str(path), "a file with a key in it")


def _holder(name: str, table: object) -> Holder:
    # The excluded names are those of the command line's keys; an empty name means no tenant.
    if not re.fullmatch(r"[\w.@-]{1,80}", name, re.ASCII) or name == "admin" or name.startswith("key-"):
        raise RequestError(
            "api_key_file", name, "names of 1 to 80 of A-Z a-z 0-9 _ . @ -, other than admin and key-..."
        )
    try:
        return msgspec.convert(table, Holder)
    except msgspec.ValidationError as error:
        raise RequestError("api_key_file", name, f"a table of a key's holder: {error}") from None


def _as_list(value: str | list[str]) -> list[str]:
    return [value] if isinstance(value, str) else value
