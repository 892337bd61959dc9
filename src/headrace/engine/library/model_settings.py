"""`ModelSettings`: the settings that Ollama's `create` writes for a model of the models folder, in `headrace.json` next
to its files.

A default system message, a chat template in place of the model's own, default sampling parameters; and an adapter, in a
folder beside it. Knows files;
`engine.library.model_folder` writes them, and `serve.loading` and `llm` apply them when the model runs.
"""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import msgspec

from headrace import foreign, gguf, hub
from headrace.protocol.adapters import NamedAdapter
from headrace.protocol.config import EngineConfig
from headrace.protocol.errors import CheckpointError
from headrace.protocol.parameters import PARAMETERS

logger = logging.getLogger("headrace.server")

FILE = "headrace.json"
ADAPTER = ".adapter"
"""The folder of a model's own adapter, with PEFT's two files or a GGUF file."""
ADAPTER_NAME = "adapter"


class ModelSettings(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, forbid_unknown_fields=True):
    """`system`: the system message of conversations that begin with none. `template`: a Jinja source. Both empty: the
    model's own. `sampling`: fields of `SamplingParams` that a request leaves out."""

    system: str = ""
    template: str = ""
    sampling: dict[str, Any] = {}


def read(model: str | Path) -> ModelSettings:
    """Return the settings in a model's directory; those without a value where there is no file of them.

    Raises `CheckpointError` for a field that is none, or a value that no request may have.
    """
    path = Path(model) / FILE
    if not path.is_file():
        return ModelSettings()
    try:
        settings = msgspec.convert(hub.read_json(path, foreign.CONFIG), ModelSettings)
    except msgspec.ValidationError as error:
        raise CheckpointError(f"{path}: {error}") from error
    for name, value in settings.sampling.items():
        if name not in PARAMETERS:
            raise CheckpointError(f"{path}: sampling: {name[:80]!r} is no sampling parameter")
        hub.check_field(path, name, value, f"sampling.{name}")
    return settings


def update(directory: Path, settings: ModelSettings) -> None:
    """Add settings to those in a model's directory. The file is a new one: other models may share the old one."""
    if settings == ModelSettings():
        return
    old = read(directory)
    changed = ModelSettings(
        system=settings.system or old.system,
        template=settings.template or old.template,
        sampling=old.sampling | settings.sampling,
    )
    path = directory / FILE
    path.unlink(missing_ok=True)
    path.write_bytes(msgspec.json.encode(changed))


def adapter_of(model: str | Path) -> Path | None:
    """Return where a model's own adapter lies, None for a model without one."""
    folder = Path(model) / ADAPTER
    if not folder.is_dir():
        return None
    return next(iter(sorted(folder.glob("*.gguf"))), folder)


def with_adapter(config: EngineConfig) -> EngineConfig:
    """Return a config with the adapter that is part of its model, if there is one: requests that name the model get
    it. Raises `RequestError` where the config has others for these requests."""
    path = adapter_of(config.model)
    if path is None:
        return config
    module = NamedAdapter(ADAPTER_NAME, str(path), 1.0).text()
    if module in (config.lora_modules or ()):
        return config
    return msgspec.structs.replace(config, enable_lora=True, lora_modules=[module, *(config.lora_modules or ())])


def default_params(model: str, revision: str | None, takes_advice: bool = True) -> dict[str, Any]:
    """Return the sampling parameters for fields that a request leaves out: from generation_config.json if
    `takes_advice`, and from `headrace.json`, which takes precedence. Raises `CheckpointError`."""
    advised = advised_params(model, revision) if takes_advice else {}
    return advised | read(model).sampling


def advised_params(model: str, revision: str | None) -> dict[str, Any]:
    """Return the sampling parameters of the model's generation_config.json, as `vllm serve` applies them, or of the
    metadata of its GGUF file, as llama-server does.

    Raises `CheckpointError` for a value that no request may have.
    """
    directory = hub.resolve(model, revision, weights=False)
    if directory.is_file():
        return _advised_by_gguf(directory)
    path = directory / "generation_config.json"
    if not path.is_file():
        return {}
    advised = hub.read_json(path, foreign.CONFIG)
    same = "temperature top_k top_p min_p typical_p repetition_penalty no_repeat_ngram_size max_string_length"
    names = {name: name for name in same.split()} | {"max_new_tokens": "max_tokens"}
    params = {ours: advised[theirs] for theirs, ours in names.items() if advised.get(theirs) is not None}
    for theirs, ours in names.items():
        if ours in params:
            hub.check_field(path, ours, params[ours], theirs)
    closes = advised.get("disable_additional_properties", False)
    if not isinstance(closes, bool):
        raise CheckpointError(f"{path}: disable_additional_properties: {closes!r:.80} must be true or false")
    if closes:
        params["disable_additional_properties"] = True
    if params:
        logger.info("sampling defaults from the model's generation_config.json: %s", params)
    return params


GGUF_ADVICE = {
    "temp": "temperature", "top_k": "top_k", "top_p": "top_p", "min_p": "min_p", "xtc_probability": "xtc_probability",
    "xtc_threshold": "xtc_threshold", "penalty_last_n": "repeat_last_n", "penalty_repeat": "repetition_penalty",
    "mirostat": "mirostat", "mirostat_tau": "mirostat_tau", "mirostat_eta": "mirostat_eta",
}  # fmt: skip
"""The keys of GGUF files below `general.sampling`, and the parameters of requests."""


def _advised_by_gguf(path: Path) -> dict[str, Any]:
    file = gguf.read(path)
    params: dict[str, Any] = {}
    for theirs, ours in GGUF_ADVICE.items():
        key = f"general.sampling.{theirs}"
        if key not in file.fields:
            continue
        # Beyond the table's range is refused below, with the names of the file.
        value = file.integer(key, -(2**31)) if PARAMETERS[ours].kind == "int" else file.real(key)
        hub.check_field(path, ours, value, key)
        params[ours] = value
    if params:
        logger.info("sampling defaults from %s: %s", path.name, params)
    return params
