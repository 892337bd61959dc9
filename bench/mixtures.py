"""`python -m bench.mixtures SHAPE --llama-bench PATH`: mixtures of experts of real shape, here and in llama.cpp.

Writes one GGUF file of the shape with random codes, tensor by tensor, so that no float of the model ever exists; both
engines run that file. They take turns, each run in a process of its own, and the medians are printed: decoding one
sequence, a prompt of 512 tokens, eight sequences at once (headrace alone), the seconds from the start of the process
to the first token, and the share of the memory's bandwidth that decoding uses. Speed does not depend on the values of
the weights.

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
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from headrace.quantize import gguf_file
from headrace.quantize.gguf_file import U8, Tensor, Value

PIECE = 2**24
PROMPT, NEW = 512, 48


class Shape(NamedTuple):
    """active: of the experts of a layer, those that a token goes through."""

    architecture: str
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    inner: int
    experts: int
    active: int
    vocab: int
    theta: float
    kind: str
    """The GGUF type of the experts."""
    dense_kind: str
    """That of attention; table and head are Q8_0."""
    window: int = 0


SHAPES = {
    "qwen3-30b-a3b": Shape("qwen3moe", 48, 2048, 32, 4, 128, 768, 128, 8, 151936, 1e6, "Q4_0", "Q4_0"),
    "gpt-oss-20b": Shape("gpt-oss", 24, 2880, 64, 8, 64, 2880, 32, 4, 201088, 150000.0, "MXFP4", "Q8_0", 128),
    "tiny": Shape("qwen3moe", 2, 256, 4, 2, 64, 128, 8, 2, 1024, 1e6, "Q4_0", "Q4_0"),
}


def fields_of(shape: Shape) -> dict[str, Value]:
    """Return the metadata of the file, without a vocabulary."""
    values: dict[str, Value] = {
        "context_length": 40960,
        "embedding_length": shape.hidden,
        "block_count": shape.layers,
        "feed_forward_length": shape.inner,
        "attention.head_count": shape.heads,
        "attention.head_count_kv": shape.kv_heads,
        "attention.key_length": shape.head_dim,
        "attention.value_length": shape.head_dim,
        "attention.layer_norm_rms_epsilon": 1e-6,
        "vocab_size": shape.vocab,
        "rope.dimension_count": shape.head_dim,
        "rope.freq_base": shape.theta,
        "expert_count": shape.experts,
        "expert_used_count": shape.active,
        "expert_feed_forward_length": shape.inner,
    }
    if shape.window:
        values |= {
            "attention.sliding_window": shape.window,
            "context_length": 131072,
            "rope.scaling.type": "yarn",
            "rope.scaling.factor": 32.0,
            "rope.scaling.original_context_length": 4096,
        }
    named: dict[str, Value] = {f"{shape.architecture}.{key}": value for key, value in values.items()}
    return {"general.architecture": shape.architecture, **named, "tokenizer.ggml.model": "no_vocab"}


def tensors_of(shape: Shape) -> list[Tensor]:
    """Return the tensors of the file in its order."""
    q, kv, hidden, inner = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim, shape.hidden, shape.inner
    tensors = [Tensor("token_embd.weight", "Q8_0", (shape.vocab, hidden))]
    for i in range(shape.layers):
        block = f"blk.{i}."
        dense = {"attn_q": (q, hidden), "attn_k": (kv, hidden), "attn_v": (kv, hidden), "attn_output": (hidden, q)}
        experts = {"ffn_gate_exps": (inner, hidden), "ffn_up_exps": (inner, hidden), "ffn_down_exps": (hidden, inner)}
        tensors.append(Tensor(block + "attn_norm.weight", "F32", (hidden,)))
        tensors += [Tensor(f"{block}{name}.weight", shape.dense_kind, size) for name, size in dense.items()]
        if shape.architecture == "gpt-oss":
            tensors += [Tensor(f"{block}{name}.bias", "F32", size[:1]) for name, size in dense.items()]
            tensors.append(Tensor(block + "attn_sinks.weight", "F32", (shape.heads,)))
            tensors.append(Tensor(block + "post_attention_norm.weight", "F32", (hidden,)))
        else:
            tensors += [Tensor(f"{block}attn_{x}_norm.weight", "F32", (shape.head_dim,)) for x in "qk"]
            tensors.append(Tensor(block + "ffn_norm.weight", "F32", (hidden,)))
        tensors.append(Tensor(block + "ffn_gate_inp.weight", "F32", (shape.experts, hidden)))
        if shape.architecture == "gpt-oss":
            tensors.append(Tensor(block + "ffn_gate_inp.bias", "F32", (shape.experts,)))
        for name, size in experts.items():
            tensors.append(Tensor(f"{block}{name}.weight", shape.kind, (shape.experts, *size)))
            if shape.architecture == "gpt-oss":
                tensors.append(Tensor(f"{block}{name}.bias", "F32", (shape.experts, size[0])))
    ends = [Tensor("output_norm.weight", "F32", (hidden,)), Tensor("output.weight", "Q8_0", (shape.vocab, hidden))]
    return tensors + ends


def active_bytes(shape: Shape) -> int:
    """Return the bytes of weights that one token reads; of the table it reads one row."""
    num_bytes = 0
    for tensor in tensors_of(shape):
        if "_exps" in tensor.name:
            num_bytes += tensor.num_bytes * shape.active // shape.experts
        elif not tensor.name.startswith("token_embd"):
            num_bytes += tensor.num_bytes
    return num_bytes


def write(shape: Shape, path: Path) -> None:
    """Write the file of random codes. Its scales are such that the weights are about 0.02."""
    noise = np.random.Generator(np.random.SFC64(0))
    tensors = tensors_of(shape)
    blocks: dict[str, tuple[int, Callable[[U8], None]]] = {
        "Q4_0": (18, lambda raw: _scales(raw, 0.004)),
        "Q8_0": (34, lambda raw: _scales(raw, 0.0003)),
        "MXFP4": (17, _exponents),
    }

    def data(first: int) -> Iterator[tuple[int, U8]]:
        for index, tensor in enumerate(tensors[first:], first):
            if tensor.kind == "F32":
                ones = "norm" in tensor.name
                num = tensor.num_bytes // 4
                values = np.ones(num) if ones else noise.standard_normal(num) * (0 if "bias" in tensor.name else 0.02)
                yield index, values.astype(np.float32).view(np.uint8)
                continue
            size, fill = blocks[tensor.kind]
            for start in range(0, tensor.num_bytes, PIECE // size * size):
                raw = noise.integers(0, 256, min(PIECE // size * size, tensor.num_bytes - start), np.uint8)
                fill(raw.reshape(-1, size))
                yield index, raw

    gguf_file.write(path, fields_of(shape), tensors, data, str(shape))


def _scales(raw: U8, scale: float) -> None:
    raw[:, :2] = np.frombuffer(np.float16(scale).tobytes(), np.uint8)


def _exponents(raw: U8) -> None:
    raw[:, 0] = 127 - 7


# -- one run of each engine, in a process of its own


def run_headrace(path: str, threads: int) -> None:
    """Print the figures of one process as JSON."""
    begin = time.perf_counter()
    import headrace

    llm = headrace.LLM(
        path, skip_tokenizer_init=True, save_packed=True, num_threads=threads, max_model_len=8192, max_num_seqs=8,
        enable_prefix_caching=False, kv_cache_memory_bytes=2**31,
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
    rows = json.loads(subprocess.run([program, *arguments], check=True, capture_output=True, text=True).stdout)
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
        run_headrace(str(path), chosen.threads)
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
                text = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout
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
