"""Loads the tokenizer of a user's model: what its text goes through runs in a process of bounded time and memory.

The files are first loaded in such a process, by the program `tokenizer_sandbox`, so that those which take too much are
refused in words. A plain tokenizer (see `tokenizer_plain`) is then loaded here too, and the process ends. Of any other
one only the lexicon comes here, and the process encodes all of its text. Called by the server, `AsyncLLM` and the
engine; `LLM` and the commands load what their user names into their own process (`Tokenizer.load`).
"""

from __future__ import annotations

import logging
from pathlib import Path

import msgspec

from headrace import hub
from headrace.protocol.errors import CheckpointError, HeadraceError, RequestError
from headrace.text import tokenizer_files, tokenizer_library
from headrace.text.bounded import BoundedProcess
from headrace.text.tokenizer import Tokenizer
from headrace.text.tokenizer_library import Lexicon
from headrace.text.tokenizer_plain import oddity, spec_of

logger = logging.getLogger("headrace.server")

MAX_CPU_SECONDS = 2.0
"""Processor time for one text; a megabyte takes half a second."""
MAX_LOAD_SECONDS = 20.0
MAX_LOAD_MEMORY = 2 * 2**30
"""Bytes of address space for loading; 256,000 tokens in 24 MiB of JSON take a fifth."""
MAX_MEMORY = 2**30
"""Bytes of address space for texts, in addition to the loaded tokenizer's."""
SANDBOX = "headrace.text.tokenizer_sandbox"


class Greeting(msgspec.Struct):
    """The files of a tokenizer. `digest`: of the tokenizer that they held before; a process that is started again
    answers with no other."""

    path: str
    digest: bytes | None = None


class Load(msgspec.Struct, tag=True):
    """Asks for `Loaded`."""


class Encode(msgspec.Struct, tag=True):
    """Asks for `Encoded`."""

    text: str
    add_special_tokens: bool


class Export(msgspec.Struct, tag=True):
    """Asks for the tokenizer as a tokenizer.json."""


Job = Load | Encode | Export


class Loaded(msgspec.Struct):
    """The tokenizer in the files. `refusal`: the reason why it can not be loaded, and `oddity`: the name of the part
    that is not plain; a plain tokenizer has no further data here. `ids`: by tokens; `spellings`: the tokens by their
    ids, where they are spelled otherwise."""

    refusal: str | None = None
    oddity: str | None = None
    digest: bytes = b""
    lexicon: Lexicon | None = None
    ids: dict[str, int] = {}
    spellings: dict[int, str | None] = {}


class Encoded(msgspec.Struct):
    """The ids of a text, or in `bound` the reason why it has none, in the words of a `RequestError`; or the tokenizer
    as `json`. `fault`: the process has not the tokenizer that it should have."""

    token_ids: list[int] = []
    bound: str | None = None
    json: str = ""
    fault: str | None = None


class BoundedCoder:
    """Turns text into token ids in `process`."""

    def __init__(self, process: BoundedProcess, loaded: Loaded) -> None:
        self.process = process
        self._ids = loaded.ids
        self._tokens: dict[int, str | None] = {i: token for token, i in loaded.ids.items()}
        self._tokens |= loaded.spellings

    def encode(self, text: str, add_special_tokens: bool) -> list[int]:
        """Raises `RequestError` for a text that takes too much, and `ChildFailedError`."""
        reply = self.process.run(Encode(text, add_special_tokens), Encoded)
        if isinstance(reply, str):
            bound = (
                f"text for which the model's tokenizer needs at most {_bounds(MAX_CPU_SECONDS, MAX_MEMORY)}; {reply}"
            )
            raise RequestError("text", text, bound)
        if reply.fault is not None:
            raise HeadraceError(reply.fault)
        if reply.bound is not None:
            raise RequestError("text", text, reply.bound)
        return reply.token_ids

    def id_to_token(self, token_id: int) -> str | None:
        return self._tokens.get(token_id)

    def token_to_id(self, token: str) -> int | None:
        return self._ids.get(token)

    def to_json(self) -> str:
        reply = self.process.run(Export(), Encoded)
        if isinstance(reply, str) or reply.fault is not None:
            raise HeadraceError(
                f"the tokenizer can not be compared: {reply if isinstance(reply, str) else reply.fault}"
            )
        return reply.json


def load(path: Path) -> Tokenizer:
    """Load the tokenizer of a model's directory, or of a file, as `Tokenizer.load` does; `Tokenizer.process` encodes
    its text, unless the tokenizer is plain. Raises `CheckpointError` and `ChildFailedError`."""
    if path == hub.resolve("builtin", weights=False):
        return Tokenizer.load(path)
    greeting = Greeting(str(path))
    process = BoundedProcess(SANDBOX, MAX_CPU_SECONDS, lambda: msgspec.msgpack.encode(greeting))
    try:
        loaded = process.run(Load(), Loaded)
        if isinstance(loaded, str):
            bounds = _bounds(MAX_LOAD_SECONDS, MAX_LOAD_MEMORY)
            raise CheckpointError(f"{path}: the tokenizer can not be loaded with {bounds}: {loaded}")
        if loaded.refusal is not None:
            raise CheckpointError(loaded.refusal)
    except BaseException:
        process.close()
        raise
    if loaded.lexicon is None:
        process.close()
        lexicon, coder = tokenizer_library.load(path)
        if oddity(spec_of(coder.library), lexicon.max_token_bytes) is not None:
            raise CheckpointError(f"{path}: the tokenizer was changed while it was loaded")
        return Tokenizer(lexicon, coder)
    logger.info("%s: the tokenizer has %s: a process of its own encodes its text", path, loaded.oddity)
    greeting.digest = loaded.digest
    return Tokenizer(loaded.lexicon, BoundedCoder(process, loaded))


def load_if_present(path: Path) -> Tokenizer | None:
    """Load as `load` does, or return None for a directory without a tokenizer: such a model takes token ids."""
    return load(path) if tokenizer_files.present(path) else None


def _bounds(seconds: float, memory: int) -> str:
    return f"{seconds:g} s of processor time and {memory // 2**20:,} MiB of memory"
