"""The sampling parameters in the body of a request, from the table `headrace.protocol.parameters`.

Adds the fields to the struct of a body, reads `SamplingParams`' fields from such a struct, and maps them to an API's
names. Called by the request modules of the APIs. Knows APIs by their names in the table, and the values that each takes
beyond the engine's range.
"""

from __future__ import annotations

import typing
from collections.abc import Callable, Collection, Mapping
from typing import Any, TypeVar

import msgspec

from headrace.protocol.errors import RequestError
from headrace.protocol.parameters import LLAMA_SERVER, OLLAMA, OPENAI, names_in
from headrace.protocol.params import field_types

LEAST_SHARE = 1e-6
"""A share of 0 is greedy in every API; here a share is above 0, and the least one keeps one token."""
SHARES = ("top_p", "typical_p")
# Values that mean "none", as a missing field does: llama.cpp's values for a random seed and for an endless answer.
# OpenAI's clients send the former too.
NO_SEED = 2**32 - 1
_SEEDS = (-1, NO_SEED)
NONES: dict[str, dict[str, tuple[int, ...]]] = {
    OPENAI: {"seed": (-1,)},
    OLLAMA: {"seed": _SEEDS, "max_tokens": (-2, -1, 0)},
    LLAMA_SERVER: {"seed": _SEEDS, "max_tokens": (-2, -1)},
}
LEAST: dict[str, float] = dict.fromkeys(SHARES, 0.0) | {"seed": -1, "max_tokens": 0}
"""The least values of parameters in APIs that allow less than the table does."""
WIDER = frozenset(names_in(api)[field] for api in (OLLAMA, LLAMA_SERVER) for field in (*SHARES, *NONES[api]))
"""The options, by llama.cpp's names, whose range is wider than the engine's."""

T = TypeVar("T", bound=msgspec.Struct)


def takes_parameters(api: str, but: Collection[str] = ()) -> Callable[[type[T]], type[T]]:
    """Class decorator: add a field for each parameter that `api` takes, under the API's name and of the type that it
    has in `SamplingParams`. None (null in JSON) means that the field is absent.

    A field that the struct declares itself stays as it is. `but` are parameters that get no field.
    """

    def extend(struct: type[T]) -> type[T]:
        added = {
            name: field_types()[field]
            for field, name in names_in(api).items()
            if field not in but and name not in struct.__struct_fields__
        }
        extended = msgspec.defstruct(
            struct.__name__,
            [(name, type_ | None, None) for name, type_ in added.items()],
            bases=(struct,),
            module=struct.__module__,
            namespace={"__doc__": struct.__doc__},
            forbid_unknown_fields=True,
            kw_only=True,
        )
        return typing.cast(type[T], extended)

    return extend


def sampling_of(struct: msgspec.Struct, api: str, prefix: str = "") -> dict[str, Any]:
    """Return the fields of `SamplingParams` in a body, or in the object of the body that `prefix` names. Raises
    `RequestError`."""
    return engine_values({field: getattr(struct, name, None) for field, name in names_in(api).items()}, api, prefix)


def engine_values(values: Mapping[str, Any], api: str, prefix: str = "") -> dict[str, Any]:
    """Return parameters as the engine has them: without None, and without the values by which `api` means "none".

    Raises `RequestError` for a value below the API's least one, with `prefix` before the API's name.
    """
    present = {field: value for field, value in values.items() if value is not None}
    for field in SHARES:
        if present.get(field) == 0:
            present[field] = LEAST_SHARE
    for field, nones in NONES.get(api, {}).items():
        if present.get(field, 0) < min(nones):
            raise RequestError(prefix + names_in(api)[field], present[field], f"{min(nones)} or more")
        if present.get(field) in nones:
            del present[field]
    return present


def spelling_of(api: str, prefix: str = "") -> dict[str, str]:
    """Return the names that an API has for the fields of `SamplingParams`; `prefix` names the object with these
    fields."""
    return {field: prefix + name for field, name in names_in(api).items()}
