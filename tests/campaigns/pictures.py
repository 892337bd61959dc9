"""C-3 with pictures: requests about none to three pictures, and adapters, in engines of every pair of settings, against
each answer made alone. The model is a tiny random one with a tower; some pictures are shared, some are as large as
others."""

from __future__ import annotations

import itertools
import tempfile
import time
from pathlib import Path
from random import Random
from typing import Any

import msgspec
import torch
from tests.campaigns.differential import ENGINE, covering, differ
from tests.support import picture_model
from tests.support.adapters import write_adapter
from tests.support.law import Bits, groups_of, make_core, run
from tests.support.picture_model import noisy
from tests.support.pictures import Ours

from headrace.checkpoint.adapters import read as read_adapter
from headrace.protocol.params import SamplingParams
from headrace.protocol.step import Request

AXES = ENGINE | {"speculation": [None, "ngram", "suffix"], "max_num_batched_tokens": [2048, 48, 23]}
REQUESTS: dict[str, list[Any]] = {
    "temperature": [0.0, 0.9],
    "pictures": [(), (1,), (2,), (1, 2), (2, 1), (1, 3), (4, 1, 2)],
    "adapter": [False, True],
    "penalised": [False, True],
    "logprobs": [None, 2],
    "n": [1, 2],
}
SIZES = {1: (96, 60), 2: (96, 60), 3: (60, 96), 4: (50, 50)}
TEXTS = (
    "Look at {}. What is it?",
    "{} Which of them is larger, and why? Think of it for a while.",
    "Once upon a time {}",
)


def make_requests(num: int, ours: Ours, adapter: str, rng: Random) -> list[Request]:
    """About `num` requests over a covering array of the request axes."""
    rows = covering(REQUESTS, rng)
    result: list[Request] = []
    for i in itertools.count():
        if len(result) >= num:
            return result
        row = rows[i % len(rows)]
        text = rng.choice(TEXTS).format(" and ".join(["<image>"] * len(row["pictures"])))
        prompt = ours.read(text, [noisy(seed, *SIZES[seed]) for seed in row["pictures"]])
        params = SamplingParams(
            temperature=row["temperature"], logprobs=row["logprobs"], max_tokens=12, ignore_eos=True, seed=0,
            repetition_penalty=1.2 if row["penalised"] else 1.0,
        )  # fmt: skip
        for answer in range(row["n"]):
            request = Request(
                request_id=f"{i}.{answer}",
                prompt_token_ids=prompt.token_ids,
                params=msgspec.structs.replace(params, seed=rng.randrange(2**60)),
                group=f"g{i}" if row["n"] > 1 else "",
                adapter=adapter if row["adapter"] else "",
                pictures=prompt.pictures,
            )
            result.append(request)
    raise AssertionError


def run_campaign(num_generations: int, seed: int, per_case: int = 40) -> dict[str, Any]:
    """Cases until at least `num_generations` answers were compared."""
    begin, rng, torch_seed = time.monotonic(), Random(seed), seed
    counts = dict.fromkeys(("generations", "cases", "with_pictures", "preemptions", "cached_prompt_tokens"), 0)
    wrong: list[str] = []
    with tempfile.TemporaryDirectory(prefix="headrace-pictures-") as root:
        folder = Path(root)
        model, _ = picture_model.write(folder / "model")
        weights = {
            name.replace("model.text_model.", "model."): torch.empty(tensor.shape)
            for name, tensor in model.state_dict().items()
            if "text_model" in name and name.endswith("_proj.weight")
        }
        path = write_adapter(folder / "adapter", weights, seed=torch_seed, spread=0.2)
        options = {"model": str(folder / "model"), "enable_lora": True, "lora_modules": [f"a={path}"]}
        ours = Ours(folder / "model")
        while counts["generations"] < num_generations:
            requests = make_requests(per_case, ours, read_adapter(path).digest, rng)
            references: dict[str, dict[str, Bits]] = {}
            for row in covering(AXES, rng):
                dtype = row["kv_cache_dtype"]
                if dtype not in references:
                    core = make_core(**options, kv_cache_dtype=dtype, enable_prefix_caching=False)
                    references[dtype] = {}
                    for request in requests:
                        references[dtype] |= run(core, [request])
                    core.close()
                settings = {k: v for k, v in row.items() if k not in ("speculation", "preempt_every", "company")}
                if row["speculation"] is not None:
                    settings["speculative_config"] = {"method": row["speculation"], "adaptive": False}
                core = make_core(**options | settings, max_num_seqs=16)
                for _ in ("cold", "warm"):
                    result: dict[str, Bits] = {}
                    for group in groups_of(requests, row["company"]):
                        result |= run(core, group, preempt_every=row["preempt_every"])
                    wrong += [f"{name} of {row}" for name in differ(result, references[dtype])]
                    counts["generations"] += len(result)
                    counts["with_pictures"] += sum(bool(request.pictures) for request in requests)
                counts["cases"] += 1
                counts["preemptions"] += core.stats().num_preemptions
                counts["cached_prompt_tokens"] += core.stats().prefix_cache_hits
                core.close()
                if counts["generations"] >= num_generations:
                    break
        ours.close()
    minutes = round((time.monotonic() - begin) / 60, 2)
    return {"seed": seed, **counts, "differing": len(wrong), "examples": wrong[:5], "minutes": minutes}
