"""Finds the places where a test reaches into a private part of another object. `python -m tests.laws.privates` lists
them; `test_privates` has the bound on their number.

A private part is a name with one leading underscore. A class may use its own and its bases' (`self._x`, `cls._x`,
`super()._x`, inside a class). Parts of a namedtuple (`_replace`) are public, as is the compiled module
`headrace._native`; parts of other libraries (`os._exit`) are not for us to change.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

from tests.laws import rules

OURS = frozenset({"headrace", "tests", "bench", "training"})
PUBLIC = frozenset({"_replace", "_asdict", "_fields", "_field_defaults", "_make", "_native"})
MAY_REACH = re.compile(r"[.\"']_[A-Za-z]|import .*\b_[A-Za-z]|^ +_[A-Za-z]\w*,$", re.MULTILINE)
"""Parsing takes time: a source without a match is not parsed."""
BY_NAME = frozenset({"setattr", "delattr", "getattr", "hasattr"})


def is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__") and name != "_" and name not in PUBLIC


def root_of(node: ast.expr) -> str:
    """The variable that an expression begins with; empty if it begins with none."""
    while not isinstance(node, ast.Name):
        if isinstance(node, ast.Attribute | ast.Subscript):
            node = node.value
        elif isinstance(node, ast.Call):
            node = node.func
        else:
            return ""
    return node.id


def foreign_names(tree: ast.AST) -> set[str]:
    """The names that a module imports from other libraries."""
    names = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names |= {(a.asname or a.name).split(".")[0] for a in node.names if a.name.split(".")[0] not in OURS}
        elif isinstance(node, ast.ImportFrom) and not node.level and str(node.module).split(".")[0] not in OURS:
            names |= {alias.asname or alias.name for alias in node.names}
    return names


def nodes_of(tree: ast.AST, in_class: bool = False) -> Iterator[tuple[ast.AST, bool]]:
    """Yield all nodes, and whether each is inside a class."""
    for node in ast.iter_child_nodes(tree):
        yield node, in_class
        yield from nodes_of(node, in_class or isinstance(node, ast.ClassDef))


def private_lines(source: str) -> list[int]:
    """The lines of a module that reach into a private part of another object."""
    if not MAY_REACH.search(source):
        return []
    tree = ast.parse(source)
    foreign, lines = foreign_names(tree), set()

    def is_others(owner: ast.expr, in_class: bool) -> bool:
        if in_class and isinstance(owner, ast.Name) and owner.id in ("self", "cls"):
            return False
        return root_of(owner) not in foreign | {"super"}

    for node, in_class in nodes_of(tree):
        if isinstance(node, ast.Attribute):
            if is_private(node.attr) and is_others(node.value, in_class):
                lines.add(node.end_lineno or node.lineno)
        elif isinstance(node, ast.ImportFrom):
            if str(node.module).split(".")[0] in OURS and any(is_private(alias.name) for alias in node.names):
                lines.add(node.lineno)
        elif isinstance(node, ast.Call):
            name = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
            if name in BY_NAME and len(node.args) > 1:
                owner, part = node.args[:2]
                if isinstance(owner, ast.Constant):
                    # "package.module.part"
                    if is_private(str(owner.value).rpartition(".")[2]) and str(owner.value).split(".")[0] in OURS:
                        lines.add(owner.lineno)
                elif isinstance(part, ast.Constant) and is_private(str(part.value)) and is_others(owner, in_class):
                    lines.add(part.lineno)
    return sorted(lines)


def listed() -> list[str]:
    """All such lines of the tests, as `file:line: text`."""
    broken = []
    for path in sorted((rules.ROOT / "tests").rglob("*.py")):
        source = path.read_text()
        texts = source.splitlines()
        name = path.relative_to(rules.ROOT)
        broken += [f"{name}:{number}: {texts[number - 1].strip()}" for number in private_lines(source)]
    return broken


if __name__ == "__main__":
    print(*(lines := listed()), f"{len(lines)} lines", sep="\n")
