"""`python -m bench.kv_cache`: what each number format of the KV cache holds, how fast it is read, and what it costs.

Capacity and speed are those of a shape (l1b: Llama-3.2-1B, int4 weights, random values: they do not matter to speed),
one sequence behind `--contexts` tokens that are there already; the memory's bandwidth is measured before and after, by
headrace's own probe. The loss is that of the built-in model, or of `--model`, with bfloat16 weights against the same
model in float32, on a text that the model writes or on `--text`, as in `headrace bench quality`. The rows go
to bench/results/kv_cache.json, a plot to docs/figures/kv_cache.svg and a table into docs/quantisation.md between its
marks. `--parts` measures some and keeps the rest; `--render` writes page and plot anew.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import shlex
import sys
import time
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np

from bench import formats, quality
from bench.compare.shapes import SHAPES, Shape
from bench.record import RESULTS, commit
from headrace import doctor
from headrace.backends.base import LayerShape
from headrace.backends.cpu.cache import TYPE_CODES, block_bytes
from headrace.backends.cpu.program import TapedProgram
from headrace.backends.step import Chunks
from headrace.cli.bench.quality import file_text, judge, opened, program_of, written_text
from headrace.llm import LLM
from headrace.protocol.config import EngineConfig

PARTS = ("capacity", "speed", "loss")
NUM_STEPS, NUM_RUNS = 8, 3
PATH = RESULTS / "kv_cache.json"
FIGURE = quality.FIGURES / "kv_cache.svg"
CODE_BYTE, SCALE, HALF_SCALE = 0x11, np.float32(0.01), 0x3C24
"""What the cache is full of while it is timed: ordinary numbers of every format."""

Row = dict[str, Any]


def capacity(shape: Shape, dtype: str) -> Row:
    each = block_bytes([LayerShape(shape.kv_heads, shape.head_dim)] * shape.layers, 0, 16, dtype) / 16
    return {
        "bytes_per_token": each,
        "bits_per_number": 8 * each / (2 * shape.layers * shape.kv_heads * shape.head_dim),
        "tokens_per_gib": int(2**30 / each),
    }


def filled(program: TapedProgram) -> None:
    """Write the whole cache: memory that was never written is one page of zeros, and is read in no time."""
    for layer in program.cache.layers:
        for codes in (layer.keys, layer.values):
            if codes is not None:
                codes.view(np.uint8)[:] = CODE_BYTE
        for scales in (layer.key_scales, layer.value_scales):
            if scales is not None:
                scales[:] = SCALE if scales.dtype == np.float32 else HALF_SCALE


def step_seconds(program: TapedProgram, context: int) -> float:
    """The best mean of a few steps of one sequence, from position `context` on."""
    table = list(range(-(-(context + NUM_STEPS) // program.block_size)))
    best = float("inf")
    for _ in range(NUM_RUNS):
        start = time.perf_counter()
        for position in range(context, context + NUM_STEPS):
            program.forward(Chunks([position], [[7]], [table]), [0])
        best = min(best, (time.perf_counter() - start) / NUM_STEPS)
    return best


def speed(shape: Shape, dtype: str, contexts: list[int]) -> Row:
    room = max(contexts) + NUM_STEPS
    fields: dict[str, Any] = {"max_model_len": room, "num_gpu_blocks_override": -(-room // 16), "max_num_seqs": 1}
    llm = LLM(
        str(formats.checkpoint(shape)), skip_tokenizer_init=True, dtype="bfloat16", quantization="int4", backend="cpu",
        kv_cache_dtype=dtype, enable_prefix_caching=False, **fields,
    )  # fmt: skip
    rows: list[Row] = []
    with closing(llm):
        program: Any = program_of(llm)
        filled(program)
        weights = sum(matrix.data.nbytes for matrix in program.model.ops.matrices)
        limits = [formats.bandwidth()]
        for context in contexts:
            rate = 1 / step_seconds(program, context)
            read = weights + capacity(shape, dtype)["bytes_per_token"] * context
            rows.append({"context": context, "tokens_per_s": rate, "read_bytes": read})
        limits.append(formats.bandwidth())
    for row in rows:
        row |= {"bandwidth": limits, "bandwidth_share": row["read_bytes"] * row["tokens_per_s"] / max(limits)}
    return {"speed": rows}


def loss(args: argparse.Namespace, dtypes: list[str]) -> dict[str, Row]:
    losses = {}
    with closing(opened(EngineConfig(model=args.model, dtype="float32", backend="cpu"))) as reference:
        window = min(args.window, reference.core.info.max_model_len - 1)
        if args.text:
            text = file_text(reference, Path(args.text), window, args.max_tokens)
        else:
            text = written_text(reference, window, args.max_tokens)
        for dtype in dtypes:
            print("loss", dtype, file=sys.stderr, flush=True)
            config = EngineConfig(model=args.model, dtype="bfloat16", backend="cpu", kv_cache_dtype=dtype)
            with closing(opened(config)) as llm:
                judged = judge(llm, reference, text)
            losses[dtype] = {name: value for name, value in judged.items() if name != "layers"}
    return losses


def table(rows: dict[str, Row]) -> str:
    contexts: list[Row] = next((row["speed"] for row in rows.values() if "speed" in row), [])
    headings = ["cache", "bits a number", "tokens a GiB"]
    headings += [f"{context['context']:,} tokens [tok/s]" for context in contexts] + ["of bandwidth"] * bool(contexts)
    headings += ["KL [mnats]", "perplexity", "top-1 flips"]
    lines = ["| " + " | ".join(headings) + " |", "|---|" + "--:|" * (len(headings) - 1)]
    for name, row in rows.items():
        cells = [name, f"{row['bits_per_number']:.2f}", f"{row['tokens_per_gib']:,}"]
        cells += [f"{context['tokens_per_s']:.1f}" for context in row.get("speed", ())] or [""] * len(contexts)
        if contexts:
            cells.append(", ".join(f"{context['bandwidth_share']:.0%}" for context in row.get("speed", ())))
        judged = row.get("loss")
        if judged:
            cells.append(f"{1e3 * judged['mean_kl']:.3f} ± {1e3 * judged['mean_kl_stderr']:.3f}")
            cells.append(f"{judged['perplexity'] / judged['reference_perplexity'] - 1:+.2%}")
            cells.append(f"{judged['top1_flip_rate']:.2%}")
        else:
            cells += [""] * 3
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def section(record: Row) -> str:
    """What stands between the marks of the page."""
    lines = [f"{part}: `{about['command']}`, {about['cpu']}, commit {about['commit']}, {about['date']}, load before "
             f"{about['load_before']}" for part, about in record["parts"].items()]  # fmt: skip
    return f"{'; '.join(lines)}.\n\n{table(record['rows'])}\n![Loss against bits, speed](figures/kv_cache.svg)\n"


def plot(rows: dict[str, Row]) -> None:
    import matplotlib

    matplotlib.use("svg")
    from matplotlib import pyplot

    figure, (left, right) = pyplot.subplots(1, 2, figsize=(10, 4), layout="constrained")
    for name, row in rows.items():
        if "loss" in row:
            left.scatter(row["bits_per_number"], row["loss"]["mean_kl"], color="C0", s=18)
            left.annotate(name, (row["bits_per_number"], row["loss"]["mean_kl"]), fontsize=7)
    left.set(yscale="log", xlabel="bits a number, scales included", ylabel="mean KL from float32 [nats]")
    timed = {name: row["speed"] for name, row in rows.items() if "speed" in row}
    for i, context in enumerate(next(iter(timed.values()), [])):
        places = [at + 0.38 * i for at in range(len(timed))]
        right.bar(
            places,
            [speeds[i]["tokens_per_s"] for speeds in timed.values()],
            0.36,
            label=f"{context['context']:,} tokens",
        )
    right.set_xticks([at + 0.19 for at in range(len(timed))], labels=list(timed), fontsize=7, rotation=30)
    right.set(ylabel="decode [tokens/s]")
    if timed:
        right.legend(frameon=False, fontsize=8)
    for axes in (left, right):
        axes.grid(True, alpha=0.3)
    # Without a date and with fixed ids, the same results give the same file.
    matplotlib.rcParams["svg.hashsalt"] = "kv_cache"
    figure.savefig(FIGURE, metadata={"Date": None})
    pyplot.close(figure)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.kv_cache", description=__doc__)
    parser.add_argument("--shape", default="l1b", choices=list(SHAPES))
    parser.add_argument("--contexts", type=int, nargs="+", default=[8192, 32768])
    parser.add_argument("--dtypes", nargs="+", default=list(TYPE_CODES), choices=list(TYPE_CODES))
    parser.add_argument("--parts", nargs="+", default=list(PARTS), choices=PARTS)
    parser.add_argument("--model", default="builtin", help="model of the loss")
    parser.add_argument("--text", help="file with the text; by default the model writes one")
    parser.add_argument("--max-tokens", type=int, default=8192)
    parser.add_argument("--window", type=int, default=512)
    parser.add_argument("--render", action="store_true", help="measure nothing: page and plot from what is kept")
    args = parser.parse_args()
    record: Row = json.loads(PATH.read_text()) if PATH.is_file() else {"parts": {}, "rows": {}}
    for part in () if args.render else args.parts:
        load, shape = round(os.getloadavg()[0], 2), SHAPES[args.shape]
        judged = loss(args, args.dtypes) if part == "loss" else {}
        for dtype in args.dtypes:
            row = record["rows"].setdefault(dtype, {})
            if part == "capacity":
                row |= capacity(shape, dtype)
            elif part == "speed":
                row |= speed(shape, dtype, args.contexts)
                print(dtype, json.dumps(row["speed"]), file=sys.stderr, flush=True)
            else:
                row["loss"] = judged[dtype]
        record["parts"][part] = {
            "command": shlex.join(["python", "-m", "bench.kv_cache", *(Path(a).name for a in sys.argv[1:])]),
            "cpu": f"{doctor.examine()['cpu']['name']}, {doctor.examine()['cpu']['cores_allowed']} cores",
            "date": datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d"),
            "commit": commit(),
            "load_before": load,
        }
        record["rows"] = {name: record["rows"][name] for name in TYPE_CODES if name in record["rows"]}
        PATH.write_text(json.dumps(record, indent=1) + "\n")
    plot(record["rows"])
    page = quality.PAGE.read_text(encoding="utf-8")
    quality.PAGE.write_text(quality.marked(page, "kv_cache", section(record)), encoding="utf-8")
    print(table(record["rows"]))


if __name__ == "__main__":
    main()
