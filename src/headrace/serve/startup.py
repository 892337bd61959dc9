"""The summary of a server that is ready: its model, weights, cache, APIs and address, for the log.

Knows the engine's numbers and the model's files. Called by the server's lifespan.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from headrace import hub
from headrace.engine.library.model_facts import files_of
from headrace.insight import audit
from headrace.protocol.errors import CheckpointError
from headrace.protocol.parameters import APIS
from headrace.protocol.step import EngineInfo

WEIGHT_FILES = ("*.safetensors", "*.u8")
UNADVISED = (
    "1 on OpenAI's routes, as vLLM has it, 0.8 on llama-server's and Ollama's: no file advises one; "
    "--temp sets it for all"
)
UNITS = ((2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB"))


def summary(
    info: EngineInfo,
    path: Path | None,
    url: str,
    num_routes: int,
    measured: Mapping[str, Any] | None = None,
    temperature: float | None = None,
    why_policy: str = "",
) -> Mapping[str, Any]:
    """Return the `extra` of a record of the log: `rows` for people, and the same as `fields` for programs.

    `path` is the model's directory or GGUF file, None for a model without files; `url` is the server's address;
    `measured` is the measured quality of a form that the weights were quantised to; `temperature` is the advice of the
    model's files, or a flag's; `why_policy` is the reason of the scheduling policy."""
    form, num_bytes = (info.dtype, 0) if path is None else (stored_form(path, info), num_weight_bytes(path))
    num_tokens, length = info.num_blocks * info.block_size, info.max_model_len
    engine = f"computed in {info.dtype} by the backend {info.backend} on {info.device}"
    multiplied = f", activations {info.activations}" if info.activations else ""
    rows = {
        "model": f"{info.model}, with a context of {length:,} tokens",
        "weights": f"{form}{multiplied}, {readable(num_bytes)}; {engine}"
        if num_bytes
        else f"{form}{multiplied}; {engine}",
        "KV cache size": f"{num_tokens:,} tokens in {info.kv_cache_dtype or info.dtype}; "
        f"maximum concurrency for {length:,} tokens per request: {num_tokens / length:.2f}x",
        "scheduling": ": ".join(filter(None, (info.scheduling_policy, why_policy))),
        "answers end with": f"token {', '.join(map(str, info.eos_token_ids))}" if info.eos_token_ids else "no token",
        "temperature": UNADVISED if temperature is None else f"{temperature:g} where a request has none",
        "APIs": f"{', '.join(APIS.values())}; {num_routes} routes, listed at {url}/docs",
        "address": url,
    }
    if not info.generates:
        rows = {name: text for name, text in rows.items() if name not in ("answers end with", "temperature")}
        kind = "an encoder" if info.whole_texts else "weights without an output head"
        rows["vectors"] = f"{kind}, for no answers; pooling {info.pooling or 'last'} where a request names none"
    if info.quantization:
        rows["loss"] = audit.loss_in_words(measured, info)
    fields = {
        "model": info.model,
        "max_model_len": length,
        "weights": form,
        "num_weight_bytes": num_bytes,
        "dtype": info.dtype,
        "backend": info.backend,
        "device": info.device,
        "num_cache_tokens": num_tokens,
        "activations": info.activations,
        "kv_cache_dtype": info.kv_cache_dtype,
        "scheduling_policy": info.scheduling_policy,
        "eos_token_ids": info.eos_token_ids,
        "apis": list(APIS.values()),
        "num_routes": num_routes,
        "address": url,
    }
    return {"rows": rows, "fields": fields}


def stored_form(path: Path, info: EngineInfo) -> str:
    """Return the form that the weights are computed in: a quantisation, or the type of plain numbers."""
    if info.quantization:
        return info.quantization
    if path.is_file():
        return "gguf"
    try:
        stored = hub.read_config(path).get("quantization_config")
    except CheckpointError:
        # The engine has read the file by now, or needs no file.
        stored = None
    return str(stored["quant_method"]) if isinstance(stored, dict) and "quant_method" in stored else info.dtype


def num_weight_bytes(path: Path) -> int:
    """Return the bytes of the files of weights; 0 where there are none."""
    files = files_of(path) if path.is_file() else [file for pattern in WEIGHT_FILES for file in path.glob(pattern)]
    return sum(file.stat().st_size for file in files)


def readable(num_bytes: int) -> str:
    """Return a number of bytes with a unit for people, such as 1.5 GiB."""
    size, unit = next(((size, unit) for size, unit in UNITS if num_bytes >= size), (1, "bytes"))
    return f"{num_bytes / size:.1f} {unit}"
