"""`headrace bench speculate`: measures how much faster speculation makes decoding on this model and machine.

Two engines, one with speculation and one without, run the same requests in turns. The share of guesses that are kept,
by position, is compared with the formula of Leviathan et al. (2023): (1 - a^(k+1)) / (1 - a) tokens a pass, where each
guess is right with probability a. Answers are greedy unless the plan has a temperature. Speeds are of decoding: from
the first token to the last.
"""

from __future__ import annotations

import gzip
import itertools
import json
import random
import statistics
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec

from headrace.cli.bench.data import find_tokenizer
from headrace.cli.bench.offline import about, steps, token_samples
from headrace.cli.bench.plans import SpeculatePlan
from headrace.cli.verify import PROMPTS
from headrace.engine.build import build_engine
from headrace.engine.core import EngineCore
from headrace.protocol.config import EngineConfig
from headrace.protocol.errors import RequestError
from headrace.protocol.params import SamplingParams
from headrace.protocol.speculation import SpeculativeConfig
from headrace.protocol.step import Draft, Request

if TYPE_CHECKING:
    from headrace.drafters.base import Context
    from headrace.text.tokenizer import Tokenizer

MAX_TURN_TOKENS = 512


class Text(NamedTuple):
    """A prompt, and the answer that the model is forced to give (None: it gives its own)."""

    prompt: list[int]
    answer: list[int] | None = None


class BatchRun(NamedTuple):
    """One batch: its decoding speed and its answers."""

    tokens_per_second: float
    answers: list[list[int]]


class Synthetic:
    """A drafter whose guesses are each right with probability `alpha`, at no cost, so that only the engine's cost of
    speculation is measured. `record` stores the model's answer to a prompt, from which the right guesses are taken."""

    feature_layers: tuple[int, ...] | None = None

    def __init__(self, alpha: float, vocab_size: int) -> None:
        self._alpha = alpha
        self._vocab_size = vocab_size
        self._known: dict[tuple[int, ...], list[int]] = {}
        self._texts: dict[int, list[int]] = {}

    def record(self, prompt: list[int], answer: list[int]) -> None:
        self._known[tuple(prompt)] = [*prompt, *answer]

    def propose(self, contexts: Sequence[Context]) -> list[Draft]:
        drafts = []
        for context in contexts:
            text = self._texts.get(context.seq_id)
            if text is None:
                text = self._texts[context.seq_id] = self._known.get(tuple(context.tokens[: context.num_prompt]), [])
            place = len(context.tokens)
            right = text[place : place + context.num_drafts]
            chance = random.Random(1_000_003 * context.seq_id + place)
            drafts.append(Draft([t if chance.random() < self._alpha else (t + 1) % self._vocab_size for t in right]))
        return drafts

    def observe(self, seq_id: int, start: int, token_ids: list[int], features: Any) -> None:
        """Features are not needed."""

    def verified(self, seq_id: int, draft: Draft, best: list[int], accepted: list[int]) -> None:
        """The answers are recorded already."""

    def drop(self, seq_id: int) -> None:
        self._texts.pop(seq_id, None)

    def close(self) -> None:
        self._texts.clear()


def measure_speculation(plan: SpeculatePlan, config: EngineConfig) -> dict[str, Any]:
    """Return `loads` (speed with and without speculation by number of streams), `acceptance` (by temperature and mode),
    and the settings of the run. Raises `RequestError`."""
    spec = config.speculative_config
    if plan.alpha is not None:
        spec = msgspec.structs.replace(spec or SpeculativeConfig(method="ngram", num_speculative_tokens=4), model=None)
    if spec is None:
        raise RequestError("speculative_config", None, 'given, such as {"method": "ngram"}; or --alpha')
    if plan.alpha is not None and any(plan.temperature or []):
        raise RequestError("temperature", plan.temperature, "left out with --alpha, whose guesses are recorded at 0")
    base = msgspec.structs.replace(config, enable_prefix_caching=False, speculative_config=None)
    loads, temperatures = plan.load or [1], plan.temperature or [0.0]
    if min(loads) < 1:
        raise RequestError("load", min(loads), "at least 1")
    with (
        closing(build_engine(base)) as plain,
        closing(build_engine(msgspec.structs.replace(base, speculative_config=spec))) as guessing,
    ):
        texts = find_texts(plan, config, plain)
        synthetic = None
        if plan.alpha is not None:
            synthetic = Synthetic(plan.alpha, plain.info.vocab_size)
            for text in texts:
                synthetic.record(text.prompt, run(plain, [text], plan.output_len).answers[0])
            replace_drafter(guessing, synthetic)
        result: dict[str, Any] = about(plain.info) | {
            "method": spec.method if synthetic is None else f"synthetic, alpha {plan.alpha:g}",
            "num_speculative_tokens": spec.num_drafts,
            "adaptive": spec.adaptive,
            "texts": plan.texts,
            "output_len": plan.output_len,
            "rounds": plan.rounds,
        }
        result["loads"] = [measure_load(plain, guessing, texts, load, plan) for load in loads]
    modes = [spec.mode]
    if plan.rejection and synthetic is None and spec.method != "lookahead":
        modes = ["coupled", "rejection"]
    result["acceptance"] = []
    for mode in modes:
        # Not adaptive, so that guesses are made and counted also where they cost more time than they save.
        counted = msgspec.structs.replace(spec, mode=mode, adaptive=False)
        with closing(build_engine(msgspec.structs.replace(base, speculative_config=counted))) as core:
            if synthetic is not None:
                replace_drafter(core, synthetic)
            result["acceptance"] += [acceptance(core, texts, plan.output_len, t, counted) for t in temperatures]
    return result


def replace_drafter(core: EngineCore, drafter: Synthetic) -> None:
    core.executor.speculator.drafter = drafter  # type: ignore[attr-defined]


def measure_load(
    plain: EngineCore, guessing: EngineCore, texts: list[Text], load: int, plan: SpeculatePlan
) -> dict[str, Any]:
    """Run batches of `load` texts on both engines in turns; each round takes the texts that follow the last round's.

    Speeds and ratios are medians.
    """
    slow: list[BatchRun] = []
    fast: list[BatchRun] = []
    again: list[BatchRun] = []
    for number in range(plan.rounds):
        batch = [texts[(number * load + i) % len(texts)] for i in range(load)]
        slow.append(run(plain, batch, plan.output_len))
        fast.append(run(guessing, batch, plan.output_len))
        if plan.control:
            again.append(run(plain, batch, plan.output_len))
    ratios = ratios_of(slow, fast)
    row = {
        "streams": load,
        "plain_tokens_per_second": statistics.median(each.tokens_per_second for each in slow),
        "tokens_per_second": statistics.median(each.tokens_per_second for each in fast),
        "ratio": statistics.median(ratios),
        "ratios": ratios,
        # Also under rejection sampling, because at temperature 0 both engines take the likeliest token.
        "num_different": sum(
            a != b for one, two in zip(slow, fast, strict=True) for a, b in zip(one.answers, two.answers, strict=True)
        ),
    }
    if again:
        controls = ratios_of(slow, again)
        row |= {"control_ratio": statistics.median(controls), "control_ratios": controls}
    return row


def ratios_of(slow: list[BatchRun], fast: list[BatchRun]) -> list[float]:
    """Return the ratio of speeds of each round, the smallest first."""
    return sorted(b.tokens_per_second / a.tokens_per_second for a, b in zip(slow, fast, strict=True))


def run(
    core: EngineCore, batch: Sequence[Text], output_len: int, temperature: float = 0.0, first_seed: int = 0
) -> BatchRun:
    """Run a batch to answers of full length, and measure the decoding speed of all together."""
    answers: dict[str, list[int]] = {}
    first = last = 0.0
    before = 0
    for index, text in enumerate(batch):
        params = SamplingParams(
            temperature=temperature, seed=first_seed + index, ignore_eos=True, max_tokens=output_len,
            trace_decode_token_ids=text.answer,
        )  # fmt: skip
        core.add(Request(request_id=str(index), prompt_token_ids=text.prompt, params=params))
        answers[str(index)] = []
    for output in steps(core):
        for request_id, token_ids in zip(output.request_ids, output.token_ids, strict=True):
            answers[request_id] += token_ids
        # The clock begins when all have their first token.
        if not first and all(answers.values()):
            first, before = output.end_time, sum(map(len, answers.values()))
        last = output.end_time
    seconds = last - first
    num_tokens = sum(map(len, answers.values())) - before
    return BatchRun(num_tokens / seconds if seconds > 0 else 0.0, list(answers.values()))


def acceptance(
    core: EngineCore, texts: list[Text], output_len: int, temperature: float, spec: SpeculativeConfig
) -> dict[str, Any]:
    """Count how many guesses are kept, one stream at a time."""
    before = core.stats()
    answers = [run(core, [text], output_len, temperature, seed).answers[0] for seed, text in enumerate(texts)]
    after = core.stats()
    counts = ("num_drafts", "num_draft_tokens", "num_accepted_tokens", "num_steps")
    drafts, drafted, num_accepted, num_steps = (getattr(after, name) - getattr(before, name) for name in counts)
    both = itertools.zip_longest(after.num_accepted_per_pos, before.num_accepted_per_pos, fillvalue=0)
    per_pos = [now - then for now, then in both]
    # The formula has one probability for all positions; this is the first position's.
    alpha = per_pos[0] / drafts if per_pos and drafts else 0.0
    depth = drafted / drafts if drafts else 0.0
    formula = (1 - alpha ** (depth + 1)) / (1 - alpha) if alpha < 1 else depth + 1.0
    return {
        "temperature": temperature,
        "mode": spec.mode,
        "num_drafts": drafts,
        "num_draft_tokens": drafted,
        "num_accepted_tokens": num_accepted,
        "acceptance_per_position": [each / drafts for each in per_pos] if drafts else [],
        "mean_accepted_length": 1 + num_accepted / drafts if drafts else 1.0,
        "alpha": alpha,
        "mean_drafted_length": depth,
        "formula": formula,
        "tokens_per_step": sum(map(len, answers)) / max(1, num_steps),
    }


# -- the texts


def find_texts(plan: SpeculatePlan, config: EngineConfig, core: EngineCore) -> list[Text]:
    """Return the prompts of `plan.texts`, as token ids that leave room for the answers."""
    num = plan.num_prompts
    room = core.info.max_model_len - plan.output_len - 1
    if room < 8:
        raise RequestError("output_len", plan.output_len, f"at most {core.info.max_model_len - 9} for this model")
    if plan.texts == "random":
        samples = token_samples(core, num, min(64, room), 1, 0)
        return [Text(list(sample.prompt)) for sample in samples]  # type: ignore[arg-type]
    tokenizer = find_tokenizer(config.tokenizer or config.model)
    if plan.texts in ("edit", "summary"):
        return echoes(tokenizer, plan.texts, num, min(room, 2 * plan.output_len), plan.output_len)
    lines = list(PROMPTS) if plan.texts == "builtin" else read_prompts(Path(plan.texts))
    if not lines:
        raise RequestError("texts", plan.texts, "a file or folder of JSON lines with turns or a prompt")
    spread = [lines[i * len(lines) // num] for i in range(num)] if num < len(lines) else lines
    return [Text(tokenizer.encode(line)[: min(room, MAX_TURN_TOKENS)]) for line in spread]


def read_prompts(path: Path) -> list[str]:
    """Return the first turns of JSON lines (also gzipped).

    Their key is `turns` (Spec-Bench, MT-bench), `prompt` (HumanEval) or `question`.
    """
    prompts = []
    for file in sorted(path.rglob("*.jsonl*")) if path.is_dir() else [path]:
        try:
            data = file.read_bytes()
            text = gzip.decompress(data) if file.suffix == ".gz" else data
            rows = [json.loads(line) for line in text.decode("utf-8").splitlines() if line.strip()]
        except (OSError, ValueError) as error:
            raise RequestError("texts", str(file), f"a readable file of JSON lines ({error})") from error
        for row in rows:
            turn = row.get("turns") or row.get("prompt") or row.get("question") if isinstance(row, dict) else None
            turn = turn[0] if isinstance(turn, list) and turn else turn
            if isinstance(turn, str) and turn:
                prompts.append(turn)
    return prompts


def echoes(tokenizer: Tokenizer, kind: str, num: int, prompt_len: int, output_len: int) -> list[Text]:
    """Return prompts with forced answers that repeat much of the prompt: an edit repeats it with some tokens changed; a
    summary quotes pieces of it between other tokens. As the answers are forced, any model can be measured with them."""
    source = tokenizer.encode(Path(__file__).read_text(encoding="utf-8"))
    echo_texts = []
    for index in range(num):
        noise = random.Random(index)
        start = noise.randrange(max(1, len(source) - prompt_len))
        prompt = source[start : start + prompt_len]
        answer: list[int] = []
        while len(answer) < output_len:
            if kind == "edit":
                at = len(answer) % len(prompt)
                answer += prompt[at : at + noise.randint(20, 60)] + noise.choices(source, k=2)
            else:
                at = noise.randrange(max(1, len(prompt) - 40))
                answer += noise.choices(source, k=noise.randint(4, 8)) + prompt[at : at + noise.randint(20, 40)]
        echo_texts.append(Text(prompt, answer[:output_len]))
    return echo_texts


# -- output


def print_speculation(result: dict[str, Any]) -> None:
    print(f"{result['model_id']}, {result['method']}, k = {result['num_speculative_tokens']}, texts {result['texts']}")
    control = "control_ratio" in result["loads"][0]
    heading = f" {'without / itself':>17}" if control else ""
    print(f"{'streams':>8} {'tok/s without':>14} {'tok/s with':>11} {'ratio':>6} {'different':>10}{heading}")
    for row in result["loads"]:
        print(
            f"{row['streams']:8d} {row['plain_tokens_per_second']:14.1f} {row['tokens_per_second']:11.1f} "
            f"{row['ratio']:6.2f} {row['num_different']:10d}" + (f" {row['control_ratio']:17.2f}" if control else "")
        )
    print(f"{'mode':>10} {'temperature':>12} {'length':>7} {'alpha':>6} {'formula':>8}  kept by position")
    for row in result["acceptance"]:
        per_position = " ".join(f"{each:.2f}" for each in row["acceptance_per_position"][:8])
        print(
            f"{row['mode']:>10} {row['temperature']:12g} {row['mean_accepted_length']:7.2f} {row['alpha']:6.2f} "
            f"{row['formula']:8.2f}  {per_position}"
        )


def plot(result: dict[str, Any], path: Path) -> None:
    """Draw speed by load, and the share of guesses that are kept by position. Needs matplotlib."""
    import matplotlib

    matplotlib.use("svg")
    from matplotlib import pyplot

    figure, (left, right) = pyplot.subplots(1, 2, figsize=(9, 3.5), layout="constrained")
    left.plot([row["streams"] for row in result["loads"]], [row["ratio"] for row in result["loads"]], "o-")
    left.axhline(1.0, color="grey", linewidth=0.8)
    left.set(xscale="log", xlabel="streams", ylabel="speed with / without")
    for row in result["acceptance"]:
        label = f"{row['mode']}, temperature {row['temperature']:g}"
        right.plot(range(1, len(row["acceptance_per_position"]) + 1), row["acceptance_per_position"], "o-", label=label)
    right.set(xlabel="position in the draft", ylabel="share kept", ylim=(0, 1))
    right.legend(fontsize=8)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path)
    pyplot.close(figure)
