"""docs/howto-add-a-model.md shows what is: its model file is the package's, and what it quotes is in its files."""

from __future__ import annotations

import re

from tests.laws import rules

from headrace import models

PAGE = (rules.ROOT / "docs" / "howto-add-a-model.md").read_text(encoding="utf-8")
NAME = "starcoder2"


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


def test_the_pages_model_is_the_one_that_headrace_ships() -> None:
    path = rules.PACKAGE / "models" / f"{NAME}.py"
    assert model_file(PAGE) == path.read_text(encoding="utf-8")
    assert NAME in models.names()


def test_control_another_model_on_the_page_is_noticed() -> None:
    path = rules.PACKAGE / "models" / f"{NAME}.py"
    assert model_file(PAGE.replace('flag("use_bias", True)', 'flag("use_bias", False)')) != path.read_text()


def test_the_page_names_every_member_of_a_model() -> None:
    table = PAGE[PAGE.index("| member |") : PAGE.index("## Worked example")]
    members = {name for name in vars(models.Model) if not name.startswith("_")} | models.Model.__annotations__.keys()
    assert len(members) == 15
    assert {name for name in members if f"`{name}`" not in table and f"`{name}(" not in table} == set()


def test_what_the_page_quotes_is_in_the_files() -> None:
    assert len(excerpts(PAGE)) == 9
    assert absent(PAGE) == []


def test_control_a_stale_excerpt_is_noticed() -> None:
    assert absent(PAGE.replace("cap, tanh(div(v, cap))", "cap, tanh(mul(v, cap))")) == ["csrc/generic/elementwise.cpp"]
    assert excerpts(PAGE)[0][1].startswith("    def softcap")


def test_every_file_that_the_page_names_exists() -> None:
    roots = [rules.ROOT, rules.PACKAGE, rules.PACKAGE / "backends"]
    paths = set(re.findall(r"`([\w/]+\.(?:py|h|cpp))`", PAGE))
    assert len(paths) > 8
    assert [path for path in sorted(paths) if not any((root / path).exists() for root in roots)] == []
