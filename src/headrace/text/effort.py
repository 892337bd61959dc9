"""The amount of reasoning before an answer, in the variables that chat templates have for it.

A switch turns reasoning on and off; a dial has levels, of which a template may refuse some. `histories.needs` detects
the refused levels; `serve.call.dialect` keeps the `Effort` of a model. Knows no requests.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

LEVELS = ("none", "minimal", "low", "medium", "high", "xhigh", "max")
"""The levels, from the least reasoning to the most."""
_OFF = ("none", "no_think")
"""The words of dials for no reasoning."""
WORDS = (*LEVELS, "no_think")
DIALS = ("reasoning_effort", "reasoning_strength", "thinking_effort")
SWITCHES: Mapping[str, tuple[Any, Any]] = {
    "enable_thinking": (False, True),
    "thinking": (False, True),
    # MiniMax M3.
    "thinking_mode": ("disabled", "enabled"),
}
"""Each switch, with its values for off and on."""
UNKNOWN = "ignored: the chat template knows no such thing"


class Effort(NamedTuple):
    """The switches and dials of a template. `levels`: the levels that the dials take, without "none". `off`: the dials'
    word for no reasoning; empty: they have none."""

    switches: frozenset[str] = frozenset()
    dials: frozenset[str] = frozenset()
    levels: tuple[str, ...] = LEVELS[1:]
    off: str = ""

    @classmethod
    def of(cls, sources: Iterable[str], refused: Iterable[str]) -> Effort:
        """Return the `Effort` of a template with these sources, which refuses these words."""
        sources, refused = list(sources), set(refused)
        switches, dials = (
            frozenset(name for name in names if any(reads(source, name) for source in sources))
            for names in (SWITCHES, DIALS)
        )
        levels = tuple(level for level in LEVELS[1:] if level not in refused)
        # A dial takes any word that the template does not compare.
        quoted = re.compile("['\"](" + "|".join(_OFF) + ")['\"]")
        named = {match[1] for source in sources for match in quoted.finditer(source)} - refused
        off = next((word for word in _OFF if word in named), "") if dials else ""
        return cls(switches, dials, levels or LEVELS[1:], off)

    def switched(self, is_on: bool) -> dict[str, Any]:
        """Return the variables that turn reasoning on or off; empty if the template has none."""
        variables = {name: SWITCHES[name][is_on] for name in self.switches}
        if not variables and self.off:
            variables = dict.fromkeys(self.dials, "high" if is_on else self.off)
        return variables

    def at(self, level: str) -> tuple[dict[str, Any], str]:
        """Return the variables for one of `LEVELS`, and a warning if the level is not honoured exactly."""
        variables: dict[str, Any] = {name: SWITCHES[name][level != "none"] for name in self.switches}
        if not variables and not self.dials:
            return {}, UNKNOWN
        if level != "none":
            word = self._nearest(level)
        else:
            word = self.off or ("" if self.switches or not self.dials else self._nearest("low"))
        if word and self.dials:
            variables |= dict.fromkeys(self.dials, word)
        if not self.dials or word in ("", level, self.off):
            return variables, ""
        return variables, f"the chat template does not know {level!r}, and gets {word!r}"

    def _nearest(self, level: str) -> str:
        """Return the level, or the one next to it that the dials take: of two the higher."""
        place = LEVELS.index(level)
        return min(reversed(self.levels), key=lambda each: abs(LEVELS.index(each) - place))


def reads(source: str, name: str) -> bool:
    """Return whether a template uses a variable of this name; an attribute of this name does not count."""
    return re.search(rf"(?<![\w.'\"]){name}(?!\w)", source) is not None
