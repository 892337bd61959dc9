"""`python -m bench.speculation --texts PATH ...`: what drafters of the built-in model are worth on prompts of people.

Each PATH is a file or folder of JSON lines (Spec-Bench, HumanEval, MT-bench); `builtin` are beginnings of the model's
own kind. For each drafter and each of them: guesses kept by position and tokens a pass, at every temperature, coupled
and by rejection sampling, beside the formula; and the speed of one stream with and without guesses, in turns. All
guess chains, so that the two ways of verifying are compared on the same guesses.

Prints one JSON object, for `python -m bench.record speculate-prompts -- python -m bench.speculation ...`; `--render`
writes the tables of docs/howto-speculate.md, between their marks, from what is recorded.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
import time
from collections.abc import Iterable, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import msgspec

from bench.record import RESULTS
from headrace.cli.bench.plans import SpeculatePlan
from headrace.cli.bench.speculate import Text, acceptance, find_texts, measure_load
from headrace.engine.build import build_engine
from headrace.engine.core import EngineCore
from headrace.protocol.config import EngineConfig
from headrace.protocol.speculation import METHODS, SpeculativeConfig

PAGE = Path(__file__).parents[1] / "docs" / "howto-speculate.md"
NAME = "speculate-prompts"
TEMPERATURES = (0.0, 0.7, 1.0)
DRAFTERS = [name for name in METHODS if name != "eagle3"]
"""eagle3 is another name of the built-in model's eagle."""
START, END = "<!-- made by python -m bench.speculation --render -->", "<!-- end -->"

Row = dict[str, Any]


def spec_of(method: str, mode: str = "coupled", adaptive: bool = False) -> SpeculativeConfig:
    chain = METHODS[method].num_drafts if method != "lookahead" else None
    return SpeculativeConfig(method=method, mode=mode, adaptive=adaptive, num_tree_nodes=chain)


def measure(args: argparse.Namespace) -> list[Row]:
    """A row for each drafter and set of texts."""
    config = EngineConfig(
        enable_prefix_caching=False, num_threads=args.threads, max_num_seqs=8, num_gpu_blocks_override=512
    )
    plans = {
        Path(path).name: SpeculatePlan(
            texts=path, num_prompts=args.num_prompts, output_len=args.output_len, rounds=args.rounds
        )
        for path in args.texts
    }
    rows: list[Row] = []
    with closing(build_engine(config)) as plain:
        texts = {name: find_texts(plan, config, plain) for name, plan in plans.items()}
        for method in args.methods:
            begin = time.monotonic()
            with closing(engine(config, spec_of(method, adaptive=True))) as guessing:
                speeds = {name: measure_load(plain, guessing, texts[name], 1, plans[name]) for name in plans}
            counted = counts(config, method, texts, args.output_len)
            rows += [
                {
                    "method": method,
                    "texts": name,
                    "num_texts": len(texts[name]),
                    "num_speculative_tokens": spec_of(method).num_drafts,
                    "speed": speeds[name],
                    "acceptance": counted[name],
                }
                for name in plans
            ]
            print(f"{method}: {time.monotonic() - begin:.0f} s", file=sys.stderr)
    return rows


def engine(config: EngineConfig, spec: SpeculativeConfig) -> EngineCore:
    return build_engine(msgspec.structs.replace(config, speculative_config=spec))


def counts(config: EngineConfig, method: str, texts: dict[str, list[Text]], output_len: int) -> dict[str, list[Row]]:
    """How many guesses are kept, by name of the texts. Rejection sampling takes no trees, such as lookahead's."""
    rows: dict[str, list[Row]] = {name: [] for name in texts}
    for mode in ("coupled",) if method == "lookahead" else ("coupled", "rejection"):
        spec = spec_of(method, mode)
        with closing(engine(config, spec)) as core:
            for name, some in texts.items():
                rows[name] += [acceptance(core, some, output_len, t, spec) for t in TEMPERATURES]
    return rows


# -- what is shown


def pooled(rows: Iterable[Row], method: str, mode: str, temperature: float) -> float | None:
    """Tokens a pass over all texts together."""
    group = [
        each
        for row in rows
        if row["method"] == method
        for each in row["acceptance"]
        if (each["mode"], each["temperature"]) == (mode, temperature)
    ]
    drafts = sum(each["num_drafts"] for each in group)
    return 1 + sum(each["num_accepted_tokens"] for each in group) / drafts if drafts else None


def tables(rows: Sequence[Row]) -> list[str]:
    """Both tables, as lines of Markdown."""
    names = list(dict.fromkeys(row["texts"] for row in rows))
    methods = list(dict.fromkeys(row["method"] for row in rows))
    lines = [
        "| temperature 0; tokens a pass (by the formula), ratio of speeds | " + " | ".join(names) + " |",
        "|---|" + "--:|" * len(names),
    ]
    for method in methods:
        group = {row["texts"]: row for row in rows if row["method"] == method}
        cells = []
        for name in names:
            first = group[name]["acceptance"][0]
            cells.append(
                f"{first['mean_accepted_length']:.2f} ({first['formula']:.2f}), {group[name]['speed']['ratio']:.2f}"
            )
        lines.append(f"| `{method}` | " + " | ".join(cells) + " |")
    heads = [f"{mode}, {t:g}" for t in TEMPERATURES for mode in ("coupled", "rejection")]
    lines += ["", "| tokens a pass, all texts | " + " | ".join(heads) + " |", "|---|" + "--:|" * len(heads)]
    for method in methods:
        values = [pooled(rows, method, mode, t) for t in TEMPERATURES for mode in ("coupled", "rejection")]
        lines.append(f"| `{method}` | " + " | ".join("–" if x is None else f"{x:.2f}" for x in values) + " |")
    return lines


def render() -> None:
    record = json.loads((RESULTS / f"{NAME}.json").read_text())
    where = f"{record['host']['cpu']['name']}, commit {record['commit']}, {record['date']}"
    note = f"Measured on {where}; the machine's load before it: {record['load_before']:.1f}."
    text = PAGE.read_text(encoding="utf-8")
    section = "\n".join([START, *tables(record["result"]["rows"]), "", note, END])
    text, count = re.subn(f"{re.escape(START)}.*?{re.escape(END)}", lambda _: section, text, flags=re.DOTALL)
    if count != 1:
        raise SystemExit(f"{PAGE.name} has {count} places for the tables")
    PAGE.write_text(text, encoding="utf-8")
    print(PAGE.name)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.speculation", description=__doc__)
    parser.add_argument("--texts", nargs="+", default=["builtin"], metavar="PATH")
    parser.add_argument("--methods", nargs="+", default=DRAFTERS, choices=DRAFTERS, metavar="METHOD")
    parser.add_argument("--num-prompts", type=int, default=12, help="of each set of texts")
    parser.add_argument("--output-len", type=int, default=80)
    parser.add_argument("--rounds", type=int, default=8, help="answers whose speeds are compared, of each set")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--render", action="store_true")
    args = parser.parse_args()
    if args.render:
        render()
    else:
        print(json.dumps({"rows": measure(args)}))


if __name__ == "__main__":
    main()
