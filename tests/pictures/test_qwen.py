"""Qwen's models that read pictures against transformers: pixels, tokens, logits, and the tokens that follow, in any way
that the engine computes them. Rows turn by time, line and column, also those of the text behind a picture."""

from __future__ import annotations

import json
import logging
import random
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.pictures import qwen
from tests.pictures.qwen import FAMILIES, Oracle, Prompt
from tests.support.harness import load
from tests.support.law import Bits, assert_same, run
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import smart_resize

from headrace.backends import places
from headrace.backends.base import RopeTable
from headrace.engine import build
from headrace.engine.core import EngineCore
from headrace.models.axes import by_axes, in_sections, in_turn
from headrace.models.config import ModelConfig
from headrace.models.towers import rows as rows_module
from headrace.models.towers.qwen2_5_vl import Tower as WindowTower
from headrace.models.towers.qwen3_5 import Tower
from headrace.models.towers.rows import turned
from headrace.protocol.config import EngineConfig
from headrace.protocol.errors import CheckpointError, RequestError
from headrace.protocol.params import SamplingParams
from headrace.protocol.pictures import Picture, digest_of
from headrace.protocol.step import Request
from headrace.text.pictures import cuts
from headrace.text.pictures.forms import norm_of

ON = ({"backend": "cpu"}, {"backend": "torch_ref"}, {"backend": "cuda", "device": "cpu"})
NUM_NEW = 6


@pytest.fixture(scope="module", params=FAMILIES)
def oracle(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Oracle:
    return qwen.write(tmp_path_factory.mktemp(request.param), request.param, NUM_NEW)


@pytest.fixture(scope="module")
def prompt(oracle: Oracle) -> Prompt:
    return qwen.read(oracle)


def family_of(oracle: Oracle) -> str:
    return str(json.loads((oracle.directory / "config.json").read_text())["model_type"])


def make_core(oracle: Oracle, **options: Any) -> EngineCore:
    common = {"num_gpu_blocks_override": 64, "num_threads": 1, "max_num_seqs": 8, "dtype": "float32"}
    return build.build_engine(EngineConfig(model=str(oracle.directory), **(common | options)))


def make_request(prompt: Prompt, name: str = "a", **fields: Any) -> Request:
    params = SamplingParams(temperature=0.0, max_tokens=NUM_NEW, ignore_eos=True, logprobs=2, seed=1)
    fields = {"prompt_token_ids": prompt.token_ids, "pictures": prompt.pictures, "params": params} | fields
    return Request(request_id=name, **fields)


def test_pixels_and_tokens_are_those_of_the_processor(oracle: Oracle, prompt: Prompt) -> None:
    assert prompt.token_ids == oracle.token_ids[: oracle.num_prompt]
    assert len({(picture.height, picture.width) for picture in prompt.pictures}) == 3
    runner = load(oracle.directory, num_gpu_blocks_override=64)
    settings = json.loads((oracle.directory / "preprocessor_config.json").read_text())
    norm, tower = norm_of(settings, "qwen3_vl"), runner.pictures.tower  # type: ignore[union-attr]
    at = 0
    for picture in prompt.pictures:
        grid = tower.grid(picture.height, picture.width)
        ours = tower.patches(qwen.pixels_of(picture, norm))[np.argsort(tower.order(*grid))]
        theirs = oracle.pixels[at : at + len(ours)][np.argsort(Tower.order(tower, *grid))]
        assert np.abs(ours[:, : theirs.shape[1]] - theirs).max() <= 1e-5
        at += len(ours)
    assert at == len(oracle.pixels)
    runner.close()


@pytest.mark.parametrize("on", ON, ids=lambda on: on["backend"])
def test_logits_are_those_of_transformers_however_a_prompt_is_cut(
    on: dict[str, str], oracle: Oracle, prompt: Prompt
) -> None:
    """Of the prompt and of the tokens after it. A picture lies in three chunks, and decoding takes a row at a time."""
    runner = load(oracle.directory, num_gpu_blocks_override=64, dtype="float32", **on)
    if runner.pictures is None:
        assert (family_of(oracle), on["backend"]) == ("qwen2_5_vl", "cuda")
        return
    whole = qwen.follow(runner, oracle.token_ids, prompt.pictures)
    assert np.abs(whole - oracle.logits).max() < 1e-4
    [(first, num)] = prompt.pictures[0].spans
    cuts = [3, first + 5, first + 6, first + num, *range(oracle.num_prompt, len(oracle.token_ids))]
    assert np.array_equal(qwen.follow(runner, oracle.token_ids, prompt.pictures, cuts), whole)
    plain = qwen.follow(runner, oracle.token_ids, prompt.pictures, turns=False)
    assert np.abs(plain[first + num :] - oracle.logits[first + num :]).max() > 0.01
    runner.close()


@pytest.fixture(scope="module")
def alone(oracle: Oracle, prompt: Prompt) -> Bits:
    core = make_core(oracle)
    bits = run(core, [make_request(prompt)])["a"]
    assert bits[0] == oracle.token_ids[oracle.num_prompt :]
    core.close()
    return bits


@pytest.mark.parametrize(
    "options",
    [
        {"max_num_batched_tokens": 7},
        {"max_num_batched_tokens": 13, "enable_prefix_caching": False},
        {"enable_prefix_caching": False, "preempt": 3},
        {"preempt": 2},
    ],
    ids=str,
)
def test_an_answer_does_not_depend_on_chunks_neighbours_caches_or_preemption(
    options: dict[str, Any], oracle: Oracle, prompt: Prompt, alone: Bits
) -> None:
    options = dict(options)
    preempt = options.pop("preempt", 0)
    core = make_core(oracle, **options)
    second = [picture for picture in prompt.pictures if picture is not prompt.pictures[0]]
    requests = [
        make_request(prompt),
        make_request(prompt, "text", pictures=[]),
        make_request(prompt, "two", pictures=second),
        make_request(prompt, "again"),
    ]
    for _ in range(2):  # the second time out of the cache
        results = run(core, requests, preempt_every=preempt)
        assert results["a"] == results["again"] == alone
        assert results["text"][1] != alone[1] != results["two"][1]
    resumed = run(core, [make_request(prompt, "rest", resume_token_ids=alone[0][:2])])["rest"]
    assert resumed == (alone[0][2:], alone[1][2 * 3 * 8 :])
    core.close()


@pytest.mark.parametrize("on", ON[1:], ids=lambda on: on["backend"])
def test_other_backends_answer_the_same(on: dict[str, str], oracle: Oracle, prompt: Prompt, alone: Bits) -> None:
    """On cuda, texts are computed in overlapping steps, and texts behind pictures are not."""
    core = make_core(oracle, **on)
    if not core.info.pictures:
        with pytest.raises(RequestError, match="the model reads text only"):
            core.add(make_request(prompt))
        return
    results = run(core, [make_request(prompt), make_request(prompt, "text", pictures=[])])
    assert results["a"][0] == alone[0]
    assert_same(run(core, [make_request(prompt)]), results)
    core.close()


def test_texts_have_the_bits_that_they_have_without_a_tower(oracle: Oracle, prompt: Prompt, tmp_path: Path) -> None:
    without = tmp_path / "text"
    shutil.copytree(oracle.directory, without)
    (without / "preprocessor_config.json").unlink()
    text = make_request(prompt, pictures=[])
    results = []
    for directory in (oracle.directory, without):
        core = make_core(Oracle(directory, *oracle[1:]))
        results.append(run(core, [text]))
        core.close()
    assert_same(*results)
    core = make_core(Oracle(without, *oracle[1:]))
    with pytest.raises(RequestError, match="the model reads text only"):
        core.add(make_request(prompt))
    core.close()


@pytest.mark.parametrize("part", ["turns", "patches", "windows"])
def test_each_part_of_the_tower_counts(
    part: str, oracle: Oracle, prompt: Prompt, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A tower whose patches do not turn by line and column, or that has no learned positions, or in which all patches
    see each other, gives other logits."""
    if part == {"qwen2_5_vl": "patches"}.get(family_of(oracle), "windows"):
        pytest.skip("this tower has no such part")
    right = Tower.patches

    def patches(tower: Tower, pixels: qwen.F32) -> qwen.F32:
        rows = right(tower, pixels)
        rows[:, tower.num_numbers :] = 0
        return rows

    replaced = {"turns": lambda *_: None, "patches": patches, "windows": lambda _, *size: [size[0] * size[1] // 64]}
    monkeypatch.setattr(WindowTower if part == "windows" else Tower, part, replaced[part])
    runner = load(oracle.directory, num_gpu_blocks_override=64)
    assert np.abs(qwen.follow(runner, oracle.token_ids, prompt.pictures) - oracle.logits).max() > 0.01
    runner.close()


def test_rows_of_layers_of_the_tower_are_added_in_their_order(oracle: Oracle, prompt: Prompt) -> None:
    runner = load(oracle.directory, num_gpu_blocks_override=64)
    source: Any = runner.pictures
    size = len(source.blank) // runner.program.model.hidden_size - 1
    assert size == ("deepstack_visual_indexes" in (oracle.directory / "config.json").read_text()) * 2
    if size:
        for picture in prompt.pictures:
            rows = source.features(picture)
            rows[:, 64 : 3 * 64] = np.roll(rows[:, 64 : 3 * 64], 64, axis=1)
        assert np.abs(qwen.follow(runner, oracle.token_ids, prompt.pictures) - oracle.logits).max() > 0.01
    runner.close()


def of_size(first: int, lines: int, columns: int, side: int) -> Picture:
    pixels = bytes(3 * lines * columns * side**2)
    height, width = lines * side, columns * side
    return Picture(digest_of(pixels, height, width), pixels, height, width, [(first, lines * columns)])


def test_rows_turn_as_transformers_has_it(oracle: Oracle) -> None:
    """Any pictures between any texts; from any place on as from the beginning."""
    import transformers

    config = transformers.AutoConfig.from_pretrained(oracle.directory)
    name = type(config).__name__.removesuffix("Config")
    module = getattr(transformers, f"{name}Model")
    rng = random.Random(1)
    for _ in range(20):
        types, pictures, grids = [0] * rng.randrange(1, 5), [], []
        for _ in range(rng.randrange(1, 4)):
            lines, columns = rng.randrange(1, 7), rng.randrange(1, 7)
            pictures.append(of_size(len(types), lines, columns, 16))
            grids.append([1, 2 * lines, 2 * columns])
            types += [1] * (lines * columns) + [0] * rng.randrange(1, 9)
        stand_in = type("StandIn", (), {"config": config, "get_vision_position_ids": module.get_vision_position_ids})()
        their, delta = module.get_rope_index(
            stand_in, torch.zeros(1, len(types), dtype=torch.int64), torch.tensor([types]), torch.tensor(grids)
        )
        ours = turned(np.arange(len(types)), pictures, 16)
        assert ours.T.tolist() == their[:, 0].tolist()
        assert turned(np.arange(len(types) + 5, len(types) + 6), pictures, 16).tolist() == [
            [len(types) + 5 + int(delta)] * 3
        ]
        at = rng.randrange(len(types))
        assert np.array_equal(turned(np.arange(at, len(types)), pictures, 16), ours[at:])


def test_a_picture_in_two_runs_has_no_lines() -> None:
    picture = of_size(3, 2, 2, 16)
    broken = Picture(picture.digest, picture.pixels, 32, 32, [(3, 2), (7, 2)])
    with pytest.raises(ValueError, match="in 2 runs, expected one"):
        turned(np.arange(9), [broken], 16)


def make_table(num_pairs: int = 8, length: int = 20) -> RopeTable:
    numbers = np.arange(length * num_pairs, dtype=np.float32).reshape(length, num_pairs)
    return RopeTable(numbers, -numbers)


def test_pairs_turn_by_their_own_axis() -> None:
    table = in_turn(make_table(), ModelConfig({"mrope_section": [3, 3, 2]}), (24, 20, 20))
    assert table.axes is not None
    assert table.axes.of_pairs.tolist() == [0, 1, 2, 0, 1, 2, 0, 1]
    sections = in_sections(make_table(), ModelConfig({"mrope_section": [4, 3, 1]}), (16, 24, 24))
    assert sections.axes is not None
    assert sections.axes.of_pairs.tolist() == [0, 0, 0, 0, 1, 1, 1, 2]
    assert in_sections(make_table(), ModelConfig({}), (16, 24, 24)).axes is None
    rows, at = np.zeros(9, np.int32), np.array([[4, 4, 4], [4, 5, 6], [9, 9, 9]])
    places.fill(rows, at, table)
    assert rows[:3].tolist() == [4, 20, 9]
    assert table.cos[20].tolist() == [32, 41, 50, 35, 44, 53, 38, 47]
    assert table.sin[20].tolist() == (-table.cos[20]).tolist()


@pytest.mark.parametrize("at", [[20, 20, 20], [-1, 0, 0]])
def test_places_beyond_a_table_are_refused(at: list[int]) -> None:
    with pytest.raises(ValueError, match="a table of 20"):
        places.fill(np.zeros(4, np.int32), np.array([at]), by_axes(make_table(), np.zeros(8, np.int64)))


def test_more_rows_than_a_table_has_room_for_are_refused() -> None:
    table = by_axes(make_table(), np.zeros(8, np.int64), num_spare=1)
    with pytest.raises(ValueError, match="of 2 rows"):
        places.fill(np.zeros(4, np.int32), np.array([[1, 2, 3]] * 2), table)


@pytest.mark.parametrize("value", [[1, 2], "all", [1, 2, -1], [True, 2, 3]])
def test_a_malformed_number_of_pairs_is_refused(value: Any) -> None:
    with pytest.raises(CheckpointError, match="mrope_section is .*, expected three numbers of pairs"):
        in_turn(make_table(), ModelConfig({"mrope_section": value}), (24, 20, 20))


WRONG: list[tuple[dict[str, Any], str]] = [
    ({"window_size": 15}, "window_size is 15, expected one to 22 patches, in squares of 16 pixels"),
    ({"window_size": 192}, "window_size is 192, expected one to 22 patches"),
    ({"fullatt_block_indexes": [5]}, "fullatt_block_indexes is [5], expected numbers of layers"),
    ({"deepstack_visual_indexes": [3]}, "deepstack_visual_indexes is [3], expected numbers of layers"),
    ({"deepstack_visual_indexes": "0"}, "deepstack_visual_indexes is '0', expected numbers of layers"),
    ({"num_heads": 8}, "vision_config has heads of 6 numbers, no multiple of 4"),
    ({"out_hidden_size": 32}, "out_hidden_size is 32, the text has 64"),
    ({"spatial_merge_size": 0}, "spatial_merge_size is 0"),
    ({"num_position_embeddings": 49}, "shape"),
]


@pytest.mark.parametrize(("changes", "reason"), WRONG, ids=lambda each: str(each)[:30])
def test_a_tower_that_does_not_fit_is_refused_and_the_text_served(
    changes: dict[str, Any], reason: str, tmp_path_factory: pytest.TempPathFactory, caplog: pytest.LogCaptureFixture
) -> None:
    directory = tmp_path_factory.mktemp("wrong")
    qwen.write(directory, "qwen2_5_vl" if "window" in reason or "fullatt" in reason else "qwen3_vl", 1)
    path = directory / "config.json"
    config = json.loads(path.read_text())
    config["vision_config"] |= changes
    path.write_text(json.dumps(config))
    with caplog.at_level(logging.WARNING):
        runner = load(directory, num_gpu_blocks_override=64)
    assert runner.pictures is None
    assert "pictures are refused: " in caplog.text
    assert reason in caplog.text
    runner.close()


def test_sizes_are_those_of_the_processor() -> None:
    from PIL import Image

    rng, settings = random.Random(3), {"patch_size": 14, "merge_size": 2}
    for _ in range(60):
        width, height = (int(2 ** rng.uniform(2, 11)) for _ in range(2))
        least = rng.randrange(1000, 90000)
        bounds = {"shortest_edge": least, "longest_edge": rng.randrange(2 * least, 10 * least)}
        keys = {"size": bounds} if rng.random() < 0.5 else {
            "min_pixels": bounds["shortest_edge"], "max_pixels": bounds["longest_edge"]
        }  # fmt: skip
        if max(width, height) > 200 * min(width, height):
            continue
        [image] = cuts.qwen(Image.new("RGB", (width, height)), cuts.Settings(settings | keys)).images
        assert (image.height, image.width) == smart_resize(height, width, 28, *bounds.values())


@pytest.mark.parametrize(
    ("size", "settings", "reason"),
    [
        ((2010, 10), {}, "expected sides of at most 200 to 1"),
        ((30, 28), {"do_resize": False}, "30 x 28 pixels, expected multiples of 28"),
        (
            (600, 400),
            {"do_resize": False, "patch_size": 2},
            "600 x 400 pixels, expected at most 16384 patches of 2 x 2",
        ),
        ((60, 40), {"size": {"shortest_edge": 2**24}}, "pixels, expected at most 16384 patches of 14 x 14"),
        ((30, 28), {"size": {"shortest_edge": 0}}, "size.shortest_edge is 0"),
        ((30, 28), {"max_pixels": "all"}, "max_pixels is 'all'"),
    ],
)
def test_pictures_and_settings_out_of_bounds_are_refused(
    size: tuple[int, int], settings: dict[str, Any], reason: str
) -> None:
    from PIL import Image

    with pytest.raises(ValueError, match=reason):
        cuts.qwen(Image.new("RGB", size), cuts.Settings(settings))


def test_a_picture_has_at_most_the_patches_that_a_tower_takes() -> None:
    from PIL import Image

    settings = cuts.Settings({"patch_size": 4, "merge_size": 2, "size": {"shortest_edge": 64, "longest_edge": 2**30}})
    [image] = cuts.qwen(Image.new("RGB", (900, 800)), settings).images
    assert 0.9 * cuts.MAX_QWEN_PATCHES < image.width * image.height / 16 <= cuts.MAX_QWEN_PATCHES
    [same] = cuts.qwen(Image.new("RGB", (16, 24)), cuts.Settings({"patch_size": 4, "do_resize": False})).images
    assert same.size == (16, 24)


@pytest.fixture(scope="module")
def windowed(tmp_path_factory: pytest.TempPathFactory) -> Oracle:
    return qwen.write(tmp_path_factory.mktemp("windowed"), "qwen2_5_vl", 1)


def test_windows_may_be_computed_some_at_once(windowed: Oracle, monkeypatch: pytest.MonkeyPatch) -> None:
    """Windows of 16 to 36 patches, of which few fit: the rows have the same bits."""
    prompt, rows = qwen.read(windowed), []
    for most in (rows_module.MAX_ROWS, 40):
        monkeypatch.setattr(rows_module, "MAX_ROWS", most)
        runner = load(windowed.directory, num_gpu_blocks_override=64)
        assert runner.pictures is not None
        rows.append([runner.pictures.features(picture) for picture in prompt.pictures])
        runner.close()
    assert all(np.array_equal(*pair) for pair in zip(*rows, strict=True))


@pytest.mark.parametrize(
    ("sizes", "most", "most_rows", "expected"),
    [
        ([36, 36, 24, 4], 9, 99, [[36, 36, 24], [4]]),
        ([5, 5, 5], 2, 100, [[5, 5], [5]]),
        ([700, 3], 2, 512, [[700], [3]]),
    ],
)
def test_windows_in_portions(sizes: list[int], most: int, most_rows: int, expected: list[list[int]]) -> None:
    assert list(rows_module.portions(sizes, most, most_rows)) == expected


def test_the_config_of_the_releases_has_no_text_config(windowed: Oracle, tmp_path: Path) -> None:
    released = tmp_path / "released"
    shutil.copytree(windowed.directory, released)
    config = json.loads((released / "config.json").read_text())
    text = config.pop("text_config")
    rope = text.pop("rope_parameters")
    scaling = {"type": "mrope", "mrope_section": rope["mrope_section"]}
    flat = text | config | {"rope_theta": rope["rope_theta"], "rope_scaling": scaling}
    (released / "config.json").write_text(json.dumps(flat))
    prompt, logits = qwen.read(windowed), []
    for directory in (windowed.directory, released):
        runner = load(directory, num_gpu_blocks_override=64)
        logits.append(qwen.follow(runner, windowed.token_ids, prompt.pictures))
        runner.close()
    assert np.array_equal(*logits)


def test_sections_that_do_not_fit_are_refused_and_the_text_served(
    windowed: Oracle, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    other = tmp_path / "other"
    shutil.copytree(windowed.directory, other)
    config = json.loads((other / "config.json").read_text())
    config["text_config"]["rope_parameters"]["mrope_section"] = [6, 5, 4]
    (other / "config.json").write_text(json.dumps(config))
    with caplog.at_level(logging.WARNING):
        assert load(other, num_gpu_blocks_override=64).pictures is None
    assert "pictures are refused: config.json: mrope_section does not fit the heads of the text" in caplog.text


def test_cuda_refuses_windows_by_name(windowed: Oracle, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        runner = load(windowed.directory, num_gpu_blocks_override=64, backend="cuda", device="cpu")
    assert runner.pictures is None
    assert "pictures are refused: backend cuda has no room for a tower of several programs" in caplog.text


def test_a_tower_beside_a_quantised_text(oracle: Oracle, prompt: Prompt) -> None:
    runner = load(oracle.directory, num_gpu_blocks_override=64, quantization="int8")
    logits = qwen.follow(runner, oracle.token_ids, prompt.pictures)
    assert 0 < (logits - oracle.logits).std() < 0.5 * oracle.logits.std()
    runner.close()
