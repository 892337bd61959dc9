"""`ModelConfig`: the values of a config.json, each verified to be of its type and in range.

The file may be old (rope_theta, rope_scaling), new (rope_parameters) or hostile. Knows no tensors. Called by the model
files and by `engine.library.load`.
"""

from __future__ import annotations

from typing import Any

from headrace.models.unread import Values
from headrace.protocol.errors import CheckpointError

_REQUIRED: Any = object()
MAX_SIZE = 2**31 - 1
MAX_LAYERS = 4096
"""The most decoder layers of a model, whichever file it comes from."""
MAX_NUMBER = 1e30
"""Far beyond any setting, and far within the range of float32."""


class ModelConfig:
    """The values of one config.json, which note the keys that are read.

    Methods raise `CheckpointError` naming the key, the value and the allowed values."""

    def __init__(self, values: dict[str, Any]) -> None:
        self.values = values if isinstance(values, Values) else Values(values)

    def _get(self, name: str, default: Any) -> Any:
        value = self.values.get(name)
        if value is None:
            if default is _REQUIRED:
                raise CheckpointError(f"config.json: {name} is missing")
            return default
        return value

    def integer(self, name: str, default: Any = _REQUIRED, low: int = 1, high: int = MAX_SIZE) -> int:
        """An integer; the file may write it as a float, such as 128.0."""
        value = self._get(name, default)
        if isinstance(value, float) and value.is_integer():
            value = int(value)
        if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
            raise CheckpointError(f"config.json: {name} is {value!r:.80}, expected an integer from {low} to {high}")
        return value

    def number(self, name: str, default: Any = _REQUIRED, low: float = 0.0) -> float:
        value = self._get(name, default)
        # The comparison is false for NaN, and exact for ints beyond the range of floats.
        if isinstance(value, bool) or not isinstance(value, int | float) or not low <= value <= MAX_NUMBER:
            raise CheckpointError(
                f"config.json: {name} is {value!r:.80}, expected a finite number from {low:g} to {MAX_NUMBER:g}"
            )
        return float(value)

    def flag(self, name: str, default: bool) -> bool:
        value = self._get(name, default)
        if not isinstance(value, bool):
            raise CheckpointError(f"config.json: {name} is {value!r:.80}, expected true or false")
        return value

    def choice(self, name: str, allowed: dict[str, Any], default: Any = _REQUIRED) -> Any:
        """Return `allowed[value]`; the value must be one of the keys of `allowed`."""
        value = self._get(name, default)
        if not isinstance(value, str) or value not in allowed:
            raise CheckpointError(f"config.json: {name} is {value!r:.80}, expected one of {', '.join(allowed)}")
        return allowed[value]

    def words(self, name: str, length: int) -> list[str] | None:
        """A list of `length` strings, or None if it is absent."""
        value = self._get(name, None)
        if value is None:
            return None
        if not isinstance(value, list) or len(value) != length or not all(isinstance(v, str) for v in value):
            raise CheckpointError(f"config.json: {name} must be a list of {length} strings")
        return value

    def mapping(self, name: str) -> ModelConfig:
        """A nested object, empty if it is absent."""
        value = self._get(name, {})
        if not isinstance(value, dict):
            raise CheckpointError(f"config.json: {name} is {value!r:.80}, expected an object")
        return ModelConfig(value)

    def numbers(self, name: str, length: int) -> list[float]:
        value = self._get(name, _REQUIRED)
        is_list = isinstance(value, list) and len(value) == length
        if not is_list or not all(isinstance(v, int | float) and 0 < v <= MAX_NUMBER for v in value):
            raise CheckpointError(f"config.json: {name} must be a list of {length} positive numbers")
        return [float(v) for v in value]

    @property
    def rope(self) -> ModelConfig:
        """The rope settings in the newer layout (`rope_parameters`), also of files with the older one."""
        values = dict(self.mapping("rope_scaling").values) | dict(self.mapping("rope_parameters").values)
        for name in ("rope_theta", "partial_rotary_factor", "original_max_position_embeddings"):
            if values.get(name) is None and self.values.get(name) is not None:
                values[name] = self.values[name]
        if values.get("rope_type") is None:
            values["rope_type"] = values.get("type") or "default"
        return ModelConfig(values)

    def max_positions(self) -> int:
        """The model's context in tokens, rope scaling included, by vLLM's rules."""
        names = ("max_position_embeddings", "n_positions", "max_sequence_length", "seq_length")
        known = [self.integer(name) for name in names if self.values.get(name) is not None]
        if not known:
            raise CheckpointError(f"config.json: none of {', '.join(names)} is given")
        length = min(known)
        rope = self.rope
        kind = rope.values["rope_type"]
        if kind == "yarn":
            length = rope.integer("original_max_position_embeddings", length)
        # Gemma 3's config has the stretched length.
        if kind in ("linear", "dynamic", "yarn") and self.values.get("model_type") != "gemma3_text":
            length = int(length * rope.number("factor", 1.0, low=1e-6))
        return length
