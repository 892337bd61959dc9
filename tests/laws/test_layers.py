"""Every module keeps to its layer; each law is shown a source that breaks it."""

from __future__ import annotations

import ast

import pytest
from tests.laws import rules

MODULES = dict(rules.sources())


def test_there_are_modules() -> None:
    assert {"protocol.step", "core.scheduler", "engine.core", "serve.app"} <= set(MODULES)


@pytest.mark.parametrize("law", ["layer", "core", "danger", "habit", "environment"])
def test_law_is_kept(law: str) -> None:
    check = getattr(rules, f"{law}_violations")
    broken = [line for module, source in MODULES.items() for line in check(module, source)]
    assert not broken, "\n".join(broken)


def test_every_arrow_of_the_plan_points_down(monkeypatch: pytest.MonkeyPatch) -> None:
    assert rules.plan_violations() == []
    sideways = (*rules.FLOORS, (rules.Room("a", "protocol b"), rules.Room("b", "core")))
    monkeypatch.setattr(rules, "FLOORS", sideways)
    assert rules.plan_violations() == ["a may not rest on b"]


def test_every_room_stands() -> None:
    empty = [name for name in rules.ROOMS if not any(rules.under(module, name) for module in MODULES)]
    assert not empty


def uses_fastapi(source: str) -> bool:
    return any(rules.under(name, "fastapi") for _, name in rules.imports(source))


def test_the_server_needs_starlette_alone() -> None:
    """FastAPI may be installed beside headrace, and is no dependency of it."""
    files = [path for folder in ("src", "tests") for path in (rules.ROOT / folder).rglob("*.py")]
    texts = {path: path.read_text() for path in files}
    assert not [path for path, text in texts.items() if "fastapi" in text and uses_fastapi(text)]
    assert uses_fastapi("from fastapi import FastAPI")
    assert not uses_fastapi("import starlette")


def test_every_folder_has_a_face() -> None:
    """The docstring of a folder's `__init__` says what the folder is for and which names others may use."""
    for path in rules.PACKAGE.rglob("__init__.py"):
        assert ast.get_docstring(ast.parse(path.read_text())), path


def test_no_modules_import_each_other_in_a_circle() -> None:
    assert rules.circle(MODULES) == []


def test_a_circle_is_reported() -> None:
    sources = {
        "a": "from headrace.b import f",
        "b": "def g():\n    from headrace import c",
        "c": "if TYPE_CHECKING:\n    from headrace.a import T",
        "d": "from headrace import a",
    }
    assert set(rules.circle(sources)) == {"a", "b", "c"}
    assert rules.circle(sources | {"c": ""}) == []


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("protocol.step", "import torch"),
        ("core.sequence", "def f():\n    import numpy as np"),
        ("core.scheduler", "from headrace.protocol.config import EngineConfig"),
        ("core.blocks", "from headrace.core import scheduler"),
        ("core.scheduler", "from headrace.engine.core import EngineCore"),
        ("serve.app", "import torch.nn"),
        ("serve.app", "from headrace.runner import runner"),
        ("text.tokenizer", "from transformers import AutoTokenizer"),
        ("text.tokenizer", "from headrace.protocol.config import ServerConfig"),
        ("text.templates", "import importlib\nimportlib.import_module('headrace.models.llama')"),
        ("text.inputs", "from headrace.engine.client import EngineClient"),
        ("models.llama", "from headrace.core.sequence import Sequence"),
        ("models.llama", "import torch"),
        ("runner.runner", "import starlette"),
        ("runner.runner", "from headrace.core.scheduler import Scheduler"),
        ("runner.runner", "from headrace.protocol.config import EngineConfig"),
        ("engine.library.load", "from headrace.backends.cpu.choose import Chooser"),
        ("drafters.eagle", "from headrace.backends.torch_ref import TorchRef"),
        ("models.decoder", "from headrace.checkpoint.loader import SafetensorsWeights"),
        ("backends.cpu", "from headrace.models import llama"),
        ("drafters.context", "from headrace.core import scheduler"),
        ("engine.client", "from headrace.serve.errors import error_response"),
        ("engine.library.load", "import torch"),
        ("insight.metrics", "from headrace.quantize import driver"),
        ("quant.base", "from headrace.sampling import noise"),
        ("serve.gates.auth", "from headrace.serve import app"),
        ("serve.apis.ollama.reply", "from headrace.serve.apis.anthropic import request"),
        ("serve.apis.ollama.service", "from headrace.serve.apis.openai.completions import chat"),
        ("core.blocks", "from . import prefix"),
        ("newcomer", "x = 1"),
    ],
)
def test_reaching_past_a_neighbour_is_reported(module: str, source: str) -> None:
    assert rules.layer_violations(module, source)


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("engine.core", "from headrace.core.scheduler import Scheduler\nfrom headrace.protocol.step import Stats"),
        ("core.prefix", "from . import blocks"),
        ("serve.app", "from headrace.protocol.config import ServerConfig"),
        ("cli.main", "import torch"),
        ("", "from headrace.llm import LLM"),
    ],
)
def test_neighbours_are_allowed(module: str, source: str) -> None:
    assert not rules.layer_violations(module, source)


@pytest.mark.parametrize(
    "source",
    ["import time", "from random import Random", "def f():\n    return open('x')", "print(1)", "import os.path"],
)
def test_io_in_the_core_is_reported(source: str) -> None:
    assert rules.core_violations("core.scheduler", source)
    assert not rules.core_violations("serve.app", source)


@pytest.mark.parametrize(
    "source",
    [
        "import pickle",
        "def f():\n    from marshal import loads",
        "eval('1')",
        "exec('x = 1')",
        "import yaml\nyaml.load('a')",
        "import torch\ntorch.load('model.bin')",
        "from torch import load",
        "sock.recv_pyobj()",
        "import subprocess\nsubprocess.run('ls', shell=True)",
        "AutoModel.from_pretrained('x', trust_remote_code=True)",
    ],
)
def test_S_01_code_from_bytes_is_reported(source: str) -> None:
    assert rules.danger_violations("checkpoint.loader", source)


@pytest.mark.parametrize(
    "source",
    [
        '"""x"""\nassert 1',
        '"""x"""\ntry:\n    pass\nexcept:\n    raise',
        '"""x"""\ntry:\n    f()\nexcept Exception:\n    pass',
        '"""x"""\nclass BlockManager: ...',
        '"""x"""\nclass RequestHandlerBase: ...',
        '"""x"""\nclass FieldMixin: ...',
        '"""x"""\nclass Utils: ...',
        "import math",
    ],
)
def test_S_05_bad_habits_are_reported(source: str) -> None:
    assert rules.habit_violations("core.blocks", source)


@pytest.mark.parametrize(
    "source", ["import os\nos.environ['HOME']", "import os\nos.getenv('X')", "from os import environ\nenviron"]
)
def test_reading_the_environment_is_reported(source: str) -> None:
    assert rules.environment_violations("serve.app", source)
    assert not rules.environment_violations("env", source)
