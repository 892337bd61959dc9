"""`headrace launch`: an agent gets server, key and model by its environment, flags and a temporary folder, nothing of
the user's is written, and a server of the run ends with it. The agents here are scripts; `test_launched_agents`
tries the real ones."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from bench.tied import tied
from tests.support.commands import run_command
from tests.support.recorder import recording
from tests.support.server import Live, inproc

from headrace.cli.agents import AGENTS, Target, setting_of
from headrace.protocol.config import ServerConfig
from headrace.text.tokenizer import Tokenizer

KEY = "key-of-the-test"
SCRIPT = """#!{python}
import json, os, pathlib, sys, urllib.request
folder = pathlib.Path({folder!r})
words = sys.argv[1:]
variables = {{name: os.environ[name] for name in os.environ if name not in ("PWD", "OLDPWD", "SHLVL", "_")}}
files = {{}}
for text in [*words, *variables.values()]:
    value = pathlib.Path(text.partition("=")[2].strip('"'))
    for path in (pathlib.Path(text), pathlib.Path(text) / "crush.json", value):
        if len(text) < 300 and path.is_file() and path.suffix in (".json", ".js") and "headrace" in str(path):
            files[path.name] = path.read_text()
seen = dict(words=words, variables=variables, files=files)
if "--ask" in words:
    url = variables["ANTHROPIC_BASE_URL"] + "/v1/messages"
    body = dict(model=variables["ANTHROPIC_MODEL"], max_tokens=4, messages=[dict(role="user", content="Hi")])
    headers = {{"authorization": "Bearer " + variables["ANTHROPIC_AUTH_TOKEN"], "content-type": "application/json"}}
    request = urllib.request.Request(url, json.dumps(body).encode(), headers)
    seen["reply"] = json.load(urllib.request.urlopen(request, timeout=60))
(folder / "seen.part").write_text(json.dumps(seen))
(folder / "seen.part").rename(folder / "seen.json")
if "--wait" in words:
    import time
    time.sleep(60)
sys.exit(7 if "--fail" in words else 0)
"""


class Desk:
    """A user's machine: a home, a folder of programs with the agents in it, and what the last agent saw."""

    def __init__(self, folder: Path) -> None:
        self.home, self.programs, self.temporary = (folder / name for name in ("home", "bin", "tmp"))
        for path in (self.home, self.programs, self.temporary):
            path.mkdir()
        for agent in AGENTS.values():
            script = self.programs / agent.program
            script.write_text(SCRIPT.format(python=sys.executable, folder=str(folder)))
            script.chmod(0o755)
        self._seen = folder / "seen.json"
        self.variables = {"HOME": str(self.home), "TMPDIR": str(self.temporary), "HEADRACE_API_KEY": KEY}
        self.variables |= {"PATH": f"{self.programs}:/usr/bin:/bin", "ANTHROPIC_API_KEY": "the user's own"}

    @property
    def seen(self) -> dict[str, Any]:
        seen: dict[str, Any] = json.loads(self._seen.read_text())
        return seen

    def files(self) -> list[str]:
        """What lies in the user's folders, temporary ones included."""
        return [str(path) for folder in (self.home, self.temporary) for path in folder.rglob("*")]

    def start(self, *words: str, **more: Any) -> subprocess.Popen[str]:
        command = [sys.executable, "-m", "headrace", "launch", *words]
        environment = os.environ | self.variables | {"OMP_NUM_THREADS": "1"}
        return subprocess.Popen(tied(command), env=environment, stderr=subprocess.PIPE, text=True, **more)


@pytest.fixture
def desk(tmp_path: Path) -> Desk:
    return Desk(tmp_path)


@pytest.fixture
def running(desk: Desk, monkeypatch: pytest.MonkeyPatch, tokenizer: Tokenizer) -> Iterator[Live]:
    """A server with a key, in an environment that is the desk's."""
    for name, value in desk.variables.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr("tempfile.tempdir", str(desk.temporary))
    with Live(inproc(), tokenizer, ServerConfig(api_key=KEY, log_stats_interval=0)) as live:
        yield live


@pytest.fixture
def launch(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Any:
    return lambda *words: run_command(monkeypatch, capsys, "launch", *words)


@pytest.mark.parametrize("name", AGENTS)
def test_an_agent_gets_url_key_and_model_and_its_words(desk: Desk, running: Live, launch: Any, name: str) -> None:
    done = launch(name, "--url", running.url, "--", "-p", "two words", "--fail")
    assert done.code == 7, done.err
    seen = desk.seen
    assert seen["words"][-3:] == ["-p", "two words", "--fail"]
    all_of_it = json.dumps(seen).replace('\\"', '"').replace("\\\\", "\\")
    api = running.url if name == "claude" else f"{running.url}/v1"
    assert f'{api}"' in all_of_it.replace('\\"', '"')
    assert "fake" in all_of_it, "the model's name"
    keys = ("ANTHROPIC_AUTH_TOKEN", "OPENAI_API_KEY", "HEADRACE_API_KEY")
    assert KEY in [seen["variables"].get(key) for key in keys] or KEY in all_of_it
    assert desk.files() == [], "the folder is gone, and nothing else was written"


@pytest.mark.parametrize("name", AGENTS)
def test_the_printed_lines_do_the_same(desk: Desk, running: Live, launch: Any, name: str) -> None:
    assert launch(name, "--url", running.url, "--", "two words").code == 0
    ran = desk.seen
    done = launch(name, "--url", running.url, "--print", "--", "two words")
    assert desk.files() == []
    subprocess.run(["bash", "-eu"], input=done.out, text=True, check=True, timeout=60)
    pasted = desk.seen

    def plain(seen: dict[str, Any], folder: str) -> str:
        return json.dumps(seen, sort_keys=True).replace(folder, "FOLDER")

    places = set(re.findall(rf"{desk.temporary}/headrace-launch-\w+", json.dumps(ran)))
    assert len(places) == (name != "opencode"), "its config is a variable"
    place = places.pop() if places else "none"
    assert plain(pasted, f"{desk.temporary}/headrace-{name}") == plain(ran, place)


def test_the_users_own_key_of_the_vendor_is_not_sent(desk: Desk, running: Live, launch: Any) -> None:
    assert launch("claude", "--url", running.url).code == 0
    assert desk.seen["variables"]["ANTHROPIC_API_KEY"] == ""
    assert launch("pi", "--url", running.url).code == 0
    assert desk.seen["variables"]["ANTHROPIC_API_KEY"] == "the user's own", "what an agent does not read is left alone"


def test_a_request_of_the_agent_arrives(desk: Desk, running: Live, launch: Any) -> None:
    with recording(running.url) as recorder:
        assert launch("claude", "--url", recorder.url, "--", "--ask").code == 0
    assert desk.seen["reply"]["type"] == "message"
    paths = [(each.path, each.key, each.model, each.status) for each in recorder.arrivals]
    assert paths == [("/v1/models", KEY, "", 200), ("/v1/messages", KEY, "fake", 200)]


def test_what_is_missing_is_said(desk: Desk, running: Live, launch: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    (desk.programs / "codex").unlink()
    done = launch("codex", "--url", running.url)
    assert (done.code, done.err) == (
        127,
        "headrace: codex is not installed; to install it: npm install -g @openai/codex\n",
    )
    assert "wire_api" in launch("codex", "--url", running.url, "--print").out, "the lines need no program"
    done = launch("emacs")
    assert (done.code, "agent: 'emacs'" in done.err, "opencode" in done.err) == (2, True, True)
    done = launch("claude", "--url", running.url, "--model", "gpt-7")
    assert (done.code, "model: 'gpt-7'" in done.err, "fake" in done.err) == (2, True, True)
    done = launch("claude", "--url", "http://127.0.0.1:9")
    assert (done.code, "no server at http://127.0.0.1:9" in done.err) == (1, True)
    done = launch("claude", "--url", "127.0.0.1:9")
    assert (done.code, "url: " in done.err) == (2, True)
    monkeypatch.setenv("HEADRACE_API_KEY", "another")
    done = launch("claude", "--url", running.url)
    assert (done.code, "its key was not accepted" in done.err) == (1, True)


def test_a_context_that_is_too_small_is_said(running: Live, launch: Any) -> None:
    done = launch("pi", "--url", running.url)
    assert done.code == 0
    assert "tokens; pi needs 16,384" in done.err


def test_a_ca_of_ones_own_reaches_every_agent() -> None:
    for agent in AGENTS.values():
        setting = setting_of(agent, Target("https://h", "m", "k", 4096, "/ca.pem"), "/f")
        assert setting.variables["NODE_EXTRA_CA_CERTS"] == setting.variables["SSL_CERT_FILE"] == "/ca.pem"
        assert "SSL_CERT_FILE" not in setting_of(agent, Target("https://h", "m", "k", 4096), "/f").variables


def servers() -> list[psutil.Process]:
    """The processes `headrace serve` that descend from this one."""
    serving = []
    for child in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess):
            if "serve" in child.cmdline() and "--port" in child.cmdline():
                serving.append(child)
    return serving


def gone(processes: list[psutil.Process]) -> bool:
    return not psutil.wait_procs(processes, timeout=60)[1]


def test_a_server_of_the_run_is_shown_and_ends_with_it(desk: Desk) -> None:
    """Where the default address has no such model, or no server at all."""
    process = desk.start("claude", "--model", "builtin", "--", "--ask", "--wait")
    try:
        while not (desk.home.parent / "seen.json").exists():
            assert process.poll() is None, process.stderr.read() if process.stderr else ""
            time.sleep(0.1)
        started = servers()
        assert len(started) == 1
        assert (desk.seen["reply"]["model"], desk.seen["variables"]["ANTHROPIC_AUTH_TOKEN"]) == ("builtin", KEY)
        process.send_signal(signal.SIGTERM)
        _, errors = process.communicate(timeout=60)
    finally:
        process.kill()
        process.wait()
    assert process.returncode == 128 + signal.SIGTERM
    assert gone(started)
    assert "headrace serve builtin --port" in errors
    assert "ready: http://127.0.0.1:" in errors
    assert {path for path in desk.files() if not path.startswith(f"{desk.home}/.cache")} == set(), (
        "but for the built-in model"
    )


def test_a_server_of_the_run_ends_with_a_killed_launcher(desk: Desk) -> None:
    with desk.start("claude", "--model", "builtin", "--", "--wait", stdout=subprocess.DEVNULL) as process:
        try:
            while not (started := servers()):
                assert process.poll() is None
                time.sleep(0.05)
        finally:
            process.kill()
    assert gone(started)


def test_a_server_that_does_not_start_is_an_error(desk: Desk) -> None:
    process = desk.start("claude", "--model", "/no/such/model")
    _, errors = process.communicate(timeout=120)
    assert process.returncode == 1
    assert "no such directory" in errors
    assert "the server did not start: it ended with status 1" in errors
    assert not (desk.home.parent / "seen.json").exists()
