"""Towers in GGUF files: what is read, and what is computed, is what the folder of safetensors gives."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
from tests.pictures import mmproj
from tests.support import picture_model
from tests.support.harness import load
from tests.support.pictures import Ours, Prompt, Theirs, answers, logits_of, wrong_pictures

from headrace.runner.runner import Runner

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


CASES = {
    "idefics3": Case(
        "idefics3",
        idefics3,
        {KEYS.Projector.SCALE_FACTOR: 2, KEYS.PREPROC_IMAGE_SIZE: 112, KEYS.USE_GELU: True,
         KEYS.Attention.LAYERNORM_EPS: 1e-6},
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
    assert ours.pictures == theirs.pictures
    sides = [Ours(files.theirs.directory), Ours(files.text, projector)]
    for picture in theirs.pictures:
        numbers = [side.pixels(picture) for side in sides]
        np.testing.assert_allclose(numbers[0], numbers[1], atol=1e-6, rtol=0)
    for side in sides:
        side.close()
