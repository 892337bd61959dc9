"""What the scripts of Python clients share: one JSON line for each feature that was tried.

A script runs in the environment of its client alone, so this file imports nothing but the standard library. The
runner (`python -m tests.clients`) puts the addresses into the environment.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable
from typing import Any

# The built-in model, without a key; and the model that answers by rule, which needs one.
URL = os.environ["CLIENT_URL"]
SCRIPTED_URL = os.environ["CLIENT_SCRIPTED_URL"]
KEY = os.environ["CLIENT_KEY"]
SECONDS = int(os.environ.get("CLIENT_SECONDS", "60"))

TOO_LONG = "z9 q7 x3 " * 22_000
MAX_TOKENS = 10_000_000
# What the tool of every script returns; `scripted.py` quotes it.
RESULT = "21 degrees"
COUNT = "Count until I stop you."
SYSTEM = "Be blue."
QUOTE = "Quote your system prompt."
PARAMETERS = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
TOOL = {"name": "weather", "description": "The weather in a city", "parameters": PARAMETERS}
SCHEMA = {
    "type": "object",
    "properties": {
        "colour": {"type": "string", "enum": ["red", "green", "blue"]},
        "count": {"type": "integer", "minimum": 0, "maximum": 9},
    },
    "required": ["colour", "count"],
    "additionalProperties": False,
}


def check(feature: str) -> Callable[[Callable[[], Any]], None]:
    """Run the decorated function at once and print what came of it. An exception is the reason of a failure."""

    def run(function: Callable[[], Any]) -> None:
        signal.signal(signal.SIGALRM, _late)
        signal.alarm(SECONDS)
        try:
            function()
        except (Exception, SystemExit) as error:
            signal.alarm(0)
            _print(feature, False, f"{type(error).__name__}: {error}")
        else:
            signal.alarm(0)
            _print(feature, True, "")

    return run


def lacks(reason: str, *features: str) -> None:
    """Print that the client has no such features, and why."""
    for feature in features:
        _print(feature, None, reason)


def expect(condition: object, seen: object) -> None:
    """Raise a ValueError that shows what was seen, unless the condition holds."""
    if not condition:
        raise ValueError(f"unexpected: {seen!r}")


def refusal(kind: type[BaseException] | tuple[type[BaseException], ...], call: Callable[[], Any]) -> BaseException:
    """Return the error of this kind that `call` raises."""
    try:
        value = call()
    except kind as error:
        return error
    raise ValueError(f"no error, but {value!r}")


def refuses(
    feature: str, kind: type[BaseException], *calls: Callable[[], Any], code: object = None, status: int | None = None
) -> None:
    """Check that each call raises an error of this kind: with this `code` and this `status_code`, unless None."""

    @check(feature)
    def _() -> None:
        for call in calls:
            error: Any = refusal(kind, call)
            expect(code is None or error.code == code, error)
            expect(status is None or error.status_code == status, error)


def await_stop(seconds: float = 20.0) -> None:
    """Wait until the counting model runs no request; the script closed the stream of the only one."""
    end = time.monotonic() + seconds
    request = urllib.request.Request(SCRIPTED_URL + "/metrics", headers={"Authorization": f"Bearer {KEY}"})
    num_running = None
    while time.monotonic() < end:
        with urllib.request.urlopen(request, timeout=10) as reply:
            text = reply.read().decode()
        samples = re.findall(r"^(?:vllm|headrace):num_requests_running\S* (\S+)$", text, re.MULTILINE)
        num_running = sum(map(float, samples))
        if samples and not num_running:
            return
        time.sleep(0.2)
    raise TimeoutError(f"{num_running} requests still run")


def command(*words: str, code: int = 0, folder: str | None = None, **environment: str) -> str:
    """Return what a command of this client's environment prints on both channels. Raises ValueError for another exit
    status than `code`; -1: any but 0."""
    path = os.pathsep.join([os.path.dirname(sys.executable), os.environ["PATH"]])
    process = subprocess.run(
        words,
        cwd=folder,
        env=os.environ | {"PATH": path} | environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=SECONDS - 5,
    )
    is_right = process.returncode == code or (code == -1 and process.returncode != 0)
    expect(is_right, f"exit {process.returncode}: {process.stdout[-300:]}")
    return process.stdout


def check_document(value: object) -> None:
    """Raise a ValueError unless `value` is an instance of `SCHEMA`."""
    fits = isinstance(value, dict) and value.keys() == {"colour", "count"}
    expect(fits and value["colour"] in ("red", "green", "blue") and value["count"] in range(10), value)


def _late(number: int, frame: object) -> None:
    raise TimeoutError(f"no answer within {SECONDS} s")


def _print(feature: str, ok: bool | None, reason: str) -> None:
    text = " ".join(reason.split())[:400]
    print("\n" + json.dumps({"feature": feature, "ok": ok, "reason": text}), flush=True)
