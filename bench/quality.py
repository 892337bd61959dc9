"""`python -m bench.quality [MODEL] [CHECKPOINT ...]`: what each way of quantising costs MODEL, in one table.

MODEL (not quantised) is loaded in every form that `--quantization` and `--kv-cache-dtype` name; each CHECKPOINT is the
same model quantised already (a directory of `headrace quantize` or of others, or a GGUF file). All are compared with
MODEL in float32, on the same tokens: those of `--text` (one or more), or what MODEL itself writes. With `--outliers`
every form is judged on a copy of MODEL with planted outliers as well. The rows go to bench/results/quality-NAME.json, a
plot of loss against bits with its Pareto line to docs/figures/quality-NAME.svg, and the table into
docs/quantisation.md, between its marks. `--made` makes the checkpoints itself: one of every way that `headrace
quantize` has (`bench.recipes`). `--only-speed` times the rows that are kept anew and leaves what they lose. `--render`
draws plot and table anew from what is kept.
"""

from __future__ import annotations

import argparse
import datetime
import itertools
import json
import os
import re
import shlex
import sys
from collections.abc import Iterator, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any, NamedTuple

from bench import recipes
from bench.record import RESULTS, commit
from headrace import doctor
from headrace.backends.native import require_native
from headrace.cli.bench.quality import (
    WRITTEN,
    decode_speed,
    file_text,
    judge,
    opened,
    outlier_figures,
    program_of,
    scored,
    written_text,
)
from headrace.llm import LLM
from headrace.protocol.config import KV_ALIASES, KV_DTYPES, EngineConfig
from headrace.quant.schemes import NAMES

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "quantisation.md"
FIGURES = ROOT / "docs" / "figures"
DTYPE = "bfloat16"
KV_FLOATS = ("auto", "float32", "bfloat16", "float16")
KEPT_LAYERS = 3
THREADS, PROBE_SECONDS = 2, 0.3
MIB = 2**20
CONCLUSIONS = "\n## What the tables show\n"

Row = dict[str, Any]


def forms() -> Iterator[tuple[str, dict[str, Any]]]:
    """(name, fields of the config) of every form in which a plain checkpoint is loaded."""
    kv_dtypes = [name for name in KV_DTYPES if name not in KV_FLOATS and name not in KV_ALIASES]
    yield "bf16", {}
    yield "fp16", {"dtype": "float16"}
    for kv in kv_dtypes:
        yield f"bf16, KV {kv}", {"kv_cache_dtype": kv}
    for name in NAMES:
        if name != "int8-channel":  # the same as int8
            yield name, {"quantization": name}
    for kv in kv_dtypes:
        yield f"int4, KV {kv}", {"quantization": "int4", "kv_cache_dtype": kv}


class Form(NamedTuple):
    """A row. fields: of the config; planted: of the same form of the model with outliers, or None for none."""

    name: str
    fields: dict[str, Any]
    planted: dict[str, Any] | None


def told_forms(args: argparse.Namespace) -> Iterator[Form]:
    """Every row that is asked for."""
    planted = str(recipes.planted(args.model)) if args.outliers else ""
    for name, fields in forms():
        yield Form(name, {"model": args.model} | fields, {"model": planted} | fields if planted else None)
    for path in args.checkpoints:
        yield Form(short_name(path, args.model), {"model": path}, None)
    if args.made:
        checkpoints = recipes.make(args.model, args.num_calibration_tokens, args.fine_tune, args.forms)
        # What is fine-tuned takes too long to be made twice; it is last.
        twins = recipes.make(planted, args.num_calibration_tokens, 0, args.forms, args.model) if planted else iter(())
        for (name, path), twin in itertools.zip_longest(checkpoints, twins):
            yield Form(name, {"model": str(path)}, None if twin is None else {"model": str(twin[1])})


def config(args: argparse.Namespace, fields: dict[str, Any]) -> EngineConfig:
    return EngineConfig(**({"dtype": DTYPE, "backend": args.backend} | fields))


def measure(args: argparse.Namespace, partial: Path) -> list[Row]:
    """All rows; `partial` keeps those that are done, so that the same command goes on where it was broken off."""
    command = [told_command(sys.argv[1:]), commit()]
    record = json.loads(partial.read_text()) if partial.is_file() else {}
    rows: list[Row] = record["rows"] if record.get("command") == command else []
    partial.parent.mkdir(parents=True, exist_ok=True)
    for row in measured(args, {row["name"] for row in rows}):
        rows.append(row)
        partial.write_text(json.dumps({"command": command, "rows": rows}))
    partial.unlink()
    return rows


def measured(args: argparse.Namespace, done: set[str]) -> Iterator[Row]:
    plain = EngineConfig(model=args.model, dtype=args.reference_dtype, backend=args.backend)
    with closing(opened(plain)) as reference:
        window = min(args.window, reference.core.info.max_model_len - 1)
        text, *others = [
            written_text(reference, window, args.max_tokens)
            if name == WRITTEN
            else file_text(reference, Path(name), window, args.max_tokens)
            for name in args.text or [WRITTEN]
        ]
        for form in told_forms(args):
            if form.name in done or not re.search(args.forms, form.name):
                continue
            print(form.name, file=sys.stderr, flush=True)
            with closing(opened(config(args, form.fields))) as llm:
                row = {"name": form.name} | judge(llm, reference, text)
                if others:
                    row["texts"] = [{"text": other.name} | scored(llm, reference, other) for other in others]
                if args.speed:
                    row |= speed(llm)
            if form.planted is not None:
                with closing(opened(config(args, form.planted))) as llm:
                    row |= outlier_figures(llm, reference, text)
            row["layers"] = row["layers"][:KEPT_LAYERS]
            yield row


def timed(args: argparse.Namespace, rows: Sequence[Row]) -> Iterator[Row]:
    """The rows that are kept, with another speed. Raises SystemExit for one that can not be opened any more."""
    known = {form.name: form.fields for form in told_forms(args)}
    for row in rows:
        if row["name"] not in known:
            raise SystemExit(f"{row['name']} is not among what this command opens; measure it all again")
        print(row["name"], file=sys.stderr, flush=True)
        with closing(opened(config(args, known[row["name"]]))) as llm:
            yield row | speed(llm)


def speed(llm: LLM) -> Row:
    """Decoded tokens a second, and what share of the memory's bandwidth (measured beside it) their weights take."""
    tokens_per_s = decode_speed(llm)
    bandwidth = max(row["rate"] for row in require_native().limits(THREADS, PROBE_SECONDS) if row["what"] == "read")
    share = tokens_per_s * program_of(llm).model.ops.weight_bytes / bandwidth
    return {"decode_tokens_per_s": tokens_per_s, "bandwidth_share": share, "bandwidth": bandwidth}


def short_name(path: str, model: str) -> str:
    """Of a checkpoint: its last part without the model's name."""
    name = Path(path).name.removeprefix(Path(model).name)
    return name.removesuffix(".gguf").strip(".-_") + (" (GGUF)" if name.endswith(".gguf") else "")


def pareto(rows: Sequence[Row]) -> list[Row]:
    """The rows that no other beats in both bits and loss, by bits."""
    best: list[Row] = []
    for row in sorted(rows, key=lambda row: (row["bits_per_weight"], row["mean_kl"])):
        if not best or row["mean_kl"] < best[-1]["mean_kl"]:
            best.append(row)
    return best


def weights_only(rows: Sequence[Row]) -> list[Row]:
    """Rows that differ in the weights alone."""
    return [row for row in rows if row["kv_cache_dtype"] in KV_FLOATS]


def table(rows: Sequence[Row]) -> str:
    """In Markdown, by bits; what lies on the Pareto line is bold."""
    speed = any("decode_tokens_per_s" in row for row in rows)
    headings = ["form", "bits a weight", "on disk [MiB]", "in memory [MiB]", "perplexity", "change", "KL [mnats]"]
    others = [f"KL on {text['text']}" for text in rows[0].get("texts", ())]
    planted = any("outlier_kl" in row for row in rows)
    headings += [*others, *["KL with outliers"] * planted, "top-1 flips", "largest logit change", "worst matrix"]
    headings += ["decode [tokens/s]", "of bandwidth"] * speed
    lines = [
        "| " + " | ".join(headings) + " |",
        "|---|" + "--:|" * (len(headings) - 2 - 2 * speed) + "---|" + "--:|" * 2 * speed,
    ]
    best = {id(row) for row in pareto(weights_only(rows))}
    for row in sorted(rows, key=lambda row: (-row["bits_per_weight"], row["mean_kl"])):
        worst = row["layers"][0]
        cells = [
            f"**{row['name']}**" if id(row) in best else row["name"],
            f"{row['bits_per_weight']:.2f}",
            f"{row['disk_bytes'] / MIB:.2f}",
            f"{row['memory_bytes'] / MIB:.2f}",
            f"{row['perplexity']:.4f}",
            changed(row),
            millinats(row["mean_kl"], row["mean_kl_stderr"]),
            *(millinats(text["mean_kl"], text["mean_kl_stderr"]) for text in row.get("texts", ())),
            *([millinats(row.get("outlier_kl"), row.get("outlier_kl_stderr"))] if planted else []),
            f"{row['top1_flip_rate']:.2%}",
            f"{row['max_logit_difference']:.3f}",
            f"{worst['name']} {worst['relative_error']:.2%}" if worst["relative_error"] else "none moved",
        ]
        cells += [f"{row['decode_tokens_per_s']:.0f}", f"{row.get('bandwidth_share', 0):.0%}"] if speed else []
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def millinats(kl: float | None, error: float | None) -> str:
    return "-" if kl is None or error is None else f"{1e3 * kl:.3f} ± {1e3 * error:.3f}"


def changed(row: Row) -> str:
    """The perplexity's change, with the standard error of the tokens' changes."""
    text = f"{row['perplexity'] / row['reference_perplexity'] - 1:+.2%}"
    return text + (f" ± {row['loss_change_stderr']:.2%}" if "loss_change_stderr" in row else "")


def section(name: str) -> str:
    """What stands between the marks of `name` in the page."""
    record = json.loads((RESULTS / f"quality-{name}.json").read_text())
    rows, cpu = record["result"], record["host"]["cpu"]
    first = rows[0]
    text = " and ".join(told_text(one) for one in (first, *first.get("texts", ())))
    where = f"{cpu['name']}, {cpu['cores_allowed']} cores, commit {record['commit']}, {record['date']}"
    if any("decode_tokens_per_s" in row for row in rows):
        read = sorted(row.get("bandwidth", 0) for row in rows)
        where += f"; speed at a load of {record.get('speed_load', record['load_before'])} before, memory read at "
        where += f"{read[0] / 1e9:.0f} to {read[-1] / 1e9:.0f} GB/s"
    picture = f"![Loss against bits](figures/quality-{name}.svg)"
    return f"`{record['command']}`: {text}; {where}.\n\n{table(rows)}\n{picture}\n"


def told_text(figures: dict[str, Any]) -> str:
    text = f"{figures['num_tokens']:,} tokens of {figures['text']}"
    if figures["text"].endswith("reference"):
        return text
    return f"{text}, perplexity {figures['reference_perplexity']:.4f} of the reference"


def marked(page: str, name: str, section: str) -> str:
    """`page` with `own` between the marks of `name`; a section of its own where there are none.

    Raises SystemExit for a page without the heading before which that would stand."""
    first, last = f"<!-- quality {name} -->", f"<!-- end of quality {name} -->"
    if first not in page or last not in page:
        head, heading, rest = page.partition(CONCLUSIONS)
        if not heading:
            raise SystemExit(f"{PAGE.name} lacks the marks {first} and {last}, and the heading {CONCLUSIONS.strip()}")
        return f"{head}\n### {name}\n\n{first}\n{section}{last}\n{heading}{rest}"
    head, _, rest = page.partition(first)
    return f"{head}{first}\n{section}{last}{rest.partition(last)[2]}"


def plot(name: str) -> None:
    import matplotlib

    matplotlib.use("svg")
    from matplotlib import pyplot

    rows = weights_only(json.loads((RESULTS / f"quality-{name}.json").read_text())["result"])
    best = pareto(rows)
    figure, axes = pyplot.subplots(figsize=(9, 6), layout="constrained")
    axes.plot(
        [row["bits_per_weight"] for row in best], [row["mean_kl"] for row in best], color="C0", label="Pareto line"
    )
    others = [row for row in rows if row not in best]
    for some, color in ((best, "C0"), (others, "C1")):
        axes.scatter([row["bits_per_weight"] for row in some], [row["mean_kl"] for row in some], color=color, s=18)
    ticks = [bits for bits in (2, 3, 4, 5, 6, 8, 16) if bits >= min(row["bits_per_weight"] for row in rows) - 1]
    axes.set(xscale="log", yscale="log", xlabel="bits a weight", ylabel="mean KL from float32 [nats]")
    axes.set_xticks(ticks, labels=[str(bits) for bits in ticks])
    axes.minorticks_off()
    axes.margins(x=0.2, y=0.12)
    axes.set_title(f"Loss against bits: {name}", fontsize=12)
    axes.grid(True, alpha=0.3)
    axes.legend(frameon=False, fontsize=9)
    put_names(figure, axes, rows)
    FIGURES.mkdir(parents=True, exist_ok=True)
    # Without a date and with fixed ids, the same results give the same file.
    matplotlib.rcParams["svg.hashsalt"] = name
    figure.savefig(FIGURES / f"quality-{name}.svg", metadata={"Date": None})
    pyplot.close(figure)


def put_names(figure: Any, axes: Any, rows: Sequence[Row]) -> None:
    """Write each row's name beside its point, where no other name stands; a line leads to names that stand apart."""
    figure.draw_without_rendering()  # only then is it known where points lie
    points = [(row["bits_per_weight"], row["mean_kl"]) for row in rows]
    at = axes.transData.transform(points) * 72 / figure.dpi
    boxes = [(x - 3, y - 3, x + 3, y + 3) for x, y in at]
    for row, point, (x, y) in sorted(zip(rows, points, at, strict=True), key=lambda one: one[0]["mean_kl"]):
        width, height = 4.0 * len(row["name"]), 8.0
        for step in range(40):
            # Outwards from the point: to its right first, then to its left, above, below, further.
            away = (step // 4) * 9.0 * (1 if step % 4 < 2 else -1)
            side = 6.0 + step if step % 2 == 0 else -6.0 - step - width
            left, low = x + side, y + away - height / 2
            box = (left, low, left + width, low + height)
            if not any(box[0] < b[2] and b[0] < box[2] and box[1] < b[3] and b[1] < box[3] for b in boxes):
                break
        boxes.append(box)
        axes.annotate(
            row["name"],
            point,
            xytext=(side if side > 0 else side + width, away),
            textcoords="offset points",
            ha="left" if side > 0 else "right",
            va="center",
            fontsize=7,
            arrowprops={"arrowstyle": "-", "color": "grey", "linewidth": 0.4} if step > 3 else None,
        )


def told_command(arguments: Sequence[str]) -> str:
    """The command without the folders of this machine."""
    return shlex.join(["python", "-m", "bench.quality", *(Path(a).name if "/" in a else a for a in arguments)])


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.quality", description=__doc__)
    parser.add_argument("model", nargs="?", default="builtin", help="directory of plain floats, or builtin")
    parser.add_argument("checkpoints", nargs="*", help="the same model, quantised")
    parser.add_argument("--name", help="of result and figure; by default MODEL's last part")
    parser.add_argument(
        "--text", action="append", help=f"file with a text, or {WRITTEN!r}: MODEL writes one (the default); repeatable"
    )
    parser.add_argument("--outliers", action="store_true", help="judge every form with planted outliers as well")
    parser.add_argument("--max-tokens", type=int, default=8192)
    parser.add_argument("--window", type=int, default=512)
    parser.add_argument("--backend", default="cpu")
    parser.add_argument("--made", action="store_true", help="make and judge one of every way of headrace quantize")
    parser.add_argument("--num-calibration-tokens", type=int, default=32768, help="of what is made")
    parser.add_argument("--fine-tune", type=int, default=0, help="with --made: steps to train rounded weights")
    parser.add_argument("--forms", default="", help="regular expression: the rows that are measured; by default all")
    parser.add_argument("--reference-dtype", default="float32", help="of MODEL as the reference")
    parser.add_argument("--speed", action="store_true", help="time decoding as well")
    parser.add_argument("--only-speed", action="store_true", help="time the rows that are kept, judge nothing")
    parser.add_argument("--render", action="store_true", help="measure nothing: plot and page from what is kept")
    args = parser.parse_args()
    name = args.name or re.sub(r"[^\w.-]", "-", Path(args.model).name)
    path = RESULTS / f"quality-{name}.json"
    load = round(os.getloadavg()[0], 2)
    if args.only_speed:
        record = json.loads(path.read_text())
        record |= {"result": list(timed(args, record["result"])), "speed_load": load, "speed_commit": commit()}
        path.write_text(json.dumps(record, indent=1) + "\n")
    elif not args.render:
        rows = measure(args, recipes.FOLDER / f"{name}.rows.json")
        machine = doctor.examine()
        record = {
            "command": told_command(sys.argv[1:]),
            "date": datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d"),
            "commit": commit(),
            "host": {part: machine[part] for part in ("cpu", "memory", "torch", "versions")},
            "load_before": load,
            "result": rows,
        }
        RESULTS.mkdir(exist_ok=True)
        path.write_text(json.dumps(record, indent=1) + "\n")
    plot(name)
    PAGE.write_text(marked(PAGE.read_text(encoding="utf-8"), name, section(name)), encoding="utf-8")
    print(table(json.loads(path.read_text())["result"]))


if __name__ == "__main__":
    main()
