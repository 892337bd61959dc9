"""Checked getters for the keys of a GGUF file, and a decoder's settings under the keys that all architectures share.

The readers of `gguf_config` and `gguf_hybrid` build a `Reading` with it. Reads no tensors but the divisors of
frequencies, and imports no torch.
"""

from __future__ import annotations

import math
import re
from typing import Any, NamedTuple, NoReturn

from headrace.checkpoint.gguf_parts import Part, divisors
from headrace.gguf import GGUF
from headrace.models.config import MAX_LAYERS

MAX_CONTEXT = 2**27
MAX_SIZE = 2**24


class Reading(NamedTuple):
    """values: a config.json. parts: the file's tensors by the model's names.

    turned: rows of each head of q and k that are stored in pairs, as ggml rotates them, or 0. norm_offset: number that
    the file's converter added to the weights of norms whose names end with `offset_ends`. reorders: whether rows to
    which a model file gives an order (`Linear.orders`) lie in the checkpoint's order; else the file's converter has put
    them into the model's.
    """

    values: dict[str, Any]
    parts: dict[str, Part]
    turned: int = 0
    norm_offset: float = 0.0
    reorders: bool = False
    offset_ends: str = "norm.weight"


class Keys:
    """Metadata of one architecture; every getter names the whole key in its errors."""

    def __init__(self, file: GGUF, architecture: str) -> None:
        self.file = file
        self.prefix = architecture + "."

    def integer(self, name: str, high: int = MAX_SIZE, low: int = 1) -> int:
        value = self.optional(name, high, low)
        if value is None:
            self.refuse(name, None, f"there, an integer from {low} to {high}")
        return value

    def optional(self, name: str, high: int = MAX_SIZE, low: int = 1) -> int | None:
        """Return an integer, or None. An array with one for each layer is accepted if all are the same."""
        field = self.file.fields.get(self.prefix + name)
        if field is None or not field.is_array:
            return self.file.integer(self.prefix + name, low, high)
        values = set(self.file.integers(self.prefix + name, MAX_LAYERS) or ())
        if len(values) != 1:
            self.refuse(name, sorted(values)[:8], "the same for every layer")
        value = int(values.pop())
        if not low <= value <= high:
            self.refuse(name, value, f"from {low} to {high}")
        return value

    def by_layer(self, name: str, num_layers: int, low: int = 1) -> list[int]:
        """Return an integer for each layer, all the same where the file has only one."""
        field = self.file.fields.get(self.prefix + name)
        if field is None or not field.is_array:
            return [self.integer(name, low=low)] * num_layers
        values = list(self.file.integers(self.prefix + name, MAX_LAYERS) or ())
        if len(values) != num_layers or not all(low <= value <= MAX_SIZE for value in values):
            self.refuse(name, values[:8], f"{num_layers} integers from {low} to {MAX_SIZE}")
        return values

    def of_some_layers(self, name: str, num_layers: int) -> tuple[list[bool], int]:
        """Return whether each layer's number is above 0, and the number, which all such layers share, or 0 if none."""
        values = self.by_layer(name, num_layers, low=0)
        distinct = sorted({value for value in values if value})
        if len(distinct) > 1:
            self.refuse(name, distinct[:8], "the same for all layers that have it")
        return [value > 0 for value in values], distinct[0] if distinct else 0

    def slides(self, num_layers: int) -> list[bool]:
        """Return whether each layer has a window."""
        name = "attention.sliding_window_pattern"
        flags = self.file.flags(self.prefix + name, MAX_LAYERS)
        if flags is None or len(flags) != num_layers:
            self.refuse(name, flags, f"a flag for each of {num_layers} layers")
        return flags

    def real(self, name: str) -> float | None:
        return self.file.real(self.prefix + name)

    def flag(self, name: str) -> bool | None:
        return self.file.flag(self.prefix + name)

    def refuse(self, name: str, value: object, bound: str) -> NoReturn:
        raise self.file.fault(self.prefix + name, value, bound)


def of_each_layer(keys: Keys, key: str, num_layers: int) -> list[float]:
    """Return a real for each layer, under a key without the architecture's name."""
    values = keys.file.reals(key, MAX_LAYERS)
    if values is None or len(values) != num_layers:
        raise keys.file.fault(key, None if values is None else f"{len(values)} numbers", f"{num_layers} numbers")
    return list(values)


def layer_of(name: str) -> int:
    match = re.match(r"(?:[a-z]+\.layers|blk)\.(\d+)\.", name)
    return int(match[1]) if match else -1


def decoder(
    keys: Keys,
    model_type: str,
    epsilon_name: str = "rms_norm_eps",
    head_dim: int = 0,
    *,
    inner: int | None = None,
    kv_heads: int | None = None,
) -> dict[str, Any]:
    """Return a decoder's settings by the names of config.json.

    `head_dim`: in place of the file's length of keys; then the length of values may differ from it. `inner` and
    `kv_heads`: width of the MLP and number of KV heads, where the file has them by layer.
    """
    heads, hidden = keys.integer("attention.head_count"), keys.integer("embedding_length")
    is_latent, head_dim = head_dim > 0, head_dim or keys.optional("attention.key_length") or hidden // heads
    if head_dim < 1:
        keys.refuse("attention.head_count", heads, f"at most embedding_length, {hidden}")
    if not is_latent and (keys.optional("attention.value_length") or head_dim) != head_dim:
        keys.refuse("attention.value_length", keys.optional("attention.value_length"), f"{head_dim}, as the keys'")
    epsilon_key = "attention.layer_norm_" + ("rms_epsilon" if epsilon_name == "rms_norm_eps" else "epsilon")
    epsilon = keys.real(epsilon_key)
    if epsilon is None:
        keys.refuse(epsilon_key, None, "there")
    turned = keys.optional("rope.dimension_count", head_dim) or head_dim
    return {
        "model_type": model_type,
        "max_position_embeddings": keys.integer("context_length", MAX_CONTEXT),
        "hidden_size": hidden,
        "intermediate_size": keys.integer("feed_forward_length") if inner is None else inner,
        "num_hidden_layers": keys.integer("block_count", MAX_LAYERS),
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads or keys.optional("attention.head_count_kv") or heads,
        "head_dim": head_dim,
        epsilon_name: epsilon,
        # Too much by a quarter of a number, which is cut off when the product with head_dim becomes an integer.
        "partial_rotary_factor": min((turned + 0.25) / head_dim, 1.0),
        "rope_theta": keys.real("rope.freq_base") or 10000.0,
        "rope_scaling": rope(keys, turned),
        **vocabulary(keys),
    }


def vocabulary(keys: Keys) -> dict[str, Any]:
    table = keys.file.tensors.get("token_embd.weight")
    if table is None or len(table.shape) != 2:
        raise keys.file.fault("token_embd.weight", None if table is None else table.shape, "there, with 2 dimensions")
    tied = "output.weight" not in keys.file.tensors
    return {"vocab_size": table.shape[1], "tie_word_embeddings": tied}


def rope(keys: Keys, turned: int) -> dict[str, Any] | None:
    """Return `rope_scaling`: from the metadata, or from a tensor with a divisor for each frequency (Llama 3.1)."""
    same = divisors(keys.file, "rope_freqs.weight", turned)
    if same is not None:
        return {"rope_type": "longrope", "short_factor": same, "long_factor": same, "attention_factor": 1.0}
    short, long = (divisors(keys.file, f"rope_factors_{part}.weight", turned) for part in ("short", "long"))
    if short is not None and long is not None:
        values: dict[str, Any] = {"rope_type": "longrope", "short_factor": short, "long_factor": long}
        values["original_max_position_embeddings"] = keys.integer("rope.scaling.original_context_length", MAX_CONTEXT)
        return values | {"attention_factor": keys.real("rope.scaling.attn_factor") or 1.0}
    kind = keys.file.text(keys.prefix + "rope.scaling.type")
    factor = keys.real("rope.scaling.factor") or keys.real("rope.scale_linear")
    if kind is None:
        kind = "none" if factor in (None, 1.0) else "linear"
    if kind == "none" or factor is None:
        return None
    if kind not in ("linear", "yarn"):
        keys.refuse("rope.scaling.type", kind, "none, linear or yarn")
    values = {"rope_type": kind, "factor": factor}
    if kind == "yarn":
        values["original_max_position_embeddings"] = keys.optional("rope.scaling.original_context_length", MAX_CONTEXT)
        for name in ("beta_fast", "beta_slow"):
            values[name] = keys.real("rope.scaling.yarn_" + name)
        attention = keys.real("rope.scaling.attn_factor")
        if attention is not None and factor > 1:
            values["attention_factor"] = attention * (0.1 * math.log(factor) + 1)
    return {name: value for name, value in values.items() if value is not None}
