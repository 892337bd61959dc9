"""The API keys of the server: `KeyRing` holds them, and `ApiKeyGate` requires one for every path that is not public.

A key comes from the command line, the environment or a file, and only its digest is kept. A file is TOML with a table
for each holder. The gate reads `scope["path"]` alone, as the router does, so it covers all routes, unknown ones too.
Every path needs a class of keys; a path without a class needs the administrator's key. Knows keys and classes, and no
requests. Called by `calls.CallGate`; `serve.app` makes ring and gate.
"""

from __future__ import annotations

import hashlib
import hmac
import logging
import re
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import msgspec

from headrace.engine.tenants import Limits, Rates, Tenant, acting_as
from headrace.protocol.errors import RequestError
from headrace.serve.errors import CallError
from headrace.serve.gates.limits import Scope

logger = logging.getLogger("headrace.server")

CLASSES = ("infer", "metrics", "admin")
"""The classes of paths that a key may open; admin opens all of them."""
MAX_FILE_BYTES = 2**20
HIDDEN = "(not shown)"

# A page holds no data: its data come from routes that need a key. `/` is the page, or a reply that a server runs.
PUBLIC_PATHS = frozenset({"/health/live", "/", "/inspect"})
PUBLIC_UNDER = "/inspector/"
ANY = "any"
"""The class of paths that every key opens."""
_ANY_PATHS = frozenset({"/version", "/ping", "/health", "/openapi.json", "/docs", "/is_sleeping", "/v1/health"})
_METRICS_PATHS = frozenset({"/metrics", "/load", "/slots", "/fleet"})
# Calls that change the server or its models, supported here or not.
_ADMIN_PATHS = frozenset(
    "/api/pull /api/push /api/create /api/copy /api/delete /v1/load_lora_adapter /v1/unload_lora_adapter".split()
)
_ADMIN_UNDER = "/api/blobs/"
# Any key for inference reads these, only the administrator's changes them.
_SETTINGS_PATHS = frozenset({"/props", "/lora-adapters"})
_INFER_PATHS = frozenset(
    "/tokenize /detokenize /completion /completions /embedding /embeddings /apply-template /props /infill /score "
    "/embed /embed_sparse /predict /similarity /info "
    "/rerank /reranking /pooling /classify /invocations /tokenizer_info /lora-adapters /chat/completions /models "
    "/responses /chat/completions/input_tokens".split()
)
_INFER_UNDER = ("/v1/", "/v2/", "/api/", "/slots/")


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
    max_storage_bytes: int | None = None


class KeyRing:
    """All keys of the server. With an empty ring every call passes.

    Attributes:
        limits: rate limits of the holders that have some, by name.
        storage: bytes that a holder may store, by name, for the holders with such a bound.
    """

    def __init__(
        self,
        keys: Sequence[Key],
        limits: Mapping[str, Limits] | None = None,
        storage: Mapping[str, int] | None = None,
    ) -> None:
        self.keys = tuple(keys)
        self.limits = dict(limits or {})
        self.storage = dict(storage or {})

    def __bool__(self) -> bool:
        return bool(self.keys)

    @property
    def has_admin(self) -> bool:
        """Whether a key has the class admin."""
        return any("admin" in key.classes for key in self.keys)

    @classmethod
    def of(
        cls, api_key: str | Sequence[str] | None, admin_api_key: str | Sequence[str] | None, file: str | None
    ) -> KeyRing:
        """Return the ring of all keys. A key of `api_key` has the class admin only if it is the one key of the server.

        Raises `RequestError` for a key that is not valid in a header, or a file that cannot be read.
        """
        keys: list[Key] = []
        limits: dict[str, Limits] = {}
        storage: dict[str, int] = {}
        if file is not None:
            _read(Path(file).expanduser(), keys, limits, storage)
        texts = _as_list(api_key or ())
        admins = () if admin_api_key is None else _as_list(admin_api_key)
        keys += [Key("admin", _digest("admin_api_key", text), frozenset(CLASSES)) for text in admins]
        is_only = not keys and len(texts) == 1
        for text in texts:
            digest = _digest("api_key", text)
            name = "key-" + hashlib.blake2b(text.encode(), digest_size=8, person=b"headrace name").hexdigest()
            keys.append(Key(name, digest, frozenset(CLASSES if is_only else CLASSES[:2])))
        if len({key.digest for key in keys}) < len(keys):
            raise RequestError("api_key", HIDDEN, "another for each holder: one of them is given twice")
        return cls(keys, limits, storage)

    @property
    def holders(self) -> set[str]:
        """The names of all who may use the models."""
        return {key.name for key in self.keys if key.classes & {"infer", "admin"}}

    def storage_shares(self, whole: int) -> dict[str, int]:
        """Return the bytes that each holder may store, by name: the holder's bound, or an equal share of the rest of
        `whole` after all bounds. Raises `RequestError` if there is no rest."""
        sharing = self.holders - self.storage.keys()
        rest = whole - sum(self.storage.values())
        if rest < len(sharing) or rest < 0:
            bound = f"at least {whole - rest + len(sharing)}: what single keys may store, and some for each other key"
            raise RequestError("max_storage_bytes", whole, bound)
        return self.storage | {name: rest // len(sharing) for name in sharing}

    def find(self, text: bytes) -> Key | None:
        """Return the key with this text, or None. The time does not depend on the keys: digests have one length, and
        all are compared."""
        digest = hashlib.sha256(text).digest()
        match = None
        for key in self.keys:
            if hmac.compare_digest(key.digest, digest):
                match = key
        return match


class ApiKeyGate:
    """Requires a key of `ring` that opens the path, for every path that is not public (S-18).

    The key comes as `Authorization: Bearer KEY` or `x-api-key: KEY`. Each header may come once; if both come, both must
    hold the same key. With an empty ring all calls pass.
    """

    def __init__(self, ring: KeyRing, rates: Rates) -> None:
        self._ring = ring
        self._rates = rates

    def tenant(self, scope: Scope) -> Tenant:
        """Return the tenant who calls, and count the tenant's request. Raises `CallError`, `RateLimitError`."""
        tenant = self._holder(scope)
        with acting_as(tenant):
            if scope["method"] not in ("GET", "HEAD") and class_of(scope["method"], scope["path"]) == "infer":
                self._rates.count_request()
        return tenant

    def _holder(self, scope: Scope) -> Tenant:
        if not self._ring or is_public(scope["path"]):
            return Tenant()
        key = self._key(scope)
        if key is None:
            message = "the API key is missing or wrong; send it as 'Authorization: Bearer KEY'"
            raise CallError(401, "invalid_api_key", message, {"www-authenticate": "Bearer"})
        path_class = class_of(scope["method"], scope["path"])
        if path_class != ANY and path_class not in key.classes:
            raise CallError(403, "permission_denied", f"this needs a key of the class {path_class}")
        return Tenant(key.name, "admin" in key.classes)

    def _key(self, scope: Scope) -> Key | None:
        """Return the key that the headers hold, or None if there is none, it is wrong, or two differ."""
        bearers = [value for name, value in scope["headers"] if name == b"authorization"]
        keys = [value for name, value in scope["headers"] if name == b"x-api-key"]
        if len(bearers) > 1 or len(keys) > 1 or not bearers + keys:
            return None
        schemes = [value.partition(b" ")[0].lower() for value in bearers]
        texts = [value.partition(b" ")[2].strip() for value in bearers] + [value.strip() for value in keys]
        matches = [self._ring.find(text) for text in texts]
        if any(scheme != b"bearer" for scheme in schemes) or len(set(matches)) > 1:
            return None
        return matches[0]


def is_public(path: str) -> bool:
    """Return whether a path needs no key."""
    return path in PUBLIC_PATHS or path.startswith(PUBLIC_UNDER)


def class_of(method: str, path: str) -> str:
    """Return the class of keys that opens a path: one of `CLASSES`, or `ANY`."""
    if path in _ANY_PATHS or path.startswith("/health/"):
        return ANY
    reads = method in ("GET", "HEAD")
    if path in _METRICS_PATHS and reads:
        return "metrics"
    is_setting = path in _SETTINGS_PATHS and not reads
    if path in _ADMIN_PATHS or path.startswith(_ADMIN_UNDER) or is_setting:
        return "admin"
    return "infer" if path in _INFER_PATHS or path.startswith(_INFER_UNDER) else "admin"


def _digest(field: str, text: str) -> bytes:
    """Return a key's digest. Raises `RequestError` if the key is not valid in a header."""
    if not re.fullmatch(r"[!-~]{1,512}", text):
        raise RequestError(field, HIDDEN, "1 to 512 visible ASCII characters, without blanks")
    return hashlib.sha256(text.encode("ascii")).digest()


def _read(path: Path, keys: list[Key], limits: dict[str, Limits], storage: dict[str, int]) -> None:
    """Add the keys and bounds of a file to `keys`, `limits` and `storage`. Raises `RequestError`."""
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
        if holder.max_storage_bytes is not None:
            if holder.max_storage_bytes < 1:
                raise RequestError(f"{name}.max_storage_bytes", holder.max_storage_bytes, "at least 1")
            storage[name] = holder.max_storage_bytes
    if not keys:
        raise RequestError("api_key_file", str(path), "a file with a key in it")


def _holder(name: str, table: object) -> Holder:
    # The excluded names belong to the keys of the command line; an empty name means no tenant.
    if not re.fullmatch(r"[\w.@-]{1,80}", name, re.ASCII) or name == "admin" or name.startswith("key-"):
        raise RequestError(
            "api_key_file", name, "names of 1 to 80 of A-Z a-z 0-9 _ . @ -, other than admin and key-..."
        )
    try:
        return msgspec.convert(table, Holder)
    except msgspec.ValidationError as error:
        raise RequestError("api_key_file", name, f"a table of a key's holder: {error}") from None


def _as_list(value: str | Sequence[str]) -> Sequence[str]:
    return [value] if isinstance(value, str) else value
