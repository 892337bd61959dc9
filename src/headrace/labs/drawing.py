"""Labs of choosing tokens: the rest of a distribution after each sampling parameter, and tokens a pass with
speculation."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from headrace import hub
from headrace.cli.bench.speculate import Synthetic, replace_drafter
from headrace.labs.base import Lab
from headrace.labs.engine import Bench, opened
from headrace.plan.steps import kept_guesses, tokens_per_pass
from headrace.protocol.errors import HeadraceError
from headrace.protocol.params import SamplingParams
from headrace.protocol.speculation import SpeculativeConfig
from headrace.protocol.step import Request, TokenLogprob
from headrace.sampling.sampler import Row, Sampler
from headrace.text.tokenizer import Tokenizer

KNOBS: dict[str, dict[str, Any]] = {
    "nothing": {},
    "temperature 0.5": {"temperature": 0.5},
    "temperature 2": {"temperature": 2.0},
    "temperature 0": {"temperature": 0.0},
    "top_k 5": {"top_k": 5},
    "top_p 0.8": {"top_p": 0.8},
    "min_p 0.1": {"min_p": 0.1},
    "temperature 2, top_p 0.8": {"temperature": 2.0, "top_p": 0.8},
}
EXAMPLE = (2.0, 1.0, 0.1)
"""Logits of the example by which textbooks explain temperature."""
NUM_GUESSES = 4
NUM_SHOWN = 24
"""Tokens of a text that are printed."""


def entropy_of(shares: dict[int, float]) -> float:
    """Return the entropy of a distribution in bits."""
    return 0.0 - sum(share * math.log2(share) for share in shares.values() if share > 0)


def softmax_of(logits: Sequence[float], temperature: float) -> list[float]:
    """Return the probabilities of all tokens at a temperature, by the engine's sampler."""
    row = Row(SamplingParams(temperature=temperature, seed=1), position=0, num_prompt=0)
    [shares] = Sampler(len(logits), []).shares(np.array([logits], np.float32), [row])
    if isinstance(shares, ValueError):
        raise HeadraceError(f"no softmax of {list(logits)}: {shares}")
    return [float(share) for share in shares[1]]


def _example() -> str:
    """Return the probabilities of `EXAMPLE` at three temperatures, in words."""
    shares = {temperature: softmax_of(EXAMPLE, temperature) for temperature in (0.5, 1.0, 2.0)}
    return "; ".join(f"{' / '.join(f'{p:.3f}' for p in each)} at temperature {t:g}" for t, each in shares.items())


def _shares(bench: Bench, known: list[int], fields: dict[str, Any]) -> dict[int, float]:
    """Return the probability of each token that the knobs leave after the tokens `known`."""
    params = SamplingParams(
        **({"temperature": 1.0, "seed": 1} | fields), max_tokens=1, logprobs=-1, post_sampling_probs=True
    )
    bench.core.add(Request(request_id="shares", prompt_token_ids=known, params=params))
    shares: dict[int, float] = {}
    while bench.core.has_work():
        for entries in bench.core.step().logprobs.values():
            shares = {token: math.exp(value) for token, value in entries[0].top if value > -math.inf}
    return shares


def distinct(texts: Sequence[Sequence[int]], num: int) -> float:
    """Return distinct-n of Li et al. 2016 (arXiv:1510.03055): the share of the texts' n-grams that are different."""
    grams = [tuple(text[i : i + num]) for text in texts for i in range(len(text) - num + 1)]
    return len(set(grams)) / max(1, len(grams))


def _texts(bench: Bench, known: list[int], fields: dict[str, Any], seeds: int, length: int) -> list[list[TokenLogprob]]:
    """Return how the text goes on with each seed: tokens with their log-probabilities under the model alone."""
    texts: dict[str, list[TokenLogprob]] = {}
    for seed in range(seeds):
        more = {"temperature": 1.0} | fields | {"seed": seed, "max_tokens": length, "logprobs": 0, "ignore_eos": True}
        bench.core.add(Request(request_id=f"text {seed}", prompt_token_ids=known, params=SamplingParams(**more)))
        texts[f"text {seed}"] = []
    while bench.core.has_work():
        for name, entries in bench.core.step().logprobs.items():
            texts[name] += entries
    return list(texts.values())


def sampling(model: str, small: bool) -> Lab:
    """The rest of the model's distribution after each sampling parameter, and the texts that come of it."""
    seeds, length = (2, 8) if small else (8, 64)
    tokenizer = Tokenizer.load(hub.resolve_tokenizer(model, None))
    rows: list[list[str | int | float]] = []
    with opened(model, max_logprobs=-1) as bench:
        [text] = bench.run([bench.prompt(1, 5)], [12], temperature=1.0)
        places = [text.token_ids[:length] for length in range(4, 13)]
        # Where the model is certain, every knob leaves the same.
        plain, known = max(((_shares(bench, each, {}), each) for each in places), key=lambda pair: entropy_of(pair[0]))
        for name, fields in KNOBS.items():
            shares = _shares(bench, known, fields)
            mass = sum(plain[token] for token in shares)
            texts = _texts(bench, known, fields, seeds, length)
            ids = [[each.token_id for each in text] for text in texts]
            surprise = -sum(each.logprob for text in texts for each in text) / (seeds * length)
            sample = " ".join(tokenizer.decode(ids[0][:NUM_SHOWN]).split())
            counts = [distinct(ids, 1), distinct(ids, 2), math.exp(surprise)]
            rows.append([name, len(shares), entropy_of(shares), max(shares.values()), mass, *counts, sample])
        before = " ".join(tokenizer.decode(known).split())
    by_name = {str(row[0]): row for row in rows}
    return Lab(
        name="sampling",
        title="What the sampling knobs leave of a distribution",
        measured="The distribution of the token after a text that the model wrote, at the least certain of nine "
        "places, after each knob, as the engine reports it (post_sampling_probs): tokens that are left, their "
        "entropy, "
        "the share of the likeliest, and the share that the left tokens had under the model alone. Then how the text "
        f"goes on with {seeds} seeds, {length} tokens each: the share of the tokens and of the pairs of tokens that "
        "are different (distinct-1, distinct-2), the perplexity under the model alone, and the beginning of the first. "
        f"The text before is: {before!r}.",
        wrong="top-p keeps exactly p of the probability; temperature 0 divides by zero; the order of the knobs "
        "is all the same; other figures for the softmax of the logits 2, 1 and 0.1 at temperatures 0.5 and 2 than "
        "dividing the logits by them gives.",
        right=[
            "Top-p keeps the fewest tokens that have at least p: with 0.8 they had "
            f"{float(by_name['top_p 0.8'][4]):.3f}.",
            f"Temperature 0 means the likeliest token, {by_name['temperature 0'][1]} of {len(plain):,}: nothing is "
            "divided.",
            "Temperature comes before top-p here: at 2, top-p 0.8 leaves "
            f"{by_name['temperature 2, top_p 0.8'][1]:,} tokens, and at 1 it leaves {by_name['top_p 0.8'][1]:,}.",
            f"The logits 2, 1 and 0.1 become {_example()}, by the engine's sampler: softmax of the logits, each "
            "divided by the temperature.",
            "Variety has its price: from temperature 0.5 to 2 distinct-2 goes from "
            f"{float(by_name['temperature 0.5'][6]):.2f} to {float(by_name['temperature 2'][6]):.2f}, the perplexity "
            f"from {float(by_name['temperature 0.5'][7]):.1f} to {float(by_name['temperature 2'][7]):,.1f}.",
        ],
        columns=[
            "knobs",
            "tokens left",
            "entropy, bits",
            "likeliest",
            "share under the model",
            "distinct-1",
            "distinct-2",
            "perplexity",
            "text",
        ],
        rows=rows,
        x="knobs",
        series=["entropy, bits"],
        y="bits",
        counts=["tokens left"],
    )


def speculation(model: str, small: bool) -> Lab:
    """Tokens of a pass with speculation, against the formula."""
    num_new, num_texts, alphas = (24, 2, (0.5, 1.0)) if small else (128, 8, (0.3, 0.5, 0.7, 0.8, 0.9, 1.0))
    spec = SpeculativeConfig(method="ngram", num_speculative_tokens=NUM_GUESSES, adaptive=False)
    rows: list[list[str | int | float]] = []
    with opened(model) as bench:
        prompts = [bench.prompt(8, seed) for seed in range(num_texts)]
        texts = [bench.run([prompt], [num_new])[0].token_ids for prompt in prompts]
    for alpha in alphas:
        with opened(model, speculative_config=spec) as bench:
            drafter = Synthetic(alpha, bench.core.info.vocab_size)
            for prompt, text in zip(prompts, texts, strict=True):
                drafter.record(prompt, text)
            replace_drafter(bench.core, drafter)
            for prompt, text in zip(prompts, texts, strict=True):
                [answer] = bench.run([prompt], [num_new])
                if answer.token_ids != text:
                    raise HeadraceError("speculation changed the answer: the engine breaks its law")
            stats = bench.core.stats()
        # Passes at the end of an answer have fewer guesses: the formula gets their mean number.
        passes = max(1, stats.num_drafts)
        guesses = stats.num_draft_tokens / passes
        num_kept = stats.num_accepted_tokens / passes
        rows.append(
            [
                alpha,
                passes,
                guesses,
                num_kept + 1,
                tokens_per_pass(alpha, guesses),
                num_kept,
                kept_guesses(alpha, guesses),
            ]
        )
    last = rows[-1]
    return Lab(
        name="speculation",
        title="Tokens of a pass with speculation",
        measured=f"Answers of {num_new} tokens with {NUM_GUESSES} guesses a pass, each right with the probability α "
        "(recorded answers, some of their tokens made wrong). Passes and kept guesses are the engine's counters, and "
        "the answers are those without speculation, token by token.",
        wrong="(1 - α^(k+1)) / (1 - α) guesses of a pass are kept.",
        right=[
            "The formula (Leviathan et al. 2023, equation 1) counts the tokens of a pass: the kept guesses, and the "
            "one that the model adds itself. Kept guesses are one fewer.",
            f"At α = {float(last[0]):g} a pass gives {float(last[3]):.2f} tokens and keeps {float(last[5]):.2f} "
            "guesses "
            f"of {float(last[2]):.2f}; the formula says {float(last[4]):.2f} tokens.",
        ],
        columns=["α", "passes", "guesses a pass", "tokens a pass", "formula", "kept a pass", "formula - 1"],
        rows=rows,
        x="α",
        series=["tokens a pass", "formula", "kept a pass"],
        y="a pass",
        counts=["passes", "tokens a pass", "kept a pass"],
    )
