"""llama.cpp's sampling options, which Ollama and llama-server have in common, as the engine's parameters.

`NAMES` maps llama.cpp's names to the engine's where they differ. Knows no route, no request and no reply.
"""

from __future__ import annotations

from typing import Any

import msgspec

from headrace.protocol.errors import RequestError

# Names that differ, as llama.cpp has them and as the engine has them.
NAMES = {"repeat_penalty": "repetition_penalty", "n_predict": "max_tokens", "num_predict": "max_tokens"}
# Same name, same meaning.
SAME = (
    "temperature", "top_k", "top_p", "min_p", "typical_p", "top_n_sigma", "repeat_last_n", "presence_penalty",
    "frequency_penalty", "mirostat", "mirostat_tau", "mirostat_eta", "adaptive_target", "adaptive_decay",
    "dynatemp_range", "dynatemp_exponent", "xtc_probability", "xtc_threshold", "dry_multiplier", "dry_base",
    "dry_allowed_length", "dry_penalty_last_n", "dry_sequence_breakers", "samplers", "stop", "ignore_eos",
)  # fmt: skip
# A share of nothing keeps one token there; here a share is above 0, and the least one keeps one token.
LEAST_SHARE = 1e-6


def sampling_of(options: msgspec.Struct, prefix: str = "") -> dict[str, Any]:
    """Return the fields of `SamplingParams` that `options` gives. A seed of -1, and a length of -1 or -2, mean: none.

    Raises `RequestError` for other negative ones, with `prefix` before the name.
    """
    sampling: dict[str, Any] = {}
    for name in (*SAME, *NAMES):
        value = getattr(options, name, None)
        if value is not None:
            sampling[NAMES.get(name, name)] = value
    for name in ("top_p", "typical_p"):
        if sampling.get(name) == 0:
            sampling[name] = LEAST_SHARE
    for name, low in (("n_predict", -2), ("num_predict", -2), ("seed", -1)):
        value = getattr(options, name, None)
        if value is not None and value < low:
            raise RequestError(prefix + name, value, f"{low} or more")
    if sampling.get("max_tokens", 0) < 0:
        del sampling["max_tokens"]
    seed = getattr(options, "seed", None)
    # 2**32 - 1 is how llama.cpp writes -1.
    if seed is not None and seed not in (-1, 2**32 - 1):
        sampling["seed"] = seed
    return sampling


def spelling_of(prefix: str = "") -> dict[str, str]:
    """Return the spelling of the engine's fields where llama.cpp's options are under `prefix`."""
    return {name: prefix + name for name in (*SAME, "seed")} | {"repetition_penalty": prefix + "repeat_penalty"}
