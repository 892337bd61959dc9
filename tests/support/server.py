"""A small tokenizer and live servers, over the fake engine, for the server's tests."""

from __future__ import annotations

import asyncio
import contextlib
import io
import json
import logging
import socket
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import uvicorn
from tests.support import fake

from headrace.engine import logs
from headrace.engine.client import EngineClient, InprocClient
from headrace.engine.core import EngineCore
from headrace.engine.links import ProcessLink
from headrace.insight.simulated import Behaviour, Oracle
from headrace.protocol.config import EngineConfig, ServerConfig
from headrace.protocol.params import SamplingParams
from headrace.serve.app import create_app
from headrace.serve.call.states import State
from headrace.serve.gates.connection import Connection
from headrace.serve.loading import ModelParts
from headrace.serve.process import Server
from headrace.serve.reach import Reach, UnderPath
from headrace.text.templates import ChatTemplate
from headrace.text.tokenizer import Tokenizer

PATIENCE_S = 240.0
"""How long a reply may take: on a loaded machine a test of a few seconds takes minutes. pytest ends each at 300."""
# One for all: to make a client loads the certificates, which takes longer than most tests.
HTTP = httpx.Client(
    limits=httpx.Limits(max_connections=None, max_keepalive_connections=0), verify=False, timeout=PATIENCE_S
)
TEMPLATE = (
    "{% for m in messages %}[{{ m['role'] }}]{{ m['content'] }}{% endfor %}{% if add_generation_prompt %}[a]{% endif %}"
)


def write_tokenizer(directory: Path, vocab_size: int = fake.VOCAB_SIZE) -> Path:
    """A byte-level tokenizer: token i is byte i, but for token 255, which ends a text, and words from 256 on."""
    from headrace.text.tokenizer_bytes import byte_letters

    letters = byte_letters()
    vocab = {letter: index for index, letter in enumerate(letters[:255])} | {"<eos>": fake.EOS}
    vocab |= {f"word{index}": index for index in range(fake.VOCAB_SIZE, vocab_size)}
    result = {
        "version": "1.0",
        "added_tokens": [
            {"id": fake.EOS, "content": "<eos>", "special": True, "single_word": False, "lstrip": False}
            | {"rstrip": False, "normalized": False}
        ],
        "pre_tokenizer": {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False, "use_regex": False},
        "decoder": {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False, "use_regex": False},
        "model": {"type": "BPE", "vocab": vocab, "merges": []},
    }
    (directory / "tokenizer.json").write_text(json.dumps(result))
    config = {"eos_token": "<eos>", "chat_template": TEMPLATE}
    (directory / "tokenizer_config.json").write_text(json.dumps(config))
    return directory


@pytest.fixture(scope="session")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return Tokenizer.load(write_tokenizer(tmp_path_factory.mktemp("tokenizer")))


class Live:
    """A server on a free port, in a thread of this process. Without `stays`, its models are those of a folder alone."""

    def __init__(
        self, client: EngineClient, tokenizer: Tokenizer, server: ServerConfig, stays: bool = True, **more: Any
    ) -> None:
        self.client = client
        self.stays = stays
        model, template = client if stays else None, more.pop("template", None) or ChatTemplate.of(tokenizer)
        folder, reach = more.pop("folder", None), more.pop("reach", Reach())
        self.app = create_app(model, server, "fake", ModelParts(tokenizer, template, **more), folder)
        self.socket = socket.create_server(("127.0.0.1", 0), backlog=512)
        self.socket.setblocking(False)
        self.port = self.socket.getsockname()[1]
        self.url = f"{reach.scheme}://127.0.0.1:{self.port}{reach.path}"
        config = uvicorn.Config(
            UnderPath(self.app, reach.path) if reach.path else self.app,
            http=Connection.protocol(server.max_connections_per_peer),
            log_config=None,  # which would reset the level of a connection's logger
            log_level="error",
            ws="none",
            timeout_graceful_shutdown=2,
        )
        self.server = Server(config, self.app.state.lifespan, delay=0, drain_seconds=0, context=reach.context())
        self.server.takes_signals = False
        self.thread = threading.Thread(target=lambda: asyncio.run(self.server.serve([self.socket])), daemon=True)

    def __enter__(self) -> Live:
        self.thread.start()
        self.wait(lambda: HTTP.get(self.url + "/health/live").status_code == 200)
        self.wait(lambda: self.app.state.lifespan.state is not State.LOADING)
        return self

    def __exit__(self, *exc: object) -> None:
        self.server.should_exit = True
        self.thread.join(60)
        self.socket.close()
        assert not self.thread.is_alive(), "the server did not stop"

    @staticmethod
    def wait(until: Callable[[], bool], seconds: float = PATIENCE_S) -> None:
        """Poll `until`, which may also fail to connect, for at most `seconds`."""
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            with contextlib.suppress(httpx.TransportError):
                if until():
                    return
            time.sleep(0.01)
        raise AssertionError(f"not so within {seconds} s")

    def post(self, path: str, body: Any, **more: Any) -> httpx.Response:
        return HTTP.post(self.url + path, json=body, **more)

    def metric(self, name: str, **labels: str) -> float:
        """The sum of one metric's samples with these labels."""
        total = None
        for line in HTTP.get(self.url + "/metrics").text.splitlines():
            head, _, value = line.rpartition(" ")
            if head.partition("{")[0] == f"headrace:{name}" and all(f'{k}="{v}"' in head for k, v in labels.items()):
                total = (total or 0.0) + float(value)
        assert total is not None, name
        return total


def lines_of(reply: httpx.Response) -> Iterator[str]:
    """Lines of a stream as they come. httpx's own cut at letters, such as U+2028, that a random text may have."""
    rest = ""
    for piece in reply.iter_text():
        *whole, rest = (rest + piece).split("\n")
        yield from whole
    yield rest


def inproc(delay: float = 0.0, **config: Any) -> EngineClient:
    return InprocClient(lambda: fake.build(EngineConfig(model="fake", **config), delay))


@contextlib.contextmanager
def logged(form: str) -> Iterator[io.StringIO]:
    """All that is logged at the level debug, as the server would write it in one of `logs.FORMATTERS`."""
    text = io.StringIO()
    stream = logging.StreamHandler(text)
    stream.setFormatter(logs.FORMATTERS[form]())
    loggers = [logging.getLogger(name) for name in logs.NAMES]
    before = [(logger.handlers, logger.level, logger.propagate) for logger in loggers]
    for logger in loggers:
        logger.handlers, logger.propagate = [stream], False
        logger.setLevel("DEBUG")
    try:
        yield text
    finally:
        for logger, (handlers, level, propagate) in zip(loggers, before, strict=True):
            logger.handlers, logger.propagate = handlers, propagate
            logger.setLevel(level)


def brittle(num_steps: int) -> EngineClient:
    """An engine that fails whatever runs after so many steps."""

    def build() -> EngineCore:
        core = fake.build(EngineConfig(model="fake"))
        executor: Any = core.executor
        executor.behaviour = Behaviour(fail=lambda step_id, index: step_id > num_steps)
        return core

    return InprocClient(build)


def child(delay: float = 0.0, max_restarts: int = 3, vocab_size: int = fake.VOCAB_SIZE, **config: Any) -> EngineClient:
    link = ProcessLink(EngineConfig(model="fake", **config), fake.command(delay, vocab_size))
    return EngineClient(link, max_restarts=max_restarts)


@pytest.fixture(scope="module")
def live(tokenizer: Tokenizer) -> Iterator[Live]:
    """One server for tests that do not harm it. A step takes a millisecond."""
    config = ServerConfig(log_stats_interval=0, any_model_name=False)
    with Live(inproc(delay=0.001, max_num_seqs=64), tokenizer, config) as result:
        yield result


@pytest.fixture
def say(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """Makes every engine of this process answer with a given text, and then end."""

    def scripted(text: str) -> None:
        script = text.encode()

        def next_token(self: Oracle, context: Any, params: SamplingParams, num_generated: int) -> int:
            return script[num_generated] if num_generated < len(script) else fake.EOS

        monkeypatch.setattr(Oracle, "next_token", next_token)

    return scripted
