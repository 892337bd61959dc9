"""The command lines of a take: helps, answers, refusals, batches from a file, and checkpoints that `headrace quantize`
writes, with what an engine makes of them.

Runs `python -m headrace` as a user does. `digests take` calls `take`.
"""

from __future__ import annotations

import hashlib
import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

from tests.campaigns.digest_http import Normaliser, environment
from tests.campaigns.digest_offline import PLAIN, PROMPTS, Engines
from tests.campaigns.digests import Record

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


def take(record: Record, models: Path, work: Path) -> None:
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
