"""`headrace launch`: a coding agent on a headrace server, in one command.

Finds the server or starts one for this run, sets the agent to it (`cli.agents`), runs it, and takes everything away
afterwards. httpx is imported when the command runs.
"""

from __future__ import annotations

import contextlib
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import typer

from headrace import env
from headrace.cli.agents import AGENTS, NO_KEY, Agent, Setting, Target, setting_of
from headrace.cli.remote import (
    ADDRESS,
    ApiKey,
    CaCert,
    NoServerError,
    address_of,
    authorization,
    client_of,
    first_key,
    models_of,
)
from headrace.protocol.errors import HeadraceError, RequestError

POLL_S = 0.1
END_S = 30.0
"""Seconds that a server of this run may take to end; then it is killed."""
FIRST_OF_SIGNALS = 128
"""Added to the number of the signal that ended the agent, as shells do."""
NOT_FOUND = 127
"""The exit status for an agent that is not installed, as shells have it."""


def launch(
    agent: Annotated[str, typer.Argument(help=f"{', '.join(AGENTS)}.")],
    arguments: Annotated[
        list[str] | None, typer.Argument(metavar="[-- ARGS]", help="Words for the agent itself, after --.")
    ] = None,
    *,
    model: Annotated[
        str | None,
        typer.Option(
            metavar="MODEL",
            help="A model that the server has; or, where none runs, what to serve: a directory, a .gguf file, a hub "
            "id, or 'builtin' (the default).",
        ),
    ] = None,
    url: Annotated[
        str | None,
        typer.Option(
            metavar="URL",
            help=f"The server; by default the one at {ADDRESS}, or if none is there, or it lacks MODEL, one that is "
            "started on a free port for this run.",
        ),
    ] = None,
    api_key: ApiKey = None,
    cacert: CaCert = None,
    prints: Annotated[
        bool, typer.Option("--print", help="Print the lines that do the same for a running server, and run nothing.")
    ] = False,
) -> None:
    """Run a coding agent on a server: one that runs, or one of its own that ends with it.

    Nothing is written into the agent's or the user's files: the environment, flags and a temporary folder set the
    agent, and what it would send to its vendor is off where it has a switch. Exit status: the agent's; 127 if it is
    not installed.
    """
    if agent not in AGENTS:
        raise RequestError("agent", agent, "one of " + ", ".join(AGENTS))
    chosen = AGENTS[agent]
    program = shutil.which(chosen.program)
    if program is None and not prints:
        print(f"headrace: {chosen.program} is not installed; to install it: {chosen.install}", file=sys.stderr)
        raise typer.Exit(NOT_FOUND)
    ends = contextlib.ExitStack()
    with ends:
        folder = Path(ends.enter_context(tempfile.TemporaryDirectory(prefix="headrace-launch-")))
        target = _running(url, model, api_key, cacert, may_start=not prints)
        if target is None:
            target = ends.enter_context(_server("builtin" if model is None else model, api_key, folder))
        if target.context < chosen.needs:
            note = (
                f"headrace: {target.model} has a context of {target.context:,} tokens; {agent} needs {chosen.needs:,}"
            )
            print(note, file=sys.stderr)
        if program is None or prints:
            folder = Path(tempfile.gettempdir()) / f"headrace-{agent}"
            print(_lines(chosen, setting_of(chosen, target, str(folder)), folder, arguments or []))
            return
        setting = setting_of(chosen, target, str(folder))
        _write(setting, folder)
        status = _run([program, *setting.words, *(arguments or [])], setting)
    raise typer.Exit(status)


def _running(
    url: str | None, model: str | None, api_key: str | None, cacert: Path | None, may_start: bool
) -> Target | None:
    """Return the server that runs, and its model; None if one must be started. Raises `HeadraceError` and
    `RequestError` where none may be."""
    address = address_of(url or ADDRESS)
    headers = authorization(api_key)
    with client_of(address, cacert, 10.0) as client:
        try:
            models = models_of(client, address, headers)
        except NoServerError as error:
            if url is None and may_start:
                return None
            raise HeadraceError(f"{error}; start one with headrace serve") from error
    names = [entry["id"] for entry in models]
    if model is not None and model not in names:
        if url is None and may_start:
            return None
        raise RequestError("model", model, f"one that {address} has: {', '.join(names)}")
    return _target(address, models[names.index(model) if model else 0], api_key, cacert)


def _target(url: str, entry: dict[str, Any], api_key: str | None, cacert: Path | None = None) -> Target:
    context = entry.get("max_model_len")
    if not isinstance(context, int):
        raise HeadraceError(f"{url}: its model {entry['id']} has no max_model_len; it is no server that agents can use")
    file = "" if cacert is None else str(cacert.absolute())
    return Target(url, entry["id"], first_key(api_key) or NO_KEY, context, file)


@contextlib.contextmanager
def _server(model: str, api_key: str | None, folder: Path) -> Iterator[Target]:
    """Serve a model while the block runs; the log is shown until the server is ready. Raises `HeadraceError` if it does
    not start."""
    import httpx

    from headrace.text.bounded import die_with_parent

    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    url, log = f"http://127.0.0.1:{port}", folder / "server.log"
    words = [sys.executable, "-m", "headrace", "serve", model, "--port", str(port)]
    words += ["--shutdown-delay", "0", "--shutdown-timeout", "2"]
    variables: dict[str, str | None] = {} if api_key is None else {"HEADRACE_API_KEY": api_key}
    print(f"headrace: no server runs; {shlex.join(words[2:7])}", file=sys.stderr)
    with log.open("wb") as out:
        # In a group of its own: Ctrl-C is the agent's.
        process = subprocess.Popen(
            words, stdin=subprocess.DEVNULL, stdout=out, stderr=out, env=env.changed(variables),
            start_new_session=True, preexec_fn=die_with_parent,
        )  # fmt: skip
    try:
        with log.open("rb") as lines, client_of(url, None, 10.0) as client:
            headers = authorization(api_key)
            while True:
                _show(lines)
                if process.poll() is not None:
                    _show(lines)
                    raise HeadraceError(f"the server did not start: it ended with status {process.returncode}")
                with contextlib.suppress(httpx.TransportError):
                    if client.get(f"{url}/health/ready", headers=headers).status_code == 200:
                        break
                time.sleep(POLL_S)
            _show(lines)
            target = _target(url, models_of(client, url, headers)[0], api_key)
        yield target
        if process.poll() is not None:
            last = "\n".join(log.read_text(encoding="utf-8", errors="replace").splitlines()[-10:])
            raise HeadraceError(f"the server ended with status {process.returncode} while the agent ran:\n{last}")
    finally:
        process.terminate()
        try:
            process.wait(END_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _show(lines: Any) -> None:
    """Pass on to stderr what was written since the last call."""
    sys.stderr.write(lines.read().decode("utf-8", "replace"))
    sys.stderr.flush()


def _write(setting: Setting, folder: Path) -> None:
    for name, text in setting.files:
        (folder / name).write_text(text, encoding="utf-8")


def _run(words: list[str], setting: Setting) -> int:
    """Run the agent on this terminal, and return its exit status. Signals to this process are the agent's."""
    process: subprocess.Popen[bytes] | None = None

    def pass_on(number: int, frame: object) -> None:
        # The terminal sends its own to the agent too.
        if process is not None and number != signal.SIGINT:
            process.send_signal(number)

    signals = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    before = {name: signal.signal(name, pass_on) for name in signals}
    try:
        process = subprocess.Popen(words, env=env.changed(setting.variables))
        status = process.wait()
    finally:
        for name, handler in before.items():
            signal.signal(name, handler)
    return FIRST_OF_SIGNALS - status if status < 0 else status


def _lines(agent: Agent, setting: Setting, folder: Path, arguments: list[str]) -> str:
    """Return the lines of a shell that do the same as a run."""
    lines = [f"# {agent.program} from: {agent.install}"]
    if setting.files:
        lines.append(f"mkdir -p -m 700 {shlex.quote(str(folder))}")
    for name, text in setting.files:
        lines.append(f"cat > {shlex.quote(str(folder / name))} <<'END'\n{text.rstrip()}\nEND")
    for name, value in setting.variables.items():
        lines.append(f"unset {name}" if value is None else f"export {name}={shlex.quote(value)}")
    return "\n".join([*lines, shlex.join([agent.program, *setting.words, *arguments])])
