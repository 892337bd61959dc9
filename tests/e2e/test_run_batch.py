"""`headrace run-batch` on the built-in model: killed in the middle and taken up again, it ends with the same file."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from tests.support.shallow import shallow

from headrace import LLM
from headrace.protocol.params import SamplingParams

HEADRACE = str(Path(sys.executable).parent / "headrace")
VOLATILE = ("created", "timings", "created_at", "completed_at", "prompt_tokens_details", "input_tokens_details")
"""What tells of the run and not of the answer: times, and what the cache happened to have."""


def requests() -> list[dict[str, Any]]:
    result: list[tuple[str, dict[str, Any]]] = []
    for i in range(4):
        result.append(("/v1/completions", {"prompt": f"Once upon a time {i}", "max_tokens": 40, "ignore_eos": True}))
        messages = [{"role": "user", "content": f"Tell me story {i}."}]
        result.append(("/v1/chat/completions", {"messages": messages, "max_tokens": 24, "temperature": 0}))
        result.append(("/v1/embeddings", {"input": [f"text {i}", "a cat"], "encoding_format": "base64"}))
        result.append(("/v1/responses", {"input": f"Question {i}", "max_output_tokens": 24}))
    return [{"custom_id": f"q{i}", "method": "POST", "url": url, "body": body} for i, (url, body) in enumerate(result)]


def command(source: Path, target: Path) -> list[str]:
    options = ["--model", shallow(), "--num-threads", "1", "--num-gpu-blocks-override", "512", "--max-concurrency", "2"]
    return [HEADRACE, "run-batch", "-i", str(source), "-o", str(target), *options]


def plain(value: Any) -> Any:
    """Without what is volatile."""
    if isinstance(value, dict):
        return {key: plain(inner) for key, inner in value.items() if key not in VOLATILE}
    return [plain(inner) for inner in value] if isinstance(value, list) else value


def contents(path: Path) -> list[str]:
    return sorted(json.dumps(plain(json.loads(text)), sort_keys=True) for text in path.read_bytes().splitlines())


def test_killed_and_taken_up_again_is_the_same_file(tmp_path: Path) -> None:
    source, whole, target = tmp_path / "in.jsonl", tmp_path / "whole.jsonl", tmp_path / "out.jsonl"
    source.write_text("".join(json.dumps(request) + "\n" for request in requests()) + "{nonsense\n")
    done = subprocess.run(command(source, whole), timeout=110, capture_output=True, text=True)
    assert done.returncode == 3, done.stderr
    assert "17 lines: 0 answered before, 16 answered now, 1 errors" in done.stderr
    process = subprocess.Popen(command(source, target), stderr=subprocess.DEVNULL)
    deadline = time.monotonic() + 100
    while not target.exists() or target.read_bytes().count(b"\n") < 4:
        assert process.poll() is None, "it ended before it was killed"
        assert time.monotonic() < deadline
        time.sleep(0.002)
    process.kill()
    process.wait()
    known = target.read_bytes().count(b"\n")
    assert 4 <= known < 17
    # And as if the last write had been cut short.
    with open(target, "ab") as file:
        file.write(b'{"id":"batch_req_0","custom_id":"q7","resp')
    done = subprocess.run(command(source, target), timeout=110, capture_output=True, text=True)
    assert done.returncode == 3, done.stderr
    assert contents(target) == contents(whole)
    again = subprocess.run(command(source, target), timeout=110, capture_output=True, text=True)
    assert "16 answered before, 0 answered now, 1 errors" in again.stderr


def test_the_answers_are_those_of_the_library(tmp_path: Path) -> None:
    source, target = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    body = {"prompt": "Once upon a time", "max_tokens": 12, "seed": 5, "temperature": 0.8}
    vector = {"input": "Once upon a time"}
    lines = [{"custom_id": "a", "method": "POST", "url": "/v1/completions", "body": body}]
    lines.append({"custom_id": "b", "method": "POST", "url": "/v1/embeddings", "body": vector})
    source.write_text("".join(json.dumps(text) + "\n" for text in lines))
    options = ["--generation-config", "headrace"]
    done = subprocess.run([*command(source, target), *options], timeout=110, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    outputs = [json.loads(line) for line in target.read_text().splitlines()]
    result = {output["custom_id"]: output["response"]["body"] for output in outputs}
    llm = LLM(shallow(), num_gpu_blocks_override=256, num_threads=1)
    [outcome] = llm.generate("Once upon a time", SamplingParams(max_tokens=12, seed=5, temperature=0.8), use_tqdm=False)
    assert result["a"]["choices"][0]["text"] == outcome.outputs[0].text
    assert result["b"]["data"][0]["embedding"] == llm.embed("Once upon a time", use_tqdm=False)[0].outputs.embedding
    llm.close()


@pytest.mark.parametrize(
    ("arguments", "reply"),
    [
        (["no-such-file", "out"], "INPUT"),
        (["-i", "in"], "OUTPUT once"),
        (["in", "out", "-o", "out"], "OUTPUT once"),
        (["in", "in"], "another file"),
        (["in", "out", "--block-size", "0"], "block_size"),
    ],
)
def test_bad_commands_end_at_once(tmp_path: Path, arguments: list[str], reply: str) -> None:
    (tmp_path / "in").write_text("{}\n")
    done = subprocess.run([HEADRACE, "run-batch", *arguments], cwd=tmp_path, timeout=60, capture_output=True, text=True)
    assert done.returncode == 2
    assert reply in done.stderr
