"""What a backend can do is what it has: a method that some backends lack is absent there, and does not raise."""

from __future__ import annotations

import ast
from typing import Any

import pytest
from tests.laws import rules

from headrace.backends import make_backend, names
from headrace.checkpoint.packing import has_layouts


@pytest.mark.parametrize("name", names())
def test_a_backend_without_layouts_has_none_of_the_methods_of_packing(name: str) -> None:
    backend: Any = make_backend(name, "cpu", "float32")
    assert has_layouts(backend) == (name == "cpu")
    assert all(hasattr(backend, method) == has_layouts(backend) for method in ("allocate", "packed_bytes"))
    assert all(hasattr(backend.ops, method) == has_layouts(backend) for method in ("packed", "stacked"))


def only_raise(source: str) -> list[str]:
    """Names of the functions in `source` that do nothing but raise."""
    functions = [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.FunctionDef)]
    return [f.name for f in functions if isinstance(f.body[1 if ast.get_docstring(f) else 0], ast.Raise)]


def test_no_method_of_a_backend_only_raises() -> None:
    sources = {module: source for module, source in rules.sources() if rules.under(module, "backends")}
    assert sources
    assert {module: only_raise(source) for module, source in sources.items() if only_raise(source)} == {}


def test_control_a_method_that_only_raises_is_noticed() -> None:
    source = 'class A:\n    def f(self):\n        """F."""\n        raise NotImplementedError\n'
    source += "    def g(self):\n        return 1\n"
    assert only_raise(source) == ["f"]


@pytest.mark.parametrize("name", ["cpu", "torch_ref"])
def test_the_kv_cache_takes_a_part_of_the_free_memory(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    backend: Any = make_backend(name, "cpu", "float32")
    for available, budget in ((4003, 1000), (2**40, 4 * 2**30)):
        monkeypatch.setattr(type(backend), "available_memory", lambda self, num=available: num)
        assert backend.kv_budget(None, 1, 1, 16) == budget
