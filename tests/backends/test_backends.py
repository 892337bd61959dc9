"""What a backend can do is what it has: a method that some backends lack is absent there, and does not raise."""

from __future__ import annotations

import ast
import importlib.util
import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from tests.laws import rules

from headrace import backends
from headrace.backends import make_backend, names
from headrace.checkpoint.packing import has_layouts, mixes
from headrace.protocol.errors import RequestError


@pytest.mark.parametrize("name", names())
def test_a_backend_without_layouts_has_none_of_the_methods_of_packing(name: str) -> None:
    backend: Any = make_backend(name, "cpu", "float32")
    assert has_layouts(backend) == (name == "cpu")
    assert all(hasattr(backend, method) == has_layouts(backend) for method in ("allocate", "packed_bytes"))
    assert hasattr(backend.ops, "packed") == has_layouts(backend)
    assert hasattr(backend.ops, "stacked") == mixes(backend) == (name != "cuda")


def only_raise(source: str) -> list[str]:
    """Names of the functions in `source` that do nothing but raise, and not the `CheckpointError` that refuses a model
    in the words of its user."""
    functions = [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.FunctionDef)]
    # A method that is all docstring is a subclass's to write.
    bodies = {f.name: (f.body[1 if ast.get_docstring(f) else 0 :] or f.body)[0] for f in functions}
    raises = {name: ast.unparse(body) for name, body in bodies.items() if isinstance(body, ast.Raise)}
    return [name for name, text in raises.items() if not text.startswith("raise CheckpointError(")]


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
        assert backend.kv_budget(None, 1, 1, 16, 0.9) == budget


@pytest.fixture
def choices(monkeypatch: pytest.MonkeyPatch) -> dict[str, bool]:
    """A machine on which backends say what was chosen. The test sets whether it has a GPU and triton."""
    machine = {"gpu": False, "triton": True}
    kinds = ["cpu", "cuda", "torch_ref"]
    for kind in kinds:
        module: Any = ModuleType(kind)
        module.make = lambda device, dtype, kind=kind: SimpleNamespace(name=kind, device=device)
        monkeypatch.setitem(sys.modules, f"headrace.backends.{kind}", module)
    monkeypatch.setattr(backends, "names", lambda: kinds)
    monkeypatch.setattr(backends, "has_cuda", lambda: machine["gpu"])
    right = importlib.util.find_spec

    def find_spec(name: str, *more: Any) -> Any:
        return (object() if machine["triton"] else None) if name == "triton" else right(name, *more)

    monkeypatch.setattr("importlib.util.find_spec", find_spec)
    return machine


@pytest.mark.parametrize(
    ("name", "device", "gpu", "chosen"),
    [
        ("auto", "auto", False, ("cpu", "cpu")),
        ("auto", "auto", True, ("cuda", "cuda")),
        ("auto", "cuda:1", True, ("cuda", "cuda:1")),
        ("auto", "cpu", True, ("cpu", "cpu")),
        ("cpu", "auto", True, ("cpu", "cpu")),
        ("torch_ref", "auto", True, ("torch_ref", "cuda")),
        ("cuda", "auto", True, ("cuda", "cuda")),
        ("cuda", "cpu", False, ("cuda", "cpu")),
        ("cuda", "cpu", True, ("cuda", "cpu")),
    ],
)
def test_the_backend_and_its_device_fit_the_machine(
    name: str, device: str, gpu: bool, chosen: tuple[str, str], choices: dict[str, bool]
) -> None:
    choices["gpu"] = gpu
    backend = make_backend(name, device, "float32")
    assert (backend.name, backend.device) == chosen


def test_without_triton_auto_is_torch_ref_on_a_gpu_and_says_so(
    choices: dict[str, bool], caplog: pytest.LogCaptureFixture
) -> None:
    choices.update(gpu=True, triton=False)
    assert make_backend("auto", "auto", "float32").name == "torch_ref"
    assert "need triton (the extra cuda)" in caplog.text


@pytest.mark.parametrize(
    ("name", "device", "message"),
    [
        ("cuda", "auto", "backend: 'cuda' .* auto, cpu or torch_ref on this machine: torch finds no CUDA device"),
        ("cuda", "cuda", "device: 'cuda' .* cpu on this machine"),
        ("auto", "cuda:0", "device: 'cuda:0' .* cpu on this machine"),
        ("metal", "auto", "backend: 'metal' .* one of auto, cpu, cuda, torch_ref"),
    ],
)
def test_a_backend_that_the_machine_lacks_is_refused(
    name: str, device: str, message: str, choices: dict[str, bool]
) -> None:
    with pytest.raises(RequestError, match=message):
        make_backend(name, device, "float32")
