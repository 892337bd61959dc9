"""`python -m bench.mixtures SHAPE --llama-bench PATH`: mixtures of experts of real shape, here and in llama.cpp.

Writes one GGUF file of the shape with random codes (`bench.mixture_files`), and both engines run it. They take turns,
each run in a process of its own, and the medians are printed: decoding one sequence, a prompt of 512 tokens, eight
sequences at once (headrace alone), the seconds from the start of the process to the first token, and the share of the
memory's bandwidth that decoding uses. Speed does not depend on the values of the weights.

`--folder` needs room for the file, and for the packed one beside it. Without `--llama-bench` (a program of llama.cpp's)
headrace runs alone.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np

from bench.mixture_files import SHAPES, active_bytes, tensors_of, write
from bench.tied import tied

PROMPT, NEW = 512, 48

# -- one run of each engine, in a process of its own


def run_headrace(path: str, threads: int, cache: int) -> None:
    """Print the figures of one process as JSON. cache: bytes of the KV cache."""
    begin = time.perf_counter()
    import headrace

    llm = headrace.LLM(
        path, skip_tokenizer_init=True, save_packed=True, num_threads=threads, max_model_len=8192, max_num_seqs=8,
        enable_prefix_caching=False, kv_cache_memory_bytes=cache,
    )  # fmt: skip
    rng = np.random.default_rng(1)

    def seconds(num_seqs: int, prompt: int, new: int) -> float:
        params = headrace.SamplingParams(temperature=0.0, max_tokens=new, ignore_eos=True)
        prompts: Any = [{"prompt_token_ids": rng.integers(0, 1000, prompt).tolist()} for _ in range(num_seqs)]
        start = time.perf_counter()
        llm.generate(prompts, params, use_tqdm=False)
        return time.perf_counter() - start

    seconds(1, 4, 1)
    first = time.perf_counter() - begin
    seconds(1, 4, 16)
    # The same prompt with one answer token more or less: what is left is decoding alone.
    decode = (NEW - 1) / (seconds(1, 4, NEW) - seconds(1, 4, 1))
    prefill = PROMPT / seconds(1, PROMPT, 1)
    eight = 8 * (NEW - 1) / (seconds(8, 4, NEW) - seconds(8, 4, 1))
    print(json.dumps({"decode": decode, "prefill": prefill, "eight": eight, "start_s": first}))


def run_llama(program: str, path: str, threads: int) -> dict[str, float]:
    arguments = ["-m", path, "-t", str(threads), "-p", str(PROMPT), "-n", str(NEW), "-r", "1", "-o", "json"]
    rows = json.loads(subprocess.run(tied([program, *arguments]), check=True, capture_output=True, text=True).stdout)
    return {"decode" if row["n_gen"] else "prefill": row["avg_ts"] for row in rows}


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.mixtures", description=__doc__)
    parser.add_argument("shape", choices=SHAPES)
    parser.add_argument("--folder", type=Path, default=Path("build/mixtures"))
    parser.add_argument("--llama-bench", default="", help="llama.cpp's program of that name")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--bandwidth", type=float, default=0.0, help="GB/s of this machine, for the share of the limit")
    parser.add_argument("--run", action="store_true", help=argparse.SUPPRESS)
    chosen = parser.parse_args()
    shape, path = SHAPES[chosen.shape], chosen.folder / f"{chosen.shape}.gguf"
    if chosen.run:
        # Eight sequences hold 16 states at once, of 63 MiB each in Qwen3.6-35B-A3B.
        run_headrace(str(path), chosen.threads, 3 * 2**30 if shape.states else 2**31)
        return
    if not path.exists():
        chosen.folder.mkdir(parents=True, exist_ok=True)
        print(f"writing {path}, {sum(t.num_bytes for t in tensors_of(shape)) / 2**30:.1f} GiB", file=sys.stderr)
        write(shape, path)
    names = ["headrace"] + ["llama.cpp"] * bool(chosen.llama_bench)
    runs: dict[str, list[dict[str, float]]] = {name: [] for name in names}
    command = [sys.executable, "-m", "bench.mixtures", chosen.shape, "--folder", str(chosen.folder), "--run"]
    command += ["--threads", str(chosen.threads)]
    for place in range(chosen.rounds):
        for name, figures in runs.items():
            if name == "headrace":
                text = subprocess.run(tied(command), check=True, stdout=subprocess.PIPE, text=True).stdout
                figures.append(json.loads(text.splitlines()[-1]))
            else:
                figures.append(run_llama(chosen.llama_bench, str(path), chosen.threads))
            print(f"round {place + 1} of {chosen.rounds}, {name}: {figures[-1]}", file=sys.stderr)
    medians = {
        name: {key: round(statistics.median(run[key] for run in figures), 2) for key in figures[0]}
        for name, figures in runs.items()
    }
    gigabytes = active_bytes(shape) / 1e9
    result: dict[str, Any] = {"bench": "mixtures", "shape": chosen.shape, "gb_a_token": round(gigabytes, 3)}
    result |= {"gib": round(path.stat().st_size / 2**30, 2), "threads": chosen.threads, "rounds": chosen.rounds}
    if chosen.bandwidth:
        shares = {name: round(figures["decode"] * gigabytes / chosen.bandwidth, 3) for name, figures in medians.items()}
        result |= {"bandwidth_gb_s": chosen.bandwidth, "share_of_bandwidth": shares}
    print(json.dumps(result | {"tok_s": medians}))


if __name__ == "__main__":
    main()
