"""C-3, differential correctness: what changes no bit, in pairwise combinations, against each answer made alone.

A case is an engine (a covering array over `ENGINE`: every two values of two axes meet) that is given the same requests
twice, cold and warm. The reference of a request is made alone, on a cold cache, without any of it. Token ids and
log-probability bits must be equal. What varies by request (temperature, grammar, stop, n, penalties, adapter) is in
`REQUESTS`.
A reference without an adapter is made by an engine that takes none.
"""

from __future__ import annotations

import atexit
import functools
import itertools
import shutil
import tempfile
import time
from pathlib import Path
from random import Random
from typing import Any

import msgspec
import torch
from tests.support.adapters import write_adapter
from tests.support.law import PROMPTS, Bits, groups_of, make_core, run

from headrace import builtin, hub
from headrace.checkpoint.adapters import read as read_adapter
from headrace.protocol.constraints import StructuredOutputs
from headrace.protocol.params import SamplingParams
from headrace.protocol.step import Request
from headrace.text.tokenizer import Tokenizer

ENGINE: dict[str, list[Any]] = {
    "kv_cache_dtype": ["float32", "int8", "int8_dot", "int4", "fp8"],
    "speculation": [None, "ngram", "suffix", "lookahead", "draft_model", "early_exit", "medusa", "eagle", "mtp"],
    "enable_prefix_caching": [True, False],
    "max_num_batched_tokens": [2048, 48, 19],
    "preempt_every": [0, 25, 60],
    "company": [1, 4, 16],
    "num_threads": [1, 2],
    "block_size": [16, 8],
}
"""Axes of the engine. A step of 19 tokens gets further in 25 of them than one preemption takes back."""

REQUESTS: dict[str, list[Any]] = {
    "temperature": [0.0, 0.7, 1.2],
    "logprobs": [None, 2],
    "n": [1, 3],
    "stop": [False, True],
    "constraint": [None, StructuredOutputs(regex=r"[A-Za-z ,.']{4,60}"), StructuredOutputs(json='{"type": "object"}')],
    "penalised": [False, True],
    "filters": [{}, {"top_k": 20}, {"top_p": 0.9}, {"min_p": 0.05}],
    "adapter": [None, "a", "b"],
}

MAX_TOKENS = 16


def covering(axes: dict[str, list[Any]], rng: Random) -> list[dict[str, Any]]:
    """Rows such that every two values of two axes meet in one: greedy, some random candidates for each row."""
    names = list(axes)
    open_pairs = {
        (a, i, b, j)
        for a, b in itertools.combinations(names, 2)
        for i in range(len(axes[a]))
        for j in range(len(axes[b]))
    }
    rows = []
    while open_pairs:
        best: tuple[int, dict[str, int]] = (-1, {})
        seed = rng.choice(sorted(open_pairs))
        for _ in range(40):
            row = {name: rng.randrange(len(values)) for name, values in axes.items()}
            row[seed[0]], row[seed[2]] = seed[1], seed[3]
            best = max(best, (len(_met(row, names) & open_pairs), row), key=lambda each: each[0])
        open_pairs -= _met(best[1], names)
        rows.append({name: axes[name][value] for name, value in best[1].items()})
    return rows


def _met(row: dict[str, int], names: list[str]) -> set[tuple[str, int, str, int]]:
    return {(a, row[a], b, row[b]) for a, b in itertools.combinations(names, 2)}


@functools.cache
def adapters() -> dict[str, tuple[str, str]]:
    """The folder and the digest of each adapter of `REQUESTS`."""
    folder = Path(tempfile.mkdtemp(prefix="headrace-adapters-"))
    atexit.register(shutil.rmtree, folder)
    tensors = builtin.read(builtin.directory() / "model.safetensors")[0]
    weights = {name: torch.empty(entry["shape"]) for name, entry in tensors.items() if name.endswith("_proj.weight")}
    written = {
        "a": write_adapter(folder / "a", weights, seed=1, spread=0.05),
        "b": write_adapter(folder / "b", weights, seed=2, spread=0.05, rank=7, alpha=5, dtype=torch.bfloat16),
    }
    return {name: (str(path), read_adapter(path).digest) for name, path in written.items()}


def make_requests(num: int, rng: Random) -> list[Request]:
    """About `num` requests over a covering array of the request axes, prompts rotating."""
    tokenizer = Tokenizer.load(hub.resolve("builtin"))
    rows = covering(REQUESTS, rng)
    result: list[Request] = []
    for i in itertools.count():
        if len(result) >= num:
            return result
        row = rows[i % len(rows)]
        greedy = row["temperature"] == 0.0
        params = SamplingParams(
            temperature=row["temperature"],
            logprobs=row["logprobs"],
            max_tokens=MAX_TOKENS,
            ignore_eos=not row["stop"],
            stop_token_ids=[14, 16] if row["stop"] else None,
            structured_outputs=row["constraint"],
            repetition_penalty=1.2 if row["penalised"] else 1.0,
            presence_penalty=0.3 if row["penalised"] else 0.0,
            seed=0,
            **({} if greedy else row["filters"]),
        )
        prompt = tokenizer.encode(rng.choice(PROMPTS))
        group = f"g{i}" if row["n"] > 1 else ""
        adapter = "" if row["adapter"] is None else adapters()[row["adapter"]][1]
        for answer in range(row["n"]):
            seeded = msgspec.structs.replace(params, seed=rng.randrange(2**60))
            name = f"{i}.{answer}"
            result.append(
                Request(request_id=name, prompt_token_ids=prompt, params=seeded, group=group, adapter=adapter)
            )
    raise AssertionError


def options_of(row: dict[str, Any]) -> dict[str, Any]:
    options = {k: v for k, v in row.items() if k not in ("speculation", "preempt_every", "company")}
    if row["speculation"] is not None:
        options["speculative_config"] = {"method": row["speculation"], "adaptive": False}
    return options | {"max_num_seqs": 16}


def with_adapters() -> dict[str, Any]:
    return {"enable_lora": True, "lora_modules": [f"{name}={path}" for name, (path, _) in adapters().items()]}


def differ(result: dict[str, Bits], reference: dict[str, Bits]) -> list[str]:
    return sorted(name for name in result if result[name] != reference[name])


def run_campaign(num_generations: int, seed: int, per_case: int = 48) -> dict[str, Any]:
    """Cases until at least `num_generations` answers were compared. Every pair of values meets in the first round."""
    begin = time.monotonic()
    rng = Random(seed)
    cases: list[dict[str, Any]] = []
    num = num_rounds = 0
    drafted = num_accepted_tokens = preempted = hits = num_adapted = 0
    wrong: list[str] = []
    num_pairs = sum(len(a) * len(b) for a, b in itertools.combinations(ENGINE.values(), 2))
    # The reference is made alone: an engine for each way in which the cache's numbers differ.
    while num < num_generations or not num_rounds:
        num_rounds += 1
        requests = make_requests(per_case, rng)
        references: dict[str, dict[str, Bits]] = {}
        for row in covering(ENGINE, rng):
            dtype = row["kv_cache_dtype"]
            if dtype not in references:
                references[dtype] = {}
                for of_adapters in (False, True):
                    options = with_adapters() if of_adapters else {}
                    core = make_core(model="builtin", kv_cache_dtype=dtype, enable_prefix_caching=False, **options)
                    for request in requests:
                        if bool(request.adapter) == of_adapters:
                            references[dtype] |= run(core, [request])
                    core.close()
                num_adapted += sum(bool(request.adapter) for request in requests)
            core = make_core(model="builtin", **options_of(row), **with_adapters())
            for _ in ("cold", "warm"):
                result: dict[str, Bits] = {}
                for group in groups_of(requests, row["company"]):
                    result |= run(core, group, preempt_every=row["preempt_every"])
                num += len(result)
                wrong += [f"{name} of {row}" for name in differ(result, references[dtype])]
            stats = core.stats()
            drafted += stats.num_draft_tokens
            num_accepted_tokens += stats.num_accepted_tokens
            preempted += stats.num_preemptions
            hits += stats.prefix_cache_hits
            core.close()
            cases.append(row)
            if num >= num_generations and num_rounds > 1:
                break
    return {
        "campaign": "C-3",
        "seed": seed,
        "generations": num,
        "cases": len(cases),
        "rounds": num_rounds,
        "pairs_covered": num_pairs,
        "guesses": drafted,
        "guesses_kept": num_accepted_tokens,
        "preemptions": preempted,
        "cached_prompt_tokens": hits,
        "references_with_an_adapter": num_adapted,
        "differing": len(wrong),
        "examples": wrong[:5],
        "minutes": round((time.monotonic() - begin) / 60, 2),
    }
