"""`Tokenizer` turns text into token ids and back; `DetokenizeStream` turns ids into text as they come.

Each token stands for bytes, which depend only on whether it is the first token. The text is all these bytes, decoded as
UTF-8, with U+FFFD for ill-formed ones. So the text of a stream is always a prefix of the result of `decode` for all
tokens. Finds stop strings. Knows no HTTP, no engine, no tensors; called by the server's routes, `LLM`
and `AsyncLLM`. `tokenizer_files` and `tokenizer_gguf` read the files of tokenizers.
"""

from __future__ import annotations

import codecs
import contextlib
import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from tokenizers import AddedToken, processors

from headrace.protocol.errors import CheckpointError, NativeCallError, RequestError
from headrace.protocol.params import SamplingParams
from headrace.text import tokenizer_files, tokenizer_gguf
from headrace.text.stops import StopFinder
from headrace.text.templates import ChatTemplate
from headrace.text.tokenizer_bytes import TokenizerFile, byte_letters, side_file
from headrace.text.tokenizer_sides import (
    ROLES,
    add_listed,
    added_token,
    chat_templates,
    listed_as_special,
    named_tokens,
    text_of,
)

# A text of at least so many characters is encoded as a batch of one: only the call for batches releases the
# interpreter's lock, so that other threads run while a megabyte is tokenised.
LONG_TEXT = 4096
MAX_GAPS = 2**20
"""The most unused ids between the ids of tokens; each takes eight bytes."""


@contextlib.contextmanager
def native(what: str) -> Iterator[None]:
    """Raise `NativeCallError` for a panic of native code in the block; a panic is not an `Exception`."""
    try:
        yield
    except BaseException as error:
        # pyo3 has another class of panics in each library.
        if type(error).__name__ != "PanicException":
            raise
        raise NativeCallError(f"{what} broke down over this input") from error


class Tokenizer:
    """A model's tokenizer, with the ids of its special tokens and its chat templates.

    `special_tokens` maps bos_token, eos_token, image_token ... to their text, for templates. `chat_templates` has the
    default
    template under "default"; some models have a second one, "tool_use".
    """

    def __init__(self, file: TokenizerFile, config: dict[str, Any], chat_templates: dict[str, str]) -> None:
        """`config` is the contents of tokenizer_config.json, which override the tokenizer's own file."""
        self._tokenizer = file.tokenizer
        if hasattr(model := self._tokenizer.model, "_resize_cache"):
            # All callers would share its cache of words, and one could time another's text by it (S-24). It saves
            # nothing on plain text.
            model._resize_cache(0)
        self.chat_templates = chat_templates
        self.response_template: Any = config.get("response_template")
        """The template by which transformers reads the model's answers (see `tools.response_templates`); None: there is
        none."""
        texts = {role: text_of(config.get(role)) for role in ROLES}
        texts["bos_token"] = texts["bos_token"] or file.bos_token
        texts["eos_token"] = texts["eos_token"] or file.eos_token
        self.special_tokens: dict[str, str] = {
            role: text for role, text in {**named_tokens(config), **texts}.items() if text
        }
        self._add_tokens(config)
        self.bos_token_id, self.eos_token_id, self.unk_token_id, self.pad_token_id = (
            self._role_id(role) for role in ROLES[:4]
        )
        self.begin_of_chats = ""
        """Text that goes before a rendered chat which does not begin with it."""
        self._set_ends(file, config)
        self._added = {i: token.content for i, token in self._tokenizer.get_added_tokens_decoder().items()}
        self._special |= {i for i, token in self._tokenizer.get_added_tokens_decoder().items() if token.special}
        vocab = self._tokenizer.get_vocab(with_added_tokens=True)
        self.vocab_size = max(vocab.values()) + 1
        if self.vocab_size > len(vocab) + MAX_GAPS:
            raise CheckpointError(
                f"a token has the id {self.vocab_size - 1}; {len(vocab)} tokens leave at most {MAX_GAPS} ids unused"
            )
        self.max_token_bytes = tokenizer_files.max_token_bytes(self._tokenizer, vocab)
        """The most bytes of a text that one token stands for; None where the number is not known."""
        decoder = self._tokenizer.decoder
        self._bytes_of = _bytes_of(None if decoder is None else json.loads(decoder.__getstate__()))
        self._inner: list[bytes | None] = [None] * self.vocab_size

    @classmethod
    def load(cls, path: Path | str) -> Tokenizer:
        """Load the tokenizer of a model's directory, or of a file.

        Raises `CheckpointError` if there is none, if it is not supported, or if it is larger than 64 MiB (except for a
        GGUF file, of which the tokenizer is only a part).
        """
        path = Path(path)
        if path.suffix == ".gguf" and path.is_file():
            return tokenizer_files.guarded(lambda file: cls(*tokenizer_gguf.read(file)), path)
        directory = path if path.is_dir() else path.parent
        file = tokenizer_files.read(path)
        config = side_file(directory / "tokenizer_config.json")
        for role, text in side_file(directory / "special_tokens_map.json").items():
            config.setdefault(role, text)
        if not file.is_whole:
            add_listed(config, side_file(directory / "added_tokens.json"))
        implied = {} if file.chat_template is None else {"default": file.chat_template}
        return tokenizer_files.guarded(
            lambda folder: cls(file, config, chat_templates(folder, config) or implied), directory
        )

    @classmethod
    def load_if_present(cls, path: Path | str) -> Tokenizer | None:
        """Load as `load` does, or return None for a directory without a tokenizer: such a model takes token ids."""
        return cls.load(path) if tokenizer_files.present(Path(path)) else None

    def is_same(self, other: Tokenizer) -> bool:
        """Return whether another tokenizer and its chat templates give the same results. May take a while."""
        mine, theirs = ((t.special_tokens, t.chat_templates, t.response_template) for t in (self, other))
        return mine == theirs and bool(self._tokenizer.to_str() == other._tokenizer.to_str())

    @property
    def chat_template(self) -> str | None:
        """The default chat template, a Jinja source, or None."""
        return self.chat_templates.get("default")

    def apply_chat_template(
        self,
        conversation: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None = None,
        chat_template: str | None = None,
        add_generation_prompt: bool = False,
        continue_final_message: bool = False,
        tokenize: bool = True,
        **kwargs: Any,
    ) -> str | list[int]:
        """Return a conversation as token ids, or as text without `tokenize`; the signature is transformers'.

        Raises `RequestError` if the model has no template or the messages do not fit it.
        """
        text = ChatTemplate.of(self, chat_template).render(
            list(conversation),
            tools,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
            **kwargs,
        )
        return self.encode(text, add_special_tokens=False) if tokenize else text

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Return the token ids of `text`; with `add_special_tokens` between the model's begin (and end) of text.

        Raises `RequestError` for text with lone surrogates, which no tokenizer takes, and for text without tokens in
        this vocabulary; and `NativeCallError`.
        """
        try:
            return self._encode(text, add_special_tokens)
        except (UnicodeEncodeError, TypeError):
            raise RequestError("text", text, "Unicode text without lone surrogates") from None
        except Exception as error:
            # `tokenizers` raises bare exceptions, as for a word that a vocabulary without an unknown token lacks.
            if type(error) is not Exception:
                raise
            raise RequestError("text", text, f"text that the model has tokens for ({error})") from error

    def _encode(self, text: str, add_special_tokens: bool) -> list[int]:
        with native("the tokenizer"):
            if len(text) < LONG_TEXT:
                ids: list[int] = self._tokenizer.encode(text, add_special_tokens=add_special_tokens).ids
            else:
                [encoding] = self._tokenizer.encode_batch_fast([text], add_special_tokens=add_special_tokens)
                ids = encoding.ids
            return ids

    def decode(
        self, token_ids: Sequence[int], skip_special_tokens: bool = True, spaces_between_special_tokens: bool = True
    ) -> str:
        """Return the text of `token_ids`, from the start of a text on. Unknown ids add no text."""
        reader = TokenBytes(self, skip_special_tokens, spaces_between_special_tokens)
        return b"".join(map(reader.read, token_ids)).decode("utf-8", "replace")

    def token_text(self, token_id: int) -> tuple[str, list[int]]:
        """Return the contribution of one token inside a text, for lists of log-probabilities: its text, and its exact
        bytes.

        A token that is part of a character has U+FFFD in its text.
        """
        data = self.token_bytes(token_id)
        return data.decode("utf-8", "replace"), list(data)

    def token_bytes(self, token_id: int, first: bool = False) -> bytes:
        """Return the bytes of a token, inside a text or as its `first` token."""
        if not 0 <= token_id < self.vocab_size:
            return b""
        if not first and (data := self._inner[token_id]) is not None:
            return data
        with native("the tokenizer"):
            token = self._tokenizer.id_to_token(token_id)
        data = b"" if token is None else self._bytes_of(token, first, token_id in self._added)
        if not first:
            self._inner[token_id] = data
        return data

    def id_to_token(self, token_id: int) -> str | None:
        """Return the token as the vocabulary spells it, or None."""
        with native("the tokenizer"):
            token: str | None = self._tokenizer.id_to_token(token_id) if 0 <= token_id < 2**32 else None
        return token

    def token_to_id(self, token: str) -> int | None:
        with native("the tokenizer"):
            token_id: int | None = self._tokenizer.token_to_id(token)
        return token_id

    def is_special(self, token_id: int) -> bool:
        """Return whether `skip_special_tokens` leaves this token out."""
        return token_id in self._special

    def special_ids(self) -> dict[str, int]:
        """Return the ids of the tokens that `skip_special_tokens` leaves out, by their texts."""
        return {self._added[token_id]: token_id for token_id in self._special}

    def added_token(self, token_id: int) -> str | None:
        """Return the text of a token that was added to the vocabulary (as special tokens are), else None."""
        return self._added.get(token_id)

    def to_json(self) -> str:
        """Return the tokenizer in the format of tokenizer.json, without roles and templates."""
        text: str = self._tokenizer.to_str()
        return text

    def _role_id(self, role: str) -> int | None:
        text = self.special_tokens.get(role)
        return None if text is None else self.token_to_id(text)

    def _add_tokens(self, config: dict[str, Any]) -> None:
        """Add the tokens of tokenizer_config.json that the tokenizer's own file lacks, at the ids of
        tokenizer_config.json, whose flags count for the others too. Tokens of the vocabulary that have a role are
        special, as in transformers."""
        listed = config.get("added_tokens_decoder") or {}
        if not isinstance(listed, dict):
            raise CheckpointError("tokenizer_config.json: added_tokens_decoder is not an object")
        roles = {text: AddedToken(text, special=True) for text in self.special_tokens.values()}
        present = self._tokenizer.get_added_tokens_decoder()
        # What the file marks as special stays so.
        self._special = {token_id for token_id, token in present.items() if token.special}
        tokens = {int(token_id): added_token(entry) for token_id, entry in listed.items()} or present
        # Where both name a token for an id, the file's counts.
        tokens = {i: tokens[i] for i in sorted(tokens) if i not in present or present[i].content == tokens[i].content}
        for token in tokens.values():
            token.special = token.special or token.content in roles
        self._tokenizer.add_tokens(list(tokens.values()))
        for token_id, token in tokens.items():
            if self.token_to_id(token.content) != token_id:
                raise CheckpointError(
                    f"tokenizer_config.json puts {token.content!r} at {token_id}, "
                    f"but the tokenizer has it at {self.token_to_id(token.content)}"
                )
        known = {token.content for token in self._tokenizer.get_added_tokens_decoder().values()}
        roles |= listed_as_special(config)
        in_vocabulary = [text for text in roles if text not in known and self.token_to_id(text) is not None]
        self._tokenizer.add_tokens([roles[text] for text in in_vocabulary])

    def _set_ends(self, file: TokenizerFile, config: dict[str, Any]) -> None:
        """Make `encode` add begin and end of text as the tokenizer's file does, or where that file is not whole by
        tokenizer_config.json (as transformers has it)."""
        if file.is_whole:
            return
        ids = self._tokenizer.encode("", add_special_tokens=True).ids
        adds_bos = bool(ids and ids[0] == self.bos_token_id) or file.adds_bos
        adds_eos = len(ids) > 0 and ids[-1] == self.eos_token_id and (len(ids) > 1 or not adds_bos)
        want_bos = config.get("add_bos_token", adds_bos) and self.bos_token_id is not None
        want_eos = config.get("add_eos_token", adds_eos) and self.eos_token_id is not None
        if file.begins_chats and want_bos:
            self.begin_of_chats = self.special_tokens["bos_token"]
        if (want_bos, want_eos) == (adds_bos and not file.adds_bos, adds_eos):
            return
        begin = [self.special_tokens["bos_token"]] if want_bos else []
        end = [self.special_tokens["eos_token"]] if want_eos else []
        self._tokenizer.post_processor = processors.TemplateProcessing(
            single=[*begin, "$A", *end], special_tokens=[(text, self.token_to_id(text)) for text in {*begin, *end}]
        )


class TextRules(NamedTuple):
    """The rules for the text of an answer that a parser reads. `kept_ids`: the special tokens that the parser removes
    itself; they alone stay in the text, whatever the parameters are; None: the parameters decide. `finds_stops`:
    whether stop strings are searched for in all of the text; otherwise the parser finds them."""

    kept_ids: frozenset[int] | None = None
    finds_stops: bool = True


class DetokenizeStream:
    """One sequence's text, in pieces that are final when they are returned.

    Bytes that do not end a character yet, and characters that may still become a stop string, are held back. The pieces
    together are `Tokenizer.decode` of all tokens, cut at a stop string. With `prompt_token_ids` the text continues the
    prompt's, so that a leading space is kept.

    The stop string that ends first counts (of several that end there, the longest), if it ends in a token after the
    first `min_tokens`. Then `stop_reason` is that string, `num_tokens` counts the tokens up to its end, and later
    tokens add no text.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        params: SamplingParams,
        prompt_token_ids: Sequence[int] = (),
        rules: TextRules = TextRules(),
    ) -> None:
        self.num_tokens = 0
        self._include = params.include_stop_str_in_output
        self._min_tokens = params.min_tokens
        skip = params.skip_special_tokens or rules.kept_ids is not None
        self._reader = TokenBytes(tokenizer, skip, params.spaces_between_special_tokens, rules.kept_ids)
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")
        self._stops = StopFinder(params.stop, self._include) if params.stop and rules.finds_stops else None
        self._ended = False
        # A character has four bytes at most, so only the last four tokens can leave one open.
        for token_id in prompt_token_ids[-4:]:
            self._utf8.decode(self._reader.read(token_id))
        self._reader.first = self._reader.first and not prompt_token_ids

    @property
    def stop_reason(self) -> str | None:
        """The stop string that has ended the text."""
        return None if self._stops is None else self._stops.reason

    def push(self, token_ids: Sequence[int], final: bool = False, stopped: bool = False) -> str:
        """Return the text that has become certain. `final`: no more tokens come, nothing is held back.

        `stopped`: the engine ended on the last of `token_ids` (end of text or a stop token), which is text only under
        `include_stop_str_in_output`.
        """
        if self._ended:
            raise ValueError("tokens were pushed to a stream that has ended")
        if stopped and not self._include:
            token_ids = token_ids[:-1]
        pieces = []
        for token_id in token_ids:
            if self.stop_reason is not None:
                break
            self.num_tokens += 1
            text = self._utf8.decode(self._reader.read(token_id))
            if text:
                pieces.append(self._certain(text))
        if final:
            self._ended = True
            if self.stop_reason is None:
                pieces.append(self._certain(self._utf8.decode(b"", True)))
                pieces.append("" if self._stops is None else self._stops.flush())
        return "".join(pieces)

    def _certain(self, text: str) -> str:
        """Return the text that cannot become a stop string any more, of this and of the text held back."""
        return text if self._stops is None else self._stops.push(text, self.num_tokens <= self._min_tokens)


class TokenBytes:
    """Turns a sequence's tokens into bytes, one by one, and keeps the state that a token's bytes depend on."""

    def __init__(
        self, tokenizer: Tokenizer, skip_special: bool, spaces_between: bool, kept_ids: frozenset[int] | None = None
    ) -> None:
        self.first = True
        self._kept_ids = kept_ids or frozenset()
        self._tokenizer = tokenizer
        self._skip_special = skip_special
        # As in vLLM, this has an effect only where special tokens are shown.
        self._spaces_between = spaces_between or skip_special
        self._after_added = False

    def read(self, token_id: int) -> bytes:
        tokenizer = self._tokenizer
        if self._skip_special and tokenizer.is_special(token_id) and token_id not in self._kept_ids:
            return b""
        if not self._spaces_between:
            added = tokenizer.added_token(token_id)
            joined = self._after_added and added is not None
            self._after_added = added is not None
            if joined and added is not None:
                return added.encode()
        data = tokenizer.token_bytes(token_id, self.first)
        if self.first and tokenizer.token_bytes(token_id):
            self.first = False
        return data


_BYTE = re.compile(r"<0x([0-9A-Fa-f]{2})>")
# `tokenizers`' WordPiece cleanup, which it applies to every token by itself.
_CLEANUP = [(" .", "."), (" ?", "?"), (" !", "!"), (" ,", ","), (" ' ", "'"), (" n't", "n't"), (" 'm", "'m")]
_CLEANUP += [(" do not", " don't"), (" 's", "'s"), (" 've", "'ve"), (" 're", "'re")]


def _bytes_of(spec: dict[str, Any] | None) -> Callable[[str, bool, bool], bytes]:
    """Return the function (token, whether it is the first, whether it was added) -> bytes of a "decoder".

    Only the steps at the start of a text depend on more than one token. `tokenizers` itself differs
    in one point: it turns a whole run of byte tokens into U+FFFD where a part of it is ill-formed.
    """
    steps: list[dict[str, Any]] = []

    def flatten(step: dict[str, Any]) -> None:
        if step["type"] == "Sequence":
            for inner in step["decoders"]:
                flatten(inner)
        else:
            steps.append(step)

    if spec is not None:
        flatten(spec)
    kinds = [step["type"] for step in steps]
    known = {"Replace", "ByteFallback", "Fuse", "Strip", "Metaspace", "ByteLevel", "WordPiece"}
    if not known.issuperset(kinds) or any(s["type"] == "Replace" and "String" not in s["pattern"] for s in steps):
        raise CheckpointError(f"tokenizer.json: a decoder of {', '.join(kinds)} is not supported")
    letters = {letter: byte for byte, letter in enumerate(byte_letters())}

    def bytes_of(token: str, first: bool, added: bool) -> bytes:
        if spec is None:
            return (token if first else " " + token).encode()
        data: bytes | None = None
        strip = b""
        for step in steps:
            kind = step["type"]
            if kind == "Replace":
                token = token.replace(step["pattern"]["String"], step["content"])
            elif kind == "ByteFallback":
                match = _BYTE.fullmatch(token)
                data = bytes([int(match[1], 16)]) if match else None
            elif kind == "Strip" and first:
                strip = step["content"].encode() * step["start"]
            elif kind == "Metaspace":
                drop = first and step.get("prepend_scheme", "always") != "never"
                token = token.replace(step["replacement"], "" if drop else " ")
            elif kind == "ByteLevel" and all(letter in letters for letter in token):
                data = bytes(letters[letter] for letter in token)
                # An added token may be spelled as it stands.
                data = None if added and not _is_utf8(data) else data
            elif kind == "WordPiece":
                if not first:
                    token = token.removeprefix(step["prefix"]) if token.startswith(step["prefix"]) else " " + token
                for long, short in _CLEANUP if step["cleanup"] else ():
                    token = token.replace(long, short)
        return (token.encode() if data is None else data).removeprefix(strip)

    return bytes_of


def _is_utf8(data: bytes) -> bool:
    try:
        data.decode("utf-8")
    except UnicodeDecodeError:
        return False
    return True
