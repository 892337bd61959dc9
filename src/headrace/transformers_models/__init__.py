"""Models that transformers computes: the types of its package, found by name. Here nothing imports torch but `classes`.

Only classes of the installed package are used: `auto_map` is never followed, and no code of a checkpoint runs. Called
by `engine.library.by_transformers`.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping

from headrace.protocol.errors import RequestError

REFUSED = {
    "gemma4_assistant": "it is a drafter, which reads the hidden states of another model",
    "gemma4_unified_assistant": "it is a drafter, which reads the hidden states of another model",
    "moshi": "it reads and writes sound beside text",
    "musicgen": "its tokens are those of sound, in several codebooks at a time",
    "musicgen_melody": "its tokens are those of sound, in several codebooks at a time",
    "recurrent_gemma": "it keeps its states in its layers, where they are those of the last text alone",
    "reformer": "it keeps hashes of what it has read, whose number does not follow from the length",
}
"""Types that transformers has a class for and that cannot be run, with the reason."""


def is_installed() -> bool:
    """Return whether transformers and torch can be imported."""
    return all(importlib.util.find_spec(name) is not None for name in ("transformers", "torch"))


def classes() -> Mapping[str, str]:
    """Return the class of each causal type of the installed transformers, by model_type. Imports torch. Raises
    `RequestError` where transformers is not installed."""
    if not is_installed():
        raise RequestError(
            "model_impl", "transformers", "headrace, or install it: pip install 'headrace[transformers]'"
        )
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    names: Mapping[str, str] = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
    return names
