"""`python -m bench.inspector`: how fast the inspector draws a large engine, and what a viewer costs the server.

A scheduler of 256 sequences and 10,000 blocks runs over a model that takes no time; its journal is sent to chromium at
`--rate` steps a second, and the view of the blocks follows it. Prints one JSON object: updates that were drawn a second
(and frames of the browser), milliseconds that one took, and microseconds of a step's `Feed.follow` in the server.
What the events of blocks cost the engine itself: `python -m bench.journal`. Needs playwright and Debian's chromium.
"""

from __future__ import annotations

import argparse
import http.server
import json
import random
import threading
import time
from statistics import median
from typing import Any, ClassVar

import msgspec

from headrace.core.journal import Journal, Step, decode_note
from headrace.core.options import SchedulerOptions
from headrace.core.scheduler import Scheduler
from headrace.engine.core import EngineCore
from headrace.insight.live import Feed, as_dict
from headrace.protocol.params import SamplingParams
from headrace.protocol.step import EngineInfo, Request, ScheduledBatch, StepResult
from headrace.serve.inspector.page import FOLDER, HEADERS, MEDIA_TYPES

SWITCHES = [
    "--no-sandbox",
    "--disable-gpu",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
]
COUNT = """async (seconds) => {
  const { live } = await import("/inspector/live.js");
  let [updates, frames, isOver] = [0, 0, false];
  const durations = [];
  const end = live.subscribe(() => { updates += 1; });
  const frame = () => { frames += 1; if (!isOver) requestAnimationFrame(frame); };
  requestAnimationFrame(frame);
  const listeners = [...live.listeners];
  const steps = live.steps.at(-1).step_id;
  for (const listener of listeners) {
    live.listeners.delete(listener);
    live.listeners.add(() => {
      const start = performance.now();
      listener();
      durations.push(performance.now() - start);
    });
  }
  const start = performance.now();
  [updates, frames] = [0, 0];
  await new Promise((resolve) => setTimeout(resolve, 1000 * seconds));
  const time = (performance.now() - start) / 1000;
  isOver = true;
  end();
  const total = durations.reduce((sum, each) => sum + each, 0);
  return { steps_per_second: (live.steps.at(-1).step_id - steps) / time, updates_per_second: updates / time,
    frames_per_second: frames / time, milliseconds_per_update: total / Math.max(1, updates),
    blocks_held: live.holders.size, sequences: live.tables.size };
}"""


class Instant:
    """An executor that computes nothing: every sampled token is the same."""

    def start(self, batch: ScheduledBatch) -> ScheduledBatch:
        return batch

    def finish(self, ticket: ScheduledBatch) -> StepResult:
        return StepResult(step_id=ticket.step_id, token_ids=[5 if samples else -1 for samples in ticket.samples])

    def run(self, batch: ScheduledBatch) -> StepResult:
        return self.finish(batch)

    def close(self) -> None:
        return


def make_steps(num_seqs: int, num_blocks: int, num_steps: int) -> tuple[list[Step], list[float]]:
    """Return steps of a full engine whose requests come and go, and the microseconds of each in `Feed.follow`."""
    size, rng = 16, random.Random(1)
    scheduler = Scheduler(
        SchedulerOptions(
            num_blocks=num_blocks,
            block_size=size,
            max_num_seqs=num_seqs,
            max_num_batched_tokens=4096,
            max_model_len=4096,
            enable_prefix_caching=True,
            policy="fcfs",
            eos_token_ids=[2],
            cache_key=b"bench",
        )
    )
    info = EngineInfo(
        model="simulated",
        max_model_len=4096,
        vocab_size=1000,
        eos_token_ids=[2],
        block_size=size,
        num_blocks=num_blocks,
        max_num_seqs=num_seqs,
        max_num_batched_tokens=4096,
    )
    core = EngineCore(scheduler, Instant(), info, time.monotonic)
    core.journal = Journal(scheduler, time.monotonic)
    feed, steps, costs = Feed(core.journal.watch), list[Step](), list[float]()
    viewer = feed.subscribe()
    length = size * num_blocks // num_seqs
    count = 0
    while len(steps) < num_steps:
        while len(scheduler.sequences) < num_seqs + 4:
            prompt = [7] * (64 * rng.randrange(3)) + [
                rng.randrange(3, 999) for _ in range(rng.randrange(length // 2, length))
            ]
            params = SamplingParams(seed=count, max_tokens=rng.randrange(20, 200), ignore_eos=True)
            core.add(Request(request_id=f"request-{count}", prompt_token_ids=prompt, params=params))
            count += 1
        step = decode_note(core.step().note).step
        start = time.perf_counter()
        feed.follow(step)
        costs.append(1e6 * (time.perf_counter() - start))
        viewer.take()
        steps.append(step)
    return steps, costs


class Pages(http.server.BaseHTTPRequestHandler):
    """The page's files, and the steps as a stream of events."""

    messages: ClassVar[list[bytes]] = []
    rate: ClassVar[float] = 60.0
    state: ClassVar[dict[str, Any]] = {}
    is_over: ClassVar[threading.Event] = threading.Event()

    def log_message(self, format: str, *args: Any) -> None:
        return

    def do_GET(self) -> None:
        path = self.path.partition("?")[0]
        if path == "/inspect/live":
            self._stream()
            return
        name = "index.html" if path == "/inspect" else path.removeprefix("/inspector/")
        file = (FOLDER / name).resolve()
        is_there = file.is_file() and file.is_relative_to(FOLDER)
        self.send_response(200 if is_there else 404)
        for key, value in (HEADERS | {"content-type": MEDIA_TYPES.get(file.suffix, "text/plain")}).items():
            self.send_header(key, value)
        self.end_headers()
        self.wfile.write(file.read_bytes() if is_there else b"")

    def _stream(self) -> None:
        self.send_response(200)
        self.send_header("content-type", "text/event-stream")
        self.end_headers()
        start, num = time.monotonic(), 0
        due = 0.0
        try:
            while num < len(self.messages) and not self.is_over.is_set():
                now = time.monotonic() - start
                if now >= due:
                    due = now + 1
                    self.wfile.write(b"data: " + json.dumps({"state": self.state}).encode() + b"\n\n")
                while num < min(len(self.messages), now * self.rate):
                    self.wfile.write(b"data: " + self.messages[num] + b"\n\n")
                    num += 1
                self.wfile.flush()
                time.sleep(1 / 120)
        except OSError:
            return


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sequences", type=int, default=256)
    parser.add_argument("--blocks", type=int, default=10_000)
    parser.add_argument("--rate", type=float, default=60.0, help="steps a second")
    parser.add_argument("--seconds", type=float, default=8.0)
    parser.add_argument("--view", default="blocks")
    args = parser.parse_args()
    num_steps = int(args.rate * (args.seconds + 12))
    steps, costs = make_steps(args.sequences, args.blocks, num_steps)
    Pages.messages = [msgspec.json.encode({"step": as_dict(step)}) for step in steps]
    Pages.rate = args.rate
    Pages.state = {
        "time": 1.0,
        "model": "simulated",
        "is_ready": True,
        "num_running": args.sequences,
        "num_waiting": 4,
        "num_blocks": args.blocks,
        "num_blocks_held": 0,
        "num_blocks_cached": 0,
        "block_size": 16,
        "max_num_seqs": args.sequences,
        "max_num_batched_tokens": 4096,
        "kv_token_bytes": 3584,
        "requests": [],
    }
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Pages)
    server.daemon_threads = True
    threading.Thread(target=server.serve_forever, daemon=True).start()
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path="/usr/bin/chromium", args=SWITCHES)
        page = browser.new_page(viewport={"width": 1280, "height": 800})
        page.goto(f"http://127.0.0.1:{server.server_port}/inspect#{args.view}")
        page.wait_for_timeout(3000)
        counts = page.evaluate(COUNT, args.seconds)
        browser.close()
    Pages.is_over.set()
    server.shutdown()
    half = slice(len(costs) // 2, None)
    report = {name: round(value, 2) for name, value in counts.items()}
    report |= {
        "view": args.view,
        "rate": args.rate,
        "bytes_per_step": round(median(len(message) for message in Pages.messages[half])),
        "follow_us": round(median(costs[half]), 1),
    }
    print(json.dumps(report))


if __name__ == "__main__":
    main()
