"""The sampling parameters in the body of a request, from the table `headrace.protocol.parameters`.

Gives the struct of a body its fields, reads `SamplingParams`' fields from such a struct, and says how an API spells
them. The request modules of the APIs are the callers. Knows no API but by its name in the table.
"""

from __future__ import annotations

import typing
from collections.abc import Callable, Collection
from typing import Any, TypeVar

import msgspec

from headrace.protocol.parameters import names_in
from headrace.protocol.params import field_types

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
