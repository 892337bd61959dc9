"""Folders without a tokenizer.json: their side files decide, as in transformers 5.23, whose ids stand here."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from tests.support.tokenizers import data
from tokenizers import Tokenizer as Plain
from tokenizers import models

from headrace.protocol.errors import CheckpointError
from headrace.text.tokenizer import Tokenizer

LLAMA = {
    "tokenizer_class": "LlamaTokenizer", "bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>", "legacy": False,
    "add_bos_token": True, "add_eos_token": False,
}  # fmt: skip
CHAT = "<|im_start|>user\nhi<|im_end|>"
GPT2 = ("tokenizers/gpt2/vocab.json", "tokenizers/gpt2/merges.txt")
QWEN = {"<|endoftext|>": 50256, "<|im_start|>": 50257, "<|im_end|>": 50258}


def folder(path: Path, files: tuple[str, ...], **side: Any) -> Path:
    """A folder with files of the data folder and JSON files beside them."""
    for name in files:
        shutil.copy(data(name), path)
    for name, value in side.items():
        (path / f"{name}.json").write_text(json.dumps(value))
    return path


def llama(path: Path, config: dict[str, Any], **side: Any) -> Tokenizer:
    files = ("tokenizers/llama2/tokenizer.model",)
    return Tokenizer.load(folder(path, files, tokenizer_config=LLAMA | config, **side))


def listed(tokens: dict[str, int]) -> dict[str, Any]:
    return {str(token_id): {"content": text, "special": True} for text, token_id in tokens.items()}


MARKS = {"<|im_start|>": 32001, "<|im_end|>": 32000}


@pytest.mark.parametrize(
    ("config", "side"),
    [
        ({}, {"added_tokens": MARKS}),
        ({"added_tokens_decoder": listed({"<unk>": 0, "<s>": 1, "</s>": 2} | MARKS)}, {}),
        ({"additional_special_tokens": ["<|im_start|>"]}, {"added_tokens": MARKS}),
    ],
)
def test_tokens_beside_a_sentencepiece_model(config: dict[str, Any], side: dict[str, Any], tmp_path: Path) -> None:
    """A fine-tune's marks of turns: without them a chat's prompt is letters, and its answer never ends."""
    tok = llama(tmp_path, {"eos_token": "<|im_end|>"} | config, **side)
    assert tok.encode(CHAT) == [1, 32001, 1792, 13, 2918, 32000]
    assert tok.eos_token_id == 32000
    assert tok.is_special(32000)
    assert tok.is_special(32001) == bool(config)


def test_a_role_of_the_special_tokens_map_is_at_its_place(tmp_path: Path) -> None:
    files = ("tokenizers/llama2/tokenizer.model",)
    config = {key: value for key, value in LLAMA.items() if not key.endswith("_token") or key.startswith("add")}
    roles = {"bos_token": "<s>", "eos_token": "<|im_end|>"}
    side = {"tokenizer_config": config, "added_tokens": {"<|im_end|>": 32000}, "special_tokens_map": roles}
    tok = Tokenizer.load(folder(tmp_path, files, **side))
    assert (tok.bos_token_id, tok.eos_token_id) == (1, 32000)


@pytest.mark.parametrize("wrong", [{"<|a|>": 32010}, {"<|a|>": "x"}, {"<|a|>": -1}, {"<|a|>": True}])
def test_an_added_token_at_no_place_is_refused(wrong: dict[str, Any], tmp_path: Path) -> None:
    """transformers moves a token behind a hole to another id, for which the model has no embedding."""
    with pytest.raises(CheckpointError, match=r"<\|a\|>"):
        llama(tmp_path, {}, added_tokens=wrong)


@pytest.mark.parametrize(
    ("config", "text", "ids"),
    [
        ({}, "</s>user x", [1, 2, 1792, 921]),
        ({"legacy": True}, "</s>user x", [1, 2, 1404, 921]),
        ({}, "Hello world", [1, 15043, 3186]),
        ({"add_prefix_space": False}, "Hello world", [1, 10994, 3186]),
        ({"add_eos_token": True}, "Hello world", [1, 15043, 3186, 2]),
        ({"add_bos_token": False}, "Hello world", [15043, 3186]),
    ],
)
def test_the_prefix_of_a_sentencepiece_model(config: dict[str, Any], text: str, ids: list[int], tmp_path: Path) -> None:
    assert llama(tmp_path, config).encode(text) == ids


@pytest.mark.parametrize(
    ("config", "model_type", "digits"),
    [
        ({"tokenizer_class": "Qwen2Tokenizer"}, None, 4),
        ({"tokenizer_class": "Qwen2TokenizerFast"}, "qwen3", 4),
        ({}, "qwen3_moe", 4),
        ({"tokenizer_class": "GPT2Tokenizer"}, "starcoder2", 2),
        ({}, None, 2),
    ],
)
def test_the_class_of_the_tokenizer_decides_how_text_is_split(
    config: dict[str, Any], model_type: str | None, digits: int, tmp_path: Path
) -> None:
    """Qwen's splits digits one by one; GPT-2's joins them."""
    side = {"config": {"model_type": model_type}} if model_type else {}
    tok = Tokenizer.load(folder(tmp_path, GPT2, tokenizer_config=config, added_tokens=QWEN, **side))
    assert len(tok.encode("1234")) == digits
    assert tok.encode(CHAT)[0] == 50257
    composed = tok.encode("e\u0301") == tok.encode("\u00e9")
    assert composed == (digits == 4), "Qwen's composes (NFC)"


def test_a_space_before_the_text(tmp_path: Path) -> None:
    config = {"tokenizer_class": "GPT2Tokenizer", "add_prefix_space": True, "add_bos_token": True}
    tok = Tokenizer.load(folder(tmp_path, GPT2, tokenizer_config=config))
    assert tok.encode("Hello world") == [50256, 18435, 995]


@pytest.mark.parametrize(
    ("config", "model_type", "words"),
    [
        ({"tokenizer_class": "OtherTokenizer"}, "gpt2", "'OtherTokenizer'; .* GPT2Tokenizer, Qwen2Tokenizer"),
        ({}, "llama", "for the type 'llama'"),
    ],
)
def test_an_unknown_way_to_split_is_refused(
    config: dict[str, Any], model_type: str, words: str, tmp_path: Path
) -> None:
    side = {"config": {"model_type": model_type}}
    with pytest.raises(CheckpointError, match=words):
        Tokenizer.load(folder(tmp_path, GPT2, tokenizer_config=config, **side))


@pytest.mark.parametrize(
    "config",
    [
        {"extra_special_tokens": {"image_token": "b", "boi": "c"}},
        {"model_specific_special_tokens": {"image_token": "b", "boi": {"content": "c"}}},
        {"image_token": "b", "extra_special_tokens": {"boi": "c"}},
    ],
)
def test_templates_have_the_tokens_that_the_config_names(config: dict[str, Any], tmp_path: Path) -> None:
    vocab = models.WordLevel({"a": 0, "b": 1, "c": 2}, "a")
    Plain(vocab).save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config | {"add_bos_token": True, "bos_token": None}))
    tok = Tokenizer.load(tmp_path)
    assert tok.special_tokens == {"image_token": "b", "boi": "c"}
    template = "{{image_token}}{{boi}}{{bos_token}}{{extra_special_tokens}}"
    user = [{"role": "user", "content": ""}]
    assert tok.apply_chat_template(user, chat_template=template, tokenize=False) == "bc"
