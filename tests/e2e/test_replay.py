"""The built-in model, recorded with all that has a clock or a thread in it, and run again by the command."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest

from headrace import LLM, SamplingParams
from headrace.cli.replay import replay
from headrace.engine.records.recording import MAGIC, StepEnd
from headrace.engine.records.replay import ReplayDifference, read
from headrace.protocol.constraints import StructuredOutputs

SCHEMA = {"type": "object", "properties": {"name": {"type": "string", "maxLength": 12}, "n": {"type": "integer"}}}


@pytest.fixture(scope="module")
def log(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("log") / "schedule"
    llm = LLM(
        "builtin", num_gpu_blocks_override=16, max_num_batched_tokens=64, max_num_seqs=8, max_model_len=256,
        num_threads=1, speculative_config={"method": "ngram", "num_speculative_tokens": 4},
        record_schedule=str(path),
    )  # fmt: skip
    text = "Once upon a time there was a dog. The dog was a good dog. The dog was a good"
    params: list[Any] = [
        SamplingParams(max_tokens=40, temperature=0.8 * (i % 2), seed=i, logprobs=2, ignore_eos=True) for i in range(6)
    ]
    params.append(SamplingParams(max_tokens=30, seed=7, structured_outputs=StructuredOutputs(json=json.dumps(SCHEMA))))
    params.append(SamplingParams(max_tokens=20, seed=8, prompt_logprobs=1, n=2))
    llm.generate([text + " cat" * i for i in range(8)], params, use_tqdm=False)
    llm.embed([text], use_tqdm=False)
    stats = llm.get_metrics()
    assert stats.num_draft_tokens > 0
    assert stats.num_preemptions > 0
    llm.close()
    return path


def test_what_the_model_did_it_does_again(log: Path, capsys: pytest.CaptureFixture[str]) -> None:
    records = [record for record in read(log) if isinstance(record, StepEnd)]
    assert any(record.times for record in records), "the pace of speculation goes by a clock"
    assert any(record.late for record in records), "masks were waited for"
    replay(log)
    printed = capsys.readouterr().out
    assert f"{len(records):,} steps of 10 requests" in printed
    assert "are the same to the bit" in printed


def test_control_one_bit_is_noticed(log: Path, tmp_path: Path) -> None:
    records = list(read(log))
    [*_, result] = [record for record in records if isinstance(record, StepEnd) and record.result.column("logprob")]
    [at, *_] = result.result.column("logprob")
    old = result.result.column("logprob")[at]
    result.result.rows[at].logprob = msgspec.structs.replace(old, logprob=old.logprob * (1 + 2**-52))
    frames = [msgspec.msgpack.encode(record) for record in records]
    (tmp_path / "log").write_bytes(MAGIC + b"".join(len(f).to_bytes(4, "little") + f for f in frames))
    with pytest.raises(ReplayDifference) as error:
        replay(tmp_path / "log")
    assert (error.value.step_id, error.value.what) == (result.result.step_id, "logprob")
