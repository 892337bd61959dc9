"""Starts `headrace serve` with llama-server's command line: `python stand_in.py DATA_FOLDER FLAGS ...`.

The tests name a model by its repository: that name becomes our file of the same model. Their `--ctx-size` is that of
all slots together, as llama-server has it, and ours that of one request: each gets its share. `--seed` has vLLM's
meaning here, and becomes llama-server's other name of it, `-s`. A flag that headrace refuses is left out, with a line
that says so. Started by llama.cpp's tests, as `__main__` arranges it.
"""

from __future__ import annotations

import sys
from pathlib import Path

from typer.core import TyperOption
from typer.main import get_command

from headrace.cli.main import app, main
from headrace.other_engines import SETTINGS, translate
from headrace.protocol.errors import HeadraceError

MODELS = {"ggml-org/test-model-stories260K": "models/derived/gguf/stories260K.F32.gguf"}
"""Our files, below the data folder, by the names of repositories."""
# Flags that headrace does not know, and whether a value follows.
UNKNOWN = {
    "--chat-template-file": True, "--spec-type": True, "--spec-draft-n-max": True, "--spec-draft-n-min": True,
    "--swa-full": False, "--no-jinja": False, "--no-cache-idle-slots": False, "--tags": True, "--media-path": True,
    "--no-mmproj": False, "--backend_sampling": False, "--ui-mcp-proxy": False, "--reasoning": True,
    "--tools-runtime": True, "--mcp-servers-json": True, "--grp-attn-n": True, "--grp-attn-w": True,
}  # fmt: skip


def serve_arguments(words: list[str], data: Path) -> list[str]:
    """Return the arguments of `headrace serve` for those of llama-server."""
    ours = _own_flags()
    num_slots = 1 if "--kv-unified" in words else int(_value(words, "--parallel", "1"))
    arguments: list[str] = []
    rest = iter(words)
    for word in rest:
        setting = SETTINGS.get(word)
        is_ours = word in ours
        takes_value = ours[word] if is_ours else setting.takes_value if setting else UNKNOWN.get(word, False)
        value = [next(rest)] if takes_value else []
        if word == "--hf-repo":
            if value[0] not in MODELS:
                sys.exit(f"the data folder has no model {value[0]}")
            word, value, is_ours = str(data / MODELS[value[0]]), [], True
        elif word == "--ctx-size":
            value = [str(int(value[0]) // num_slots)]
        elif word == "--seed":
            word, is_ours = "-s", False
        if not is_ours and not _is_taken([word, *value], ours):
            print("stand-in: left out", word, *value, flush=True)
            continue
        arguments += [word, *value]
    return arguments


def _own_flags() -> dict[str, bool]:
    """The flags of `headrace serve`, and whether a value follows."""
    serve = get_command(app).commands["serve"]  # type: ignore[attr-defined]
    options = [option for option in serve.params if isinstance(option, TyperOption)]
    return {name: not each.is_flag for each in options for name in (*each.opts, *each.secondary_opts)}


def _is_taken(words: list[str], ours: dict[str, bool]) -> bool:
    if words[0] not in SETTINGS:
        return words[0] not in UNKNOWN
    try:
        translate(words, ours)
    except HeadraceError:
        return False
    return True


def _value(words: list[str], name: str, default: str) -> str:
    return words[words.index(name) + 1] if name in words else default


if __name__ == "__main__":
    # Nothing routes traffic here that would have to learn that the server ends.
    words = [*serve_arguments(sys.argv[2:], Path(sys.argv[1])), "--shutdown-delay", "0"]
    sys.argv = ["headrace", "serve", *words]
    main()
