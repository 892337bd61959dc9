"""Part of C-6 (S-20, R-03): a search for the body that holds up the event loop longest.

While a body is parsed: a recipe is a list of units, each repeated as often as its share of the 8 MiB allows. Recipes
are changed at random and kept where they hold longer. The hold is the processor time of the process between two ticks
of another thread, the least of three tries: other work on the machine adds to one try, and not to all.

While a call is answered: bodies with many prompts, answers and log-probabilities go through a server of this process,
over a simulated engine in another; so do answers that are stored, read again, continued, or made in the background and
in batches. The stall is the processor time of the process between two ticks of the server's loop. Some pieces of that
work are also done in the way that stalls, which must be noticed.
"""

from __future__ import annotations

import asyncio
import gc
import json
import random
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import msgspec
from tests.support.server import Live, child, write_tokenizer

from headrace.engine import generation, links
from headrace.engine.generation import TextClient
from headrace.engine.parts import parts_of
from headrace.protocol import frames
from headrace.protocol.config import ServerConfig
from headrace.protocol.errors import RequestError
from headrace.protocol.params import SamplingParams
from headrace.protocol.step import StepOutput, TokenLogprob
from headrace.serve.apis.openai.conversations import Conversations
from headrace.serve.apis.openai.responses_events import OutputItem, OutputText
from headrace.serve.apis.openai.responses_stored import TAB, past_item, written
from headrace.serve.call.replies import chat_logprobs
from headrace.serve.gates import limits
from headrace.serve.storage.store import Store
from headrace.serve.storage.writers import Writers
from headrace.text.outputs import deltas_of
from headrace.text.tokenizer import Tokenizer

MOST_S = 0.05
TRIES = 3
"""Other work on the machine adds to one try, and not to all."""
TIMES = 1.5
"""How much longer the loop stands still at least where a piece of work is done in one go: a fast processor may do that
within `MOST_S` as well."""
UNITS = (
    b"1", b"9" * 4300, b"1e9", b"0.1234567890123456789", b"null", b"[]", b"{}", b'{"":1}', b'{"a":1,"b":2}', b'""',
    b'"abcdefgh"', '"é€😀"'.encode(), b'"\\n\\n\\n\\n"', b'"\\u4e61\\ud83d\\ude00"', b'"\\\\\\""', b'"[[[["',
    b'"' + b"\\n" * 16 + b'"', b'"' + b"\\u4e61" * 16 + b'"', b'"' + b"\\n" * 65536 + b'"',
    b"[" * 60 + b"]" * 60, b'{"a":' * 60 + b"1" + b"}" * 60, b'"' + b"x" * 65536 + b'"', b" " * 4096 + b"1",
)  # fmt: skip

Recipe = list[tuple[int, float]]


def body_of(recipe: Recipe, bounded: bool = True) -> bytes:
    """Return the body of a recipe; if `bounded`, with as many of each unit as the bounds on a body allow."""
    total = sum(share for _, share in recipe)
    parts = []
    for index, share in recipe:
        unit, part = UNITS[index], share / total
        most = [part * (limits.MAX_BODY_BYTES - 64) / (len(unit) + 1)]
        if bounded:
            lists, texts = unit.count(b"[") + unit.count(b"{"), unit.replace(b'\\"', b"").count(b'"') / 2
            texts += unit.count(b"\\") / limits.ESCAPES
            most += [part * limits.MAX_CONTAINERS / (lists or 1e-9), part * limits.MAX_TEXTS / (texts or 1e-9)]
            most.append(part * limits.MAX_VALUES / (unit.count(b",") + lists + 1))
        parts += [unit] * max(1, int(min(most)) - 2)
    return b'{"a":[' + b",".join(parts) + b"]}"


def hold(body: bytes) -> float:
    """Return the longest processor time, in seconds, in which no other thread got the interpreter's lock."""
    return min(_hold(body) for _ in range(TRIES))


def _hold(body: bytes) -> float:
    def parse() -> None:
        try:
            limits.parse_json(body)
        except RequestError:
            pass
        finally:
            ended.set()

    ended, worst = threading.Event(), 0.0
    thread = threading.Thread(target=parse)
    thread.start()
    while not ended.is_set():
        before = time.process_time()
        time.sleep(0.001)
        worst = max(worst, time.process_time() - before)
    thread.join()
    return worst


def changed(recipe: Recipe, rng: random.Random) -> Recipe:
    """Return the recipe with one unit more, less, or in another share."""
    result = list(recipe)
    if len(result) > 1 and rng.random() < 0.3:
        result.pop(rng.randrange(len(result)))
    if rng.random() < 0.5:
        result.insert(rng.randrange(len(result) + 1), (rng.randrange(len(UNITS)), rng.random() + 0.01))
    place = rng.randrange(len(result))
    result[place] = (result[place][0], rng.random() + 0.01)
    return result


# -- calls

NUM_TOP = 20
# The engine's greatest context and step, and the tokens and the alternatives of one body of a search.
CONTEXT = 32768
MOST_TOKENS = 2**18
MOST_ROWS = 2**14
VOCAB_SIZE = 2**17
"""Of the engine and its tokenizer: a row of all log-probabilities is larger than a frame of the engine's."""
CLIENT = """
import http.client, json, re, sys, time
port, name = sys.argv[1:]
names, status = {}, 0
for method, path, body in json.load(open(name)):
    form = body.startswith("--form")
    kind = "multipart/form-data; boundary=form" if form else "application/json"
    for place, value in names.items():
        path, body = path.replace("{%s}" % place, value), body.replace("{%s}" % place, value)
    while status in (0, 200):
        connection = http.client.HTTPConnection("127.0.0.1", int(port), timeout=600)
        connection.request(method, path, body.encode() or None, {"Content-Type": kind})
        reply = connection.getresponse()
        status, head = reply.status, reply.read(1 << 12)
        while reply.read(1 << 20):
            pass
        if b"data:" in head or not re.search(rb'"status":"(in_progress|validating|finalizing)"', head):
            break
        if method == "POST":
            break
        time.sleep(0.05)
    for value, place in re.findall(r'"id":"((resp|conv|file|batch)[_-][0-9a-f]{32})"', head.decode("utf-8", "replace")):
        names[place] = value
print(status)
"""
Call = list[tuple[str, str, str]]
"""Methods, paths and bodies of calls in order. `{resp}`, `{conv}`, `{file}` and `{batch}` stand for the latest ids."""


class Watch:
    """The longest processor time of this process between two ticks of a loop, in seconds."""

    def __init__(self) -> None:
        self.longest = 0.0

    async def ticks(self) -> None:
        while True:
            before = time.process_time()
            await asyncio.sleep(0.001)
            self.longest = max(self.longest, time.process_time() - before)


def call_of(rng: random.Random) -> tuple[str, dict[str, Any]]:
    """Return a path and a body: many prompts, or many answers, with as many log-probabilities as may be."""
    kind = rng.choice(("prompts", "texts", "rows", "answers", "chat", "vectors", "vocabulary"))
    num = rng.choice((1, 4, 16, 64, 256))
    body: dict[str, Any] = {"max_tokens": 1, "stream": rng.random() < 0.4, "ignore_eos": True}
    if kind == "vocabulary":
        return whole_rows(rng)
    if kind == "chat":
        most = min(MOST_ROWS // num, 256)
        body |= {"messages": [{"role": "user", "content": "a"}], "n": min(num, 128), "max_tokens": most}
        return "/v1/chat/completions", body | {"logprobs": True, "top_logprobs": NUM_TOP}
    if kind == "answers":
        most = min(MOST_ROWS // num, 256)
        return "/v1/completions", body | {"prompt": [[1, 2]] * num, "max_tokens": most, "logprobs": NUM_TOP}
    length = min((MOST_ROWS if kind == "rows" else MOST_TOKENS) // num, CONTEXT - 100)
    if kind == "texts":
        words = ["".join(rng.choices("abc", k=40)) for _ in range(rng.choice((0, 100)))]
        return "/v1/completions", body | {"prompt": ["a" * length] * num, "bad_words": words}
    prompts = [[rng.randrange(256)] * length for _ in range(num)]
    if kind == "vectors":
        return "/v1/embeddings", {"input": prompts}
    if kind == "rows":
        body |= rng.choice(({"prompt_logprobs": NUM_TOP}, {"echo": True, "logprobs": NUM_TOP}))
    return "/v1/completions", body | {"prompt": prompts}


def kept_of(rng: random.Random) -> tuple[str, Call]:
    """Return a name, and calls about answers that are stored: read again, continued, in the background, in a batch."""
    kind = rng.choice(("stored", "conversation", "background", "batch"))
    num = rng.choice((1, 4, 16))
    body: dict[str, Any] = {"input": "a", "max_output_tokens": MOST_ROWS // num, "ignore_eos": True}
    body |= {"top_logprobs": NUM_TOP, "include": ["message.output_text.logprobs"]}
    if rng.random() < 0.25:
        body |= {"max_output_tokens": 4 // min(num, 4), "top_logprobs": VOCAB_SIZE}
    one = "/v1/responses/{resp}"
    if kind == "batch":
        line = {"custom_id": "a", "method": "POST", "url": "/v1/responses", "body": body}
        part = '--form\r\nContent-Disposition: form-data; name="%s"%s\r\n\r\n%s\r\n'
        form = part % ("purpose", "", "batch") + part % ("file", '; filename="a"', json.dumps(line)) + "--form--\r\n"
        expected = {"input_file_id": "{file}", "endpoint": "/v1/responses", "completion_window": "1h"}
        calls = [("POST", "/v1/files", form), ("POST", "/v1/batches", json.dumps(expected))]
        return f"{kind} {body}", [*calls, ("GET", "/v1/batches/{batch}", "")]
    if kind == "conversation":
        again = {"input": "b", "max_output_tokens": 1, "truncation": "auto", "conversation": "{conv}"}
        calls = [("POST", "/v1/conversations", "{}")]
        calls += [("POST", "/v1/responses", json.dumps(each)) for each in (body | {"conversation": "{conv}"}, again)]
        return f"{kind} {body}", [*calls, ("GET", "/v1/conversations/{conv}/items", "")]
    body |= {"background": True} if kind == "background" else {"stream": rng.random() < 0.5}
    again = {"input": "b", "max_output_tokens": 1, "truncation": "auto", "previous_response_id": "{resp}"}
    calls = [("POST", "/v1/responses", json.dumps(body)), ("GET", one + "?stream=true", ""), ("GET", one, "")]
    return f"{kind} {body}", [*calls, ("POST", "/v1/responses", json.dumps(again))]


def whole_rows(rng: random.Random) -> tuple[str, dict[str, Any]]:
    """Return a path and a body for some tokens with the log-probabilities of the whole vocabulary."""
    num, stream = rng.choice((1, 2, 4)), rng.random() < 0.5
    chat = {"messages": [{"role": "user", "content": "a"}], "max_tokens": num, "stream": stream}
    text: dict[str, Any] = {"prompt": [[1, 2]], "max_tokens": num, "ignore_eos": True, "stream": stream}
    return rng.choice(
        (
            ("/v1/completions", text | {"logprobs": VOCAB_SIZE}),
            ("/v1/completions", text | {"prompt": [[1] * (num + 1)], "prompt_logprobs": -1}),
            ("/v1/completions", text | {"prompt": [[1] * (num + 1)], "logprobs": VOCAB_SIZE, "echo": True}),
            ("/v1/chat/completions", chat | {"logprobs": True, "top_logprobs": VOCAB_SIZE}),
            ("/v1/responses", {"input": "a", "max_output_tokens": num, "top_logprobs": VOCAB_SIZE, "store": False,
                               "stream": stream}),
            ("/completion", {"prompt": "a", "n_predict": num, "n_probs": VOCAB_SIZE, "stream": stream}),
            ("/api/chat", chat | {"model": "fake", "options": {"num_predict": num}, "logprobs": True,
                                  "top_logprobs": VOCAB_SIZE}),
        )
    )  # fmt: skip


def call_stall(live: Live, calls: Call) -> tuple[float, str]:
    """Return the longest stall of the server's loop, in seconds, while a client in another process makes some calls,
    and the status of the last reply, or of the first that is not 200."""
    loop, watch = live.server.servers[0].get_loop(), Watch()
    with tempfile.NamedTemporaryFile("w") as file:
        json.dump(calls, file)
        file.flush()
        ticks = asyncio.run_coroutine_threadsafe(watch.ticks(), loop)
        command = [sys.executable, "-c", CLIENT, str(live.port), file.name]
        status = subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
        # What the reply was made of is freed after it.
        time.sleep(0.3)
        ticks.cancel()
    return watch.longest, status


def any_call(rng: random.Random) -> tuple[str, Call]:
    """Return calls, and what they are in words."""
    if rng.random() < 0.25:
        return kept_of(rng)
    path, body = call_of(rng)
    prompts = body.get("prompt") or body.get("input") or [""]
    options = {key: value for key, value in body.items() if key not in ("prompt", "input", "bad_words")}
    return f"{path} {len(prompts)} prompts of {len(prompts[0])} {options}", [("POST", path, json.dumps(body))]


def calls(num: int, rng: random.Random) -> Iterator[tuple[float, str]]:
    """Yield the stall of each of `num` calls, the least of up to three tries while that is too long, and the call in
    words."""
    with tempfile.TemporaryDirectory() as folder:
        tokenizer = Tokenizer.load(write_tokenizer(Path(folder), VOCAB_SIZE))
        engine = child(
            vocab_size=VOCAB_SIZE, max_logprobs=-1,
            max_num_seqs=256, max_model_len=CONTEXT, max_num_batched_tokens=8192, num_gpu_blocks_override=2**15,
        )  # fmt: skip
        with Live(engine, tokenizer, ServerConfig(log_stats_interval=0, any_model_name=False)) as live:
            gc.collect()
            gc.freeze()
            try:
                for _ in range(num):
                    words, call = any_call(rng)
                    seconds, status = call_stall(live, call)
                    for _ in range(TRIES - 1):
                        if seconds > MOST_S:
                            seconds = min(seconds, call_stall(live, call)[0])
                    yield seconds, f"{words}: {status}"
            finally:
                gc.unfreeze()


# -- the pieces of a call, in the way that is used and in one go


def stall(work: Callable[[], Awaitable[object]]) -> float:
    """Return the longest stall, in seconds, of a loop that awaits `work()`, the least of three tries."""

    async def once() -> float:
        watch = Watch()
        ticks = asyncio.create_task(watch.ticks())
        await asyncio.sleep(0.01)
        await work()
        await asyncio.sleep(0.01)
        ticks.cancel()
        return watch.longest

    return min(asyncio.run(once()) for _ in range(TRIES))


def rows_of(num: int) -> list[TokenLogprob]:
    return [
        TokenLogprob(i % 997, -i / num, 1, tuple((i * 31 + k, -k / (i + 1)) for k in range(NUM_TOP)))
        for i in range(num)
    ]


def frames_stall(in_one_go: bool) -> float:
    """Read a step's output for `CONTEXT` rows of a prompt, as the engine's process cuts it or as one frame."""
    return reading_stall(rows_of(CONTEXT), in_one_go)


def row_stall(in_one_go: bool) -> float:
    """The same for one row with the log-probabilities of a vocabulary of 2**20 tokens."""
    return reading_stall([TokenLogprob(0, -1.0, 1, tuple((i, -i / 2**20) for i in range(2**20)))], in_one_go)


def reading_stall(rows: list[TokenLogprob], in_one_go: bool) -> float:
    output = StepOutput(step_id=1, started={"a": 0}, prompt_logprobs={"a": rows})
    data = b"".join(frames.encode(frames.Output(part)) for part in ([output] if in_one_go else parts_of(output)))

    async def read() -> None:
        reader = asyncio.StreamReader()
        reader.feed_data(data)
        reader.feed_eof()
        entries: list[TokenLogprob] = []
        async for message in links._messages(reader):
            if isinstance(message, frames.Output):
                for _, delta in deltas_of(message.output):
                    entries += delta.prompt_logprobs
        await asyncio.to_thread(generation.free, [entries])

    return stall(read)


def opening_stall(in_one_go: bool) -> float:
    """Open four answers to each of 256 prompts, of nearly 2**20 tokens together, beside the loop or on it."""
    prompts = [[place % 256] * 4000 for place in range(256)]
    watch = Watch()

    async def once() -> None:
        client = child(max_num_seqs=256, max_model_len=CONTEXT, num_gpu_blocks_override=2**15)
        await client.start()
        try:
            ticks = asyncio.create_task(watch.ticks())
            await asyncio.sleep(0.01)
            async with await TextClient(client, None).open(
                prompts, SamplingParams(n=4, max_tokens=1, detokenize=False)
            ):
                await asyncio.sleep(0.2)
            ticks.cancel()
        finally:
            await client.close()

    size = 10**12 if in_one_go else None
    with (
        mock.patch.object(generation, "LARGE_TEXT", size or generation.LARGE_TEXT),
        mock.patch.object(links, "POSTED_BYTES", size or links.POSTED_BYTES),
    ):
        longest = []
        for _ in range(2):
            watch.longest = 0.0
            asyncio.run(once())
            longest.append(watch.longest)
    return min(longest)


def freeing_stall(in_one_go: bool) -> float:
    """Free the log-probabilities of 65,536 tokens, in slices or at once."""

    async def work() -> None:
        entries = rows_of(2 * CONTEXT)
        await asyncio.sleep(0.002)
        watched.append(Watch())
        ticks = asyncio.create_task(watched[-1].ticks())
        await asyncio.sleep(0.01)
        if in_one_go:
            entries.clear()
        else:
            await asyncio.to_thread(generation.free, [entries])
        await asyncio.sleep(0.01)
        ticks.cancel()

    watched: list[Watch] = []
    for _ in range(3):
        asyncio.run(work())
    return min(watch.longest for watch in watched)


def keeping_stall(in_one_go: bool) -> float:
    """Add an answer with the log-probabilities of 8,192 tokens to a conversation, as it is written or as values."""
    logprobs = chat_logprobs(None, rows_of(CONTEXT // 4))
    part = OutputText(type="output_text", text="a", logprobs=logprobs)
    item = OutputItem(id="msg_1", type="message", status="completed", role="assistant", content=[part])

    async def work() -> None:
        conversations = Conversations(Store("conv_", None, max_items=1, max_bytes=2**30), Writers())
        result = await conversations.create({})
        await conversations.append(result.id, [msgspec.to_builtins(item) if in_one_go else item])

    return stall(work)


def reading_again_stall(in_one_go: bool) -> float:
    """Pass over the log-probabilities of 65,536 tokens of a stored item: by their tabs, or as a decoder does."""
    part = OutputText(type="output_text", text="a", logprobs=chat_logprobs(None, rows_of(2 * CONTEXT)))
    item = OutputItem(id="msg_1", type="message", status="completed", role="assistant", content=[part])
    text = msgspec.Raw(b"".join(written(item)).replace(TAB, b"" if in_one_go else TAB))
    return stall(lambda: asyncio.to_thread(past_item, text))


PIECES = {
    "decoding": frames_stall, "decoding_a_row": row_stall, "opening": opening_stall, "freeing": freeing_stall,
    "keeping": keeping_stall, "reading_again": reading_again_stall,
}  # fmt: skip


def run_campaign(num: int, seed: int) -> dict[str, Any]:
    """Try so many bodies at the parser, half of them at the bounds and half beyond, and a tenth of that at a server."""
    rng = random.Random(seed)
    best: Recipe = [(rng.randrange(len(UNITS)), 1.0)]
    worst, examples = 0.0, []
    for _ in range(num):
        recipe = changed(best, rng)
        seconds = hold(body_of(recipe, bounded=rng.random() < 0.5))
        if seconds > worst:
            best, worst = recipe, seconds
        if seconds > MOST_S:
            examples.append(f"{seconds:.3f} s: {[(UNITS[i][:20], round(share, 2)) for i, share in recipe]}")
    check, limits.check_size = limits.check_size, lambda body: None
    try:
        control = hold(body_of([(UNITS.index(b"[" * 60 + b"]" * 60), 1.0)], bounded=False))
    finally:
        limits.check_size = check
    if control <= MOST_S:
        examples.append("without the check of sizes, nothing is noticed")
    stalls = list(calls(max(1, num // 10), rng))
    examples += [f"{seconds:.3f} s: {call}" for seconds, call in stalls if seconds > MOST_S]
    examples += [f"not answered: {call}" for _, call in stalls if not call.endswith(": 200")]
    counts: dict[str, Any] = {}
    for name, piece in PIECES.items():
        used, controlled = piece(False), piece(True)
        counts |= {f"{name}_ms": round(used * 1e3, 1), f"{name}_in_one_go_ms": round(controlled * 1e3, 1)}
        if used > MOST_S:
            examples.append(f"{used:.3f} s: {name}")
        if controlled < TIMES * used:
            examples.append(f"{name} in one go is not noticed")
    return {
        "bodies": num,
        "without_the_check_ms": round(control * 1e3, 1),
        "longest_hold_ms": round(worst * 1e3, 1),
        "calls": len(stalls),
        "longest_stall_of_a_call_ms": round(max(seconds for seconds, _ in stalls) * 1e3, 1),
        **counts,
        "violations": len(examples),
        "examples": examples[:5],
    }
