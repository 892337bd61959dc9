"""`python docs/labs/make.py`: the pictures and the samples of the labs, made by the engine from the built-in model.

A bar is the share of 4,000 draws by the sampler itself, each with a seed of its own, from the logits that the model
gives after a prompt; nothing is computed twice for the picture. Writes figures/*.svg, and in each page the block
between the two comments. matplotlib is a dev dependency. The same model gives the same files.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from pathlib import Path
from typing import Any, NamedTuple

import matplotlib

matplotlib.use("svg")

import msgspec
import numpy as np
from matplotlib import pyplot

from headrace import LLM, BeamSearchParams, SamplingParams
from headrace.sampling.sampler import Drawn, Row, Sampler

HERE = Path(__file__).parent
SURE, UNSURE = "One day, the little girl went to the", "Tom was very"
STORY = "Once upon a time, there was a"
LOOP = "Tom had a red ball. Tom had a red ball. Tom had a"
NUM_DRAWS, NUM_SHOWN = 4000, 20
COLOURS = ("#0072b2", "#d55e00", "#009e73")
START, END = "<!-- made by make.py -->", "<!-- end -->"

llm = LLM(max_logprobs=-1, num_threads=1)
tokenizer = llm.get_tokenizer()


def logits_after(prompt: str) -> np.ndarray[Any, np.dtype[np.float32]]:
    """[V]: log-probabilities, which are logits too."""
    answer = llm.generate(prompt, SamplingParams(temperature=0.0, max_tokens=1, logprobs=-1))[0].outputs[0]
    (entries,) = answer.logprobs or [{}]
    row = np.full(llm.core.info.vocab_size, -np.inf, np.float32)
    for token_id, entry in entries.items():
        row[token_id] = entry.logprob
    return row


def shares(prompt: str, row: np.ndarray[Any, Any], **given: Any) -> dict[int, float]:
    """How often each token is drawn. Seeds are 0, 1, 2 ..."""
    sampler = Sampler(len(row), llm.core.info.eos_token_ids)
    history = tokenizer.encode(prompt)
    rows = [Row(SamplingParams(seed=seed, **given), len(history), len(history), history) for seed in range(NUM_DRAWS)]
    drawn = sampler.sample_rows(np.tile(row, (NUM_DRAWS, 1)), rows)
    counts = Counter(one.token_id for one in drawn if isinstance(one, Drawn))
    return {token_id: count / NUM_DRAWS for token_id, count in counts.items()}


def bars(name: str, prompts: list[str], settings: dict[str, dict[str, Any]], edge: Any = None) -> None:
    """One panel for each prompt: the model's distribution in grey, and what each of `settings` draws."""
    figure, all_axes = pyplot.subplots(
        len(prompts), figsize=(8, 3.1 * len(prompts)), layout="constrained", squeeze=False
    )
    for prompt, axes in zip(prompts, all_axes[:, 0], strict=True):
        row = logits_after(prompt)
        order = np.argsort(-row, kind="stable")[:NUM_SHOWN]
        places = np.arange(len(order))
        axes.bar(places, np.exp(row[order]), width=0.9, color="lightgrey", label="the model")
        width = 0.8 / len(settings)
        for number, (label, given) in enumerate(settings.items()):
            found = shares(prompt, row, **given)
            height = [found.get(int(token_id), 0.0) for token_id in order]
            rest = 1 - sum(height)
            told = f"{label} ({rest:.0%} beyond these {NUM_SHOWN})" if rest >= 0.005 else label
            axes.bar(places - 0.4 + width * (number + 0.5), height, width=width, color=COLOURS[number], label=told)
        axes.set_xticks(places, [tokenizer.decode([int(t)]).strip() or "·" for t in order], rotation=45, ha="right")
        axes.set_title(f"… {prompt} ___", fontsize=10, loc="left")
        axes.set_ylabel("probability")
        axes.legend(frameon=False, fontsize=9)
        axes.spines[["top", "right"]].set_visible(False)
    save(figure, name)


def save(figure: Any, name: str) -> None:
    # Without a date and with fixed ids, the same model gives the same file.
    matplotlib.rcParams["svg.hashsalt"] = name
    figure.savefig(HERE / "figures" / f"{name}.svg", metadata={"Date": None})
    pyplot.close(figure)
    print(f"figures/{name}.svg")


def samples(name: str, settings: dict[str, dict[str, Any]], prompt: str = STORY, num_tokens: int = 32) -> None:
    """Two answers of each setting, seeds 1 and 2, written into the page."""
    cold = all(values.get("temperature") == 0 for values in settings.values())
    how = "temperature 0" if cold else "seeds 1 and 2"
    lines = ["", f"What follows “{prompt}” ({how}; `python docs/labs/make.py` made this):", ""]
    for label, given in settings.items():
        for seed in (1, 2):
            params = SamplingParams(seed=seed, max_tokens=num_tokens, ignore_eos=True, **given)
            text = llm.generate(prompt, params)[0].outputs[0].text
            lines.append(f"- {label}: “{' '.join(text.split())} …”")
            if given.get("temperature") == 0:
                break
    fill(name, lines)


def fill(name: str, lines: list[str]) -> None:
    page = HERE / f"{name}.md"
    text = page.read_text(encoding="utf-8")
    made = "\n".join([START, *lines, "", END])
    text, count = re.subn(f"{re.escape(START)}.*?{re.escape(END)}", lambda _: made, text, flags=re.DOTALL)
    if count != 1:
        raise ValueError(f"{page.name} has {count} blocks to fill")
    page.write_text(text, encoding="utf-8")
    print(page.name)


def surprises(num_answers: int, num_tokens: int, **given: Any) -> np.ndarray[Any, np.dtype[np.float64]]:
    """Bits of surprise of each token [num_answers, num_tokens] of stories with the seeds 0, 1, 2 ..."""
    params = SamplingParams(n=num_answers, seed=0, max_tokens=num_tokens, ignore_eos=True, logprobs=0, **given)
    answers = llm.generate(STORY, params)[0].outputs
    told = [zip(answer.token_ids, answer.logprobs or [], strict=True) for answer in answers]
    return np.array([[-entry[token_id].logprob / math.log(2) for token_id, entry in pairs] for pairs in told])


def mirostat() -> None:
    figure, axes = pyplot.subplots(figsize=(8, 3.6), layout="constrained")
    num_answers, wide = 24, 10
    for number, (label, given) in enumerate(MIROSTAT.items()):
        bits = surprises(num_answers, 200, **given).mean(axis=0)
        mean = np.convolve(bits, np.ones(wide) / wide, mode="valid")
        axes.plot(np.arange(len(mean)) + wide, mean, color=COLOURS[number], label=label)
    for number, tau in enumerate((1, 2)):
        axes.axhline(tau, color=COLOURS[number], linestyle=":")
    axes.set(xlabel="token", ylabel=f"surprise, mean of {num_answers} stories [bits]", ylim=(0, None))
    axes.legend(frameon=False, fontsize=9)
    axes.spines[["top", "right"]].set_visible(False)
    save(figure, "mirostat")
    samples("mirostat", MIROSTAT)


def beams() -> None:
    widths, num_tokens = [1, 2, 4, 8, 16], 24
    best, answers = [], {}
    for width in widths:
        (found,) = llm.beam_search(STORY, BeamSearchParams(beam_width=width, max_tokens=num_tokens, ignore_eos=True))
        best.append(found.sequences[0].cum_logprob)
        answers[width] = found
    drawn = -math.log(2) * surprises(40, num_tokens).sum(axis=1)
    figure, axes = pyplot.subplots(figsize=(8, 3.6), layout="constrained")
    axes.plot(widths, best, marker="o", color=COLOURS[0], label="best answer of a search")
    axes.scatter([1] * len(drawn), drawn, marker="_", color=COLOURS[1], label="40 answers drawn at temperature 1")
    axes.set_xscale("log", base=2)
    axes.set_xticks(widths, [str(width) for width in widths])
    axes.set(xlabel="beams", ylabel=f"log-probability of {num_tokens} tokens")
    axes.legend(frameon=False, fontsize=9, loc="center right")
    axes.spines[["top", "right"]].set_visible(False)
    save(figure, "beams")
    lines = [
        "",
        f"The best answers to “{STORY}” (`python docs/labs/make.py` made this):",
        "",
        "| search | sum | answer |",
    ]
    lines.append("|---|---|---|")
    for width in widths:
        lines.append(beam_row(f"{width} beams" if width > 1 else "1 beam (greedy)", answers[width].sequences[0]))
    diverse: dict[str, Any] = {"num_beam_groups": 4, "diversity_penalty": 2.0}
    for label, more in (("4 beams, all of them", {}), ("4 groups", diverse)):
        params = BeamSearchParams(beam_width=4, max_tokens=num_tokens, ignore_eos=True, **more)
        (found,) = llm.beam_search(STORY, params)
        lines += [beam_row(f"{label}, {place}", answer) for place, answer in enumerate(found.sequences, 1)]
    fill("beams", lines)


def beam_row(label: str, answer: Any) -> str:
    return f"| {label} | {answer.cum_logprob:.2f} | … {' '.join(answer.text.removeprefix(STORY).split())} |"


class Round(NamedTuple):
    """What was known before a round, what was guessed, and what came of it: the guesses that were kept and one more."""

    known: list[int]
    drafted: list[int]
    new: list[int]


def rounds(method: str, prompt: str, params: SamplingParams, num_rounds: int = 8) -> list[Round]:
    """As the engine itself runs them."""
    from headrace.drafters.speculator import Speculator

    spec: Any = {"method": method, "num_speculative_tokens": 4, "adaptive": False}
    guessing = LLM(num_threads=1, enable_prefix_caching=False, speculative_config=spec)
    speculator: Speculator = guessing.core.executor.speculator  # type: ignore[attr-defined]
    drafted: list[list[int]] = [[]]
    end_step = speculator.end_step

    def watch(batch: Any, result: Any, record: Any) -> None:
        end_step(batch, result, record)
        drafted.append(result.drafts[0].token_ids if 0 in result.drafts else [])

    speculator.end_step = watch  # type: ignore[method-assign]
    found, known = [], tokenizer.encode(prompt)
    start = len(known)
    for output, guess in zip(guessing.stream(prompt, params), drafted, strict=False):
        new = list(output.outputs[0].token_ids[len(known) - start :])
        found.append(Round(known, guess, new))
        known = known + new
        if len(found) > num_rounds:
            break
    guessing.close()
    return found


def speculation() -> None:
    """Rounds of prompt lookup and of a draft model, and one of them from near, written into the page."""
    lines = []
    echo = "Tom had a red ball. Tom had a red ball. Tom had a"
    for method, prompt, temperature in (("ngram", echo, 0.0), ("draft_model", STORY, 0.0), ("draft_model", STORY, 0.9)):
        params = SamplingParams(temperature=temperature, seed=1, max_tokens=64, ignore_eos=True)
        found = rounds(method, prompt, params)
        told = f"`{method}`, temperature {temperature:g}, after “{prompt}” (`python docs/labs/make.py` made this):"
        lines += ["", told, "", "| round | drafted | kept | the model's own |", "|---|---|---|---|"]
        for number, each in enumerate(found):
            cells = [words(each.drafted), words(each.new[:-1]), words(each.new[-1:])]
            lines.append(f"| {number} | {' | '.join(cells)} |")
    # Of the last table, whose guesses are partly right.
    number, one = next((i, each) for i, each in enumerate(found) if 1 < len(each.new) < len(each.drafted))
    fill("speculation", [*lines, "", f"Round {number} of the last table, place by place:", "", *places(one, params)])


def places(one: Round, params: SamplingParams) -> list[str]:
    """What the model without a drafter says at each place of a draft, had it read the guesses before: the same draws,
    because seed and position are the same."""
    lines = ["| place | read up to here | drafted | its chance | the model's draw | so |", "|---|---|---|--:|---|---|"]
    for place, guess in enumerate([*one.drafted, None]):
        known = one.known + one.drafted[:place]
        asked = msgspec.structs.replace(params, max_tokens=1, logprobs=-1)
        answer = llm.generate({"prompt_token_ids": known}, asked, use_tqdm=False)[0].outputs[0]
        drawn, entries = answer.token_ids[0], (answer.logprobs or [{}])[0]
        if place < len(one.new) and drawn != one.new[place]:
            raise ValueError(f"place {place}: {drawn} drawn, {one.new[place]} in the round")
        so = "never looked at: what it follows is not in the text"
        if place < len(one.new) - 1:
            so = "kept"
        elif place == len(one.new) - 1:
            so = "one token more" if guess is None else "thrown away; the draw corrects it"
        chance = "" if guess is None else f"{math.exp(entries[guess].logprob):.2f}"
        told = words(known[-3:]), words([guess] if guess is not None else []), chance, words([drawn]), so
        lines.append(f"| {place + 1} | … {' | '.join(told)} |")
    return lines


def words(token_ids: list[int]) -> str:
    """Tokens with dots between them."""
    told = [tokenizer.decode([token_id]).replace("\n", "↵").strip() or "␣" for token_id in token_ids]
    return " · ".join(told).replace("|", "\\|") or "–"


BOTH = [SURE, UNSURE]
MIROSTAT: dict[str, dict[str, Any]] = {
    f"mirostat 2, tau {tau:g}, eta 0.3": {"mirostat": 2, "mirostat_tau": tau, "mirostat_eta": 0.3} for tau in (1.0, 2.0)
} | {"temperature 1": {}}
BARS: dict[str, tuple[list[str], dict[str, dict[str, Any]]]] = {
    "greedy": (BOTH, {"temperature 0": {"temperature": 0.0}}),
    "temperature": (BOTH, {f"temperature {t:g}": {"temperature": t} for t in (0.5, 1.0, 2.0)}),
    "top-k": (BOTH, {"top_k 5": {"top_k": 5}}),
    "top-p": (BOTH, {"top_p 0.5": {"top_p": 0.5}, "top_p 0.8": {"top_p": 0.8}}),
    "min-p": (BOTH, {"min_p 0.1": {"min_p": 0.1}, "min_p 0.3": {"min_p": 0.3}}),
    "typical": (BOTH, {"typical_p 0.3": {"typical_p": 0.3}, "typical_p 0.8": {"typical_p": 0.8}}),
    "penalties": (
        [LOOP],
        {
            "repetition_penalty 1.3": {"repetition_penalty": 1.3},
            "frequency_penalty 0.8": {"frequency_penalty": 0.8},
            "presence_penalty 0.8": {"presence_penalty": 0.8},
        },
    ),
    "dry": ([LOOP], {"dry_multiplier 0.8": {"dry_multiplier": 0.8}}),
    "xtc": (
        BOTH,
        {
            "threshold 0.05, always": {"xtc_probability": 1.0, "xtc_threshold": 0.05},
            "threshold 0.05, half of the time": {"xtc_probability": 0.5, "xtc_threshold": 0.05},
        },
    ),
}

if __name__ == "__main__":
    for name, (prompts, settings) in BARS.items():
        bars(name, prompts, settings)
        if prompts == BOTH:
            samples(name, {"temperature 1, nothing else": {}} | settings)
        else:
            # Repetition shows best where nothing is drawn.
            cold = {label: values | {"temperature": 0.0} for label, values in ({"nothing else": {}} | settings).items()}
            samples(name, cold, *((LOOP, 50) if name == "dry" else (STORY, 90)))
    mirostat()
    beams()
    speculation()
