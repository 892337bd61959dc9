"""`make image`: it builds where a builder and the base image are at hand, and says so where they are not."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from tests.laws.rules import ROOT

BASE = "python:3.11"
"""How the base image's name begins."""


def program(folder: Path, name: str, body: str) -> None:
    """A program of that name that keeps its words in a log."""
    (folder / name).write_text(f'#!/bin/sh\necho "{name} $@" >> {folder}/log\n{body}\n')
    (folder / name).chmod(0o755)


def image(folder: Path, *flags: str) -> tuple[int, str, list[str]]:
    """Run supply/image.py with the programs of the folder alone: exit status, last line, what was run."""
    words = [sys.executable, "supply/image.py", str(folder / "hadolint"), *flags]
    env = os.environ | {"PATH": f"{folder}:/usr/bin-without-builders:/bin-without-builders"}
    done = subprocess.run(words, cwd=ROOT, env=env, capture_output=True, text=True, timeout=60)
    log = folder / "log"
    return done.returncode, done.stdout.strip().splitlines()[-1], log.read_text().splitlines() if log.exists() else []


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    program(tmp_path, "hadolint", "exit 0")
    return tmp_path


def test_without_a_builder_it_is_linted_alone(folder: Path) -> None:
    status, line, log = image(folder)
    assert (status, line) == (0, "NOT BUILT, linted alone: docker is not installed; podman is not installed")
    assert log == ["hadolint deploy/Dockerfile"]
    assert image(folder, "--required")[:2] == (1, line)


def test_a_builder_that_does_not_answer_is_named_with_its_words(folder: Path) -> None:
    program(folder, "docker", "echo Cannot connect to the daemon >&2; exit 1")
    status, line, log = image(folder)
    assert (status, log[1:]) == (0, ["docker info"])
    assert line == "NOT BUILT, linted alone: docker: Cannot connect to the daemon; podman is not installed"


def test_without_the_base_image_it_is_linted_alone(folder: Path) -> None:
    program(folder, "podman", '[ "$1" = info ] || { echo no route to the registry >&2; exit 125; }')
    status, line, log = image(folder)
    assert (status, len(log)) == (0, 4)
    assert line.startswith(f"NOT BUILT, linted alone: docker is not installed; podman has no {BASE}")
    assert line.endswith(": no route to the registry")


def test_with_a_builder_it_is_built_and_run(folder: Path) -> None:
    program(folder, "docker", "exit 0")
    status, line, log = image(folder)
    assert (status, line) == (0, "BUILT headrace:0.1.0 by docker")
    assert [words.split()[1] for words in log[1:]] == ["info", "image", "build", "run", "run"]
    assert log[3] == "docker build --file deploy/Dockerfile --tag headrace:0.1.0 ."
    assert "--network none headrace:0.1.0 generate builtin" in log[5]


@pytest.mark.parametrize("step", ["build", "run"])
def test_control_a_step_that_fails_fails_the_command(folder: Path, step: str) -> None:
    program(folder, "docker", f'[ "$1" != {step} ] || exit 7')
    assert image(folder)[0] == 7


def test_control_a_complaint_of_the_linter_fails_the_command(folder: Path) -> None:
    program(folder, "hadolint", "echo DL3008; exit 3")
    program(folder, "docker", "exit 0")
    status, line, log = image(folder)
    assert (status, line, len(log)) == (3, "DL3008", 1)
