"""The agents of `headrace launch` themselves, headless: a question, in most a turn with a tool, and the end. Every
request has the right route, key and model. Skipped for those that are not installed; `python -m tests.clients.launched`
installs them."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from bench.tied import tied
from tests.clients.__main__ import scripted
from tests.clients.launched import HEADLESS, installed
from tests.support.recorder import recording

from headrace.cli.agents import AGENTS

KEY = "key-of-the-test"
ROUTES = {"claude": "/v1/messages?beta=true", "codex": "/v1/responses"}
"""Of the others it is the chat's."""


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with scripted(KEY) as url:
        yield url


@pytest.mark.parametrize("name", AGENTS)
def test_an_agent_asks_answers_and_ends(name: str, url: str, tmp_path: Path) -> None:
    program = installed(name)
    if program is None:
        pytest.skip(f"{name} is not installed")
    home, project = tmp_path / "home", tmp_path / "project"
    home.mkdir()
    project.mkdir()
    variables = {"HOME": str(home), "HEADRACE_API_KEY": KEY, "PATH": f"{Path(program).parent}:{os.environ['PATH']}"}
    with recording(url) as recorder:
        words = [sys.executable, "-m", "headrace", "launch", name, "--url", recorder.url, "--", *HEADLESS[name]]
        done = subprocess.run(
            tied(words),
            cwd=project,
            env=os.environ | variables,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=280,
        )
    assert done.returncode == 0, done.stdout[-2000:]
    assert "The tool returned" in done.stdout or "Hello from the script." in done.stdout, done.stdout[-2000:]
    first, *calls = [each for each in recorder.arrivals if each.method != "HEAD"]
    assert (first.path, first.status) == ("/v1/models", 200)
    assert {(each.path, each.key, each.model, each.status) for each in calls} == {
        (ROUTES.get(name, "/v1/chat/completions"), KEY, "scripted", 200)
    }
