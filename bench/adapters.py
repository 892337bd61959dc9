"""`python -m bench.adapters [MODEL]`: what adapters cost, in one batch of many streams.

Engines without adapters, and with adapters enabled, run the same requests in turns: `none` of them with an adapter, all
with `one`, or each with one of `--adapters`. An adapter of random numbers has a rank of --rank on every linear layer.
MODEL is `builtin`, a folder, or a shape of `bench.compare.shapes`, of which random weights are written to --folder.
Prints one JSON object, for `bench.record`: tokens a second in and out, and of each round the ratio to the base.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import sys
import tempfile
import time
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file

from bench.adaptive import model_of
from bench.compare.shapes import SHAPES
from headrace.engine.build import build_engine
from headrace.engine.core import EngineCore
from headrace.protocol.adapters import LoadAdapter
from headrace.protocol.config import EngineConfig
from headrace.protocol.params import SamplingParams
from headrace.protocol.step import Request

SIDES = ("base", "none", "one", "many")


def write_adapter(directory: Path, core: EngineCore, rank: int, seed: int) -> Path:
    """Write an adapter of random numbers in bfloat16 for all layers of an engine that takes adapters."""
    directory.mkdir(parents=True)
    config = {"peft_type": "LORA", "r": rank, "lora_alpha": rank, "target_modules": "all-linear"}
    (directory / "adapter_config.json").write_text(json.dumps(config))
    noise = torch.Generator().manual_seed(seed)
    tensors: dict[str, Any] = {}
    places: dict[str, Any] = core.executor.program.model.ops.adapters.places  # type: ignore[attr-defined]
    for name, place in places.items():
        for side, shape in (("A", (rank, place.num_in)), ("B", (place.num_out, rank))):
            numbers = torch.randn(shape, generator=noise) * 0.01
            tensors[f"base_model.model.{name}.lora_{side}.weight"] = numbers.bfloat16()
    save_file(tensors, directory / "adapter_model.safetensors")
    return directory


def run(core: EngineCore, digests: list[str], args: argparse.Namespace, seed: int) -> float:
    """Answer a request for each digest. Return the tokens a second, those of the prompts included."""
    noise = random.Random(seed)
    params = SamplingParams(max_tokens=args.output_len, temperature=0, ignore_eos=True, seed=0, detokenize=False)
    for i, digest in enumerate(digests):
        prompt = noise.choices(range(300, core.info.vocab_size), k=args.prompt_len)
        core.add(Request(request_id=f"{seed}.{i}", prompt_token_ids=prompt, params=params, adapter=digest))
    begin = time.perf_counter()
    while core.has_work():
        core.step()
    num_tokens: int = len(digests) * (args.prompt_len + args.output_len)
    return num_tokens / (time.perf_counter() - begin)


def measure(args: argparse.Namespace) -> dict[str, Any]:
    config: dict[str, Any] = {
        "model": model_of(args),
        "quantization": args.quantization,
        "enable_prefix_caching": False,
    }
    config |= {"max_num_seqs": args.streams, "max_model_len": args.prompt_len + args.output_len + 16}
    with ExitStack() as stack, tempfile.TemporaryDirectory() as folder:
        base = stack.enter_context(closing(build_engine(EngineConfig(**config))))
        adapted = EngineConfig(enable_lora=True, max_loras=args.adapters, max_lora_rank=args.rank, **config)
        core = stack.enter_context(closing(build_engine(adapted)))
        paths = [write_adapter(Path(folder) / str(i), core, args.rank, i) for i in range(args.adapters)]
        digests: list[str] = []
        for path in paths:
            reply = core.change_adapters(LoadAdapter(str(path)))
            if reply.adapter is None:
                raise SystemExit(f"refused: {reply.refused}")
            digests.append(reply.adapter.digest)
        work = {"base": (base, [""]), "none": (core, [""]), "one": (core, digests[:1]), "many": (core, digests)}
        speeds: dict[str, list[float]] = {name: [] for name in SIDES}
        for number in range(-1, args.rounds):
            for name in SIDES[:: 1 if number % 2 else -1]:
                engine, chosen = work[name]
                speed = run(engine, [chosen[i % len(chosen)] for i in range(args.streams)], args, number + 1)
                if number >= 0:
                    speeds[name].append(speed)
        rows = {name: float(statistics.median(each)) for name, each in speeds.items()}
        ratios = {name: np.divide(speeds[name], speeds["base"]).round(3).tolist() for name in SIDES[1:]}
        return {
            "model": args.model, "quantization": args.quantization, "streams": args.streams, "rank": args.rank,
            "adapters": args.adapters, "prompt_len": args.prompt_len, "output_len": args.output_len,
            "tokens_per_second": {name: round(each, 1) for name, each in rows.items()},
            "ratio": {name: round(each / rows["base"], 3) for name, each in rows.items()},
            "ratios": ratios,
        }  # fmt: skip


def arguments(words: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", default="builtin", help=f"builtin, a folder, or {', '.join(SHAPES)}")
    parser.add_argument("--folder", type=Path, default=Path("build/compare"))
    parser.add_argument("--quantization")
    for name, number in (("adapters", 8), ("rank", 16), ("streams", 32), ("prompt-len", 128), ("output-len", 128)):
        parser.add_argument(f"--{name}", type=int, default=number)
    parser.add_argument("--rounds", type=int, default=5)
    return parser.parse_args(words)


if __name__ == "__main__":
    json.dump(measure(arguments()), sys.stdout, indent=1)
    print()
