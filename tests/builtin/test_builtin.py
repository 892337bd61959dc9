"""The built-in model's files: complete, small, and of one mind about every id; with controls that break them."""

from __future__ import annotations

import json
import shutil
import struct
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jinja2 import StrictUndefined, TemplateError
from jinja2.sandbox import ImmutableSandboxedEnvironment
from tokenizers import Tokenizer

from headrace import builtin
from headrace.builtin import PATH
from headrace.protocol.errors import CheckpointError
from headrace.text.templates import ChatTemplate

MODEL_FILES = [*builtin.BESIDE, builtin.STORED]
SPECIAL = ["<|bos|>", "<|endoftext|>", "<|end|>", "<|system|>", "<|user|>", "<|assistant|>"]
MESSAGES = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "Hi"},
    {"role": "assistant", "content": "Hello!"},
    {"role": "user", "content": "Who are you?"},
]


def read_json(name: str) -> dict[str, Any]:
    value: dict[str, Any] = json.loads((PATH / name).read_text("utf-8"))
    return value


def read_header(path: Path) -> dict[str, Any]:
    with path.open("rb") as file:
        (size,) = struct.unpack("<Q", file.read(8))
        header: dict[str, Any] = json.loads(file.read(size))
    header.pop("__metadata__", None)
    return header


def num_parameters(header: dict[str, Any]) -> int:
    total = 0
    for entry in header.values():
        count = 1
        for size in entry["shape"]:
            count *= size
        total += count
    return total


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.from_file(str(PATH / "tokenizer.json"))


@pytest.mark.parametrize("name", [*MODEL_FILES, "MODEL_CARD.md"])
def test_file_is_present(name: str) -> None:
    assert (PATH / name).stat().st_size > 0


def test_size() -> None:
    """8 to 9 million parameters, in bfloat16, stored in little more than a byte each."""
    header = read_header(builtin.directory() / "model.safetensors")
    assert 8_000_000 <= num_parameters(header) <= 9_000_000
    assert {entry["dtype"] for entry in header.values()} == {"BF16"}
    assert (PATH / builtin.STORED).stat().st_size < 1.03 * num_parameters(header)


def test_each_number_is_the_level_that_its_byte_picks() -> None:
    torch = pytest.importorskip("torch")
    from safetensors.torch import load_file as load

    stored = load(PATH / builtin.STORED)
    plain = load(builtin.directory() / "model.safetensors")
    assert set(plain) == {name for name in stored if not name.endswith(builtin.LEVELS)}
    for name, actual in plain.items():
        levels = stored.get(name + builtin.LEVELS)
        expected = stored[name] if levels is None else levels[stored[name].long()]
        assert torch.equal(actual, expected), name


@pytest.fixture
def write(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[[], Path]:
    """Writes the model into a home of its own, or else among temporary files of its own."""
    (tmp_path / "tmp").mkdir()
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "tmp"))
    return builtin.directory.__wrapped__


def test_it_is_written_once_and_again_when_damaged(write: Callable[[], Path], tmp_path: Path) -> None:
    result = write()
    assert result.is_relative_to(tmp_path / "home")
    assert sorted(p.name for p in result.iterdir()) == sorted([*builtin.BESIDE, "model.safetensors"])
    weights, config = result / "model.safetensors", result / "config.json"
    whole, before = weights.read_bytes(), weights.stat().st_mtime_ns
    assert write() == result
    assert weights.stat().st_mtime_ns == before
    weights.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
    config.unlink()
    assert write() == result
    assert weights.read_bytes() == whole
    assert config.read_bytes() == (PATH / "config.json").read_bytes()


def test_without_a_home_it_is_a_temporary_file(
    write: Callable[[], Path], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("HOME", "/dev/null")
    result = write()
    assert result.is_relative_to(tmp_path / "tmp")
    assert result.parent.stat().st_mode & 0o777 == 0o700
    result.parent.chmod(0o755)
    with pytest.raises(CheckpointError, match=r"nowhere: .*/dev/null.*; .* is not this user's alone"):
        write()


@pytest.mark.parametrize("at", [0, 20, -1])
def test_stored_weights_that_are_damaged_are_refused(
    at: int, write: Callable[[], Path], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    shipped = tmp_path / "shipped"
    shutil.copytree(PATH, shipped, ignore=shutil.ignore_patterns("drafters"))
    monkeypatch.setattr(builtin, "PATH", shipped)
    whole = bytearray((shipped / builtin.STORED).read_bytes())
    whole[at] ^= 0xFF
    (shipped / builtin.STORED).write_bytes(whole)
    with pytest.raises(CheckpointError, match=r"model\.u8 .*, install headrace again"):
        write()
    (shipped / builtin.STORED).unlink()
    with pytest.raises(CheckpointError, match=r"model\.u8 .*, install headrace again"):
        write()


def wrong_shapes(config: dict[str, Any], header: dict[str, Any]) -> list[str]:
    """Names of tensors that are missing, in excess, or not of the shape that the config tells."""
    hidden, inner, dim = config["hidden_size"], config["intermediate_size"], config["head_dim"]
    queries, keys = config["num_attention_heads"] * dim, config["num_key_value_heads"] * dim
    expected = {"model.embed_tokens.weight": [config["vocab_size"], hidden], "model.norm.weight": [hidden]}
    for i in range(config["num_hidden_layers"]):
        for name, shape in {
            "input_layernorm": [hidden],
            "post_attention_layernorm": [hidden],
            "self_attn.q_proj": [queries, hidden],
            "self_attn.k_proj": [keys, hidden],
            "self_attn.v_proj": [keys, hidden],
            "self_attn.o_proj": [hidden, queries],
            "mlp.gate_proj": [inner, hidden],
            "mlp.up_proj": [inner, hidden],
            "mlp.down_proj": [hidden, inner],
        }.items():
            expected[f"model.layers.{i}.{name}.weight"] = shape
    actual = {name: entry["shape"] for name, entry in header.items()}
    return [name for name in expected | actual if expected.get(name) != actual.get(name)]


def test_shapes_agree_with_config() -> None:
    config, header = read_json("config.json"), read_header(builtin.directory() / "model.safetensors")
    assert config["model_type"] == "llama"
    assert config["tie_word_embeddings"] is True
    assert wrong_shapes(config, header) == []
    assert wrong_shapes({**config, "num_key_value_heads": config["num_key_value_heads"] + 1}, header)
    assert wrong_shapes({**config, "num_hidden_layers": config["num_hidden_layers"] + 1}, header)


def id_faults(config: dict[str, Any], generation: dict[str, Any], tokenizer: Tokenizer) -> list[str]:
    """What the files disagree about."""
    named = read_json("tokenizer_config.json")
    faults = []
    for where, ids in (("config", config), ("generation_config", generation)):
        if ids["bos_token_id"] != tokenizer.token_to_id(named["bos_token"]):
            faults.append(f"{where}: bos")
        if ids["pad_token_id"] != tokenizer.token_to_id(named["pad_token"]):
            faults.append(f"{where}: pad")
        if set(ids["eos_token_id"]) != {tokenizer.token_to_id(named["eos_token"]), tokenizer.token_to_id("<|end|>")}:
            faults.append(f"{where}: eos")
    if config["vocab_size"] != tokenizer.get_vocab_size(with_added_tokens=True):
        faults.append("config: vocab_size")
    if named["model_max_length"] != config["max_position_embeddings"]:
        faults.append("tokenizer_config: model_max_length")
    return faults


def test_ids_agree(tokenizer: Tokenizer) -> None:
    config, generation = read_json("config.json"), read_json("generation_config.json")
    assert id_faults(config, generation, tokenizer) == []
    assert id_faults({**config, "bos_token_id": 9}, generation, tokenizer) == ["config: bos"]
    assert id_faults(config, {**generation, "eos_token_id": [1]}, tokenizer) == ["generation_config: eos"]
    assert id_faults({**config, "vocab_size": 7}, generation, tokenizer) == ["config: vocab_size"]


def test_special_tokens_are_single_ids(tokenizer: Tokenizer) -> None:
    for i, token in enumerate(SPECIAL):
        assert tokenizer.encode(token, add_special_tokens=False).ids == [i]
    assert len(tokenizer.encode("<|nobody|>", add_special_tokens=False).ids) > 1
    assert tokenizer.encode("Hi").ids[0] == 0
    assert tokenizer.encode("Hi", add_special_tokens=False).ids[0] != 0


def test_every_byte_has_a_token(tokenizer: Tokenizer) -> None:
    """256 one-byte tokens, so that no text is unknown; the decoder gives each byte back."""
    single = [token for token in tokenizer.get_vocab() if len(token) == 1]
    assert len(single) == 256
    for text in ("\x00\x01\x7f\x80\xff", "é", "日本語", "👩‍👩‍👧‍👦", "\r\n\t  \u2028", "\ud7ff\ue000\U0010ffff"):
        assert tokenizer.decode(tokenizer.encode(text, add_special_tokens=False).ids, skip_special_tokens=False) == text


@given(text=st.text(max_size=60))
@settings(max_examples=200, deadline=None)
def test_round_trip(tokenizer: Tokenizer, text: str) -> None:
    ids = tokenizer.encode(text, add_special_tokens=False).ids
    assert tokenizer.decode(ids, skip_special_tokens=False) == text


def render(messages: list[dict[str, str]], add_generation_prompt: bool) -> str:
    def raise_exception(message: str) -> None:
        raise TemplateError(message)

    environment = ImmutableSandboxedEnvironment(undefined=StrictUndefined)
    environment.globals["raise_exception"] = raise_exception
    settings_ = read_json("tokenizer_config.json")
    return environment.from_string(settings_["chat_template"]).render(
        messages=messages, add_generation_prompt=add_generation_prompt, bos_token=settings_["bos_token"]
    )


def test_chat_template(tokenizer: Tokenizer) -> None:
    expected = "<|bos|><|system|>Be brief.<|end|><|user|>Hi<|end|><|assistant|>Hello!<|end|><|user|>Who are you?<|end|>"
    assert render(MESSAGES, False) == expected
    assert render(MESSAGES, True) == expected + "<|assistant|>"
    ids = tokenizer.encode(render(MESSAGES, True), add_special_tokens=False).ids
    assert ids[:2] == [0, 3]
    assert ids[-2:] == [2, 5]
    assert ids.count(2) == len(MESSAGES)


def test_K2_chat_template_takes_a_conversation_with_tools() -> None:
    call = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": {"a": "é"}}}
    messages: list[dict[str, Any]] = [
        {"role": "developer", "content": "Be brief."},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c1", "content": "18 degrees"},
        {"role": "assistant", "content": "Well,", "tool_calls": [call, call]},
    ]
    written = '<tool_call>\n{"name": "f", "arguments": {"a": "é"}}\n</tool_call>'
    template = ChatTemplate({"default": read_json("tokenizer_config.json")["chat_template"]}, {"bos_token": "<|bos|>"})
    assert template.render(messages) == (
        f"<|bos|><|system|>Be brief.<|end|><|assistant|>{written}<|end|>"
        "<|user|><tool_response>\n18 degrees\n</tool_response><|end|>"
        f"<|assistant|>Well,\n{written}\n{written}<|end|><|assistant|>"
    )


def test_chat_template_refuses_unknown_roles() -> None:
    with pytest.raises(TemplateError, match="unknown role: wizard"):
        render([{"role": "wizard", "content": "Hi"}], True)


def test_it_has_learnt_english() -> None:
    """Simple English costs it few bits per byte; the same letters in another order cost it many."""
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    model = transformers.LlamaForCausalLM.from_pretrained(builtin.directory(), dtype=torch.float32)
    tokenizer = Tokenizer.from_file(str(PATH / "tokenizer.json"))

    def bits_per_byte(text: str) -> float:
        ids = torch.tensor([tokenizer.encode(text).ids])
        with torch.inference_mode():
            nats = float(model(input_ids=ids, labels=ids).loss) * (ids.shape[1] - 1)
        return nats / 0.6931471805599453 / len(text.encode())

    text = "The little boy was very hungry. He asked his mother for some bread, and she gave him a big piece."
    assert bits_per_byte(text) < 1.5
    assert bits_per_byte(text[::-1]) > 3.0
