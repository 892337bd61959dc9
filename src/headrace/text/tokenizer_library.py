"""A tokenizer as the library `tokenizers` has it: its plain data (`Lexicon`), and its face for text (`Coder`).

`build` puts the contents of the files together: the tokens that tokenizer_config.json adds, their flags, begin and end
of text. Knows no streams and no requests; called by `tokenizer.Tokenizer` and `tokenizer_sandbox`.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Protocol

import msgspec
import tokenizers
from tokenizers import AddedToken, processors

from headrace.gguf import MAX_TOKEN_BYTES
from headrace.protocol.errors import CheckpointError
from headrace.text import tokenizer_files, tokenizer_gguf
from headrace.text.bounded import BoundedProcess
from headrace.text.tokenizer_bytes import TokenizerFile, side_file
from headrace.text.tokenizer_sides import (
    ROLES,
    add_listed,
    added_token,
    chat_templates,
    listed_as_special,
    named_tokens,
    text_of,
)

MAX_GAPS = 2**20
"""The most unused ids between the ids of tokens; each takes eight bytes."""


class PairForm(msgspec.Struct):
    """How a tokenizer joins two texts: the ids of its own tokens before, between and after them. has_types: whether the
    second text and what comes after it have a type of their own (Devlin et al. 2019, section 3.2, "segment")."""

    before: list[int]
    between: list[int]
    after: list[int]
    has_types: bool


class Lexicon(msgspec.Struct):
    """The plain data of a tokenizer.

    Attributes:
        special_tokens: the texts of bos_token, eos_token, image_token ..., for templates.
        chat_templates: the default template under "default"; some models have a second one, "tool_use".
        response_template: the template by which transformers reads the model's answers (see
            `tools.response_templates`); None: there is none.
        begin_of_chats: text that goes before a rendered chat which does not begin with it.
        added: the texts of the tokens that were added to the vocabulary, by their ids.
        special: the ids that `skip_special_tokens` leaves out.
        max_token_bytes: the most bytes of a text that one token stands for; None where the number is not known.
        decoder: the steps that turn tokens into text, as in tokenizer.json.
        pair_form: None where two texts are joined in a way that is not known here.
    """

    special_tokens: dict[str, str]
    chat_templates: dict[str, str]
    response_template: Any
    begin_of_chats: str
    added: dict[int, str]
    special: set[int]
    vocab_size: int
    max_token_bytes: int | None
    decoder: Any
    pair_form: PairForm | None = None


class Coder(Protocol):
    """Turns text into token ids. `process`: the process in which it does so; None: it does so here."""

    @property
    def process(self) -> BoundedProcess | None: ...

    def encode(self, text: str, add_special_tokens: bool) -> list[int]: ...

    def id_to_token(self, token_id: int) -> str | None: ...

    def token_to_id(self, token: str) -> int | None: ...

    def to_json(self) -> str: ...


class LibraryCoder:
    """Turns text into token ids in this process. A text of `long_text` characters is encoded as a batch of one: only
    the call for batches releases the interpreter's lock, so that other threads run while a megabyte is tokenised."""

    process: BoundedProcess | None = None

    def __init__(self, library: tokenizers.Tokenizer) -> None:
        self.library = library
        self.long_text = 4096

    def encode(self, text: str, add_special_tokens: bool) -> list[int]:
        if len(text) < self.long_text:
            ids: list[int] = self.library.encode(text, add_special_tokens=add_special_tokens).ids
        else:
            [encoding] = self.library.encode_batch_fast([text], add_special_tokens=add_special_tokens)
            ids = encoding.ids
        return ids

    def id_to_token(self, token_id: int) -> str | None:
        token: str | None = self.library.id_to_token(token_id)
        return token

    def token_to_id(self, token: str) -> int | None:
        token_id: int | None = self.library.token_to_id(token)
        return token_id

    def to_json(self) -> str:
        text: str = self.library.to_str()
        return text


def load(path: Path) -> tuple[Lexicon, LibraryCoder]:
    """Load the tokenizer of a model's directory, or of a file; see `Tokenizer.load`."""
    return tokenizer_files.guarded(_load, path)


def _load(path: Path) -> tuple[Lexicon, LibraryCoder]:
    if path.suffix == ".gguf" and path.is_file():
        return build(*tokenizer_gguf.read(path))
    directory = path if path.is_dir() else path.parent
    file = tokenizer_files.read(path)
    config = side_file(directory / "tokenizer_config.json")
    for role, text in side_file(directory / "special_tokens_map.json").items():
        config.setdefault(role, text)
    if not file.is_whole:
        add_listed(config, side_file(directory / "added_tokens.json"))
    implied = {} if file.chat_template is None else {"default": file.chat_template}
    return build(file, config, chat_templates(directory, config) or implied)


def build(file: TokenizerFile, config: dict[str, Any], templates: dict[str, str]) -> tuple[Lexicon, LibraryCoder]:
    """Return the tokenizer of a file. `config` is the contents of tokenizer_config.json, which override the file's."""
    library = file.tokenizer
    if hasattr(model := library.model, "_resize_cache"):
        # All callers would share its cache of words, and one could time another's text by it (S-24). It saves
        # nothing on plain text.
        model._resize_cache(0)
    if getattr(model, "dropout", None):
        # BPE-dropout (Provilkov et al. 2020, section 3.2) draws other tokens for the same text each time: for training.
        model.dropout = None
    texts = {role: text_of(config.get(role)) for role in ROLES}
    texts["bos_token"] = texts["bos_token"] or file.bos_token
    texts["eos_token"] = texts["eos_token"] or file.eos_token
    special_tokens = {role: text for role, text in {**named_tokens(config), **texts}.items() if text}
    special = _add_tokens(library, config, special_tokens)
    begin_of_chats = "" if file.is_whole else _set_ends(file, config, special_tokens)
    added = library.get_added_tokens_decoder()
    vocab = library.get_vocab(with_added_tokens=True)
    vocab_size = max(vocab.values()) + 1
    if vocab_size > len(vocab) + MAX_GAPS:
        raise CheckpointError(
            f"a token has the id {vocab_size - 1}; {len(vocab)} tokens leave at most {MAX_GAPS} ids unused"
        )
    if (longest := max(len(token.encode()) for token in vocab)) > MAX_TOKEN_BYTES:
        raise CheckpointError(f"a token has {longest} bytes; at most {MAX_TOKEN_BYTES} are read")
    decoder = library.decoder
    lexicon = Lexicon(
        special_tokens=special_tokens,
        chat_templates=templates,
        response_template=config.get("response_template"),
        begin_of_chats=begin_of_chats,
        added={i: token.content for i, token in added.items()},
        special=special | {i for i, token in added.items() if token.special},
        vocab_size=vocab_size,
        max_token_bytes=tokenizer_files.max_token_bytes(library, vocab),
        decoder=None if decoder is None else json.loads(decoder.__getstate__()),
        pair_form=_pair_form(library),
    )
    return lexicon, LibraryCoder(library)


def _pair_form(library: tokenizers.Tokenizer) -> PairForm | None:
    """Read off the encoding of a pair how the tokenizer joins two texts."""
    try:
        pair = library.encode("a", "a")
    except Exception as error:
        # `tokenizers` raises bare exceptions, as for a word that a vocabulary without an unknown token lacks.
        if type(error) is not Exception:
            raise
        return None
    ids, sides, types = pair.ids, pair.sequence_ids, pair.type_ids
    if 0 not in sides or 1 not in sides:
        return None
    first, second = sides.index(0), sides.index(1)
    first_end, second_end = (len(sides) - sides[::-1].index(side) for side in (0, 1))
    if first_end > second or set(types[:second]) != {0} or len(set(types[second:])) > 1:
        return None
    return PairForm(ids[:first], ids[first_end:second], ids[second_end:], types[-1] == 1)


def _add_tokens(library: tokenizers.Tokenizer, config: dict[str, Any], special_tokens: dict[str, str]) -> set[int]:
    """Add the tokens of tokenizer_config.json that the tokenizer's own file lacks, at the ids of
    tokenizer_config.json, whose flags count for the others too. Tokens of the vocabulary that have a role are
    special, as in transformers. Return the ids that the file marks as special: they stay so."""
    listed = config.get("added_tokens_decoder") or {}
    if not isinstance(listed, dict):
        raise CheckpointError("tokenizer_config.json: added_tokens_decoder is not an object")
    roles = {text: AddedToken(text, special=True) for text in special_tokens.values()}
    present = library.get_added_tokens_decoder()
    special = {token_id for token_id, token in present.items() if token.special}
    tokens = {int(token_id): added_token(entry) for token_id, entry in listed.items()} or present
    # Where both name a token for an id, the file's counts.
    tokens = {i: tokens[i] for i in sorted(tokens) if i not in present or present[i].content == tokens[i].content}
    for token in tokens.values():
        token.special = token.special or token.content in roles
    library.add_tokens(list(tokens.values()))
    for token_id, token in tokens.items():
        if library.token_to_id(token.content) != token_id:
            raise CheckpointError(
                f"tokenizer_config.json puts {token.content!r:.80} at {token_id}, "
                f"but the tokenizer has it at {library.token_to_id(token.content)}"
            )
    known = {token.content for token in library.get_added_tokens_decoder().values()}
    roles |= listed_as_special(config)
    in_vocabulary = [text for text in roles if text not in known and library.token_to_id(text) is not None]
    library.add_tokens([roles[text] for text in in_vocabulary])
    return special


def _set_ends(file: TokenizerFile, config: dict[str, Any], special_tokens: dict[str, str]) -> str:
    """Make the tokenizer of a file that is not whole add begin and end of text by tokenizer_config.json (as
    transformers has it). Return the text that goes before rendered chats."""
    library = file.tokenizer
    bos, eos = (special_tokens.get(role) for role in ("bos_token", "eos_token"))
    bos_id, eos_id = (None if text is None else library.token_to_id(text) for text in (bos, eos))
    ids = library.encode("", add_special_tokens=True).ids
    adds_bos = bool(ids and ids[0] == bos_id) or file.adds_bos
    adds_eos = len(ids) > 0 and ids[-1] == eos_id and (len(ids) > 1 or not adds_bos)
    want_bos = config.get("add_bos_token", adds_bos) and bos_id is not None
    want_eos = config.get("add_eos_token", adds_eos) and eos_id is not None
    if (want_bos, want_eos) != (adds_bos and not file.adds_bos, adds_eos):
        begin = [bos] if want_bos else []
        end = [eos] if want_eos else []
        library.post_processor = processors.TemplateProcessing(
            single=[*begin, "$A", *end],
            special_tokens=[(text, library.token_to_id(text)) for text in {*begin, *end} if text is not None],
        )
    return bos if file.begins_chats and want_bos and bos is not None else ""
