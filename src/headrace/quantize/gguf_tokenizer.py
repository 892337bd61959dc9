"""A model directory's tokenizer and chat template as GGUF metadata: the inverse of `text.tokenizer_gguf`.

Byte-level BPE becomes the model "gpt2", whose splitting of text must be one that GGUF has a name for; SentencePiece's
BPE becomes "llama", with scores that order its merges. The metadata are read back and must give the same token ids for
the text of every token and some sentences: a tokenizer that GGUF cannot express is refused, not approximated. Knows no
tensors. Called by `quantize.gguf_writer`.
"""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

from headrace import hub
from headrace.gguf import GGUF
from headrace.protocol.errors import CheckpointError
from headrace.quantize.gguf_file import Value, header
from headrace.text import tokenizer_gguf
from headrace.text.tokenizer import Tokenizer
from headrace.text.tokenizer_files import BYTE, CONTROL, NORMAL, UNKNOWN, UNUSED, USER_DEFINED

logger = logging.getLogger(__name__)

PREFIX = "tokenizer.ggml."
_ROLES = {"bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "pad_token": "padding"}
_SAMPLES = (
    "The quick brown fox, who'd jumped 1234567890 times, didn't STOP.",
    "  two  spaces\tand\r\nlines\n\n\n  end ",
    "Grüße aus Köln; 東京と日本語。 Привет, мир! 🙂🙃 ﬁ e\u0301",
    "def f(x):\n    return {'a': x[0] ** 2, \"b\": None}  # 0x1F",
)


def metadata(directory: Path, vocab_size: int) -> dict[str, Value]:
    """Return `tokenizer.*` for the model in `directory`, empty for a model without a tokenizer.

    Raises `CheckpointError` for a tokenizer that GGUF cannot express.
    """
    tokenizer = Tokenizer.load_if_present(directory)
    if tokenizer is None:
        return {}
    spec = json.loads(tokenizer.to_json())
    model = spec["model"]
    if model.get("type") != "BPE":
        raise CheckpointError(f"a tokenizer of type {model.get('type')!r} can not be written to GGUF, only BPE")
    tokens, kinds = _tokens(spec, vocab_size)
    fields: dict[str, Value] = {f"{PREFIX}tokens": tokens}
    fields |= _byte_level(spec) if _is_byte_level(spec) else _scored(spec, tokens, kinds)
    fields[f"{PREFIX}token_type"] = kinds
    fields |= _ends(tokenizer, directory)
    for name, template in tokenizer.chat_templates.items():
        fields["tokenizer.chat_template" + ("" if name == "default" else f".{name}")] = template
    _verify(tokenizer, fields)
    return fields


def _tokens(spec: dict[str, Any], vocab_size: int) -> tuple[list[str], list[int]]:
    """Return the text and the kind of every id; unused tokens fill the gaps and the end."""
    texts = {token_id: text for text, token_id in spec["model"]["vocab"].items()}
    kinds = dict.fromkeys(texts, NORMAL)
    unknown, fallback = spec["model"].get("unk_token"), spec["model"].get("byte_fallback")
    if fallback:
        kinds |= {i: BYTE for i, text in texts.items() if len(text) == 6 and text.startswith("<0x")}
    for token in spec["added_tokens"]:
        texts[token["id"]] = token["content"]
        kinds[token["id"]] = CONTROL if token["special"] else USER_DEFINED
    if fallback:
        kinds |= {i: UNKNOWN for i, text in texts.items() if text == unknown}
    total = max(max(texts) + 1, vocab_size)
    filled = [texts.get(i, f"[PAD{i}]") for i in range(total)]
    return filled, [kinds.get(i, UNUSED) for i in range(total)]


def _steps(part: dict[str, Any] | None, inner: str) -> list[dict[str, Any]]:
    """Return the steps of a normalizer or pre_tokenizer, sequences flattened."""
    if part is None:
        return []
    if part["type"] == "Sequence":
        return [step for one in part[inner] for step in _steps(one, inner)]
    return [part]


def _is_byte_level(spec: dict[str, Any]) -> bool:
    return any(step["type"] == "ByteLevel" for step in _steps(spec["pre_tokenizer"], "pretokenizers"))


def _byte_level(spec: dict[str, Any]) -> dict[str, Value]:
    cuts, composed = _cuts(spec), [step["type"] for step in _steps(spec["normalizer"], "normalizers")]
    if composed not in ([], ["NFC"]):
        raise CheckpointError(f"a byte-level tokenizer's normalizer {composed} can not be written to GGUF, only NFC")
    habits = (cuts, composed == ["NFC"], bool(spec["model"].get("ignore_merges")))
    for name, cuts_of_name in tokenizer_gguf.PRE_TOKENIZERS.items():
        if (cuts_of_name, *tokenizer_gguf.habits(name)) == habits:
            break
    else:
        raise CheckpointError(f"GGUF has no name for how the tokenizer cuts text: {cuts!r:.300}, {habits[1:]}")
    merges = [merge if isinstance(merge, str) else " ".join(merge) for merge in spec["model"]["merges"]]
    fields: dict[str, Value] = {f"{PREFIX}model": "gpt2", f"{PREFIX}pre": name}
    return fields | ({f"{PREFIX}merges": merges} if merges else {})


def _cuts(spec: dict[str, Any]) -> tuple[str, ...]:
    """Return the regular expressions that cut text before merging."""
    cuts = []
    for step in _steps(spec["pre_tokenizer"], "pretokenizers"):
        if step["type"] == "Split" and step["behavior"] == "Isolated" and not step["invert"]:
            cuts.append(str(step["pattern"].get("Regex")))
        elif step["type"] == "Digits" and step["individual_digits"]:
            cuts.append(r"\p{N}")
        elif step["type"] == "ByteLevel" and not step["add_prefix_space"]:
            cuts += tokenizer_gguf.PRE_TOKENIZERS["gpt-2"] if step["use_regex"] else ()
        else:
            raise CheckpointError(f"a tokenizer that cuts text by {step!r:.200} can not be written to GGUF")
    return tuple(cuts)


def _scored(spec: dict[str, Any], tokens: list[str], kinds: list[int]) -> dict[str, Value]:
    """Scores that fall from each merge to the next, so that readers merge in the same order."""
    ranks: dict[str, int] = {}
    for rank, merge in enumerate(spec["model"]["merges"]):
        first, second = merge.split(" ") if isinstance(merge, str) else merge
        ranks.setdefault(first + second, rank)
    scores = [-float(ranks[text]) if kind == NORMAL and text in ranks else 0.0
              for text, kind in zip(tokens, kinds, strict=True)]  # fmt: skip
    steps = _steps(spec["normalizer"], "normalizers") + _steps(spec["pre_tokenizer"], "pretokenizers")
    prefixed = any(
        step["type"] == "Prepend" or (step["type"] == "Metaspace" and step.get("prepend_scheme", "always") != "never")
        for step in steps
    )
    return {f"{PREFIX}model": "llama", f"{PREFIX}scores": scores, f"{PREFIX}add_space_prefix": prefixed}


def _ends(tokenizer: Tokenizer, directory: Path) -> dict[str, Value]:
    """Return the ids of the special tokens, and whether a text begins and ends with one."""
    fields: dict[str, Value] = {}
    for role, name in _ROLES.items():
        text = tokenizer.special_tokens.get(role)
        token_id = None if text is None else tokenizer.token_to_id(text)
        if token_id is not None:
            fields[f"{PREFIX}{name}_token_id"] = token_id
    eos = tokenizer.eos_token_id
    others = [token_id for token_id in hub.eos_token_ids(directory) if token_id != eos]
    names = ("eot", "eom") if eos is not None else ("eos", "eot", "eom")
    for name, token_id in zip(names, others, strict=False):
        fields[f"{PREFIX}{name}_token_id"] = token_id
    if len(others) > len(names):
        logger.warning("GGUF has no room for the ends of text %s", others[len(names) :])
    ids = tokenizer.encode("")
    fields[f"{PREFIX}add_bos_token"] = bool(ids) and ids[0] == tokenizer.bos_token_id
    fields[f"{PREFIX}add_eos_token"] = bool(ids) and ids[-1] == eos and (len(ids) > 1 or eos != tokenizer.bos_token_id)
    return fields


def _verify(tokenizer: Tokenizer, fields: dict[str, Value]) -> None:
    """Read the metadata back and compare. Raises `CheckpointError` for the first text with other token ids."""
    back = Tokenizer.of(*tokenizer_gguf.read_metadata(GGUF(header({"general.architecture": "none"} | fields, []))))
    words = [tokenizer.decode([i]) for i in range(tokenizer.vocab_size) if not tokenizer.is_special(i)]
    texts = [*_SAMPLES, *("".join(words[i : i + 50]) for i in range(0, len(words), 50))]
    special = [token for i in range(tokenizer.vocab_size) if (token := tokenizer.added_token(i)) and len(token) > 1]
    texts_that_differ = []
    for text in [*texts, *(f"{token} a" for token in special)]:
        if tokenizer.encode(text) == back.encode(text):
            continue
        if not any(token in text for token in special):
            raise CheckpointError(f"GGUF can not say how the tokenizer reads {text!r:.80}")
        texts_that_differ.append(text)
    if texts_that_differ:
        logger.warning("read from GGUF, text around special tokens becomes other token ids: %r", texts_that_differ[:3])
