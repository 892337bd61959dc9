"""The examples and the commands that need a server, run as a user runs them: in their own processes, on the built-in
model, against one `headrace serve`."""

from __future__ import annotations

import json
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from bench.tied import tied

ROOT = Path(__file__).resolve().parents[2]


def python(*words: str, stdin: str = "") -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *words], input=stdin, capture_output=True, text=True, timeout=110, cwd=ROOT, check=False
    )


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Address of a server in a process of its own, ended by the signal that Ctrl-C sends."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    log = tmp_path_factory.mktemp("serve") / "log"
    with log.open("w") as stream:
        server = subprocess.Popen(
            tied([sys.executable, "-m", "headrace", "serve", "--port", str(port)]),
            stdout=stream,
            stderr=stream,
            cwd=ROOT,
        )
    address = f"http://127.0.0.1:{port}"
    try:
        for _ in range(400):
            if server.poll() is not None:
                pytest.fail(f"headrace serve ended with {server.returncode}:\n{log.read_text()}")
            try:
                if httpx.get(f"{address}/health/ready", timeout=5).status_code == 200:
                    break
            except httpx.TransportError:
                pass
            time.sleep(0.25)
        else:
            pytest.fail(f"headrace serve is not ready after 100 s:\n{log.read_text()}")
        yield address
        server.send_signal(signal.SIGINT)
        server.wait(timeout=30)
    finally:
        if server.poll() is None:
            server.kill()
            server.wait()


def test_every_example_is_run() -> None:
    assert {path.name for path in (ROOT / "examples").glob("*.py")} == {"generate.py", "chat.py", "stream.py"}


def test_generate_example() -> None:
    done = python("examples/generate.py")
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("tokens, ") == 2
    assert done.stdout == python("examples/generate.py", "builtin").stdout, "a seed is a seed"


def test_chat_example(url: str) -> None:
    done = python("examples/chat.py", url)
    assert done.returncode == 0, done.stderr
    lines = [line for line in done.stdout.splitlines() if "cached" in line]
    assert len(lines) == 2
    assert not lines[1].endswith(" 0 cached")


def test_stream_example(url: str) -> None:
    done = python("examples/stream.py", url)
    assert done.returncode == 0, done.stderr
    assert "first text after" in done.stdout


def test_chat_command_over_http(url: str) -> None:
    words = ["-m", "headrace", "chat", "--max-tokens", "8", "--temperature", "0"]
    there = python(*words, "--url", url, stdin="Hello\n")
    assert there.returncode == 0, there.stderr
    assert there.stdout == python(*words, stdin="Hello\n").stdout, "the same answer here and there"


def test_chat_command_without_a_server() -> None:
    done = python("-m", "headrace", "chat", "--url", "http://127.0.0.1:9", stdin="Hello\n")
    assert done.returncode == 1
    assert done.stderr.startswith("headrace: no server at http://127.0.0.1:9")


@pytest.mark.parametrize("backend", ["openai", "openai-chat"])
def test_bench_serve(url: str, backend: str, tmp_path: Path) -> None:
    words = "--num-prompts 4 --random-input-len 6 --random-output-len 5 --ignore-eos --max-concurrency 2".split()
    words += "--goodput ttft:1e9 --metadata host=test --percentile-metrics ttft,e2el --save-detailed".split()
    done = python(
        *("-m", "headrace", "bench", "serve", "--base-url", url, "--backend", backend, *words),
        *("--result-dir", str(tmp_path), "--result-filename", "r.json", "--json"),
    )
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    assert (result["completed"], result["failed"]) == (4, 0)
    assert result["total_output_tokens"] == 20
    assert result["request_goodput"] == result["request_throughput"]
    assert result["host"] == "test"
    assert result["max_concurrent_requests"] <= 2
    if backend == "openai":
        assert result["total_input_tokens"] == 24
    saved = json.loads((tmp_path / "r.json").read_text())
    assert saved["output_lens"] == [5, 5, 5, 5]
    assert len(saved["ttfts"]) == 4


def test_bench_serve_tells_failures(url: str) -> None:
    words = "--num-prompts 2 --random-input-len 6 --random-output-len 5 --model builtin".split()
    extra = ["--extra-body", '{"top_p": 7}', "--json"]
    done = python("-m", "headrace", "bench", "serve", "--base-url", url, *words, *extra)
    assert done.returncode == 1
    assert json.loads(done.stdout)["failed"] == 2
    assert "top_p" in done.stderr
