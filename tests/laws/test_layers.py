"""Every module keeps to its layer; each law is shown a source that breaks it."""

from __future__ import annotations

import pytest
from tests.laws import rules

MODULES = dict(rules.sources())


def test_there_are_modules() -> None:
    assert {"types", "core.engine", "bounds"} <= set(MODULES)


@pytest.mark.parametrize("law", ["layer", "core", "danger", "habit", "environment"])
def test_law_is_kept(law: str) -> None:
    check = getattr(rules, f"{law}_violations")
    broken = [line for module, source in MODULES.items() for line in check(module, source)]
    assert not broken, "\n".join(broken)


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("types", "import torch"),
        ("core.engine", "def f():\n    import numpy as np"),
        ("core.scheduler", "from headrace.config import EngineConfig"),
        ("core.blocks", "from headrace.core import scheduler"),
        ("core.blocks", "from headrace.types import Request"),
        ("server.http", "import torch.nn"),
        ("server.http", "from headrace.runner import runner"),
        ("server.text", "from transformers import AutoTokenizer"),
        ("server.text", "from headrace.config import ServerConfig"),
        ("server.chat", "import importlib\nimportlib.import_module('headrace.models.llama')"),
        ("models.llama", "from headrace.types import Request"),
        ("models.llama", "from headrace.backends.torch_ref.ops import TorchOps"),
        ("runner.runner", "import fastapi"),
        ("runner.runner", "from headrace.core.scheduler import Scheduler"),
        ("runner.runner", "from headrace.config import EngineConfig"),
        ("backends.cpu", "from headrace.models import llama"),
        ("bounds", "import msgspec"),
        ("errors", "from headrace.bounds import BOUNDS"),
        ("sampling.params", "import numpy"),
        ("core.prefix", "from . import scheduler"),
        ("newcomer", "x = 1"),
    ],
)
def test_reaching_past_a_neighbour_is_reported(module: str, source: str) -> None:
    assert rules.layer_violations(module, source)


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("core.engine", "from headrace.core.scheduler import Scheduler\nfrom headrace.types import Stats"),
        ("core.prefix", "from . import blocks"),
        ("server.http", "from headrace.config import ServerConfig"),
        ("cli.main", "import torch"),
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
    assert not rules.core_violations("server.http", source)


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
    assert rules.danger_violations("runner.loader", source)


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
    assert rules.environment_violations("server.http", source)
    assert not rules.environment_violations("env", source)
