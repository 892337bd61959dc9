"""The wheels of `make wheel`: which CPython installs which, and what is said of one that is not at hand."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest
from packaging.tags import sys_tags
from packaging.utils import parse_wheel_filename
from tests.laws.rules import ROOT

OWN = "headrace-0.1.0-cp311-cp311-manylinux_2_34_{}.whl"
SHARED = "headrace-0.1.0-cp312-abi3-manylinux_2_34_{}.whl"
SERIES = ("3.11", "3.12", "3.13", "3.14")


@pytest.fixture(scope="module")
def supply() -> Iterator[dict[str, ModuleType]]:
    """The programs as modules, by name."""
    names = ("pythons", "wheel")
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(ROOT / "supply"))
        yield {name: __import__(name) for name in names}
        for name in (*names, "lock", "provenance", "versions"):
            sys.modules.pop(name, None)


@pytest.mark.parametrize("machine", ["x86_64", "aarch64"])
def test_two_wheels_are_for_every_cpython(supply: dict[str, ModuleType], machine: str) -> None:
    first, shared = OWN.format(machine), SHARED.format(machine)
    expected = {"3.11": first, "3.12": shared, "3.13": shared, "3.14": shared}
    assert supply["pythons"].cover([first, shared], machine) == expected
    assert supply["pythons"].cover([shared], machine) == expected | {"3.11": ""}
    assert supply["pythons"].cover([first], machine) == dict.fromkeys(SERIES, "") | {"3.11": first}


@pytest.mark.parametrize(
    "wheel",
    [
        "headrace-0.1.0-cp312-abi3-manylinux_2_34_aarch64.whl",
        "headrace-0.1.0-cp312-abi3-manylinux_2_39_x86_64.whl",
        "headrace-0.1.0-cp312-abi3-linux_x86_64.whl",
        "headrace-0.1.0-cp312-abi3-musllinux_1_2_x86_64.whl",
        "headrace-0.1.0-cp313-abi3-manylinux_2_34_x86_64.whl",
        "headrace-0.1.0-cp312-cp312-macosx_14_0_x86_64.whl",
    ],
)
def test_control_a_wheel_for_others_is_none_for_this(supply: dict[str, ModuleType], wheel: str) -> None:
    assert not supply["pythons"].installs(wheel, "3.12", "x86_64")


@pytest.mark.skipif(sys.version_info[:2] > (3, 14), reason="the tags are those of 3.11 to 3.14")
def test_the_tags_are_those_that_pip_takes_here(supply: dict[str, ModuleType]) -> None:
    series, here = f"3.{sys.version_info[1]}", set(sys_tags())
    for name in (OWN.format("x86_64"), SHARED.format("x86_64"), SHARED.format("aarch64")):
        fits = not here.isdisjoint(parse_wheel_filename(name.replace("2_34", "2_17"))[3])
        machine = next(tag.platform for tag in here if "linux" in tag.platform).partition("linux_")[2]
        if machine.endswith("x86_64"):
            assert supply["pythons"].installs(name, series, "x86_64") == fits


def test_what_was_not_tried_is_said(supply: dict[str, ModuleType]) -> None:
    report, machine = supply["wheel"].report, supply["wheel"].platform.machine()
    covered = dict.fromkeys(SERIES, SHARED.format(machine)) | {"3.11": ""}
    lines, is_complete = report(covered, {"3.13": "CPython 3.13.0: tried"}, machine, True)
    assert not is_complete
    assert lines[0] == f"CPython 3.11 on {machine}: NO WHEEL: no interpreter that could build it is at hand"
    assert lines[2].startswith("CPython 3.13.0: tried (headrace-")
    assert all("NOT TRIED, it is not at hand" in lines[number] for number in (1, 3))
    covered["3.11"] = OWN.format(machine)
    lines, is_complete = report(covered, {}, "another", True)
    assert is_complete
    assert all("NOT TRIED, built for another machine" in line for line in lines)
    # One wheel alone was asked for: the other CPythons are no fault of it.
    lines, is_complete = report(dict.fromkeys(SERIES, "") | {"3.11": "x"}, {"3.11": "tried"}, machine, False)
    assert (lines, is_complete) == (["tried (x)"], True)


def stand_in(folder: Path, version: str, status: int = 0) -> str:
    """A program that answers as a Python of that version does."""
    path = folder / f"python{version}"
    path.write_text(f"#!/bin/sh\necho {version.replace('.', ' ')} {path}\nexit {status}\n")
    path.chmod(0o755)
    return str(path)


def test_interpreters_to_build_and_to_try_with(
    supply: dict[str, ModuleType], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wheel = supply["wheel"]
    names = [stand_in(tmp_path, version) for version in ("3.13.1", "3.11.2", "3.11.9", "3.12.4")]
    monkeypatch.setattr(wheel, "interpreters", list)
    builders, testers = wheel.chosen(names, True)
    assert [each.version for each in builders] == ["3.11.2", "3.12.4"]
    assert [each.version for each in testers] == ["3.11.2", "3.12.4", "3.13.1"]
    builders, testers = wheel.chosen(names[:1], False)
    assert builders == testers == [supply["pythons"].Interpreter("3.13.1", names[0])]
    for other in (stand_in(tmp_path, "3.10.1"), stand_in(tmp_path, "3.12.7", 1), "/nowhere/python3"):
        with pytest.raises(SystemExit, match="is no Python of 3.11 or newer"):
            wheel.chosen([other], False)


def test_interpreters_of_the_path_are_found_once_for_each_version(
    supply: dict[str, ModuleType], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for number, folder in enumerate(("one", "other")):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "python3.14").symlink_to(stand_in(tmp_path, f"3.14.{number}"))
        (tmp_path / folder / "python3.11").symlink_to(stand_in(tmp_path, "3.11.1"))
    (tmp_path / "other" / "python3.13").symlink_to(stand_in(tmp_path, "3.13.5", 1))
    monkeypatch.setenv("PATH", f"{tmp_path / 'one'}:{tmp_path / 'other'}:/usr/bin:/bin")
    monkeypatch.setenv("HOME", str(tmp_path))
    paths = {each.version: each.path for each in supply["pythons"].interpreters() if str(tmp_path) in each.path}
    assert sorted(paths) == ["3.11.1", "3.14.0", "3.14.1"]
