"""`python -m headrace.insight.replay_worker SECONDS`: replays a recording without its model, for the inspector
(`engine.records.blind`), in a separate process of bounded time and memory (`text.bounded`).

A job is the path of a recording, and the reply the JSON of a `Replay`.
"""

from __future__ import annotations

import sys
from collections import deque
from pathlib import Path
from typing import Any

import msgspec

from headrace.core.journal import Step
from headrace.engine.open_requests import PROBE
from headrace.engine.records.blind import notes_of, open_recording
from headrace.insight.explain import explain
from headrace.insight.live import BlockMap, as_dict
from headrace.insight.lives import Life, Lives
from headrace.insight.summaries import MAX_REQUESTS, summary_of
from headrace.protocol import step_model
from headrace.protocol.errors import HeadraceError
from headrace.text.bounded import serve

MAX_STEPS = 2000
MAX_MEMORY = 2**31


class Replayed(msgspec.Struct, frozen=True):
    """The JSON of a recording, or in `error` why there is none."""

    body: bytes = b""
    error: str = ""


class Replay(msgspec.Struct, frozen=True, kw_only=True):
    """A replayed recording as a viewer of the live engine would have seen it: `snapshot` and `steps` as in
    `insight.live`, the last `MAX_STEPS` of `num_steps`. `requests` have the fields of `Summary` and of `Explanation`,
    the newest first."""

    model: str
    num_blocks: int
    block_size: int
    num_steps: int
    num_requests: int
    snapshot: dict[str, Any]
    steps: list[dict[str, Any]]
    requests: list[dict[str, Any]]


def name_of(life: Life | None) -> str:
    """Return how a request is called: a recording is read by those who may see all of it."""
    return "a request before the recording" if life is None else life.request_id


def replay(path: Path) -> bytes:
    """Return the JSON of the `Replay` of a recording. Raises `RecordingError`, `ReplayDifference`."""
    recording = open_recording(path)
    info = recording.head.info
    lives, blocks = Lives(), BlockMap()
    lives.reads.set_sizes(info)
    lives.step_model = step_model.load(step_model.path_of_engine(info))
    steps: deque[Step] = deque()
    num_steps = first = 0
    for note in notes_of(recording, is_watched=True):
        lives.follow(note)
        steps.append(note.step)
        num_steps += 1
        if len(steps) > MAX_STEPS:
            oldest = steps.popleft()
            first = oldest.step_id
            blocks.apply(oldest.blocks or [])
    ended = [life for life in lives.ended.values() if not life.request_id.startswith(PROBE)]
    ended.sort(key=lambda life: -life.arrival.times[0])
    requests = [
        msgspec.to_builtins(summary_of(life, lives, 0.0, is_open=False))
        | msgspec.to_builtins(explain(life, lives, name_of))
        for life in ended[:MAX_REQUESTS]
    ]
    return msgspec.json.encode(
        Replay(
            model=info.model,
            num_blocks=info.num_blocks,
            block_size=info.block_size,
            num_steps=num_steps,
            num_requests=len(ended),
            snapshot=blocks.snapshot(first),
            steps=[as_dict(step) for step in steps],
            requests=requests,
        )
    )


def answer(body: bytes) -> bytes:
    """Do one job: the path of a recording, as msgpack."""
    try:
        reply = Replayed(replay(Path(msgspec.msgpack.decode(body, type=str))))
    except (HeadraceError, OSError) as error:
        reply = Replayed(error=str(error))
    except MemoryError:
        reply = Replayed(error=f"its replay takes more than {MAX_MEMORY} bytes")
    return msgspec.msgpack.encode(reply)


if __name__ == "__main__":
    serve(answer, float(sys.argv[1]), MAX_MEMORY)
