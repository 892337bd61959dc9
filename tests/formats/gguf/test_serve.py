"""`headrace serve model.gguf` just works: golden logits of real models, text, chat, ends of turns, refusals."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import gguf
import httpx
import numpy as np
import pytest
import torch
from tests.formats.gguf.models import convert
from tests.support.harness import BACKENDS, DATA, follow, load
from tests.support.serving import serve

from headrace import LLM, SamplingParams, hub
from headrace.builtin import directory
from headrace.cli.bench.data import find_tokenizer
from headrace.doctor import model_state
from headrace.engine.library.load import build_runner
from headrace.protocol.config import EngineConfig
from headrace.protocol.errors import CheckpointError, ModelNotFoundError

PATH = directory()

GGUF_DATA = DATA / "models" / "derived" / "gguf"
FILES = sorted(path.name for path in GGUF_DATA.glob("*.gguf"))
QUESTION = [{"role": "user", "content": "Tell me a story about a dog."}]


def golden(name: str) -> dict[str, Any]:
    cases = json.loads((GGUF_DATA / "golden_logits.json").read_text())["files"]
    result: dict[str, Any] = next(case for case in cases if case["file"] == name)
    return result


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", FILES)
def test_golden_logits_of_every_file(name: str, backend: str, shared_data: Path) -> None:
    case = golden(name)
    expected = torch.tensor(case["last_logits"], dtype=torch.float64)

    def last(**options: Any) -> torch.Tensor:
        runner = load(GGUF_DATA / name, backend=backend, **options)
        return follow(runner, case["prompt_ids"], [len(case["prompt_ids"])])[-1].double()

    assert (last(dtype="float32", quantization="none") - expected).abs().max() <= 1e-4
    # As it is served: codes in the kernels' forms, activations (cpu) in int8, cache in the model's dtype.
    last_logits = last() if backend == "cpu" else last(dtype="float32")
    p, q = expected.log_softmax(-1), last_logits.log_softmax(-1)
    assert float((p.exp() * (p - q)).sum()) <= 3e-3
    assert int(last_logits.argmax()) == int(expected.argmax())


def test_text_and_ids_of_the_prompt(shared_data: Path) -> None:
    for name in ("stories260K.Q4_0.gguf", "TinyStories-656K.Q8_0.gguf"):
        case = golden(name)
        llm = LLM(str(GGUF_DATA / name))
        (output,) = llm.generate([case["prompt"]], SamplingParams(max_tokens=20, temperature=0))
        assert output.prompt_token_ids == case["prompt_ids"]
        assert len(output.outputs[0].text.split()) > 8


def write_builtin(path: Path) -> Path:
    """The built-in model with its tokenizer and chat template, as gguf-py writes it."""
    vocabulary = json.loads((PATH / "tokenizer.json").read_text())
    settings = json.loads((PATH / "tokenizer_config.json").read_text())
    ids = vocabulary["model"]["vocab"]
    special = {token["content"] for token in vocabulary["added_tokens"]}

    def fields(writer: Any) -> None:
        tokens = sorted(ids, key=lambda token: ids[token])
        kinds = gguf.TokenType
        writer.add_tokenizer_model("gpt2")
        writer.add_tokenizer_pre("gpt-2")
        writer.add_token_list(tokens)
        writer.add_token_types([kinds.CONTROL if token in special else kinds.NORMAL for token in tokens])
        writer.add_token_merges([" ".join(merge) for merge in vocabulary["model"]["merges"]])
        writer.add_bos_token_id(0)
        writer.add_eos_token_id(1)
        writer.add_add_bos_token(True)
        writer.add_chat_template(settings["chat_template"])

    def form(name: str, weight: Any) -> tuple[Any, Any]:
        # The weights are bfloat16 already: the lower half of each is zero.
        return (weight.view(np.uint32) >> 16).astype(np.uint16).view(np.uint8), gguf.GGMLQuantizationType.BF16

    return convert(PATH, path, form, fields)


@pytest.fixture(scope="module")
def builtin(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_builtin(tmp_path_factory.mktemp("gguf") / "builtin.gguf")


def test_serve_answers_as_the_model_it_was_made_of(builtin: Path) -> None:
    params = SamplingParams(max_tokens=200, temperature=0)
    llm = LLM("builtin")
    (text,) = llm.generate(["Once upon a time"], params)
    (chat,) = llm.chat([QUESTION], params)
    with serve(str(builtin), "--served-model-name", "tales") as served:
        ask = {"model": "tales", "temperature": 0, "max_tokens": 200}
        body = httpx.post(f"{served.url}/v1/completions", json=ask | {"prompt": "Once upon a time"}, timeout=240).json()
        assert body["choices"][0]["text"] == text.outputs[0].text
        answer = httpx.post(f"{served.url}/v1/chat/completions", json=ask | {"messages": QUESTION}, timeout=240).json()
    assert answer["choices"][0]["message"]["content"] == chat.outputs[0].text
    assert answer["choices"][0]["finish_reason"] == "stop", "<|end|>, which only the token's kind tells, ends the turn"
    assert hub.eos_token_ids(builtin) == [1, 2]


def test_the_command_generates(builtin: Path) -> None:
    command = [sys.executable, "-m", "headrace", "generate", str(builtin), "--prompt", "Once upon", "--max-tokens", "9"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=110, check=False)
    assert done.returncode == 0, done.stderr
    assert len(done.stdout.split()) >= 3


def test_a_directory_with_one_file_means_that_file(builtin: Path, tmp_path: Path) -> None:
    assert hub.resolve(str(builtin.parent)) == builtin
    (tmp_path / "a.gguf").write_bytes(b"")
    (tmp_path / "b.gguf").write_bytes(b"")
    with pytest.raises(ModelNotFoundError, match="2 GGUF models"):
        hub.resolve(str(tmp_path))
    with pytest.raises(CheckpointError, match="magic"):
        build_runner(EngineConfig(model=str(tmp_path / "a.gguf")))


def test_flags_that_change_weights(builtin: Path, shared_data: Path) -> None:
    assert build_runner(EngineConfig(model=str(builtin), quantization="int4"))[1].quantization == "int4"
    with pytest.raises(CheckpointError, match=r"quantised already .* without quantization 'int4'"):
        build_runner(EngineConfig(model=str(GGUF_DATA / "TinyStories-656K.Q4_0.gguf"), quantization="int4"))


def test_what_runs_as_what_is_told_once(shared_data: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("INFO", logger="headrace"):
        build_runner(EngineConfig(model=str(GGUF_DATA / "stories260K.Q5_1.gguf"), backend="cpu"))
    output = [record.getMessage() for record in caplog.records if "run as" in record.getMessage()]
    assert [line.split(": ")[1].split(",")[0] for line in output] == [
        "5 of F16 run as float16",
        "1 of Q5_1 run as float16 (table)",
        "16 of Q5_1 run as int5 in groups of 32 with minima",
    ]


def test_doctor_knows_the_file(builtin: Path) -> None:
    facts = model_state(str(builtin))
    assert facts["model_type"] == "llama"
    assert facts["context_length"] == 1024
    assert facts["tokenizer"] is True


def test_benchmarks_count_with_the_files_tokenizer(builtin: Path) -> None:
    text = "a dog and a cat"
    assert find_tokenizer(str(builtin)).encode(text) == find_tokenizer("builtin").encode(text)
