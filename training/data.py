"""Turns documents and conversations into rows of token ids, drawn from weighted sources.

Each source is a list of token documents, gone through in a new shuffled order every epoch. A row starts with the
start of a document and is filled with the documents that follow; the tail of the last one is cut. The order depends
on the seed and the number of rows drawn so far alone, and `Mixture.state` brings it back.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer

from chat import Conversation, conversations, hero_names, renamed
from corpora import Split, every, python_files, read_corpora
from tokenizer import BOS, END, END_OF_TEXT, ROLES, train_tokenizer

WEIGHTS = {
    "stories": 0.22, "chat": 0.28, "easy_novels": 0.10, "novels": 0.29, "war_and_peace": 0.05, "shakespeare": 0.06,
}  # fmt: skip
FAMILY_WEIGHTS = {  # fewer stories, as each was read ten times already; Python source
    "stories": 0.13, "chat": 0.23, "easy_novels": 0.11, "novels": 0.29, "war_and_peace": 0.05, "shakespeare": 0.05,
    "python": 0.14,
}  # fmt: skip
CHAT_ROUNDS, STORY_ROUNDS = 6, 3


@dataclass
class Source:
    """Documents as one flat array; document i is tokens[starts[i]:starts[i + 1]]."""

    tokens: np.ndarray
    starts: np.ndarray
    seed: int
    epoch: int = 0
    cursor: int = 0
    order: np.ndarray = field(default_factory=lambda: np.empty(0, np.int64))

    def row(self, length: int) -> np.ndarray:
        pieces, have = [], 0
        while have < length:
            if self.cursor >= len(self.order):
                self.epoch += len(self.order) > 0
                self.order = np.random.default_rng([self.seed, self.epoch]).permutation(len(self.starts) - 1)
                self.cursor = 0
            i = self.order[self.cursor]
            self.cursor += 1
            pieces.append(self.tokens[self.starts[i] : self.starts[i + 1]])
            have += len(pieces[-1])
        return np.concatenate(pieces)[:length]

    def restore(self, epoch: int, cursor: int) -> None:
        self.epoch, self.cursor = epoch, cursor
        self.order = np.random.default_rng([self.seed, epoch]).permutation(len(self.starts) - 1)


class Mixture:
    def __init__(self, sources: dict[str, Source], seed: int, weights: dict[str, float]) -> None:
        self.sources, self.seed = sources, seed
        self.weights = np.array([weights[name] for name in sources])

    def batch(self, step: int, num_rows: int, length: int) -> np.ndarray:
        """[num_rows, length + 1] token ids, int64."""
        rng = np.random.default_rng([self.seed, 7, step])
        names = rng.choice(list(self.sources), num_rows, p=self.weights / self.weights.sum())
        return np.stack([self.sources[n].row(length + 1) for n in names]).astype(np.int64)

    @property
    def state(self) -> dict[str, tuple[int, int]]:
        return {name: (s.epoch, s.cursor) for name, s in self.sources.items()}

    def restore(self, state: dict[str, tuple[int, int]]) -> None:
        for name, (epoch, cursor) in state.items():
            self.sources[name].restore(epoch, cursor)


def render(conversation: Conversation) -> str:
    """The chat template's output for a finished conversation."""
    return BOS + "".join(ROLES[role] + text + END for role, text in conversation)


def documents(corpora: dict[str, Split], seed: int) -> dict[str, list[str]]:
    """Training documents by source, special tokens written out."""
    stories, plays = corpora["stories"].train, corpora["shakespeare"].train
    rng, names = random.Random(seed), hero_names(stories)
    retold = stories + [renamed(s, names, rng) for _ in range(STORY_ROUNDS - 1) for s in stories]
    result = {name: [BOS + d + END_OF_TEXT for d in split.train] for name, split in corpora.items()}
    result["stories"] = [BOS + s + END_OF_TEXT for s in retold]
    result["chat"] = [render(c) for c in conversations(stories, plays, seed, CHAT_ROUNDS)]
    return result


def encode(tokenizer: Tokenizer, texts: list[str], seed: int) -> Source:
    parts, lengths = [], []
    for first in range(0, len(texts), 2000):
        for encoding in tokenizer.encode_batch_fast(texts[first : first + 2000], add_special_tokens=False):
            parts.append(np.array(encoding.ids, np.uint16))
            lengths.append(len(parts[-1]))
    return Source(np.concatenate(parts), np.concatenate([[0], np.cumsum(lengths)]), seed)


def prepare(
    corpora_root: Path,
    cache: Path,
    vocab_size: int,
    seed: int,
    weights: dict[str, float] = WEIGHTS,
    tokenizer_file: Path | None = None,
) -> tuple[Tokenizer, Mixture, dict[str, str]]:
    """Tokenizer (trained, unless one is given), training rows and validation texts; made once and kept in `cache`."""
    file = cache / "tokens.npz"
    if not file.exists():
        cache.mkdir(parents=True, exist_ok=True)
        corpora = read_corpora(corpora_root)
        sample = [s for name, split in corpora.items() for s in split.train[:: 10 if name == "novels" else 1]]
        sample += 2 * corpora["stories"].train  # what the model mostly writes is to be the shortest in tokens
        if tokenizer_file:
            tokenizer = Tokenizer.from_file(str(tokenizer_file))
        else:
            tokenizer = train_tokenizer(sample, vocab_size)
        if "python" in weights:
            corpora["python"] = every(python_files(corpora_root), 60)
        tokenizer.save(str(cache / "tokenizer.json"))
        arrays = {}
        for i, (name, texts) in enumerate(documents(corpora, seed).items()):
            source = encode(tokenizer, texts, seed + i)
            arrays[f"{name}.tokens"], arrays[f"{name}.starts"] = source.tokens, source.starts
        for name, split in corpora.items():
            (cache / f"validation_{name}.txt").write_text("\n\n".join(split.validation), encoding="utf-8")
        np.savez(file, **arrays)
    tokenizer = Tokenizer.from_file(str(cache / "tokenizer.json"))
    arrays = dict(np.load(file))
    names = list(dict.fromkeys(key.split(".")[0] for key in arrays))
    sources = {n: Source(arrays[f"{n}.tokens"], arrays[f"{n}.starts"], seed + i) for i, n in enumerate(names)}
    validation = {
        p.stem.removeprefix("validation_"): p.read_text("utf-8") for p in sorted(cache.glob("validation_*.txt"))
    }
    return tokenizer, Mixture(sources, seed, weights), validation
