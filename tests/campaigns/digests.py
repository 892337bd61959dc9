"""Take digests of what a user of headrace sees, and compare two takes: the proof that a refactoring changes nothing.

    python -m tests.campaigns.digests take OUT.json[.gz] [--models DIR] [--only NAME]
    python -m tests.campaigns.digests compare A.json[.gz] B.json[.gz] [--only NAME]

`take` writes one case for each generation, each HTTP exchange, each written checkpoint and each command line: the
normalised value and its SHA-256. `compare` lists the cases that differ, with the first difference of each, and exits
with 1 if there are any. `--only` takes the cases whose name begins so: offline, cli, quantize, http, and what follows
them, such as offline/sampling. `--models` keeps the random checkpoints, so that two takes read the same files; without
it they are written anew, under the same seeds.

The tool uses public surfaces alone (`from headrace import ...`, the command line, HTTP), so that it runs unchanged on
commits whose modules have moved. `digest_models` writes checkpoints, `digest_offline`, `digest_commands`,
`digest_exchanges` and `digest_refusals` hold the cases, `digest_http` starts servers and normalises replies.

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
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

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


def take(out: Path, models: Path | None, prefix: str) -> int:
    """Take every case and write them to `out`."""
    from tests.campaigns import digest_commands, digest_exchanges, digest_models, digest_offline, digest_refusals

    record = Record(prefix)
    with tempfile.TemporaryDirectory() as scratch:
        directory = models or Path(scratch) / "models"
        digest_models.write_all(directory)
        work = Path(scratch) / "work"
        work.mkdir()
        for part in (digest_offline, digest_commands, digest_exchanges, digest_refusals):
            part.take(record, directory, work)
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
