"""`headrace serve` under 32 HTTP streams: the cost of the network, the text and the processes beside `LLM.generate`.

The server detokenises, as it would for a user; the client runs in this process, on the same cores.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import httpx

from bench.compare.environments import OURS, PEERS, Workshop, last_words
from bench.compare.plan import Contender
from bench.compare.shapes import Shape
from bench.compare.workers import Conditions, WorkerError
from bench.peers import headrace_
from bench.peers.protocol import FIRST_ID, NUM_NEW, NUM_PROMPT, Job
from bench.tied import tied
from headrace.cli.bench import serve as bench_serve
from headrace.cli.bench.data import Sample
from headrace.cli.bench.plans import ServePlan

NUM_STREAMS = 32
SKIPPED = ("skip_tokenizer_init",)  # the server has one to load


def arguments(job: Job, tokenizer: Path, port: int) -> list[str]:
    """The command line of a server with the job's engine."""
    line = [sys.executable, "-m", "headrace", "serve", job.model, "--tokenizer", str(tokenizer), "--port", str(port)]
    line += ["--crash-report-dir", ""]  # it is killed at the end, which is not worth a report
    for name, value in headrace_.fields(job).items():
        flag = name.replace("_", "-")
        if name in SKIPPED:
            continue
        if isinstance(value, bool):
            line.append(f"--{flag}" if value else f"--no-{flag}")
        else:
            line += [f"--{flag}", str(value)]
    return line


@contextlib.contextmanager
def server(command: Sequence[str], environment: dict[str, str], port: int, log: Path, seconds: float) -> Iterator[int]:
    """Start a server, yield its process id when it is healthy, end it. Raises `WorkerError` if it does not start."""
    with log.open("a") as file:
        print("$", *command, file=file, flush=True)
        process = subprocess.Popen(
            tied(command), stdin=subprocess.DEVNULL, stdout=file, stderr=file, env=environment, start_new_session=True
        )
    try:
        end = time.monotonic() + seconds
        while True:
            if process.poll() is not None:
                raise WorkerError(f"the server ended with status {process.returncode}: {last_words(log)}")
            with contextlib.suppress(httpx.HTTPError):
                if httpx.get(f"http://127.0.0.1:{port}/health", timeout=5.0, trust_env=False).is_success:
                    break
            if time.monotonic() > end:
                raise WorkerError(f"the server did not answer within {seconds:.0f} s")
            time.sleep(0.2)
        yield process.pid
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGTERM)
        try:
            process.wait(20)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def samples(vocab: int, count: int, num_new: int, noise: random.Random) -> list[Sample]:
    def ids() -> list[int]:
        return [noise.randrange(FIRST_ID, vocab) for _ in range(NUM_PROMPT)]

    return [Sample(ids(), NUM_PROMPT, num_new) for _ in range(count)]


def measure(workshop: Workshop, shape: Shape, contender: Contender, seconds: float) -> dict[str, Any]:
    """Tokens a second over all streams, from the first request sent to the last answer's end, as "value"."""
    peer = PEERS[OURS]
    job = Job(**workshop.job(peer, shape, contender.quant, "work"))
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = arguments(job, workshop.source(shape), port)
    noise = random.Random(time.time_ns())
    with server(command, workshop.environment(peer), port, workshop.log(peer, "serve"), seconds) as pid:
        url = f"http://127.0.0.1:{port}"
        name = str(bench_serve.first_model(url, {})["id"])
        body = {"ignore_eos": True, "temperature": 0.0}
        target = bench_serve.Target(
            base_url=url, endpoint="/v1/completions", model=name, extra_body=body, timeout=seconds
        )
        asyncio.run(bench_serve.run(target, samples(shape.vocab, 2, 8, noise), ServePlan()))
        conditions = Conditions(pid)
        timelines, wall_seconds = asyncio.run(
            bench_serve.run(target, samples(shape.vocab, NUM_STREAMS, NUM_NEW, noise), ServePlan())
        )
        facts = conditions.facts()
    errors = [timeline.error for timeline in timelines if timeline.error]
    num_tokens = sum(timeline.num_output_tokens for timeline in timelines)
    if errors or num_tokens != NUM_STREAMS * NUM_NEW:
        raise WorkerError(errors[0] if errors else f"{num_tokens} tokens came of {NUM_STREAMS * NUM_NEW}")
    return {"value": num_tokens / wall_seconds, "seconds": wall_seconds, **facts}
