"""EleutherAI's `lm-eval` against the live server: the same score, and the same numbers, as `transformers` gives.

It is a large package with many dependencies, so it lives in an environment of its own: `make test-lm-eval` makes that
and runs this test; without it the test is skipped. No network: the task is a file of this test.
"""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.support.harness import save_random
from tests.support.server import write_tokenizer
from tests.support.serving import serve

from headrace.models import llama

ROOT = Path(__file__).resolve().parents[2]
PLACES = (ROOT / "build" / "lm-eval" / "bin" / "lm_eval", Path(sys.executable).parent / "lm_eval")

TASK = """
task: tiny_{name}
dataset_path: json
dataset_kwargs:
  data_files: {data}
test_split: train
output_type: {kind}
doc_to_text: "{text}"
{rest}
"""
CHOICE = """doc_to_choice: choices
doc_to_target: label
metric_list:
  - metric: acc
  - metric: acc_norm
"""
WORDS = "the a cat dog sat ran on under mat tree and then it was very old blue away".split()


@pytest.fixture(scope="module")
def lm_eval() -> str:
    for place in PLACES:
        if place.is_file():
            return str(place)
    pytest.skip("lm-eval is not installed; make test-lm-eval does it")


def documents(num: int) -> list[dict[str, Any]]:
    noise = random.Random(0)

    def words(least: int, most: int) -> str:
        return " ".join(noise.choices(WORDS, k=noise.randint(least, most)))

    return [
        {"text": words(2, 30), "choices": [words(1, 5) for _ in range(4)], "label": noise.randrange(4)}
        for _ in range(num)
    ]


def checkpoint(directory: Path) -> Any:
    """A random model over bytes, and a tokenizer that `transformers` reads too."""
    model = save_random(llama.TINY | {"vocab_size": 256, "eos_token_id": 255, "bos_token_id": None}, directory)
    write_tokenizer(directory)
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<eos>", "pad_token": "<eos>"}
    (directory / "tokenizer_config.json").write_text(json.dumps(config))
    return model


def evaluate(
    lm_eval: str, tmp_path: Path, tasks: str, url: str, batch_size: int = 1, **settings: Any
) -> dict[str, Any]:
    """Run the harness. -> its results, with its samples by task."""
    inputs = {"model": "tiny", "base_url": f"{url}/v1/completions", "tokenizer": str(tmp_path / "model"), **settings}
    args = ",".join(f"{name}={value}" for name, value in (inputs | {"tokenizer_backend": "huggingface"}).items())
    out = tmp_path / f"out-{len(list(tmp_path.glob('out-*')))}"
    command = [lm_eval, "run", "--model", "local-completions", "--model_args", args, "--tasks", tasks]
    command += ["--include_path", str(tmp_path / "tasks"), "--output_path", str(out), "--log_samples"]
    command += ["--batch_size", str(batch_size)]
    offline = {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "HF_HOME": str(tmp_path / "hf")}
    offline |= {"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
    done = subprocess.run(command, env=os.environ | offline, capture_output=True, text=True, timeout=400)
    assert done.returncode == 0, done.stderr[-3000:]
    [result] = out.rglob("results_*.json")
    results: dict[str, Any] = json.loads(result.read_text())
    samples = {path.name.split("_20")[0].removeprefix("samples_"): path for path in out.rglob("samples_*.jsonl")}
    results["samples"] = {
        name: [json.loads(line) for line in path.read_text().splitlines()] for name, path in samples.items()
    }
    return results


def loglikelihood(model: Any, context: bytes, continuation: bytes) -> tuple[float, bool]:
    """Natural log of the continuation's probability after the context, and whether greedy decoding gives it."""
    ids = torch.tensor([list(context + continuation)])
    with torch.inference_mode():
        logprobs = torch.log_softmax(model(ids).logits[0, len(context) - 1 : -1].double(), dim=-1)
    target_ids = ids[0, len(context) :]
    return float(logprobs.gather(1, target_ids[:, None]).sum()), bool((logprobs.argmax(dim=-1) == target_ids).all())


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_the_score_is_that_of_transformers(lm_eval: str, tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    (tmp_path / "tasks").mkdir()
    model = checkpoint(tmp_path / "model")
    docs = documents(24)
    data = tmp_path / "docs.jsonl"
    data.write_text("".join(json.dumps(doc) + "\n" for doc in docs))
    texts = {
        "choice": ("multiple_choice", "{{text}}", CHOICE),
        "rolling": (
            "loglikelihood_rolling",
            "",
            'doc_to_target: "{{text}}"\nmetric_list:\n  - metric: byte_perplexity\n',
        ),
    }
    for name, (kind, text, rest) in texts.items():
        result = TASK.format(name=name, data=data, kind=kind, text=text, rest=rest)
        (tmp_path / "tasks" / f"{name}.yaml").write_text(result)
    arguments = (str(tmp_path / "model"), "--served-model-name", "tiny", "--dtype", "float32", "--num-threads", "1")
    with serve(*arguments, "--num-gpu-blocks-override", "256") as served:
        results = evaluate(lm_eval, tmp_path, "tiny_choice,tiny_rolling", served.url, num_concurrent=4)
        again = evaluate(lm_eval, tmp_path, "tiny_choice", served.url, num_concurrent=1, batch_size=6)
    num_right = 0
    num_compared = 0
    for sample in results["samples"]["tiny_choice"]:
        doc = docs[sample["doc_id"]]
        # The harness puts a space between the two.
        want = [loglikelihood(model, doc["text"].encode(), b" " + choice.encode()) for choice in doc["choices"]]
        got = [(float(value), greedy in (True, "True")) for value, greedy in (r[0] for r in sample["resps"])]
        for (value, greedy), (expected_score, own_greedy) in zip(got, want, strict=True):
            assert value == pytest.approx(expected_score, abs=2e-3)
            assert greedy == own_greedy
            num_compared += 1
        num_right += max(range(4), key=lambda i: want[i][0]) == doc["label"]
    assert num_compared == 96
    assert results["results"]["tiny_choice"]["acc,none"] == pytest.approx(num_right / len(docs))
    assert 0 < num_right < len(docs)
    # In batches, one call at a time and with a warm cache: the same bits.
    by_id = {sample["doc_id"]: sample["resps"] for sample in results["samples"]["tiny_choice"]}
    assert {sample["doc_id"]: sample["resps"] for sample in again["samples"]["tiny_choice"]} == by_id
    total, num_bytes = 0.0, 0
    for sample in results["samples"]["tiny_rolling"]:
        text = docs[sample["doc_id"]]["text"].encode()
        expected_score, _ = loglikelihood(model, b"\xff", text)
        assert float(sample["resps"][0][0]) == pytest.approx(expected_score, abs=5e-3)
        total, num_bytes = total + expected_score, num_bytes + len(text)
    want_perplexity = float(torch.exp(torch.tensor(-total / num_bytes)))
    assert results["results"]["tiny_rolling"]["byte_perplexity,none"] == pytest.approx(want_perplexity, rel=1e-4)
