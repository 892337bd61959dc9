"""Turns the command lines and keywords of other engines into headrace's own, by the tables of `headrace.migration`.

Users bring their command lines and scripts along. `translate` turns the flags of vLLM's `vllm serve` and of
llama-server into headrace's own, `translate_keywords` does so for the keywords of vLLM's `LLM`. Knows no config. Called
by `cli` and `llm`.
"""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import msgspec.yaml

from headrace.migration.llama_server import LLAMA_SERVER_SETTINGS
from headrace.migration.settings import (
    SAMPLING,
    SPECULATION,
    TEMPLATE_VARIABLES,
    VLLM,
    NoEffectError,
    RefusedError,
    Setting,
)
from headrace.migration.vllm import SPECULATION_WITHOUT_EFFECT, VLLM_SETTINGS
from headrace.protocol.defaults import check_default
from headrace.protocol.errors import RequestError, UnsupportedError

logger = logging.getLogger("headrace")

LIMITS = "limit_mm_per_prompt"
RECORDS = (SAMPLING, TEMPLATE_VARIABLES, SPECULATION, "hf_overrides", LIMITS)
"""The fields that are JSON objects. --hf-overrides.rope_theta 1e6 sets a value in one, as in vLLM."""
CACHE_BITS = {"float32": 32, "bfloat16": 16, "float16": 16, "auto": 16, "int8": 8, "int4": 4}

SETTINGS: dict[str, Setting] = {
    name: setting for setting in (*LLAMA_SERVER_SETTINGS, *VLLM_SETTINGS) for name in setting.names
}
"""By name. Where both engines have a name, vLLM's meaning counts: headrace's flags are vLLM's."""
VLLM_NAMES = tuple(name for setting in VLLM_SETTINGS for name in setting.names if name.startswith("--"))


def translate(arguments: Iterable[str], ours: Mapping[str, bool]) -> tuple[list[str], list[str]]:
    """Return a command line with our flags only, and a note for each flag that has no effect here.

    Args:
        arguments: the words after the command's name.
        ours: the command's own flags, and whether a value follows.

    Raises `RequestError` for a flag of another engine that is not supported, naming what to use.
    """
    return _Line(arguments, ours).read()


class _Line:
    """One command line, while it is translated. The arguments are those of `translate`."""

    def __init__(self, arguments: Iterable[str], ours: Mapping[str, bool]) -> None:
        self._rest = list(arguments)
        self._ours = ours
        self._words: list[str] = []
        self._notes: list[str] = []
        # What the flags have set in fields that are JSON objects.
        self._records: dict[str, Any] = {}
        self._has_model, self._last_flag = False, ""
        # The scale that all adapters have, in place of their own.
        self._lora_scale: float | None = None

    def read(self) -> tuple[list[str], list[str]]:
        """Return the words, and the notes."""
        model = self._take_config()
        while self._rest:
            self._read_word(self._rest.pop(0))
        if not self._has_model and model is not None:
            self._words.append(model)
        self._settle()
        for field, record in self._records.items():
            self._words += [_flag(field), json.dumps(record, ensure_ascii=False)]
        return self._words, self._notes

    def _take_config(self) -> str | None:
        """Put the flags of vLLM's --config file before the others, which win; return the model that it names."""
        split = [self._split(word) for word in self._rest]
        at = next((place for place, (name, *_) in enumerate(split) if name == "--config"), None)
        if at is None or "--config" in self._ours:
            return None
        path = split[at][2] if split[at][1] else "".join(self._rest[at + 1 : at + 2])
        del self._rest[at : at + (1 if split[at][1] else 2)]
        settings = _yaml_of(path)
        model = settings.pop("model", settings.pop("model_tag", None))
        words: list[str] = []
        for key, value in settings.items():
            flag = _spelled("--" + str(key))
            if flag not in {name for name, *_ in split}:
                words += self._words_of(flag, value)
        self._rest = words + self._rest
        return None if model is None else str(model)

    def _words_of(self, flag: str, value: Any) -> list[str]:
        """Return a flag with a value of a YAML file."""
        if isinstance(value, bool):
            is_switch = not self._ours.get(flag, SETTINGS[flag].takes_value if flag in SETTINGS else False)
            if not is_switch:
                return [flag, str(value)]
            return [flag] if value else [f"--no-{flag[2:]}"] if flag in self._ours else []
        if isinstance(value, dict):
            return [flag, json.dumps(value)]
        return [word for each in (value if isinstance(value, list) else [value]) for word in (flag, str(each))]

    def _read_word(self, word: str) -> None:
        name, equals, value, place = self._split(word)
        field = name[2:].replace("-", "_")
        if field in RECORDS and name in self._ours:
            text = value if equals else self._next()
            if field == LIMITS and not place and re.fullmatch(r"\w+=\d+(,\w+=\d+)*", text):
                # vLLM's form before it had JSON.
                text = json.dumps({name: int(num) for name, num in (pair.split("=") for pair in text.split(","))})
            merge(self._records, f"{field}.{place}" if place else field, _json_of(name, text, bool(place)))
            return
        setting = SETTINGS.get(name)
        if name in self._ours and (setting is None or setting.convert is None):
            self._words.append(name + equals + value)
            if self._ours[name] and not equals and self._rest:
                self._words.append(self._next())
            self._last_flag = name
        elif setting is not None:
            self._has_model, self._last_flag = self._has_model or setting.ours == "model", ""
            if setting.takes_value and not equals:
                value = self._value_of(setting)
            self._take(setting, name, value)
        elif not _is_off(name):
            whole = self._completed(name)
            if whole == name:
                self._keep(word)
            else:
                self._read_word(whole + equals + value)

    def _split(self, word: str) -> tuple[str, str, str, str]:
        """Return a flag's name, = if its value follows that, the value, and after a dot the place in a record."""
        name, equals, value = word.partition("=")
        if word.startswith("-O") and len(word) > 2:  # vLLM's -O3
            return "-O", "=", word[2:], ""
        if not name.startswith("-"):
            return word, "", "", ""
        whole, (base, _, place) = _spelled(name), name.partition(".")
        if whole in SETTINGS or whole in self._ours or not place:
            return whole, equals, value, ""
        return _spelled(base), equals, value, place

    def _completed(self, name: str) -> str:
        """Return the one flag that begins so, as vLLM's parser takes it: --tensor-parallel; else `name`."""
        names = [flag for flag in (*self._ours, *VLLM_NAMES) if flag.startswith(name)]
        return names[0] if name.startswith("--") and len(name) > 4 and len(names) == 1 else name

    def _next(self) -> str:
        return self._rest.pop(0) if self._rest else ""

    def _value_of(self, setting: Setting) -> str:
        if setting.may_follow and not (self._rest and self._rest[0] in setting.may_follow):
            return ""
        value = self._next()
        if setting.takes_number and self._rest and _is_number(self._rest[0]):
            value += ":" + self._next()
        # vLLM's lists, such as --cudagraph-capture-sizes 1 2 4.
        is_list = setting.source == VLLM and setting.has_no_effect and value.isdecimal()
        while is_list and self._rest and self._rest[0].isdecimal():
            self._next()
        return value

    def _keep(self, word: str) -> None:
        # vLLM's way to give several values; before MODEL there is one.
        if (
            self._last_flag in ("--served-model-name", "--lora-modules")
            and self._has_model
            and not word.startswith("-")
        ):
            self._words.append(self._last_flag)
        elif not word.startswith("-"):
            self._has_model, self._last_flag = True, ""
        self._words.append(word)

    def _take(self, setting: Setting, name: str, text: str) -> None:
        """Do what one flag of another engine means. Raises `RequestError`."""
        try:
            converted = _converted(setting, name, text)
        except NoEffectError as reason:
            self._notes.append(f"{name} {text} has no effect here: {reason}")
            return
        if converted is None:
            if not setting.ours:
                self._notes.append(f"{name} has no effect here: {setting.why}")
            return
        for path, value in ((setting.ours, converted), *setting.also):
            self._set(path, name, value)

    def _set(self, path: str, name: str, value: Any) -> None:
        field = path.partition(".")[0]
        if field == "model":
            self._words.append(str(value))
        elif path == "lora_modules.scale":
            self._lora_scale = float(value)
        elif field in RECORDS:
            merge(self._records, path, value)
        elif value in ("true", "false"):
            self._words.append(_flag(field) if value == "true" else f"--no-{_flag(field)[2:]}")
        else:
            for each in value if isinstance(value, list) else [value]:
                self._set_field(_flag(field), name, str(each), is_list=isinstance(value, list))

    def _set_field(self, flag: str, name: str, value: str, is_list: bool) -> None:
        at = self._words.index(flag) + 1 if flag in self._words and not is_list else 0
        if not at:
            self._words += [flag, value]
        elif flag == "--kv-cache-dtype" and {value, self._words[at]} <= CACHE_BITS.keys():
            if value != self._words[at]:
                self._words[at] = max(value, self._words[at], key=lambda kind: CACHE_BITS[kind])
                self._notes.append(f"keys and values are kept in one format, {self._words[at]}; see {flag}")
        elif self._words[at] != value:
            self._notes.append(f"{name} {value} takes the place of {self._words[at]}, which came before")
            self._words[at] = value

    def _settle(self) -> None:
        """Leave out what has no effect without other flags."""
        drafts = self._records.get(SPECULATION, {})
        for field in sorted(drafts.keys() & SPECULATION_WITHOUT_EFFECT):
            self._notes.append(f"{SPECULATION}.{field} has no effect here: see --speculative-config")
            del drafts[field]
        for field, value in drafts.items():
            if isinstance(value, str) and value.isdecimal():
                drafts[field] = int(value)  # vLLM takes numbers as texts
        if drafts and not drafts.keys() & {"method", "model"}:
            self._notes.append("no tokens are guessed ahead: no flag names what guesses; see --speculative-config")
            del self._records[SPECULATION]
        for at, word in enumerate(self._words[1:], 1) if self._lora_scale is not None else ():
            if self._words[at - 1] == "--lora-modules" and word.startswith("{"):
                self._words[at] = json.dumps(json.loads(word) | {"scale": self._lora_scale})
        text = " ".join(self._words)
        ranks = re.findall(r"(?:--tensor-parallel-size|-tp)[ =](\d+)", text)
        if "--enable-expert-parallel" in self._words and set(ranks) <= {"1"}:
            self._words.remove("--enable-expert-parallel")
            self._notes.append("--enable-expert-parallel has no effect here without --tensor-parallel-size 2 or more")


def merge(records: dict[str, Any], path: str, value: Any) -> None:
    """Set the value at a `path` such as hf_overrides.rope_theta; an object is merged with that at the path, and a path
    with a + at its end adds to a list."""
    *outer, last = path.split(".")
    for name in outer:
        inner = records.get(name)
        records[name] = dict(inner) if isinstance(inner, dict) else {}
        records = records[name]
    if last.endswith("+"):
        records[last[:-1]] = [*records.get(last[:-1], []), value]
    else:
        _put(records, last, value)


def _put(target: dict[str, Any], key: str, value: Any) -> None:
    if isinstance(value, dict) and isinstance(target.get(key), dict):
        target[key] = dict(target[key])
        for name, part in value.items():
            _put(target[key], name, part)
    else:
        target[key] = value


def translate_keywords(fields: Mapping[str, Any], ours: Iterable[str]) -> dict[str, Any]:
    """Return the keywords of `LLM` that are `ours`, with our values; log each of vLLM's that has no effect here.

    Raises `RequestError` for a keyword that is not supported, and for an unknown one."""
    values: dict[str, Any] = {}
    known = set(ours)
    for name, value in fields.items():
        setting = SETTINGS.get(_flag(name))
        if name in known:
            values[name] = setting.convert(value) if setting and setting.convert and isinstance(value, str) else value
        elif setting is None or setting.source != VLLM:
            raise RequestError(name, value, "a field of EngineConfig")
        elif value is None or (value is False and not setting.takes_value):
            continue
        elif setting.ours.partition(".")[0] in known:
            is_text = isinstance(value, str) and setting.convert is not None
            merge(values, setting.ours, _converted(setting, name, value) if is_text else value)
        elif setting.has_no_effect and (setting.neutral is None or str(value) in setting.neutral):
            logger.warning("%s=%r has no effect here: %s", name, value, setting.why)
        else:
            raise _refusal(setting, name, value)
    return values


def _yaml_of(path: str) -> dict[str, Any]:
    """Return the settings of a YAML file. Raises `RequestError`."""
    try:
        return msgspec.yaml.decode(Path(path).expanduser().read_bytes(), type=dict[str, Any])
    except (OSError, ValueError) as error:
        raise RequestError("--config", path, f"a YAML file of flags and their values ({error})") from None


def _is_number(word: str) -> bool:
    try:
        float(word)
    except ValueError:
        return False
    return True


def _flag(field: str) -> str:
    return "--" + field.replace("_", "-")


def _spelled(name: str) -> str:
    """Return a flag with the hyphens that its name has here."""
    return {"-sc": "--speculative-config"}.get(name, name.replace("_", "-") if name.startswith("--") else name)


def _is_off(name: str) -> bool:
    """Whether a flag turns a switch of vLLM's off that has no effect here, or is off."""
    setting = SETTINGS.get("--" + name.removeprefix("--no-"))
    return name.startswith("--no-") and setting is not None and setting.source == VLLM and not setting.takes_value


def _json_of(flag: str, text: str, is_part: bool) -> Any:
    """Return the value of a flag that is JSON; a part of a record may be a text as it stands. Raises `RequestError`."""
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        value = text
    if not is_part and not isinstance(value, dict):
        raise RequestError(flag, text, 'a JSON object such as {"key": "value"}')
    return value


def _converted(setting: Setting, name: str, text: str) -> Any:
    """Return the value that a flag sets here; None where it sets none. Raises `RequestError` and `NoEffectError`."""
    if setting.ours and text in (setting.neutral or ()):
        return None
    if not setting.ours and setting.neutral is not None and text not in setting.neutral:
        raise _refusal(setting, name, text)
    field, _, place = setting.ours.partition(".")
    if setting.fixed:
        return json.loads(setting.fixed) if field in RECORDS else setting.fixed
    try:
        value = text if setting.convert is None else setting.convert(text)
        if field == SAMPLING and not place.endswith("+"):
            value = _checked(place, value, name)
    except RefusedError as reason:
        raise UnsupportedError(name, text, str(reason)) from None
    except ValueError as bound:
        raise RequestError(name, text, str(bound)) from None
    return value if setting.ours else None


def _checked(place: str, value: Any, name: str) -> Any:
    """Check a sampling default as a request's field. Raises `RequestError` that names the flag."""
    parameter, _, part = place.partition(".")
    check_default(parameter, {part: value} if part else value, name)
    return value


def _refusal(setting: Setting, name: str, value: object) -> RequestError:
    if setting.neutral:
        return RequestError(name, value, f"{' or '.join(setting.neutral)}: {setting.why}")
    return UnsupportedError(name, value, setting.why)
