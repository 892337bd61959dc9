"""Random checkpoints made with `transformers`, and a way to drive a Runner over scattered blocks and any chunks."""

from __future__ import annotations

import json
import math
import random
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText
from transformers.models.mistral4.configuration_mistral4 import Mistral4Config
from transformers.models.mistral4.modeling_mistral4 import Mistral4ForCausalLM

from headrace import models
from headrace.backends.step import Chunks
from headrace.engine.library.load import build_runner
from headrace.llm import LLM
from headrace.protocol.config import EngineConfig
from headrace.protocol.params import SamplingParams
from headrace.protocol.step import ScheduledBatch, StepResult, TokenLogprob
from headrace.runner.runner import Runner
from headrace.sampling.sampler import F32, Drawn, Row

BACKENDS = ("cpu", "torch_ref")
WITH_STATES = tuple(
    "falcon_h1 granitemoehybrid lfm2 lfm2_moe nemotron_h "
    "qwen3_5 qwen3_5_moe qwen3_5_moe_text qwen3_5_text qwen3_next".split()
)
"""Types with layers whose memory is a state."""
SAME_AS = {"kimi_k2": "deepseek_v3"}
"""Types that transformers has under another name."""
DATA = Path(__file__).parents[3] / "shared" / "data"


def their_model(config: dict[str, Any], **options: Any) -> Any:
    """A model of transformers with the weights that it happens to have."""
    kind: Any = AutoModelForImageTextToText if "text_config" in config else AutoModelForCausalLM
    model_type = config["model_type"]
    theirs = AutoConfig.for_model(**(config | {"model_type": SAME_AS.get(model_type, model_type)}))
    if type(theirs) is Mistral4Config:  # the text of a model with images, which transformers loads by that alone
        return Mistral4ForCausalLM._from_config(theirs, **options)
    return kind.from_config(theirs, **options)


def save_random(config: dict[str, Any], directory: Path, seed: int = 0) -> Any:
    """Write a checkpoint with lively random weights (logits of about unit size), and return the transformers model."""
    sizes = config.get("text_config", config)
    model = their_model(config, attn_implementation="eager", dtype=torch.float32).eval()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            if parameter.dim() > 1:
                parameter.copy_(noise * 1.4 / math.sqrt(sizes.get("hidden_size", sizes.get("n_embd", 64))))
            else:
                parameter.copy_(parameter + 0.3 * noise if "norm" in name or "ln_" in name else 0.5 * noise)
        for name, buffer in model.named_buffers():
            if name.endswith("bias"):  # of the choice of experts
                buffer.copy_(0.3 * torch.randn(buffer.shape, generator=generator))
    model.save_pretrained(directory)
    if config["model_type"] in SAME_AS:
        path = directory / "config.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | {"model_type": config["model_type"]}))
    return model


class RandomModels(dict[str, Path]):
    """Directories of the TINY model of each model_type, with random weights. Each is written when first read."""

    def __init__(self, root: Path) -> None:
        super().__init__()
        self.root = root

    def __missing__(self, name: str) -> Path:
        save_random(models.find(name).TINY, self.root / name)
        self[name] = self.root / name
        return self[name]


def stepped(theirs: Any, token_ids: list[int]) -> Tensor:
    """Logits of a transformers model at every position, token by token: of layers with a state its answer for several
    tokens at once has other roundings."""
    outs, cache = [], None
    with torch.inference_mode():
        for token_id in token_ids:
            out = theirs(torch.tensor([[token_id]]), past_key_values=cache, use_cache=True)
            cache = out.past_key_values
            outs.append(out.logits[0])
    return torch.cat(outs)


def load(directory: Path, **options: Any) -> Runner:
    return build_runner(EngineConfig(model=str(directory), **({"num_gpu_blocks_override": 256} | options)))[0]


def scattered_tables(lengths: Iterable[int], block_size: int, num_blocks: int, seed: int) -> list[list[int]]:
    """A block table for each length, out of order and without neighbours."""
    free = random.Random(seed).sample(range(num_blocks), num_blocks)
    return [[free.pop() for _ in range(-(-n // block_size))] for n in lengths]


def chunk_sizes(length: int, pattern: Iterable[int]) -> list[int]:
    """Cut `length` by a repeated pattern of sizes."""
    sizes: list[int] = []
    pattern = list(pattern)
    while sum(sizes) < length:
        sizes.append(min(pattern[len(sizes) % len(pattern)], length - sum(sizes)))
    return sizes


def make_batch(chunks: list[tuple[int, int, list[int], list[int]]], **columns: Any) -> ScheduledBatch:
    """A batch of (seq_id, start, token ids, block table); each chunk samples greedily, unless `columns` say else."""
    num = len(chunks)
    fields: dict[str, Any] = {
        "step_id": 1,
        "seq_ids": [c[0] for c in chunks],
        "starts": [c[1] for c in chunks],
        "lens": [len(c[2]) for c in chunks],
        "token_ids": [t for c in chunks for t in c[2]],
        "block_tables": [c[3] for c in chunks],
        "samples": [True] * num,
        "params": [SamplingParams(temperature=0.0, max_tokens=1000, seed=1)] * num,
        "num_prompts": [c[1] + len(c[2]) for c in chunks],
        "copies": [],
    }
    return ScheduledBatch(**(fields | columns))


def all_logits(runner: Runner, batch: ScheduledBatch, **states: Any) -> Tensor:
    """Logits of every row of `batch`, without the Runner's choice of rows. `states`: of `Chunks`."""
    program = runner.program
    stops = [sum(batch.lens[: i + 1]) for i in range(len(batch))]
    token_ids = [batch.token_ids[stop - n : stop] for stop, n in zip(stops, batch.lens, strict=True)]
    finite, _ = program.forward(Chunks(batch.starts, token_ids, batch.block_tables, **states).all_read(), [])
    assert all(finite)
    most = min(program.max_logits, stops[-1])
    pieces = [list(range(i, min(i + most, stops[-1]))) for i in range(0, stops[-1], most)]
    return torch.cat([torch.from_numpy(program.logits(rows).fetch().copy()) for rows in pieces])


def follow(runner: Runner, token_ids: list[int], sizes: list[int], seed: int = 0) -> Tensor:
    """Logits at every position of one sequence, computed in chunks of `sizes` over scattered blocks. Its states, if it
    has some, go to two slots in turn."""
    block_size = runner.block_size
    (table,) = scattered_tables([len(token_ids)], block_size, runner.program.num_blocks, seed)
    outs, start = [], 0
    for turn, size in enumerate(sizes):
        slots = {"states_in": [(turn - 1) % 2 if turn else -1], "states_out": [(size - 1, turn % 2)]}
        outs.append(all_logits(runner, make_batch([(0, start, token_ids[start : start + size], table)]), **slots))
        start += size
    return torch.cat(outs)


class Recorder:
    """Stands in for the sampler and keeps the logits it was handed, in the order in which it was."""

    def __init__(self) -> None:
        self.sampled: list[F32] = []
        self.foretold: list[F32] = []

    def sample_fetched(self, rows: list[Row], fetch: Any, draw: Any) -> list[Drawn | ValueError]:
        return self.sample_rows(fetch(list(range(len(rows)))), rows)

    def sample_rows(self, logits: F32, rows: list[Row]) -> list[Drawn | ValueError]:
        self.sampled += [x.copy() for x in logits]
        best = [int(x.argmax()) for x in logits]
        assert all(row.best in (None, token_id) for row, token_id in zip(rows, best, strict=True))
        return [Drawn(token_id) for token_id in best]

    def prompt_logprobs(self, logits: F32, next_token_ids: list[int], num_top: int) -> list[TokenLogprob]:
        self.foretold += [row.copy() for row in logits]
        return [TokenLogprob(token_id=t, logprob=0.0, rank=1, top=()) for t in next_token_ids]


def run(runner: Runner, batch: ScheduledBatch) -> StepResult:
    result = runner.run(batch)
    assert not result.column("error"), result.column("error")
    return result


def random_ids(length: int, vocab_size: int, seed: int) -> list[int]:
    return [random.Random(seed * 7919 + i).randrange(vocab_size) for i in range(length)]


def log_probabilities(model: Path, text: list[int], **changes: Any) -> list[float]:
    """Of a text's tokens after each other."""
    llm = LLM(str(model), skip_tokenizer_init=True, num_threads=1, **changes)
    try:
        [output] = llm.generate([text], SamplingParams(max_tokens=1, prompt_logprobs=0), use_tqdm=False)
    finally:
        llm.close()
    pairs = zip(text[1:], (output.prompt_logprobs or [])[1:], strict=True)
    return [entry[token_id].logprob for token_id, entry in pairs if entry is not None]
