"""Tensors of checkpoints that change no output: a model may leave them unread, and a load says so once.

Other tensors without a place in the model are errors: the weights would be of another model than the config describes.
Knows names only. Called by the readers of checkpoints (`checkpoint.quantising`, `checkpoint.source`).
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Iterable, Sequence
from typing import Any

logger = logging.getLogger(__name__)

MAX_SHOWN = 5
HARMLESS = re.compile(
    r"(.*\.)?("
    # Tables of angles and masks, which each model computes.
    r"rotary_(pos_)?emb\.(inv_freq|(cos|sin)(_cached)?)|attn_rot_embd\.weight|(attn|attention)\.(bias|masked_bias)"
    r"|position_ids"
    # Scales of the cache and of activations, which have scales for each row here.
    r"|[qkv]_(scale|zero_point)|prob_(output_)?scale|(input|output)_(scale|zero_point)"
    r")"
)
"""Names of tensors that no model needs. Whatever a model takes is not looked up here."""
PREDICTION_PARTS = re.compile(r"(.*\.)?layers\.(\d+)\.(eh_proj|enorm|hnorm|shared_head)\..*")
"""Tensors that only a layer for multi-token prediction has, and the number of that layer."""


def not_harmless(names: Sequence[str], is_empty: Callable[[str], bool], owner: str) -> list[str]:
    """Return the tensors among `names`, which no model has taken, that are no strays; log the strays in one line.

    is_empty: whether a tensor has no elements. owner: the name of the checkpoint."""
    strays = [name for name in names if HARMLESS.fullmatch(name) or is_empty(name)]
    if strays:
        logger.warning("%d tensors of %s are without effect and left out: %s", len(strays), owner, listing(strays))
    return sorted(set(names) - set(strays))


def listing(names: Sequence[str]) -> str:
    return ", ".join(names[:MAX_SHOWN]) + (", ..." if len(names) > MAX_SHOWN else "")


def prediction_layers(values: dict[str, Any], names: Iterable[str]) -> re.Pattern[str]:
    """Return a pattern for the tensors of layers for multi-token prediction, which only a drafter reads.

    They follow the model's own layers, and are known by their parts: some configs do not mention them. In Qwen's
    checkpoints such tensors have another root."""
    last = values.get("num_hidden_layers")
    numbers = {int(match[2]) for name in names if (match := PREDICTION_PARTS.fullmatch(name))}
    layers = "|".join(str(layer) for layer in sorted(numbers) if isinstance(last, int | float) and layer >= last)
    return re.compile(rf"mtp\..*|model\.mtp_\w+\.\d+\..*|(model\.)?layers\.({layers or '(?!)'})\..*")
