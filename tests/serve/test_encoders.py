"""An encoder behind the server: vectors at every door, no answers, and the same bits after its engine was killed."""

from __future__ import annotations

import json
import logging
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from huggingface_hub import InferenceClient
from tests.support.server import Live, write_tokenizer
from tests.support.serving import Served, serve
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM, AutoModelForSequenceClassification

from headrace import models
from headrace.engine.build import build_engine
from headrace.engine.client import InprocClient
from headrace.models.encoders import bert
from headrace.protocol.config import EngineConfig, ServerConfig
from headrace.protocol.step import EngineInfo
from headrace.serve.loading import load_text
from headrace.serve.startup import summary

HTTP = httpx.Client(timeout=240)
TEXT = "A cat sat on the mat."
PROMPTS = {"query": "find: ", "passage": "text: ", "usual": "say: "}


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("bert")
    torch.manual_seed(0)
    config = AutoConfig.for_model(**bert.TINY | {"vocab_size": 256, "max_position_embeddings": 64})
    AutoModel.from_config(config).save_pretrained(folder)
    (folder / "config_sentence_transformers.json").write_text(
        json.dumps({"prompts": PROMPTS, "default_prompt_name": "usual"})
    )
    return write_tokenizer(folder)


@pytest.fixture(scope="module")
def server(directory: Path) -> Iterator[Served]:
    with serve(str(directory), "--served-model-name", "bert") as served:
        yield served


def vector(server: Served, text: str = TEXT) -> list[float]:
    reply = HTTP.post(f"{server.url}/v1/embeddings", json={"model": "bert", "input": text, "prompt_name": ""})
    assert reply.status_code == 200, reply.text
    numbers: list[float] = reply.json()["data"][0]["embedding"]
    return numbers


def test_an_encoder_answers_at_every_door_for_vectors(server: Served, directory: Path) -> None:
    model = AutoModel.from_pretrained(directory).eval()
    with torch.no_grad():
        ids = list((PROMPTS["usual"] + TEXT).encode())
        mean = model(input_ids=torch.tensor([ids])).last_hidden_state[0].mean(0)
    right = (mean / mean.norm()).tolist()
    reply = HTTP.post(f"{server.url}/v1/embeddings", json={"model": "bert", "input": TEXT})
    usual = reply.json()["data"][0]["embedding"]
    assert usual == pytest.approx(right, abs=1e-5)
    assert usual == vector(server, PROMPTS["usual"] + TEXT)
    ollama = HTTP.post(f"{server.url}/api/embed", json={"model": "bert", "input": TEXT}).json()["embeddings"][0]
    llama = HTTP.post(f"{server.url}/embedding", json={"content": TEXT}).json()[0]["embedding"][0]
    pooled = HTTP.post(f"{server.url}/pooling", json={"model": "bert", "input": TEXT}).json()["data"][0]["data"]
    body: dict[str, Any] = {"content": [{"prompt_string": TEXT}]}
    spelt = HTTP.post(f"{server.url}/embedding", json=body).json()[0]["embedding"][0]
    assert ollama == llama == spelt == pooled == usual
    body = {"model": "bert", "query": TEXT, "documents": ["xyz", TEXT]}
    ranks = HTTP.post(f"{server.url}/v1/rerank", json=body).json()["results"]
    assert [rank["index"] for rank in ranks] == [1, 0]
    assert ranks[0]["relevance_score"] == pytest.approx(1.0, abs=1e-5)


def test_a_clients_own_library_reads_the_vectors(server: Served) -> None:
    """huggingface_hub, as with Text Embeddings Inference."""
    texts = InferenceClient(model=f"{server.url}/embed")
    [row] = texts.feature_extraction(TEXT, prompt_name="query", truncate=True, truncation_direction="right").tolist()
    assert row == pytest.approx(vector(server, PROMPTS["query"] + TEXT))
    likeness = InferenceClient(model=f"{server.url}/similarity").sentence_similarity(
        TEXT, other_sentences=[TEXT, "xyz"]
    )
    assert likeness[0] == pytest.approx(1.0, abs=1e-5)
    assert likeness[1] < likeness[0]


@pytest.mark.parametrize(
    ("fields", "prompt"),
    [
        ({"prompt_name": "query"}, "query"),
        ({"input_type": "passage"}, "passage"),
        ({"input_type": "search_query"}, "query"),
        ({"input_type": "search_document"}, "passage"),
    ],
)
def test_a_request_names_a_prompt_of_the_models_files(server: Served, fields: dict[str, str], prompt: str) -> None:
    body = {"model": "bert", "input": [TEXT, "x"]} | fields
    rows = HTTP.post(f"{server.url}/v1/embeddings", json=body).json()["data"]
    assert [row["embedding"] for row in rows] == [vector(server, PROMPTS[prompt] + text) for text in (TEXT, "x")]


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"prompt_name": "other"}, "must be one of query, passage, usual"),
        ({"input_type": "clustering"}, "must be one of query, passage, usual, search_query, search_document"),
        ({"input_type": "query", "prompt_name": "query"}, "must be left out: prompt_name names the prompt"),
        ({"prompt_name": "query", "input": [5, 6]}, "must be left out for token ids"),
    ],
)
def test_an_unknown_prompt_is_refused(server: Served, fields: dict[str, Any], message: str) -> None:
    reply = HTTP.post(f"{server.url}/v1/embeddings", json={"model": "bert", "input": TEXT} | fields)
    assert reply.status_code == 400
    error = reply.json()["error"]
    assert error["param"] == next(iter(fields))
    assert message in error["message"]


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "Hi"}]}),
        ("/v1/completions", {"prompt": "Hi"}),
        ("/v1/responses", {"input": "Hi"}),
        ("/v1/messages", {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 4}),
        ("/api/chat", {"messages": [{"role": "user", "content": "Hi"}]}),
        ("/completion", {"prompt": "Hi"}),
    ],
)
def test_an_encoder_is_no_model_for_answers(server: Served, path: str, body: dict[str, Any]) -> None:
    reply = HTTP.post(f"{server.url}{path}", json={"model": "bert", "stream": False} | body)
    assert reply.status_code == 400
    assert "this one gives vectors or classes" in json.dumps(reply.json())


def test_the_summary_of_the_start_speaks_of_vectors_and_not_of_answers(server: Served) -> None:
    numbers = {"max_model_len": 64, "vocab_size": 256, "block_size": 16, "num_blocks": 8, "max_num_seqs": 4}
    base: dict[str, Any] = {"model": "bert", "eos_token_ids": [], "max_num_batched_tokens": 64} | numbers
    rows = summary(EngineInfo(**base, generates=False, pooling="cls"), None, server.url, 1)["rows"]
    assert "pooling cls" in rows["vectors"]
    assert not {"temperature", "answers end with"} & rows.keys()
    assert "temperature" in summary(EngineInfo(**base), None, server.url, 1)["rows"]


def test_a_text_that_is_too_long_is_refused_or_cut_between_its_ends(server: Served) -> None:
    body: dict[str, Any] = {"model": "bert", "input": "a" * 70, "prompt_name": ""}
    reply = HTTP.post(f"{server.url}/v1/embeddings", json=body)
    assert (reply.status_code, reply.json()["error"]["code"]) == (400, "context_length_exceeded")
    assert HTTP.post(f"{server.url}/v1/embeddings", json=body | {"input": "a" * 64}).status_code == 200
    cut = HTTP.post(f"{server.url}/v1/embeddings", json=body | {"input": "abcdez", "truncate_prompt_tokens": 3}).json()
    assert cut["data"][0]["embedding"] == vector(server, "abz")


def test_a_killed_engine_gives_the_same_vector_again(server: Served) -> None:
    before = vector(server)
    server.engine().send_signal(signal.SIGKILL)
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        reply = HTTP.post(f"{server.url}/v1/embeddings", json={"model": "bert", "input": TEXT})
        if reply.status_code == 200:
            break
        time.sleep(0.2)
    assert vector(server) == before


@pytest.mark.parametrize(
    ("kind", "settings", "num_warnings"),
    [
        (AutoModel, bert.TINY, 0),
        (AutoModelForSequenceClassification, bert.TINY, 0),
        (AutoModelForCausalLM, models.find("llama").TINY, 2),
    ],
)
def test_a_missing_chat_template_is_of_note_to_a_model_that_answers(
    kind: Any, settings: dict[str, Any], num_warnings: int, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    kind.from_config(AutoConfig.for_model(**settings | {"vocab_size": 256})).save_pretrained(tmp_path)
    write_tokenizer(tmp_path)
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<eos>"}))
    engine, server = EngineConfig(model=str(tmp_path), num_gpu_blocks_override=64), ServerConfig(log_stats_interval=0)
    caplog.set_level(logging.WARNING, "headrace.server")
    text = load_text(engine, server)
    assert text.tokenizer is not None
    client = InprocClient(lambda: build_engine(engine))
    with Live(client, text.tokenizer, server, template=text.template, notes=text.notes):
        lines = [line for line in caplog.messages if "chat template" in line]
    assert len(lines) == num_warnings, lines
    for line, begin in zip(lines, ("the model has no chat template", "tool calls: none"), strict=False):
        assert line.startswith(begin)
