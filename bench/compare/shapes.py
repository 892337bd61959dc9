"""The shapes of the models that are compared, what a token costs on them, and random checkpoints of them.

Weights are normal (0, 0.02) in bf16: speed does not depend on their values, and nothing is downloaded. Pure but for
`write_checkpoint` and `write_tokenizer`.
"""

from __future__ import annotations

import dataclasses
import json
import math
import os
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

SCALE_BYTES = 2  # f16


@dataclasses.dataclass(frozen=True)
class Shape:
    name: str
    stands_for: str
    architecture: str
    model_type: str
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    ffn: int
    vocab: int
    theta: float
    eps: float
    max_positions: int
    head_norms: bool = False

    @property
    def matrices(self) -> dict[str, tuple[int, int]]:
        """(outputs, inputs) of the linear layers of one block, by their names in the checkpoint."""
        q, kv = self.heads * self.head_dim, self.kv_heads * self.head_dim
        return {
            "self_attn.q_proj": (q, self.hidden),
            "self_attn.k_proj": (kv, self.hidden),
            "self_attn.v_proj": (kv, self.hidden),
            "self_attn.o_proj": (self.hidden, q),
            "mlp.gate_proj": (self.ffn, self.hidden),
            "mlp.up_proj": (self.ffn, self.hidden),
            "mlp.down_proj": (self.hidden, self.ffn),
        }

    @property
    def layer_weights(self) -> int:
        """Weights of all linear layers, the head left out."""
        return self.layers * sum(rows * columns for rows, columns in self.matrices.values())

    @property
    def head_weights(self) -> int:
        return self.vocab * self.hidden

    def weight_bytes(self, bits: int, group: int, head_bits: int = 0, head_group: int = 0) -> int:
        """Bytes that one decoded token reads: codes and f16 scales of the layers and the head, which is like the
        layers where nothing is said. `group` 0 means one scale for each output; norms are left out, and scales at 16
        bits and more."""
        layers = [(*size, bits, group) for size in self.matrices.values()] * self.layers
        num_bytes = 0.0
        for rows, columns, width, inputs in [
            *layers,
            (self.vocab, self.hidden, head_bits or bits, head_group or group),
        ]:
            groups = 0 if width >= 16 else math.ceil(columns / inputs) if inputs else 1
            num_bytes += rows * columns * width / 8 + rows * groups * SCALE_BYTES
        return round(num_bytes)

    def kv_bytes(self, dtype: str) -> int:
        """Bytes of keys and values of one token, all layers; int8 has a float scale for each head."""
        width = {"float32": 4, "bfloat16": 2, "float16": 2, "int8": 1}[dtype]
        head = self.head_dim * width + (4 if dtype == "int8" else 0)
        return self.layers * 2 * self.kv_heads * head

    def operations(self, num_rows: int, num_heads: int) -> int:
        """Multiplications and additions in the linear layers for rows, of which `num_heads` go through the head."""
        return 2 * (num_rows * self.layer_weights + num_heads * self.head_weights)

    def tensors(self) -> Iterator[tuple[str, tuple[int, ...]]]:
        yield "model.embed_tokens.weight", (self.vocab, self.hidden)
        for i in range(self.layers):
            layer = f"model.layers.{i}."
            yield layer + "input_layernorm.weight", (self.hidden,)
            for name, size in self.matrices.items():
                yield f"{layer}{name}.weight", size
            if self.head_norms:
                yield layer + "self_attn.q_norm.weight", (self.head_dim,)
                yield layer + "self_attn.k_norm.weight", (self.head_dim,)
            yield layer + "post_attention_layernorm.weight", (self.hidden,)
        yield "model.norm.weight", (self.hidden,)

    def config(self) -> dict[str, Any]:
        """config.json as Hugging Face has it."""
        more = {"mlp_bias": False} if self.model_type == "llama" else {}
        return more | {
            "architectures": [self.architecture],
            "model_type": self.model_type,
            "vocab_size": self.vocab,
            "hidden_size": self.hidden,
            "intermediate_size": self.ffn,
            "num_hidden_layers": self.layers,
            "num_attention_heads": self.heads,
            "num_key_value_heads": self.kv_heads,
            "head_dim": self.head_dim,
            "hidden_act": "silu",
            "rms_norm_eps": self.eps,
            "rope_theta": self.theta,
            "max_position_embeddings": self.max_positions,
            "tie_word_embeddings": True,
            "attention_bias": False,
            "attention_dropout": 0.0,
            "initializer_range": 0.02,
            "use_cache": True,
            "bos_token_id": 256,
            "eos_token_id": 257,
            "torch_dtype": "bfloat16",
        }


SHAPES = {
    shape.name: shape
    for shape in (
        Shape(
            name="l1b", stands_for="Llama-3.2-1B", architecture="LlamaForCausalLM", model_type="llama", layers=16,
            hidden=2048, heads=32, kv_heads=8, head_dim=64, ffn=8192, vocab=128256, theta=500000.0, eps=1e-5,
            max_positions=131072,
        ),
        Shape(
            name="q06", stands_for="Qwen3-0.6B", architecture="Qwen3ForCausalLM", model_type="qwen3", layers=28,
            hidden=1024, heads=16, kv_heads=8, head_dim=128, ffn=3072, vocab=151936, theta=1e6, eps=1e-6,
            max_positions=40960, head_norms=True,
        ),
    )
}  # fmt: skip


def write_checkpoint(shape: Shape, folder: Path, seed: int = 0) -> None:
    """A safetensors file of random bf16 weights and its config.json, without a tokenizer."""
    import numpy

    folder.mkdir(parents=True, exist_ok=True)
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    place = 0
    for name, size in shape.tensors():
        end = place + 2 * math.prod(size)
        header[name] = {"dtype": "BF16", "shape": list(size), "data_offsets": [place, end]}
        place = end
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    noise = numpy.random.Generator(numpy.random.SFC64(seed))
    part = folder / "model.safetensors.part"
    with open(part, "wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        for _, size in shape.tensors():
            if len(size) == 1:
                file.write(numpy.full(size, 0x3F80, numpy.uint16).tobytes())  # ones
                continue
            for row in range(0, size[0], 4096):
                rows = min(4096, size[0] - row)
                values = noise.standard_normal((rows, size[1]), dtype=numpy.float32) * numpy.float32(0.02)
                bits = values.view(numpy.uint32)
                rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16  # to nearest even
                file.write(rounded.astype(numpy.uint16).tobytes())
    (folder / "config.json").write_text(json.dumps(shape.config(), indent=1) + "\n")
    part.rename(folder / "model.safetensors")  # last, so that its being there means that all is


def byte_letters() -> list[str]:
    """The 256 letters by which a byte-level BPE writes bytes (GPT-2's)."""
    printable = {*range(33, 127), *range(161, 173), *range(174, 256)}
    others = iter(range(256, 512))
    return [chr(byte) if byte in printable else chr(next(others)) for byte in range(256)]


def write_tokenizer(shape: Shape, source: Path, folder: Path) -> None:
    """Beside links to the checkpoint in `source`: a byte-level BPE without merges, filled up to the vocabulary with
    tokens "t<id>". Peers whose converters want a tokenizer read this folder."""
    folder.mkdir(parents=True, exist_ok=True)
    for file in ("model.safetensors", "config.json"):
        link = folder / file
        link.unlink(missing_ok=True)
        link.symlink_to(os.path.relpath(source / file, folder))
    vocab = {letter: i for i, letter in enumerate(byte_letters())}
    specials = {"<|bos|>": 256, "<|eos|>": 257}
    vocab |= specials | {f"t{i}": i for i in range(258, shape.vocab)}
    plain = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
    tokenizer: dict[str, Any] = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [{"id": i, "content": token, **plain} for token, i in specials.items()],
        "normalizer": None,
        "pre_tokenizer": byte_level,
        "post_processor": None,
        "decoder": byte_level,
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "ignore_merges": False,
            "vocab": vocab,
            "merges": [],
        },
    }
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<|bos|>",
        "eos_token": "<|eos|>",
        "pad_token": "<|eos|>",
        "clean_up_tokenization_spaces": False,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(settings, indent=1) + "\n")
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer, ensure_ascii=False))
