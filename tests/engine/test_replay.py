"""A recorded engine runs again to the bit, and whatever in its log is not as it was is noticed, at its step."""

from __future__ import annotations

import errno
import os
import random
import stat
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
from tests.support import fake

from headrace.engine.core import EngineCore
from headrace.engine.records import recording
from headrace.engine.records.recording import (
    MAGIC,
    LogEnd,
    LogHead,
    Record,
    RecordedEngine,
    Recorder,
    StepEnd,
    StepError,
    StepPlan,
)
from headrace.engine.records.replay import Outcome, RecordingError, ReplayDifference, read, replay
from headrace.protocol.config import EngineConfig
from headrace.protocol.errors import HeadraceError, RequestError
from headrace.protocol.params import SamplingParams
from headrace.protocol.step import Add, Request, ScheduledBatch, StepResult

# So few blocks that sequences are thrown out.
CONFIG = EngineConfig(model="fake", num_gpu_blocks_override=24, block_size=4, max_num_batched_tokens=16, max_num_seqs=6)


def recorded(path: Path, most: int = 2**24, is_restart: bool = False) -> RecordedEngine:
    core = fake.build(CONFIG)
    recorder = Recorder(str(path), most, msgspec.msgpack.encode(CONFIG), core.info, 1.5, is_restart)
    return RecordedEngine(recorder, None, None, core.scheduler, core.executor, core.info, lambda: 0.0)


def request(name: str, rng: random.Random, **more: Any) -> Request:
    params = SamplingParams(seed=rng.randrange(99), max_tokens=rng.randint(3, 30), ignore_eos=True, logprobs=1)
    prompt = [7] * rng.choice((0, 8, 12)) + [rng.randrange(200) for _ in range(rng.randint(1, 20))]
    return Request(request_id=name, prompt_token_ids=prompt, params=params, **more)


def live_through(core: EngineCore, seed: int = 3) -> None:
    """Arrivals, aborts, a refusal and a reset of the cache, at random steps, until all is over."""
    rng = random.Random(seed)
    for step in range(60):
        if step < 50 and rng.random() < 0.4:
            core.add(request(f"r{step}", rng))
        if rng.random() < 0.1:
            core.abort(f"r{rng.randrange(50)}")
        if step == 20:
            core.reset_prefix_cache()
            with pytest.raises(RequestError):
                core.add(request("x", rng, resume_token_ids=[999]))
        if core.has_work():
            core.step()
    while core.has_work():
        core.step()
    assert core.stats().num_preemptions > 0
    assert core.stats().prefix_cache_hits > 0


@pytest.fixture(scope="module")
def log(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("log") / "schedule"
    core = recorded(path)
    live_through(core)
    core.close()
    return path


def run_again(path: Path, core: EngineCore | None = None) -> Outcome:
    records = read(path)
    assert isinstance(next(records), LogHead)
    return replay(records, core or fake.build(CONFIG))


def write(path: Path, records: list[Record]) -> Path:
    frames = [msgspec.msgpack.encode(record) for record in records]
    path.write_bytes(MAGIC + b"".join(len(frame).to_bytes(4, "little") + frame for frame in frames))
    return path


def test_a_log_replays(log: Path) -> None:
    outcome = run_again(log)
    assert outcome.num_steps > 60
    assert outcome.num_requests > 15
    assert outcome.num_tokens == outcome.num_logprobs > 200
    assert (outcome.end, outcome.unfinished, outcome.num_raised) == ("", False, 0)
    assert stat.S_IMODE(log.stat().st_mode) == 0o600


def num_parts(record: Any) -> int:
    return len(record.seq_ids if isinstance(record, StepPlan) else record.result.column("logprob"))


def change_token(record: Any) -> None:
    at = next(i for i, token in enumerate(record.result.token_ids) if token >= 0)
    record.result.token_ids[at] ^= 1


def change_logprob(record: Any) -> None:
    [at, *_] = record.result.column("logprob")
    old = record.result.column("logprob")[at]
    record.result.rows[at].logprob = msgspec.structs.replace(old, logprob=old.logprob * (1 + 2**-52))


def set_first(name: str) -> Callable[[Any], None]:
    def change(record: Any) -> None:
        values = getattr(record, name)
        values[0] = [*values[0][:-1], values[0][-1] + 1] if isinstance(values[0], list) else values[0] + 1

    return change


def flip_sample(record: Any) -> None:
    record.samples[0] = not record.samples[0]


def swap(record: Any) -> None:
    for name in ("seq_ids", "starts"):
        values = getattr(record, name)
        values[0], values[1] = values[1], values[0]


@pytest.mark.parametrize(
    ("kind", "change", "field"),
    [
        (StepEnd, change_token, "token_ids"),
        (StepEnd, change_logprob, "logprob"),
        (StepPlan, set_first("starts"), "starts"),
        (StepPlan, set_first("lens"), "lens"),
        (StepPlan, set_first("token_ids"), "token_ids"),
        (StepPlan, set_first("tables"), "tables"),
        (StepPlan, flip_sample, "samples"),
        (StepPlan, swap, "seq_ids"),
    ],
)
def test_a_changed_decision_or_token_is_noticed_at_its_step(
    log: Path, tmp_path: Path, kind: type, change: Callable[[Any], None], field: str
) -> None:
    records = list(read(log))
    fit = [r for r in records if isinstance(r, kind) and num_parts(r) > 1]
    record = fit[len(fit) // 2]
    change(record)
    with pytest.raises(ReplayDifference) as error:
        run_again(write(tmp_path / "changed", records))
    assert error.value.what == field
    assert error.value.step_id == (record.step_id if isinstance(record, StepPlan) else record.result.step_id)
    assert "the log has" in str(error.value)


def test_a_request_that_is_left_out_is_noticed(log: Path, tmp_path: Path) -> None:
    records = list(read(log))
    records.remove(next(record for record in records if isinstance(record, Add)))
    with pytest.raises(ReplayDifference):
        run_again(write(tmp_path / "changed", records))


def test_another_executor_is_noticed(log: Path) -> None:
    core = fake.build(CONFIG)
    executor: Any = core.executor
    executor.oracle.next_token = lambda context, params, num: 5
    with pytest.raises(ReplayDifference, match="token_ids"):
        run_again(log, core)


def test_the_log_of_a_process_that_was_killed_ends_with_its_last_step(log: Path, tmp_path: Path) -> None:
    data = log.read_bytes()
    whole = run_again(log)
    for share in (0.2, 0.6, 0.9):
        path = tmp_path / "cut"
        path.write_bytes(data[: int(share * len(data))])
        outcome = run_again(path)
        assert 0 < outcome.num_steps < whole.num_steps
        assert outcome.end
    records = list(read(log))
    last = max(i for i, record in enumerate(records) if isinstance(record, StepPlan))
    outcome = run_again(write(tmp_path / "cut", records[: last + 1]))
    assert (outcome.unfinished, outcome.num_steps) == (True, whole.num_steps - 1)


@pytest.mark.parametrize("half", ["start", "finish"])
def test_a_step_that_raised_raises_again(half: str, tmp_path: Path) -> None:
    def doomed(core: EngineCore) -> EngineCore:
        right = getattr(core.executor, half)

        def broken(step: ScheduledBatch | StepResult) -> Any:
            if step.step_id == 4:
                raise RuntimeError("the core is wrong")
            return right(step)

        setattr(core.executor, half, broken)
        return core

    core = fake.build(CONFIG)
    recorder = Recorder(str(tmp_path / "log"), 2**24, msgspec.msgpack.encode(CONFIG), core.info, 1.5)
    core = RecordedEngine(recorder, None, None, core.scheduler, doomed(core).executor, core.info, lambda: 0.0)
    for i in range(3):
        core.add(request(f"r{i}", random.Random(i)))
    for _ in range(3):
        core.step()
    with pytest.raises(RuntimeError):
        core.step()
    while core.has_work():  # who caught it may go on
        core.step()
    core.close()
    assert [r.kind for r in read(tmp_path / "log") if isinstance(r, StepError)] == ["RuntimeError"]
    assert run_again(tmp_path / "log", doomed(fake.build(CONFIG))).num_raised == 1
    with pytest.raises(ReplayDifference, match="step 4 differs in its end: the log has RuntimeError"):
        run_again(tmp_path / "log")


def test_a_recording_is_bounded_and_what_was_before_is_kept(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "log"
    for _ in range(recording.NUM_KEPT + 3):
        core = recorded(path, most=20_000)
        live_through(core)
        core.close()
        assert path.stat().st_size <= 24_096
    assert "the recording of the schedule ends" in caplog.text
    assert {each.name for each in tmp_path.iterdir()} == {"log", *(f"log.{i + 1}" for i in range(recording.NUM_KEPT))}
    assert isinstance(list(read(path))[-1], LogEnd)
    assert "at most 20000 are written" in run_again(path).end


def fails(*output: Any) -> int:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


@pytest.mark.parametrize("write", [lambda fd, data: len(data) // 2, fails])
@pytest.mark.parametrize("close", [os.close, fails])
def test_a_disk_that_is_full_ends_the_recording_and_not_the_engine(
    write: Callable[..., int],
    close: Callable[..., Any],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    core = recorded(tmp_path / "log")
    assert core.stats().num_recordings_ended == 0
    monkeypatch.setattr(recording, "os", SimpleNamespace(write=write, close=close))
    live_through(core)
    assert core.stats().num_recordings_ended == 1
    core.close()
    assert caplog.text.count("the recording of the schedule has failed") == 1
    assert len(list(read(tmp_path / "log"))) == 1


def test_a_restart_goes_on_without_a_recording_that_can_not_be(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    folder = tmp_path / "gone"
    for is_full in (False, True):
        if is_full:
            folder.mkdir()
            (folder / "log.1").write_text("what led to it")
            monkeypatch.setattr(recording.os, "write", fails)
        with pytest.raises(OSError, match="No "):
            recorded(folder / "log")
        caplog.clear()
        core = recorded(folder / "log", is_restart=True)
        live_through(core)
        assert core.stats().num_recordings_ended == 1
        core.close()
        assert [record.levelname for record in caplog.records] == ["ERROR"]
        monkeypatch.undo()
    assert [path.name for path in folder.iterdir()] == ["log.1"]


def test_what_can_not_be_written_down_ends_the_recording(tmp_path: Path) -> None:
    core = recorded(tmp_path / "log2")
    with pytest.raises(RequestError, match="prompt"):
        core.add(Request(request_id="a", prompt_token_ids=[2**70], params=SamplingParams(seed=1, max_tokens=3)))
    core.close()
    core = recorded(tmp_path / "log")
    params = SamplingParams(seed=1, max_tokens=3, logits_processors=[lambda prompt, answer, logits: logits])
    core.add(Request(request_id="a", prompt_token_ids=[1], params=params))
    while core.has_work():
        core.step()
    core.close()
    [_, closed] = read(tmp_path / "log")
    assert isinstance(closed, LogEnd)
    assert "can not be written down" in closed.reason


@pytest.mark.parametrize(
    "data",
    [
        b"", b"headrace", MAGIC, MAGIC + b"\xff\xff\xff\xff", MAGIC + b"\x01\0\0\0\xc1",
        MAGIC + b"\x02\0\0\0\x81\xa4", MAGIC + b"\x19\0\0\0\x81\xa4type\xb2reset_prefix_cache",
    ],
)  # fmt: skip
def test_what_is_no_recording_is_told(tmp_path: Path, data: bytes) -> None:
    (tmp_path / "log").write_bytes(data)
    with pytest.raises(RecordingError):
        list(read(tmp_path / "log"))


def test_a_place_that_can_not_be_written_is_refused() -> None:
    from headrace.engine.build import recorded as make

    info = fake.build(CONFIG).info
    with pytest.raises(HeadraceError, match="record_schedule"):
        make(CONFIG, "/proc/no/such/place", info, None, None)
