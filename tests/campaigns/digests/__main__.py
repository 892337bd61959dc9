"""Take digests of what a user of headrace sees, and compare two takes: the proof that a refactoring changes nothing.

    python -m tests.campaigns.digests take OUT.json[.gz] [--models DIR] [--only NAME]
    python -m tests.campaigns.digests compare A.json[.gz] B.json[.gz] [--only NAME]

`take` writes one case for each generation, each HTTP exchange, each written checkpoint and each command line: the
normalised value and its SHA-256. `compare` lists the cases that differ, with the first difference of each, and exits
with 1 if there are any. `--only` takes the cases whose name begins so: offline, cli, quantize, http, and what follows
them, such as offline/sampling. `--models` keeps the random checkpoints, so that two takes read the same files; without
it they are written anew, under the same seeds.

The tool uses public surfaces alone (`from headrace import ...`, the command line, HTTP), so that it runs unchanged on
commits whose modules have moved. `offline` holds the cases of generations, `bodies` and `servers` those of HTTP. Those
of command lines are here: helps, answers, refusals, batches from a file, and checkpoints that `headrace quantize`
writes, with what an engine makes of them.

What is left out, because it is not the same in two takes of one commit:

- ids of replies, files, batches, calls and requests: numbered in the order in which an exchange shows them first;
- times and durations: `created`, `*_at`, `*_ms`, `*_per_second`, `*_duration`, and the values of /metrics;
- the port in texts, the paths of the take's own folders, speeds and sizes in a command's outputs, and the size of a
  batch's output, which holds durations;
- chunk boundaries of streams: deltas are joined by event type, choice and field, and a skeleton of each sort of event
  is kept where that sort came first. Of `sequence_number` it is kept whether they count from 0. The log-probabilities
  in `response.content_part.added` are those of the first piece, so they are left out;
- headers Date, Content-Length, Connection, Transfer-Encoding, and the values of X-Request-Id and Retry-After;
- the text of a 429, which has the seconds to wait.

No case takes the log-probabilities of a whole response (`/v1/responses`) that ends with an end-of-text token: whether
that token is among them depends on how the engine's steps fall into pieces.
"""

from __future__ import annotations

import argparse
import gzip
import hashlib
import json
import re
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tests.campaigns.digests import bodies, offline, servers
from tests.campaigns.digests.offline import PLAIN, PROMPTS, Engines
from tests.campaigns.digests.servers import Normaliser, environment

COMMAND_SECONDS = 300
STAMP = re.compile(r"\d\d-\d\d \d\d:\d\d:\d\d")
MEASURED = re.compile(r"\b\d+(\.\d+)? ?(s|ms|seconds|minutes|tok/s|tokens/s|GiB/s|MB/s|GB|GiB)\b")

HELPS = ("", "serve", "generate", "chat", "run-batch", "quantize", "verify", "replay", "doctor", "bench",
"bench speculate",
         "bench serve")  # fmt: skip
GENERATES: dict[str, list[str]] = {
    "plain": ["--prompt", "Once upon a time", "--seed", "3", "--max-tokens", "20"],
    "json": ["--prompt", "Once", "--seed", "3", "--max-tokens", "8", "--json"],
    "greedy": ["--prompt", "The dog", "--temperature", "0", "--max-tokens", "16", "--stop", "."],
    "filters": ["--prompt", "The dog", "--seed", "1", "--top-k", "5", "--top-p", "0.9", "--min-p", "0.1",
    "--min-tokens", "4"],
    "int8": ["--prompt", "The dog", "--seed", "1", "--max-tokens", "9", "--quantization", "int8"],
    "speculation": ["--prompt", "The dog", "--seed", "1", "--max-tokens", "9", "-sc", '{"method": "ngram"}'],
    "no-prompt": [], "unknown-flag": ["--colour"], "temperature": ["--prompt", "x", "--temperature", "-1"],
    "seed": ["--prompt", "x", "--seed", "x"], "tokens": ["--prompt", "x", "--max-tokens", "0"],
    "quantization": ["--prompt", "x", "--quantization", "int3"], "config": ["--prompt", "x", "-sc", "{"],
    "model": ["/no/such/model", "--prompt", "x"], "length": ["--prompt", "x", "--max-model-len", "1"],
}  # fmt: skip
REFUSED: dict[str, list[str]] = {
    "nothing": ["nothing"], "version": ["--version"], "serve-port": ["serve", "--port", "x"],
    "serve-parser": ["serve", "--tool-call-parser", "none-such"], "serve-model": ["serve", "/no/such/model"],
    "serve-reasoning": ["serve", "--reasoning-parser", "none-such"],
    "serve-template": ["serve", "--chat-template", "/no/file"], "quantize": ["quantize"],
    "quantize-model": ["quantize", "/no/such/model", "/no/out"], "run-batch": ["run-batch", "/no/in", "/no/out"],
    "replay": ["replay", "/no/file"], "verify": ["verify", "builtin"], "bench": ["bench", "nothing"],
}  # fmt: skip
FORMATS: dict[str, list[str]] = {
    "rtn": ["--method", "rtn"], "rtn-asym": ["--method", "rtn", "--asymmetric"], "rtn-8": ["--method", "rtn",
    "--bits", "8"],
    "rtn-w8a8": ["--method", "rtn", "--bits", "8", "--group-size", "-1"], "rtn-3": ["--method", "rtn", "--bits", "3"],
    "rtn-gptq": ["--method", "rtn", "--format", "gptq", "--group-size", "64"], "rtn-awq": ["--method", "rtn",
    "--format", "awq"],
    "gptq": ["--method", "gptq"], "gptq-group": ["--method", "gptq", "--act-order", "group"],
    "gptq-none": ["--method", "gptq", "--act-order", "none", "--group-size", "-1", "--damping", "0.1"],
    "awq": ["--method", "awq"], "awq-no-clip": ["--method", "awq", "--no-clip", "--group-size", "64"],
    "smoothquant": ["--method", "smoothquant", "--alpha", "0.6"], "hqq": ["--method", "hqq"], "nf4": ["--method",
    "nf4"],
    "llm_int8": ["--method", "llm_int8"], "fp8": ["--method", "fp8"], "fp8_e5m2": ["--method", "fp8_e5m2"],
    "fp8-compressed": ["--method", "fp8", "--format", "compressed-tensors"], "mxfp4": ["--method", "mxfp4"],
    "mxfp4-blocks": ["--method", "mxfp4", "--format", "mxfp4"], "bad-group": ["--group-size", "100"],
    "bad-method": ["--method", "none-such"], "bad-bits": ["--bits", "5"], "bad-format": ["--method", "nf4",
    "--format", "awq"],
}  # fmt: skip
GGUF = ("Q4_0", "Q8_0", "Q4_K_M", "Q6_K", "F16", "IQ4_NL", "none-such")
CALIBRATION = [{"token_ids": [(5 * i * i + 7 * i + k) % 199 for i in range(64)]} for k in range(8)]

MAX_SHOWN = 100
"""Differing cases that `compare` prints in full."""
SHOWN_CHARACTERS = 200


class Record:
    """The cases of one take, by name. `prefix` selects: `wants` says whether any case below a name is selected."""

    def __init__(self, prefix: str = "") -> None:
        self.prefix = prefix
        self.cases: dict[str, dict[str, Any]] = {}
        self.counts: Counter[str] = Counter()

    def wants(self, name: str) -> bool:
        return name.startswith(self.prefix) or self.prefix.startswith(name)

    def add(self, name: str, value: Any, kind: str) -> None:
        """Keep a value that JSON can hold. Raises `ValueError` for a name that is used twice."""
        if not name.startswith(self.prefix):
            return
        if name in self.cases:
            raise ValueError(f"two cases are named {name}")
        # The order of keys counts: it is part of what a user sees.
        self.cases[name] = {"digest": digest(value), "value": value}
        self.counts[kind] += 1


def digest(value: Any) -> str:
    return hashlib.sha256(json.dumps(value, ensure_ascii=False).encode("utf-8", "surrogatepass")).hexdigest()


def write(path: Path, document: dict[str, Any]) -> None:
    text = json.dumps(document, indent=0 if path.suffix != ".gz" else None).encode()
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(gzip.compress(text, mtime=0) if path.suffix == ".gz" else text)


def read(path: Path) -> dict[str, Any]:
    content = path.read_bytes()
    document: dict[str, Any] = json.loads(gzip.decompress(content) if content[:2] == b"\x1f\x8b" else content)
    return document


def first_difference(left: Any, right: Any, path: str = "") -> str:
    """Return where two JSON values differ first, and how; "" where they are equal, order of keys included."""
    if isinstance(left, dict) and isinstance(right, dict):
        for key in left:
            if key not in right:
                return f"{path}.{key}: {short(left[key])} became nothing"
            if difference := first_difference(left[key], right[key], f"{path}.{key}"):
                return difference
        for key in right:
            if key not in left:
                return f"{path}.{key}: nothing became {short(right[key])}"
        return "" if list(left) == list(right) else f"{path}: keys {list(left)} became {list(right)}"
    if isinstance(left, list) and isinstance(right, list):
        for place, (one, other) in enumerate(zip(left, right, strict=False)):
            if difference := first_difference(one, other, f"{path}[{place}]"):
                return difference
        return "" if len(left) == len(right) else f"{path}: {len(left)} items became {len(right)}"
    if type(left) is type(right) and left == right:
        return ""
    if isinstance(left, str) and isinstance(right, str):
        same = next(
            (i for i, (a, b) in enumerate(zip(left, right, strict=False)) if a != b), min(len(left), len(right))
        )
        begin = max(0, same - 40)
        return f"{path}: {short(left[begin:])} became {short(right[begin:])} (character {same})"
    return f"{path}: {short(left)} became {short(right)}"


def short(value: Any) -> str:
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= SHOWN_CHARACTERS else text[:SHOWN_CHARACTERS] + "..."


def differences(left: dict[str, Any], right: dict[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield the name and first difference of each case of two documents that is not the same in both."""
    before, after = left["cases"], right["cases"]
    for name, case in before.items():
        if name not in after:
            yield name, "is missing in the second take"
        elif case["digest"] != after[name]["digest"]:
            place = first_difference(case["value"], after[name]["value"])
            yield name, place or "digests differ, and the stored values do not: a file was changed by hand"
        elif digest(case["value"]) != case["digest"] or digest(after[name]["value"]) != case["digest"]:
            yield name, "a stored value does not have the stored digest: a file was changed by hand"
    for name in after:
        if name not in before:
            yield name, "is missing in the first take"


def compare(left: Path, right: Path, prefix: str = "") -> int:
    """Print the differing cases of two takes whose names begin with `prefix`. Return 1 if there are any, else 0."""
    documents = read(left), read(right)
    for document in documents:
        document["cases"] = {name: case for name, case in document["cases"].items() if name.startswith(prefix)}
    listed = list(differences(*documents))
    for name, text in listed[:MAX_SHOWN]:
        print(f"{name}\n    {text}")
    if len(listed) > MAX_SHOWN:
        print(f"... and {len(listed) - MAX_SHOWN} more")
    sizes = [len(document["cases"]) for document in documents]
    commits = [document["commit"] for document in documents]
    print(f"{len(listed)} differences; {sizes[0]} cases at {commits[0]}, {sizes[1]} at {commits[1]}")
    return 1 if listed else 0


def run(normal: Normaliser, *arguments: str, stdin: str = "") -> dict[str, Any]:
    """The exit status and both outputs of a command, without times, speeds and sizes of the machine's memory."""
    done = subprocess.run(
        [sys.executable, "-m", "headrace", *arguments], capture_output=True, text=True, input=stdin, check=False,
        timeout=COMMAND_SECONDS, env=environment(),
    )  # fmt: skip

    def tidy(text: str) -> str:
        return MEASURED.sub("<measured>", STAMP.sub("<time>", normal.text(text)))

    # `generate --json` prints one object.
    printed = normal.value(json.loads(done.stdout)) if done.stdout.startswith("{") else tidy(done.stdout)
    return {"status": done.returncode, "stdout": printed, "stderr": tidy(done.stderr)}


def take_commands(record: Record, models: Path, work: Path) -> None:
    """Record all cases under cli/ and quantize/."""
    hidden = (str(work), str(models), sys.executable)

    def command(name: str, *arguments: str, stdin: str = "") -> None:
        if record.wants(name):
            record.add(name, run(Normaliser(0, hidden), *arguments, stdin=stdin), "commands")

    for words in HELPS:
        command(f"cli/help/{words}", *words.split(), "--help")
    for name, flags in GENERATES.items():
        command(f"cli/generate/{name}", "generate", *flags)
    command("cli/generate/stdin", "generate", "--prompt-file", "-", "--seed", "1", "--max-tokens", "5", stdin="Once")
    for name, flags in REFUSED.items():
        command(f"cli/refused/{name}", *flags)
    if record.wants("cli/run-batch/"):
        take_batch(record, work, hidden)
    if record.wants("quantize/"):
        take_quantize(record, models, work, hidden)


def take_batch(record: Record, work: Path, hidden: tuple[str, ...]) -> None:
    """`run-batch` on a file with every route that it takes, and lines that are no requests."""
    talk = [{"role": "user", "content": "Hello"}]
    bodies = {
        "/v1/completions": {"prompt": "Once", "max_tokens": 8},
        "/v1/chat/completions": {"messages": talk, "max_tokens": 8},
        "/v1/responses": {"input": "Hello", "max_output_tokens": 8}, "/v1/embeddings": {"input": "Once"},
        "/v1/nothing": {}, "/v1/completions ": {"prompt": "Once", "max_tokens": 0},
    }  # fmt: skip
    lines = [json.dumps({"custom_id": f"c{i}", "method": "POST", "url": url.strip(), "body": body})
             for i, (url, body) in enumerate(bodies.items())]  # fmt: skip
    source, out = work / "in.jsonl", work / "out.jsonl"
    source.write_text("\n".join([*lines, "{", lines[0], json.dumps({"custom_id": "x"})]) + "\n")
    flags = ["--model", "builtin", "--num-threads", "2", "--max-concurrency", "1"]
    for name in ("first", "again"):
        status = run(Normaliser(0, hidden), "run-batch", str(source), str(out), *flags)
        record.add(f"cli/run-batch/{name}", status["status"], "commands")
        answers = [json.loads(line) for line in out.read_text().splitlines()]
        ordered = sorted(answers, key=lambda one: (str(one.get("custom_id")), str(one.get("line"))))
        record.add(f"cli/run-batch/{name}/answers", [Normaliser(0).value(one) for one in ordered], "commands")


def take_quantize(record: Record, models: Path, work: Path, hidden: tuple[str, ...]) -> None:
    """Each method and format: the command's outputs, the bytes of its files, and what an engine generates from them."""
    engines = Engines(record)
    text = work / "calibration.jsonl"
    text.write_text("".join(json.dumps(line) + "\n" for line in CALIBRATION))
    calibration = ["--calibration", str(text), "--calibration-length", "64", "--num-calibration-tokens", "512"]
    jobs = {name: ("wide", work / f"made-{name}", flags) for name, flags in FORMATS.items()} | {
        f"gguf-{level}": ("builtin", work / f"made-{level}.gguf", ["--method", level]) for level in GGUF
    }
    for name, (model, out, flags) in jobs.items():
        if not record.wants(f"quantize/{name}/"):
            continue
        source = model if model == "builtin" else str(models / model)
        calibrated = calibration if model != "builtin" else []
        outcome = run(Normaliser(0, hidden), "quantize", source, str(out), *flags, *calibrated)
        record.add(f"quantize/{name}/command", outcome, "commands")
        if outcome["status"]:
            continue
        for path in sorted(out.iterdir()) if out.is_dir() else [out]:
            if path.name == "quantize-report.json":
                # It has the seconds that each layer took.
                value: Any = Normaliser(0, hidden).value(json.loads(path.read_text()))
            elif path.suffix == ".json":
                value = json.loads(path.read_text())
            else:
                value = hashlib.sha256(path.read_bytes()).hexdigest()
            title = path.name if out.is_dir() else "file"
            record.add(f"quantize/{name}/files/{title}", value, "files")
        prompts = ["Once upon a time", "The dog"] if model == "builtin" else PROMPTS[1:3]
        engines.generate(f"quantize/{name}/generate", str(out), prompts, PLAIN)


def take(out: Path, models: Path | None, prefix: str) -> int:
    """Take every case and write them to `out`."""
    record = Record(prefix)
    with tempfile.TemporaryDirectory() as scratch:
        directory = models or Path(scratch) / "models"
        offline.write_all(directory)
        work = Path(scratch) / "work"
        work.mkdir()
        for part in (offline.take, take_commands, bodies.take, servers.take):
            part(record, directory, work)
    if not record.cases:
        print(f"no case begins with {prefix}", file=sys.stderr)
        return 2
    commit = subprocess.run(["git", "describe", "--always", "--dirty"], capture_output=True, text=True, check=False)
    counts = dict(sorted(record.counts.items()))
    write(out, {"commit": commit.stdout.strip(), "counts": counts, "cases": record.cases})
    print(", ".join(f"{count} {kind}" for kind, count in counts.items()))
    return 0


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.campaigns.digests", description=__doc__.partition("\n")[0])
    commands = parser.add_subparsers(dest="command", required=True)
    taking = commands.add_parser("take")
    taking.add_argument("out", type=Path)
    taking.add_argument("--models", type=Path)
    taking.add_argument("--only", default="", metavar="NAME")
    comparing = commands.add_parser("compare")
    comparing.add_argument("left", type=Path)
    comparing.add_argument("right", type=Path)
    comparing.add_argument("--only", default="", metavar="NAME")
    options = parser.parse_args(arguments)
    if options.command == "compare":
        return compare(options.left, options.right, options.only)
    return take(options.out, options.models, options.only)


if __name__ == "__main__":
    sys.exit(main())
