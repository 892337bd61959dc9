"""headrace itself, measured as the peers are: `LLM.generate` on token ids, greedy, each answer to its full length.

Runs in the environment that started the comparison. The prefix cache is off but for the work that is about it.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bench.peers import protocol
from bench.peers.protocol import Job


def cache_bytes(job: Job) -> int:
    """Room for keys and values of the job's context: f32, or where it wants int8, that and a float for each head."""
    config = json.loads((Path(job.source) / "config.json").read_text())
    head = config["head_dim"] + 4 if job.kv_cache_dtype == "int8" else config["head_dim"] * 4
    return int(job.kv_tokens * config["num_hidden_layers"] * 2 * config["num_key_value_heads"] * head)


def fields(job: Job) -> dict[str, Any]:
    """The `EngineConfig` of a job, less the model."""
    chosen: dict[str, Any] = {
        "max_num_seqs": max(job.num_seqs, 1),
        "max_model_len": job.max_len,
        "enable_prefix_caching": job.prefix_caching,
        "skip_tokenizer_init": True,
        "kv_cache_memory_bytes": cache_bytes(job),
    }
    if job.quant != "none":
        chosen["quantization"] = job.quant
    if job.kv_cache_dtype:
        chosen["kv_cache_dtype"] = job.kv_cache_dtype
    return chosen


class Headrace:
    def __init__(self, job: Job) -> None:
        import headrace

        self._params = headrace.SamplingParams
        self._llm = headrace.LLM(job.model, **fields(job))
        told = getattr(self._llm, "weight_bytes", None)
        self.weight_bytes: int | None = int(told() if callable(told) else told) if told is not None else None

    def prepare(self, num_seqs: int, length: int) -> None: ...

    def generate(self, prompts: Sequence[list[int]], num_new: int) -> int:
        params = self._params(temperature=0.0, max_tokens=num_new, ignore_eos=True)
        outputs = self._llm.generate([{"prompt_token_ids": prompt} for prompt in prompts], params, use_tqdm=False)
        return sum(len(output.outputs[0].token_ids) for output in outputs)

    def seconds_between(self, prompt: list[int], num_new: int) -> float:
        params = self._params(temperature=0.0, max_tokens=num_new, ignore_eos=True)
        [output] = self._llm.generate([{"prompt_token_ids": prompt}], params, use_tqdm=False)
        if output.metrics is None or output.metrics.decode_time is None:
            raise RuntimeError("the engine told no decode time")
        return output.metrics.decode_time


def convert(job: Job) -> None:
    """Nothing yet that the engine would not do while it loads."""


if __name__ == "__main__":
    protocol.main(Headrace, convert, ["headrace", "torch"])
