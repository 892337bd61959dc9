"""The house stays small: lines, config fields, environment variables, and no word about where it was written."""

from __future__ import annotations

import re
import subprocess

import msgspec
import pytest
from tests.laws import page_rules, rules, sizes

from headrace.protocol.config import EngineConfig, ServerConfig

TEXT = (".py", ".md", ".toml", ".txt", ".json", ".jinja", ".yml", ".yaml", ".cfg", ".sh", ".js", ".css", ".html")
TEXT += ("Makefile", "run")


def repository_files() -> list[str]:
    """Paths of the files under version control; all files where git or its folder is absent (an unpacked archive)."""
    try:
        done = subprocess.run(
            ["git", "ls-files"], cwd=rules.ROOT, capture_output=True, text=True, check=True, timeout=60
        )
        names = done.stdout.splitlines()
    except (OSError, subprocess.CalledProcessError):
        names = []
    if not names:
        folders = ("src", "tests", "bench", "docs", "examples", "training")
        names = [str(p.relative_to(rules.ROOT)) for folder in folders for p in (rules.ROOT / folder).rglob("*")]
    return [name for name in names if name.endswith(TEXT) and (rules.ROOT / name).is_file()]


def test_files_are_short() -> None:
    code = {name: (rules.ROOT / name).read_text() for name in repository_files() if name.endswith(".py")}
    long = {name: sizes.num_lines(text) for name, text in code.items() if sizes.num_lines(text) > sizes.MAX_FILE_LINES}
    assert not long


def test_the_page_is_small() -> None:
    assert {"app.js", "chat.js", "style.css"} <= page_rules.page_files().keys()
    assert page_rules.page_violations(page_rules.page_files()) == []


def test_a_page_that_is_too_long_is_reported() -> None:
    assert page_rules.page_violations({f"{i}.js": "f();\n" * 500 for i in range(7)}) == []
    assert page_rules.page_violations({"a.js": "\n" * 501, "b.css": "\n" * 500}) == ["a.js: 501 lines"]
    files = {f"{i}.js": "f();\n" * 438 + "\n// why\n" for i in range(8)}
    assert page_rules.page_violations(files) == ["the page: 3504 lines with code"]
    assert page_rules.num_page_code_lines("/* a\nb */\n/** c */ f();\n\n// d\ng();") == 2


def test_the_hall_can_be_read_in_a_weekend_and_no_wing_is_larger_than_half_of_it() -> None:
    lines = sizes.code_lines()
    assert lines["hall"] > 5_000
    assert sizes.large_parts(lines) == {}


def test_a_part_that_is_too_large_is_reported() -> None:
    lines = {"hall": 6_950, "backends.cpu": 2_300, "backends.cuda": 4_500, "serve": 700}
    assert sizes.large_parts(lines) == {}
    assert sizes.large_parts(lines | {"hall": 6_951, "serve": 4_501}) == {"hall": 9_251, "serve": 4_501}


def test_a_model_is_a_short_file() -> None:
    models = {module: source for module, source in rules.sources() if sizes.part(module) == "models"}
    assert len(models) > 8
    long = {name: n for name, text in models.items() if (n := sizes.num_lines(text)) > sizes.MAX_MODEL_FILE_LINES}
    assert long == {}


@pytest.mark.parametrize(
    ("module", "part"),
    [
        ("protocol.step", "hall"),
        ("engine.core", "hall"),
        ("engine.client", "engine"),
        ("engine.library.load", "engine.library"),
        ("backends.base", "hall"),
        ("backends.split", "backends"),
        ("models", "hall"),
        ("models.decoder", "hall"),
        ("models.gpt2", "models"),
        ("backends.cpu.ops", "backends.cpu"),
        ("serve.apis.ollama.reply", "serve.apis.ollama"),
        ("serve.gates", "serve.gates"),
        ("serve.app", "serve"),
        ("cli.bench.serve", "cli.bench"),
        ("llm", "llm"),
    ],
)
def test_each_module_counts_in_one_part(module: str, part: str) -> None:
    assert sizes.part(module) == part


def test_lines_that_explain_are_not_counted() -> None:
    source = '''"""Owns

nothing."""

# a reason
x = (
    1,  # one
)

def f():
    """Does."""
    return """a
b"""
'''
    assert sizes.num_lines(source) == 13
    assert sizes.num_code_lines(source) == 6


def test_the_config_is_small() -> None:
    fields = [*msgspec.structs.fields(EngineConfig), *msgspec.structs.fields(ServerConfig)]
    assert len(fields) <= rules.MAX_CONFIG_FIELDS


def unread_fields(sources: list[tuple[str, str]]) -> list[str]:
    """Config fields that nothing but the command line and the config's own checks ever looks at."""
    readers = "\n".join(
        source for module, source in sources if module != "protocol.config" and not module.startswith("cli")
    )
    names = [field.name for struct in (EngineConfig, ServerConfig) for field in msgspec.structs.fields(struct)]
    read = set(re.findall(r"\b(?:config|made|engine|server)\.(\w+)", readers))
    return [name for name in names if name not in read]


def test_every_config_field_does_something() -> None:
    assert not unread_fields(list(rules.sources()))
    without = [(module, source.replace("config.max_num_seqs", "128")) for module, source in rules.sources()]
    assert unread_fields(without) == ["max_num_seqs"], "a field that is read nowhere is noticed"


def test_few_environment_variables() -> None:
    names = set().union(*(rules.environment_variables(source) for _, source in rules.sources()))
    assert names, "the count sees none at all"
    assert len(names) <= rules.MAX_ENVIRONMENT_VARIABLES


def test_no_file_names_this_workplace() -> None:
    broken = []
    for name in repository_files():
        broken += rules.workplace_violations(name, (rules.ROOT / name).read_text(encoding="utf-8"))
    assert not broken, "\n".join(broken)


@pytest.mark.parametrize("place", ["work/main", "root/x", "home/me/headrace"])
def test_naming_a_workplace_is_reported(place: str) -> None:
    assert rules.workplace_violations("README.md", f"see /{place}.")
    assert not rules.workplace_violations("README.md", f"see docs/{place} and a/{place}")
