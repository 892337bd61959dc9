"""The programs of supply/ that install headrace and check that others can: short markers, isolation, announcements."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest
from packaging.requirements import Requirement
from tests.docs import test_pages
from tests.laws.rules import ROOT


@pytest.fixture(scope="module", params=("lock", "install", "check_install", "real_installs"))
def any_program(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def supply() -> Iterator[dict[str, ModuleType]]:
    """The programs as modules, by name."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(ROOT / "supply"))
        names = ("lock", "install", "check_install", "real_installs")
        yield {name: __import__(name) for name in names}
        for name in names:
            sys.modules.pop(name)


def test_each_program_says_how_it_is_used(any_program: str) -> None:
    if any_program == "check_install":
        pytest.skip("it takes no arguments")
    command = [sys.executable, f"supply/{any_program}.py", "--help"]
    assert "usage:" in subprocess.run(command, capture_output=True, text=True, cwd=ROOT, check=True).stdout


@pytest.mark.parametrize(
    ("long", "short"),
    [
        ("a==1", ""),
        ("a==1 ; sys_platform == 'linux' and (platform_machine == 'x86_64' or platform_machine == 'aarch64')", ""),
        ("a==1 ; sys_platform == 'win32'", None),
        ("a==1 ; python_full_version < '3.12' and sys_platform == 'linux'", 'python_version < "3.12"'),
        (
            "a==1 ; python_version >= '3.12' and python_version < '3.14'",
            'python_version >= "3.12" and python_version < "3.14"',
        ),
        ("a==1 ; platform_machine == 'x86_64'", 'platform_machine == "x86_64"'),
    ],
)
def test_a_marker_is_as_short_as_it_can_be(supply: dict[str, ModuleType], long: str, short: str | None) -> None:
    assert supply["lock"].marker(Requirement(long)) == short


@pytest.mark.parametrize(
    "text",
    ["a==1 ; python_version != '3.12'", "a==1 ; python_version == '3.11' or platform_machine == 'aarch64'"],
)
def test_a_marker_that_has_no_short_form_is_refused(supply: dict[str, ModuleType], text: str) -> None:
    with pytest.raises(SystemExit, match="Pythons"):
        supply["lock"].marker(Requirement(text))


def test_hashes_stay_with_their_package(supply: dict[str, ModuleType]) -> None:
    text = "b==1 ; sys_platform == 'win32' \\\n    --hash=sha256:1\nA_c==2 \\\n    --hash=sha256:2\n"
    assert supply["lock"].simplified(text) == "a-c==2 \\\n    --hash=sha256:2\n"


def test_pip_sees_nothing_of_this_machine(supply: dict[str, ModuleType], monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("PIP_FIND_LINKS", "PIP_EXTRA_INDEX_URL", "PYTHONPATH", "SSL_CERT_FILE", "HTTPS_PROXY"):
        monkeypatch.setenv(name, "x")
    result = supply["check_install"].isolated()
    assert {name for name, value in result.items() if value == "x"} == {"SSL_CERT_FILE", "HTTPS_PROXY"}
    assert result["PIP_CONFIG_FILE"] == os.devnull


def test_a_large_download_is_announced(supply: dict[str, ModuleType]) -> None:
    announcement = supply["install"].announcement
    assert announcement({"torch": 200_000_000, "triton": 299_000_000}, "X") == ""
    text = announcement({"torch": 900_000_000, "nvidia-cublas": 400_000_000, "small": 1}, "The tests need torch")
    assert text.startswith(
        "The tests need torch: 3 packages, 1,300 MB to download, of which torch 900, nvidia-cublas 400"
    )
    assert "CUDA" in text
    assert "CUDA" not in announcement({"torch": 900_000_000}, "X")


def test_sizes_of_files_are_known(supply: dict[str, ModuleType], tmp_path: Path) -> None:
    (tmp_path / "a b.whl").write_bytes(b"x" * 1234)
    assert supply["install"].size((tmp_path / "a b.whl").as_uri()) == 1234


def test_the_lack_of_a_compiler_is_named(supply: dict[str, ModuleType], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    monkeypatch.delenv("CXX", raising=False)
    assert any("apt install g++" in text for text in supply["install"].lacking())
    monkeypatch.setenv("CXX", sys.executable)
    assert not any("g++" in text for text in supply["install"].lacking())


def test_the_commands_of_the_readme_are_run_in_a_clean_clone_or_in_the_tests(supply: dict[str, ModuleType]) -> None:
    left = [words for block, words in test_pages.COMMANDS if block.page == "README.md" and test_pages.reason(words)]
    texts = {" ".join(words) for words in left}
    assert texts
    uncovered = {text for text in texts if not text.startswith(supply["real_installs"].README)}
    # `headrace plan --check` and its like: tests of their own, which NOT_RUN names.
    assert all("tests/" in test_pages.NOT_RUN[test_pages.reason(text.split())] for text in uncovered), uncovered
