"""Compares the tokenizers of two models, of which one reads the other's token ids. Knows no weights; called by
`engine.library.load` for a draft model.
"""

from __future__ import annotations

from pathlib import Path

from headrace.protocol.errors import CheckpointError
from headrace.text import bounded_tokenizer

MAX_SHARE = 100
"""Of so many ids one may stand for another token: reserved tokens get new names from one version to the next."""


def check(path: Path, draft_path: Path) -> bool:
    """Raise `CheckpointError` unless the ids of two tokenizers stand for the same tokens, as far as both have them.
    Return False where one of the models has no tokenizer."""
    draft = bounded_tokenizer.load_if_present(draft_path)
    target = None if draft is None else bounded_tokenizer.load_if_present(path)
    for tokenizer in (draft, target):
        if tokenizer is not None:
            # Its lexicon is enough.
            tokenizer.close()
    if target is None or draft is None:
        return False
    shared = [
        (token_id, mine, theirs)
        for token_id in range(min(target.vocab_size, draft.vocab_size))
        if (mine := target.id_to_token(token_id)) is not None and (theirs := draft.id_to_token(token_id)) is not None
    ]
    unlike = [each for each in shared if each[1] != each[2]]
    if len(unlike) * MAX_SHARE > len(shared):
        token_id, mine, theirs = unlike[0]
        raise CheckpointError(
            f"{draft_path} has another tokenizer than {path}: {len(unlike)} of {len(shared)} token ids stand for other "
            f"tokens, such as {token_id}, for {theirs!r:.80} in place of {mine!r:.80}. A draft model must have the "
            "tokenizer of the model it guesses for"
        )
    return True
