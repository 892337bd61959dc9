"""The rungs of `headrace bench ablate`: the requests that every rung gets, and the engine that each rung runs on.

A rung differs from the one before by one technique; a rung of the second list is the whole without one. Knows configs
and lengths; must not know engines. Called by `bench.ablate`.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any, NamedTuple

import msgspec

from headrace.cli.bench.data import Sample
from headrace.cli.bench.plans import AblatePlan
from headrace.protocol.config import EngineConfig
from headrace.protocol.speculation import SpeculativeConfig

ONE, STATIC, CONTINUOUS = "one at a time", "static", "continuous"
MOST_TIMES_MEAN = 3
"""The longest prompt and answer, of the mean."""
QUICK = {"num_prompts": 32, "streams": 16, "input_len": 32, "output_len": 32, "prefix_len": 32, "cache_seqs": 4,
         "chunk": 64, "sample": 1, "rounds": 3}  # fmt: skip
BLOCK_SIZE = 16
CONTROL = "nothing (control)"
"""The whole once more: its factor is the noise."""


class Rung(NamedTuple):
    """A technique, and the engine that has it.

    Attributes:
        name: of the technique, added or left out.
        config: of the engine.
        batching: ONE, STATIC (as many as fit, padded to the longest, the next when all are done) or CONTINUOUS.
        has_kv_cache: without, the grown prompt is computed again for each token.
        is_taped: without, each operator is a separate native call (on a GPU, each kernel a launch).
        is_naive: the faster of torch_ref and transformers runs it.
    """

    name: str
    config: EngineConfig
    batching: str = CONTINUOUS
    has_kv_cache: bool = True
    is_taped: bool = True
    is_naive: bool = False


def sized(plan: AblatePlan) -> AblatePlan:
    """Return the plan with the sizes of `--quick` in place of the defaults, if it is quick."""
    if not plan.quick:
        return plan
    defaults = AblatePlan()
    return msgspec.structs.replace(
        plan, **{name: size for name, size in QUICK.items() if getattr(plan, name) == getattr(defaults, name)}
    )


def longest(plan: AblatePlan) -> int:
    """Return the most tokens that a request may have."""
    return plan.prefix_len + MOST_TIMES_MEAN * (plan.input_len + plan.output_len)


def context_of(plan: AblatePlan) -> int:
    """Return the context of all engines: the power of two that the longest request fits."""
    return max(BLOCK_SIZE, 1 << (longest(plan) - 1).bit_length())


def requests(plan: AblatePlan, vocab_size: int) -> list[Sample]:
    """Return prompts of random token ids behind one shared prefix, with lengths as spread as in real traffic: a
    log-normal distribution, cut at `MOST_TIMES_MEAN` times its mean."""
    noise = random.Random(plan.seed)

    def length(mean: int, least: int) -> int:
        return max(least, min(MOST_TIMES_MEAN * mean, round(mean * noise.lognormvariate(-0.18, 0.6))))

    prefix = noise.choices(range(vocab_size), k=plan.prefix_len)
    samples = []
    for _ in range(plan.num_prompts):
        prompt = prefix + noise.choices(range(vocab_size), k=length(plan.input_len, 1))
        samples.append(Sample(prompt, len(prompt), length(plan.output_len, 2)))
    return samples


def padded(batch: Sequence[Sample]) -> list[Sample]:
    """Return the prompts (token ids) of a static batch, padded on the left to the longest. The pads are computed like
    any token."""
    most = max(len(sample.prompt) for sample in batch)
    return [
        sample._replace(prompt=[0] * (most - len(sample.prompt)) + [*sample.prompt], num_prompt_tokens=most)
        for sample in batch
    ]


def ladder(plan: AblatePlan, config: EngineConfig, backend: str, cache_bytes: int) -> list[Rung]:
    """Return the rungs from the naive loop to the whole.

    Args:
        plan: the sizes.
        config: model, threads and speculation, which are the user's.
        backend: the backend of the rungs after the first two, cpu or cuda.
        cache_bytes: the KV cache's memory, the same in every batched rung: `plan.cache_seqs` contexts.
    """
    context = context_of(plan)
    alone = change(
        config,
        skip_tokenizer_init=True,
        max_model_len=context,
        max_num_seqs=1,
        max_num_batched_tokens=max(2048, context),
        block_size=BLOCK_SIZE,
        num_gpu_blocks_override=-(-context // BLOCK_SIZE),
        enable_prefix_caching=False,
        enable_chunked_prefill=False,
        speculative_config=None,
    )
    reference = change(alone, backend="torch_ref", dtype="float32")
    rungs = [
        Rung("naive", reference, ONE, has_kv_cache=False, is_naive=True),
        Rung("KV cache", reference, ONE, is_naive=True),
    ]
    native = change(alone, backend=backend, dtype="float32")
    if backend == "cuda":
        rungs += [Rung("Triton kernels", native, ONE, is_taped=False), Rung("CUDA graphs", native, ONE)]
    else:
        rungs.append(Rung("native kernels and tape", native, ONE))
    # From here on tensors that are not quantised are in the checkpoint's own dtype.
    stored = change(alone, backend=backend)
    rungs += [Rung(form, change(stored, quantization=form), ONE) for form in ("int8", "int4")]
    whole = change(
        stored, quantization="int4", max_num_seqs=plan.cache_seqs, block_size=context,
        num_gpu_blocks_override=plan.cache_seqs,
    )  # fmt: skip
    rungs.append(Rung("static batches", whole, STATIC))
    rungs.append(Rung("continuous, contiguous", whole))
    for name, changes in (
        ("paged", {"max_num_seqs": plan.streams, "block_size": BLOCK_SIZE, "num_gpu_blocks_override": None,
                   "kv_cache_memory_bytes": cache_bytes}),
        ("chunked prefill", {"enable_chunked_prefill": True, "max_num_batched_tokens": plan.chunk}),
        ("prefix cache", {"enable_prefix_caching": True}),
        ("KV int8", {"kv_cache_dtype": "int8"}),
        ("speculation", {"speculative_config": speculation(config)}),
    ):  # fmt: skip
        whole = change(whole, **changes)
        rungs.append(Rung(name, whole))
    return rungs


def left_out(plan: AblatePlan, whole: Rung) -> list[Rung]:
    """Return the whole without each technique alone."""
    config = whole.config
    # Bytes, not blocks, are fixed: contexts in int8 are smaller, and more of them fit.
    contiguous = change(config, block_size=context_of(plan))
    unchunked = max(2048, context_of(plan))
    return [
        whole._replace(name=CONTROL),
        whole._replace(name="KV cache", has_kv_cache=False, config=change(config, enable_prefix_caching=False)),
        whole._replace(name="CUDA graphs" if config.backend == "cuda" else "tape", is_taped=False),
        whole._replace(name="int4 (int8 instead)", config=change(config, quantization="int8")),
        whole._replace(name="int4 and int8", config=change(config, quantization=None)),
        whole._replace(name="continuous batching", batching=STATIC),
        whole._replace(name="pages", config=contiguous),
        whole._replace(
            name="chunked prefill",
            config=change(config, enable_chunked_prefill=False, max_num_batched_tokens=unchunked),
        ),
        whole._replace(name="prefix cache", config=change(config, enable_prefix_caching=False)),
        whole._replace(name="KV int8", config=change(config, kv_cache_dtype="auto")),
        whole._replace(name="speculation", config=change(config, speculative_config=None)),
    ]


def speculation(config: EngineConfig) -> SpeculativeConfig:
    """Return the user's speculation, or the built-in model's own drafter, or for other models n-grams."""
    method = "eagle" if config.model == "builtin" else "ngram"
    return config.speculative_config or SpeculativeConfig(method=method)


def change(config: EngineConfig, **fields: Any) -> EngineConfig:
    return msgspec.structs.replace(config, **fields)
