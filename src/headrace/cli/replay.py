"""`headrace replay`: builds the engine that a log was recorded from, and runs it again (`engine.records.replay`)."""

from __future__ import annotations

import datetime
from contextlib import closing
from pathlib import Path
from typing import Annotated, Any

import typer


def replay(
    log: Annotated[Path, typer.Argument(help="A file that --record-schedule wrote.", exists=True, dir_okay=False)],
    model: Annotated[str | None, typer.Option(help="Place of the model, if it has moved since the recording.")] = None,
    num_threads: Annotated[
        int | None, typer.Option(help="Threads, if not as many as in the recording; the bits are the same.")
    ] = None,
    blind: Annotated[
        bool, typer.Option("--blind", help="Run the scheduler alone over the recorded results, without the model.")
    ] = False,
) -> None:
    """Run a recorded engine again, to the bit, and name the first step that differs."""
    import msgspec

    from headrace.engine.build import build_engine
    from headrace.engine.records.blind import notes_of, open_recording
    from headrace.engine.records.replay import replay as run_again

    recording = open_recording(log)
    head, config, records = recording
    if blind:
        steps = [note.step for note in notes_of(recording)]
        num_requests = sum(len(step.arrivals) for step in steps)
        num_preempted = sum(len(step.preemptions) for step in steps)
        print(
            f"{len(steps):,} steps of {num_requests:,} requests with {num_preempted:,} preemptions were decided as "
            "recorded, without the model"
        )
        return
    changed: dict[str, Any] = {"record_schedule": None, "save_packed": False, "kv_cache_memory_bytes": None}
    changed["async_scheduling"] = False
    changed["num_gpu_blocks_override"] = head.info.num_blocks
    changed |= {name: value for name, value in (("model", model), ("num_threads", num_threads)) if value is not None}
    began = datetime.datetime.fromtimestamp(head.time, datetime.UTC)
    print(f"{head.info.model}, headrace {head.info.version}, recorded from {began:%Y-%m-%d %H:%M:%S} UTC on")
    with closing(build_engine(msgspec.structs.replace(config, **changed))) as core:
        for name in head.info.__struct_fields__:
            then, now = getattr(head.info, name), getattr(core.info, name)
            if then != now and not (name == "model" and model is not None):
                print(f"{name} was {then!r} and is {now!r}")
        runner: Any = core.executor
        outcome = run_again(records, core, runner.speculator, runner.matchers)
    print(
        f"{outcome.num_steps:,} steps of {outcome.num_requests:,} requests: {outcome.num_tokens:,} tokens and "
        f"{outcome.num_logprobs:,} log-probabilities are the same to the bit"
    )
    if outcome.num_raised:
        print(f"{outcome.num_raised} steps raised what they had raised")
    if outcome.unfinished:
        print("the log ends with a step that was begun; it was run here to its end")
    elif outcome.end:
        print(f"the log ends because {outcome.end}")
