"""The documents say what the code says: generated pages are fresh, and the commands that the README names exist."""

from __future__ import annotations

import itertools
import re
from pathlib import Path

import msgspec
import pytest
from tests.laws import rules

from headrace.cli import reference
from headrace.cli.options import help_of
from headrace.protocol.config import EngineConfig, ServerConfig

README = (rules.ROOT / "README.md").read_text(encoding="utf-8")
MAX_README_WORDS = 900
# Each is a thing to make, not a variant of another: variants are words of ARGS. A new one takes the place of an old.
MAX_TARGETS = 35
MAKEFILE = (rules.ROOT / "Makefile").read_text(encoding="utf-8")


def unknown_commands(text: str) -> list[str]:
    """`make` targets, `headrace` commands, flags and `python -m` modules in code that do not exist."""
    code = "\n".join(re.findall(r"```(?:bash|console|sh)?\n(.*?)```", text, re.S) + re.findall(r"`([^`\n]+)`", text))
    targets = set(re.findall(r"^([a-z]+):.*##", MAKEFILE, re.M))
    known = {path.removeprefix("headrace ") for path, _ in reference.commands()}
    groups = {path.split()[0] for path in known}
    flags = {name for _, command in reference.commands() for option in command.params for name in option.opts}
    flags |= {
        name for _, command in reference.commands() for option in command.params for name in option.secondary_opts
    }
    flags |= {"--help", "--version"}
    broken = [f"make {t}" for t in re.findall(r"\bmake ([a-z]+)\b", code) if t not in targets]
    for words in re.findall(r"^(?:\$ )?(?:\.venv/bin/)?headrace ((?:[a-z]+ ?)+)", code, re.M):
        first, *rest = words.split()
        if first not in groups or (first == "bench" and rest and f"bench {rest[0]}" not in known):
            broken.append(f"headrace {words}")
    for line in re.findall(r"^(?:\$ )?(?:\.venv/bin/)?headrace .*$", code, re.M):
        broken += [flag for flag in re.findall(r"(?<![\w-])(--[a-z][a-z-]+)", line) if flag not in flags]
    for module in re.findall(r"python -m ((?:bench|training|tests)[\w.]*)", code):
        path = rules.ROOT / module.replace(".", "/")
        if not (path.with_suffix(".py").exists() or (path / "__main__.py").exists()):
            broken.append(f"python -m {module}")
    return broken


@pytest.mark.parametrize("name", sorted(reference.PAGES))
def test_generated_page_is_fresh(name: str) -> None:
    assert (rules.ROOT / "docs" / name).read_text(encoding="utf-8") == reference.PAGES[name](), "run: make docs"


def test_every_config_field_is_a_documented_flag() -> None:
    listed = dict(reference.commands())
    page = reference.flags_page()
    for struct in (EngineConfig, ServerConfig):
        for field in msgspec.structs.fields(struct):
            assert help_of(struct, field)
            if field.name in ("model", "seed"):  # an argument; and offline only, see cli.serve
                continue
            flag = "--" + field.name.replace("_", "-")
            assert any(flag in option.opts for option in listed["headrace serve"].params), flag
            assert f"`{flag}`" in page


def test_readme_names_what_exists() -> None:
    assert "make run" in README
    assert "make test" in README
    assert not unknown_commands(README)


@pytest.mark.parametrize(
    "text",
    [
        "`make dinner`",
        "`headrace sreve`",
        "```\nheadrace serve --prot 1\n```",
        "`python -m bench.nothing`",
        "`headrace bench x`",
    ],
)
def test_a_command_that_does_not_exist_is_noticed(text: str) -> None:
    assert unknown_commands(text)


def test_makefile_targets_tell_what_they_do() -> None:
    phony = re.search(r"^\.PHONY: (.*)$", MAKEFILE, re.M)
    assert phony
    for target in phony.group(1).split():
        assert re.search(rf"^{target}:.*## .+", MAKEFILE, re.M), target
    assert len(phony.group(1).split()) <= MAX_TARGETS


def wheel_steps(program: str) -> list[str]:
    """The steps of supply/wheel.py that make a wheel fit for an index, in the order in which they come."""
    steps = r'"pip", "wheel"|"auditwheel", "repair"|"--no-deps", wheel\)|"-c", CHECK|copyfile\(wheel, DIST'
    return re.findall(steps, program)


def test_a_wheel_is_repaired_and_tried_before_it_is_kept() -> None:
    assert re.search(r"^wheel:.*\n\t.* supply/wheel\.py ", MAKEFILE, re.M)
    program = (rules.ROOT / "supply" / "wheel.py").read_text(encoding="utf-8")
    steps = wheel_steps(program)
    expected = ['"pip", "wheel"', '"auditwheel", "repair"', '"--no-deps", wheel)', '"-c", CHECK']
    assert steps == [*expected, "copyfile(wheel, DIST"]
    assert len(wheel_steps(program.replace('"auditwheel", "repair"', '"echo"'))) == len(steps) - 1


def test_agents_file_is_short() -> None:
    assert (rules.ROOT / "AGENTS.md").read_text(encoding="utf-8").count("\n") <= 40


def dead_links(text: str, folder: Path) -> list[str]:
    """Targets of links to files that are not there."""
    targets = re.findall(r"\]\(([^)#\s]+)(?:#[^)]*)?\)", text)
    return [target for target in targets if "://" not in target and not (folder / target).exists()]


def test_links_between_documents_lead_somewhere() -> None:
    pages = [*rules.ROOT.glob("*.md"), *(rules.ROOT / "docs").rglob("*.md")]
    assert {"README.md", "AGENTS.md", "CONTRIBUTING.md", "CHANGELOG.md"} <= {page.name for page in pages}
    broken = [f"{page.name}: {dead}" for page in pages for dead in dead_links(page.read_text(), page.parent)]
    assert not broken
    assert dead_links("see [this](docs/nothing.md#part) and [that](Makefile)", rules.ROOT) == ["docs/nothing.md"]


def unmapped(index: str, folder: Path) -> list[str]:
    """Pages of the docs that the map does not link to. Decisions and labs have lists of their own."""
    linked = set(re.findall(r"\]\(([^)#\s]+)", index))
    pages = [path.relative_to(folder).as_posix() for path in sorted(folder.rglob("*.md"))]
    listed = [page for page in pages if not page.startswith(("adr/", "labs/")) and page != "index.md"]
    return [page for page in [*listed, "labs/README.md"] if page not in linked]


def test_the_map_of_the_docs_has_every_page() -> None:
    folder = rules.ROOT / "docs"
    index = (folder / "index.md").read_text(encoding="utf-8")
    assert unmapped(index, folder) == []
    assert unmapped(index.replace("(gpu.md)", "(gpu)"), folder) == ["gpu.md"]


def num_words(text: str) -> int:
    return len(text.split())


def test_the_readme_is_short() -> None:
    assert num_words(README) <= MAX_README_WORDS
    assert num_words(README + "word " * MAX_README_WORDS) > MAX_README_WORDS


def wrong_glossary(text: str) -> list[str]:
    """Rows of the glossary that are out of order or repeated, name no file of the package, or are beyond sixty."""
    rows = re.findall(r"^\| ([a-z-]+) \| .+ \| `([\w/.]+)` \|$", text, re.M)
    nouns = [noun for noun, _ in rows]
    broken = [f"{after} after {noun}" for noun, after in itertools.pairwise(nouns) if noun >= after]
    broken += [f"{noun}: no {file}" for noun, file in rows if not (rules.PACKAGE / file).is_file()]
    return broken + ([] if 0 < len(rows) <= 60 else [f"{len(rows)} nouns"])


def test_the_glossary_is_short_and_names_files() -> None:
    assert wrong_glossary((rules.ROOT / "docs" / "glossary.md").read_text(encoding="utf-8")) == []


@pytest.mark.parametrize(
    "text",
    [
        "| b | x | `gguf.py` |\n| a | x | `gguf.py` |",
        "| a | x | `gguf.py` |\n| a | x | `gguf.py` |",
        "| a | x | `core/nothing.py` |",
        "| a | no file |",
        "\n".join(f"| a{'a' * i} | x | `gguf.py` |" for i in range(61)),
    ],
)
def test_control_a_wrong_glossary_is_noticed(text: str) -> None:
    assert wrong_glossary(text)
