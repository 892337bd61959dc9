"""The tokenizer as a benchmark needs it: lengths of texts, and ids that are not special. Imports `tokenizers`."""

from __future__ import annotations

from pathlib import Path

from headrace import hub
from headrace.protocol.errors import HeadraceError


class Words:
    """Token counts and ids of one model's tokenizer.json, or of a GGUF file's tokenizer."""

    def __init__(self, path: str) -> None:
        if path.endswith(".gguf"):
            from headrace.text import tokenizer_gguf

            self._tokenizer = tokenizer_gguf.read(Path(path))[0].tokenizer
            return
        from tokenizers import Tokenizer

        self._tokenizer = Tokenizer.from_file(path)

    @classmethod
    def find(cls, model: str) -> Words:
        """The tokenizer of a directory, a GGUF file, a hub id or 'builtin'. Raises `HeadraceError` if it has none."""
        path = hub.resolve(model, weights=False)
        path = path if path.is_file() else path / "tokenizer.json"
        if not path.is_file():
            raise HeadraceError(f"{path} is missing; name a tokenizer with --tokenizer")
        return cls(str(path))

    @property
    def vocab_size(self) -> int:
        return int(self._tokenizer.get_vocab_size(with_added_tokens=True))

    @property
    def special_ids(self) -> frozenset[int]:
        return frozenset(self._tokenizer.get_added_tokens_decoder())

    def encode(self, text: str) -> list[int]:
        return list(self._tokenizer.encode(text).ids)

    def decode(self, token_ids: list[int]) -> str:
        return str(self._tokenizer.decode(token_ids))

    def count(self, text: str) -> int:
        return len(self.encode(text))
