"""R-28: what becomes of a running engine whose model files vanish, are cut short, or come back."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

import pytest
from tests.engine.test_client import read, request, run

from headrace.builtin import directory
from headrace.engine.client import EngineClient
from headrace.engine.links import ProcessLink
from headrace.protocol.config import EngineConfig
from headrace.protocol.errors import EngineDeadError

PATH = directory()


@pytest.mark.slow
@pytest.mark.timeout(180)
def test_R_28_model_files_that_vanish_are_cut_short_and_come_back(tmp_path: Path) -> None:
    """A file that is gone harms nobody: it is mapped. One that was cut short kills the engine with SIGBUS; if it is
    whole again, answers go on to the bit, and else they end with an error."""
    model = tmp_path / "model"
    shutil.copytree(PATH, model, ignore=shutil.ignore_patterns("drafters", "__pycache__"))
    file, backup = model / "model.safetensors", tmp_path / "whole"
    shutil.copyfile(file, backup)

    def put_back() -> None:
        shutil.copyfile(backup, tmp_path / "copy")
        os.replace(tmp_path / "copy", file)

    def cut_and_put_back() -> None:
        os.truncate(file, 4096)
        put_back()

    async def ask(client: EngineClient, at: dict[int, Any] | None = None) -> Any:
        responses = [request([100 + i, 200, 300], seed=i, logprobs=1, max_tokens=30) for i in range(4)]
        return await read(client.submit(responses), at)

    async def work(client: EngineClient) -> None:
        first = await ask(client)
        assert len(first) == 4
        assert await ask(client, {5: file.unlink}) == first
        assert client.num_restarts == 0
        # The engine that runs has the file that is gone; the next one takes that which is there.
        put_back()
        os.kill(client.replicas[0].link.pid, 9)  # type: ignore[attr-defined]
        assert await ask(client) == first
        assert await ask(client, {5: cut_and_put_back}) == first
        assert client.num_restarts == 2
        with pytest.raises(EngineDeadError):
            await ask(client, {5: lambda: os.truncate(file, 4096)})

    config = EngineConfig(model=str(model), num_threads=1, num_gpu_blocks_override=64)
    run(EngineClient(ProcessLink(config), max_restarts=3), work)
