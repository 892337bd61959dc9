"""`python -m bench.adaptive [MODEL]`: what adaptive speculation costs where nothing repeats, and gains where text does.

Engines without speculation, with adaptive and with constant speculation run the same requests in turns, at each number
of streams. Answers are forced, so that any weights do: `random` ones repeat nothing, `edit` and `summary` quote their
prompt, and of `one` a single stream quotes. (A drafter with a model would choose the forced tokens as well, so only
those that read tokens are measured here; `headrace bench speculate` has the others.) Beside the ratios of decoding
speeds stand counts, which no other work on the machine changes: steps, rows, draft tokens, those accepted, rows wasted,
steps that asked for drafts.

MODEL is `builtin`, a folder, or a shape of `bench.compare.shapes`, of which random weights are written to --folder.
Prints one JSON object, for `bench.record`.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import sys
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

import msgspec

from bench.compare.shapes import SHAPES, write_checkpoint, write_tokenizer
from headrace.cli.bench.data import find_tokenizer
from headrace.cli.bench.offline import ObservedExecutor
from headrace.cli.bench.speculate import BatchRun, Text, echoes, run
from headrace.engine.build import build_engine
from headrace.engine.core import EngineCore
from headrace.protocol.config import EngineConfig
from headrace.protocol.speculation import SpeculativeConfig
from headrace.protocol.step import ScheduledBatch

KINDS = ("random", "edit", "summary", "one")
PLAIN, ADAPTIVE, CONSTANT = SIDES = ("plain", "adaptive", "constant")
METHODS = ("ngram", "suffix")
COUNTS = ("num_steps", "num_batched_tokens", "num_draft_tokens", "num_accepted_tokens")
MIN_FREE_TOKENS = 300
"""Token ids below may be bytes and special tokens."""


class Side:
    """One engine, and what it counted in the current kind and load."""

    def __init__(self, config: EngineConfig) -> None:
        self.core: EngineCore = build_engine(config)
        self.num_asks = 0
        executor: Any = ObservedExecutor(self.core.executor, self._count)
        self.core.executor = executor
        self.runs: list[BatchRun] = []
        self.begin()

    def _count(self, batch: ScheduledBatch) -> None:
        self.num_asks += batch.asks

    def begin(self) -> None:
        self.runs, self.num_asks = [], 0
        stats = self.core.stats()
        self._before = {name: getattr(stats, name) for name in COUNTS}

    def counts(self) -> dict[str, Any]:
        stats = self.core.stats()
        counts: dict[str, Any] = {name: getattr(stats, name) - self._before[name] for name in COUNTS}
        wasted = counts["num_draft_tokens"] - counts["num_accepted_tokens"]
        return counts | {"num_asks": self.num_asks, "wasted_share": round(wasted / counts["num_batched_tokens"], 5)}


def texts_of(kind: str, num: int, vocab_size: int, tokenizer: Any, args: argparse.Namespace, first: int) -> list[Text]:
    """Prompts and answers; others for each `first`."""
    texts = []
    for index in range(first, first + num):
        noise = random.Random(1_000_003 + index)
        draw = range(min(MIN_FREE_TOKENS, vocab_size // 2), vocab_size)
        answer = noise.choices(draw, k=args.output_len)
        texts.append(Text(noise.choices(draw, k=args.prompt_len), answer))
    if kind != "random":
        some = num if kind != "one" else 1
        quoted = echoes(tokenizer, "edit" if kind == "one" else kind, first + some, args.prompt_len, args.output_len)
        texts[:some] = quoted[first:]
    return texts


def summed(rounds: list[BatchRun], others: list[BatchRun]) -> dict[str, Any]:
    """The ratio of the medians, and of each round the ratio of the two speeds."""
    ratios = sorted(b.tokens_per_second / a.tokens_per_second for a, b in zip(others, rounds, strict=True))
    median = statistics.median(each.tokens_per_second for each in rounds)
    other = statistics.median(each.tokens_per_second for each in others)
    return {
        "tokens_per_second": round(median, 1),
        "ratio": round(median / other, 3),
        "ratios": [round(r, 3) for r in ratios],
    }


def measure(args: argparse.Namespace) -> dict[str, Any]:
    spec = SpeculativeConfig(method=args.method)
    config = EngineConfig(
        model=model_of(args), quantization=args.quantization, enable_prefix_caching=False, num_threads=args.threads,
        max_num_seqs=max(args.streams), max_model_len=args.prompt_len + args.output_len + 64,
    )  # fmt: skip
    specs = {PLAIN: None, ADAPTIVE: spec, CONSTANT: msgspec.structs.replace(spec, adaptive=False)}
    rows: list[dict[str, Any]] = []
    with ExitStack() as stack:
        sides = {name: Side(msgspec.structs.replace(config, speculative_config=specs[name])) for name in args.sides}
        for side in sides.values():
            stack.enter_context(closing(side.core))
        vocab_size = sides[PLAIN].core.info.vocab_size
        tokenizer = find_tokenizer(config.model) if set(args.kinds) - {"random"} else None
        for side in sides.values():
            run(side.core, texts_of("random", 1, vocab_size, None, args, 10**6), 8)
        for streams in args.streams:
            for kind in args.kinds:
                for side in sides.values():
                    side.begin()
                for number in range(args.rounds):
                    batch = texts_of(kind, streams, vocab_size, tokenizer, args, number * streams)
                    order = list(sides.values())[:: 1 if number % 2 else -1]
                    for side in order:
                        side.runs.append(run(side.core, batch, args.output_len))
                plain = sides[PLAIN].runs
                for name, side in sides.items():
                    if [each.answers for each in side.runs] != [each.answers for each in plain]:
                        raise SystemExit(f"{kind}, {streams} streams: {name} gave other answers")
                    row = {"kind": kind, "streams": streams, "side": name} | summed(side.runs, plain) | side.counts()
                    rows.append(row)
                    print(row, file=sys.stderr)
    return {
        "model": args.model,
        "quantization": args.quantization,
        "method": args.method,
        "rounds": args.rounds,
        "rows": rows,
    }


def model_of(args: argparse.Namespace) -> str:
    """The model, or the folder of a shape's random weights, which is written unless it is there."""
    if args.model not in SHAPES:
        return str(args.model)
    shape, source, folder = SHAPES[args.model], args.folder / args.model, args.folder / f"{args.model}-text"
    if not (source / "model.safetensors").exists():
        write_checkpoint(shape, source)
    write_tokenizer(shape, source, folder)
    return str(folder)


def arguments(words: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m bench.adaptive", description=__doc__)
    parser.add_argument("model", nargs="?", default="builtin")
    parser.add_argument("--method", default="ngram", choices=METHODS)
    parser.add_argument("--quantization", default=None)
    parser.add_argument("--kinds", nargs="+", default=KINDS, choices=KINDS)
    parser.add_argument("--sides", nargs="+", default=SIDES, choices=SIDES)
    parser.add_argument("--streams", nargs="+", type=int, default=[1, 8, 32])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--prompt-len", type=int, default=128)
    parser.add_argument("--output-len", type=int, default=128)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--folder", type=Path, default=Path("build/shapes"), help="of the weights of shapes")
    return parser.parse_args(words)


def main() -> None:
    print(json.dumps(measure(arguments())))


if __name__ == "__main__":
    main()
