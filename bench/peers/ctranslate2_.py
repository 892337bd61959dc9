"""CTranslate2: `Generator.generate_batch`, a static batch. int8 is per channel, activations are quantised per row."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bench.peers import protocol
from bench.peers.protocol import Job


class CTranslate2:
    def __init__(self, job: Job) -> None:
        import ctranslate2  # type: ignore[import-not-found]

        self._generator: Any = ctranslate2.Generator(
            job.model, device="cpu", compute_type=job.quant, inter_threads=1, intra_threads=job.threads
        )
        self.instructions = "not stated; oneDNN's or MKL's choice"
        self.weight_bytes: int | None = os.path.getsize(Path(job.model) / "model.bin")

    def prepare(self, num_seqs: int, length: int) -> None: ...

    def generate(self, prompts: Sequence[list[int]], num_new: int) -> int:
        results = self._generator.generate_batch(
            [[f"t{token_id}" for token_id in prompt] for prompt in prompts],
            max_length=num_new,
            min_length=num_new,
            sampling_topk=1,
            beam_size=1,
            include_prompt_in_result=False,
            end_token=[],
            max_batch_size=0,
        )
        return sum(len(result.sequences_ids[0]) for result in results)


def convert(job: Job) -> None:
    import ctranslate2

    converter = ctranslate2.converters.TransformersConverter(job.source, low_cpu_mem_usage=True)
    converter.convert(job.model, quantization=job.quant, force=True)


if __name__ == "__main__":
    protocol.main(CTranslate2, convert, ["ctranslate2", "transformers"])
