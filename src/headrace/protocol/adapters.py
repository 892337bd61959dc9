"""Adapters as the server and the engine know them: by a path, and then by a digest of their numbers."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Collection, Iterable, Mapping
from typing import Any, Protocol

import msgspec

from headrace.protocol.errors import RequestError

MAX_LORAS, MAX_LORA_RANK = 1024, 512


@dataclasses.dataclass(frozen=True)
class LoRARequest:
    """An adapter for the calls of `LLM` and `AsyncLLM`, as in vLLM: the folder `lora_path` is read at its first use,
    and once more where others took its place. The name and the number are the caller's own."""

    lora_name: str
    lora_int_id: int
    lora_path: str


class RecentPaths:
    """The digests of adapters by their paths, the least recently used first."""

    def __init__(self) -> None:
        self._digests: dict[str, str] = {}

    def use(self, path: str) -> str | None:
        """Return the digest of an adapter that is used now, None for one that is not loaded."""
        digest = self._digests.pop(path, None)
        if digest is not None:
            self._digests[path] = digest
        return digest

    def add(self, path: str, digest: str) -> None:
        self._digests[path] = digest

    def idle(self, used: Collection[str]) -> list[str]:
        """Return the digests that are not among `used`, the least recently used first."""
        return list(dict.fromkeys(digest for digest in self._digests.values() if digest not in used))

    def forget(self, digest: str) -> None:
        self._digests = {path: each for path, each in self._digests.items() if each != digest}


def check_request(value: Any) -> str:
    """Return the path of a `LoRARequest`, "" for None. Raises `RequestError` for anything else."""
    if value is None:
        return ""
    if not isinstance(value, LoRARequest):
        raise RequestError("lora_request", value, "a LoRARequest, or one for each prompt")
    if not isinstance(value.lora_path, str) or not value.lora_path:
        raise RequestError("lora_request.lora_path", value.lora_path, "the path of an adapter")
    return value.lora_path


class NamedAdapter(msgspec.Struct, frozen=True):
    """One of vLLM's --lora-modules as JSON. scale: of llama-server's, for requests that name the model itself."""

    name: str
    path: str
    scale: float = 0.0

    def text(self) -> str:
        return msgspec.json.encode(self).decode()


def named_adapters(modules: Iterable[str]) -> list[NamedAdapter]:
    """Return the adapters of a config: each is name=path, or vLLM's JSON object with both. Raises `RequestError`."""
    adapters: dict[str, NamedAdapter] = {}
    for text in modules:
        name, _, path = text.partition("=")
        named = NamedAdapter(name, path)
        if text.lstrip().startswith("{"):
            try:
                named = msgspec.json.decode(text, type=NamedAdapter)
            except msgspec.MsgspecError:
                named = NamedAdapter("", "")
        if not named.name or not named.path or named.name in adapters or not math.isfinite(named.scale):
            raise RequestError("lora_modules", text, "name=path, each name once")
        adapters[named.name] = named
    if sum(each.scale != 0 for each in adapters.values()) > 1:
        bound = "at most one with a scale other than 0; --lora-init-without-apply gives all the scale 0"
        raise RequestError("lora_modules", [*adapters], bound)
    return [*adapters.values()]


def named_paths(modules: Iterable[str]) -> dict[str, str]:
    """Return the paths of a config's adapters by name. Raises `RequestError`."""
    return {each.name: each.path for each in named_adapters(modules)}


class LoadedAdapter(msgspec.Struct, frozen=True):
    """An adapter that an engine has in memory. `digest` is of all its numbers: requests name it so, and cached prefixes
    belong to it. `base`: the model that it was trained on, as its config names it. `path`: where it was read."""

    digest: str
    rank: int
    num_layers: int
    base: str = ""
    path: str = ""


def scaled(digest: str, scale: float) -> str:
    """Return the name of an adapter whose product is multiplied by `scale`, which requests give in place of the
    digest."""
    return digest if scale == 1 else f"{digest}@{scale.hex()}"


def base_of(adapter: str) -> str:
    """Return the digest in a name of `scaled`."""
    return adapter.partition("@")[0]


def scale_of(adapter: str) -> float | None:
    """Return the scale in a name of `scaled`; None where it is none, or not written as `scaled` does."""
    _, at, text = adapter.partition("@")
    if not at:
        return 1.0
    try:
        scale = float.fromhex(text)
    except (ValueError, OverflowError):
        return None
    return scale if math.isfinite(scale) and scale.hex() == text and scale != 1 else None


class LoadAdapter(msgspec.Struct, frozen=True, tag="load_adapter"):
    """Order: read the adapter at `path`, a folder or a GGUF file."""

    path: str


class AdapterRead(msgspec.Struct, frozen=True):
    """An adapter that was read, in the backend's form, or the reason why it was refused."""

    adapter: LoadedAdapter | None = None
    prepared: Any = None
    refused: tuple[str, str, str] | None = None


class UnloadAdapter(msgspec.Struct, frozen=True, tag="unload_adapter"):
    """Order: free the slot of an adapter."""

    digest: str


def usual_adapter(modules: Iterable[str] | None, loaded: Mapping[str, LoadedAdapter]) -> str:
    """Return the adapter of requests that name none, "" without one: that of a config which has a scale."""
    named = [each for each in named_adapters(modules or ()) if each.scale and each.name in loaded]
    return scaled(loaded[named[0].name].digest, named[0].scale) if named else ""


class AdapterReply(msgspec.Struct, frozen=True):
    """The result of either order: the adapter, None where none was unloaded, or the reason why it was refused as a
    `RequestError` has it."""

    adapter: LoadedAdapter | None = None
    refused: tuple[str, str, str] | None = None


def read_reply(reply: AdapterReply) -> LoadedAdapter | None:
    """Return the adapter of a reply. Raises the `RequestError` in it."""
    if reply.refused is not None:
        raise RequestError(*reply.refused)
    return reply.adapter


class AdapterStore(Protocol):
    """The adapters that an engine has in memory, by digest."""

    def __contains__(self, adapter: str) -> bool: ...

    def slot(self, adapter: str) -> int:
        """Return the slot of an adapter, which may be one of `scaled`, -1 if it is not loaded."""
        ...

    def read(self, path: str) -> tuple[LoadedAdapter, Any]:
        """Read the adapter at `path`. Changes nothing, so any thread may call it. Raises `RequestError`."""
        ...

    def put(self, adapter: LoadedAdapter, prepared: Any) -> None:
        """Put an adapter that was read into a slot, unless one with the same numbers is there. Raises
        `RequestError`."""
        ...

    def unload(self, digest: str) -> bool:
        """Free the slot of an adapter that no sequence uses. Return whether it was there."""
        ...
