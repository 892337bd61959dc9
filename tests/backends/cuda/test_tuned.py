"""Configs measured on a GPU: which one is taken, and that files that do not fit change nothing."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from headrace.backends.cuda import tuned
from headrace.backends.cuda.kernels import attention, linear, linear_codes, linear_ws
from headrace.backends.cuda.kernels.linear import KERNEL

CONFIGS = KERNEL.configs
BY_ROWS = {"16": CONFIGS[1].name, "64": CONFIGS[5].name}


@pytest.mark.parametrize(("num_rows", "place"), [(1, 1), (16, 1), (17, 5), (64, 5), (65, 0), (8192, 0)])
def test_the_least_bucket_that_holds_the_rows_else_the_default(num_rows: int, place: int) -> None:
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


def test_a_gpu_without_a_file_takes_that_of_the_same_chip(tmp_path: Path) -> None:
    (tmp_path / f"{tuned.HOPPER}.json").write_text(json.dumps({"kernels": {"_linear": {}}}))
    assert tuned.read("h200", tmp_path) == {"_linear": {}}
    (tmp_path / "h200.json").write_text(json.dumps({"kernels": {"_norm": {}}}))
    assert tuned.read.__wrapped__("h200", tmp_path) == {"_norm": {}}


def suited(kernel: str, shape: str) -> set[str]:
    """Return the names of the configs of a kernel that suit a shape of a file, on Hopper."""
    size, *words = shape.split()
    if kernel.startswith("attention"):
        groups, head_dim = size.split("x")
        heads, kv_heads = map(int, groups.split("/"))
        types = [getattr(torch, word) for word in words]
        chosen = attention.FEW if kernel == "attention few" else attention.MANY
        return {config.name for config in attention.configs(chosen, heads, kv_heads, int(head_dim), *types)}
    if kernel == "_linear_codes":
        return {config.name for config in linear_codes.KERNEL.configs if config.fits(90)}
    assert kernel in ("_linear", "_linear_ws"), "say here which configs suit"
    assert words[0] == "bfloat16", "say here which configs suit"
    weight = torch.empty(*map(int, size.split("x")), dtype=torch.bfloat16, device="meta")
    names = {config.name for config in KERNEL.configs if config.fits(90) and linear.suits(config, weight)}
    if kernel == "_linear":
        return names
    # It stands for `_linear`, so either may be the fastest.
    configs = linear_ws.KERNEL.configs
    return names | {config.name for config in configs if linear_ws.suits(config, weight, "gated" in words)}


def test_files_name_configs_that_suit_their_shapes() -> None:
    paths = list(tuned.FOLDER.glob("*.json"))
    assert paths
    for path in paths:
        for kernel, shapes in tuned.read(path.stem).items():
            for shape, by_rows in shapes.items():
                assert set(by_rows.values()) <= suited(kernel, shape), (path.name, kernel, shape)


def test_a_gpu_finds_its_file(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA H100 80GB HBM3")
    monkeypatch.setattr(tuned, "gpu_name", tuned.gpu_name.__wrapped__)
    shape = tuned.matrix_shape(2048, 2048, "bfloat16", False)
    chosen = [tuned.choose(torch.device("cuda"), KERNEL.name, shape, n, CONFIGS, CONFIGS[-1]) for n in (250, 8192)]
    assert [config.name for config in chosen] == ["BR=64 BN=128 BK=64 SWAP=1 APART=1 BAND=1 w4 s4", CONFIGS[-1].name]


def test_many_rows_take_the_fastest_measured_of_two_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tuned, "gpu_name", lambda device: "h100-80gb-hbm3")
    both, shape = [*linear_ws.KERNEL.configs, *CONFIGS], tuned.matrix_shape(4096, 4096, "bfloat16", False)
    default = linear_ws.KERNEL.configs[1]
    chosen = [
        tuned.choose(torch.device("cuda"), linear_ws.KERNEL.name, shape, rows, both, default)
        for rows in (65, 256, 257, 8192, 8193)
    ]
    assert chosen[0].name == "BR=64 BN=128 BK=64 SWAP=1 APART=1 BAND=1 w4 s4"
    assert [each.tiles["BR"] for each in chosen[1:]] == [64, 128, 128, default.tiles["BR"]]
    assert [linear_ws.is_config(each) for each in chosen] == [False, True, True, True, True]
    assert chosen[-1] is default
