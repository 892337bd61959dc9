"""Adapters behind the server: they are models to clients, come and go while it runs, and outlive the engine."""

from __future__ import annotations

import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from tests.support.adapters import write_adapter
from tests.support.serving import Served, serve

HTTP = httpx.Client(timeout=240)
SHAPES = {"self_attn.q_proj": (256, 256), "self_attn.v_proj": (64, 256), "mlp.down_proj": (256, 512)}
WEIGHTS = {f"model.layers.{i}.{name}.weight": torch.empty(shape) for i in range(14) for name, shape in SHAPES.items()}


@pytest.fixture(scope="module")
def paths(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    folder = tmp_path_factory.mktemp("adapters")
    return [write_adapter(folder / name, WEIGHTS, seed=i, spread=0.2) for i, name in enumerate("ab")]


@pytest.fixture(scope="module")
def server(paths: list[Path]) -> Iterator[Served]:
    with serve("builtin", "--enable-lora", "--lora-modules", f"first={paths[0]}", "--max-loras", "2") as served:
        yield served


def text(server: Served, model: str | None) -> str:
    body: dict[str, Any] = {"prompt": "Once upon a time", "max_tokens": 16, "temperature": 0}
    reply = HTTP.post(f"{server.url}/v1/completions", json=body | ({} if model is None else {"model": model}))
    assert reply.status_code == 200, reply.text
    assert reply.json()["model"] == (model or "builtin")
    return str(reply.json()["choices"][0]["text"])


def change(server: Served, what: str, **body: Any) -> httpx.Response:
    return HTTP.post(f"{server.url}/v1/{what}_lora_adapter", json=body)


def names(server: Served) -> dict[str, str | None]:
    return {card["id"]: card["parent"] for card in HTTP.get(f"{server.url}/v1/models").json()["data"]}


def test_an_adapter_is_a_model_to_clients(server: Served) -> None:
    assert names(server) == {"builtin": None, "first": "builtin"}
    assert text(server, "first") != text(server, "builtin") == text(server, None)
    # A name that is misspelled is not answered by the model itself.
    body = {"model": "frist", "prompt": "x", "max_tokens": 1}
    reply = HTTP.post(f"{server.url}/v1/completions", json=body)
    assert (reply.status_code, reply.json()["error"]["code"]) == (404, "model_not_found")
    vectors = [
        HTTP.post(f"{server.url}/v1/embeddings", json={"model": name, "input": "a"}).json()["data"][0]["embedding"]
        for name in ("builtin", "first")
    ]
    assert vectors[0] != vectors[1]


def test_adapters_come_and_go_and_outlive_the_engine(server: Served, paths: list[Path]) -> None:
    assert change(server, "load", lora_name="second", lora_path=str(paths[1])).status_code == 200
    before = text(server, "second")
    assert before not in (text(server, "first"), text(server, "builtin"))
    server.engine().send_signal(signal.SIGKILL)
    assert text(server, "second") == before  # the next engine has it too
    reply = change(server, "load", lora_name="second", lora_path=str(paths[0]))
    assert reply.status_code == 400
    assert "a name that no model and no adapter has yet" in reply.text
    assert change(server, "load", lora_name="second", lora_path=str(paths[0]), load_inplace=True).status_code == 200
    assert text(server, "second") == text(server, "first")
    assert change(server, "unload", lora_name="second").status_code == 200
    assert "second" not in names(server)
    assert change(server, "unload", lora_name="second").status_code == 404


def test_an_adapter_that_was_unloaded_stays_so(paths: list[Path]) -> None:
    """Also one of the command line, whose slot another takes after a restart of the engine."""
    with serve("builtin", "--enable-lora", "--lora-modules", f"a={paths[0]}", "--max-loras", "1") as served:
        assert change(served, "unload", lora_name="a").status_code == 200
        before = text(served, "builtin")
        served.engine().send_signal(signal.SIGKILL)
        assert text(served, "builtin") == before
        assert change(served, "load", lora_name="b", lora_path=str(paths[1])).status_code == 200
        assert text(served, "b") != before


def test_what_is_no_adapter_is_refused_and_harms_nobody(server: Served, tmp_path: Path) -> None:
    before = text(server, "first")
    (tmp_path / "adapter_config.json").write_text("[" * 10**5)
    for path, words in ((tmp_path, "adapter_config.json"), (tmp_path / "none", "is no folder")):
        reply = change(server, "load", lora_name="x", lora_path=str(path))
        assert reply.status_code == 400
        assert reply.json()["error"]["param"] == "lora_path"
        assert words in reply.json()["error"]["message"]
    for body in ({"lora_name": "", "lora_path": "x"}, {"lora_name": "x"}, {"lora_name": 3, "lora_path": "x"}):
        assert change(server, "load", **body).status_code == 400
    assert text(server, "first") == before


def test_requests_that_run_keep_their_adapter(server: Served, paths: list[Path]) -> None:
    assert change(server, "load", lora_name="third", lora_path=str(paths[1])).status_code == 200
    body = {"model": "third", "prompt": "The", "max_tokens": 1500, "temperature": 0, "ignore_eos": True, "stream": True}
    with HTTP.stream("POST", f"{server.url}/v1/completions", json=body) as stream:
        events = stream.iter_lines()
        next(events)
        reply = change(server, "unload", lora_name="third")
        assert reply.status_code == 400
        assert "no request uses" in reply.text
    deadline = time.monotonic() + 60
    while change(server, "unload", lora_name="third").status_code != 200:
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_every_door_has_the_adapter(server: Served) -> None:
    talk = [{"role": "user", "content": "hi"}]
    doors: list[tuple[str, dict[str, Any], Any]] = [
        ("/v1/chat/completions", {"messages": talk}, lambda reply: reply["choices"][0]["message"]["content"]),
        ("/v1/messages", {"messages": talk}, lambda reply: reply["content"][0]["text"]),
        ("/v1/responses", {"input": "hi"}, lambda reply: reply["output"][0]["content"][0]["text"]),
        ("/api/chat", {"messages": talk}, lambda reply: reply["message"]["content"]),
        ("/api/generate", {"prompt": "hi"}, lambda reply: reply["response"]),
        ("/completion", {"prompt": "hi"}, lambda reply: reply["content"]),
        ("/api/embed", {"input": "hi"}, lambda reply: reply["embeddings"]),
        ("/embedding", {"content": "hi"}, lambda reply: reply[0]["embedding"]),
        ("/v1/score", {"text_1": "hi", "text_2": "cat"}, lambda reply: reply["data"][0]["score"]),
    ]
    for path, body, take in doors:
        body |= {"temperature": 0, "max_tokens": 8, "max_output_tokens": 8, "n_predict": 8, "stream": False}
        body |= {"options": {"temperature": 0, "num_predict": 8}} if path.startswith("/api") else {}
        replies = {}
        for name in ("builtin", "first"):
            reply = HTTP.post(f"{server.url}{path}", json=body | {"model": name})
            assert reply.status_code == 200, (path, reply.text)
            assert path == "/embedding" or reply.json()["model"] == name, path
            replies[name] = take(reply.json())
        assert replies["builtin"] != replies["first"], path
