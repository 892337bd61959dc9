"""No module of the backends imports itself by way of others: each can be read after those that it imports."""

from __future__ import annotations

import graphlib

from tests.laws import rules


def circle(sources: dict[str, str]) -> list[str]:
    """Names of modules that import each other in a circle, those for type checkers included; else an empty list."""
    graph = {}
    for module, source in sources.items():
        names = {name.removeprefix("headrace.") for _, name in rules.imports(source, module)}
        names |= {name.rpartition(".")[0] for name in names if name not in sources}
        graph[module] = (names & sources.keys()) - {module}
    try:
        graphlib.TopologicalSorter(graph).prepare()
    except graphlib.CycleError as error:
        return list(error.args[1])
    return []


def test_the_backends_import_each_other_in_no_circle() -> None:
    sources = {module: source for module, source in rules.sources() if rules.under(module, "backends")}
    assert len(sources) > 15
    assert circle(sources) == []


def test_control_a_circle_is_noticed() -> None:
    sources = {
        "backends.a": "from headrace.backends.b import B\n",
        "backends.b": "from headrace.backends import c\n",
        "backends.c": "if TYPE_CHECKING:\n    from headrace.backends.a import A\n",
    }
    assert set(circle(sources)) == {"backends.a", "backends.b", "backends.c"}
    assert circle(sources | {"backends.c": ""}) == []
