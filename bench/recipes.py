"""The checkpoints that `python -m bench.quality --made` judges: one of every way that `headrace quantize` has.

The command makes each of them once, in a folder of its own, which is valid until the model's weights change. GPTQ, AWQ
and others that need a text are calibrated on text that the model wrote, other than the text of the evaluation.
"""

from __future__ import annotations

import hashlib
import json
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from headrace import hub
from headrace.cli.bench.outliers import plant
from headrace.cli.quantize import calibration_text

ROOT = Path(__file__).parents[1]
FOLDER = ROOT / "build" / "quality"


class Recipe(NamedTuple):
    """A row: its name, the options of `headrace quantize`, and the suffix of its file or folder (".gguf")."""

    name: str
    options: str
    suffix: str = ""


LEVELS = (
    "Q8_0", "Q6_K", "Q5_K_M", "Q5_K_S", "Q5_1", "Q5_0", "Q4_K_M", "Q4_K_S", "Q4_1", "Q4_0", "Q3_K_M", "Q3_K_S", "Q2_K",
)  # fmt: skip
PIECE = 512
"""Tokens of a piece of calibration text."""
TUNED_TOKENS = 2**17
"""Tokens of the text that rounded weights are trained on."""
CALIBRATED = ("gptq", "awq", "smoothquant", "llm_int8", "mixed", "qat")
BLOCKS = 256
"""Inputs of a block of the K-quants: rows that are no multiple of it get other types, under the same name."""


def recipes(group: int, num_in: int, num_steps: int) -> Iterator[Recipe]:
    """group: inputs that share a scale, where there is a choice. num_in: the least inputs of the model's layers.
    num_steps: of training rounded weights, 0 for none."""
    for method in ("rtn", "gptq", "awq", "hqq"):
        for bits in (4, 3, 2):
            layout = " --format compressed-tensors" if bits != 4 else ""
            # Of four codes, symmetric ones reach one end of the group only.
            signs = " --asymmetric" if bits == 2 and method in ("rtn", "gptq") else ""
            name = f"{method} int{bits}-g{group}" + ("-asym" if signs or method in ("awq", "hqq") else "")
            yield Recipe(name, f"--method {method} --bits {bits} --group-size {group}{signs}{layout}")
    yield Recipe(f"gptq int4-g{group} act-order", f"--method gptq --bits 4 --group-size {group} --act-order group")
    yield Recipe("rtn W8A8", "--method rtn --bits 8 --group-size -1")
    yield Recipe(f"rtn int8-g{group}", f"--method rtn --bits 8 --group-size {group}")
    yield Recipe("rtn W8A8 per tensor", "--method rtn --bits 8 --group-size 0")
    yield Recipe("gptq int8", "--method gptq --bits 8 --group-size -1")
    yield Recipe("smoothquant W8A8", "--method smoothquant")
    yield Recipe("LLM.int8() (bitsandbytes)", "--method llm_int8")
    yield Recipe("NF4 (bitsandbytes)", "--method nf4 --group-size 64")
    yield Recipe("fp8 E4M3", "--method fp8")
    yield Recipe("fp8 E5M2", "--method fp8_e5m2")
    yield Recipe("MXFP4 (compressed-tensors)", "--method mxfp4")
    yield Recipe("MXFP4 (blocks)", "--method mxfp4 --format mxfp4")
    yield Recipe("gptq as Q4_0 (GGUF)", "--method gptq --bits 4 --group-size 32 --format gguf")
    for level in LEVELS:
        if "K" not in level or num_in % BLOCKS == 0:
            yield Recipe(f"{level} (GGUF)", f"--method {level}", ".gguf")
    for budget in ("4.5", "3.5"):
        if num_in % BLOCKS == 0:
            yield Recipe(f"mixed {budget} (GGUF)", f"--method mixed --bits {budget}", ".gguf")
    for bits in (4, 3, 2) if num_steps else ():
        signs = " --asymmetric" if bits == 2 else ""
        name = f"fine-tuned int{bits}-g{group}" + ("-asym" if signs else "")
        yield Recipe(name, f"--method qat --num-steps {num_steps} --bits {bits} --group-size {group}{signs} --bfloat16")


def make(
    model: str, num_tokens: int, num_steps: int = 0, pattern: str = "", writer: str | None = None
) -> Iterator[tuple[str, Path]]:
    """Yield (name of the row, path for `headrace serve`) of every recipe whose name matches the regular expression
    `pattern`; a missing checkpoint is made. num_steps: of training rounded weights, 0 for none. writer: the
    model that writes the text, if another one."""
    directory = hub.resolve(model)
    config = hub.read_json(directory / "config.json")
    hidden = int(config["hidden_size"])
    num_in = hidden if int(config["intermediate_size"]) % BLOCKS == 0 else 32
    folder = folder_of(directory)
    author = model if writer is None else writer
    for recipe in recipes(64, num_in, num_steps):
        if not re.search(pattern, recipe.name):
            continue
        stem = "".join(letter if letter.isalnum() or letter in "._-" else "-" for letter in recipe.name).strip("-")
        path = folder / (stem + recipe.suffix)
        done, key = folder / f"{stem}.options", recipe.options
        command = [str(Path(sys.executable).with_name("headrace")), "quantize", model, str(path)]
        if any(word in recipe.options for word in CALIBRATED):
            size = TUNED_TOKENS if "qat" in recipe.options else num_tokens
            command += ["--calibration", str(written(author, size)), "--num-calibration-tokens", str(size)]
            key += f" ({size} tokens)"
        if not done.is_file() or done.read_text() != key:
            print("making", recipe.name, file=sys.stderr, flush=True)
            if path.is_dir():
                shutil.rmtree(path)
            path.unlink(missing_ok=True)
            subprocess.run([*command, *recipe.options.split()], check=True, stdout=subprocess.DEVNULL)
            done.write_text(key)
        yield recipe.name, path


def folder_of(directory: Path) -> Path:
    """Return the folder of what is made of the weights in `directory`; it is there afterwards."""
    files = sorted(directory.glob("*.safetensors"))
    stamp = hashlib.sha256(b"".join(file.read_bytes() for file in files)).hexdigest()[:12]
    folder = FOLDER / f"{directory.name}-{stamp}"
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def written(model: str, num_tokens: int) -> Path:
    """Return a file (token ids, JSON lines) with text that the model writes; it is written once."""
    directory = hub.resolve(model)
    path = folder_of(directory) / f"words-{num_tokens}.jsonl"
    if not path.is_file():
        pieces = calibration_text(model, directory, None, num_tokens, PIECE)
        path.write_text("".join(json.dumps({"token_ids": piece}) + "\n" for piece in pieces))
    return path


def planted(model: str) -> Path:
    """Return a copy of the model with outliers (`cli.bench.outliers`), which is made once."""
    directory = hub.resolve(model)
    path = folder_of(directory) / "planted"
    if not path.is_dir():
        partial = path.with_name("planted.partial")
        shutil.rmtree(partial, ignore_errors=True)
        plant(directory, partial).rename(path)
    return path
