"""Plays the target and the runner for drafters: what the target says of a few prompts is worked out once, greedily,
with the features of every position; then drafters are asked, shown and told, as the runner does it."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import torch
from safetensors.torch import load_file, save_file

from headrace import builtin
from headrace.backends.base import SetUp
from headrace.backends.step import Chunks
from headrace.drafters.base import F32, Context, Drafter, Target
from headrace.engine.library.load import load_model
from headrace.protocol.config import EngineConfig
from headrace.protocol.params import SamplingParams
from headrace.protocol.step import Draft

PROMPTS = [
    "Once upon a time, there was a little",
    "The dog ran to the park and",
    "def add(a, b):\n    return",
    "Tim had a",
]
NUM_TOKENS = 96
GREEDY = SamplingParams(temperature=0.0, max_tokens=1000, seed=1)


class Greedy:
    """`Guide` of a target at temperature 0; `rejects` draws from the softmax, with noise from the row's place."""

    def __init__(self, rejects: bool = False) -> None:
        self.rejects = rejects
        self.probs: dict[int, list[F32]] = {}

    def choose(self, logits: F32, contexts: Sequence[Context], tails: Sequence[list[int]]) -> list[int]:
        assert len(logits) == len(contexts) == len(tails)
        if self.rejects:
            return self.draw(logits, contexts, tails)
        return [int(token_id) for token_id in logits.argmax(axis=1)]

    def rank(self, logits: F32, contexts: Sequence[Context], tails: Sequence[list[int]], width: int) -> Any:
        assert len(logits) == len(contexts) == len(tails)
        best = np.argsort(-logits, axis=1, kind="stable")[:, :width]
        shares = logits - np.log(np.exp(logits - logits.max(axis=1, keepdims=True)).sum(axis=1, keepdims=True))
        shares = shares - logits.max(axis=1, keepdims=True)
        return best, np.take_along_axis(shares, best, axis=1)

    def draw(self, logits: F32, contexts: Sequence[Context], tails: Sequence[list[int]]) -> list[int]:
        shares = np.exp(logits - logits.max(axis=1, keepdims=True))
        shares /= shares.sum(axis=1, keepdims=True)
        samples = []
        for row, context, tail in zip(shares, contexts, tails, strict=True):
            spot = np.random.default_rng(len(context.tokens) + len(tail)).random()
            samples.append(min(int(np.searchsorted(np.cumsum(row), spot)), len(row) - 1))
            self.probs[context.seq_id] = [*self.probs.get(context.seq_id, [])[: len(tail)], row]
        return samples

    def take_probs(self, seq_id: int) -> F32 | None:
        probs = self.probs.pop(seq_id, None)
        return None if probs is None else np.stack(probs)


@dataclass
class Story:
    """A prompt, what the target goes on with, and the features of each position."""

    tokens: list[int]
    num_prompt: int
    features: F32


@cache
def loaded(directory: Path, backend: str) -> Any:
    return load_model(EngineConfig(model=str(directory), backend=backend), directory, lambda done, total: None)


def target_of(
    directory: Path | None = None, backend: str = "cpu", guide: Any = None, max_num_seqs: int = 8, **fields: Any
) -> Target:
    directory = directory or builtin.directory()
    module, model, config = loaded(directory, backend)

    def load(path: Path, quantization: str | None, max_model_len: int) -> Any:
        engine_config = EngineConfig(
            model=str(path), backend=backend, quantization=quantization, max_model_len=max_model_len
        )
        target, other, values = load_model(engine_config, path, lambda done, total: None)
        return target, other, values.values

    target = Target(
        model=model,
        backend=module,
        directory=directory,
        config=config.values,
        vocab_size=model.vocab_size,
        hidden_size=model.hidden_size,
        num_layers=len(model.layers),
        max_model_len=512,
        max_num_seqs=max_num_seqs,
        block_size=16,
        num_threads=1,
        kv_dtype="float32",
        quantization=None,
        guide=guide or Greedy(),
        load=load,
    )
    return target._replace(**fields)


def resized_drafter(path: Path, size: int) -> Path:
    """Write the built-in model's draft model with another number of tokens: the last ones are cut, or there is
    padding."""
    source = builtin.PATH / "drafters" / "draft_model"
    tensors = load_file(source / "model.safetensors")
    for name, tensor in tensors.items():
        if "embed_tokens" in name or "lm_head" in name:
            rows = tensor[:size]
            tensors[name] = torch.cat([rows, torch.full((size - len(rows), tensor.shape[1]), 3.0, dtype=tensor.dtype)])
    save_file(tensors, path / "model.safetensors")
    config = json.loads((source / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(config | {"vocab_size": size}))
    return path


@cache
def stories(
    feature_layers: tuple[int, ...] | None = None,
    directory: Path | None = None,
    backend: str = "cpu",
    num_tokens: int = NUM_TOKENS,
) -> list[Story]:
    """What the target says of each of `PROMPTS`."""
    target = target_of(directory, backend)
    set_up = SetUp(
        pool_sizes=(32 * len(PROMPTS),) * len(target.model.kinds),
        block_size=16,
        kv_dtype="float32",
        max_num_seqs=4,
        max_num_batched_tokens=256,
        max_blocks_per_seq=32,
        num_threads=1,
    )
    program = target.backend.program(target.model, set_up, feature_layers or ())
    result = []
    for number, text in enumerate(PROMPTS):
        tokens = prompt_of(text, target.vocab_size)
        num_prompt = len(tokens)
        table = list(range(32 * number, 32 * number + 32))
        rows = []
        begin = 0
        while len(tokens) < num_prompt + num_tokens:
            answer = tokens[begin:]
            every = list(range(len(answer)))
            _, logits = program.forward(Chunks([begin], [answer], [table], observed=every), every[-1:])
            best = logits.best[0]
            rows.append(program.features(every))
            begin = len(tokens)
            tokens.append(best)
        result.append(Story(tokens, num_prompt, np.concatenate(rows)))
    program.close()
    return result


def prompt_of(text: str, vocab_size: int) -> list[int]:
    if vocab_size != 2048:  # a model without a tokenizer
        return [ord(letter) * 7 % vocab_size for letter in text]
    from tokenizers import Tokenizer

    ids: list[int] = Tokenizer.from_file(str(builtin.PATH / "tokenizer.json")).encode(text).ids
    return ids


@dataclass
class Play:
    """One sequence that is played: `known` of its tokens are known, of which all but the last are computed."""

    seq_id: int
    story: Story
    known: int = 0
    observed: int = 0
    drafts: list[Draft] = field(default_factory=list)
    accepted: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.known = self.known or self.story.num_prompt + 1

    @property
    def done(self) -> bool:
        return self.known >= len(self.story.tokens)


def context_of(play: Play, num_drafts: int, num_nodes: int, params: SamplingParams = GREEDY) -> Context:
    return Context(play.seq_id, play.story.tokens[: play.known], play.story.num_prompt, params, num_drafts, num_nodes)


def show(drafter: Drafter, play: Play, chunk: int = 10**9) -> None:
    """Tell the drafter what the target has computed since."""
    while play.observed < play.known - 1:
        end = min(play.known - 1, play.observed + chunk)
        if drafter.feature_layers is not None:
            features = play.story.features[play.observed : end].copy()
            drafter.observe(play.seq_id, play.observed, play.story.tokens[play.observed : end], features)
            features[:] = np.nan  # they were lent
        play.observed = end


def kept_nodes(draft: Draft, truth: Sequence[int]) -> list[int]:
    """The nodes that the target agrees with, in their order."""
    nodes: list[int] = []
    for token_id in truth:
        children = draft.children(nodes[-1] if nodes else -1)
        node = next((child for child in children if draft.token_ids[child] == token_id), None)
        if node is None:
            break
        nodes.append(node)
    return nodes


def step(
    drafter: Drafter, plays: Sequence[Play], num_drafts: int = 4, num_nodes: int = 0, chunk: int = 10**9
) -> list[Draft]:
    """One turn of the sequences together."""
    for play in plays:
        show(drafter, play, chunk)
    contexts = [context_of(play, num_drafts, num_nodes or num_drafts) for play in plays]
    drafts = drafter.propose(contexts)
    assert len(drafts) == len(plays)
    for play, draft, context in zip(plays, drafts, contexts, strict=True):
        verify_sound(draft, context)
        truth = play.story.tokens[play.known :]
        accepted = kept_nodes(draft, truth)
        drafter.verified(play.seq_id, draft, [-1] * len(draft.token_ids), accepted)
        play.drafts.append(draft)
        play.accepted.append(len(accepted))
        play.known = min(play.known + len(accepted) + 1, len(play.story.tokens))
    return drafts


def verify_sound(draft: Draft, context: Context) -> None:
    assert not draft.flaw()
    assert draft.depth <= context.num_drafts
    assert len(draft.token_ids) <= max(context.num_nodes, context.num_drafts)
    assert all(token_id >= 0 for token_id in draft.token_ids)


def run(drafter: Drafter, plays: Sequence[Play], **options: Any) -> float:
    """Play to the end; -> tokens a pass."""
    while any(not play.done for play in plays):
        step(drafter, [play for play in plays if not play.done], **options)
    counts = [count for play in plays for count in play.accepted]
    return 1 + sum(counts) / len(counts)


def drafts_of(plays: Sequence[Play]) -> list[list[tuple[list[int], list[int]]]]:
    return [[(draft.token_ids, draft.parents) for draft in play.drafts] for play in plays]


def spec_of(**fields: Any) -> Any:
    from headrace.protocol.speculation import SpeculativeConfig

    return msgspec.convert(fields, SpeculativeConfig)
