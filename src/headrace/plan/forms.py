"""How many bits a weight, a key or a value takes in each form, scales included, and how headrace serves the form.
Called by `plan.counting` and `plan.formulas`."""

from __future__ import annotations

import fnmatch
from typing import Any, NamedTuple

from headrace.protocol.errors import CheckpointError, RequestError
from headrace.quant.schemes import GROUPS, NAMES, Quantization, Scheme, find_method, kernel_name, parse

FLOAT_BITS = {"float32": 32, "bfloat16": 16, "float16": 16}
KV_ITEM_BYTES = {
    "float32": 4.0, "bfloat16": 2.0, "float16": 2.0, "int8": 1.0, "int8_dot": 1.0, "int4": 0.5, "fp8_e4m3": 1.0,
    "fp8_e5m2": 1.0,
}  # fmt: skip
KV_SCALED = ("int8", "int8_dot", "int4", "fp8_e4m3")
"""Forms of the cache whose keys and values have 4 bytes of scales for each token and head."""
EXPERT_METHODS = ("mxfp4",)
"""Methods that quantise the experts alone."""
CHECKPOINTS = {"int3": Scheme("i3", 128), "int2": Scheme("i2", 128, has_zero=True)}
"""Forms of layers that `headrace quantize` makes and that a server reads as stored, but does not make while loading."""
NAMED = (*NAMES, *CHECKPOINTS)
"""The forms that may be planned by name."""


class Served(NamedTuple):
    """How headrace serves a form: "at load" (a flag of `headrace serve`), "as stored", "as a checkpoint" that has to be
    made first, or "no", which is a plan alone. `how`: the command, or the reason."""

    kind: str
    how: str


class Forms:
    """The form of each matrix of a model: plain floats of `dtype`, the forms of a `quantization` at load, or the forms
    that config.json's `quantization_config` states.

    Raises `RequestError` for a quantization that does not exist, `CheckpointError` for a method that is not known here,
    or for weights that are quantised already and shall be so again.
    """

    def __init__(self, dtype: str, quantization: str | None = None, stated: dict[str, Any] | None = None) -> None:
        self.dtype = dtype
        self._beforehand = CHECKPOINTS.get(quantization or "")
        self._parsed = None if quantization in (None, "none") or self._beforehand else _parse(quantization or "")
        method = find_method(stated)
        if (self._parsed or self._beforehand) and method != "none":
            raise CheckpointError(
                f"config.json has a quantization_config ({method}): these weights are quantised already, plan them "
                f"without --quantization {quantization}"
            )
        self._stated = _bits_of(method, stated or {}) if method != "none" and quantization != "none" else None
        self._method = method
        self._left = [str(name) for name in _list(stated, "modules_to_not_convert", "ignore", "ignored_layers")]

    @property
    def name(self) -> str:
        """The name of the form in which linear layers are stored."""
        if self._beforehand is not None:
            return f"int{self._beforehand.bits}"
        if self._parsed is not None:
            return self._parsed.name
        return self.dtype if self._stated is None else f"{self._method}, {self._stated:g} bits"

    @property
    def served(self) -> Served:
        """How headrace serves a model in this form."""
        if self._beforehand is not None:
            bits = self._beforehand.bits
            flags = f"--bits {bits}{' --asymmetric' * self._beforehand.has_zero}"
            return Served(
                "as a checkpoint",
                f"of headrace quantize {flags}, which headrace serve reads; it has no --quantization int{bits}",
            )
        if self._parsed is not None:
            return Served("at load", f"headrace serve --quantization {self._parsed.name}")
        if self._stated is None and self._method != "none":
            return Served("at load", "headrace serve --quantization none")
        return Served("as stored", "headrace serve, without --quantization")

    def bits(self, name: str, num_in: int, plain: bool = False) -> tuple[str, float]:
        """Return the form of the linear layer `name` with `num_in` inputs, and the bits of one of its weights."""
        if plain:
            return self.dtype, FLOAT_BITS[self.dtype]
        if self._beforehand is not None:
            return _of_scheme(_fitting(self._beforehand, num_in), num_in)
        if self._parsed is not None:
            return _of_scheme(self._parsed.layer, num_in)
        if self._stated is None or self._is_left(name):
            return self.dtype, FLOAT_BITS[self.dtype]
        return self.name, self._stated

    def head_bits(self, num_in: int) -> tuple[str, float]:
        """The same for the head, which stored methods leave as it is."""
        return (self.dtype, FLOAT_BITS[self.dtype]) if self._parsed is None else _of_scheme(self._parsed.head, num_in)

    def _is_left(self, name: str) -> bool:
        if self._method in EXPERT_METHODS and ".experts" not in name:
            return True
        return any(part in name or fnmatch.fnmatch(name, f"{part}*") for part in self._left)


def _parse(name: str) -> Quantization:
    if name not in NAMES:
        raise RequestError("quantization", name, "one of " + ", ".join(NAMED))
    return parse(name)


def _fitting(scheme: Scheme, num_in: int) -> Scheme:
    """Return the scheme with the largest group that divides `num_in`, as `headrace quantize` chooses it."""
    return scheme._replace(group=next((g for g in GROUPS if g <= scheme.group and not num_in % g), GROUPS[-1]))


def _of_scheme(scheme: Scheme, num_in: int) -> tuple[str, float]:
    return kernel_name(scheme), scheme.bits_per_weight(num_in)


def kv_bytes(num_heads: int, key_dim: int, value_dim: int, dtype: str) -> float:
    """Return the bytes that one position of one layer takes. A head without values (`value_dim` 0) has keys alone."""
    num_vectors = 1 + (value_dim > 0)
    return num_heads * ((key_dim + value_dim) * KV_ITEM_BYTES[dtype] + (4 * num_vectors if dtype in KV_SCALED else 0))


def _list(stated: dict[str, Any] | None, *names: str) -> list[Any]:
    values = [(stated or {}).get(name) for name in names]
    return [item for value in values if isinstance(value, list) for item in value]


def _bits_of(method: str, stated: dict[str, Any]) -> float:
    """Return the bits of a weight, scales and zeros included, that a `quantization_config` states."""

    def number(values: dict[str, Any], name: str, default: int) -> int:
        value = values.get(name)
        value = default if value is None else value
        if type(value) is not int or not -1 <= value <= 2**20:
            raise CheckpointError(f"config.json: quantization_config.{name} is {value!r:.80}, expected an integer")
        return value

    if method in ("gptq", "awq", "auto-round", "hqq"):
        bits, group = number(stated, "bits", 4), number(stated, "group_size", 128)
        return bits + ((16 + bits) / group if group > 0 else 0)
    if method == "mlx":
        group = number(stated, "group_size", 64)
        return number(stated, "bits", 4) + (
            (32 if stated.get("mode", "affine") == "affine" else 8) / group if group > 0 else 0
        )
    if method == "bitsandbytes":
        return 4 + 8 / 64 if stated.get("load_in_4bit") is True else 8.0
    if method == "mxfp4":
        return 4 + 16 / 32  # scales of 8 bits in the file, of 16 in the kernels
    if method == "fp8":
        block = stated.get("weight_block_size")
        return 8 + (32 / block[-1] if isinstance(block, list) and block and block[-1] in GROUPS else 0)
    if method == "bitnet":
        return 2 + 16 / 128
    if method == "compressed-tensors":
        groups = stated.get("config_groups")
        groups = list(groups.values()) if isinstance(groups, dict) else []
        weights = [group.get("weights") for group in groups if isinstance(group, dict)]
        for each in weights:
            if isinstance(each, dict):
                group = number(each, "group_size", -1)
                return number(each, "num_bits", 8) + (16 / group if group > 0 else 0)
    if method == "modelopt":
        algorithm = str(stated.get("quant_algo"))
        if algorithm in ("FP8", "NVFP4"):
            return 8.0 if algorithm == "FP8" else 4 + 8 / 16
    raise CheckpointError(
        f"config.json: the planner has no size for quantization_config {method!r:.40}; --quantization none plans the "
        "plain weights"
    )
