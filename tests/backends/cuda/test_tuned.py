"""Configs measured on a GPU: which one is taken, and that files that do not fit change nothing."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from headrace.backends.cuda import tuned
from headrace.backends.cuda.kernels.linear import KERNEL

CONFIGS = KERNEL.configs
BY_ROWS = {"16": CONFIGS[1].name, "64": CONFIGS[5].name}


@pytest.mark.parametrize(("num_rows", "place"), [(1, 1), (16, 1), (17, 5), (64, 5), (8192, 5)])
def test_the_least_bucket_that_holds_the_rows_else_the_largest(num_rows: int, place: int) -> None:
    assert tuned.pick(BY_ROWS, num_rows, CONFIGS, CONFIGS[0]) is CONFIGS[place]


def test_the_default_where_nothing_is_measured_and_for_a_config_that_is_gone() -> None:
    assert tuned.pick({}, 4, CONFIGS, CONFIGS[0]) is CONFIGS[0]
    assert tuned.pick({"16": "BR=3"}, 4, CONFIGS, CONFIGS[2]) is CONFIGS[2]


def test_names_of_configs_differ() -> None:
    assert len({config.name for config in CONFIGS}) == len(CONFIGS)


def test_a_cpu_has_the_defaults() -> None:
    shape = tuned.matrix_shape(64, 64, "bfloat16", False)
    assert tuned.choose(torch.device("cpu"), KERNEL.name, shape, 4, CONFIGS, CONFIGS[3]) is CONFIGS[3]


def test_a_file_is_read_and_a_broken_one_is_not_used(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "h200.json").write_text(json.dumps({"kernels": {KERNEL.name: {"64x64 bfloat16": BY_ROWS}}}))
    (tmp_path / "h100.json").write_text("{")
    assert tuned.read("h200", tmp_path)[KERNEL.name]["64x64 bfloat16"] == BY_ROWS
    assert tuned.read("h100", tmp_path) == {}
    assert "h100.json is not used" in caplog.text
    assert tuned.read("a100", tmp_path) == {}


def test_files_name_configs_that_exist() -> None:
    names = {config.name for config in CONFIGS}
    for path in tuned.FOLDER.glob("*.json"):
        for by_rows in tuned.read(path.stem).get(KERNEL.name, {}).values():
            assert set(by_rows.values()) <= names
