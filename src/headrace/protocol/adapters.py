"""Adapters as the server and the engine know them: by a path, and then by a digest of their numbers."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol

import msgspec

from headrace.protocol.errors import RequestError

MAX_LORAS, MAX_LORA_RANK = 1024, 512


class NamedAdapter(msgspec.Struct, frozen=True):
    """One of vLLM's --lora-modules as JSON."""

    name: str
    path: str


def named_paths(modules: Iterable[str]) -> dict[str, str]:
    """Return the folders of adapters by name: each is name=path, or vLLM's JSON object with both. Raises
    `RequestError`."""
    paths: dict[str, str] = {}
    for text in modules:
        name, _, path = text.partition("=")
        if text.lstrip().startswith("{"):
            try:
                named = msgspec.json.decode(text, type=NamedAdapter)
            except msgspec.MsgspecError:
                named = NamedAdapter("", "")
            name, path = named.name, named.path
        if not name or not path or name in paths:
            raise RequestError("lora_modules", text, "name=path, each name once")
        paths[name] = path
    return paths


class LoadedAdapter(msgspec.Struct, frozen=True):
    """An adapter that an engine has in memory. `digest` is of all its numbers: requests name it so, and cached prefixes
    belong to it. `base`: the model that it was trained on, as its config names it."""

    digest: str
    rank: int
    num_layers: int
    base: str = ""


class LoadAdapter(msgspec.Struct, frozen=True, tag="load_adapter"):
    """Order: read the adapter in the folder `path`."""

    path: str


class UnloadAdapter(msgspec.Struct, frozen=True, tag="unload_adapter"):
    """Order: free the slot of an adapter."""

    digest: str


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

    def __contains__(self, digest: str) -> bool: ...

    def slot(self, digest: str) -> int:
        """Return the slot of an adapter, -1 if it is not loaded."""
        ...

    def load(self, path: str) -> LoadedAdapter:
        """Read the adapter in a folder, unless one with the same numbers is there. Raises `RequestError`."""
        ...

    def unload(self, digest: str) -> bool:
        """Free the slot of an adapter that no sequence uses. Return whether it was there."""
        ...
