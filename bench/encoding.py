"""`python -m bench.encoding`: what the bounded process of a tokenizer that is not plain costs a text.

The built-in model's tokenizer gets a normalizer that is not on the list of plain ones, and encodes the same text here
and in its process, as the server calls both. Prints one JSON object: the medians and 99th percentiles in milliseconds,
the time until the process has loaded the tokenizer, and its resident memory.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import tempfile
import time
from collections.abc import Awaitable, Callable
from contextlib import closing
from pathlib import Path

import psutil

from headrace import hub
from headrace.engine.fair_worker import FairWorker
from headrace.engine.generation import off_loop
from headrace.text import bounded_tokenizer
from headrace.text.tokenizer import Tokenizer


def with_odd_part(folder: Path) -> Path:
    spec = json.loads((hub.resolve("builtin", weights=False) / "tokenizer.json").read_text(encoding="utf-8"))
    (folder / "tokenizer.json").write_text(json.dumps(spec | {"normalizer": {"type": "NFKC"}}), encoding="utf-8")
    return folder


async def times(count: int, encode: Callable[[], Awaitable[object]]) -> dict[str, float]:
    each = []
    for _ in range(count):
        start = time.perf_counter()
        await encode()
        each.append(1e3 * (time.perf_counter() - start))
    cuts = statistics.quantiles(each, n=100)
    return {"p50_ms": round(statistics.median(each), 3), "p99_ms": round(cuts[98], 3)}


async def measured(count: int, here: Tokenizer, there: Tokenizer, text: str) -> dict[str, object]:
    if there.process is None:
        raise SystemExit("the tokenizer is plain")
    worker = FairWorker(there.process)
    ways: dict[str, Callable[[], Awaitable[object]]] = {
        "here": lambda: off_loop(len(text), lambda: here.encode(text)),
        "bounded": lambda: worker.run(lambda: there.encode(text)),
    }
    for way in ways.values():
        await times(count // 10 + 2, way)
    result: dict[str, object] = {name: await times(count, way) for name, way in ways.items()}
    worker.close()
    return result | {"rss_mib": psutil.Process(there.process.pid).memory_info().rss // 2**20}


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.encoding", description=__doc__)
    parser.add_argument("-n", type=int, default=3000, help="texts (default: %(default)s)")
    parser.add_argument("--characters", type=int, default=240, help="of a text (default: %(default)s)")
    args = parser.parse_args()
    text = ("Once upon a time a little girl found a boat. " * (1 + args.characters // 40))[: args.characters]
    with tempfile.TemporaryDirectory() as folder:
        path = with_odd_part(Path(folder))
        start = time.perf_counter()
        with closing(bounded_tokenizer.load(path)) as there:
            load_s = round(time.perf_counter() - start, 2)
            here = Tokenizer.load(path)
            figures = asyncio.run(measured(args.n, here, there, text))
    print(json.dumps({"bench": "encoding", "n": args.n, "characters": len(text), "load_s": load_s, **figures}))


if __name__ == "__main__":
    main()
