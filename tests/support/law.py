"""The requests of the determinism law, ways to run them, and their bits. Run as a program, it prints the bits of one
configuration: `HEADRACE_ISA` is read once in a process.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import struct
import sys

import msgspec
from tests.support.shallow import shallow

from headrace import hub
from headrace.backends.native import require_native
from headrace.engine import build
from headrace.engine.core import EngineCore
from headrace.protocol.config import EngineConfig
from headrace.protocol.params import SamplingParams
from headrace.protocol.step import Request, TokenLogprob
from headrace.text.tokenizer import Tokenizer

MAX_TOKENS = 12
SPAN = 128
TEMPERATURES = (0.0, 0.8)
OPENINGS = [
    "Once upon a time",
    "One day, a little girl named Lily found a needle in her room.",
    "Tom and his dog Max went to the park. They saw a big tree",
    '"Where are you going?" asked the old woman.',
    "The ship left the harbour at dawn, and nobody",
    "In the middle of the night there was a knock",
]
MIDDLES = ["", " and then", " It was very cold, but the sun was shining over the hills and the river ran fast below."]
REPEATS = [1, 2, 9]  # the longest prompts pass one attention span and many blocks
PROMPTS = [opening + middle * n for opening, middle, n in itertools.product(OPENINGS, MIDDLES, REPEATS)]

Bits = tuple[list[int], bytes]


def bits_of(token_ids: list[int], logprobs: list[TokenLogprob]) -> Bits:
    numbers = [x for entry in logprobs for x in (entry.logprob, *(p for _, p in entry.top))]
    return list(token_ids), struct.pack(f"{len(numbers)}d", *numbers)


def make_core(**kwargs: object) -> EngineCore:
    # On a machine with other work, a second thread costs more than it gives.
    options: dict[str, object] = {
        "model": shallow(), "max_num_seqs": 64, "num_gpu_blocks_override": 1024, "num_threads": 1
    }  # fmt: skip
    return build.build_engine(EngineConfig(**(options | kwargs)))  # type: ignore[arg-type]


def run(core: EngineCore, requests: list[Request], preempt_every: int = 0) -> dict[str, Bits]:
    """Run the requests together to their ends; forcibly preempt a running sequence at each n-th step."""
    tokens: dict[str, list[int]] = {r.request_id: [] for r in requests}
    logprobs: dict[str, list[TokenLogprob]] = {r.request_id: [] for r in requests}
    ended: set[str] = set()
    for request in requests:
        core.add(request)
    for step in itertools.count(1):
        if not core.has_work():
            break
        output = core.step()
        if step % 8 == 0:
            core.scheduler.check()
        for request_id, token_ids in zip(output.request_ids, output.token_ids, strict=True):
            tokens[request_id] += token_ids
        for request_id, entries in output.logprobs.items():
            logprobs[request_id] += entries
        ended |= output.finished.keys()
        assert all(f.reason in ("stop", "length") for f in output.finished.values()), output.finished
        if preempt_every and step % preempt_every == 0:
            alive = [request_id for request_id in tokens if request_id not in ended]
            core.scheduler.preempt(alive[step % len(alive)]) if alive else None
    return {r.request_id: bits_of(tokens[r.request_id], logprobs[r.request_id]) for r in requests}


def make_requests() -> list[Request]:
    tokenizer = Tokenizer.load(hub.resolve("builtin"))
    result = []
    for (i, text), temperature in itertools.product(enumerate(PROMPTS), TEMPERATURES):
        params = SamplingParams(
            temperature=temperature, seed=1000 + i, max_tokens=MAX_TOKENS, ignore_eos=True, logprobs=2,
            top_k=40 if i % 3 == 1 else 0, top_p=0.9 if i % 3 == 2 else 1.0,
        )  # fmt: skip
        result.append(Request(request_id=f"{i}@{temperature}", prompt_token_ids=tokenizer.encode(text), params=params))
    return result


def run_alone(requests: list[Request], **options: object) -> dict[str, Bits]:
    """Each by itself, one after the other, on a cold cache, by one thread."""
    core = make_core(enable_prefix_caching=False, **options)
    result: dict[str, Bits] = {}
    for request in requests:
        result |= run(core, [request])
    core.close()
    return result


def groups_of(requests: list[Request], size: int) -> list[list[Request]]:
    # A stride walk makes neighbours of strangers.
    mixed = [requests[(i * 31) % len(requests)] for i in range(len(requests))]
    assert len({r.request_id for r in mixed}) == len(requests)
    return [mixed[i : i + size] for i in range(0, len(mixed), size)]


def assert_same(result: dict[str, Bits], reference: dict[str, Bits]) -> None:
    wrong = {k for k in result if result[k] != reference[k]}
    assert not wrong, f"{len(wrong)} of {len(result)} differ, such as {sorted(wrong)[:4]}"


def digest(result: dict[str, Bits]) -> str:
    output = hashlib.sha256()
    for name in sorted(result):
        token_ids, logprobs = result[name]
        output.update(f"{name} {token_ids} ".encode() + logprobs)
    return output.hexdigest()


if __name__ == "__main__":
    few = [r for r in make_requests() if r.request_id in ("3@0.0", "8@0.8", "13@0.8", "19@0.0")]
    # One of them passes a span of attention, and by little: the plain ISA takes its time.
    few = [
        msgspec.structs.replace(
            r, prompt_token_ids=r.prompt_token_ids[: SPAN + 4], params=msgspec.structs.replace(r.params, max_tokens=6)
        )
        for r in few
    ]
    assert max(len(r.prompt_token_ids) for r in few) > SPAN
    print(require_native().served("")["linear_i4"])
    for options in json.loads(sys.argv[1]):
        core = make_core(**options)
        print(digest(run(core, few)), flush=True)
        core.close()
