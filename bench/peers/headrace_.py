"""headrace itself, measured as the peers are: `LLM.generate` on token ids, greedy, each answer to its full length.

Runs in the environment that started the comparison, on packed weights. The prefix cache is off but for the work that
is about it.
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bench.peers import protocol
from bench.peers.protocol import Job


def cache_bytes(job: Job) -> int:
    """Room for keys and values of the job's context: f32, or int8 and a float for each head."""
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
        "num_threads": job.threads,
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
        self.weight_bytes: int | None = packed_bytes(Path(job.model))
        from headrace.backends.native import require_native

        self.instructions = ", ".join(sorted(set(require_native().served("").values())))

    def prepare(self, num_seqs: int, length: int) -> None: ...

    def generate(self, prompts: Sequence[list[int]], num_new: int) -> int:
        params = self._params(temperature=0.0, max_tokens=num_new, ignore_eos=True)
        outputs = self._llm.generate([{"prompt_token_ids": prompt} for prompt in prompts], params, use_tqdm=False)
        return sum(len(output.outputs[0].token_ids) for output in outputs)

    def seconds_between(self, prompt: list[int], num_new: int) -> float:
        params = self._params(temperature=0.0, max_tokens=num_new, ignore_eos=True)
        [output] = self._llm.generate([{"prompt_token_ids": prompt}], params, use_tqdm=False)
        if output.metrics is None or output.metrics.decode_time is None:
            raise RuntimeError("the engine gave no decode time")
        return output.metrics.decode_time


def packed_bytes(folder: Path) -> int | None:
    """Size of the packed weights, which is what a token reads: the embedding stays in the checkpoint."""
    files = sorted(folder.glob("headrace-*.packed"), key=lambda path: path.stat().st_mtime)
    return files[-1].stat().st_size if files else None


def convert(job: Job) -> None:
    """Links to the checkpoint, and the packed weights beside them; made anew where the kernels' layout has changed."""
    import headrace

    folder = Path(job.model)
    folder.mkdir(parents=True, exist_ok=True)
    for file in ("model.safetensors", "config.json"):
        link = folder / file
        if not link.is_symlink():
            link.symlink_to(os.path.relpath(Path(job.source) / file, folder))
    headrace.LLM(job.model, **fields(job), save_packed=True).close()
    if packed_bytes(folder) is None:
        raise RuntimeError(f"there are no packed weights in {folder}")


if __name__ == "__main__":
    protocol.main(Headrace, convert, ["headrace", "torch"])
