"""The determinism law, observed: an engine that is watched, explained and recorded has the bits of one that is not."""

from __future__ import annotations

from pathlib import Path

import msgspec
from tests.support.law import Bits, assert_same, make_core, make_requests, run
from tests.support.shallow import shallow

from headrace.core.blocks import EVICTED
from headrace.core.journal import Note, decode_note
from headrace.engine import orders
from headrace.engine.cache_tree import CacheTree, ReadCache
from headrace.engine.core import EngineCore
from headrace.engine.holding import Hold
from headrace.engine.records.blind import notes_of, open_recording
from headrace.insight.explain import explain
from headrace.insight.limits import Machine
from headrace.insight.live import Feed
from headrace.insight.lives import Lives
from headrace.insight.summaries import cache_of, misses_of, requests_of
from headrace.protocol.step import Request, StepOutput

FEW = {"max_num_batched_tokens": 48, "max_num_seqs": 4, "max_model_len": 256, "num_gpu_blocks_override": 20}


def few() -> list[Request]:
    return [request for request in make_requests() if len(request.prompt_token_ids) < 200][::3]


class Watcher:
    """Does after each step all that the server and its viewers do."""

    def __init__(self, core: EngineCore) -> None:
        self.core, self.lives, self.notes = core, Lives(), list[Note]()
        self.sizes: list[int] = []
        self.lives.reads.set_sizes(core.info)
        assert core.journal is not None
        self.viewer = (feed := Feed(core.journal.watch)).subscribe()
        self.feed = feed
        self.step = core.step

    def __call__(self) -> StepOutput:
        output = self.step()
        note = decode_note(output.note)
        self.notes.append(note)
        self.lives.follow(note)
        self.feed.follow(note.step)
        self.sizes.append(len(b"".join(self.viewer.take())))
        requests_of(self.lives, output.end_time)
        reply = orders.carry_out(self.core, ReadCache(100), Hold())
        tree = msgspec.msgpack.decode(reply, type=CacheTree)
        cache_of(tree, misses_of(self.lives, lambda life: "other", str), str, output.end_time)
        for life in self.lives.ended.values():
            parts = explain(life, self.lives, lambda life: "other", str, Machine(bandwidth=1e9)).parts
            assert abs(sum(part.seconds for part in parts) - life.latency) < 1e-6
        return output


def test_I_13_watched_explained_and_recorded(tmp_path: Path) -> None:
    requests = few()
    plain = make_core(model=shallow(1), **FEW)
    reference: dict[str, Bits] = run(plain, requests)
    plain.close()
    watched = make_core(model=shallow(1), record_schedule=str(tmp_path / "log"), **FEW)
    watcher = Watcher(watched)
    watched.step = watcher  # type: ignore[method-assign]
    assert_same(run(watched, requests), reference)
    watched.close()
    # Control: it was watched, with evictions, explained and recorded.
    assert len(watcher.notes) == len(list(notes_of(open_recording(tmp_path / "log")))) > 10
    kinds = {kind for note in watcher.notes for kind, _, _ in note.step.blocks or ()}
    assert EVICTED in kinds
    assert min(watcher.sizes) > 0
    assert len(watcher.lives.ended) == len(requests)
    # Control: bits that are not the same are noticed.
    other = make_core(model=shallow(2), **FEW)
    different = run(other, requests[:1])
    other.close()
    assert different != {name: reference[name] for name in different}
