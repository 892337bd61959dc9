"""Where a model is found, and what is refused before anything of it is read."""

from __future__ import annotations

import fnmatch
import json
from pathlib import Path
from typing import Any

import pytest

from headrace import foreign, hub
from headrace.protocol.errors import CheckpointError, ModelNotFoundError


def test_a_directory_is_itself(tmp_path: Path) -> None:
    assert hub.resolve(str(tmp_path)) == tmp_path


def test_builtin_is_in_the_package_and_its_weights_are_unpacked_if_they_are_wanted() -> None:
    assert hub.resolve("builtin", weights=False) == Path(hub.__file__).parent / "builtin"
    assert (hub.resolve("builtin") / "model.safetensors").is_file()


@pytest.mark.parametrize("name", ["nothing-here", "./a/b", "/no/such/place", "a/b/c", "~/none"])
def test_an_unknown_name_is_refused_without_the_network(name: str) -> None:
    with pytest.raises(ModelNotFoundError, match="no such directory"):
        hub.resolve(name)


def test_a_file_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "model.bin"
    path.write_bytes(b"x")
    with pytest.raises(ModelNotFoundError, match="is a file"):
        hub.resolve(str(path))


@pytest.mark.parametrize("text", ["", "[1]", "{", "nul", "[" * 10**5])
def test_bad_json_is_refused(tmp_path: Path, text: str) -> None:
    path = tmp_path / "config.json"
    path.write_text(text)
    with pytest.raises(CheckpointError, match=r"config\.json"):
        hub.read_json(path)


def test_missing_and_oversized_json_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="missing"):
        hub.read_json(tmp_path / "config.json")
    (tmp_path / "config.json").write_text('{"a": 1}')
    assert hub.read_json(tmp_path / "config.json") == {"a": 1}
    with pytest.raises(CheckpointError, match="8 bytes"):
        hub.read_json(tmp_path / "config.json", foreign.CONFIG._replace(num_bytes=4))


def test_eos_ids_come_from_both_files(tmp_path: Path) -> None:
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [2, 3, -1, None]}))
    (tmp_path / "config.json").write_text(json.dumps({"eos_token_id": 2}))
    assert hub.eos_token_ids(tmp_path) == [2, 3]


END = {"content": "<|im_end|>", "special": True}


@pytest.mark.parametrize(
    ("files", "ids"),
    [
        ({"tokenizer_config": {"eos_token": "<|im_end|>", "added_tokens_decoder": {"7": END}}}, [2, 7]),
        ({"tokenizer_config": {"eos_token": END}, "added_tokens": {"<|im_end|>": 8}}, [2, 8]),
        ({"special_tokens_map": {"eos_token": END}, "tokenizer": {"added_tokens": [END | {"id": 9}]}}, [2, 9]),
        ({"tokenizer_config": {"eos_token": "</s>"}, "tokenizer": {"model": {"vocab": {"</s>": 2}}}}, [2]),
        ({"tokenizer_config": {"eos_token": None}, "tokenizer": {"added_tokens": "x"}}, [2]),
        ({"tokenizer_config": {"added_tokens_decoder": {"7": END}}}, [2]),
        ({"tokenizer_config": {"eos_token": "<|im_end|>", "added_tokens_decoder": {"2": END}}}, [2]),
    ],
)
def test_the_end_of_the_tokenizer_ends_an_answer(files: dict[str, Any], ids: list[int], tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"eos_token_id": 2}))
    for name, value in files.items():
        (tmp_path / f"{name}.json").write_text(json.dumps(value))
    assert hub.eos_token_ids(tmp_path) == ids


def test_the_end_of_another_folders_tokenizer(tmp_path: Path) -> None:
    for name, token_id in (("model", 3), ("other", 4)):
        folder = tmp_path / name
        folder.mkdir()
        config = {"eos_token": "<|im_end|>", "added_tokens_decoder": {str(token_id): END}}
        (folder / "tokenizer_config.json").write_text(json.dumps(config))
    assert hub.eos_token_ids(tmp_path / "model") == [3]
    assert hub.eos_token_ids(tmp_path / "model", tmp_path / "other") == [4]


@pytest.mark.parametrize("name", ["config.json", "generation_config.json"])
@pytest.mark.parametrize(
    ("value", "words"),
    [
        (True, "eos_token_id: True .* an integer from 0 to"),
        ("4", "eos_token_id: '4' .* an integer from 0 to"),
        ([2, -7], "eos_token_id: -7 .* an integer from 0 to"),
        (2**31, "eos_token_id: 2147483648 .* to 2147483647"),
        (list(range(257)), "eos_token_id: 257 .* a length from 0 to 256"),
    ],
)
def test_S_28_eos_ids_are_checked_as_those_of_a_request(name: str, value: object, words: str, tmp_path: Path) -> None:
    (tmp_path / name).write_text(json.dumps({"eos_token_id": value}))
    with pytest.raises(CheckpointError, match=rf"{name}: {words}"):
        hub.eos_token_ids(tmp_path)
    (tmp_path / name).write_text(json.dumps({"eos_token_id": list(range(256))}))
    assert hub.eos_token_ids(tmp_path) == list(range(256))


def test_a_digest_is_that_of_config_and_weights(tmp_path: Path) -> None:
    for name, text in (("config.json", "{}"), ("a.safetensors", "weights"), ("notes.txt", "x")):
        (tmp_path / name).write_text(text)
    before = hub.digest(tmp_path)
    (tmp_path / "notes.txt").write_text("y")
    assert hub.digest(tmp_path) == before
    (tmp_path / "a.safetensors").write_text("weightt")
    assert hub.digest(tmp_path) != before


SIDE_FILES: dict[str, tuple[dict[str, Any], dict[str, Any], str]] = {
    # What the writer puts into a file, or into config.json; the settings; the method.
    "hf_quant_config.json": (
        {"producer": {"name": "modelopt"}, "quantization": {"quant_algo": "FP8", "exclude_modules": ["lm_head"]}},
        {"quant_algo": "FP8", "exclude_modules": ["lm_head"]},
        "modelopt",
    ),
    "quantize_config.json": (
        {"bits": 4, "group_size": 32, "desc_act": False, "sym": True},
        {"bits": 4, "group_size": 32},
        "gptq",
    ),
    "quant_config.json": (
        {"zero_point": True, "q_group_size": 64, "w_bit": 4, "version": "GEMM"},
        {"q_group_size": 64},
        "awq",
    ),
    "quantization_config.json": (
        {"bits": 4, "group_size": 64, "packing_format": "auto_round"},
        {"packing_format": "auto_round"},
        "auto-round",
    ),
    "compression_config": (
        {"format": "pack-quantized", "config_groups": {}},
        {"config_groups": {}},
        "compressed-tensors",
    ),
    "quantization": ({"bits": 4, "group_size": 64}, {"group_size": 64}, "mlx"),
    "quantization_config": ({"bits": 4, "group_size": 32, "desc_act": True}, {"bits": 4}, "gptq"),
}


@pytest.mark.parametrize("place", SIDE_FILES)
def test_settings_of_quantisation_are_found_where_their_writers_put_them(place: str, tmp_path: Path) -> None:
    written, expected, method = SIDE_FILES[place]
    config: dict[str, Any] = {"model_type": "llama"}
    if place.endswith(".json"):
        (tmp_path / place).write_text(json.dumps(written))
    else:
        config[place] = written
    (tmp_path / "config.json").write_text(json.dumps(config))
    settings = hub.read_config(tmp_path)["quantization_config"]
    assert settings["quant_method"] == method
    assert settings["stated_in"].endswith(place)
    assert expected.items() <= settings.items()


def test_the_settings_in_config_json_precede_a_file(tmp_path: Path) -> None:
    config = {"quantization_config": {"quant_method": "awq", "bits": 4}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "quantize_config.json").write_text(json.dumps({"bits": 8, "desc_act": False}))
    settings = hub.read_config(tmp_path)["quantization_config"]
    assert settings == config["quantization_config"] | {"stated_in": "config.json: quantization_config"}


def test_a_file_of_settings_is_part_of_the_models_digest(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    before = hub.digest(tmp_path)
    (tmp_path / "quantize_config.json").write_text(json.dumps({"bits": 8, "desc_act": False}))
    assert hub.digest(tmp_path) != before


@pytest.mark.parametrize("empty", [{}, {"quantization_config": None}, {"quantization_config": {}}])
def test_no_settings_are_plain_weights(empty: dict[str, Any], tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(empty))
    assert "quantization_config" not in hub.read_config(tmp_path)


def test_settings_of_the_text_model_alone_are_those_of_all() -> None:
    values = hub.with_quantization({"text_config": {"quantization_config": {"quant_method": "fp8"}}})
    assert values["quantization_config"]["quant_method"] == "fp8"


@pytest.mark.parametrize(
    ("stated", "words"),
    [([1], "quantization_config is .1., expected an object"), ({"a": 1}, "quantization_config names no quant_method")],
)
def test_settings_of_no_method_are_refused_with_their_place(stated: Any, words: str) -> None:
    with pytest.raises(CheckpointError, match=f"config.json: {words}"):
        hub.with_quantization({"quantization_config": stated})


def test_all_files_of_tokenizers_are_fetched_and_digested() -> None:
    names = "tekken.json tiktoken.model tokenizer.model tokenizer.model.v3 mistral_instruct_tokenizer_241114.model.v7m1"
    for name in names.split():
        assert any(fnmatch.fnmatch(name, pattern) for pattern in hub.PATTERNS), name
        assert any(fnmatch.fnmatch(name, pattern) for pattern in hub.TEXT_FILES), name
    assert not any(fnmatch.fnmatch("consolidated.00.pth", pattern) for pattern in hub.PATTERNS)


def test_K16_of_a_repository_one_model_is_chosen() -> None:
    plain = ["config.json", "model.safetensors", "tokenizer.json", "README.md", "x/config.json"]
    assert hub.choose_files(plain, "") == ["config.json", "model.safetensors", "tokenizer.json"]
    ggufs = ["a-Q2_K.gguf", "a-Q4_K_M.gguf", "a-Q8_0.gguf", "mmproj-f16.gguf", "README.md"]
    assert hub.choose_files(ggufs, "") == ["a-Q4_K_M.gguf", "mmproj-f16.gguf"], "with the tower for pictures"
    assert hub.choose_files(["mmproj-BF16.gguf", *ggufs], "q8_0") == ["a-Q8_0.gguf", "mmproj-f16.gguf"]
    assert hub.choose_files(["mmproj-a-Q8_0.gguf", *ggufs[:3]], "Q8_0") == ["a-Q8_0.gguf", "mmproj-a-Q8_0.gguf"]
    assert hub.choose_files(["b.gguf", "a.gguf"], "latest") == ["a.gguf"]
    with pytest.raises(ModelNotFoundError, match=r"no model for the tag Q6_K: its GGUF files are a-Q2_K\.gguf"):
        hub.choose_files(ggufs, "Q6_K")
    split = [f"Q8_0/a-Q8_0-0000{i}-of-00003.gguf" for i in (1, 2, 3)]
    assert hub.choose_files(["b-Q2_K.gguf", *reversed(split)], "Q8_0") == split, "all files of a split model"
    with pytest.raises(ModelNotFoundError, match="but not Q8_0/a-Q8_0-00002-of-00003.gguf"):
        hub.choose_files([split[0], split[2]], "")
    with pytest.raises(ModelNotFoundError, match="no weights that headrace reads"):
        hub.choose_files(["model.bin"], "")
