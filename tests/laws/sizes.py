"""How large the house is: lines that hold code, of the hall and of each wing. `python -m tests.laws.sizes` prints them.

The *hall* is the code that each step passes through, without its backend and its model file. Any other folder is a
*wing*, without the folders below it (ADR 0012).
"""

from __future__ import annotations

import ast
import io
import tokenize
from collections import Counter
from collections.abc import Mapping

from tests.laws import rules

MAX_FILE_LINES = 500
MAX_MODEL_FILE_LINES = 150
MAX_HALL = 9_250
"""Lines with code of the hall and the backend `cpu`."""
MAX_WING = 4_500

HALL = tuple(
    "protocol core sampling runner engine.core models models.config models.decoder models.rope "
    "models.weights backends backends.base backends.graph backends.arena backends.step".split()
)
SPLIT = ("backends", "models")
"""Folders of which only the modules in `HALL` belong to it."""


def num_lines(source: str) -> int:
    return source.count("\n")


def num_code_lines(source: str) -> int:
    """Lines that hold code: no blank lines, comments or docstrings, so that explanations cost nothing."""
    words: set[int] = set()
    for node in ast.walk(rules.tree_of(source)):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            words |= set(range(node.lineno, (node.end_lineno or node.lineno) + 1))
    empty = {tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER}
    code: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type not in empty:
            code |= set(range(token.start[0], token.end[0] + 1))
    return len(code - words)


def part(module: str) -> str:
    """The part that a module's lines count in: "hall", or the folder of its wing."""
    if module in HALL or any(rules.under(module, name) for name in HALL if name not in SPLIT):
        return "hall"
    is_folder = (rules.PACKAGE / module.replace(".", "/")).is_dir()
    return module if is_folder else module.rpartition(".")[0] or module


def code_lines() -> Counter[str]:
    """Code lines of each part of the house."""
    lines: Counter[str] = Counter()
    for module, source in rules.sources():
        lines[part(module)] += num_code_lines(source)
    return lines


def large_parts(lines: Mapping[str, int]) -> dict[str, int]:
    """The parts that have more code lines than they may. A number that is too large is mended by simplifying."""
    sizes = dict(lines) | {"hall": lines["hall"] + lines["backends.cpu"]}
    return {name: num for name, num in sizes.items() if num > (MAX_HALL if name == "hall" else MAX_WING)}


def main() -> None:
    lines = code_lines()
    print(f"{lines['hall'] + lines['backends.cpu']:6,} lines of code, hall and backends.cpu (at most {MAX_HALL:,})")
    for name, num in lines.most_common():
        if num:
            print(f"{num:6,} {name}")
    print(f"{sum(lines.values()):6,} in all; a wing has at most {MAX_WING:,}")


if __name__ == "__main__":
    main()
