"""`ModelSettings`: what Ollama's `create` sets for a model of the models folder, in `headrace.json` beside its files.

A default system message, a chat template in place of the model's own, and default sampling parameters. Knows files;
`engine.model_folder` writes them, and `serve.loading` applies them when the model runs.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec

from headrace import hub
from headrace.protocol.errors import CheckpointError
from headrace.protocol.parameters import PARAMETERS

FILE = "headrace.json"


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
        settings = msgspec.convert(hub.read_json(path), ModelSettings)
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
