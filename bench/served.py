"""`python -m bench.served SHAPE`: `headrace serve` itself on a mixture of real shape, over HTTP.

Serves the GGUF file that `bench.mixtures` writes (random codes, no tokenizer: prompts are token ids). Each round starts
the server twice in a row, the second time with the weights in the page cache, and measures the seconds from the start
of the process to its first token; then decoding and a prompt of 512 tokens with one client, and decoding with eight.
With `--llama-bench` llama.cpp runs the same file between the rounds. With `--context N` a last server takes one prompt
of N tokens, and the memory of its process beside the weights is printed before and after.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import json
import os
import re
import socket
import statistics
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import psutil

from bench.compare.serve import server
from bench.mixture_files import SHAPES, tensors_of, write
from bench.mixtures import NEW, PROMPT, run_llama

START_S = 900.0
"""The first start packs the weights."""
ANSWER_S = 3600.0
WARM_UP = 16


@contextmanager
def started(path: Path, flags: list[str], log: Path) -> Iterator[tuple[str, int]]:
    """Yield the address of a server and its process id."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    line = [sys.executable, "-m", "headrace", "serve", str(path), "--port", str(port), "--crash-report-dir", ""]
    line += ["--skip-tokenizer-init", "--save-packed", "--no-enable-prefix-caching", *flags]
    with server(line, dict(os.environ), port, log, START_S) as process:
        yield f"http://127.0.0.1:{port}", process


def seconds(url: str, num_prompt: int, num_new: int, seed: int = 0) -> float:
    """Return the seconds of one answer. Raises `SystemExit` for an answer of another length."""
    token_ids = np.random.default_rng(seed).integers(0, 1000, num_prompt).tolist()
    body = {"model": "m", "prompt": token_ids, "max_tokens": num_new, "temperature": 0, "ignore_eos": True}
    begin = time.perf_counter()
    reply = httpx.post(url + "/v1/completions", json=body, timeout=ANSWER_S, trust_env=False)
    took = time.perf_counter() - begin
    if reply.status_code != 200 or reply.json()["usage"]["completion_tokens"] != num_new:
        raise SystemExit(f"the server answered {reply.status_code}: {reply.text[:300]}")
    return took


def together(url: str, num: int, num_new: int) -> float:
    """Return the seconds of `num` answers at a time."""
    begin = time.perf_counter()
    with concurrent.futures.ThreadPoolExecutor(num) as pool:
        list(pool.map(lambda seed: seconds(url, 4, num_new, seed), range(num)))
    return time.perf_counter() - begin


def anonymous_bytes(pid: int) -> int:
    """Return the memory of a process and its children that no file is behind: cache and buffers, not mapped weights."""
    total = 0
    for process in [psutil.Process(pid), *psutil.Process(pid).children(recursive=True)]:
        text = Path(f"/proc/{process.pid}/status").read_text()
        total += sum(1024 * int(size) for size in re.findall(r"^Rss(?:Anon|Shmem):\s+(\d+) kB", text, re.M))
    return total


def measure(path: Path, flags: list[str], log: Path) -> dict[str, float]:
    """Return the figures of one round."""
    figures = {}
    for name in ("start_s", "second_start_s"):
        begin = time.perf_counter()
        with started(path, flags, log) as (url, _):
            seconds(url, 4, 1)
            figures[name] = time.perf_counter() - begin
            if name == "start_s":
                continue
            seconds(url, 4, WARM_UP)
            # The same prompt with one answer token or more: what is left is decoding alone.
            figures["decode"] = (NEW - 1) / (seconds(url, 4, NEW) - seconds(url, 4, 1))
            figures["prefill"] = PROMPT / seconds(url, PROMPT, 1)
            figures["eight"] = 8 * (NEW - 1) / (together(url, 8, NEW) - together(url, 8, 1))
    return figures


def long_context(path: Path, flags: list[str], num_tokens: int, log: Path) -> dict[str, Any]:
    """Return the memory and the time of one sequence of `num_tokens`, its answer of 16 among them."""
    num_prompt = num_tokens - WARM_UP
    with started(path, [*flags, "--max-num-seqs", "1"], log) as (url, process):
        seconds(url, 4, 1)
        before = anonymous_bytes(process)
        took = seconds(url, num_prompt, WARM_UP)
        after = anonymous_bytes(process)
    return {
        "tokens": num_tokens,
        "seconds": round(took, 1),
        "mib_before": round(before / 2**20),
        "mib_after": round(after / 2**20),
    }


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.served", description=__doc__)
    parser.add_argument("shape", choices=SHAPES)
    parser.add_argument("--folder", type=Path, default=Path("build/mixtures"))
    parser.add_argument("--llama-bench", default="", help="llama.cpp's program of that name")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--context", type=int, default=0, help="tokens of one long sequence")
    parser.add_argument("--cache", type=float, default=2.0, help="GiB of the KV cache")
    chosen = parser.parse_args()
    shape, path = SHAPES[chosen.shape], chosen.folder / f"{chosen.shape}.gguf"
    chosen.folder.mkdir(parents=True, exist_ok=True)
    if not path.exists():
        print(f"writing {path}, {sum(t.num_bytes for t in tensors_of(shape)) / 2**30:.1f} GiB", file=sys.stderr)
        write(shape, path)
    log = chosen.folder / "served.log"
    flags = ["--kv-cache-memory-bytes", str(int(chosen.cache * 2**30)), "--served-model-name", "m"]
    names = ["headrace"] + ["llama.cpp"] * bool(chosen.llama_bench)
    runs: dict[str, list[dict[str, float]]] = {name: [] for name in names}
    for place in range(chosen.rounds):
        for name, figures in runs.items():
            if name == "headrace":
                few = ["--max-model-len", "8192", "--max-num-seqs", "8"]
                figures.append(measure(path, [*flags, *few], log))
            else:
                figures.append(run_llama(chosen.llama_bench, str(path), 2))
            print(f"round {place + 1} of {chosen.rounds}, {name}: {figures[-1]}", file=sys.stderr, flush=True)
    result: dict[str, Any] = {"bench": "served", "shape": chosen.shape, "rounds": chosen.rounds}
    result["tok_s"] = {
        name: {key: round(statistics.median(run[key] for run in figures), 2) for key in figures[0]}
        for name, figures in runs.items()
        if figures
    }
    result["second_starts_s"] = [round(run["second_start_s"], 2) for run in runs["headrace"]]
    if chosen.context:
        wide = [*flags, "--max-model-len", str(chosen.context)]
        result["one_sequence"] = long_context(path, wide, chosen.context, log)
    print(json.dumps(result))


if __name__ == "__main__":
    main()
