"""Makes the prompts of a benchmark: random token ids of given lengths, or the lines of a file.

Everything random comes from one seeded generator, so two runs with the same seed send the same bytes. Called by
`bench.serve` and `bench.offline`; knows neither HTTP nor the engine.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from headrace.protocol.errors import RequestError

DATASETS = ("random", "custom", "sharegpt")


class Sample(NamedTuple):
    """One request to send: a prompt as text or as token ids, and how many tokens to ask for."""

    prompt: str | list[int]
    num_prompt_tokens: int
    output_len: int


def check_dataset(name: str) -> None:
    """Raise `RequestError` for a name that is none of `DATASETS`."""
    if name not in DATASETS:
        raise RequestError("dataset_name", name, "one of " + ", ".join(DATASETS))


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


def file_samples(
    dataset: str,
    path: str | None,
    num_prompts: int,
    output_len: int | None,
    count: Callable[[str], int] | None,
    *,
    seed: int = 0,
    default_output_len: int = 256,
) -> list[Sample]:
    """Return prompts from a file, shuffled by `seed` and repeated if the file has fewer than `num_prompts`.

    Args:
        dataset: `custom` (JSON lines with "prompt" or "turns", and optionally "output_tokens") or `sharegpt` (a JSON
            list of "conversations", whose first turn is the prompt and whose second gives the length).
        output_len: overrides the file's lengths.
        count: tokens of a text; None leaves the count to the server's usage report.

    Raises `RequestError` for a file that is absent or has no such entries.
    """
    if path is None or not Path(path).is_file():
        raise RequestError("dataset_path", path, f"a file for --dataset-name {dataset}")
    pairs = _custom(Path(path)) if dataset == "custom" else _sharegpt(Path(path), count)
    if not pairs:
        raise RequestError("dataset_path", path, f"a file with prompts in the form of --dataset-name {dataset}")
    random.Random(seed).shuffle(pairs)
    samples = []
    for index in range(num_prompts):
        prompt, length = pairs[index % len(pairs)]
        samples.append(Sample(prompt, count(prompt) if count else 0, output_len or length or default_output_len))
    return samples


def _json(text: str, path: Path, line: int) -> Any:
    try:
        return json.loads(text)
    except ValueError as error:
        raise RequestError("dataset_path", f"{path}:{line}", f"JSON ({error})") from error


def _custom(path: Path) -> list[tuple[str, int]]:
    pairs = []
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
        if not line.strip():
            continue
        entry = _json(line, path, number)
        turns = entry.get("turns") if isinstance(entry, dict) else None
        prompt = turns[0] if isinstance(turns, list) and turns else isinstance(entry, dict) and entry.get("prompt")
        if not isinstance(prompt, str) or not prompt:
            raise RequestError("dataset_path", f"{path}:{number}", 'an object with a text under "prompt" or "turns"')
        length = entry.get("output_tokens", 0)
        pairs.append((prompt, length if isinstance(length, int) else 0))
    return pairs


def _sharegpt(path: Path, count: Callable[[str], int] | None) -> list[tuple[str, int]]:
    pairs = []
    entries = _json(path.read_text(encoding="utf-8"), path, 1)
    for entry in entries if isinstance(entries, list) else []:
        turns = entry.get("conversations") if isinstance(entry, dict) else None
        if isinstance(turns, list) and len(turns) >= 2:
            prompt, answer = (str(turn.get("value", "")) for turn in turns[:2])
            if prompt:
                pairs.append((prompt, count(answer) if count else 0))
    return pairs
