"""vLLM's names of formats of tool calls and of styles of reasoning (0.33, and older ones): with our key for each.

A name that is a key of ours needs no row. A row has our keys for the same format or style, and after them the nearest
ones, where it is missing here. The keys are looked up when a name is resolved. Knows no format; called by
`tools.formats` and `reasoning`.
"""

from __future__ import annotations

import difflib
from collections.abc import Container, Iterable, Mapping
from typing import NamedTuple

from headrace.protocol.errors import RequestError


class Alias(NamedTuple):
    """`same`: our keys of the same format or style; `nearest`: keys of others, the nearest first. The first key that
    exists counts."""

    same: tuple[str, ...] = ()
    nearest: tuple[str, ...] = ()


def _same(*keys: str) -> Alias:
    return Alias(keys)


def _near(*keys: str) -> Alias:
    return Alias((), keys)


_MUSE = ("muse_glimmer",)

TOOL_CALLS: dict[str, Alias] = {
    "cohere_command3": _same("command_r7b"),
    "cohere_command4": _same("command_r7b"),
    "deepseek_v31": _same("deepseek_v3"),
    "deepseek_v41": _near("deepseek_v4", "deepseek_v32", "deepseek_v3"),
    "dots": _near("minimax_m2", "muse_glimmer"),
    "ernie45": _same("hermes"),
    "functiongemma": _near("gemma4"),
    "gigachat3": _near("hermes"),
    "glm47": _same("glm45"),
    "granite-20b-fc": _near("hermes"),
    "granite4": _same("hermes"),
    "hy_v4": _near("hy_v3", "glm45"),
    "inkling": _near("hermes"),
    "internlm": _near("hermes"),
    "jamba": _same("hunyuan_a13b"),
    "k2_horizon": _near("glm45"),
    "kimi_k3": _near("kimi_k2", "deepseek_v3"),
    "ling3": _same("glm45"),
    "llama4_json": _same("llama3_json"),
    "llama4_pythonic": _same("pythonic"),
    "longcat": _near("hermes"),
    "mimo": _same("qwen3_coder"),
    "minicpm5": _near("qwen3_coder"),
    "minimax": _near("hermes"),
    "muse": _same(*_MUSE),
    "musespark1x": _same(*_MUSE),
    "plamo3": _near("deepseek_v3"),
    "poolside_v1": _same("glm45"),
    "qwen3_json": _same("hermes"),
    "qwen3_xml": _same("qwen3_coder"),
    "solar_open2": _near("hermes"),
    "step3": _near("deepseek_v3"),
    "step3p5": _same("qwen3_coder"),
    "step5": _same("qwen3_coder"),
    "xlam": _near("mistral"),
    "zaya_xml": _near("qwen3_coder"),
}
REASONING: dict[str, Alias] = {
    "cohere_command3": _same("command_r7b"),
    "cohere_command4": _near("command_r7b"),
    "deepseek_v3": _same("qwen3"),
    "deepseek_v4": _same("qwen3"),
    "deepseek_v41": _same("qwen3"),
    "glm45": _same("qwen3"),
    "glm47": _same("qwen3"),
    "granite_thinking_parser": _same("qwen3"),
    "holo2": _same("deepseek_r1"),
    "hy_v4": _near("hy_v3", "qwen3"),
    "inkling": _near("qwen3"),
    "k2_horizon": _same("deepseek_r1"),
    "kimi_k2": _same("qwen3"),
    "kimi_k3": _near("qwen3"),
    "ling3": _same("qwen3"),
    "mimo": _same("qwen3"),
    "minicpmv": _same("qwen3"),
    "minimax_m2": _same("qwen3"),
    # There, reasoning and marks stay in the content.
    "minimax_m2_append_think": _near("none"),
    "muse": _same(*_MUSE),
    "musespark1x": _same(*_MUSE),
    "nemotron_v3": _same("qwen3"),
    "olmo3": _same("deepseek_r1"),
    "plamo3": _near("qwen3"),
    "poolside_v1": _same("qwen3"),
    "solar_open2": _near("qwen3"),
    "step3": _same("deepseek_r1"),
    "step3p5": _same("qwen3"),
    "step5": _same("deepseek_r1"),
}
NONE = "none"
"""The name that stands for no parser."""
FOUND = frozenset({"hf", "beam"})
"""vLLM's names for the parser that the model's own files describe; here, it is detected where no name is given."""


def resolve(field: str, name: str, aliases: Mapping[str, Alias], keys: Iterable[str]) -> str:
    """Return the one of `keys` that `name` means, itself a key or one of `aliases`. Raises `RequestError`, which names
    the nearest of them, about the parameter `field`."""
    ours = frozenset(keys)
    key = name if name in ours else _first(aliases.get(name, Alias()).same, ours)
    if key is not None:
        return key
    every = ", ".join(sorted([*ours, *(one for one, alias in aliases.items() if _first(alias.same, ours)), NONE]))
    if name not in aliases:
        close = difflib.get_close_matches(name, [*ours, *aliases], 1)
        raise RequestError(field, name, (f"{close[0]}, perhaps, or another " if close else "") + f"one of {every}")
    nearest = _first(aliases[name].nearest, {*ours, NONE})
    reason = f"{nearest}, which is the nearest that headrace has (it has no {name}), or another one of {every}"
    raise RequestError(field, name, reason)


def _first(keys: tuple[str, ...], ours: Container[str]) -> str | None:
    return next((key for key in keys if key in ours), None)
