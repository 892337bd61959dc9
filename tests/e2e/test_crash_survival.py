"""The engine's process dies in mid-answer, in every way, under 32 streams of every kind: nobody gets another bit.

A slice of the campaign in tests/campaigns/faults.py, on four layers of the built-in model.
"""

from __future__ import annotations

import json
from collections.abc import Callable

import pytest
from tests.campaigns import children, faults
from tests.campaigns.streams import Told, asked, is_whole, same
from tests.support.shallow import shallow


def test_R_01_R_02_streams_survive_the_engines_death() -> None:
    """SIGKILL, SIGSEGV, SIGSTOP and no more memory."""
    report = faults.run(
        4, seed=1, kinds=("kill", "segv", "stop", "memory"), watchdog=5.0, max_tokens=40, per_round=2,
        arguments=(shallow(), "--served-model-name", "builtin"),
    )  # fmt: skip
    assert not report["problems"], json.dumps(report["problems"][:3], indent=1)
    counts = report["counts"]
    assert counts["faults"] == 4
    assert counts["streams"] >= 2 * 32
    assert report["restarts"] >= 3


def test_R_31_calls_survive_the_other_processes_faults() -> None:
    """The processes of templates, grammars and tokenizers are stopped, and tear a reply; SIGTERM comes beside a stopped
    one."""
    report = children.run_campaign(6, 1, shallow(), ("stop", "torn"), with_server=False)
    assert not report["violations"], json.dumps(report["examples"], indent=1)
    assert report["faults"] == 6
    assert report["calls"] >= 24


WHOLE = Told(200, {0: {"text": "ab", "token_ids": [1, 2], "logprobs": {"token_logprobs": [-0.5, -0.25]}}}, "", True)
BROKEN: dict[str, Callable[[Told], Told]] = {
    "a bit of a log-probability": lambda output: output._replace(
        answers={0: output.answers[0] | {"logprobs": {"token_logprobs": [-0.5, -0.25000000000000006]}}}
    ),
    "a token": lambda output: output._replace(answers={0: output.answers[0] | {"token_ids": [1, 3]}}),
    "a token twice": lambda output: output._replace(answers={0: output.answers[0] | {"token_ids": [1, 2, 2]}}),
    "no end": lambda output: output._replace(ended=False),
    "an error": lambda output: output._replace(error="engine_dead"),
    "an answer less": lambda output: output._replace(answers={}),
}


@pytest.mark.parametrize("name", BROKEN)
def test_control_the_smallest_difference_is_seen(name: str) -> None:
    assert same(WHOLE, WHOLE)
    assert not same(BROKEN[name](WHOLE), WHOLE)


def test_control_a_broken_reference_is_no_reference() -> None:
    assert is_whole(WHOLE)
    for name in ("no end", "an error", "an answer less"):
        assert not is_whole(BROKEN[name](WHOLE))
    assert not same(BROKEN["an error"](WHOLE), BROKEN["an error"](WHOLE))


def test_the_campaign_asks_for_every_kind() -> None:
    kinds = {asked(place).kind for place in range(32)}
    assert kinds >= {"logprobs", "n=2", "json", "chat", "mirostat", "messages", "ollama", "responses"}
    assert {asked(place).body.get("temperature") for place in range(32)} >= {0.0, 0.8}
