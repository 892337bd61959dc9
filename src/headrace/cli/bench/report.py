"""`headrace bench report`: results of runs side by side, as one page of HTML without scripts. Called by
`bench.commands`."""

from __future__ import annotations

import html
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from headrace.protocol.errors import RequestError

HEAD = ("model_id", "label", "date", "version", "backend", "device", "dtype", "dataset_name", "num_prompts",
        "request_rate", "max_concurrency")  # fmt: skip
HIGHER_IS_BETTER = ("throughput", "goodput", "per_second", "tokens_per_s", "completed", "best_rate")
STYLE = """body{font:15px/1.4 system-ui,sans-serif;margin:2em;color:#222;background:#fff}
table{border-collapse:collapse}th,td{padding:.25em .8em;border-bottom:1px solid #ddd;text-align:right}
th:first-child,td:first-child{text-align:left}thead th{vertical-align:bottom}.bar{background:#cfe3f7;height:.5em}
.best{font-weight:600}"""


def read(paths: Sequence[Path]) -> list[dict[str, Any]]:
    """Return the results that `--save-result` or `--output-json` wrote. Raises `RequestError`."""
    results = []
    for path in paths:
        try:
            result = json.loads(path.read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise RequestError(
                "FILES", str(path), f"files that --save-result or --output-json wrote ({error})"
            ) from None
        if not isinstance(result, dict):
            raise RequestError("FILES", str(path), "files that hold one JSON object each")
        results.append(result)
    return results


def page(names: Sequence[str], results: Sequence[dict[str, Any]]) -> str:
    """Return the page: a column for each result, a row for each figure that any of them has, with bars."""
    figures = list(dict.fromkeys(name for result in results for name in result if name not in HEAD))
    rows = [_row(name, [result.get(name) for result in results], bars=False) for name in HEAD]
    rows += [_row(name, [result.get(name) for result in results], bars=True) for name in figures]
    head = "".join(f"<th>{html.escape(name)}</th>" for name in names)
    return (
        f'<!doctype html>\n<html lang="en"><meta charset="utf-8"><title>headrace bench</title><style>{STYLE}</style>\n'
        f"<h1>headrace bench</h1>\n<table>\n<thead><tr><th></th>{head}</tr></thead>\n{''.join(rows)}</table>\n</html>\n"
    )


def _row(name: str, values: Sequence[Any], *, bars: bool) -> str:
    numbers = [v for v in values if isinstance(v, int | float) and not isinstance(v, bool)]
    if all(v is None for v in values) or (bars and not numbers):
        return ""
    most = max((abs(v) for v in numbers), default=0)
    best = None
    if bars and len(set(numbers)) > 1 and (name.endswith("_ms") or any(word in name for word in HIGHER_IS_BETTER)):
        best = min(numbers) if name.endswith("_ms") else max(numbers)
    cells = ""
    for value in values:
        is_number = value in numbers and not isinstance(value, bool)
        text = f"{value:,.2f}" if is_number and isinstance(value, float) else "" if value is None else str(value)
        bar = (
            f'<div class="bar" style="width:{100 * abs(value) / most:.0f}%"></div>'
            if bars and is_number and most
            else ""
        )
        mark = ' class="best"' if is_number and value == best else ""
        cells += f"<td{mark}>{html.escape(text)}{bar}</td>"
    return f"<tr><td>{html.escape(name)}</td>{cells}</tr>\n"
