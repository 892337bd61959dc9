"""onnxruntime-genai: a static batch; the model is made by its own builder with the builder's defaults for the CPU
(int4: symmetric, groups of 32, int8 activations, the head as well)."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from bench.peers import protocol
from bench.peers.protocol import Job


class OnnxRuntime:
    def __init__(self, job: Job) -> None:
        import numpy
        import onnxruntime_genai  # type: ignore[import-not-found]

        self._library, self._numpy = onnxruntime_genai, numpy
        self._model = onnxruntime_genai.Model(job.model)
        self.instructions = "not stated; MLAS's choice"
        self.weight_bytes: int | None = sum(file.stat().st_size for file in Path(job.model).glob("*.data"))

    def prepare(self, num_seqs: int, length: int) -> None: ...

    def generate(self, prompts: Sequence[list[int]], num_new: int) -> int:
        ids = self._numpy.array(prompts, self._numpy.int32)
        length = len(prompts[0]) + num_new
        params = self._library.GeneratorParams(self._model)
        params.set_search_options(max_length=length, min_length=length, do_sample=False, batch_size=len(prompts))
        generator = self._library.Generator(self._model, params)
        generator.append_tokens(ids)
        for _ in range(num_new):
            generator.generate_next_token()
        return sum(len(generator.get_sequence(i)) - len(prompt) for i, prompt in enumerate(prompts))


def convert(job: Job) -> None:
    out = Path(job.model)
    builder = [sys.executable, "-m", "onnxruntime_genai.models.builder", "-i", job.source, "-o", job.model]
    cache = out.with_name(out.name + "-cache")
    subprocess.run([*builder, "-p", job.quant, "-e", "cpu", "-c", str(cache)], check=True)
    path = out / "genai_config.json"
    config = json.loads(path.read_text())
    config["model"]["decoder"]["session_options"]["intra_op_num_threads"] = job.threads
    path.write_text(json.dumps(config, indent=4))


if __name__ == "__main__":
    protocol.main(OnnxRuntime, convert, ["onnxruntime-genai", "onnxruntime"])
