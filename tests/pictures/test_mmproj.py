"""Towers in GGUF files: what is read, and what is computed, is what the folder of safetensors gives."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
from tests.pictures import mmproj, test_internvl, test_llama4, test_llava, test_mistral3
from tests.support import picture_model
from tests.support.harness import load
from tests.support.pictures import Ours, Prompt, Theirs, answers, logits_of, wrong_pictures

from headrace.runner.runner import Runner
from headrace.text.pictures.forms import CLIP

import gguf  # isort: skip

KEYS = gguf.Keys.ClipVision


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
        files.theirs.directory, path, case.kind, fields, names=case.names, left=case.left, **options
    )


def closed(runner: Runner) -> None:
    runner.program.close()
    if runner.pictures is not None:
        runner.pictures.close()


def read(files: Files, path: Path, projector: Path | None) -> Prompt:
    ours = Ours(path, projector)
    try:
        return ours.read(files.theirs.prompt, files.theirs.images)
    finally:
        ours.close()


@pytest.mark.parametrize("half", [False, True], ids=["F32", "F16"])
def test_logits_are_those_of_safetensors(files: Files, half: bool, tmp_path: Path) -> None:
    projector = tower(files, tmp_path / "tower.gguf", half=half)
    directory = files.theirs.directory
    plain = load(mmproj.rounded_copy(directory, tmp_path / "rounded") if half else directory, dtype="float32")
    ours = load(files.text, mmproj=str(projector), dtype="float32")
    prompt = read(files, files.text, projector)
    [expected], [logits] = (logits_of(runner, [prompt], [512]) for runner in (plain, ours))
    np.testing.assert_allclose(logits, expected, atol=1e-4, rtol=0)
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
