"""Serving where torch is not installed: weights of each kind have the bits that they have beside torch, and what needs
torch names the extra that brings it."""

from __future__ import annotations

import contextlib
import json
import os
import re
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import gguf
import httpx
import pytest
from bench.tied import tied
from tests.formats.gguf.models import convert
from tests.laws.rules import ROOT
from tests.support.bits import digest
from tests.support.checkpoints import write_llama

from headrace.backends.native import native

pytestmark = pytest.mark.skipif(native()[0] is None, reason="no native core")

HIDE = """
from importlib.machinery import PathFinder
HIDDEN = {"torch", "triton", "transformers", "safetensors", "scipy", "gguf"}
find = PathFinder.find_spec
PathFinder.find_spec = lambda name, *args: None if name.partition(".")[0] in HIDDEN else find(name, *args)
"""
"""For sitecustomize.py: packages that a user's environment does not have are not found."""


@pytest.fixture(scope="module")
def bare(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """The environment of an interpreter that finds no torch."""
    folder = tmp_path_factory.mktemp("hidden")
    (folder / "sitecustomize.py").write_text(HIDE)
    return os.environ | {"PYTHONPATH": os.pathsep.join((str(folder), str(ROOT / "src")))}


def run(env: dict[str, str], *words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, *words], env=env, cwd=ROOT, capture_output=True, text=True, timeout=100)


def digests(env: dict[str, str], cases: list[Any]) -> list[str]:
    done = run(env, "-m", "tests.support.bits", json.dumps(cases))
    assert done.returncode == 0, done.stderr
    data: list[str] = json.loads(done.stdout)
    return data


def q4_0(name: str, weight: Any) -> tuple[Any, Any]:
    kind = gguf.GGMLQuantizationType.Q4_0
    return (gguf.quants.quantize(weight, kind), kind) if "attn" in name and "norm" not in name else (weight, None)


def test_weights_have_the_bits_that_they_have_beside_torch(bare: dict[str, str], tmp_path: Path) -> None:
    plain = write_llama(tmp_path / "plain")
    packed = {"quantization": "int8", "save_packed": True}
    cases: list[Any] = [["builtin", {}], ["builtin", {"quantization": "int4"}]]
    cases += [[str(plain), {"dtype": "bfloat16", "quantization": name}] for name in (None, "nf4", "int4-g32-asym")]
    cases += [[str(convert(plain, tmp_path / "model.gguf", q4_0)), {}], [str(plain), packed], [str(plain), packed]]
    expected = [digest(*case) for case in cases]
    assert all(re.fullmatch(r"[0-9a-f]{64}", bits) for bits in expected), expected
    assert len(set(expected)) == len(cases) - 1  # The packed file has the bits of what it was packed from.
    assert digests(bare, cases) == expected


def test_what_needs_torch_names_the_extra(bare: dict[str, str]) -> None:
    """It is also the control: torch is hidden indeed."""
    reference, gpu = digests(bare, [["builtin", {"backend": name, "device": "cpu"}] for name in ("torch_ref", "cuda")])
    assert reference.startswith("RequestError: backend")
    assert "pip install 'headrace[torch]'" in reference
    assert "pip install 'headrace[cuda]'" in gpu
    assert "No module named 'torch'" in run(bare, "-c", "import headrace.backends.torch_ref").stderr
    quantise = run(bare, "-m", "headrace", "quantize", "builtin", "out")
    assert (quantise.returncode, "pip install 'headrace[torch]'" in quantise.stderr) == (1, True), quantise.stderr
    (checked,) = digests(bare | {"HEADRACE_DEBUG": "3"}, [["builtin", {}]])
    assert "pip install 'headrace[torch]'" in checked
    doctor = run(bare, "-m", "headrace", "doctor", "--json")
    assert doctor.returncode == 0, doctor.stderr
    assert "headrace[torch]" in doctor.stdout


def test_the_server_answers(bare: dict[str, str]) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    words = ["serve", "builtin", "--port", str(port), "--num-gpu-blocks-override", "64", "--max-model-len", "512"]
    process = subprocess.Popen(
        tied([sys.executable, "-m", "headrace", *words]), env=bare, stderr=subprocess.PIPE, text=True
    )
    try:
        url = f"http://127.0.0.1:{port}"
        for _ in range(600):
            assert process.poll() is None, process.stderr.read() if process.stderr else ""
            with contextlib.suppress(httpx.TransportError):
                if httpx.get(f"{url}/health").status_code == 200:
                    break
            time.sleep(0.1)
        body = {"model": "builtin", "prompt": "Once upon a time", "max_tokens": 4, "temperature": 0}
        reply = httpx.post(f"{url}/v1/completions", json=body, timeout=240)
        assert reply.status_code == 200, reply.text
        assert reply.json()["usage"]["completion_tokens"] == 4
    finally:
        process.terminate()
        process.communicate(timeout=60)
