"""Towers in GGUF files: what is read, and what is computed, is what the folder of safetensors gives."""

from __future__ import annotations

import logging
import math
import random
import re
import shutil
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
from tests.pictures import mmproj, test_internvl, test_llama4, test_llava, test_mistral3
from tests.support import picture_model
from tests.support.harness import load
from tests.support.picture_model import data_url, noisy
from tests.support.pictures import Ours, Prompt, Theirs, answers, logits_of, wrong_pictures
from tests.support.server import HTTP
from tests.support.serving import serve

from headrace import LLM, SamplingParams, hub
from headrace.checkpoint import gguf_tower
from headrace.engine.library.model_folder import ModelFolder
from headrace.protocol.config import EngineConfig
from headrace.protocol.errors import CheckpointError, ModelNotFoundError, RequestError
from headrace.runner.runner import Runner
from headrace.text.pictures import projectors
from headrace.text.pictures.forms import CLIP

import gguf  # isort: skip

KEYS = gguf.Keys.ClipVision
KEY_KIND, KEY_VISION = gguf.Keys.Clip.PROJECTOR_TYPE, gguf.Keys.Clip.HAS_VISION_ENCODER


class Case(NamedTuple):
    """A family's tower. write: writes the checkpoint of safetensors. fields, names, left: as `mmproj.write_tower`."""

    kind: str
    write: Callable[[Path], Theirs]
    fields: dict[str, Any]
    names: mmproj.Names = mmproj.table_name
    left: str = ""
    text_type: str = ""


def idefics3(directory: Path) -> Theirs:
    return answers(directory, *picture_model.write(directory), "<image>")


def llama4(directory: Path) -> Theirs:
    # What llama.cpp's files have no key for is what llama.cpp takes for it.
    fixed = {"no_rope_layers": None, "attention_chunk_size": 8192, "floor_scale": 8192, "attn_scale": 0.1}
    return test_llama4.write(directory, test_llama4.rules_module(), 16, **fixed)


def old_name(name: str) -> str:
    """Return the name that the converter of LLaVA 1.5 gives a tensor of CLIP: fc1 is called down, and fc2 up."""
    name = re.sub(r".*multi_modal_projector\.linear_([12])", lambda match: f"mm.{2 * int(match[1]) - 2}", name)
    name = re.sub(r"^.*?(?=encoder\.layers|embeddings|pre_layrnorm|post_layernorm)", "v.", name)
    for theirs, ours in (
        ("encoder.layers", "blk"), ("embeddings.", ""), ("_proj", ""), ("self_attn.", "attn_"), ("layer_norm", "ln"),
        ("layernorm", "ln"), ("mlp.fc1", "ffn_down"), ("mlp.fc2", "ffn_up"), ("embedding", "embd"), ("layrnorm", "ln"),
    ):  # fmt: skip
        name = name.replace(theirs, ours)
    return name


def siglip_name(name: str) -> str:
    """Return today's name of a tensor of SigLIP, and LLaVA's of the two layers behind it."""
    return (
        old_name(name)
        if "multi_modal_projector" in name
        else mmproj.table_name(name.replace("vision_tower.", "vision_tower.vision_model."))
    )


def llama4_name(name: str) -> str:
    if "multi_modal_projector.linear_1" in name:
        return "mm.model.fc.weight"
    return mmproj.table_name(name + ".weight" if name.endswith("positional_embedding_vlm") else name)


def internvl_name(name: str) -> str:
    for theirs, ours in (("layer_norm", "mlp1.0"), ("linear_1", "mlp1.1"), ("linear_2", "mlp1.3")):
        name = re.sub(rf".*multi_modal_projector\.{theirs}", ours, name)
    name += ".weight" if re.search(r"\.lambda_[12]$|position_embeddings$", name) else ""
    return mmproj.table_name(name)


CLIP_COLOURS = {KEYS.IMAGE_MEAN: list(CLIP[0]), KEYS.IMAGE_STD: list(CLIP[1])}
CASES = {
    "idefics3": Case(
        "idefics3",
        idefics3,
        {KEYS.Projector.SCALE_FACTOR: 2, KEYS.PREPROC_IMAGE_SIZE: 112, KEYS.USE_GELU: True,
         KEYS.Attention.LAYERNORM_EPS: 1e-6},
    ),
    "internvl": Case(
        "internvl",
        lambda directory: test_internvl.write(directory, test_internvl.KINDS["small"]),
        {KEYS.Projector.SCALE_FACTOR: 2, KEYS.USE_GELU: True, KEYS.PREPROC_MAX_TILES: 6, **CLIP_COLOURS},
        internvl_name,
    ),
    "internvl-rms": Case(
        "internvl",
        lambda directory: test_internvl.write(directory, {"use_qk_norm": True, "norm_type": "rms_norm"}),
        {KEYS.Projector.SCALE_FACTOR: 2, KEYS.USE_GELU: True, KEYS.PREPROC_MAX_TILES: 6, **CLIP_COLOURS},
        internvl_name,
    ),
    "mistral3": Case(
        "pixtral", test_mistral3.write, {KEYS.SPATIAL_MERGE_SIZE: 2, KEYS.USE_GELU: True, **CLIP_COLOURS}
    ),
    "pixtral": Case(
        "pixtral", lambda directory: test_llava.write(directory, "pixtral"), {KEYS.USE_SILU: True, **CLIP_COLOURS}
    ),
    "clip": Case(
        "mlp",
        lambda directory: test_llava.write(directory, "clip"),
        # Its last layer has no effect, and is left out.
        {KEYS.BLOCK_COUNT: 2, KEYS.USE_GELU: False, **CLIP_COLOURS},
        old_name,
        r"layers\.2\.|post_layernorm",
    ),
    "padded": Case(
        "mlp",
        lambda directory: test_llava.write(directory, "padded"),
        {"clip.vision.feature_layer": [3], KEYS.USE_GELU: True, **CLIP_COLOURS},
        old_name,
    ),
    "siglip": Case(
        "mlp",
        lambda directory: test_llava.write(directory, "siglip"),
        {"clip.vision.feature_layer": [2], KEYS.Attention.LAYERNORM_EPS: 1e-6},
        siglip_name,
        r"\.head\.",
    ),
    "llama4": Case(
        "llama4", llama4, {KEYS.Projector.SCALE_FACTOR: 2, KEYS.USE_GELU: True}, llama4_name, text_type="llama4_text"
    ),
}  # fmt: skip


class Files(NamedTuple):
    """A model's checkpoint of safetensors, and its GGUF files."""

    case: Case
    theirs: Theirs
    text: Path
    folder: Path


@pytest.fixture(scope="module", params=CASES)
def files(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Files:
    case, folder = CASES[request.param], tmp_path_factory.mktemp("files")
    theirs = case.write(tmp_path_factory.mktemp("theirs"))
    return Files(case, theirs, mmproj.write_text(theirs.directory, folder / "model.gguf", case.text_type), folder)


def tower(files: Files, path: Path, **options: Any) -> Path:
    case = files.case
    fields = case.fields | options.pop("fields", {})
    return mmproj.write_tower(
        files.theirs.directory, path, case.kind, fields, names=case.names, **{"left": case.left} | options
    )


def closed(runner: Runner) -> None:
    runner.program.close()
    if runner.pictures is not None:
        runner.pictures.close()


def read(files: Files, path: Path, projector: Path | None) -> Prompt:
    ours = Ours(path, projector)
    try:
        return ours.read(files.theirs.prompt, files.theirs.images, files.theirs.token_ids[:1])
    finally:
        ours.close()


@pytest.mark.parametrize("form", ["F32", "F16", "Q8_0"])
def test_logits_are_those_of_safetensors_and_of_transformers(files: Files, form: str, tmp_path: Path) -> None:
    projector = tower(files, tmp_path / "tower.gguf", form=form)
    plain = load(mmproj.rounded_copy(files.theirs.directory, tmp_path / "rounded", form), dtype="float32")
    ours = load(files.text, mmproj=str(projector), dtype="float32", quantization="none")
    prompt = read(files, files.theirs.directory, None)
    [expected], [logits] = (logits_of(runner, [prompt], [512]) for runner in (plain, ours))
    np.testing.assert_allclose(logits, expected, atol=1e-4, rtol=0)
    if form == "F32":
        assert prompt.token_ids == files.theirs.token_ids
        np.testing.assert_allclose(logits, files.theirs.logits, atol=1e-4, rtol=0)
    for wrong in wrong_pictures(prompt.pictures):  # negative control
        [other] = logits_of(ours, [prompt._replace(pictures=wrong)], [512])
        assert abs(other[-1] - expected[-1]).max() > 1e-2
    closed(plain)
    closed(ours)


def test_reading_is_that_of_the_processors_files(files: Files, tmp_path: Path) -> None:
    projector = tower(files, tmp_path / "tower.gguf")
    theirs, ours = read(files, files.theirs.directory, None), read(files, files.text, projector)
    assert ours.token_ids == theirs.token_ids
    is_padded = files.case.kind != "mlp" or files.case.fields.get("clip.vision.feature_layer") == [3]
    if not is_padded:
        assert ours.pictures != theirs.pictures
        return  # llama.cpp pads for LLaVA, as LLaVA 1.5's own code does, and CLIP's processor cuts the middle out
    assert ours.pictures == theirs.pictures
    sides = [Ours(files.theirs.directory), Ours(files.text, projector)]
    for picture in theirs.pictures:
        numbers = [side.pixels(picture) for side in sides]
        np.testing.assert_allclose(numbers[0], numbers[1], atol=1e-6, rtol=0)
    for side in sides:
        side.close()


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Files:
    """Idefics3's files, for what all families share."""
    case, folder = CASES["idefics3"], tmp_path_factory.mktemp("files")
    theirs = case.write(tmp_path_factory.mktemp("theirs"))
    return Files(case, theirs, mmproj.write_text(theirs.directory, folder / "model.gguf"), folder)


def test_the_text_may_be_a_folder_of_safetensors(plain: Files, tmp_path: Path) -> None:
    directory = plain.theirs.directory
    ours = load(directory, mmproj=str(tower(plain, tmp_path / "tower.gguf")), dtype="float32")
    whole = load(directory, dtype="float32")
    prompt = read(plain, directory, None)
    [expected], [logits] = (logits_of(runner, [prompt], [512]) for runner in (whole, ours))
    np.testing.assert_array_equal(logits, expected)
    closed(whole)
    closed(ours)


def test_a_tower_beside_a_text_of_codes_runs_as_codes(plain: Files, tmp_path: Path) -> None:
    projector = str(tower(plain, tmp_path / "tower.gguf"))
    sizes = []
    for quantization in (None, "int8"):
        runner = load(plain.text, mmproj=projector, dtype="float32", quantization=quantization)
        assert runner.pictures is not None
        sizes.append(runner.pictures.tower.ops.weight_bytes)
        closed(runner)
    assert sizes[1] < 0.6 * sizes[0]


def test_a_file_beside_the_models_is_taken(plain: Files, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    text = tmp_path / "model.gguf"
    shutil.copy(plain.text, text)
    beside = tower(plain, tmp_path / "mmproj-model-f32.gguf")
    assert hub.resolve(str(tmp_path)) == text
    assert ModelFolder(tmp_path.parent).find(f"{tmp_path.name}/mmproj-model-f32") is None
    assert ModelFolder(tmp_path.parent).find(f"{tmp_path.name}/model") is not None
    for mmproj_, expected in (("auto", beside), ("none", None), (str(plain.text), plain.text)):
        assert hub.projector_of(text, mmproj_) == expected
    assert hub.projector_of(plain.theirs.directory, "auto") is None
    for mmproj_, is_read in (("auto", True), ("none", False)):
        runner = load(text, mmproj=mmproj_)
        assert (runner.pictures is not None) == is_read
        closed(runner)
    shutil.copy(beside, tmp_path / "mmproj-model-Q8_0.gguf")
    with caplog.at_level(logging.WARNING, logger="headrace"):
        assert hub.projector_of(text, "auto") is None
    assert "several towers beside it, mmproj-model-Q8_0.gguf, mmproj-model-f32.gguf" in caplog.text


def test_a_file_beside_the_models_that_cannot_be_read_is_a_warning(
    plain: Files, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    shutil.copy(plain.text, tmp_path / "model.gguf")
    tower(plain, tmp_path / "mmproj-model.gguf", fields={KEY_KIND: "gemma3"})
    with caplog.at_level(logging.WARNING, logger="headrace"):
        runner = load(tmp_path / "model.gguf")
    assert runner.pictures is None
    assert "pictures are refused: mmproj-model.gguf: clip.projector_type is 'gemma3'" in caplog.text
    closed(runner)


WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "projector": ({KEY_KIND: "qwen2.5vl_merger"}, "projector_type is 'qwen2.5vl_merger'; it must be one of idefics3"),
    "sound": ({KEY_VISION: False}, "clip.has_vision_encoder is False; it must be true: sounds are not read"),
    "no vision": ({KEY_VISION: None}, "clip.has_vision_encoder is None"),
    "text": ({KEYS.EMBEDDING_LENGTH: "48"}, "embedding_length is 'a string'; it must be an integer"),
    "missing": ({KEYS.BLOCK_COUNT: None}, "block_count is None; it must be there"),
    "huge": ({KEYS.BLOCK_COUNT: 2**31}, "block_count is 2147483648; it must be from 1 to 512"),
    "zero": ({KEYS.PATCH_SIZE: 0}, "patch_size is 0; it must be from 1 to 8192"),
    "heads": ({KEYS.Attention.HEAD_COUNT: 5}, "head_count is 5; it must be a divisor of embedding_length, 48"),
    "patch": ({KEYS.PATCH_SIZE: 57}, "patch_size is 57; it must be at most image_size, 56"),
    "side": ({KEYS.IMAGE_SIZE: 8192}, "image_size is 8192; it must be at most 128 times patch_size"),
    "places": ({KEYS.IMAGE_SIZE: 70}, "shape of v.position_embd.weight is (48, 16); it must be (48, 25)"),
    "factor": ({KEYS.Projector.SCALE_FACTOR: 3}, "scale_factor is 3; it must be a divisor of image_size / patch_size"),
    "longest": ({KEYS.PREPROC_IMAGE_SIZE: 2**20}, "preproc_image_size is 1048576; it must be from 1 to 16384"),
    "colours": ({KEYS.IMAGE_MEAN: [0.5, 0.5]}, "image_mean is [0.5, 0.5]; it must be three numbers"),
    "many colours": ({KEYS.IMAGE_MEAN: [0.5] * 9}, "image_mean is '9 elements'"),
    "deviation": ({KEYS.IMAGE_STD: [0.0, 0.5, 0.5]}, "image_std is [0.0, 0.5, 0.5]; it must be three numbers"),
    "infinite": ({KEYS.IMAGE_STD: [math.inf, 0.5, 0.5]}, "image_std is inf; it must be finite"),
    "epsilon": ({KEYS.Attention.LAYERNORM_EPS: 2.0}, "layer_norm_epsilon is 2.0; it must be from 0 to 1"),
    "width": ({KEYS.FEED_FORWARD_LENGTH: 81}, "has shape [80, 48], the metadata make it [81, 48]"),
    "layers": ({KEYS.BLOCK_COUNT: 1}, "16 tensors of tower.gguf have no place in the model"),
}  # fmt: skip


@pytest.mark.parametrize("case", WRONG)
def test_S_27_metadata_that_make_no_tower_are_refused_by_name(plain: Files, case: str, tmp_path: Path) -> None:
    fields, reason = WRONG[case]
    projector = tower(plain, tmp_path / "tower.gguf", fields=fields)
    with pytest.raises(CheckpointError, match=re.escape(reason)) as refusal:
        load(plain.text, mmproj=str(projector))
    assert "tower.gguf" in str(refusal.value)


OTHERS: dict[str, tuple[str, str, dict[str, Any], str]] = {
    "tiles": ("internvl", "internvl", {KEYS.PREPROC_MIN_TILES: 9}, "preproc_min_tiles is 9; it must be at most"),
    "merge": ("pixtral", "pixtral", {KEYS.SPATIAL_MERGE_SIZE: 2}, "spatial_merge_size is 2; it must be 1 without"),
    "layer": ("padded", "mlp", {"clip.vision.feature_layer": [4]}, "feature_layer is [4]; it must be one layer, from"),
    "stack": ("padded", "mlp", {"clip.vision.feature_layer": [1, 3]}, "feature_layer is [1, 3]; it must be one layer"),
    "joined": ("llama4", "llama4", {KEYS.Projector.SCALE_FACTOR: 4}, "feed_forward_length is 192; it must be that of"),
    "turns": ("pixtral", "pixtral", {KEYS.Attention.HEAD_COUNT: 8}, "head_count is 8; it must be one whose heads have"),
}


@pytest.mark.parametrize("case", OTHERS)
def test_settings_of_other_towers_are_refused_by_name(case: str, tmp_path: Path) -> None:
    family, kind, changes, reason = OTHERS[case]
    each = CASES[family]
    theirs = each.write(tmp_path / "theirs")
    path = tmp_path / "tower.gguf"
    mmproj.write_tower(theirs.directory, path, kind, each.fields | changes, names=each.names, left=each.left)
    with pytest.raises(CheckpointError, match=re.escape(reason)):
        projectors.read(path)


def test_tensors_that_make_no_tower_are_refused_by_name(plain: Files, tmp_path: Path) -> None:
    for left, more, reason in (
        (r"layers\.1\.mlp\.fc1\.weight", {}, "layers.1.mlp.fc1.weight is missing"),
        (r"connector", {}, "mm.model.fc.weight is None; it must be there"),
        ("", {"v.window": np.ones(3, np.float32)}, "1 tensors of tower.gguf have no place in the model: v.window"),
    ):
        projector = tower(plain, tmp_path / "tower.gguf", left=left, more=more)
        with pytest.raises(CheckpointError, match=re.escape(reason)):
            load(plain.text, mmproj=str(projector))


def test_tiles_of_llava_next_are_refused(tmp_path: Path) -> None:
    case = CASES["padded"]
    theirs, path = case.write(tmp_path / "theirs"), tmp_path / "tower.gguf"
    more = {"model.image_newline": np.ones(64, np.float32)}
    mmproj.write_tower(theirs.directory, path, "mlp", case.fields, names=case.names, more=more)
    with pytest.raises(CheckpointError, match="'model.image_newline'; it must be one of LLaVA 1.5"):
        projectors.read(path)


def test_S_27_damaged_metadata_are_refused_or_a_tower(plain: Files, tmp_path: Path) -> None:
    path = tower(plain, tmp_path / "tower.gguf")
    data, source, outcomes = path.read_bytes(), random.Random(0), Counter[str]()
    first = data.index(b"clip.has_vision_encoder")
    size = data.index(b"v.blk.1.") - first  # the metadata, and the entries of some tensors
    for _ in range(400):
        changed = bytearray(data)
        for _ in range(source.choice([1, 1, 4])):
            changed[first + source.randrange(size)] = source.choice([0, 1, 255, source.randrange(256)])
        path.write_bytes(changed)
        try:
            projector = projectors.read(path)
            gguf_tower.read(projector.file, projector.kind, projector.values)
        except CheckpointError:
            outcomes["refused"] += 1
        else:
            outcomes["read"] += 1
    assert min(outcomes["refused"], outcomes["read"]) > 20  # negative control: damage matters, and not always


def test_other_files_are_refused(plain: Files, tmp_path: Path) -> None:
    projector = str(tower(plain, tmp_path / "tower.gguf"))
    with pytest.raises(CheckpointError, match="the tower's rows have 64 numbers, the text's"):
        load("builtin", mmproj=projector)
    with pytest.raises(CheckpointError, match="general.architecture is 'llama'; it must be clip"):
        load(plain.text, mmproj=str(plain.text))
    with pytest.raises(ModelNotFoundError, match=r"gone\.gguf: no such file; mmproj names"):
        load(plain.text, mmproj=str(tmp_path / "gone.gguf"))
    with pytest.raises(RequestError, match="auto, none, or a GGUF file"):
        EngineConfig(mmproj=" ")


def test_a_served_model_reads_pictures_with_its_file(plain: Files, tmp_path: Path) -> None:
    projector = tower(plain, tmp_path / "tower.gguf")
    parts = [
        {"type": "image_url", "image_url": {"url": data_url(noisy(1))}},
        {"type": "text", "text": "What is it?"},
    ]
    messages: Any = [{"role": "user", "content": parts}]
    llm = LLM(str(plain.theirs.directory), dtype="float32")
    [expected] = llm.chat(messages, SamplingParams(temperature=0, max_tokens=12))
    llm.close()
    flags = "--served-model-name", "eyes", "--dtype", "float32", "--temp", "0"
    body = {"messages": messages, "max_tokens": 12}
    with serve(str(plain.text), *flags, "-mm", str(projector)) as served:
        reply = HTTP.post(f"{served.url}/v1/chat/completions", json=body).json()
        other = body | {
            "messages": [{"role": "user", "content": [parts[0] | {"image_url": {"url": data_url(noisy(2))}}]}]
        }
        control = HTTP.post(f"{served.url}/v1/chat/completions", json=other).json()
    assert reply["choices"][0]["message"]["content"] == expected.outputs[0].text
    assert reply["usage"]["prompt_tokens"] == len(expected.prompt_token_ids)
    assert control["choices"][0]["message"]["content"] != expected.outputs[0].text
    with serve(str(plain.text), *flags, "--no-mmproj") as served:
        refusal = HTTP.post(f"{served.url}/v1/chat/completions", json=body)
    assert refusal.status_code == 400
    assert "must be text: nothing else is read" in refusal.text
