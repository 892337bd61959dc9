"""Reads and writes the file of measured quality next to the weights: headrace-quality.json.

It has one entry for each form in which the weights were measured (`--quantization`, `--kv-cache-dtype`, ...), with a
fingerprint of the weights, so that the figures of other weights are never shown. No numpy, no torch. Written by
`cli.bench.quality`, read by `serve` and `llm`.
"""

from __future__ import annotations

import hashlib
import json
import logging
import math
import os
import secrets
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from headrace import foreign, hub
from headrace.protocol.errors import CheckpointError, HeadraceError

logger = logging.getLogger(__name__)

NAME = "headrace-quality.json"
FORM = ("quantization", "activations", "dtype", "kv_cache_dtype", "backend")
"""Fields of `EngineInfo` that distinguish the forms of the weights."""
NUMBERS = (
    "num_tokens", "perplexity", "bits_per_byte", "reference_perplexity", "mean_kl", "mean_kl_stderr", "max_kl",
    "top1_flip_rate", "max_logit_difference", "bits_per_weight", "disk_bytes", "memory_bytes",
)  # fmt: skip
WORDS = ("reference", "text", "date", "version")
MAX_WORD = 200
SAMPLES, SAMPLE_BYTES = 16, 65536


def weight_files(path: Path) -> list[Path]:
    """Return a GGUF file itself; of a directory its *.safetensors and config.json."""
    if path.is_file():
        return [path]
    return sorted([*path.glob("*.safetensors"), *path.glob("config.json")])


def fingerprint(path: Path) -> str:
    """Return a hash of weights, from the names and sizes of their files and from samples evenly over each file.

    Weights that were trained further, or quantised in another way, differ in every sample; a copy has the same hash.
    """
    digest = hashlib.sha256()
    for file in weight_files(path):
        size = file.stat().st_size
        digest.update(json.dumps([file.name, size]).encode())
        with file.open("rb") as stream:
            for i in range(SAMPLES):
                stream.seek(max(0, size - SAMPLE_BYTES) * i // (SAMPLES - 1))
                digest.update(stream.read(SAMPLE_BYTES))
    return digest.hexdigest()


def place(path: Path) -> Path:
    """Return the path of the audit of a model's directory, or of a GGUF file."""
    return (path.parent if path.is_file() else path) / NAME


def find(path: Path) -> list[dict[str, Any]]:
    """Return the entries that fit the weights, each {"form": {...}, "measured": {...}} with known fields only.

    Raises `CheckpointError` for a file that `save` did not write.
    """
    if not place(path).is_file():
        return []
    entries = _entries(place(path))
    current = fingerprint(path) if entries else ""
    return [
        {"form": _form(entry), "measured": _measured(entry)} for entry in entries if entry.get("fingerprint") == current
    ]


def found(path: Path) -> list[dict[str, Any]]:
    """Return the result of `find`; nothing, and a warning, for a file that cannot be read."""
    try:
        return find(path)
    except (CheckpointError, OSError) as error:
        logger.warning("the quality of the model is not shown: %s", error)
        return []


def of_form(audits: Sequence[dict[str, Any]], info: Any) -> dict[str, Any] | None:
    """Return the measurements of the form that `info` (an `EngineInfo`) runs, or None."""
    form = precision_of(info)
    return next((audit["measured"] for audit in audits if audit["form"] == form), None)


def precision_of(info: Any) -> dict[str, str]:
    return {name: str(getattr(info, name)) for name in FORM}


def loss_in_words(measured: Mapping[str, Any] | None, info: Any) -> str:
    """Describe what the form that `info` (an `EngineInfo`) runs loses, by `measured` of that form; where it was not
    measured, name the command that does."""
    if measured is None or not {"mean_kl", "top1_flip_rate"} <= measured.keys():
        return f"not measured; `headrace bench quality {info.model} --quantization {info.quantization} --save` does it"
    loss = f"KL {1e3 * measured['mean_kl']:.1f} mnats, the first choice differs at {measured['top1_flip_rate']:.1%}"
    if measured.get("perplexity") and measured.get("reference_perplexity"):
        loss += f", perplexity {measured['perplexity'] / measured['reference_perplexity'] - 1:+.1%}"
    of = f"{measured['num_tokens']:,} tokens, " if "num_tokens" in measured else ""
    return f"{loss} ({of}{measured.get('text', 'a text')}, {measured.get('date', 'no date')})"


def save(path: Path, form: Mapping[str, str], measured: Mapping[str, Any]) -> Path:
    """Write an entry next to the weights, in place of an older one of the same form, and return the file.

    Raises `CheckpointError` if there is a file that is not an audit, `HeadraceError` if it cannot be written.
    """
    target, current = place(path), fingerprint(path)
    names = [file.name for file in weight_files(path)]
    entry = {"weights": names, "fingerprint": current, "form": dict(form)}
    entry["measured"] = {name: measured[name] for name in (*NUMBERS, *WORDS) if measured.get(name) is not None}
    others = [
        old
        for old in (_entries(target) if target.is_file() else [])
        # The figures of earlier contents of these files are void.
        if not (old.get("weights") == names and (old.get("fingerprint") != current or old.get("form") == entry["form"]))
    ]
    temporary = target.with_name(f".{NAME}.{secrets.token_hex(8)}")
    try:
        temporary.write_text(json.dumps({"audits": [*others, entry]}, indent=1) + "\n", encoding="utf-8")
        os.replace(temporary, target)
    except OSError as error:
        temporary.unlink(missing_ok=True)
        raise HeadraceError(f"{target} can not be written: {error}") from error
    return target


def _entries(path: Path) -> list[dict[str, Any]]:
    entries = hub.read_json(path, foreign.CONFIG).get("audits")
    if not isinstance(entries, list) or not all(isinstance(entry, dict) for entry in entries):
        raise CheckpointError(f"{path} has no list of audits")
    return entries


def _form(entry: dict[str, Any]) -> dict[str, str]:
    form = entry.get("form")
    return {name: str(form.get(name, "")) for name in FORM} if isinstance(form, dict) else {}


def _measured(entry: dict[str, Any]) -> dict[str, Any]:
    """Return the known fields, with finite numbers and short words only: the file is not trusted."""
    fields = entry.get("measured")
    if not isinstance(fields, dict):
        return {}
    numbers = {name: fields[name] for name in NUMBERS if type(fields.get(name)) in (int, float)}
    words = {name: fields[name][:MAX_WORD] for name in WORDS if isinstance(fields.get(name), str)}
    return {name: value for name, value in numbers.items() if math.isfinite(value)} | words
