"""`python -m bench.formats`: how fast each form of weights decodes, where the weights are what is waited for.

A random checkpoint of the shape l1b (Llama-3.2-1B; values do not matter to speed) is loaded in every form that
`--quantization` names, and GGUF files of its levels, whose blocks are one random slab over and over. Each decodes one
sequence; the memory's bandwidth is measured before and after, by headrace's own probe. The rows go to
bench/results/formats-SHAPE.json and into docs/quantisation.md between its marks. Some ten minutes on a quiet machine;
`--forms` takes some, `--render` writes the page anew.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import re
import shlex
import sys
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np

from bench import quality, recipes
from bench.compare.shapes import SHAPES, Shape, write_checkpoint
from bench.record import RESULTS, commit
from headrace import doctor
from headrace.backends.native import require_native
from headrace.cli.bench.quality import decode_speed, program_of, sizes
from headrace.llm import LLM
from headrace.quant.schemes import NAMES
from headrace.quantize import gguf_writer
from headrace.quantize.gguf_encode import encode
from headrace.quantize.gguf_file import U8
from headrace.quantize.gguf_model import Planned

LEVELS = ("Q8_0", "Q6_K", "Q5_K_M", "Q5_0", "Q4_K_M", "Q4_0", "Q3_K_M", "Q2_K")
SLAB_ROWS = 64
PROBE_SECONDS = 0.3
ALSO = {
    "int4-g128": "GPTQ and rtn of 2 to 4 bits",
    "int4-g128-asym": "AWQ, HQQ and others with zero points",
    "int8": "W8A8 (rtn, SmoothQuant), LLM.int8()",
    "nf4": "bitsandbytes",
    "mxfp4": "compressed-tensors and GPT-OSS",
}
"""What else runs on the kernels of a form."""

Row = dict[str, Any]


class Tiled(gguf_writer.Source):
    """A directory as a source of a level's blocks that are random, and the same for every few rows: encoding a whole
    model takes an hour and more, and speed does not depend on what the blocks say."""

    def __init__(self, directory: Path, level: str) -> None:
        super().__init__(directory)
        self.own_kinds: dict[str, str] = {}
        self.own_kinds = self.kinds(gguf_writer.LEVELS[level])
        self._slabs: dict[tuple[str, int], U8] = {}

    def is_blocks(self, plan: Planned) -> bool:
        return bool(self.own_kinds) and self.is_matrix(plan)

    def raw(self, plan: Planned) -> Iterator[U8]:
        num_rows, num_in = self.shape(plan)
        key = self.own_kinds[plan.name], num_in
        if key not in self._slabs:
            noise = np.random.default_rng(1).standard_normal((SLAB_ROWS, num_in), np.float32)
            self._slabs[key] = encode(key[0], noise * np.float32(0.02), plan.name).reshape(SLAB_ROWS, -1)
        for first in range(0, num_rows, SLAB_ROWS):
            yield self._slabs[key][: num_rows - first]


def checkpoint(shape: Shape) -> Path:
    """The shape's random directory, made if it is not there."""
    folder = recipes.FOLDER.with_name("formats") / shape.name
    if not (folder / "model.safetensors").is_file():
        print("making", folder, file=sys.stderr, flush=True)
        write_checkpoint(shape, folder)
    return folder


def gguf_file(shape: Shape, level: str) -> Path:
    directory = checkpoint(shape)
    path = directory.with_name(f"{shape.name}.{level}.gguf")
    print("making", path, file=sys.stderr, flush=True)
    source = Tiled(directory, level)
    gguf_writer.write(source, path, source.own, gguf_writer.LEVELS[level].number)
    return path


def forms(shape: Shape) -> Iterator[tuple[str, dict[str, Any]]]:
    """(name, fields of the config) of every row; files are made when they are asked for."""
    yield "bfloat16", {}
    for name in NAMES:
        if name != "int8-channel":  # the same as int8
            yield name, {"quantization": name}
    for level in LEVELS:
        yield f"{level} (GGUF)", {"level": level}


def bandwidth() -> float:
    """Bytes a second that all cores read."""
    rates = require_native().limits(quality.THREADS, PROBE_SECONDS)
    return float(max(row["rate"] for row in rates if row["what"] == "read"))


def measure(shape: Shape, name: str, fields: dict[str, Any], num_tokens: int) -> Row:
    fields = dict(fields)
    level = fields.pop("level", None)
    model = gguf_file(shape, level) if level else checkpoint(shape)
    before = time.perf_counter()
    room = {"max_model_len": 512, "num_gpu_blocks_override": 64, "max_num_seqs": 1, "enable_prefix_caching": False}
    llm = LLM(str(model), skip_tokenizer_init=True, dtype="bfloat16", backend="cpu", **room, **fields)
    with closing(llm):
        loaded = time.perf_counter() - before
        limits = [bandwidth()]
        speed = decode_speed(llm, num_tokens)
        limits.append(bandwidth())
        sizes_of_model = sizes(program_of(llm), model)
    if level:
        model.unlink()  # all of them are ten gigabytes
    bits = sizes_of_model["held_bits_per_weight"]
    row = {
        "name": name,
        "bits_per_weight": bits,
        "stored_bits_per_weight": sizes_of_model.get("stored_bits_per_weight", bits),
    }
    row |= {"memory_bytes": sizes_of_model["memory_bytes"], "load_s": loaded, "decode_tokens_per_s": speed}
    return row | {"bandwidth": limits, "bandwidth_share": speed * sizes_of_model["memory_bytes"] / max(limits)}


def table(rows: list[Row]) -> str:
    headings = ["form", "bits a weight", "in memory [MiB]", "decode [tokens/s]", "reads [GB/s]", "of bandwidth"]
    headings += ["on the same kernels"]
    lines = ["| " + " | ".join(headings) + " |", "|---|" + "--:|" * (len(headings) - 2) + "---|"]
    for row in sorted(rows, key=lambda row: (-row["bits_per_weight"], row["name"])):
        stored = f" ({row['stored_bits_per_weight']:.2f} in the file)" if "GGUF" in row["name"] else ""
        cells = [
            row["name"],
            f"{row['bits_per_weight']:.2f}{stored}",
            f"{row['memory_bytes'] / quality.MIB:.0f}",
            f"{row['decode_tokens_per_s']:.1f}",
            f"{row['decode_tokens_per_s'] * row['memory_bytes'] / 1e9:.1f}",
            f"{row['bandwidth_share']:.0%}",
            ALSO.get(row["name"], ""),
        ]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def section(name: str) -> str:
    """What stands between the marks of `name` in the page."""
    record = json.loads((RESULTS / f"{name}.json").read_text())
    cpu, read = record["host"]["cpu"], sorted(max(row["bandwidth"]) for row in record["result"])
    return (
        f"`{record['command']}`: {cpu['name']}, {cpu['cores_allowed']} cores, commit {record['commit']}, "
        f"{record['date']}; "
        f"load before: {record['load_before']}, memory read at {read[0] / 1e9:.0f} to {read[-1] / 1e9:.0f} GB/s.\n\n"
        f"{table(record['result'])}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.formats", description=__doc__)
    parser.add_argument("--shape", default="l1b", choices=list(SHAPES))
    parser.add_argument("--num-tokens", type=int, default=24, help="of a run; three runs a form, the best counts")
    parser.add_argument("--forms", default="", help="regular expression: the rows that are measured; by default all")
    parser.add_argument("--render", action="store_true", help="measure nothing: the page from what is kept")
    args = parser.parse_args()
    shape, name = SHAPES[args.shape], f"formats-{args.shape}"
    path = RESULTS / f"{name}.json"
    if not args.render:
        load, rows = os.getloadavg()[0], []
        for form, fields in forms(shape):
            if re.search(args.forms, form):
                rows.append(measure(shape, form, fields, args.num_tokens))
                print(json.dumps(rows[-1]), file=sys.stderr, flush=True)
        machine = doctor.examine()
        record = {
            "command": shlex.join(["python", "-m", "bench.formats", *sys.argv[1:]]),
            "date": datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d"),
            "commit": commit(),
            "host": {part: machine[part] for part in ("cpu", "memory", "torch", "versions")},
            "load_before": round(load, 2),
            "result": rows,
        }
        path.write_text(json.dumps(record, indent=1) + "\n")
    page = quality.PAGE.read_text(encoding="utf-8")
    quality.PAGE.write_text(quality.marked(page, name, section(name)), encoding="utf-8")
    print(table(json.loads(path.read_text())["result"]))


if __name__ == "__main__":
    main()
