"""S-11: the table of bounds refuses what is outside, of the wrong type, or not a number, and names field and range."""

from __future__ import annotations

import math
import subprocess
import sys
from typing import Any

import pytest

from headrace.protocol.bounds import BOUNDS, Bound, check
from headrace.protocol.errors import RequestError
from headrace.protocol.params import SamplingParams

NUMBERS = [bound for bound in BOUNDS.values() if bound.kind != "size"]


def hostile(bound: Bound) -> list[Any]:
    """Values that no row of its kind may take."""
    values: list[Any] = [math.nan, math.inf, -math.inf, True, None, "1", [], b"1", 1j, 10**400, 10**5000]
    values += [bound.low - 1, bound.high + 1 if bound.kind == "int" else math.nextafter(bound.high, math.inf)]
    if bound.kind == "int":
        values += [1.0, 0.5]
    return values


@pytest.mark.parametrize("bound", NUMBERS, ids=lambda bound: bound.name)
def test_S_11_hostile_values_are_refused(bound: Bound) -> None:
    for value in hostile(bound):
        with pytest.raises(RequestError) as caught:
            bound.check(value)
        assert caught.value.field == bound.name
        assert len(str(caught.value)) < 300


@pytest.mark.parametrize("bound", NUMBERS, ids=lambda bound: bound.name)
def test_the_ends_are_allowed(bound: Bound) -> None:
    cast = int if bound.kind == "int" else float
    bound.check(cast(bound.low))
    bound.check(cast(bound.high))


def test_sizes_count_entries() -> None:
    check("stop", ["a"] * 16)
    with pytest.raises(RequestError, match="stop: 17 is not allowed"):
        check("stop", ["a"] * 17)
    with pytest.raises(RequestError, match="my_stop"):
        check("stop_string", "", "my_stop")


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("stop", 5),
        ("stop", [5]),
        ("stop_token_ids", 5),
        ("stop_token_ids", ["5"]),
        ("logit_bias", [5]),
        ("logit_bias", {"5": 1}),
        ("ignore_eos", "no"),
        ("skip_special_tokens", 1),
        ("detokenize", None),
    ],
)
def test_S_11_values_of_a_wrong_type_are_refused(name: str, value: Any) -> None:
    with pytest.raises(RequestError, match=f"^{name}: ") as caught:
        SamplingParams(**{name: value})
    assert caught.value.field == name


def test_only_numbers_of_an_optional_type_may_be_none() -> None:
    SamplingParams(max_tokens=None, seed=None)
    with pytest.raises(RequestError, match=r"^temperature: None is not allowed; it must be a finite number"):
        SamplingParams(temperature=None)  # type: ignore[arg-type]


def test_S_05_bounds_hold_without_asserts() -> None:
    code = "from headrace.protocol.params import SamplingParams\nSamplingParams(temperature=float('nan'))"
    done = subprocess.run([sys.executable, "-O", "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 1
    assert "RequestError: temperature: nan is not allowed" in done.stderr
