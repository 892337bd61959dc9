"""The sampling parameters that a caller gives: they are those of the table, and precede the model's defaults."""

from __future__ import annotations

import typing

import msgspec
import pytest

from headrace.protocol.errors import RequestError
from headrace.protocol.parameters import PARAMETERS
from headrace.protocol.params import SamplingParams
from headrace.serve.call.call import SamplingFields


def differing_types(fields: type[msgspec.Struct]) -> list[str]:
    """Return the parameters that are not in `fields`, or not of the type that they have in `SamplingParams`, or None.
    Objects are left out: requests have them as JSON."""
    hints, params = typing.get_type_hints(fields), typing.get_type_hints(SamplingParams)
    names = [name for name, row in PARAMETERS.items() if row.kind != "object"]
    return sorted(set(hints) ^ set(PARAMETERS)) + [
        name for name in names if name in hints and hints[name] != params[name] | None
    ]


def test_the_fields_that_a_caller_gives_are_those_of_the_table() -> None:
    assert differing_types(SamplingFields) == []


def test_control_a_field_that_is_missing_or_of_another_type_is_noticed() -> None:
    class Fewer(msgspec.Struct):
        top_p: int | None = None

    noticed = differing_types(Fewer)
    assert len(noticed) == len(PARAMETERS)
    assert noticed[-1] == "top_p"


def test_what_a_caller_gives_precedes_the_defaults() -> None:
    defaults = SamplingFields(top_p=0.5, top_k=3, max_tokens=4)
    fields = SamplingFields(top_p=0.25, seed=0, ignore_eos=False)
    params = fields.over(defaults).params(7)
    assert (params.top_p, params.top_k, params.max_tokens, params.seed) == (0.25, 3, 4, 0)
    assert fields.params(7).max_tokens == 7
    assert fields.params().max_tokens is None
    # Neither record is changed.
    assert (fields, defaults) == (
        SamplingFields(top_p=0.25, seed=0, ignore_eos=False),
        SamplingFields(top_p=0.5, top_k=3, max_tokens=4),
    )
    with pytest.raises(RequestError, match="top_p: 2.0 is not allowed"):
        SamplingFields(top_p=2.0).params()
