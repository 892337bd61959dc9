"""Facts about a model from its files, without its weights: `facts_of` reads config.json or the metadata of a GGUF file.

Ollama's `show` and `tags` have these facts, and so have the cards of /v1/models. Quantisations have the names that
Ollama and llama.cpp show. Called by `engine.library.facts_worker` in its process; the server's process calls
`engine.library.facts_reader`, and `digest_of` to see whether files have changed.
"""

from __future__ import annotations

import hashlib
import itertools
import math
import os
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any, TypeGuard

import msgspec

from headrace import foreign, gguf, hub
from headrace.checkpoint import headers
from headrace.engine.library import model_settings
from headrace.engine.library.model_settings import ModelSettings
from headrace.protocol.errors import CheckpointError

MAX_FILES = 10_000
"""Most files in the directory of a model."""
MAX_TEXT = 2**20
"""Most bytes of a text in the metadata that is passed on, and of a chat template."""
MAX_NUMBER = 2**63 - 1
DTYPES = {"F32": "F32", "F16": "F16", "BF16": "BF16", "F8_E4M3": "FP8", "F8_E5M2": "FP8"}
"""The types of a safetensors file that are numbers as they stand, and their names."""
CODE_BITS = {"I32": 32, "U32": 32, "I8": 8, "U8": 8}
"""Bits of the integers in which quantised checkpoints keep their codes."""
NOT_CODES = ("zeros", "zero_point", "g_idx", "absmax", "quant_map", "quant_state", "shape")
# The names of llama.cpp, for `general.file_type`.
FILE_TYPES = {
    0: "F32", 1: "F16", 2: "Q4_0", 3: "Q4_1", 7: "Q8_0", 8: "Q5_0", 9: "Q5_1", 10: "Q2_K", 11: "Q3_K_S", 12: "Q3_K_M",
    13: "Q3_K_L", 14: "Q4_K_S", 15: "Q4_K_M", 16: "Q5_K_S", 17: "Q5_K_M", 18: "Q6_K", 19: "IQ2_XXS", 20: "IQ2_XS",
    21: "Q2_K_S", 22: "IQ3_XS", 23: "IQ3_XXS", 24: "IQ1_S", 25: "IQ4_NL", 26: "IQ3_S", 27: "IQ3_M", 28: "IQ2_S",
    29: "IQ2_M", 30: "IQ4_XS", 31: "IQ1_M", 32: "BF16", 36: "TQ1_0", 37: "TQ2_0", 38: "MXFP4",
}  # fmt: skip


class ModelFacts(msgspec.Struct, frozen=True, kw_only=True):
    """Facts about a model from its files, without loading it.

    size: bytes of its files. digest: SHA-256, in hex, of their names, sizes and times. modified: seconds since 1970.
    num_parameters, context_length: 0 where the files do not say. info: Ollama's `model_info`, by GGUF's keys.
    settings: from the file next to the model's files; their template is `template`.
    """

    format: str
    family: str
    size: int
    digest: str
    modified: float
    num_parameters: int = 0
    quantization: str = ""
    context_length: int = 0
    template: str = ""
    parameters: dict[str, Any] = {}
    info: dict[str, Any] = {}
    settings: ModelSettings = ModelSettings()
    has_adapter: bool = False


def files_of(path: Path) -> list[Path]:
    """Return the files of a model: a GGUF file itself, with the others of a split model, or the files of its directory,
    in order. Raises `CheckpointError` for too many."""
    if path.is_file():
        return gguf.files_of(path)
    places = list(itertools.islice(path.rglob("*"), MAX_FILES + 1))
    if len(places) > MAX_FILES:
        raise CheckpointError(f"{path} has more than {MAX_FILES} files")
    return sorted(each for each in places if each.is_file() and not _is_hidden(each.relative_to(path)))


def _is_hidden(path: Path) -> bool:
    return any(part.startswith(".") for part in path.parts)


def digest_of(path: Path) -> str:
    """Return the SHA-256 of names, sizes and times of a model's files: it changes whenever one of them does."""
    stats = [(each, each.stat()) for each in files_of(path)]
    lines = [f"{each.name} {stat.st_size} {stat.st_mtime_ns}" for each, stat in stats]
    return hashlib.sha256(os.fsencode("\n".join(lines))).hexdigest()


def facts_of(path: Path) -> ModelFacts:
    """Return the facts about the model at `path`, a directory or a GGUF file. Raises `CheckpointError`."""
    try:
        stats = [each.stat() for each in files_of(path)]
        about: dict[str, Any] = {
            "size": sum(stat.st_size for stat in stats),
            "modified": max((stat.st_mtime for stat in stats), default=0.0),
            "digest": digest_of(path),
        }
        weights, settings = hub.resolve(str(path)), model_settings.read(path)
        facts = _of_gguf(weights, about) if weights.is_file() else _of_directory(weights, about)
        has_adapter = model_settings.adapter_of(path) is not None
        template = settings.template or facts.template
        return msgspec.structs.replace(facts, template=template, settings=settings, has_adapter=has_adapter)
    except OSError as error:
        raise CheckpointError(f"{path} can not be read: {error}") from error


def _of_gguf(path: Path, about: dict[str, Any]) -> ModelFacts:
    file = gguf.read(path)
    family = file.text("general.architecture") or ""
    context = file.integer(f"{family}.context_length") or 0
    counts: Counter[str] = Counter()
    for tensor in file.tensors.values():
        counts[tensor.type] += math.prod(tensor.shape)
    named = FILE_TYPES.get(file.integer("general.file_type") or 0) if "general.file_type" in file.fields else None
    number = sum(counts.values())
    info: dict[str, Any] = {"general.architecture": family, "general.parameter_count": number}
    for key in file.fields:
        if key.startswith((f"{family}.", "general.")):
            info.setdefault(key, _scalar(file, key))
    return ModelFacts(
        format="gguf",
        family=family,
        num_parameters=number,
        quantization=named or next(iter(counts.most_common(1)), ("", 0))[0],
        context_length=context,
        template=_text(file, "tokenizer.chat_template") or "",
        info={key: value for key, value in info.items() if value is not None},
        **about,
    )


def _scalar(file: gguf.GGUF, key: str) -> Any:
    """Return a number or a text of the metadata; None for a list."""
    for read in (file.integer, file.real, file.flag):
        try:
            return read(key)
        except CheckpointError:
            continue  # of another type
    return _text(file, key)


def _text(file: gguf.GGUF, key: str) -> str | None:
    """Return a text of the metadata; None for another type, and for one that is too long."""
    field = file.fields.get(key)
    try:
        return None if field is None or field.end - field.start > MAX_TEXT else file.text(key)
    except CheckpointError:
        return None


def _of_directory(path: Path, about: dict[str, Any]) -> ModelFacts:
    values = hub.read_config(path)
    text = values.get("text_config")
    values = {**values, **text} if isinstance(text, dict) else values
    family = str(values.get("model_type", ""))
    context = next((values[key] for key in ("max_position_embeddings", "n_positions", "n_ctx") if key in values), 0)
    scheme = values.get("quantization_config")
    bits = _bits(scheme) if isinstance(scheme, dict) else 0
    counts: Counter[str] = Counter()
    number = 0
    for header in _headers(path):
        for name, entry in header.entries.items():
            kind, size = entry.dtype, math.prod(entry.shape)
            counts[kind] += size
            if kind in DTYPES:
                number += size
            elif bits and kind in CODE_BITS and not name.endswith(NOT_CODES):
                number += size * CODE_BITS[kind] // bits
    number = min(number, MAX_NUMBER)
    stored = next((DTYPES[kind] for kind, _ in counts.most_common() if kind in DTYPES), "")
    method = str(scheme.get("quant_method", "")) if isinstance(scheme, dict) else ""
    context = context if _is_count(context) else 0
    info = {"general.architecture": family, "general.parameter_count": number, f"{family}.context_length": context}
    keys = {
        "hidden_size": "embedding_length",
        "num_hidden_layers": "block_count",
        "num_attention_heads": "attention.head_count",
        "num_key_value_heads": "attention.head_count_kv",
        "intermediate_size": "feed_forward_length",
        "vocab_size": "vocab_size",
    }
    info |= {f"{family}.{theirs}": values[ours] for ours, theirs in keys.items() if _is_count(values.get(ours))}
    advice = path / "generation_config.json"
    advised = hub.read_json(advice, foreign.CONFIG) if advice.is_file() else {}
    names = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")
    return ModelFacts(
        format="safetensors",
        family=family,
        num_parameters=number,
        quantization=f"{method.upper()}-{bits}bit" if method and bits else method.upper() or stored,
        context_length=context,
        template=_template(path),
        parameters={name: advised[name] for name in names if _is_number(advised.get(name))},
        info=info,
        **about,
    )


def _is_count(value: Any) -> TypeGuard[int]:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= MAX_NUMBER


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) <= MAX_NUMBER


def _bits(scheme: dict[str, Any]) -> int:
    """Return the bits of a code of a quantised checkpoint; 0 where the scheme does not say."""
    groups = scheme.get("config_groups")
    if isinstance(groups, dict):
        weights = [group.get("weights") for group in groups.values() if isinstance(group, dict)]
        scheme = next((each for each in weights if isinstance(each, dict)), {})
    bits = scheme.get("bits", scheme.get("w_bit", scheme.get("num_bits")))
    if scheme.get("load_in_4bit"):
        return 4
    if scheme.get("load_in_8bit") or str(scheme.get("quant_method")) == "fp8":
        return 8
    return bits if _is_count(bits) and 1 <= bits <= 16 else 0


def _headers(path: Path) -> Iterator[headers.Header]:
    """Yield the headers of the files that hold a model's weights. Raises `CheckpointError`."""
    index = path / headers.INDEX
    names = sorted(set(headers.read_index(index).values())) if index.is_file() else headers.files_without_index(path)
    return (headers.read(path / name) for name in names)


def _template(path: Path) -> str:
    """Return the source of a directory's chat template; empty if it has none."""
    source = path / "chat_template.jinja"
    if source.is_file() and source.stat().st_size <= MAX_TEXT:
        return foreign.read_bytes(source, MAX_TEXT).decode("utf-8", errors="replace")
    settings = path / "tokenizer_config.json"
    template = hub.read_json(settings).get("chat_template") if settings.is_file() else None
    if isinstance(template, list):
        named = {each.get("name"): each.get("template") for each in template if isinstance(each, dict)}
        template = named.get("default")
    return template if isinstance(template, str) and len(template) <= MAX_TEXT else ""
