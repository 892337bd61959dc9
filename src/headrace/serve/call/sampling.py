"""The sampling parameters in the body of a request, from the table `headrace.protocol.parameters`.

Gives the struct of a body its fields, reads `SamplingParams`' fields from such a struct, and says how an API spells
them. The request modules of the APIs are the callers. Knows APIs by their names in the table, and llama.cpp's rules,
which two of them share.
"""

from __future__ import annotations

import typing
from collections.abc import Callable, Collection
from typing import Any, TypeVar

import msgspec

from headrace.protocol.errors import RequestError
from headrace.protocol.parameters import LLAMA_SERVER, OLLAMA, names_in
from headrace.protocol.params import field_types

# llama.cpp's rules, which Ollama and llama-server share: what stands for "none", and the least.
# A share of nothing keeps one token there; here a share is above 0, and the least one keeps one token.
LEAST_SHARE = 1e-6
SHARES = ("top_p", "typical_p")
# The least value of those whose negative values mean: none.
LEAST = {"max_tokens": -2, "seed": -1}
# How llama.cpp writes a seed of -1.
NO_SEED = 2**32 - 1
WIDER = frozenset(names_in(api)[field] for api in (OLLAMA, LLAMA_SERVER) for field in (*SHARES, *LEAST))
"""The options, by llama.cpp's names, whose range is wider than the engine's."""

T = TypeVar("T", bound=msgspec.Struct)


def takes_parameters(api: str, but: Collection[str] = ()) -> Callable[[type[T]], type[T]]:
    """Class decorator: add a field for each parameter that `api` takes, under its name there and of the type that it
    has in `SamplingParams`. None, also given as null, means: not given.

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


def sampling_of(struct: msgspec.Struct, api: str) -> dict[str, Any]:
    """Return the fields of `SamplingParams` that a body gives, or an object in it."""
    values = {field: getattr(struct, name, None) for field, name in names_in(api).items()}
    return {field: value for field, value in values.items() if value is not None}


def spelling_of(api: str, prefix: str = "") -> dict[str, str]:
    """Return the names that an API has for the fields of `SamplingParams`; `prefix` leads to the object with them."""
    return {field: prefix + name for field, name in names_in(api).items()}


def llama_sampling_of(options: msgspec.Struct, api: str, prefix: str = "") -> dict[str, Any]:
    """Return the fields of `SamplingParams` that `options` gives. A seed of -1, and a length of -1 or -2, mean: none.

    Raises `RequestError` for other negative ones, with `prefix` before the name.
    """
    values = sampling_of(options, api)
    for field in SHARES:
        if values.get(field) == 0:
            values[field] = LEAST_SHARE
    for field, low in LEAST.items():
        if values.get(field, low) < low:
            raise RequestError(prefix + names_in(api)[field], values[field], f"{low} or more")
    if values.get("max_tokens", 0) < 0:
        del values["max_tokens"]
    if values.get("seed") in (-1, NO_SEED):
        del values["seed"]
    return values
