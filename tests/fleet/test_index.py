"""What replicas report of their caches, and what the router makes of it."""

from __future__ import annotations

import random

import pytest

from headrace.core.options import SchedulerOptions
from headrace.core.prefix import root_key
from headrace.core.reports import KEY_BYTES, KeyReports
from headrace.core.scheduler import Scheduler
from headrace.fleet.index import PrefixIndex, prefix_keys
from headrace.protocol.params import SamplingParams
from headrace.protocol.step import CacheKeys, Request, StepResult

SECRET = b"s" * 32
BLOCK = 4


class Engine:
    """A scheduler with reports, which computes a prompt in one step."""

    def __init__(self, epoch: int, num_blocks: int = 24) -> None:
        self.scheduler = Scheduler(
            SchedulerOptions(
                num_blocks=num_blocks, block_size=BLOCK, max_num_seqs=2, max_num_batched_tokens=256, max_model_len=64
            )
        )
        self.reports = KeyReports(self.scheduler.cache, SECRET, epoch)
        self.num = 0

    def compute(self, prompt: list[int], salt: str = "") -> None:
        self.num += 1
        params = SamplingParams(max_tokens=1, seed=1, ignore_eos=True)
        request = Request(request_id=str(self.num), prompt_token_ids=prompt, params=params, cache_salt=salt)
        self.scheduler.add(request)
        while self.scheduler.has_work():
            batch = self.scheduler.schedule()
            tokens = [1 if samples else -1 for samples in batch.samples]
            self.scheduler.commit(batch, StepResult(step_id=batch.step_id, token_ids=tokens))

    def depth(self, prompt: list[int]) -> int:
        cache = self.scheduler.cache
        return cache.match(prompt, [cache.root("")], len(prompt))[1] // BLOCK


def keys_of(prompt: list[int], salt: str = "", secret: bytes = SECRET) -> list[bytes]:
    return prefix_keys(prompt, BLOCK, secret, root_key(secret, salt, "", b""))


def test_keys_are_those_of_the_cache_and_secret() -> None:
    engine = Engine(1)
    engine.compute(list(range(17)), "salt")
    report = engine.reports.take()
    assert report is not None
    keys = keys_of(list(range(17)), "salt")
    assert {report.added[at : at + KEY_BYTES] for at in range(0, len(report.added), KEY_BYTES)} == set(keys)
    assert len(keys) == 4
    assert keys_of(list(range(17)), "other")[0] != keys[0]
    assert keys_of(list(range(17)), "salt", b"t" * 32)[0] != keys[0]
    changed = keys_of([9, *range(1, 17)], "salt")
    assert not set(changed) & set(keys)


def random_prompts(seed: int, num: int) -> list[list[int]]:
    rng = random.Random(seed)
    stems = [[rng.randrange(100) for _ in range(24)] for _ in range(4)]
    return [[*rng.choice(stems)[: rng.randrange(4, 25)], *(rng.randrange(100) for _ in range(8))] for _ in range(num)]


def follow(index: PrefixIndex, engine: Engine, loses: bool = False) -> None:
    """Pass on a report, and request a full one where the index lacks some; `loses`: the report is lost."""
    report = engine.reports.take()
    if report is not None and not loses and not index.update(0, report):
        engine.reports.request_all()
        full = engine.reports.take()
        assert full is not None
        assert full.is_full
        assert index.update(0, full)


def play(index: PrefixIndex) -> None:
    """Evictions, resets, lost reports and engines that start anew: the index says what the cache has."""
    rng = random.Random(7)
    engine = Engine(1)
    prompts = random_prompts(3, 60)
    for number, prompt in enumerate(prompts):
        if number % 20 == 19:
            # Epochs are random numbers; that of a new engine may follow the last.
            engine = Engine(number)
            index.clear(0)
        if number % 13 == 12:
            engine.scheduler.reset_prefix_cache()
        engine.compute(prompt)
        is_lost = rng.random() < 0.2
        follow(index, engine, is_lost)
        if not is_lost:
            for each in prompts:
                assert index.depths(keys_of(each))[0] == engine.depth(each), number


def test_the_index_follows_the_cache() -> None:
    play(PrefixIndex(1))


class Careless(PrefixIndex):
    """An index that takes every report, whatever its epoch and number."""

    def update(self, index: int, report: CacheKeys) -> bool:
        self._last[index] = report.epoch, report.number - 1
        if report.is_full:
            report = CacheKeys(report.epoch, report.number, False, report.added, report.evicted)
        return super().update(index, report)


def test_an_index_that_ignores_epochs_is_noticed() -> None:
    with pytest.raises(AssertionError):
        play(Careless(1))


def test_replicas_do_not_disturb_each_other() -> None:
    index = PrefixIndex(3)
    keys = keys_of(list(range(40)))
    for replica, num in enumerate((10, 4, 0)):
        assert index.update(replica, CacheKeys(1, 1, True, b"".join(keys[:num])))
    assert index.depths(keys) == [10, 4, 0]
    index.expect(2, keys[:6])
    assert index.depths(keys) == [10, 4, 6]
    assert index.update(0, CacheKeys(1, 2, False, b"", b"".join(keys[8:])))
    index.forget(2, keys[:6])
    assert index.depths(keys) == [8, 4, 0]
    index.clear(0)
    assert index.depths(keys) == [0, 4, 0]
    assert len(index) == 4
    assert not index.update(1, CacheKeys(1, 3, False, keys[4]))
    assert not index.update(1, CacheKeys(1, 4, False, keys[4]))


def test_a_cache_with_blocks_keeps_its_key() -> None:
    engine = Engine(1)
    engine.compute(list(range(16)))
    with pytest.raises(ValueError, match="other keys"):
        KeyReports(engine.scheduler.cache, SECRET, 1)
