"""The parts of a request's life sum to its latency, and each millisecond is where it belongs."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import msgspec
import pytest
from tests.insight.test_journal import engine
from tests.support.journal import live_through, notes_of_life, recorded, request

from headrace.cli.explain import explain as explain_command
from headrace.core.journal import Note, decode_note
from headrace.engine.core import EngineCore
from headrace.insight.explain import WORDS, explain
from headrace.insight.lives import ESTIMATES, Life, Lives
from headrace.protocol.errors import RequestError


@pytest.fixture(scope="module")
def notes(tmp_path_factory: pytest.TempPathFactory) -> list[Note]:
    return list(notes_of_life(recorded(tmp_path_factory.mktemp("log") / "log")))


def follow(notes: list[Note]) -> Lives:
    lives = Lives()
    for note in notes:
        lives.follow(note)
    return lives


def total(life: Life) -> float:
    return sum(life.parts.values())


def by_steps(notes: list[Note]) -> dict[int, Counter[str]]:
    """The same account made the slow way: each step looks at each open request."""
    account: dict[int, Counter[str]] = {}
    running: set[int] = set()
    again: set[int] = set()
    last = 0.0
    for note in notes:
        step = note.step
        for arrival in step.arrivals:
            account[arrival.seq_id] = Counter(between_steps=last and last - arrival.times[3])
        for seq_id, _ in step.preemptions:
            running.discard(seq_id)
            again.add(seq_id)
        running |= {admission.seq_id for admission in step.admissions}
        for parts in account.values():
            if "ended" not in parts:
                parts["between_steps"] += step.times[0] - (last or step.times[0])
        for seq_id, parts in account.items():
            if "ended" in parts:
                continue
            if seq_id in step.seq_ids:
                name = "mask_late" if step.seq_ids.index(seq_id) in step.late else "computed"
            elif seq_id in running:
                name = "no_budget"
            else:
                name = "preempted" if seq_id in again else "queued"
            parts[name] += step.times[3] - step.times[0]
        for seq_id, _ in step.ends:
            account[seq_id]["ended"] = 1
            running.discard(seq_id)
        last = step.times[3]
    return account


def test_the_parts_sum_to_the_latency_and_are_those_of_a_plain_account(notes: list[Note]) -> None:
    lives = follow(notes)
    account = by_steps(notes)
    seen: Counter[str] = Counter()
    assert len(lives.ended) > 20
    assert not lives.open()
    for life in lives.ended.values():
        assert total(life) == pytest.approx(life.latency, abs=1e-6)
        assert min(life.parts.values()) >= 0
        seen.update(life.parts.keys())
        theirs = account[life.arrival.seq_id]
        computed = sum(life.parts.get(name, 0) for name in ("prefill", "decode", "recomputed", *ESTIMATES))
        assert computed == pytest.approx(theirs["computed"], abs=1e-6)
        for name in ("mask_late", "no_budget", "preempted", "queued"):
            assert life.parts.get(name, 0) == pytest.approx(theirs[name], abs=1e-6), name
    expected = {"prefill", "decode", "queued", "preempted", "recomputed", "mask_late", "between_steps", *ESTIMATES}
    assert expected <= set(seen)
    assert set(seen) <= WORDS.keys()


def test_control_a_step_that_was_lost_is_missing_from_the_sum(notes: list[Note]) -> None:
    at = next(
        i for i, note in enumerate(notes) if i > 20 and not (note.step.arrivals or note.step.ends) and note.step.seq_ids
    )
    lost = notes[at].step
    moved = msgspec.structs.replace(lost, times=(lost.times[0], lost.times[1], lost.times[2], lost.times[0]))
    lives = follow([*notes[:at], Note(moved), *notes[at + 1 :]])
    # Its time is now between two steps: the sum holds, and the parts differ.
    good = {life.request_id: life.parts for life in follow(notes).ended.values()}
    assert any(life.parts != good[life.request_id] for life in lives.ended.values())
    cut = follow([*notes[:at], Note(msgspec.structs.replace(lost, times=(0.0, 0.0, 0.0, 0.0))), *notes[at + 1 :]])
    assert any(
        abs(total(life) - life.latency) > 1e-3 for life in cut.ended.values() if lost.seq_ids[0] == life.arrival.seq_id
    )


def drain(core: EngineCore, lives: Lives) -> None:
    while core.has_work():
        lives.follow(decode_note(core.step().note))


def test_it_waited_beside_the_prompt_of_another() -> None:
    core, lives = engine(num_gpu_blocks_override=64), Lives()
    core.add(request("fast", [1, 2, 3], 12))
    lives.follow(decode_note(core.step().note))
    core.add(request("long", list(range(50, 110)), 2))
    drain(core, lives)
    life = lives.ended["fast"]
    assert life.parts["beside_prefill"] > 0
    explanation = explain(life, lives, lambda other: other.request_id if other else "?")
    assert any("prefill chunks of long (60 tokens)" in sentence for sentence in explanation.sentences), (
        explanation.sentences
    )
    hidden = explain(life, lives, lambda other: "another request")
    assert not any("long" in sentence for sentence in hidden.sentences)
    # The control: alone it waits for nobody.
    alone = Lives()
    core.add(request("alone", [1, 2, 3], 12))
    drain(core, alone)
    assert "beside_prefill" not in alone.ended["alone"].parts


def test_the_slots_without_a_token_are_those_of_the_block_tables() -> None:
    core, lives = engine(num_gpu_blocks_override=64), Lives()
    size, numbers = core.info.block_size, set()
    core.add(request("one", [1, 2, 3], 12))
    core.add(request("two", list(range(50, 61)), 9))
    while core.has_work():
        lives.follow(decode_note(core.step().note))
        # A sequence that computes all its tokens has its blocks filled up to the last.
        tables = [(len(seq.block_table) * size, seq.num_computed) for seq in core.scheduler.running]
        assert lives.num_unfilled(size) == sum(num_slots - num for num_slots, num in tables)
        numbers.add(lives.num_unfilled(size))
    assert len(numbers) > 2
    assert lives.num_unfilled(size) == 0


def test_the_queue_names_what_it_lacks_and_the_times_before_the_engine_count() -> None:
    core, lives = engine(max_num_seqs=1), Lives()
    now = core.clock()
    core.add(request("first", [1, 2, 3], 12), [now - 0.5, now - 0.2, now - 0.1])
    core.add(request("second", [4, 5, 6], 2))
    drain(core, lives)
    first, second = lives.ended["first"], lives.ended["second"]
    assert first.parts["tokenising"] == pytest.approx(0.3)
    assert first.parts["sending"] == pytest.approx(0.1)
    assert total(first) == pytest.approx(first.latency)
    explanation = explain(second, lives, lambda other: "another request")
    assert explanation.sentences[0].partition("ms: ")[2].startswith("waited in the queue for a place among the running")
    before = first.latency
    assert lives.deliver("first", first.ended + 0.25) is first
    assert first.parts["delivery"] == 0.25
    assert first.latency == pytest.approx(before + 0.25)
    assert total(first) == pytest.approx(first.latency)


def test_requests_go_on_after_a_restart_under_other_sequences() -> None:
    names, lives = ("a", "b", "c", "gone"), Lives()
    core = engine()
    for name in names:
        core.add(request(name, [1, 2, 3], 20))
    for _ in range(4):
        lives.follow(decode_note(core.step().note))
    before = {name: life for name in names if (life := lives.find(name))}
    core = engine()
    lives.restart(names)
    # The new engine counts from the beginning, so the sequence of "c" has now the number that "a" had.
    for name in ("c", "b", "a"):
        core.add(request(name, [1, 2, 3], 6))
    lives.follow(decode_note(core.step().note))
    assert all(lives.find(name) is before[name] for name in names)
    assert lives.deliver("gone", lives.ended.get("gone", before["gone"]).since + 1, "error") is before["gone"]
    assert [life.request_id for life in lives.open()] == ["a", "b", "c"]
    drain(core, lives)
    assert all(lives.ended[name] is before[name] for name in names)
    assert lives.open() == []
    assert all(total(before[name]) == pytest.approx(before[name].latency) for name in "abc")


def test_a_request_that_was_aborted_when_its_engine_died_is_open_no_more() -> None:
    core, lives = engine(), Lives()
    for name in ("a", "gone", "late"):
        core.add(request(name, [1, 2, 3], 20))
    lives.follow(decode_note(core.step().note))
    # The engine died before it could note the abort.
    lives.restart(["a", "late"])
    assert [life.request_id for life in lives.open()] == ["a", "late"]
    assert lives.ended["gone"].reason == "abort"
    assert total(lives.ended["gone"]) == pytest.approx(lives.ended["gone"].latency)
    # This one's caller leaves while the next engine starts.
    lives.deliver("late", core.clock(), "abort")
    core = engine()
    core.add(request("a", [1, 2, 3], 20))
    lives.follow(decode_note(core.step().note))
    assert [life.request_id for life in lives.open()] == ["a"]
    # The control: one that the client has open stays so.
    lives.restart(["a"])
    assert [life.request_id for life in lives.open()] == ["a"]


def test_a_request_is_found_without_a_walk_over_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    core, lives = engine(max_num_seqs=2, num_gpu_blocks_override=64), Lives()
    for i in range(300):
        core.add(request(f"r{i}", [1, 2, 3], 20))
    lives.follow(decode_note(core.step().note))
    read: list[str] = []
    monkeypatch.setattr(Life, "request_id", property(lambda life: read.append("") or life.arrival.request_id))
    core.add(request("last", [1, 2, 3], 20))
    lives.follow(decode_note(core.step().note))
    assert lives.find("last") is not None
    assert lives.deliver("last", core.clock(), "stop") is not None
    assert len(read) < 10
    # The control: a walk is noticed.
    assert not any(life.request_id == "last" for life in lives.open())
    assert len(read) >= 300


def test_ended_lives_are_bounded() -> None:
    core, lives = engine(), Lives(max_lives=2)
    for name in "abc":
        core.add(request(name, [1, 2, 3], 1))
        drain(core, lives)
    assert list(lives.ended) == ["b", "c"]


def test_the_command_explains_a_recording(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    core = recorded(tmp_path / "log")
    lives = follow([decode_note(output.note) for output in live_through(core)])
    core.close()
    slow = max(lives.ended.values(), key=lambda life: life.latency)
    explain_command(tmp_path / "log", trace=tmp_path / "trace.json")
    printed = capsys.readouterr().out
    assert printed.splitlines()[1].startswith(f"{slow.request_id}  {1e3 * slow.latency:9.1f} ms, most of it ")
    events = json.loads((tmp_path / "trace.json").read_bytes())["traceEvents"]
    assert {event["args"]["name"] for event in events if event["name"] == "thread_name"} == set(lives.ended)
    assert all(event["dur"] >= 0 for event in events if event["ph"] == "X")
    explain_command(tmp_path / "log", slow.request_id)
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith(f"{slow.request_id}: {1e3 * slow.latency:.3f} ms")
    parts = [float(line.split(" ms")[0]) for line in lines[1:] if line.startswith("  ")]
    assert sum(parts) == pytest.approx(1e3 * slow.latency, abs=0.01)
    assert any(line.startswith("prefix cache: ") for line in lines)
    with pytest.raises(RequestError, match="the beginning of one id"):
        explain_command(tmp_path / "log", "nobody")
