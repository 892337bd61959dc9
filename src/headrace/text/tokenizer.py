"""`Tokenizer` turns text into token ids and back; `DetokenizeStream` turns ids into text as they come.

Each token stands for bytes, which depend only on whether it is the first token. The text is all these bytes, decoded as
UTF-8, with U+FFFD for ill-formed ones. So the text of a stream is always a prefix of the result of `decode` for all
tokens. Finds stop strings. Knows no HTTP, no engine, no tensors; called by the server's routes, `LLM`
and `AsyncLLM`. `tokenizer_library` builds them of their files.
"""

from __future__ import annotations

import codecs
import contextlib
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from headrace.protocol.errors import CheckpointError, NativeCallError, RequestError
from headrace.protocol.params import SamplingParams
from headrace.text import tokenizer_files, tokenizer_library
from headrace.text.bounded import BoundedProcess
from headrace.text.stops import StopFinder
from headrace.text.templates import ChatTemplate
from headrace.text.tokenizer_bytes import TokenizerFile, byte_letters
from headrace.text.tokenizer_library import Coder, Lexicon
from headrace.text.tokenizer_plain import MAX_GROWTH, MAX_LITERAL, MAX_STEPS, replacing
from headrace.text.tokenizer_sides import ROLES


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

    The attributes are those of `Lexicon`. `process`: the bounded process in which `encode` does its work; None: it does
    it here. All other methods work here, with the lexicon alone.
    """

    def __init__(self, lexicon: Lexicon, coder: Coder) -> None:
        self._coder = coder
        self.process: BoundedProcess | None = coder.process
        self.chat_templates = lexicon.chat_templates
        self.response_template = lexicon.response_template
        self.special_tokens = lexicon.special_tokens
        self.begin_of_chats = lexicon.begin_of_chats
        self.vocab_size = lexicon.vocab_size
        self.max_token_bytes = lexicon.max_token_bytes
        self.pair_form = lexicon.pair_form
        self.bos_token_id, self.eos_token_id, self.unk_token_id, self.pad_token_id = (
            self._role_id(role) for role in ROLES[:4]
        )
        self._added = lexicon.added
        self._special = lexicon.special
        self._bytes_of = _bytes_of(lexicon.decoder)
        self._inner: list[bytes | None] = [None] * self.vocab_size

    @classmethod
    def of(cls, file: TokenizerFile, config: dict[str, Any], chat_templates: dict[str, str]) -> Tokenizer:
        """Return the tokenizer of a file. `config` is the contents of tokenizer_config.json, which override the
        file's."""
        return cls(*tokenizer_library.build(file, config, chat_templates))

    @classmethod
    def load(cls, path: Path | str) -> Tokenizer:
        """Load the tokenizer of a model's directory, or of a file, into this process, whatever it does with text;
        `bounded_tokenizer.load` is for servers.

        Raises `CheckpointError` if there is none, if it is not supported, or if it is larger than 64 MiB (except for a
        GGUF file, of which the tokenizer is only a part).
        """
        return cls(*tokenizer_library.load(Path(path)))

    @classmethod
    def load_if_present(cls, path: Path | str) -> Tokenizer | None:
        """Load as `load` does, or return None for a directory without a tokenizer: such a model takes token ids."""
        return cls.load(path) if tokenizer_files.present(Path(path)) else None

    def is_same(self, other: Tokenizer) -> bool:
        """Return whether another tokenizer and its chat templates give the same results. May take a while."""
        mine, theirs = ((t.special_tokens, t.chat_templates, t.response_template) for t in (self, other))
        return mine == theirs and self.to_json() == other.to_json()

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
            with native("the tokenizer"):
                return self._coder.encode(text, add_special_tokens)
        except (UnicodeEncodeError, TypeError):
            raise RequestError("text", text, "Unicode text without lone surrogates") from None
        except Exception as error:
            # `tokenizers` raises bare exceptions, as for a word that a vocabulary without an unknown token lacks.
            if type(error) is not Exception:
                raise
            raise RequestError("text", text, f"text that the model has tokens for ({error})") from error

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
            token = self._coder.id_to_token(token_id)
        data = b"" if token is None else self._bytes_of(token, first, token_id in self._added)
        if not first:
            self._inner[token_id] = data
        return data

    def id_to_token(self, token_id: int) -> str | None:
        """Return the token as the vocabulary spells it, or None."""
        with native("the tokenizer"):
            return self._coder.id_to_token(token_id) if 0 <= token_id < 2**32 else None

    def token_to_id(self, token: str) -> int | None:
        with native("the tokenizer"):
            return self._coder.token_to_id(token)

    def is_special(self, token_id: int) -> bool:
        """Return whether `skip_special_tokens` leaves this token out."""
        return token_id in self._special

    def special_ids(self) -> dict[str, int]:
        """Return the ids of the tokens that `skip_special_tokens` leaves out, by their texts."""
        return {self._added[token_id]: token_id for token_id in self._special}

    def added_token(self, token_id: int) -> str | None:
        """Return the text of a token that was added to the vocabulary (as special tokens are), else None."""
        return self._added.get(token_id)

    def close(self) -> None:
        """End its process, if it has one."""
        if self.process is not None:
            self.process.close()

    def to_json(self) -> str:
        """Return the tokenizer in the format of tokenizer.json, without roles and templates."""
        return self._coder.to_json()

    def _role_id(self, role: str) -> int | None:
        text = self.special_tokens.get(role)
        return None if text is None else self.token_to_id(text)


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
    # A token takes at most `MAX_GROWTH` times its bytes, whatever the decoder does (S-10).
    factors = [replacing(step) for step in steps if step["type"] == "Replace"]
    growth = math.prod(factor or MAX_GROWTH + 1 for factor in factors)
    starts = [step["start"] for step in steps if step["type"] == "Strip"]
    if growth > MAX_GROWTH or len(steps) > MAX_STEPS or max(starts, default=0) > MAX_LITERAL:
        raise CheckpointError(
            f"tokenizer.json: a decoder of {len(steps)} steps that makes a token more than {MAX_GROWTH} times as long, "
            f"has more than {MAX_STEPS} steps, or removes more than {MAX_LITERAL} letters is not supported"
        )
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
