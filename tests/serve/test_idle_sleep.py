"""--sleep-idle-seconds: an idle engine ends, what needs none is answered meanwhile, and a call starts it again."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

from tests.serve.test_models_folder import Folded
from tests.support.server import HTTP, Live

from headrace.text.tokenizer import Tokenizer


def is_sleeping(live: Live) -> bool:
    asleep: bool = HTTP.get(live.url + "/props").json()["is_sleeping"]
    return asleep


def until_asleep(live: Live) -> None:
    end = time.monotonic() + 60
    while not is_sleeping(live):
        assert time.monotonic() < end, "it stays awake"
        time.sleep(0.05)


def complete(live: Live) -> Any:
    reply = live.post("/v1/completions", {"prompt": "x", "max_tokens": 3, "seed": 1})
    assert reply.status_code == 200, reply.text
    return reply.json()["choices"]


def test_an_idle_engine_sleeps_until_the_next_call(tmp_path: Path, tokenizer: Tokenizer) -> None:
    with Folded(tmp_path, tokenizer, stays=True, sleep_idle_seconds=0) as live:
        before = complete(live)
        until_asleep(live)
        for path in ("/health", "/health/ready", "/v1/models", "/models", "/slots", "/metrics", "/props"):
            assert HTTP.get(live.url + path).status_code == 200, path
        assert HTTP.get(live.url + "/is_sleeping").json() == {"is_sleeping": True}
        assert is_sleeping(live), "nothing of this wakes it"
        # Each of these does, and the answer is the same.
        assert complete(live) == before
        for path, body in (
            ("/tokenize", {"content": "x"}),
            ("/chat/completions/input_tokens", {"messages": [{"role": "user", "content": "x"}]}),
        ):
            until_asleep(live)
            assert live.post(path, body).status_code == 200


def test_a_sleep_that_is_asked_for_is_not_ended_by_a_call(tmp_path: Path, tokenizer: Tokenizer) -> None:
    with Folded(tmp_path, tokenizer, stays=True, sleep_idle_seconds=0) as live:
        until_asleep(live)
        assert live.post("/sleep", None).status_code == 200
        assert HTTP.get(live.url + "/health").json() == {"status": "sleeping"}
        reply = live.post("/v1/completions", {"prompt": "x"})
        assert (reply.status_code, reply.json()["error"]["code"]) == (503, "sleeping")
        assert live.post("/wake_up", None).status_code == 200
        complete(live)


def test_a_server_without_the_flag_stays_awake(tmp_path: Path, tokenizer: Tokenizer) -> None:
    with Folded(tmp_path, tokenizer, stays=True) as live:
        complete(live)
        time.sleep(0.5)
        assert not is_sleeping(live)


def test_a_server_in_use_stays_awake(tmp_path: Path, tokenizer: Tokenizer) -> None:
    with Folded(tmp_path, tokenizer, stays=True, sleep_idle_seconds=3600) as live:
        complete(live)
        time.sleep(0.5)
        assert not is_sleeping(live)
