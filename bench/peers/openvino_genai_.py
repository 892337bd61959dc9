"""openvino-genai: the continuous-batching pipeline on the CPU plugin.

int4: symmetric, groups of 128, in every layer; int8: symmetric, per channel. Embedding and head are int8 in both, and
the cache's precision is the plugin's default.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bench.peers import protocol
from bench.peers.protocol import Job

CACHE_GIB = 2


class OpenVINO:
    def __init__(self, job: Job) -> None:
        import numpy
        import openvino  # type: ignore[import-not-found]
        import openvino_genai  # type: ignore[import-not-found]

        self._library, self._openvino, self._numpy = openvino_genai, openvino, numpy
        scheduler = openvino_genai.SchedulerConfig()
        scheduler.cache_size = CACHE_GIB
        scheduler.max_num_seqs = 64
        scheduler.max_num_batched_tokens = max(2048, job.max_len if job.prefix_caching else 0)
        scheduler.enable_prefix_caching = job.prefix_caching
        properties = {"INFERENCE_NUM_THREADS": job.threads}
        self._pipe: Any = openvino_genai.ContinuousBatchingPipeline(job.model, scheduler, "CPU", properties)
        capabilities = openvino.Core().get_property("CPU", "OPTIMIZATION_CAPABILITIES")
        cpu = [line for line in Path("/proc/cpuinfo").read_text().splitlines() if line.startswith("flags")]
        amx = ", AMX in the processor" if cpu and "amx_int8" in cpu[0] else ""
        self.instructions = f"precisions {', '.join(capabilities)}{amx}"
        self.weight_bytes: int | None = (Path(job.model) / "openvino_model.bin").stat().st_size

    def prepare(self, num_seqs: int, length: int) -> None: ...

    def generate(self, prompts: Sequence[list[int]], num_new: int) -> int:
        config = self._library.GenerationConfig()
        config.max_new_tokens = config.min_new_tokens = num_new
        config.ignore_eos = True
        config.do_sample = False
        config.apply_chat_template = False
        int64 = self._numpy.int64
        tensors = [self._openvino.Tensor(self._numpy.array([prompt], int64)) for prompt in prompts]
        results = self._pipe.generate(tensors, [config] * len(prompts))
        return sum(len(result.m_generation_ids[0]) for result in results)


def convert(job: Job) -> None:
    import openvino
    from openvino_tokenizers import convert_tokenizer  # type: ignore[import-not-found]
    from optimum.intel import OVModelForCausalLM, OVWeightQuantizationConfig  # type: ignore[import-not-found]
    from transformers import AutoTokenizer

    config = {
        "int4": OVWeightQuantizationConfig(bits=4, sym=True, group_size=128, ratio=1.0),
        "int8": OVWeightQuantizationConfig(bits=8, sym=True),
    }[job.quant]
    model = OVModelForCausalLM.from_pretrained(
        job.source, export=True, compile=False, load_in_8bit=False, quantization_config=config
    )
    model.save_pretrained(job.model)
    tokenizer = AutoTokenizer.from_pretrained(job.source)
    there, back = convert_tokenizer(tokenizer, with_detokenizer=True)
    openvino.save_model(there, Path(job.model) / "openvino_tokenizer.xml")
    openvino.save_model(back, Path(job.model) / "openvino_detokenizer.xml")


if __name__ == "__main__":
    protocol.main(OpenVINO, convert, ["openvino", "openvino-genai", "optimum-intel", "nncf"])
