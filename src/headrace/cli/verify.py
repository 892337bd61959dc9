"""`headrace verify MODEL --speculative-config ...`: tests whether speculation changes a model's output on this machine.

Two tests. Bits: the same requests with and without speculation, alone and in a batch, at three temperatures; token ids
and log-probabilities must be equal to the bit (under rejection sampling, which draws otherwise, at temperature 0).
Distribution: many draws of three tokens from the few likeliest, against their exact probabilities (chi-square).
"""

from __future__ import annotations

import itertools
import json
import math
import statistics
import struct
from collections import Counter
from collections.abc import Iterable, Sequence
from contextlib import closing
from typing import Annotated, Any, NamedTuple

import msgspec
import typer
from msgspec import Meta

from headrace.cli.options import build, options
from headrace.protocol.config import EngineConfig
from headrace.protocol.errors import HeadraceError, RequestError
from headrace.protocol.params import SamplingParams
from headrace.protocol.speculation import SpeculativeConfig

TEMPERATURES = (0.0, 0.7, 1.2)
PROMPTS = (
    "Once upon a time, there was a little", "The dog ran to the park and", "Tom and Sam went to the", "def add(a, b):",
    "One day, a girl named Lily found a", "It was a very cold day, and", "for i in range(10):", "She said, \"I want to",
)  # fmt: skip
NUM_CHOICES, NUM_DRAWN = 4, 3
LEAST_P = 0.001


class VerifyPlan(msgspec.Struct, frozen=True, kw_only=True):
    """How much to compare."""

    num_prompts: Annotated[int, Meta(description="Prompts whose answers are compared bit by bit.", ge=1)] = 8
    max_tokens: Annotated[int, Meta(description="Tokens of each of these answers.", ge=1)] = 48
    num_samples: Annotated[int, Meta(description="Draws of the distribution test; 0 for none.", ge=0)] = 4000
    json: Annotated[bool, Meta(description="Print one JSON object and nothing else.")] = False


class ComparedOutput(NamedTuple):
    """The output of a request; `bits`: of its log-probabilities."""

    token_ids: list[int]
    bits: bytes


@options(VerifyPlan, EngineConfig, skip=("skip_tokenizer_init", "model", "max_logprobs"))
def verify(
    model: Annotated[str, typer.Argument(help="A directory, a hub id, or 'builtin'.")] = "builtin",
    **fields: Any,
) -> None:
    """Compare answers with and without speculation, bit by bit and in distribution; print a verdict."""
    plan = build(VerifyPlan, fields)
    config = build(EngineConfig, fields | {"model": model, "max_logprobs": -1})
    if config.speculative_config is None:
        raise RequestError("speculative_config", None, 'given, such as {"method": "ngram"}')
    result = examine(plan, config)
    if plan.json:
        print(json.dumps(result))
    else:
        show(result)
    if not result["passed"]:
        raise typer.Exit(1)


def examine(plan: VerifyPlan, config: EngineConfig) -> dict[str, Any]:
    """Run both tests, with one engine at a time. `passed` is the verdict.

    Requests alone run with the configured speculation. In the batch and in the distribution test speculation is not
    adaptive, so that it also guesses where that saves no time: a test with few guesses proves little.
    """
    from headrace.llm import LLM

    spec = config.speculative_config or SpeculativeConfig(method="ngram")
    settings = msgspec.structs.asdict(config)
    prompts = [PROMPTS[i % len(PROMPTS)] + " very" * (i // len(PROMPTS)) for i in range(plan.num_prompts)]
    requests = [
        (prompt, params_of(i, temperature, plan.max_tokens))
        for (i, prompt), temperature in itertools.product(enumerate(prompts), TEMPERATURES)
        if spec.mode == "coupled" or temperature == 0.0
    ]
    with closing(LLM(**settings | {"speculative_config": None, "enable_prefix_caching": False})) as plain:
        expected = answers(plain, requests)
        exact = exact_chances(plain, PROMPTS[0]) if plan.num_samples else None
    with closing(LLM(**settings)) as guessing:
        alone = [answer for each in requests for answer in answers(guessing, [each])]
        stats = [guessing.get_metrics()]
    with closing(LLM(**settings | {"speculative_config": msgspec.structs.replace(spec, adaptive=False)})) as eager:
        together = answers(eager, requests)
        result: dict[str, Any] = {
            "method": spec.method,
            "mode": spec.mode,
            "num_compared": 2 * len(requests),
            "num_different": num_different(expected, alone) + num_different(expected, together),
        }
        if exact is not None:
            result |= distribution(eager, exact, plan.num_samples)
        stats.append(eager.get_metrics())
    for name in ("num_drafts", "num_draft_tokens", "num_accepted_tokens"):
        result[name] = sum(getattr(each, name) for each in stats)
    # Without any guess, nothing was tested.
    sound = result["num_different"] == 0 and result.get("p_value", 1.0) >= LEAST_P
    return result | {"passed": sound and result["num_drafts"] > 0}


def params_of(seed: int, temperature: float, max_tokens: int) -> SamplingParams:
    """Return params whose filters vary with the seed, so that speculation is tested with each."""
    return SamplingParams(
        temperature=temperature, seed=1000 + seed, max_tokens=max_tokens, ignore_eos=True, logprobs=2,
        top_k=40 if seed % 3 == 1 else 0, top_p=0.9 if seed % 3 == 2 else 1.0,
        presence_penalty=0.5 if seed % 4 == 3 else 0.0,
    )  # fmt: skip


def answers(llm: Any, requests: Sequence[tuple[str, SamplingParams]]) -> list[ComparedOutput]:
    outputs = llm.generate([prompt for prompt, _ in requests], [params for _, params in requests], use_tqdm=False)
    answers = []
    for output in outputs:
        answer = output.outputs[0]
        if answer.finish_reason == "error":
            raise HeadraceError(f"a request failed: {output.prompt!r}")
        numbers = [entry.logprob for place in answer.logprobs or [] for _, entry in sorted(place.items())]
        answers.append(ComparedOutput(list(answer.token_ids), struct.pack(f"{len(numbers)}d", *numbers)))
    return answers


def num_different(expected: Iterable[ComparedOutput], actual: Iterable[ComparedOutput]) -> int:
    return sum(a != b for a, b in zip(expected, actual, strict=True))


class Exact(NamedTuple):
    """The chance of each path of `NUM_DRAWN` tokens after a prompt, if only `allowed` may be drawn."""

    token_ids: list[int]
    allowed: list[int]
    chances: dict[tuple[int, ...], float]


def exact_chances(plain: Any, prompt: str) -> Exact:
    """Return the paths of the `NUM_CHOICES` likeliest tokens, by the model's log-probabilities."""
    token_ids = plain.get_tokenizer().encode(prompt)
    [choices] = logprobs_after(plain, [token_ids])
    allowed = sorted(choices, key=lambda token: -choices[token])[:NUM_CHOICES]
    chances: dict[tuple[int, ...], float] = {(): 1.0}
    for _ in range(NUM_DRAWN):
        rows = logprobs_after(plain, [[*token_ids, *path] for path in chances])
        grown: dict[tuple[int, ...], float] = {}
        for (path, chance), row in zip(chances.items(), rows, strict=True):
            weights = [math.exp(row[token]) for token in allowed]
            for token, weight in zip(allowed, weights, strict=True):
                grown[*path, token] = chance * weight / sum(weights)
        chances = grown
    return Exact(token_ids, allowed, chances)


def distribution(guessing: Any, exact: Exact, num_samples: int) -> dict[str, Any]:
    """Compare draws with their exact probabilities."""
    # One token more than is counted, as the last of an answer is never guessed.
    params = [
        SamplingParams(seed=seed, max_tokens=NUM_DRAWN + 1, ignore_eos=True, allowed_token_ids=exact.allowed)
        for seed in range(num_samples)
    ]
    counts: Counter[tuple[int, ...]] = Counter()
    for output in guessing.generate([{"prompt_token_ids": exact.token_ids}] * num_samples, params, use_tqdm=False):
        counts[tuple(output.outputs[0].token_ids[:NUM_DRAWN])] += 1
    return {"num_samples": num_samples, "p_value": chi_square(counts, exact.chances, num_samples)}


def logprobs_after(llm: Any, prompts: Sequence[list[int]]) -> list[dict[int, float]]:
    params = SamplingParams(temperature=0.0, max_tokens=1, logprobs=-1, ignore_eos=True, seed=0)
    outputs = llm.generate([{"prompt_token_ids": prompt} for prompt in prompts], params, use_tqdm=False)
    return [{token: entry.logprob for token, entry in output.outputs[0].logprobs[0].items()} for output in outputs]


def chi_square(counts: Counter[tuple[int, ...]], chances: dict[tuple[int, ...], float], num_samples: int) -> float:
    """Return the chance of counts as far off as these (Pearson 1900; Wilson and Hilferty's normal approximation).

    Cells that expect fewer than 5 are taken together."""
    total, cells, rest, expected_rest = 0.0, 0, 0, 0.0
    for cell, chance in chances.items():
        expected = chance * num_samples
        if expected < 5:
            rest, expected_rest = rest + counts[cell], expected_rest + expected
            continue
        total += (counts[cell] - expected) ** 2 / expected
        cells += 1
    if expected_rest > 0:
        total += (rest - expected_rest) ** 2 / max(expected_rest, 1e-9)
        cells += 1
    if sum(counts[cell] for cell in chances) != sum(counts.values()):
        return 0.0
    degrees = max(1, cells - 1)
    spread = 2.0 / (9.0 * degrees)
    score = ((total / degrees) ** (1.0 / 3.0) - (1.0 - spread)) / math.sqrt(spread)
    return 1.0 - statistics.NormalDist().cdf(score)


def show(result: dict[str, Any]) -> None:
    num_guessed, num_accepted = result["num_draft_tokens"], result["num_accepted_tokens"]
    print(f"{result['method']} ({result['mode']}): {num_guessed} tokens guessed, {num_accepted} kept")
    print(f"answers compared to the bit: {result['num_compared']}, different: {result['num_different']}")
    if "p_value" in result:
        print(f"distribution: {result['num_samples']} draws, p = {result['p_value']:.4f} (at least {LEAST_P} wanted)")
    if result["passed"]:
        print("PASSED: speculation does not change what this model says here")
    elif not result["num_drafts"]:
        print("FAILED: nothing was guessed, so nothing is proven")
    else:
        print("FAILED: speculation changes the output")
