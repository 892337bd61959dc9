"""S-27, C-6: damaged GGUF files, read as far as a model goes. `make fuzz-gguf` runs many of them and keeps count.

A mutation is a function of (seed, number): any can be made again. Each is parsed; its config, its ends of text and, for
some, its tokenizer and the whole model are made. It must come to an end as "read", or as "refused" by a
`CheckpointError`, within a second of processor time, and in memory of twice its size and 64 MiB. Everything else is a
fault, and the file is kept.
"""

from __future__ import annotations

import argparse
import json
import random
import resource
import struct
import time
from collections import Counter
from pathlib import Path
from typing import Any

import torch
from tests.formats.gguf.files import BOOL, F32, I32, STRING, U32, gguf_file, listed, scalar, tensor

from headrace import hub, models
from headrace.backends import make_backend
from headrace.checkpoint import gguf_config
from headrace.checkpoint.gguf_keys import Reading
from headrace.checkpoint.gguf_source import GGUFWeights
from headrace.gguf import GGUF, TENSOR_TYPES
from headrace.models.config import ModelConfig
from headrace.protocol.errors import CheckpointError
from headrace.text import tokenizer_gguf
from headrace.text.tokenizer import Tokenizer
from headrace.text.tokenizer_files import guarded

MAX_SECONDS = 1.0
MAX_BYTES = 64 * 2**20
EVERY_TOKENIZER, EVERY_MODEL, EVERY_PEAK = 8, 64, 64
EDGES = (0, 1, 2, 3, 7, 2**7, 2**8 - 1, 2**16 + 1, 2**31 - 1, 2**31, 2**32 - 1, 2**40, 2**63 - 1, 2**63, 2**64 - 1)
NUMBERS = {name: number for number, (name, _, _) in TENSOR_TYPES.items()}
TOKENS = ["<unk>", "<s>", "</s>", *[f"<0x{i:02X}>" for i in range(256)], "▁", "a", "b", "c", "▁a", "ab", "<|im_end|>"]


def model_file(architecture: str, kinds: dict[str, str], width: int, tokenizer: str) -> bytes:
    """A whole small model: one layer, the types of its matrices by name (F32 where none is given)."""
    vocab = len(TOKENS)
    whole = ("attn_q", "attn_output", "ffn_gate", "ffn_up", "ffn_down")
    rows = {"token_embd": vocab, "blk.0.attn_k": width // 2, "blk.0.attn_v": width // 2}
    rows |= {f"blk.0.{name}": width for name in whole}
    shapes = {f"{name}.weight": [width, count] for name, count in rows.items()}
    norms = ["blk.0.attn_norm", "blk.0.ffn_norm", "output_norm"]
    if architecture == "gemma2":
        norms += ["blk.0.post_attention_norm", "blk.0.post_ffw_norm"]
    shapes |= {f"{name}.weight": [width] for name in norms}
    if architecture == "qwen2":
        shapes |= {f"blk.0.attn_{part}.bias": [rows[f"blk.0.attn_{part}"]] for part in "qkv"}
    if architecture == "llama":
        shapes["rope_freqs.weight"] = [4]
    entries, data = [], b""
    rng = random.Random(1)
    for name, shape in shapes.items():
        kind = kinds.get(name.removesuffix(".weight"), kinds.get("", "F32")) if len(shape) > 1 else "F32"
        _, elements, size = TENSOR_TYPES[NUMBERS[kind]]
        data += bytes(-len(data) % 32)
        entries.append(tensor(name, shape, NUMBERS[kind], len(data)))
        count = shape[0] * (shape[1] if len(shape) > 1 else 1)
        # Bytes below 64 make no number that is not finite, whatever a type reads them as.
        blocks = bytes(byte & 63 for byte in rng.randbytes(count // elements * size))
        data += struct.pack(f"<{count}f", *[0.5] * count) if kind == "F32" else blocks
    return gguf_file([*metadata(architecture, width), *vocabulary(tokenizer)], entries, data)


def metadata(architecture: str, width: int) -> list[bytes]:
    prefix = architecture + "."
    integers = {"context_length": 128, "embedding_length": width, "block_count": 1, "feed_forward_length": width,
                "attention.head_count": width // 8, "attention.head_count_kv": width // 16,
                "attention.key_length": 8, "rope.dimension_count": 8, "attention.sliding_window": 16}  # fmt: skip
    reals = {"attention.layer_norm_rms_epsilon": 1e-5, "rope.freq_base": 10000.0, "rope.scaling.factor": 2.0}
    return [
        scalar("general.architecture", STRING, architecture),
        scalar("general.alignment", U32, 32),
        *[scalar(prefix + name, U32, value) for name, value in integers.items()],
        *[scalar(prefix + name, F32, value) for name, value in reals.items()],
        scalar(prefix + "rope.scaling.type", STRING, "linear"),
    ]


def vocabulary(model: str) -> list[bytes]:
    kinds = [2, 3, 3, *[6] * 256, *[1] * 6, 3]
    fields = [
        scalar("tokenizer.ggml.model", STRING, model),
        listed("tokenizer.ggml.tokens", STRING, TOKENS),
        listed("tokenizer.ggml.token_type", I32, kinds),
        scalar("tokenizer.ggml.bos_token_id", U32, 1),
        scalar("tokenizer.ggml.eos_token_id", U32, 2),
        scalar("tokenizer.ggml.add_bos_token", BOOL, 1),
        scalar("tokenizer.chat_template", STRING, "{{ messages }}"),
    ]
    if model == "llama":
        return [*fields, listed("tokenizer.ggml.scores", F32, [-float(i) for i in range(len(TOKENS))])]
    return [*fields, scalar("tokenizer.ggml.pre", STRING, "gpt-2"), listed("tokenizer.ggml.merges", STRING, ["a b"])]


def seeds() -> list[bytes]:
    """The files that are damaged: together they have every block type."""
    others = [name for name in NUMBERS if name not in ("I8", "I16", "I32", "I64", "F64", "F32")]
    small = [name for name in others if TENSOR_TYPES[NUMBERS[name]][1] <= 32]
    places = ("token_embd", "blk.0.attn_q", "blk.0.attn_k", "blk.0.attn_v", "blk.0.attn_output", "blk.0.ffn_down")
    result = [model_file("llama", {"": "Q4_0", "token_embd": "Q8_0"}, 32, "llama")]
    result.append(model_file("qwen2", dict(zip(places, small, strict=False)), 32, "gpt2"))
    result.append(
        model_file("gemma2", {"": "F16"} | dict(zip(places, small[len(places) :], strict=False)), 32, "llama")
    )
    wide = [name for name in others if name not in small]
    for i in range(0, len(wide), len(places)):
        result.append(model_file("llama", dict(zip(places, wide[i:], strict=False)), 256, "llama"))
    return result


def damaged(files: list[bytes], seed: int, number: int) -> bytes:
    """One of `files` with one to four places changed, most of them before the tensors' data."""
    rng = random.Random(f"{seed}/{number}")
    # The wide files cost more, and differ in their blocks only.
    data = bytearray(files[rng.randrange(3)] if rng.random() < 0.9 else rng.choice(files))
    head = data.find(b"output_norm.weight") + 64
    for _ in range(rng.choice((1, 1, 1, 2, 4))):
        at = rng.randrange(max(min(head, len(data)), 1) if rng.random() < 0.9 else max(len(data), 1))
        match rng.randrange(9):
            case 0:
                data[at : at + 1] = rng.randbytes(1)
            case 1 | 2:
                data[at : at + 1] = bytes([(data[at] if at < len(data) else 0) ^ 1 << rng.randrange(8)])
            case 3:
                data[at : at + 8] = struct.pack("<Q", rng.choice((*EDGES, 2**64 - len(data))))
            case 4:
                data[at : at + 4] = struct.pack("<I", rng.choice(EDGES) % 2**32)
            case 5:
                del data[at : at + rng.randrange(1, 20)]
            case 6:
                data[at:at] = data[at : at + rng.randrange(1, 20)]
            case 7:
                other = rng.randrange(max(head, 1))
                size = rng.choice((1, 4, 8, 16))
                data[at : at + size] = data[other : other + size]
            case _:
                if rng.random() < 0.2:
                    del data[max(at, 8) :]
    return bytes(data)


class Course:
    """Reads files as far as a model goes."""

    def __init__(self) -> None:
        self.backend = make_backend("cpu", "cpu", "float32")

    def use(self, data: bytes, *, tokenizer: bool, model: bool) -> str:
        """ "read", "refused", or the name of what came out instead."""
        try:
            file = GGUF(data, "fuzzed")
            hub.gguf_ends(file)
            if tokenizer:
                self._tokenizer(file)
            reading = gguf_config.read(file)
            gguf_config.choose_dtype("auto", file)
            if model:
                self._model(file, reading)
        except CheckpointError:
            return "refused"
        except Exception as error:
            return type(error).__name__
        return "read"

    def _tokenizer(self, file: GGUF) -> None:
        result = guarded(lambda _: Tokenizer.of(*tokenizer_gguf.read_metadata(file)), Path("fuzzed"))
        result.decode(result.encode("a bc"))

    def _model(self, file: GGUF, reading: Reading) -> None:
        config = ModelConfig(reading.values)
        weights = GGUFWeights(file, reading, self.backend)
        module = models.find(reading.values["model_type"])
        module.Model(config, weights, self.backend.ops, min(config.max_positions(), 128))
        weights.finish()


def peak_bytes() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def campaign(count: int, seed: int, first: int, keep: Path | None, course: Course | None = None) -> Counter[str]:
    """Mutations first ... first + count - 1 of `seed`, by what became of them. Faults are written into `keep`."""
    files, course = seeds(), course or Course()
    outcomes: Counter[str] = Counter()
    for data in files:
        if course.use(data, tokenizer=True, model=True) != "read":
            outcomes["a sound file that is not read"] += 1
    before = peak_bytes()
    for number in range(first, first + count):
        data = damaged(files, seed, number)
        begin = time.process_time()
        outcome = course.use(data, tokenizer=number % EVERY_TOKENIZER == 0, model=number % EVERY_MODEL == 0)
        if time.process_time() - begin > MAX_SECONDS:
            outcome = "slow"
        # Asking takes longer than reading most files.
        if number % EVERY_PEAK == 0 and peak_bytes() - before > 2 * len(data) + MAX_BYTES:
            outcome, before = f"memory within {EVERY_PEAK}", peak_bytes()
        outcomes[outcome] += 1
        if outcome not in ("read", "refused") and keep is not None:
            keep.mkdir(parents=True, exist_ok=True)
            (keep / f"{outcome}-{seed}-{number}.gguf").write_bytes(data)
    return outcomes


def main() -> int:
    """Go on where the last campaign of this seed stopped; the counts of all are in the report."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--count", type=int, default=100_000)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--report", type=Path, default=Path("build/fuzz-gguf/report.json"))
    options = parser.parse_args()
    torch.set_num_threads(1)
    report: dict[str, Any] = json.loads(options.report.read_text()) if options.report.exists() else {}
    counts, done = Counter(report.get(str(options.seed), {})), 0
    course = Course()
    while done < options.count:
        step, first, begin = min(10_000, options.count - done), sum(counts.values()), time.monotonic()
        counts += campaign(step, options.seed, first, options.report.parent, course)
        done += step
        report[str(options.seed)] = dict(counts)
        options.report.parent.mkdir(parents=True, exist_ok=True)
        options.report.write_text(json.dumps(report, indent=1) + "\n")
        output = ", ".join(f"{outcome} {count:,}" for outcome, count in sorted(counts.items()))
        rate = step / (time.monotonic() - begin)
        print(f"{sum(counts.values()):,} mutations of seed {options.seed} ({rate:,.0f}/s): {output}", flush=True)
    return int(bool(counts.keys() - {"read", "refused"}))


if __name__ == "__main__":
    raise SystemExit(main())
