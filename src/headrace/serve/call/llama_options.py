"""llama.cpp's rules for sampling options, which Ollama and llama-server share: what stands for "none", and the least.

Knows no route, no request and no reply.
"""

from __future__ import annotations

from typing import Any

import msgspec

from headrace.protocol.errors import RequestError
from headrace.protocol.parameters import LLAMA_SERVER, OLLAMA, names_in
from headrace.serve.call import sampling

# A share of nothing keeps one token there; here a share is above 0, and the least one keeps one token.
LEAST_SHARE = 1e-6
SHARES = ("top_p", "typical_p")
# The least value of those whose negative values mean: none.
LEAST = {"max_tokens": -2, "seed": -1}
# How llama.cpp writes a seed of -1.
NO_SEED = 2**32 - 1
WIDER = frozenset(names_in(api)[field] for api in (OLLAMA, LLAMA_SERVER) for field in (*SHARES, *LEAST))
"""The options, by llama.cpp's names, whose range is wider than the engine's."""


def sampling_of(options: msgspec.Struct, api: str, prefix: str = "") -> dict[str, Any]:
    """Return the fields of `SamplingParams` that `options` gives. A seed of -1, and a length of -1 or -2, mean: none.

    Raises `RequestError` for other negative ones, with `prefix` before the name.
    """
    values = sampling.sampling_of(options, api)
    for field in SHARES:
        if values.get(field) == 0:
            values[field] = LEAST_SHARE
    for field, low in LEAST.items():
        if values.get(field, low) < low:
            raise RequestError(prefix + names_in(api)[field], values[field], f"{low} or more")
    if values.get("max_tokens", 0) < 0:
        del values["max_tokens"]
    if values.get("seed") in (-1, NO_SEED):
        del values["seed"]
    return values
