"""What a seed of the simulation draws: a configuration of the scheduler, a mix of events, and requests.

All randomness of the simulation is one `random.Random(seed)`, so a seed is a complete description of a run.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from random import Random
from typing import Any

import msgspec

from headrace.core.kinds import fit_windows, make_kinds
from headrace.core.sequence import NEVER
from headrace.protocol.beam import BeamSearchParams
from headrace.protocol.kinds import CacheKind
from headrace.protocol.params import SamplingParams
from headrace.protocol.step import Draft, Request

EVENTS = (
    "arrival",
    "beams",
    "group",
    "resume",
    "too long",
    "duplicate id",
    "abort",
    "abort in flight",
    "arrival in flight",
    "preempt",
    "allocation failure",
    "cache reset",
    "reset in flight",
    "chunk failure",
    "late sampler",
    "poison",
)


@dataclass(frozen=True)
class World:
    """One drawn configuration. `rates` are probabilities per step (for "chunk failure", per chunk)."""

    num_blocks: int
    block_size: int
    max_num_seqs: int
    max_num_batched_tokens: int
    max_model_len: int
    policy: str
    enable_prefix_caching: bool
    enable_chunked_prefill: bool
    long_prefill_token_threshold: int
    max_overtaking: int
    vocab_size: int
    eos_probability: float
    forced_share: float
    guess_share: float
    max_alive: int
    stems: list[list[int]]
    salts: list[str]
    rates: dict[str, float]
    longest: int
    kinds: tuple[CacheKind, ...] = (CacheKind(),)
    more_blocks: tuple[int, ...] = ()

    def scheduler_args(self) -> dict[str, Any]:
        rest = {"vocab_size", "eos_probability", "forced_share", "guess_share", "max_alive", "stems", "salts", "rates"}
        return {name: value for name, value in asdict(self).items() if name not in rest | {"longest"}} | {
            "kinds": self.kinds,
            "eos_token_ids": [0],
            "speculates": self.guess_share > 0,
        }


def draw_world(rng: Random, kinds: bool = False) -> World:
    """A world; with `kinds`, for a model whose layers look back differently far."""
    block_size = rng.choice([1, 2, 3, 4, 5, 8, 16])
    num_blocks = rng.choice([1, 2, 3, rng.randint(1, 64), rng.randint(4, 24), rng.randint(8, 64)])
    room = num_blocks * block_size
    max_model_len = max(2, rng.choice([room + 1, rng.randint(2, 80), rng.randint(2, 40), 200]))
    budget = rng.choice([1, 2, rng.randint(1, 10), rng.randint(4, 32), 64, 256])
    vocab_size = rng.choice([2, 3, 8, 50])
    length = max(1, min(max_model_len, room, 48))
    stems = [[rng.randrange(vocab_size) for _ in range(rng.randint(1, length))] for _ in range(rng.randint(1, 4))]
    # A swarm: each seed leaves out some kinds of events altogether, so that others show what they do alone.
    rates = {name: rng.choice([0, 0, 0.02, 0.1, 0.3]) for name in EVENTS}
    rates["arrival"] = rng.choice([0.1, 0.3, 0.8])
    rates["late sampler"] = rng.choice([0, 0, 0.05, 0.3])
    rates["chunk failure"] = rng.choice([0, 0, 0, 0.005, 0.03])
    world = World(
        num_blocks=num_blocks,
        block_size=block_size,
        max_num_seqs=rng.choice([1, 2, rng.randint(2, 8), 16]),
        max_num_batched_tokens=budget,
        max_model_len=max_model_len,
        policy=rng.choice(["fcfs", "priority"]),
        enable_prefix_caching=rng.random() < 0.75,
        enable_chunked_prefill=budget < min(max_model_len, room + 1) or rng.random() < 0.7,
        long_prefill_token_threshold=rng.choice([0, 0, rng.randint(1, 8)]),
        max_overtaking=rng.choice([1, 3, 32]),
        vocab_size=vocab_size,
        eos_probability=rng.choice([0.0, 0.02, 0.2]),
        forced_share=rng.choice([0.0, 0.2, 0.8]),
        guess_share=rng.choice([0.0, 0.0, 0.5, 0.9]),
        max_alive=rng.choice([4, 12, 24]),
        stems=stems,
        salts=rng.choice([[""], ["", "tenant"]]),
        rates=rates,
        longest=min(max_model_len, room + 1),
    )
    # Not drawn, so that seeds of long ago still mean the same world.
    if world.policy == "priority" and world.max_alive == 12:
        world = replace(world, policy="fair")
    return with_kinds(world) if kinds else world


def with_kinds(world: World) -> World:
    """The same world for a model whose layers look back differently far. It follows from the world alone."""
    rng = Random(repr(world))
    size, budget = world.block_size, world.max_num_batched_tokens
    widths = {rng.choice([1, 2, size, rng.randint(1, 3 * size), rng.randint(1, 60)]) for _ in range(2)}
    windows = [CacheKind(window=width) for width in sorted(widths)][: rng.choice([0, 1, 1, 1, 2])]
    kinds = [CacheKind()] * (not windows or rng.random() < 0.6) + windows
    kinds += [CacheKind(is_state=True)] * (rng.random() < 0.5)
    sizes = []
    for kind in kinds:
        least = -(-(kind.window + rng.choice([1, budget])) // size) + 1
        sizes.append(
            rng.choice([2, 3, rng.randint(2, 40)]) if kind.is_state else rng.choice([least, rng.randint(1, 64)])
        )
    if kinds[0].window == 0:
        sizes[0] = world.num_blocks
    longest, _ = fit_windows(make_kinds(kinds, sizes, size), budget if world.enable_chunked_prefill else NEVER)
    longest = max(2, min(world.max_model_len, longest + 1))
    return replace(
        world, num_blocks=sizes[0], kinds=tuple(kinds), more_blocks=tuple(sizes[1:]), longest=longest,
        enable_chunked_prefill=world.enable_chunked_prefill or budget < longest,
    )  # fmt: skip


def draw_draft(rng: Random, world: World, say: Callable[[list[int]], int]) -> Draft | None:
    """A chain or a tree of guesses, of which about `guess_share` are right. `say` tells what comes after some more."""
    if rng.random() >= world.guess_share:
        return None
    tokens: list[int] = []
    parents: list[int] = []
    for _ in range(rng.randint(1, 8)):
        parent = rng.randint(-1, len(tokens) - 1) if rng.random() < 0.3 else len(tokens) - 1
        path: list[int] = []
        node = parent
        while node >= 0:
            path.insert(0, tokens[node])
            node = parents[node]
        token = say(path) if rng.random() < world.guess_share else rng.randrange(world.vocab_size)
        if (token, parent) not in zip(tokens, parents, strict=True):
            tokens.append(token)
            parents.append(parent)
    if parents == list(range(-1, len(parents) - 1)) and rng.random() < 0.5:
        return Draft(tokens)
    return Draft(tokens, parents)


def draw_request(rng: Random, world: World, name: str, group: str = "") -> Request:
    """A request that fits `world`: the beginning of a stem, more or less of it, and maybe something of its own."""
    stem = rng.choice(world.stems)
    prompt = stem[: rng.randint(1, len(stem))] if rng.random() < 0.5 else list(stem)
    if rng.random() < 0.5:
        prompt += [rng.randrange(world.vocab_size) for _ in range(rng.randint(1, 6))]
    limit = world.longest - 1
    return Request(
        request_id=name,
        prompt_token_ids=prompt[:limit],
        params=draw_params(rng, world),
        priority=rng.choice([0, 0, 1, -1, 5]),
        cache_salt=(salt := rng.choice(world.salts)),
        tenant=salt,
        group=group,
    )


def draw_search(rng: Random, world: World, name: str) -> Request:
    """A beam search. It may be too wide for the pool, which the scheduler must tell."""
    request = draw_request(rng, world, name)
    num_groups = rng.choice([1, 1, 1, 2, 3])
    width = num_groups * rng.randint(1, 3)
    most = min(world.max_num_seqs, world.max_num_batched_tokens)
    if width > most:
        num_groups, width = 1, rng.randint(1, most)
    params = SamplingParams(
        seed=rng.randrange(2**63),
        temperature=0.0,
        max_tokens=rng.randint(1, 10),
        ignore_eos=rng.random() < 0.2,
        stop_token_ids=[1] if world.vocab_size > 2 and rng.random() < 0.2 else None,
    )
    beam = BeamSearchParams(
        beam_width=width,
        length_penalty=rng.choice([1.0, 1.0, 0.0, 2.0, -1.0]),
        early_stopping=rng.choice([False, True, "never"]),
        num_beam_groups=num_groups,
        diversity_penalty=rng.choice([0.0, 0.4, 3.0]) if num_groups > 1 else 0.0,
        n=rng.choice([None, rng.randint(1, width)]),
    )
    return msgspec.structs.replace(request, params=params, beam=beam)


def draw_params(rng: Random, world: World) -> SamplingParams:
    max_tokens = rng.choice([1, rng.randint(1, 8), rng.randint(1, 30), None])
    return SamplingParams(
        seed=rng.randrange(2**63),
        max_tokens=max_tokens,
        min_tokens=rng.choice([0, 0, 0, min(3, max_tokens or 3)]),
        ignore_eos=rng.random() < 0.2,
        # With a vocabulary of 2 and token 0 for EOS, to forbid token 1 as well would leave nothing to sample.
        stop_token_ids=[1] if world.vocab_size > 2 and rng.random() < 0.1 else None,
        logprobs=rng.choice([None, None, 2]),
        prompt_logprobs=1 if rng.random() < 0.1 else None,
        no_repeat_ngram_size=2 if rng.random() < 0.2 else 0,
        speculation=rng.random() < 0.9,
    )
