"""`ServedAdapters`: the adapters of a served model by name, and llama-server's numbers and scales of them.

A request that names the model itself is answered with the adapter that has a scale other than 0, if there is one: so
llama-server's clients turn adapters on and off. Knows digests; must not know engines. Held by `ServedModel`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from headrace.protocol import bounds
from headrace.protocol.adapters import LoadedAdapter, scaled
from headrace.protocol.errors import RequestError


class AdapterScale(msgspec.Struct, forbid_unknown_fields=True):
    """One of llama-server's list: the number of an adapter, and by what its change of the model is multiplied."""

    id: int
    scale: float = 0.0


class AdapterCard(msgspec.Struct, kw_only=True):
    """One of GET /lora-adapters. `name` is that by which requests may also name the adapter as a model."""

    id: int
    path: str
    scale: float
    name: str


class ServedAdapters(dict[str, LoadedAdapter]):
    """Adapters by the names by which requests may name them in the model's place.

    scales: of those with a scale other than 0, for requests that name the model itself."""

    def __init__(self, scales: dict[str, float] | None = None) -> None:
        super().__init__()
        self.scales = dict(scales or {})
        self._ids: dict[str, int] = {}
        self._next_id = 0

    def __delitem__(self, name: str) -> None:
        super().__delitem__(name)
        self._ids.pop(name, None)

    def take(self, loaded: Mapping[str, LoadedAdapter]) -> None:
        """Add the adapters that the engine has loaded at its start. Raises `RequestError` where it lacks one that has a
        scale: requests would be answered without it."""
        self.update(loaded)
        for name in self.scales.keys() - self.keys():
            raise RequestError("lora_modules", name, "an adapter that the engine has loaded, as its scale is not 0")

    def cards(self) -> list[AdapterCard]:
        """Return llama-server's list."""
        return [
            AdapterCard(id=number, path=self[name].path, scale=self.scales.get(name, 0.0), name=name)
            for number, name in self._by_id().items()
        ]

    def set_scales(self, entries: Sequence[AdapterScale], field: str) -> None:
        """Set the scales for requests to come; those that `entries` leaves out are 0. Raises `RequestError`."""
        self.scales = self._checked(entries, field)

    def of(self, name: str | None, entries: Sequence[AdapterScale] | None = None) -> str:
        """Return the adapter of a request, as `protocol.adapters.scaled` names it, "" for none: that which it names as
        its model, or the one that its `lora` entries scale, or else that which is scaled for all. Raises
        `RequestError`."""
        if name is not None and name in self:
            if entries is not None:
                raise RequestError("lora", "given", f"left out where model names an adapter, here {name[:80]!r}")
            return self[name].digest
        scales = self.scales if entries is None else self._checked(entries, "lora")
        return next((scaled(self[each].digest, scale) for each, scale in scales.items() if each in self), "")

    def _by_id(self) -> dict[int, str]:
        """Return the names by number. An adapter keeps its number; that of one that is gone is not given again."""
        for name in self:
            if name not in self._ids:
                self._ids[name] = self._next_id
                self._next_id += 1
        return {self._ids[name]: name for name in self}

    def _checked(self, entries: Sequence[AdapterScale], field: str) -> dict[str, float]:
        names, scales = self._by_id(), dict[str, float]()
        for place, entry in enumerate(entries):
            if entry.id not in names:
                known = "one of " + ", ".join(map(str, names)) if names else "that of an adapter; none is loaded"
                raise RequestError(f"{field}[{place}].id", entry.id, known)
            bounds.check("lora_scale", entry.scale, f"{field}[{place}].scale")
            scales[names[entry.id]] = entry.scale
        scales = {name: scale for name, scale in scales.items() if scale}
        if len(scales) > 1:
            raise RequestError(field, f"{len(scales)} adapters", "at most one with a scale other than 0")
        return scales


def scales_in(value: Any, field: str) -> list[AdapterScale]:
    """Return a list of JSON as entries. Raises `RequestError`."""
    try:
        return msgspec.convert(value, list[AdapterScale])
    except msgspec.ValidationError as error:
        raise RequestError(field, value, f'a list such as [{{"id": 0, "scale": 0.5}}] ({error})') from error
