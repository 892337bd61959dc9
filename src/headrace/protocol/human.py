"""Numbers as people write them: 32k, 32K. Called by `cli.options`, `ray.app` and `serve.inspector.planning`."""

from __future__ import annotations

import re


def human_int(text: str) -> int:
    """'32k' -> 32000, '32K' -> 32768, '2G' -> 2**31, '4096' -> 4096: vLLM's rule for sizes on the command line.

    Raises ValueError for anything else.
    """
    match = re.fullmatch(r"(\d+(?:\.\d+)?)([kKmMgGtT]?)", text.strip())
    if not match:
        raise ValueError(f"{text!r} is not a number such as 4096, 32k (32,000) or 32K (32,768)")
    number, unit = match.groups()
    power = {"": 0, "k": 1, "m": 2, "g": 3, "t": 4}[unit.lower()]
    value = float(number) * (1000 if unit.islower() else 1024) ** power
    if not value.is_integer():
        raise ValueError(f"{text!r} is not a whole number")
    return int(value)
