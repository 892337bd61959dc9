"""docs/howto-add-a-model.md can be followed: its model file runs, and what it quotes is in the files that it names."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from tests.laws import rules
from tests.support.harness import BACKENDS, chunk_sizes, follow, load, random_ids, save_random

from headrace import models

PAGE = (rules.ROOT / "docs" / "howto-add-a-model.md").read_text(encoding="utf-8")
NAME = "starcoder2"
LENGTH = 90


def model_file(page: str) -> str:
    """The Python block of the page that is a whole module."""
    (source,) = (block for block in re.findall(r"^```python\n(.*?)^```$", page, re.M | re.S) if block.startswith('"""'))
    return str(source)


def excerpts(page: str) -> list[tuple[str, str]]:
    """(path, code) of each indented block that follows the name of its file."""
    pairs = re.findall(r"`([\w./]+\.(?:py|h|cpp))`[^`\n]*:\n\n   ```\w+\n(.*?)^   ```$", page, re.M | re.S)
    return [(path, re.sub(r"^   ", "", code, flags=re.M)) for path, code in pairs]


def absent(page: str) -> list[str]:
    """Files that lack what the page quotes from them."""
    return [path for path, code in excerpts(page) if code not in (rules.ROOT / path).read_text(encoding="utf-8")]


@pytest.fixture
def add_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Put the page's file among the model files."""
    assert NAME not in models.names(), "the page's example must be a model that headrace does not have"
    folder = tmp_path / "models"
    folder.mkdir()
    (folder / f"{NAME}.py").write_text(model_file(PAGE))
    monkeypatch.setattr(models, "__path__", [*models.__path__, str(folder)])
    yield
    sys.modules.pop(f"headrace.models.{NAME}", None)


@pytest.mark.usefixtures("add_model")
@pytest.mark.parametrize("changes", [{}, {"use_bias": False, "sliding_window": None, "tie_word_embeddings": False}])
def test_the_pages_model_equals_transformers(changes: dict[str, object], tmp_path: Path) -> None:
    config = models.find(NAME).TINY | changes
    theirs = save_random(config, tmp_path)
    token_ids = random_ids(LENGTH, config["vocab_size"], 1)
    with torch.inference_mode():
        expected = theirs(torch.tensor([token_ids])).logits[0]
    assert expected.std() > 0.3
    for backend in BACKENDS:
        logits = follow(load(tmp_path, block_size=8, backend=backend), token_ids, chunk_sizes(LENGTH, [13, 1, 41, 7]))
        assert (logits - expected).abs().max() <= 1e-4, backend


def test_the_page_names_every_member_of_a_model() -> None:
    table = PAGE[PAGE.index("| member |") : PAGE.index("## Worked example")]
    members = {name for name in vars(models.Model) if not name.startswith("_")} | models.Model.__annotations__.keys()
    assert len(members) == 12
    assert {name for name in members if f"`{name}`" not in table and f"`{name}(" not in table} == set()


def test_what_the_page_quotes_is_in_the_files() -> None:
    assert len(excerpts(PAGE)) == 9
    assert absent(PAGE) == []


def test_control_a_stale_excerpt_is_noticed() -> None:
    assert absent(PAGE.replace("cap, tanh(div(v, cap))", "cap, tanh(mul(v, cap))")) == ["csrc/generic/elementwise.cpp"]
    assert excerpts(PAGE)[0][1].startswith("    def softcap")


def test_every_file_that_the_page_names_exists() -> None:
    roots = [rules.ROOT, rules.PACKAGE, rules.PACKAGE / "backends"]
    paths = {path for path in re.findall(r"`([\w/]+\.(?:py|h|cpp))`", PAGE) if path != f"src/headrace/models/{NAME}.py"}
    assert len(paths) > 8
    assert [path for path in sorted(paths) if not any((root / path).exists() for root in roots)] == []
