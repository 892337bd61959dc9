"""GGUF files of mixtures of experts of real shape, with random codes, written tensor by tensor: no float of the model
ever exists. headrace and llama.cpp load them. Called by `bench.mixtures`.

The shapes come from the models' config.json, except for Gemma-4-26B-A4B, whose shape is put together from published
figures (25.2 billion weights, of which a token goes through 3.8).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from headrace.quantize import gguf_file
from headrace.quantize.gguf_file import U8, Tensor, Value

PIECE = 2**24
"""Bytes that are made at once."""


class States(NamedTuple):
    """Layers with the gated delta rule. size: of a head, of keys as of values. conv: positions of the convolution."""

    key_heads: int
    heads: int
    size: int
    conv: int = 4


class Shape(NamedTuple):
    """active: of the experts of a layer, those that a token goes through."""

    architecture: str
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    inner: int
    experts: int
    active: int
    vocab: int
    theta: float
    kind: str
    """The GGUF type of the experts."""
    dense_kind: str
    """That of attention; table and head are Q8_0."""
    window: int = 0
    context: int = 40960
    turned: int = 0
    """Numbers of a head that turn with the position; 0: all."""
    dense_inner: int = 0
    """Width of the MLP beside the experts, or of the shared expert."""
    period: int = 0
    """Each period-th layer sees all positions; the others see a window, or keep a state."""
    wide: tuple[int, int] = (0, 0)
    """(kv heads, numbers of a head) of layers that see all positions, where those differ; keys are values there."""
    states: States | None = None

    def is_full(self, layer_id: int) -> bool:
        return not self.period or (layer_id + 1) % self.period == 0


QWEN, GPT = ("Q4_0", "Q4_0"), ("MXFP4", "Q8_0")
SHAPES = {
    "qwen3-30b-a3b": Shape("qwen3moe", 48, 2048, 32, 4, 128, 768, 128, 8, 151936, 1e6, *QWEN),
    "gpt-oss-20b": Shape("gpt-oss", 24, 2880, 64, 8, 64, 2880, 32, 4, 201088, 150000.0, *GPT, 128, 131072),
    "qwen3.6-35b-a3b": Shape(
        "qwen35moe", 40, 2048, 16, 2, 256, 512, 256, 8, 248320, 1e7, *QWEN,
        context=262144, turned=64, dense_inner=512, period=4, states=States(16, 32, 128),
    ),
    "gemma-4-26b-a4b": Shape(
        "gemma4", 30, 2816, 16, 8, 256, 704, 128, 8, 262144, 1e6, *QWEN, 1024,
        context=262144, dense_inner=2112, period=6, wide=(2, 512),
    ),
    # The cache of gpt-oss-20b behind narrow matrices, for long prompts.
    "narrow-gpt-oss": Shape("gpt-oss", 24, 512, 8, 8, 64, 512, 8, 2, 1024, 150000.0, *GPT, 128, 131072),
    "tiny": Shape("qwen3moe", 2, 256, 4, 2, 64, 128, 8, 2, 1024, 1e6, *QWEN),
    "tiny-gpt-oss": Shape("gpt-oss", 2, 64, 4, 2, 32, 32, 5, 2, 1024, 150000.0, *GPT, 24, 131072),
    "tiny-qwen3.6": Shape(
        "qwen35moe", 4, 64, 4, 2, 32, 32, 8, 2, 1024, 1e7, *QWEN,
        turned=8, dense_inner=64, period=4, states=States(2, 4, 32),
    ),
    "tiny-gemma-4": Shape(
        "gemma4", 4, 64, 4, 2, 32, 32, 8, 2, 1024, 1e6, *QWEN, 24, dense_inner=96, period=2, wide=(1, 64)
    ),
}  # fmt: skip


def fields_of(shape: Shape) -> dict[str, Value]:
    """Return the metadata of the file, without a vocabulary."""
    full_head = shape.wide[1] or shape.head_dim
    values: dict[str, Value] = {
        "context_length": shape.context,
        "embedding_length": shape.hidden,
        "block_count": shape.layers,
        "feed_forward_length": shape.dense_inner or shape.inner,
        "attention.head_count": shape.heads,
        "attention.head_count_kv": shape.kv_heads,
        "attention.key_length": full_head,
        "attention.value_length": full_head,
        "attention.layer_norm_rms_epsilon": 1e-6,
        "vocab_size": shape.vocab,
        "rope.dimension_count": shape.turned or full_head,
        "rope.freq_base": shape.theta,
        "expert_count": shape.experts,
        "expert_used_count": shape.active,
        "expert_feed_forward_length": shape.inner,
    }
    if shape.window:
        values["attention.sliding_window"] = shape.window
    if shape.architecture == "gpt-oss":
        values |= {
            "rope.scaling.type": "yarn",
            "rope.scaling.factor": 32.0,
            "rope.scaling.original_context_length": 4096,
        }
    if shape.states is not None:
        half = shape.turned // 2
        sections = [-(-half // 3), (half + 1) // 3, half // 3]
        values |= {
            "rope.dimension_sections": [*sections, 0],
            "full_attention_interval": shape.period,
            "expert_shared_feed_forward_length": shape.dense_inner,
            "ssm.conv_kernel": shape.states.conv,
            "ssm.state_size": shape.states.size,
            "ssm.group_count": shape.states.key_heads,
            "ssm.time_step_rank": shape.states.heads,
            "ssm.inner_size": shape.states.heads * shape.states.size,
        }
    if shape.architecture == "gemma4":
        is_full = [shape.is_full(i) for i in range(shape.layers)]
        values |= {
            "attention.head_count_kv": [shape.wide[0] if full else shape.kv_heads for full in is_full],
            "attention.key_length_swa": shape.head_dim,
            "attention.value_length_swa": shape.head_dim,
            "attention.sliding_window_pattern": [not full for full in is_full],
            "attention.shared_kv_layers": 0,
            "embedding_length_per_layer_input": 0,
            "final_logit_softcapping": 30.0,
            "rope.dimension_count_swa": shape.head_dim,
            "rope.freq_base_swa": 10000.0,
        }
    named: dict[str, Value] = {f"{shape.architecture}.{key}": value for key, value in values.items()}
    return {"general.architecture": shape.architecture, **named, "tokenizer.ggml.model": "no_vocab"}


def tensors_of(shape: Shape) -> list[Tensor]:
    """Return the tensors of the file in its order."""
    tensors = [Tensor("token_embd.weight", "Q8_0", (shape.vocab, shape.hidden))]
    if shape.architecture == "gemma4":  # its table is its head; these divide the frequencies of the full layers
        tensors.append(Tensor("rope_freqs.weight", "F32", (shape.wide[1] // 2,)))
    for i in range(shape.layers):
        parts = [*LAYERS[shape.architecture](shape, i), *_experts(shape)]
        tensors += [tensor._replace(name=f"blk.{i}.{tensor.name}") for tensor in parts]
    tensors.append(Tensor("output_norm.weight", "F32", (shape.hidden,)))
    if shape.architecture != "gemma4":
        tensors.append(Tensor("output.weight", "Q8_0", (shape.vocab, shape.hidden)))
    return tensors


def _floats(**sizes: tuple[int, ...]) -> list[Tensor]:
    return [Tensor(f"{name}.weight", "F32", size) for name, size in sizes.items()]


def _matrices(shape: Shape, **sizes: tuple[int, int]) -> list[Tensor]:
    return [Tensor(f"{name}.weight", shape.dense_kind, size) for name, size in sizes.items()]


def _attention(shape: Shape, queries: int = 1) -> list[Tensor]:
    """queries: 2 where each head's gate lies behind its query."""
    q, kv, hidden = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim, shape.hidden
    return _matrices(
        shape, attn_q=(queries * q, hidden), attn_k=(kv, hidden), attn_v=(kv, hidden), attn_output=(hidden, q)
    )


def _experts(shape: Shape) -> list[Tensor]:
    num, inner, hidden = shape.experts, shape.inner, shape.hidden
    sizes = {"ffn_gate_exps": (inner, hidden), "ffn_up_exps": (inner, hidden), "ffn_down_exps": (hidden, inner)}
    if shape.architecture == "gemma4":
        sizes = {"ffn_gate_up_exps": (2 * inner, hidden), "ffn_down_exps": (hidden, inner)}
    tensors = _floats(ffn_gate_inp=(num, hidden))
    tensors += [Tensor(f"{name}.weight", shape.kind, (num, *size)) for name, size in sizes.items()]
    if shape.architecture == "gpt-oss":
        tensors += [Tensor(f"{name}.bias", "F32", (num, size[0])) for name, size in sizes.items()]
        tensors.append(Tensor("ffn_gate_inp.bias", "F32", (num,)))
    elif shape.architecture == "gemma4":
        tensors += [Tensor("ffn_gate_inp.scale", "F32", (hidden,)), Tensor("ffn_down_exps.scale", "F32", (num,))]
    return tensors


def _qwen3(shape: Shape, layer_id: int) -> list[Tensor]:
    hidden, head = (shape.hidden,), (shape.head_dim,)
    return _floats(attn_norm=hidden, ffn_norm=hidden, attn_q_norm=head, attn_k_norm=head) + _attention(shape)


def _gpt_oss(shape: Shape, layer_id: int) -> list[Tensor]:
    norms = _floats(attn_norm=(shape.hidden,), post_attention_norm=(shape.hidden,), attn_sinks=(shape.heads,))
    matrices = _attention(shape)
    biases = [Tensor(each.name.replace("weight", "bias"), "F32", each.shape[:1]) for each in matrices]
    return norms + matrices + biases


def _qwen35(shape: Shape, layer_id: int) -> list[Tensor]:
    hidden, inner = shape.hidden, shape.dense_inner
    tensors = _floats(attn_norm=(hidden,), post_attention_norm=(hidden,), ffn_gate_inp_shexp=(hidden,))
    tensors += _matrices(
        shape, ffn_gate_shexp=(inner, hidden), ffn_up_shexp=(inner, hidden), ffn_down_shexp=(hidden, inner)
    )
    if shape.is_full(layer_id) or shape.states is None:
        head = (shape.head_dim,)
        return tensors + _floats(attn_q_norm=head, attn_k_norm=head) + _attention(shape, queries=2)
    key_heads, heads, size, conv = shape.states
    values, width = heads * size, (2 * key_heads + heads) * size
    tensors += _floats(ssm_conv1d=(width, conv), ssm_beta=(heads, hidden), ssm_alpha=(heads, hidden), ssm_norm=(size,))
    tensors += [Tensor("ssm_a", "F32", (heads,)), Tensor("ssm_dt.bias", "F32", (heads,))]
    return tensors + _matrices(shape, attn_qkv=(width, hidden), attn_gate=(values, hidden), ssm_out=(hidden, values))


def _gemma4(shape: Shape, layer_id: int) -> list[Tensor]:
    hidden, inner, is_full = shape.hidden, shape.dense_inner, shape.is_full(layer_id)
    if is_full:
        shape = shape._replace(kv_heads=shape.wide[0], head_dim=shape.wide[1])
    names = "attn_norm post_attention_norm ffn_norm post_ffw_norm pre_ffw_norm_2 post_ffw_norm_1 post_ffw_norm_2"
    tensors = _floats(**dict.fromkeys(names.split(), (hidden,)))
    tensors += _floats(attn_q_norm=(shape.head_dim,), attn_k_norm=(shape.head_dim,), layer_output_scale=(1,))
    tensors += _matrices(shape, ffn_gate=(inner, hidden), ffn_up=(inner, hidden), ffn_down=(hidden, inner))
    return tensors + [each for each in _attention(shape) if not (is_full and each.name == "attn_v.weight")]


LAYERS: dict[str, Callable[[Shape, int], list[Tensor]]] = {
    "qwen3moe": _qwen3, "gpt-oss": _gpt_oss, "qwen35moe": _qwen35, "gemma4": _gemma4
}  # fmt: skip


def active_bytes(shape: Shape) -> int:
    """Return the bytes of weights that one token reads; of a table that is no head it reads one row."""
    num_bytes, tensors = 0, tensors_of(shape)
    has_head = any(tensor.name == "output.weight" for tensor in tensors)
    for tensor in tensors:
        if "_exps" in tensor.name:
            num_bytes += tensor.num_bytes * shape.active // shape.experts
        elif not (has_head and tensor.name.startswith("token_embd")):
            num_bytes += tensor.num_bytes
    return num_bytes


def write(shape: Shape, path: Path) -> None:
    """Write the file of random codes. Its scales are such that the weights are about 0.02."""
    noise = np.random.Generator(np.random.SFC64(0))
    tensors = tensors_of(shape)
    blocks: dict[str, tuple[int, Callable[[U8], None]]] = {
        "Q4_0": (18, lambda raw: _scales(raw, 0.004)),
        "Q8_0": (34, lambda raw: _scales(raw, 0.0003)),
        "MXFP4": (17, _exponents),
    }

    def data(first: int) -> Iterator[tuple[int, U8]]:
        for index, tensor in enumerate(tensors[first:], first):
            if tensor.kind == "F32":
                yield index, _numbers(tensor.name, tensor.num_bytes // 4, noise).view(np.uint8)
                continue
            size, fill = blocks[tensor.kind]
            for start in range(0, tensor.num_bytes, PIECE // size * size):
                raw = noise.integers(0, 256, min(PIECE // size * size, tensor.num_bytes - start), np.uint8)
                fill(raw.reshape(-1, size))
                yield index, raw

    gguf_file.write(path, fields_of(shape), tensors, data, str(shape))


def _numbers(name: str, num: int, noise: np.random.Generator) -> NDArray[np.float32]:
    if name == "rope_freqs.weight":  # a quarter of the frequencies turns
        values = np.where(np.arange(num) < num // 4, 1.0, 1e30)
    elif "norm" in name or "scale" in name:
        values = np.ones(num)
    elif name.endswith("ssm_a"):
        values = np.full(num, -0.5)
    else:
        values = noise.standard_normal(num) * (0 if "bias" in name else 0.02)
    return values.astype(np.float32)


def _scales(raw: U8, scale: float) -> None:
    raw[:, :2] = np.frombuffer(np.float16(scale).tobytes(), np.uint8)


def _exponents(raw: U8) -> None:
    raw[:, 0] = 127 - 7
