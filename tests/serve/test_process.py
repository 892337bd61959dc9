"""K13: one voice in the log, from the start to the end of the server's process, and the exit status."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import pty
import re
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import msgspec
import pytest
from bench.tied import tied
from tests.serve.test_faults import LONG, ROOT
from tests.support.server import HTTP, Live, write_tokenizer

from headrace.cli import main as cli
from headrace.engine import logs, progress
from headrace.engine.logs import JsonFormatter, LineFormatter
from headrace.protocol.step import EngineInfo
from headrace.serve import app, early_signals, process, startup


class Started:
    """A server with the fake engine, whose stderr is a pipe or a terminal."""

    def __init__(self, folder: Path, on_terminal: bool = False) -> None:
        with socket.create_server(("127.0.0.1", 0)) as free:
            self.port = free.getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"
        self._reader, writer = pty.openpty() if on_terminal else os.pipe()
        command = [sys.executable, str(ROOT / "tests/programs/serve_fake.py"), str(write_tokenizer(folder))]
        environment = os.environ | {"PYTHONPATH": str(ROOT), "TERM": "xterm"}
        self.process = subprocess.Popen(tied([*command, str(self.port), "0.01", "3"]), env=environment, stderr=writer)
        os.close(writer)
        self._text = b""
        self._thread = threading.Thread(target=self._read)
        self._thread.start()

    @property
    def text(self) -> str:
        return self._text.decode()

    def _read(self) -> None:
        # A terminal whose last writer has left gives an error instead of an end.
        with contextlib.suppress(OSError):
            while data := os.read(self._reader, 4096):
                self._text += data

    def end(self) -> tuple[int, list[str]]:
        """Return the exit status, and the lines of the log from the server's first on."""
        status = self.process.wait(60)
        self._thread.join(60)
        os.close(self._reader)
        return status, self.text.replace("\r\n", "\n").rstrip("\n").split("\n")

    @contextlib.contextmanager
    def stream(self) -> Iterator[None]:
        """A stream that is open, and that the server may cut."""
        with HTTP.stream("POST", self.url + "/v1/completions", json=dict(LONG, stream=True)) as reply:
            lines = reply.iter_lines()
            next(lines)
            yield
            # Closed with the last reference to it, it would close the connection.
            lines.close()


@pytest.mark.parametrize(("on_terminal", "num_signals"), [(True, 2), (False, 3)])
def test_K13_the_log_tells_what_is_true_in_its_order(tmp_path: Path, on_terminal: bool, num_signals: int) -> None:
    server = Started(tmp_path, on_terminal)
    Live.wait(lambda: HTTP.get(server.url + "/health/ready").status_code == 200)
    with server.stream():
        for number in range(num_signals):
            server.process.send_signal(signal.SIGINT)
            if number == 0:
                # Signals of one number that come at once may be one.
                Live.wait(lambda: "SIGINT: open" in server.text)
    status, lines = server.end()
    text = "\n".join(lines)
    assert status == 128 + signal.SIGINT, text
    for word in ("Traceback", "uvicorn", "Uvicorn", "Errno"):
        assert word not in text
    head = r"INFO     \S+ \S+ headrace\.server: "
    start, row = (r"\r\x1b\[K", r" +") if on_terminal else (r"", head)
    colon = r" +" if on_terminal else r": "
    expected = [
        rf"{start}{head}loading fake; until it is ready, {server.url} answers probes only",
        rf"{start}{head}ready: {server.url}",
        rf"{row}model{colon}fake, with a context of 2,048 tokens",
        rf"{row}weights{colon}none; computed in none by the backend simulated on cpu",
        rf"{row}KV cache size{colon}16,384 tokens in none; maximum concurrency .* request: 8\.00x",
        rf"{row}scheduling{colon}fcfs: as the engine was started",
        rf"{row}answers end with{colon}(no token|token \d.*)",
        rf"{row}temperature{colon}1 on OpenAI's routes.*--temp sets it for all",
        rf"{row}APIs{colon}OpenAI, Anthropic, Ollama, llama-server; \d+ routes, listed at {server.url}/docs",
        rf"{row}address{colon}{server.url}",
        rf"{start}{head}SIGINT: open calls: 1; they have 30 s to end, and a further signal ends them now",
        rf"{start}WARNING  \S+ \S+ headrace\.server: SIGINT: ending now; open calls: 1",
    ]
    life = [line for line in lines if "throughput" not in line and "tool calls" not in line]
    for line, pattern in zip(life, expected, strict=True):
        assert re.fullmatch(pattern, line), (line, pattern)


@pytest.mark.parametrize(
    ("arguments", "status", "words"),
    [
        (["--port", "PORT"], 1, r"can not listen on host 127\.0\.0\.1, port PORT: the port is in use; .*--port"),
        (["--host", "192.0.2.1", "--port", "0"], 1, r"host 192\.0\.2\.1, port 0: this machine does not .*--host"),
        (["--host", "no.such.host.invalid"], 1, r"no\.such\.host\.invalid, port 8000: no such host; .*--host"),
        (["/nope", "--port", "0"], 1, "/nope: no such directory"),
        (["--port", "99999"], 2, "port: 99999 .* from 0 to 65535"),
        (["--nonsense"], 2, "No such option: --nonsense"),
        (["--help"], 0, r"Exit status: 0 .* 130 "),
    ],
)
def test_K13_exit_statuses(
    arguments: list[str], status: int, words: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(app.logs, "set_up", lambda *arguments: None)
    with socket.create_server(("127.0.0.1", 0)) as busy:
        port = str(busy.getsockname()[1])
        monkeypatch.setattr(sys, "argv", ["headrace", "serve", *(port if x == "PORT" else x for x in arguments)])
        with pytest.raises(SystemExit) as ended:
            cli.main()
    assert (ended.value.code or 0) == status
    output = "".join(capsys.readouterr())
    assert re.search(words.replace("PORT", port), " ".join(output.split())), output
    assert "Traceback" not in output
    assert "Errno" not in output


SIGNALLED = """
import contextlib, os, signal, sys
from headrace.__main__ import early_signals, main

when, takes, name, words = sys.argv[1], sys.argv[2] == "True", sys.argv[3], sys.argv[4:]
sys.argv = ["headrace", "serve", "builtin", "--port", "0", *words]
hold = early_signals.hold


def come():
    os.kill(os.getpid(), getattr(signal, name))


def at_once():
    if takes:
        hold()
    come()


early_signals.hold = at_once if when == "at once" else lambda: None
if when == "while it loads":
    from headrace.serve import process

    if not takes:
        process.ended_by_signals = contextlib.nullcontext
    listen = process.listen
    process.listen = lambda *arguments: come() or listen(*arguments)
main()
"""


@pytest.mark.parametrize("takes", [True, False])
@pytest.mark.parametrize("when", ["at once", "while it loads"])
@pytest.mark.parametrize(("name", "form"), [("SIGTERM", "text"), ("SIGINT", "json")])
def test_K13_a_signal_before_the_server_begins_ends_it_with_a_word(
    name: str, form: str, when: str, takes: bool
) -> None:
    words = [when, str(takes), name, "--log-format", form]
    done = subprocess.run(
        tied([sys.executable, "-c", SIGNALLED, *words]), capture_output=True, text=True, timeout=100, check=False
    )
    last = done.stderr.splitlines()[-1] if done.stderr else ""
    message = f"{name}: ending; the server had not begun"
    if takes:
        assert (done.returncode, "Traceback" in done.stderr) == (0, False), done.stderr
        assert (json.loads(last)["message"] if form == "json" else last.partition("server: ")[2]) == message
    else:
        assert done.returncode != 0
        assert message not in done.stderr


def test_the_handlers_of_signals_are_as_before_when_a_start_has_failed() -> None:
    before = [signal.getsignal(name) for name in early_signals.SIGNALS]
    with process.ended_by_signals():
        assert all(signal.getsignal(name) not in before for name in early_signals.SIGNALS)
    assert [signal.getsignal(name) for name in early_signals.SIGNALS] == before


def test_sockets_listen_at_every_address_of_a_host_on_one_port() -> None:
    sockets = process.listen("localhost", 0)
    try:
        assert len({one.getsockname()[1] for one in sockets}) == 1
        with socket.create_connection(sockets[0].getsockname()[:2]), pytest.raises(process.ListenError, match="in use"):
            process.listen("localhost", sockets[0].getsockname()[1])
    finally:
        for one in sockets:
            one.close()


@pytest.mark.parametrize(
    ("host", "url"),
    [("127.0.0.1", "127.0.0.1"), ("0.0.0.0", "127.0.0.1"), ("::", "[::1]"), ("fd00::1", "[fd00::1]"), ("box", "box")],
)
def test_the_address_is_one_that_a_client_can_use(host: str, url: str) -> None:
    assert process.url_of(host, 80) == f"http://{url}:80"


def test_the_summary_has_the_form_and_size_of_the_weights(tmp_path: Path) -> None:
    sizes = {"vocab_size": 10, "block_size": 16, "num_blocks": 10, "max_num_seqs": 4, "max_num_batched_tokens": 8}
    names = {"model": "m", "dtype": "bfloat16", "backend": "cpu", "device": "cpu"}
    info = msgspec.convert({"max_model_len": 100, "eos_token_ids": []} | sizes | names, EngineInfo)
    (tmp_path / "model.safetensors").write_bytes(bytes(3 * 2**19))
    (tmp_path / "config.json").write_text('{"quantization_config": {"quant_method": "awq"}}')
    extra = startup.summary(info, tmp_path, "http://a:1", 7)
    assert extra["rows"]["weights"] == "awq, 1.5 MiB; computed in bfloat16 by the backend cpu on cpu"
    assert (extra["fields"]["weights"], extra["fields"]["num_weight_bytes"]) == ("awq", 3 * 2**19)
    assert startup.stored_form(tmp_path / "model.safetensors", info) == "gguf"
    (tmp_path / "config.json").write_text("{}")
    assert startup.stored_form(tmp_path, info) == "bfloat16"
    assert startup.readable(5) == "5.0 bytes"
    assert "loss" not in extra["rows"]


def test_the_summary_has_the_loss_of_a_quantisation_or_the_command_that_measures_it() -> None:
    sizes = {"vocab_size": 10, "block_size": 16, "num_blocks": 10, "max_num_seqs": 4, "max_num_batched_tokens": 8}
    names = {"model": "m", "dtype": "bfloat16", "backend": "cpu", "device": "cpu", "quantization": "int4"}
    info = msgspec.convert({"max_model_len": 100, "eos_token_ids": []} | sizes | names, EngineInfo)
    rows = startup.summary(info, None, "http://a:1", 7)["rows"]
    assert rows["loss"] == "not measured; `headrace bench quality m --quantization int4 --save` does it"
    measured = {"mean_kl": 0.0123, "top1_flip_rate": 0.05, "num_tokens": 4096, "text": "a.txt", "date": "2026-11-26"}
    measured |= {"perplexity": 11.0, "reference_perplexity": 10.0}
    rows = startup.summary(info, None, "http://a:1", 7, measured)["rows"]
    assert rows["loss"] == (
        "KL 12.3 mnats, the first choice differs at 5.0%, perplexity +10.0% (4,096 tokens, a.txt, 2026-11-26)"
    )


def test_rows_and_fields_in_all_forms_of_the_log() -> None:
    extra = {"rows": {"a": "1\n", "long": "2"}, "fields": {"a": 1, "level": "forged"}}
    record = logging.makeLogRecord({"name": "n", "levelname": "INFO", "msg": "ready: %s", "args": ("x",), **extra})
    assert [line.partition("n: ")[2] for line in LineFormatter().format(record).split("\n")] == [
        "ready: x",
        r"a: 1\n",
        "long: 2",
    ]
    assert LineFormatter(on_terminal=True).format(record).split("\n")[1:] == [r"         a     1\n", "         long  2"]
    line = JsonFormatter().format(record)
    assert json.loads(line) | {"time": 0} == {"time": 0, "level": "info", "logger": "n", "message": "ready: x", "a": 1}
    again = logs.record_of(line)
    assert again is not None
    assert JsonFormatter().format(again) == line


def test_progress_is_lines_where_no_terminal_is(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    times = iter([0.0, 1.0, 6.0, 7.0, 11.5, 0.0, 9.0])
    monkeypatch.setattr(progress, "time", SimpleNamespace(monotonic=lambda: next(times)))
    monkeypatch.setattr(progress.env, "is_terminal", lambda descriptor: False)
    caplog.set_level("INFO")
    with progress.progress_bar("loading m", logger=logging.getLogger("headrace.test")) as show:
        for num_done in (1, 2, 3, 4):
            show(num_done, 4)
    assert caplog.messages == ["loading m: 2 of 4 (50%)", "loading m: 4 of 4 (100%)"]
    with progress.progress_bar("quiet") as show:
        show(1, 2)
    monkeypatch.setattr(progress.env, "is_terminal", lambda descriptor: True)
    with progress.progress_bar("bar") as show:
        show(1, 2, "next")
    assert len(caplog.messages) == 2
