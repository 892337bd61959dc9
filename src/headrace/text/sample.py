"""The sample: a short chat in a model's own template, as tokens, on which the model is judged when it is loaded.

The words are this project's own: prose, code, and a question with its answer. Knows tokenizers and templates; must not
know models. Called by `engine.library.load`, and by `cli.bench` for the forms of a model.
"""

from __future__ import annotations

import functools
import hashlib
import logging
from contextlib import closing
from pathlib import Path

from headrace.protocol.errors import HeadraceError, RequestError
from headrace.text import bounded_tokenizer
from headrace.text.templates import ChatTemplate, new_process
from headrace.text.tokenizer import Tokenizer

CHAT = (
    ("user", "Why do leaves turn yellow in autumn?"),
    (
        "assistant",
        "In autumn the days grow short, and a tree stops making the green pigment that catches sunlight. The yellow "
        "that was there all summer shows through.",
    ),
    ("user", "Write a Python function that adds up a list."),
    (
        "assistant",
        "```python\ndef total(numbers):\n    result = 0\n    for number in numbers:\n        result += number\n"
        "    return result\n```\nIt starts from zero and adds one number after the other.",
    ),
)
SIDE_FILES = ("*token*.json", "tokenizer.*", "vocab.json", "merges.txt", "encoder.json", "*chat_template*", "*/*.jinja")
"""Files that decide how the sample reads."""

logger = logging.getLogger(__name__)


def mark(path: Path) -> str:
    """Return a digest of the files beside a model's weights that decide its tokens; "file" for a GGUF file."""
    if path.is_file():
        return "file"
    files = {file for pattern in SIDE_FILES for file in path.glob(pattern) if file.is_file()}
    digest = hashlib.sha256()
    for file in sorted(files):
        digest.update(file.name.encode() + b"\0" + hashlib.sha256(file.read_bytes()).digest())
    return digest.hexdigest()[:16]


def token_ids(path: Path) -> list[int]:
    """Return the tokens of the sample by the tokenizer in a model's directory or file; none if it has no tokenizer, or
    one that is not read, with a warning."""
    return list(_token_ids(path, mark(path), path.stat().st_mtime_ns))


@functools.lru_cache(8)
def _token_ids(path: Path, _mark: str, _time: int) -> tuple[int, ...]:
    try:
        tokenizer = bounded_tokenizer.load_if_present(path)
        if tokenizer is None:
            return ()
        with closing(tokenizer):
            return tuple(encoded(tokenizer))
    except HeadraceError as error:
        logger.warning("int8 activations are judged on fixed tokens, as the tokenizer is not read: %s", error)
        return ()


def encoded(tokenizer: Tokenizer) -> list[int]:
    """Return the tokens of the sample: a chat, or its texts where the model has no template, or one that takes no such
    chat."""
    if tokenizer.chat_template is not None:
        with closing(new_process()) as process:
            try:
                chat = [{"role": role, "content": text} for role, text in CHAT]
                rendered = ChatTemplate.of(tokenizer, None, process).render(chat, add_generation_prompt=False)
                return tokenizer.encode(rendered, add_special_tokens=False)
            except RequestError as error:
                logger.info("int8 activations are judged on plain text, as the template takes no chat: %s", error)
    return tokenizer.encode("\n\n".join(text for _, text in CHAT))
