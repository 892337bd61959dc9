"""Makes the prompts of a benchmark: random token ids of given lengths, or the lines of a file.

Everything random comes from one seeded generator, so two runs with the same seed send the same bytes. Called by
`bench.serve`, `bench.offline` and `bench.speculate`; knows neither HTTP nor the engine.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, TypeVar

import msgspec

from headrace import hub
from headrace.protocol.errors import RequestError

if TYPE_CHECKING:
    from headrace.cli.bench.plans import ServePlan, ThroughputPlan
    from headrace.fleet.traces import Call
    from headrace.text.tokenizer import Tokenizer

DATASETS = ("random", "custom", "sharegpt")
TRACES = ("azure", "mooncake")
DEFAULT_OUTPUT_LEN = 256

T = TypeVar("T")


class Sample(NamedTuple):
    """One request to send: a prompt as text or as token ids, and the number of tokens to request. `due`: seconds after
    the first at which a trace has it."""

    prompt: str | list[int]
    num_prompt_tokens: int
    output_len: int
    due: float = 0.0


def find_tokenizer(model: str) -> Tokenizer:
    """Return the tokenizer of a directory, a GGUF file, a hub id or 'builtin'. Raises `HeadraceError` for none."""
    from headrace.text.tokenizer import Tokenizer

    return Tokenizer.load(hub.resolve_tokenizer(model, None))


def check_dataset(name: str, more: tuple[str, ...] = ()) -> None:
    """Raise `RequestError` for a name that is none of `DATASETS` and of `more`."""
    if name not in (*DATASETS, *more):
        raise RequestError("dataset_name", name, "one of " + ", ".join((*DATASETS, *more)))


def trace_samples(plan: ServePlan, vocab_size: int, avoid: frozenset[int] = frozenset()) -> list[Sample]:
    """Return the first requests of a trace as prompts of random token ids, which share prefixes as the trace says:
    block k of Mooncake's is always the same. Raises `RequestError`."""
    from headrace.fleet.traces import read

    try:
        calls = read(Path(plan.dataset_path or ""), speed_up=plan.speed_up)[: plan.num_prompts]
    except RequestError as error:
        raise error.renamed("dataset_path") from None
    allowed = [token_id for token_id in range(vocab_size) if token_id not in avoid]
    samples = []
    for number, call in enumerate(calls):
        prompt = trace_prompt(call, number, plan.seed, allowed)
        samples.append(Sample(prompt, len(prompt), plan.output_len or call.num_new, call.time))
    return samples


def trace_prompt(call: Call, number: int, seed: int, allowed: Sequence[int]) -> list[int]:
    """Return a prompt of `allowed` token ids for request `number` of a trace: each of its keys gives the same block."""
    from headrace.fleet.traces import MOONCAKE_TOKENS

    prompt = list[int]()
    for key in call.keys or [-1 - number]:
        # Of an integer, `Random` takes the absolute value: -2 would give the block of key 2.
        noise = random.Random(f"{seed} {key}")
        prompt += noise.choices(allowed, k=MOONCAKE_TOKENS if call.keys else call.num_prompt)
    return (prompt + prompt[-1:] * (call.num_prompt - len(prompt)))[: call.num_prompt]


def random_samples(
    num_prompts: int,
    vocab_size: int,
    *,
    input_len: int,
    output_len: int,
    range_ratio: float = 0.0,
    prefix_len: int = 0,
    seed: int = 0,
    avoid: frozenset[int] = frozenset(),
) -> list[Sample]:
    """Return prompts of random token ids: `prefix_len` shared ones, then `input_len` of each prompt's own.

    Lengths are drawn evenly from [len * (1 - range_ratio), len * (1 + range_ratio)]. Ids in `avoid` (special tokens)
    are not drawn. No two prompts begin alike past the shared prefix, so a prefix cache helps with the prefix alone.
    """
    if not 0 <= range_ratio < 1:
        raise RequestError("random_range_ratio", range_ratio, "at least 0 and below 1")
    noise = random.Random(seed)
    allowed = [token_id for token_id in range(vocab_size) if token_id not in avoid]
    if not allowed:
        raise RequestError("vocab_size", vocab_size, "larger than the number of special tokens")

    def length(middle: int) -> int:
        return max(1, noise.randint(int(middle * (1 - range_ratio)), int(middle * (1 + range_ratio))))

    prefix = noise.choices(allowed, k=prefix_len)
    samples = []
    for _ in range(num_prompts):
        prompt = prefix + noise.choices(allowed, k=length(input_len))
        samples.append(Sample(prompt, len(prompt), length(output_len)))
    return samples


def file_samples(plan: ServePlan | ThroughputPlan, count: Callable[[str], int] | None) -> list[Sample]:
    """Return prompts from the plan's file, shuffled by its seed and repeated if the file has fewer than `num_prompts`.

    The datasets are `custom` (JSON lines with "prompt" or "turns", and optionally "output_tokens") and `sharegpt` (a
    JSON list of "conversations", whose first turn is the prompt and whose second gives the length). The plan's
    `output_len` overrides the file's lengths. `count` gives the tokens of a text; None leaves the count to the server's
    usage report. Raises `RequestError` for a file that is absent or has no such entries.
    """
    path = Path(plan.dataset_path or "")
    if not path.is_file():
        raise RequestError("dataset_path", plan.dataset_path, f"a file for --dataset-name {plan.dataset_name}")
    pairs = _custom(path) if plan.dataset_name == "custom" else _sharegpt(path, count)
    if not pairs:
        form = f"a file with prompts in the form of --dataset-name {plan.dataset_name}"
        raise RequestError("dataset_path", plan.dataset_path, form)
    random.Random(plan.seed).shuffle(pairs)
    samples = []
    for prompt, length in itertools.islice(itertools.cycle(pairs), plan.num_prompts):
        output_len = plan.output_len or length or DEFAULT_OUTPUT_LEN
        samples.append(Sample(prompt, count(prompt) if count else 0, output_len))
    return samples


class _Row(msgspec.Struct):
    prompt: str = ""
    turns: list[str] = []
    output_tokens: int = 0


class _Turn(msgspec.Struct):
    value: str = ""


class _Conversation(msgspec.Struct):
    conversations: list[_Turn] = []


def _decoded(text: str, form: type[T], place: str) -> T:
    try:
        return msgspec.json.decode(text, type=form)
    except msgspec.DecodeError as error:
        raise RequestError("dataset_path", place, f"JSON of this dataset ({error})") from error


def _custom(path: Path) -> list[tuple[str, int]]:
    pairs = []
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
        if not line.strip():
            continue
        row = _decoded(line, _Row, f"{path}:{number}")
        prompt = row.turns[0] if row.turns else row.prompt
        if not prompt:
            raise RequestError("dataset_path", f"{path}:{number}", 'an object with a text under "prompt" or "turns"')
        pairs.append((prompt, row.output_tokens))
    return pairs


def _sharegpt(path: Path, count: Callable[[str], int] | None) -> list[tuple[str, int]]:
    talks = _decoded(path.read_text(encoding="utf-8"), list[_Conversation], str(path))
    pairs = [[turn.value for turn in talk.conversations[:2]] for talk in talks if len(talk.conversations) > 1]
    return [(prompt, count(answer) if count else 0) for prompt, answer in pairs if prompt]
