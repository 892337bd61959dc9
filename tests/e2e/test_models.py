"""A real server with a folder of models: what each answers whatever else is loaded, and the memory that comes back."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import httpx
import psutil
from tests.support.serving import serve

MOST_LEFT = 64 * 2**20


def memory(pid: int) -> int:
    """Resident bytes of a process and of all below it."""
    root = psutil.Process(pid)
    total = 0
    for process in (root, *root.children(recursive=True)):
        try:
            total += process.memory_info().rss
        except psutil.NoSuchProcess:
            continue
    return total


def test_K16_models_come_and_go_answers_stay_and_memory_comes_back(shared_data: Path, tmp_path: Path) -> None:
    (tmp_path / "tiny").symlink_to(shared_data / "models" / "TinyStories-656K")
    (tmp_path / "stories.gguf").symlink_to(shared_data / "models" / "derived" / "gguf" / "stories260K.Q8_0.gguf")
    flags = ("--models-dir", str(tmp_path), "--models-max", "2", "--kv-cache-memory-bytes", "8M")
    with serve(*flags, "--log-stats-interval", "0") as server:
        http = httpx.Client(base_url=server.url, timeout=240)

        def answer(name: str) -> Any:
            body = {"model": name, "prompt": "Once upon a time", "max_tokens": 12, "logprobs": 2, "seed": 7}
            return http.post("/v1/completions", json=body).raise_for_status().json()["choices"]

        def loaded() -> list[str]:
            return [model["name"] for model in http.get("/api/ps").json()["models"]]

        def unload(name: str) -> None:
            http.post("/api/generate", json={"model": name, "keep_alive": 0, "stream": False}).raise_for_status()

        http.get("/api/tags")
        before = memory(server.pid)
        alone = answer("tiny")
        (card,) = http.get("/api/ps").json()["models"]
        assert before < before + card["size"] <= memory(server.pid) + MOST_LEFT
        assert answer("stories")[0]["text"]
        assert sorted(loaded()) == ["stories:latest", "tiny:latest"]
        assert answer("tiny") == alone, "the answer depends on the request alone"
        unload("tiny")
        unload("stories")
        assert (loaded(), server.num_engines()) == ([], 0)
        end = time.monotonic() + 30
        while memory(server.pid) > before + MOST_LEFT and time.monotonic() < end:
            time.sleep(0.1)
        assert memory(server.pid) <= before + MOST_LEFT
        http.close()
