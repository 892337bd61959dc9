"""A recording run again without the model gives the journal of the recorded engine, and notices what it can not."""

from __future__ import annotations

import itertools
from pathlib import Path

import msgspec
import pytest
from tests.support.journal import CONFIG, notes_of_life, recorded

from headrace.cli.replay import replay as replay_command
from headrace.core.blocks import EVICTED
from headrace.core.journal import Note
from headrace.engine.records.blind import notes_of, open_recording
from headrace.engine.records.recording import MAGIC, Record, StepEnd, StepPlan, StepTimes
from headrace.engine.records.replay import RecordingError, ReplayDifference, read


@pytest.fixture(scope="module")
def life(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[Note]]:
    """A recording, and the notes of the engine that it was made of."""
    path = tmp_path_factory.mktemp("log") / "schedule"
    core = recorded(path)
    assert core.journal is not None
    core.journal.watch(True)
    notes = list(notes_of_life(core))
    core.close()
    return path, notes


def write(path: Path, records: list[Record]) -> Path:
    frames = [msgspec.msgpack.encode(record) for record in records]
    path.write_bytes(MAGIC + b"".join(len(frame).to_bytes(4, "little") + frame for frame in frames))
    return path


def test_the_scheduler_alone_gives_the_same_journal(
    life: tuple[Path, list[Note]], capsys: pytest.CaptureFixture[str]
) -> None:
    path, notes = life
    steps = [note.step for note in notes]
    kinds = {kind for step in steps for kind, _, _ in step.blocks or ()}
    assert EVICTED in kinds
    assert any(step.preemptions for step in steps)
    assert any(num_accepted for step in steps for _, _, num_accepted in step.guesses)
    assert any(step.late for step in steps)
    assert {reason for step in steps for _, reason in step.ends} == {"length", "abort", "error"}
    again = list(notes_of(open_recording(path), is_watched=True))
    assert len(again) == len(notes) > 80
    for ours, theirs in zip(again, notes, strict=True):
        assert msgspec.to_builtins(ours) == msgspec.to_builtins(theirs)
    replay_command(path, blind=True)
    assert f"{len(notes):,} steps of " in capsys.readouterr().out


def test_block_events_are_noted_only_while_somebody_watches(life: tuple[Path, list[Note]]) -> None:
    path, notes = life
    again = list(notes_of(open_recording(path)))
    assert all(note.step.blocks is None for note in again)
    bare = [msgspec.structs.replace(note.step, blocks=None) for note in notes]
    assert [note.step for note in again] == bare


def test_control_a_result_that_was_changed_changes_the_schedule(life: tuple[Path, list[Note]], tmp_path: Path) -> None:
    records = list(read(life[0]))
    plans = [(i, record) for i, record in enumerate(records) if isinstance(record, StepPlan)]
    # The first sequence of a step goes on in the next with the token that it got.
    at = next(i for (i, a), (_, b) in itertools.pairwise(plans) if a.samples[0] and a.seq_ids[0] == b.seq_ids[0])
    end = records[at + 1]
    assert isinstance(end, StepEnd)
    end.result.token_ids[0] += 1
    with pytest.raises(ReplayDifference):
        list(notes_of(open_recording(write(tmp_path / "log", records))))


def test_a_recording_of_an_earlier_version_has_no_times(life: tuple[Path, list[Note]], tmp_path: Path) -> None:
    records = [record for record in read(life[0]) if not isinstance(record, StepTimes)]
    with pytest.raises(RecordingError, match="no times of its steps"):
        list(notes_of(open_recording(write(tmp_path / "log", records))))


def test_a_recording_that_was_cut_ends_with_its_last_whole_step(life: tuple[Path, list[Note]], tmp_path: Path) -> None:
    records = list(read(life[0]))
    at = [i for i, record in enumerate(records) if isinstance(record, StepPlan)][20]
    for stop in (at + 1, at + 2):
        assert len(list(notes_of(open_recording(write(tmp_path / f"log{stop}", records[:stop]))))) == 20


def test_a_recording_can_be_read_with_the_config_it_has(life: tuple[Path, list[Note]]) -> None:
    assert open_recording(life[0]).config == CONFIG
