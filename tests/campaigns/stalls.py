"""Part of C-6 (S-20): a search for the body that holds the interpreter's lock longest while it is parsed.

A recipe is a list of units, each repeated as often as its share of the 8 MiB allows. Recipes are changed at random and
kept where they hold longer. The hold is the processor time of the process between two ticks of another thread, the
least of three tries: other work on the machine adds to one try, and not to all.
"""

from __future__ import annotations

import random
import threading
import time
from typing import Any

from headrace.protocol.errors import RequestError
from headrace.serve.gates import limits

MOST_S = 0.05
UNITS = (
    b"1", b"9" * 4300, b"1e9", b"0.1234567890123456789", b"null", b"[]", b"{}", b'{"":1}', b'{"a":1,"b":2}', b'""',
    b'"abcdefgh"', '"é€😀"'.encode(), b'"\\n\\n\\n\\n"', b'"\\u4e61\\ud83d\\ude00"', b'"\\\\\\""', b'"[[[["',
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
            lists, texts = unit.count(b"[") + unit.count(b"{"), unit.count(b'"') / 2
            most += [part * limits.MAX_CONTAINERS / (lists or 1e-9), part * limits.MAX_TEXTS / (texts or 1e-9)]
            most.append(part * limits.MAX_VALUES / (unit.count(b",") + lists + 1))
        parts += [unit] * max(1, int(min(most)) - 2)
    return b'{"a":[' + b",".join(parts) + b"]}"


def hold(body: bytes) -> float:
    """Return the longest processor time, in seconds, in which no other thread got the interpreter's lock."""
    return min(_hold(body) for _ in range(3))


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
    made = list(recipe)
    if len(made) > 1 and rng.random() < 0.3:
        made.pop(rng.randrange(len(made)))
    if rng.random() < 0.5:
        made.insert(rng.randrange(len(made) + 1), (rng.randrange(len(UNITS)), rng.random() + 0.01))
    place = rng.randrange(len(made))
    made[place] = (made[place][0], rng.random() + 0.01)
    return made


def run_campaign(num: int, seed: int) -> dict[str, Any]:
    """Try so many bodies, half of them at the bounds and half beyond."""
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
    return {
        "bodies": num,
        "without_the_check_ms": round(control * 1e3, 1),
        "longest_hold_ms": round(worst * 1e3, 1),
        "violations": len(examples),
        "examples": examples[:5],
    }
