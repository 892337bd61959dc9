"""S-10, R-13, R-31: a model's tokenizer that takes too much time or memory costs its own caller a 400, through every
door; a process that stands still costs no call more than its deadline."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from tests.support import tokenizer_child
from tests.support.server import HTTP, Live, inproc, write_tokenizer

from headrace.protocol.config import ServerConfig
from headrace.text import bounded_tokenizer
from headrace.text.tokenizer import Tokenizer

REPLACE = {"type": "Replace", "pattern": {"String": "q"}, "content": "q" * 16}
BOMB = "q" * 60
SAID = [{"role": "user", "content": BOMB}]
# By door: a body in which "q"s are replaced for the control.
DOORS: dict[str, tuple[str, dict[str, Any]]] = {
    "completions": ("/v1/completions", {"prompt": BOMB, "max_tokens": 1}),
    "several prompts": ("/v1/completions", {"prompt": ["a", BOMB], "max_tokens": 1}),
    "bad words": ("/v1/completions", {"prompt": "a", "max_tokens": 1, "bad_words": [BOMB]}),
    "sequence breakers": (
        "/v1/completions",
        {"prompt": "a", "max_tokens": 1, "dry_multiplier": 1.0, "dry_sequence_breakers": [BOMB]},
    ),
    "chat": ("/v1/chat/completions", {"messages": SAID, "max_tokens": 1}),
    "responses": ("/v1/responses", {"input": BOMB, "max_output_tokens": 1}),
    "messages": ("/v1/messages", {"model": "fake", "messages": SAID, "max_tokens": 1}),
    "counting": ("/v1/messages/count_tokens", {"model": "fake", "messages": SAID}),
    "tokenize": ("/tokenize", {"prompt": BOMB}),
    "llama-server's tokenize": ("/tokenize", {"content": BOMB}),
    "embeddings": ("/v1/embeddings", {"input": [BOMB]}),
    "rerank": ("/v1/rerank", {"query": "a", "documents": [BOMB]}),
    "score": ("/score", {"text_1": BOMB, "text_2": "a"}),
    "Ollama's chat": ("/api/chat", {"model": "fake", "messages": SAID, "stream": False}),
    "Ollama's generate": ("/api/generate", {"model": "fake", "prompt": BOMB, "stream": False}),
    "Ollama's embed": ("/api/embed", {"model": "fake", "input": BOMB}),
    "llama-server's completion": ("/completion", {"prompt": BOMB, "n_predict": 1}),
}


@pytest.fixture(scope="module")
def tokenizer_of_bombs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Tokenizer]:
    folder = write_tokenizer(tmp_path_factory.mktemp("bomb"))
    spec = json.loads((folder / "tokenizer.json").read_text())
    spec["normalizer"] = {"type": "Sequence", "normalizers": [REPLACE] * 6}
    (folder / "tokenizer.json").write_text(json.dumps(spec))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(Path(__file__).resolve().parents[2]), prepend=os.pathsep)
        patch.setattr(bounded_tokenizer, "SANDBOX", tokenizer_child.NAME)
        with closing(bounded_tokenizer.load(folder)) as tokenizer:
            yield tokenizer


@pytest.fixture(scope="module")
def bombed(tokenizer_of_bombs: Tokenizer) -> Iterator[Live]:
    with Live(inproc(), tokenizer_of_bombs, ServerConfig(log_stats_interval=0)) as live:
        yield live


@pytest.mark.parametrize("door", DOORS)
def test_S_10_a_text_that_grows_is_refused_at_every_door(bombed: Live, door: str) -> None:
    path, body = DOORS[door]
    reply = bombed.post(path, body)
    assert reply.status_code == 400, reply.text
    assert "the model's tokenizer needs at most 2 s of processor time and 1,024 MiB of memory" in reply.text
    control = bombed.post(path, json.loads(json.dumps(body).replace(BOMB, "b" * 60)))
    assert control.status_code == 200, control.text


def test_S_10_the_line_of_a_batch_is_refused(bombed: Live) -> None:
    line = {"custom_id": "a", "method": "POST", "url": "/v1/completions", "body": {"prompt": BOMB, "max_tokens": 1}}
    files = {"file": ("lines.jsonl", json.dumps(line).encode()), "purpose": (None, "batch")}
    source = HTTP.post(bombed.url + "/v1/files", files=files).json()["id"]
    batch = {"input_file_id": source, "endpoint": "/v1/completions", "completion_window": "24h"}
    batch_id = bombed.post("/v1/batches", batch).json()["id"]
    state: dict[str, Any] = {}

    def ended() -> bool:
        state.update(HTTP.get(f"{bombed.url}/v1/batches/{batch_id}").json())
        return bool(state["status"] == "completed")

    bombed.wait(ended)
    assert (state["request_counts"]["failed"], state["request_counts"]["completed"]) == (1, 0)


def test_R_13_a_deadline_holds_while_a_text_is_encoded(bombed: Live, tokenizer_of_bombs: Tokenizer) -> None:
    process = tokenizer_of_bombs.process
    assert process is not None
    assert bombed.post("/tokenize", {"prompt": "a"}).status_code == 200
    num_restarts = bombed.metric("helper_restarts_total", helper="tokenizers")
    assert process.pid is not None
    os.kill(process.pid, signal.SIGSTOP)
    reply = bombed.post("/v1/completions", {"prompt": "a", "max_tokens": 1, "timeout": 0.2})
    assert (reply.status_code, "its prompt was tokenised" in reply.text) == (408, True)
    by_ids = bombed.post("/v1/completions", {"prompt": [97], "max_tokens": 1, "seed": 1})
    assert by_ids.status_code == 200, "token ids need no process"
    by_text = bombed.post("/v1/completions", {"prompt": "a", "max_tokens": 1, "seed": 1})
    assert by_text.json()["choices"] == by_ids.json()["choices"]
    assert bombed.metric("helper_restarts_total", helper="tokenizers") == num_restarts + 1


def test_R_31_a_killed_process_costs_no_call(bombed: Live, tokenizer_of_bombs: Tokenizer, tmp_path: Path) -> None:
    process = tokenizer_of_bombs.process
    assert process is not None
    assert bombed.post("/tokenize", {"prompt": "ab"}).json()["tokens"] == [97, 98]
    assert process.pid is not None
    os.kill(process.pid, signal.SIGKILL)
    assert bombed.post("/tokenize", {"prompt": "ab"}).json()["tokens"] == [97, 98]
    assert HTTP.get(bombed.url + "/health/ready").status_code == 200
