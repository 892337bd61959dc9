"""The campaign of ranks (C-10): ranks of one model are killed and stopped in mid-answer, and the group is rebuilt.

`python -m tests.campaigns.ranks --kills 50 --stops 20 --seed 1 --out bench/results/ranks-faults.json` runs the streams
of C-5 against `headrace serve --tensor-parallel-size 2`, and strikes the other rank or the first; with `--kind
pipeline` against `--pipeline-parallel-size 2`. Every stream must end with the bits of the undisturbed run; a death must
be noticed within `NOTICED_S`, silence within the timeout and `SILENCE_S` more. It prints its counts as JSON; the exit
status is 1 if anything was wrong.
"""

from __future__ import annotations

import argparse
import itertools
import random
import sys
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

import msgspec
from tests.campaigns import faults
from tests.e2e.test_law_speculation import varied
from tests.support import law
from tests.support.law import make_core, make_requests
from tests.support.shallow import shallow

from headrace import models

FORMS: dict[str, dict[str, Any]] = {
    "bfloat16": {},
    "float32": {"dtype": "float32"},
    "int8": {"quantization": "int8"},
    "int4": {"quantization": "int4"},
    "int4, floats": {"quantization": "int4-g128-asym", "activations": "16bit", "kv_cache_dtype": "float16"},
    "nf4": {"quantization": "nf4"},
    "int8, cache of int8": {"quantization": "int8", "kv_cache_dtype": "int8"},
    "cache of int4": {"kv_cache_dtype": "int4"},
}
NOTICED_S = 1.0
SILENCE_S = 5.0
LONGEST_S = 30.0
"""After its notice, a group is rebuilt and ready within this."""


def run(
    num_kills: int,
    num_stops: int,
    seed: int,
    ranks: int = 2,
    timeout: float = 10.0,
    num_streams: int = 32,
    max_tokens: int = 96,
    per_round: int = 1,
    arguments: tuple[str, ...] = (),
    kind: str = "tensor",
) -> dict[str, Any]:
    """The whole campaign, with ranks of a `kind`. Three of four strikes are at another rank than the first. Returns its
    report, in which "problems" do not depend on the machine's speed, and "late" are those that do."""
    kinds = ("rank-kill",) * (num_kills - num_kills // 4) + ("kill",) * (num_kills // 4)
    kinds += ("rank-stop",) * (num_stops - num_stops // 4) + ("stop",) * (num_stops // 4)
    options = (f"--{kind}-parallel-size", str(ranks), "--distributed-timeout", str(timeout), *arguments)
    # Later than the ranks' own timeout, so that it is theirs which ends a group; but for a first rank that is stopped.
    report = faults.run(len(kinds), seed, num_streams, kinds, timeout + SILENCE_S, max_tokens, per_round, options)
    report["campaign"] = "C-10 faults of ranks"
    report["late"] = late(report["noticed_s"], timeout)
    most = report.get("recovery_s", {}).get("most", 0.0)
    if most > timeout + SILENCE_S + LONGEST_S:
        report["late"].append(f"a group took {most} s to come back")
    return report | {"ranks": ranks, "kind": kind, "distributed_timeout_s": timeout}


def run_faults(size: tuple[int, int], seed: int, kind: str = "tensor") -> dict[str, Any]:
    """For `tests.campaigns`: kills and stops."""
    report = run(*size, seed, per_round=2, kind=kind)
    counts, problems = report["counts"], report["problems"] + report["late"]
    result = {"faults": counts.get("faults", 0), "streams_compared": counts.get("streams", 0), "by_kind": counts}
    known = {name: report[name] for name in ("streams_at_once", "restarts", "recovery_s", "noticed_s")}
    return result | known | {"violations": len(problems), "examples": problems[:5]}


def run_stage_faults(size: tuple[int, int], seed: int) -> dict[str, Any]:
    """The same, of ranks that have layers."""
    return run_faults(size, seed, "pipeline")


def compare(num: int, seed: int) -> dict[str, Any]:
    """For `tests.campaigns`: at least `num` generations by several ranks, beside those of one process. Each form of
    weights and cache has its turn, with each number of ranks, and with requests of every kind; chunks, the size of the
    cache, speculation and preemption are drawn."""
    noise, counts, wrong = random.Random(seed), Counter[str](), list[str]()
    everything = [msgspec.structs.replace(r, params=varied(r.params, i)) for i, r in enumerate(make_requests())]
    kinds = [("tensor", ranks) for ranks in (2, 3, 4, 8)] + [("pipeline", ranks) for ranks in (2, 3)]
    cases = itertools.cycle([(name, *each) for each in kinds for name in FORMS])
    while counts["generations"] < num:
        name, kind, ranks = next(cases)
        form = {"model": shallow(2 if kind == "tensor" else 4)} | FORMS[name]
        requests = noise.sample(everything, 27)
        alone = make_core(**form, enable_prefix_caching=False)
        expected = law.run(alone, requests)
        alone.close()
        ways: dict[str, Any] = {"max_num_batched_tokens": noise.choice([17, 64, 2048])}
        if noise.random() < 0.5:
            ways |= {"num_gpu_blocks_override": 70, "max_model_len": 512, "block_size": 8}
        if noise.random() < 0.5:
            ways["speculative_config"] = {"method": "ngram", "num_speculative_tokens": 4, "adaptive": False}
        core = make_core(**form, **ways, **{f"{kind}_parallel_size": ranks})
        actual = law.run(core, requests, preempt_every=noise.choice([0, 7]))
        core.close()
        counts["generations"] += len(actual)
        counts[f"{kind} ranks: {ranks}"] += len(actual)
        counts[f"form: {name}"] += len(actual)
        wrong += [f"{name}, {ranks} {kind} ranks, {ways}: {key}" for key in actual if actual[key] != expected[key]]
        print(f"{counts['generations']} generations, {len(wrong)} differ", file=sys.stderr, flush=True)
    return report_of(counts, wrong)


def report_of(counts: Counter[str], wrong: list[str]) -> dict[str, Any]:
    total = counts.pop("generations")
    kinds = dict(sorted(counts.items()))
    return {"generations": total, "by_kind": kinds, "violations": len(wrong), "examples": wrong[:5]}


def compare_experts(num: int, seed: int) -> dict[str, Any]:
    """For `tests.campaigns`: at least `num` generations by ranks with whole experts, beside those of one process, over
    random mixtures of every type, forms of weights, and numbers of ranks that both may have."""
    from tests.parallel.test_experts import has_experts
    from tests.support.harness import RandomModels
    from tests.support.ranks import case_of

    noise, counts, wrong = random.Random(seed), Counter[str](), list[str]()
    names = [name for name in models.names() if has_experts(name)]
    forms = [name for name in FORMS if name != "int4, floats"] + ["int4-g32, floats"]
    with tempfile.TemporaryDirectory() as folder:
        directories = RandomModels(Path(folder))
        while counts["generations"] < num:
            name, ranks, form = noise.choice(names), noise.choice([2, 3]), noise.choice(forms)
            tiny = models.find(name).TINY
            ranks = min(ranks, tiny.get("text_config", tiny)["num_attention_heads"])
            config, requests = case_of(name, directories[name])
            config |= FORMS.get(form, {"quantization": "int4-g32", "activations": "16bit"})
            alone = make_core(**config, enable_prefix_caching=False)
            expected = law.run(alone, requests)
            alone.close()
            ways: dict[str, Any] = {"max_num_batched_tokens": noise.choice([17, 64, 2048])}
            core = make_core(**config, **ways, tensor_parallel_size=ranks, enable_expert_parallel=True)
            actual = law.run(core, requests, preempt_every=noise.choice([0, 5]))
            core.close()
            counts["generations"] += len(actual)
            for kind in (f"ranks: {ranks}", f"form: {form}", f"type: {name}"):
                counts[kind] += len(actual)
            wrong += [f"{name}, {form}, {ranks} ranks, {ways}: {key}" for key in actual if actual[key] != expected[key]]
            print(f"{counts['generations']} generations, {len(wrong)} differ", file=sys.stderr, flush=True)
    return report_of(counts, wrong)


def late(noticed: dict[str, float], timeout: float) -> list[str]:
    """What was noticed too late, of the longest seconds of each kind."""
    most = {kind: NOTICED_S if kind.endswith("kill") else timeout + SILENCE_S for kind in noticed}
    return [
        f"{kind}: noticed after {noticed[kind]} s, at most {most[kind]}"
        for kind in noticed
        if noticed[kind] > most[kind]
    ]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=50)
    parser.add_argument("--stops", type=int, default=20)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--kind", choices=["tensor", "pipeline"], default="tensor")
    parser.add_argument("--timeout", type=float, default=10.0)
    parser.add_argument("--streams", type=int, default=32)
    parser.add_argument("--max-tokens", type=int, default=96)
    parser.add_argument("--per-round", type=int, default=1, help="faults while the same streams run")
    parser.add_argument("--out", type=Path)
    parser.add_argument("arguments", nargs="*", help="further arguments of headrace serve, after --")
    options = parser.parse_args()
    report = run(
        options.kills, options.stops, options.seed, options.ranks, options.timeout, options.streams, options.max_tokens,
        options.per_round, tuple(options.arguments), options.kind,
    )  # fmt: skip
    report["problems"] += report["late"]
    return faults.concluded(report, options.out)


if __name__ == "__main__":
    sys.exit(main())
