"""The site of `make site`: the order of its pages, links that leave the docs, what Python's Markdown reads otherwise.

mkdocs itself, which follows the links and the anchors, runs in an environment of its own: `make site`.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from tests.laws.rules import ROOT

DOCS = ROOT / "docs"
INDEX = (DOCS / "index.md").read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def site() -> Iterator[ModuleType]:
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(ROOT / "supply"))
        yield __import__("docs_site")
        sys.modules.pop("docs_site")


def pages(site: ModuleType) -> list[str]:
    names = [path.relative_to(DOCS).as_posix() for path in DOCS.rglob("*.md")]
    return [*names, site.DECISIONS, *site.BESIDE.values()]


def flat(nav: Any) -> list[str]:
    """All pages of a navigation, in order."""
    if isinstance(nav, str):
        return [nav]
    return [page for entry in (nav.values() if isinstance(nav, dict) else nav) for page in flat(entry)]


def test_every_page_is_in_the_navigation_once(site: ModuleType) -> None:
    nav = site.navigation(INDEX, pages(site))
    assert sorted(flat(nav)) == sorted(pages(site))
    sections = [next(iter(entry)) for entry in nav if isinstance(entry, dict)]
    assert sections == ["Start here", *re.findall(r"(?m)^## (.*)$", INDEX)]
    # The own page of a folder is its first.
    assert flat(nav).index("labs/README.md") < flat(nav).index("labs/beams.md")
    assert flat(nav).index("adr/index.md") < flat(nav).index("adr/0001-layers-and-laws.md")


def test_control_a_page_that_the_map_does_not_link_to_is_named(site: ModuleType) -> None:
    with pytest.raises(site.SiteError, match=r"links to no docs/new\.md: add a row"):
        site.navigation(INDEX, [*pages(site), "new.md"])
    with pytest.raises(site.SiteError, match=r"no CONTRIBUTING\.md, no docs/gpu\.md"):
        site.navigation(INDEX.replace("(gpu.md)", "()").replace("CONTRIBUTING.md)", ")"), pages(site))
    row = "\n## More\n\n| you want | page |\n|---|---|\n| that | [the new page](new.md) |\n"
    assert site.navigation(INDEX + row, [*pages(site), "new.md"])[-1] == {"More": ["new.md"]}


@pytest.mark.parametrize(
    ("text", "there", "bare"),
    [
        ("[a](../src/headrace/env.py)", "[a](https://r.example/blob/main/src/headrace/env.py)", "a"),
        ("[a](../tests#part)", "[a](https://r.example/blob/main/tests#part)", "a"),
        ("[`a[0]`](../Makefile) b", "[`a[0]`](https://r.example/blob/main/Makefile) b", "`a[0]` b"),
        ("[a](adr/) [b](labs)", "[a](adr/index.md) [b](labs/README.md)", None),
        ("[a](../README.md#install-a-wheel)", "[a](start.md#install-a-wheel)", None),
        # These stay as they are: mkdocs judges them.
        ("[a](gpu.md#goals)", None, None),
        ("[a](#goals)", None, None),
        ("[a](https://r.example/x)", None, None),
        ("[a](../src/nothing.py)", None, None),
        ("[a](/gpu.md)", None, None),
        ("```\n[a](../Makefile)\n```", None, None),
        ("![a](figures/batches.svg)", None, None),
    ],
)
def test_links(site: ModuleType, text: str, there: str | None, bare: str | None) -> None:
    source, expected = DOCS / "gpu.md", there or text
    assert site.with_links(text, source, "https://r.example/") == expected
    assert site.with_links(text, source, "") == (expected if bare is None else bare)


def test_links_of_pages_elsewhere(site: ModuleType) -> None:
    text = "[a](docs/gpu.md) ![b](docs/figures/batches.svg) [c](LICENSE) [d](CONTRIBUTING.md)"
    expected = "[a](gpu.md) ![b](figures/batches.svg) c [d](contributing.md)"
    assert site.with_links(text, ROOT / "README.md", "") == expected
    deeper = DOCS / "maintainers" / "release.md"
    assert (
        site.with_links("[a](../gpu.md) [b](../../CHANGELOG.md)", deeper, "") == "[a](../gpu.md) [b](../changelog.md)"
    )


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("a:\n- b\n- c", "a:\n\n- b\n- c"),
        ("a:\n1. b\n2. c", "a:\n\n1. b\n2. c"),
        ("1. a\n\n   b\n2. c", "1. a\n\n   b\n\n2. c"),
        ("1. a\n   ```\n   - x\n   ```\n2. c", "1. a\n   ```\n   - x\n   ```\n\n2. c"),
        ("- a\n  b\n- c", "- a\n  b\n- c"),
        ("```\na\n- b\n```", "```\na\n- b\n```"),
    ],
)
def test_lists(site: ModuleType, text: str, expected: str) -> None:
    assert site.with_lists(text) == expected


def test_bars_in_tables(site: ModuleType) -> None:
    assert site.with_tables("| `a\\|b` | c \\| d |\nx `a\\|b`") == "| `a|b` | c \\| d |\nx `a\\|b`"


def test_the_list_of_decisions(site: ModuleType, tmp_path: Path) -> None:
    (tmp_path / "0002-b.md").write_text("# 0002 Second\n\nText.\n")
    (tmp_path / "0001-a.md").write_text("# 0001 First\n")
    expected = "# Decisions\n\n- [0001 First](0001-a.md)\n- [0002 Second](0002-b.md)\n"
    assert site.list_of_decisions(tmp_path) == expected


@pytest.mark.parametrize(
    ("html", "count"),
    [
        ('<script src="https://cdn.example/a.js"></script>', 1),
        ("<link rel=stylesheet href=//fonts.example/css>", 1),
        ('<img alt="x" src="http://a.example/b.png">', 1),
        ('<link rel="canonical" href="https://docs.example/">', 0),
        ('<script src="assets/a.js"></script><a href="https://a.example">a</a><img src="figures/b.svg">', 0),
    ],
)
def test_what_is_loaded_from_elsewhere_is_seen(site: ModuleType, html: str, count: int) -> None:
    assert len(site.of_third_parties(html)) == count


def test_the_site_is_strict_and_loads_nothing_of_others() -> None:
    """The settings without which `make site` would pass over a link that leads nowhere."""
    text = (ROOT / "mkdocs.yml").read_text(encoding="utf-8")
    checks = text.partition("\nvalidation:\n")[2]
    names = {"omitted_files", "not_found", "absolute_links", "anchors", "unrecognized_links"}
    assert set(re.findall(r"(?m)^    (\w+): warn$", checks)) == names
    assert re.search(r"(?m)^  font: false$", text)
    assert re.search(r"(?m)^\t.*mkdocs build --strict", (ROOT / "Makefile").read_text(encoding="utf-8"))
