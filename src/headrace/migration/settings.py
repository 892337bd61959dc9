"""`Setting`: a flag of another engine, and its effect here.

The tables of this folder are made of them. Knows no command line and no config; called by the tables and by
`headrace.other_engines`.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec

VLLM, LLAMA_SERVER = "vLLM", "llama-server"

SAMPLING, ROPE = "override_generation_config", "hf_overrides.rope_scaling"
TEMPLATE_VARIABLES, SPECULATION = "default_chat_template_kwargs", "speculative_config"


class NoEffectError(Exception):
    """Raised by `Setting.convert` for a value without effect here, with the reason."""


class RefusedError(Exception):
    """Raised by `Setting.convert` for a value that is not supported here, with its replacement."""


class Setting(msgspec.Struct, frozen=True, kw_only=True):
    """A flag of another engine.

    ours: the field here that it sets, if any, or a place in a field that is a record, such as
    `override_generation_config.top_k`; with a + at its end the value is added to a list. `convert` changes its value;
    it raises ValueError for one that cannot be, `NoEffectError` or `RefusedError`. A flag without a value sets
    `fixed`. `also`: further fields with their values.
    neutral: the values with which it has no effect here; None: any value.
    why: why it has no effect, or the alternative; of a flag that sets a field, the difference here.
    takes_value: whether a value follows the flag. `takes_number`: a second word that is a number belongs to it, as if a
    colon stood between them. `may_follow`: the only words that are its value; it has none else.
    """

    source: str
    names: tuple[str, ...]
    ours: str = ""
    convert: Callable[[str], Any] | None = None
    fixed: str = ""
    also: tuple[tuple[str, str], ...] = ()
    neutral: tuple[str, ...] | None = ()
    why: str = ""
    takes_value: bool = True
    takes_number: bool = False
    may_follow: tuple[str, ...] = ()

    @property
    def has_no_effect(self) -> bool:
        """Whether it is accepted, with some value, and has no effect."""
        return not self.ours and self.neutral != ()


def makers(source: str) -> tuple[Callable[..., Setting], ...]:
    """Return the makers of a source's rows: done here, without effect here, a switch without effect, refused."""

    def done(names: str, ours: str, **more: Any) -> Setting:
        return Setting(source=source, names=tuple(names.split()), ours=ours, **more)

    def no_effect(names: str, why: str, *neutral: str, **more: Any) -> Setting:
        return Setting(source=source, names=tuple(names.split()), why=why, neutral=neutral or None, **more)

    def switch(names: str, why: str) -> Setting:
        return Setting(source=source, names=tuple(names.split()), why=why, neutral=None, takes_value=False)

    def refused(names: str, why: str, **more: Any) -> Setting:
        return Setting(source=source, names=tuple(names.split()), why=why, **more)

    return done, no_effect, switch, refused


def whole(text: str) -> int:
    """Return a whole number, which may be written as 20.0. Raises ValueError."""
    number = float(text)
    if not number.is_integer():
        raise ValueError("a whole number")
    return int(number)


def number(text: str) -> float:
    """Return a number. Raises ValueError."""
    try:
        return float(text)
    except ValueError:
        raise ValueError("a number") from None


def share(text: str) -> float:
    """Return a share of the probability. llama.cpp's 0 keeps one token, and so does the least share here."""
    return max(number(text), 1e-6)


def json_object(text: str) -> dict[str, Any]:
    """Return a JSON object. Raises ValueError."""
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        value = None
    if not isinstance(value, dict):
        raise ValueError('a JSON object such as {"key": "value"}')
    return value


def read_text(path: str) -> str:
    """Return the text of a file. Raises ValueError."""
    try:
        return Path(path).expanduser().read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"a file that can be read ({error})") from None


def words(text: str) -> list[str]:
    """Return the parts of a list with commas."""
    return [part.strip() for part in text.split(",") if part.strip()]


def rope_scaling(text: str) -> dict[str, Any]:
    """Return the settings of a rotary embedding: vLLM's JSON object, or llama-server's name of a type."""
    if text.lstrip().startswith("{"):
        return json_object(text)
    types = {"none": "default", "linear": "linear", "yarn": "yarn"}
    if text not in types:
        raise ValueError("a JSON object, or one of none, linear, yarn")
    return {"rope_type": types[text]}
