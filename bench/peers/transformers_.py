"""transformers: eager torch, a static batch, weights as they are stored (bf16) or widened (fp32)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from bench.peers import protocol
from bench.peers.protocol import Job


class Transformers:
    def __init__(self, job: Job) -> None:
        import torch
        from transformers import AutoModelForCausalLM

        torch.set_num_threads(job.threads)
        dtype = {"bf16": torch.bfloat16, "fp32": torch.float32}[job.quant]
        model: Any = AutoModelForCausalLM
        self._model = model.from_pretrained(job.source, dtype=dtype).eval()
        # A tied head is one parameter, and read once for each token.
        self.instructions = protocol.torch_instructions()
        self.weight_bytes: int | None = sum(p.numel() * p.element_size() for p in self._model.parameters())

    def prepare(self, num_seqs: int, length: int) -> None: ...

    def generate(self, prompts: Sequence[list[int]], num_new: int) -> int:
        import torch

        ids = torch.tensor(prompts)
        with torch.inference_mode():
            out = self._model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                max_new_tokens=num_new,
                min_new_tokens=num_new,
                do_sample=False,
                pad_token_id=257,
            )
        return int((out.shape[1] - ids.shape[1]) * out.shape[0])


def convert(job: Job) -> None:
    """Nothing: it reads the checkpoint."""


if __name__ == "__main__":
    protocol.main(Transformers, convert, ["transformers", "torch"])
