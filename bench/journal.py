"""`python -m bench.journal [MODEL]`: what the journal costs a step, with and without the events of blocks.

Timed where it happens, so that the machine's other work is in the step's time and in the journal's alike. Prints one
JSON object for each number of streams and for each way: microseconds of a step and of its note (made, encoded, and read
again at the other end of the socket), the bytes of a note, and the note's share of the step in percent.
"""

from __future__ import annotations

import argparse
import json
from statistics import quantiles
from typing import Any

from bench.recording import PROMPT_LEN, Timed
from headrace.core.journal import Journal, decode_note
from headrace.engine.build import build_engine
from headrace.engine.core import EngineCore
from headrace.protocol.config import EngineConfig
from headrace.protocol.params import SamplingParams
from headrace.protocol.step import Request


def measure(core: EngineCore, num_streams: int, num_steps: int, is_watched: bool) -> dict[str, Any]:
    """Decode steps of `num_streams` streams, which arrive in turn so that they end in turn."""
    journal: Any = Journal(core.scheduler, core.clock)
    core.journal = journal
    journal.watch(is_watched)
    timed = [Timed(journal.plan), Timed(journal.note)]
    journal.plan, journal.note = timed
    decode = Timed(decode_note)
    for i in range(num_streams):
        params = SamplingParams(seed=i, max_tokens=num_steps // 2 + i % (num_steps // 2), ignore_eos=True)
        prompt = [(7 * i + j) % 400 + 3 for j in range(PROMPT_LEN)]
        core.add(Request(request_id=f"{num_streams}.{is_watched}.{i}", prompt_token_ids=prompt, params=params))
    steps, notes, decodes, sizes = [], [], [], []
    while core.has_work():
        start = core.clock()
        output = core.step()
        steps.append(core.clock() - start)
        notes.append(sum(each.take() for each in timed))
        decode(output.note)
        decodes.append(decode.take())
        sizes.append(len(output.note))
    core.journal = None
    half = slice(5, len(steps) // 2)
    step, note, reading = (1e6 * quantiles(each[half], n=10)[4] for each in (steps, notes, decodes))
    return {
        "streams": num_streams,
        "watched": is_watched,
        "steps": len(steps),
        "step_us": round(step, 1),
        "note_us": round(note, 1),
        "read_us": round(reading, 1),
        "bytes": round(sum(sizes[half]) / len(sizes[half])),
        "note_percent": round(100 * note / step, 3),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", nargs="?", default="builtin")
    parser.add_argument("--streams", type=int, nargs="+", default=[1, 32, 256])
    parser.add_argument("--steps", type=int, default=200)
    args = parser.parse_args()
    most = max(args.streams)
    core = build_engine(
        EngineConfig(model=args.model, max_num_seqs=most, max_model_len=1024, max_num_batched_tokens=2048)
    )
    for num_streams in args.streams:
        for is_watched in (False, True):
            print(json.dumps(measure(core, num_streams, args.steps, is_watched)), flush=True)
    core.close()


if __name__ == "__main__":
    main()
