"""Every type of model in its TINY form with random weights: the law on this device, and torch_ref's logits there.

In float32 cuda and torch_ref differ by the order of sums alone; in bfloat16, where products are those of the tensor
cores, by roundings. A type for whose operators there are no kernels is refused by name, which is no fault.
"""

from __future__ import annotations

import functools
import gc
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple
from unittest import mock

import numpy as np
import torch
from numpy.typing import NDArray

from bench.gpu.compiling import compile_all
from bench.gpu.device import Device
from bench.gpu.weights import BLOCK, make_model
from headrace import models
from headrace.backends.base import Program, SetUp
from headrace.backends.cuda import Cuda
from headrace.backends.cuda.launch import Launch
from headrace.backends.cuda.replay import Replay
from headrace.backends.step import Chunks
from headrace.backends.torch_ref import TorchRef
from headrace.checkpoint.names import text_config
from headrace.protocol.errors import CheckpointError

Result = dict[str, Any]
F32 = NDArray[np.float32]

LENGTH = 75
"""Positions of the sequence that is looked at: more than a tile of keys."""
WAYS = ([75], [64, *[1] * 11], [7, 30, 1, 37])
"""Its pieces. In the last it has a neighbour before it and one behind it."""
TOLERANCES = {"float32": 2e-4, "bfloat16": 0.1}
"""Of the largest logit: how far those of a position may lie from torch_ref's."""
OTHER_EXPERTS = {"float32": 0.0, "bfloat16": 0.1}
"""The share of positions that may lie farther: where a rounding changes the choice of experts."""
TOY_TYPES = ("llama", "gemma2")
PER_SEQ = -(-LENGTH // BLOCK)
SHAPES: dict[str, dict[str, Any]] = {
    "gpt-oss-20b": {
        "model_type": "gpt_oss", "hidden_size": 2880, "intermediate_size": 2880, "num_attention_heads": 64,
        "num_key_value_heads": 8, "head_dim": 64, "num_local_experts": 32, "num_experts_per_tok": 4,
        "num_hidden_layers": 2, "layer_types": ["sliding_attention", "full_attention"],
    },
    "Qwen3-30B-A3B": {
        "model_type": "qwen3_moe", "hidden_size": 2048, "num_attention_heads": 32, "num_key_value_heads": 4,
        "head_dim": 128, "moe_intermediate_size": 768, "num_experts": 128, "num_experts_per_tok": 8,
        "num_hidden_layers": 2, "mlp_only_layers": [],
    },
    "Qwen3.6-35B-A3B": {
        "model_type": "qwen3_5_moe_text", "hidden_size": 2048, "num_attention_heads": 16, "num_key_value_heads": 2,
        "head_dim": 256, "moe_intermediate_size": 512, "shared_expert_intermediate_size": 512, "num_experts": 256,
        "num_experts_per_tok": 8, "linear_num_key_heads": 16, "linear_num_value_heads": 32,
        "linear_key_head_dim": 128, "linear_value_head_dim": 128, "num_hidden_layers": 2,
        "layer_types": ["linear_attention", "full_attention"],
    },
    "DeepSeek-V2-Lite": {
        "model_type": "deepseek_v2", "hidden_size": 2048, "intermediate_size": 10944, "num_attention_heads": 16,
        "num_key_value_heads": 16, "kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64,
        "v_head_dim": 128, "n_routed_experts": 64, "num_experts_per_tok": 6, "moe_intermediate_size": 1408,
        "n_group": 1, "topk_group": 1, "topk_method": "greedy", "routed_scaling_factor": 1.0, "num_hidden_layers": 2,
    },
    "Gemma-4-26B-A4B": {
        "model_type": "gemma4_text", "hidden_size": 2816, "intermediate_size": 2112, "num_attention_heads": 16,
        "num_key_value_heads": 8, "head_dim": 256, "global_head_dim": 512, "num_global_key_value_heads": 2,
        "enable_moe_block": True, "num_experts": 128, "top_k_experts": 8, "moe_intermediate_size": 704,
        "num_kv_shared_layers": 0, "hidden_size_per_layer_input": 0, "num_hidden_layers": 2,
        "use_double_wide_mlp": False, "attention_k_eq_v": True,
        "layer_types": ["sliding_attention", "full_attention"],
    },
    "Nemotron-3-Nano-30B-A3B": {
        "model_type": "nemotron_h", "hidden_size": 2688, "intermediate_size": 1856, "num_attention_heads": 32,
        "num_key_value_heads": 2, "head_dim": 128, "mamba_num_heads": 64, "mamba_head_dim": 64, "n_groups": 8,
        "ssm_state_size": 128, "n_routed_experts": 128, "num_experts_per_tok": 6, "moe_intermediate_size": 1856,
        "moe_shared_expert_intermediate_size": 3712, "moe_latent_size": None, "mlp_bias": False,
        "num_hidden_layers": 3, "layers_block_type": ["linear_attention", "moe", "full_attention"],
    },
}  # fmt: skip
"""Real shapes, of few layers and few tokens of the vocabulary; what is not here is that of the type's TINY."""

CODES = (("gpt-oss-20b", "mxfp4 experts"), ("Qwen3-30B-A3B", "int4"), ("Qwen3-30B-A3B", "fp8-channel"))
"""Shapes whose experts are codes, and their quantisation."""


class Form(NamedTuple):
    """A model that is looked at. quantization: as `weights.RandomWeights` takes it."""

    name: str
    config: dict[str, Any]
    dtype: str
    quantization: str = ""

    @property
    def item(self) -> str:
        return f"family {self.name} {self.quantization or self.dtype}"

    def program(self, backend: Any) -> Program:
        """Return the random model over a cache for three sequences."""
        model: Any = make_model(text_config(self.config, models.names()), backend, self.quantization, 2 * LENGTH)
        pools = (4 * PER_SEQ,) * len(model.kinds)
        with mock.patch.object(Replay, "prepare"):
            program: Program = backend.program(model, SetUp(pools, BLOCK, backend.dtype, 4, 4 * LENGTH, 2 * PER_SEQ, 1))
        return program


def families(device: Device) -> Iterator[tuple[str, Callable[[], Result]]]:
    """An item for each type, then for each shape, then for the types in float32."""
    listed = list(forms(device.toy))
    if device.is_gpu:
        yield "compile families", lambda: compile_all(every_launch(device, listed))
    for form in listed:
        yield form.item, functools.partial(family, device, form)


def forms(toy: bool) -> Iterator[Form]:
    types = TOY_TYPES if toy else models.names()
    for name in types:
        yield Form(name, models.find(name).TINY, "bfloat16")
    for name, shape in SHAPES.items() if not toy else ():
        yield Form(name, models.find(shape["model_type"]).TINY | shape, "bfloat16")
    for name, quantization in CODES if not toy else ():
        shape = SHAPES[name]
        yield Form(name, models.find(shape["model_type"]).TINY | shape, "bfloat16", quantization)
    for name in types:
        yield Form(name, models.find(name).TINY, "float32")


def every_launch(device: Device, listed: Sequence[Form]) -> Iterator[Launch]:
    """Yield the launches of the steps of all forms in bfloat16, for as long as each program is there."""
    for form in listed:
        if form.dtype == "bfloat16":
            try:
                program: Any = form.program(Cuda(device.name, form.dtype))
            except CheckpointError:
                continue
            for rows in {size * turn for turn in (1, 3) for way in WAYS for size in way}:
                yield from (each for each in program.whole.launches(program.whole.bucket(rows)) if type(each) is Launch)
                yield from (
                    each for each in program.head.launches(program.head.bucket(min(rows, 4))) if type(each) is Launch
                )
            release(program)


def release(program: Program) -> None:
    program.close()
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def family(device: Device, form: Form) -> Result:
    """Logits of all positions in all ways, and torch_ref's."""
    try:
        program = form.program(Cuda(device.name, form.dtype))
    except CheckpointError as error:
        return {"refused": str(error), "fault": "" if "has no kernels for" in str(error) else "it does not load"}
    rng = np.random.default_rng(5)
    tokens = [rng.integers(3, program.vocab_size, LENGTH).tolist() for _ in range(3)]
    whole, *others = [logits(program, tokens[: 3 if way is WAYS[-1] else 1], way) for way in WAYS]
    release(program)
    wrong = [
        f"{int((other != whole).any(1).sum())} positions in pieces of {way[:4]}"
        for other, way in zip(others, WAYS[1:], strict=True)
        if other.tobytes() != whole.tobytes()
    ]
    reference = form.program(TorchRef(device.name, form.dtype))
    expected = logits(reference, tokens[:1], WAYS[0])
    release(reference)
    distances = np.abs(whole - expected).max(1) / np.abs(expected).max()
    far = float(np.quantile(distances, 1 - OTHER_EXPERTS[form.dtype], method="higher"))
    same = float((whole.argmax(1) == expected.argmax(1)).mean())
    faults = [f"other bits: {', '.join(wrong)}"] * bool(wrong)
    if not far <= TOLERANCES[form.dtype]:
        faults.append(f"logits differ from torch_ref's by {far:.3g}")
    return {
        "distance": far,
        "farthest": float(distances.max()),
        "same_best": same,
        "wrong": len(wrong),
        "fault": "; ".join(faults),
    }


def logits(program: Program, tokens: Sequence[list[int]], way: Sequence[int]) -> F32:
    """Return the logits [LENGTH, V] of the first sequence, in pieces of `way`. Others run beside it: the second one
    before it in a batch, the rest behind it. States go to two slots of each sequence in turn."""
    outs, start = [], 0
    order = [1, 0, *range(2, len(tokens))] if len(tokens) > 1 else [0]
    for turn, size in enumerate(way):
        rows = len(order) * size
        begin = order.index(0) * size
        chunks = Chunks(
            [start] * len(order),
            [tokens[i][start : start + size] for i in order],
            [[(i * PER_SEQ + block) for block in range(PER_SEQ)] for i in order],
            states_in=[2 * i + (turn - 1) % 2 if turn else -1 for i in order],
            states_out=[((place + 1) * size - 1, 2 * i + turn % 2) for place, i in enumerate(order)],
        )
        finite, _ = program.forward(chunks.all_read(), [])
        if not all(finite):
            raise RuntimeError(f"numbers of {rows} rows from position {start} on are not finite")
        listed, most = list(range(begin, begin + size)), program.max_logits
        outs += [program.logits(listed[i : i + most]).fetch().copy() for i in range(0, size, most)]
        start += size
    return np.concatenate(outs)
