"""Lists the files of headrace that one chat request passes: `python -m tests.programs.trace_request`.

The server and the engine run in one process here, so that one profile function sees both sides. Structs that are only
constructed, and the frames and child process that carry a request between two processes, are not seen by it.
"""

from __future__ import annotations

import asyncio
import sys
import threading
from pathlib import Path
from types import FrameType

import httpx

import headrace
from headrace.engine.build import build_engine
from headrace.engine.client import InprocClient
from headrace.engine.core import EngineCore
from headrace.protocol.config import EngineConfig, ServerConfig
from headrace.serve.app import create_app
from headrace.serve.loading import ModelParts, load_text

PACKAGE = str(Path(headrace.__file__).parent) + "/"
BODY = {"messages": [{"role": "user", "content": "Tell me a story."}], "seed": 7, "max_tokens": 8, "stream": True}
NUM_REQUESTS = 4


IDLE_S = 1.5
"""Seconds without a request: longer than the period of each task in the background."""


class Trace:
    """The functions that are called, by file and name, from one `start` to the next."""

    def __init__(self) -> None:
        self.functions: set[tuple[str, str]] = set()

    def start(self) -> None:
        self.functions = set()

    def __call__(self, frame: FrameType, event: str, _: object) -> None:
        if event == "call" and frame.f_code.co_filename.startswith(PACKAGE):
            self.functions.add((frame.f_code.co_filename.removeprefix(PACKAGE), frame.f_code.co_qualname))


async def run(trace: Trace) -> set[str]:
    """Return the files that each of several requests passes. What is loaded in the background is loaded by then, and
    what runs without a request is left out."""
    engine, server = EngineConfig(model="builtin"), ServerConfig()
    text = load_text(engine, server)
    cores: list[EngineCore] = []

    def build() -> EngineCore:
        cores.append(build_engine(engine))
        return cores[-1]

    app = create_app(InprocClient(build), server, "builtin", ModelParts(text.tokenizer, text.template))
    traces: list[set[tuple[str, str]]] = []
    async with (
        app.router.lifespan_context(app),
        httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://127.0.0.1:8000") as client,
    ):
        while (await client.get("/health/ready")).status_code != 200:
            await asyncio.sleep(0.01)
        # Its answer waits for all that is loaded in the background.
        reply = await client.post("/v1/chat/completions", json=BODY | {"structured_outputs": {"regex": "a+"}})
        reply.raise_for_status()
        trace.start()
        await asyncio.sleep(IDLE_S)
        # An engine without work prepares for the next request, at a time that depends on the machine.
        if cores[0].on_idle is not None:
            cores[0].on_idle()
        idle = trace.functions
        for _ in range(NUM_REQUESTS):
            trace.start()
            reply = await client.post("/v1/chat/completions", json=BODY)
            traces.append(trace.functions)
            reply.raise_for_status()
    return {file for file, _ in set.intersection(*traces) - idle}


def main() -> None:
    trace = Trace()
    threading.setprofile(trace)
    sys.setprofile(trace)
    try:
        files = asyncio.run(run(trace))
    finally:
        sys.setprofile(None)
    print("\n".join(sorted(files)))


if __name__ == "__main__":
    main()
