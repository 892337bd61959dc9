"""R-10 with the built-in model: a call that takes all places keeps no other holder waiting, in steps of the engine."""

from __future__ import annotations

import pytest

from headrace.engine.build import build_engine
from headrace.engine.core import EngineCore
from headrace.protocol.config import EngineConfig
from headrace.protocol.params import SamplingParams
from headrace.protocol.step import Request

NUM, LENGTH = 16, 40


class Holders:
    """The built-in model under a policy, with what came out by request. Each holder has a salt of its own."""

    def __init__(self, policy: str) -> None:
        config = EngineConfig(
            max_num_seqs=NUM,
            num_threads=1,
            num_gpu_blocks_override=512,
            seed=0,
            scheduling_policy=policy,
            max_logprobs=-1,
        )
        self.core: EngineCore = build_engine(config)
        self.tokens: dict[str, list[int]] = {}
        self.finished: set[str] = set()

    def send(self, name: str, num_prompt: int, max_tokens: int, **params: int) -> None:
        holder, number = name[0], int(name[1:])
        prompt = [5 + (7 * i + number) % 200 for i in range(num_prompt)]
        sampling = SamplingParams(seed=number, max_tokens=max_tokens, ignore_eos=True, **params)
        self.core.add(
            Request(request_id=name, prompt_token_ids=prompt, params=sampling, cache_salt=holder, tenant=holder)
        )

    def step(self) -> int:
        """One step; returns how many log-probabilities of prompts it computed."""
        output = self.core.step()
        for name, token_ids in zip(output.request_ids, output.token_ids, strict=True):
            self.tokens.setdefault(name, []).extend(token_ids)
        self.finished |= output.finished.keys()
        return sum(len(entry.top) for entries in output.prompt_logprobs.values() for entry in entries)

    def steps_until(self, name: str) -> int:
        number = 0
        while name not in self.finished:
            self.step()
            number += 1
        return number


def beside_answers(policy: str) -> tuple[dict[str, list[int]], list[int]]:
    """All tokens, and the steps of three calls of one holder beside the answers of another, which take all places."""
    holders = Holders(policy)
    for number in range(NUM):
        holders.send(f"a{number}", 3, LENGTH)
    for _ in range(4):
        holders.step()
    waits = []
    for number in range(3):
        holders.send(f"b{number}", 3, 1)
        waits.append(holders.steps_until(f"b{number}"))
    while holders.core.has_work():
        holders.step()
    return holders.tokens, waits


def test_R_10_one_call_that_takes_all_places_keeps_no_other_holder_waiting() -> None:
    """And who gave way for it gets the same tokens."""
    fair, waits = beside_answers("fair")
    assert waits == [1, 1, 1]
    first_come, late = beside_answers("fcfs")
    assert late[0] > LENGTH // 2
    assert fair == first_come


@pytest.mark.parametrize("policy", ["fair", "fcfs"])
def test_R_10_log_probabilities_of_whole_vocabularies_keep_no_other_holder_waiting(policy: str) -> None:
    holders = Holders(policy)
    for number in range(2):
        holders.send(f"a{number}", 100, 1, prompt_logprobs=-1)
    num = holders.step()
    holders.send("b0", 3, 1)
    assert holders.steps_until("b0") == 1
    # The control: of the other policies a step has all of them.
    assert (num <= 2**16) is (policy == "fair")
    while holders.core.has_work():
        holders.step()
    assert holders.finished == {"a0", "a1", "b0"}
