"""Session files: an answer has the same bits with a restored cache as without one, and no file that does not fit, or is
damaged, is restored."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from tests.support import fake
from tests.support.law import make_core, run
from tests.support.shallow import shallow

from headrace.backends.base import LayerShape
from headrace.backends.cpu.cache import SCALED, STORED, Fours
from headrace.backends.cpu.cache import KVCache as HostCache
from headrace.backends.cuda.cache import KVCache as DeviceCache
from headrace.engine import sessions
from headrace.engine.core import EngineCore
from headrace.engine.records.recording import RecordingExecutor
from headrace.engine.sessions import MoveSession, SessionMoved
from headrace.protocol.config import EngineConfig
from headrace.protocol.params import SamplingParams
from headrace.protocol.step import Request

PROMPT = [i * 7 % 1000 + 5 for i in range(150)]
OTHERS = [i * 11 % 1000 + 5 for i in range(400)]


def request(name: str, prompt: list[int], salt: str = "") -> Request:
    params = SamplingParams(temperature=0.8, seed=3, max_tokens=8, ignore_eos=True, logprobs=2)
    return Request(request_id=name, prompt_token_ids=prompt, params=params, cache_salt=salt)


def order(path: Path, restores: bool = False, **more: Any) -> MoveSession:
    fields: dict[str, Any] = {"token_ids": [] if restores else PROMPT, "max_bytes": 2**30, "weights": "w"} | more
    return MoveSession(path=str(path), restores=restores, **fields)


def num_cached(core: EngineCore, prompt: list[int], salt: str = "") -> int:
    return core.scheduler.cache.match(prompt, [core.scheduler.cache.root(salt)], len(prompt))[1]


@pytest.mark.parametrize("options", [{}, {"kv_cache_dtype": "int4"}, {"backend": "torch_ref", "block_size": 8}])
def test_I_13_a_restored_session_gives_the_same_bits(tmp_path: Path, options: dict[str, Any]) -> None:
    core = make_core(model=shallow(1), num_gpu_blocks_override=64, max_model_len=512, **options)
    size = core.info.block_size
    whole = len(PROMPT) // size * size
    bits = run(core, [request("a", PROMPT)])["a"]
    moved = sessions.move(core, order(tmp_path / "s"))
    # The tokens behind the last full block are kept as ids.
    assert (moved.error, moved.token_ids) == ("", PROMPT)
    assert moved.num_bytes == (tmp_path / "s").stat().st_size
    core.reset_prefix_cache()
    # What the blocks held is overwritten.
    run(core, [request("b", OTHERS)])
    core.reset_prefix_cache()
    assert num_cached(core, PROMPT) == 0
    assert sessions.move(core, order(tmp_path / "s", restores=True)).token_ids == PROMPT
    assert num_cached(core, PROMPT) == whole
    core.scheduler.check()
    assert run(core, [request("a", PROMPT)])["a"] == bits
    # Control: other bytes in the blocks give another answer, so they are what was read.
    core.reset_prefix_cache()
    _rewrite(tmp_path / "s", change_blocks=True)
    assert sessions.move(core, order(tmp_path / "s", restores=True)).error == ""
    assert run(core, [request("a", PROMPT)])["a"] != bits
    core.close()


def _rewrite(path: Path, change_blocks: bool = False, **fields: Any) -> None:
    """Write a file anew with other fields in its header or other blocks, and the checksum that it then has."""
    raw = path.read_bytes()[: -sessions.DIGEST_BYTES]
    begin = len(sessions.MAGIC) + 8
    length = int.from_bytes(raw[begin - 8 : begin], "little")
    header = msgspec.msgpack.decode(raw[begin : begin + length], type=sessions.Header)
    head = msgspec.msgpack.encode(msgspec.structs.replace(header, **fields))
    blocks = bytearray(raw[begin + length :])
    if change_blocks:
        blocks = bytearray(len(blocks))
    raw = sessions.MAGIC + len(head).to_bytes(8, "little") + head + blocks
    path.write_bytes(raw + hashlib.blake2b(raw, digest_size=sessions.DIGEST_BYTES).digest())


@pytest.fixture
def core() -> Iterator[EngineCore]:
    result = fake.build(EngineConfig(model="fake", num_gpu_blocks_override=40))
    yield result
    result.close()


@pytest.fixture
def saved(core: EngineCore, tmp_path: Path) -> Path:
    """A file of PROMPT, whose blocks are cached no more."""
    prompt = [i % 250 for i in PROMPT]
    run(core, [request("a", prompt)])
    moved = sessions.move(core, order(tmp_path / "s", token_ids=prompt))
    assert (moved.error, len(moved.token_ids)) == ("", 150)
    core.reset_prefix_cache()
    return tmp_path / "s"


def refused(core: EngineCore, path: Path, **more: Any) -> str:
    """The error of a file that is not restored; nothing is cached of it, and no block is lost."""
    moved = sessions.move(core, order(path, restores=True, **more))
    core.scheduler.check()
    assert (len(core.scheduler.cache), core.scheduler.pool.num_held) == (0, 0)
    assert str(path.parent) not in moved.error
    return moved.error


def test_a_flipped_byte_anywhere_is_refused(core: EngineCore, saved: Path) -> None:
    raw = saved.read_bytes()
    for place in [*range(0, len(raw), len(raw) // 40), len(raw) - 1]:
        saved.write_bytes(raw[:place] + bytes([raw[place] ^ 1]) + raw[place + 1 :])
        assert refused(core, saved), place
    saved.write_bytes(raw[: len(raw) - 40] + bytes([raw[-40] ^ 1]) + raw[-39:])
    assert refused(core, saved) == "the file is damaged: its checksum does not fit"
    # Control: as it was, it is taken.
    saved.write_bytes(raw)
    assert sessions.move(core, order(saved, restores=True)).error == ""


def test_a_cut_or_longer_file_is_refused(core: EngineCore, saved: Path) -> None:
    raw = saved.read_bytes()
    for data in (b"", raw[:10], raw[:60], raw[:-1], raw + b"x", b"x" * len(raw)):
        saved.write_bytes(data)
        assert refused(core, saved)


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"version": "0"}, "its version is '0', not "),
        ({"weights": "v"}, "its weights is 'v', not 'w'"),
        ({"kv_cache_dtype": "int8"}, "its kv_cache_dtype is 'int8'"),
        ({"dtype": "float64"}, "its dtype is 'float64'"),
        ({"quantization": "int4"}, "its quantization is 'int4'"),
        ({"backend": "cpu"}, "its backend is 'cpu'"),
        ({"block_size": 8}, "its block_size is 8, not 16"),
        ({"block_bytes": 5}, "its block_bytes is 5, not 384"),
        ({"token_ids": [5] * 143}, "its length does not fit its tokens"),
        ({"token_ids": [256] * 144}, "it has tokens that the model has not"),
    ],
)
def test_a_file_of_another_server_is_refused(core: EngineCore, saved: Path, fields: dict[str, Any], words: str) -> None:
    _rewrite(saved, **fields)
    assert words in refused(core, saved)


def test_what_is_no_file_is_refused(core: EngineCore, saved: Path, tmp_path: Path) -> None:
    assert refused(core, tmp_path / "absent") == "there is no such file"
    (tmp_path / "link").symlink_to(saved)
    os.mkfifo(tmp_path / "pipe")
    for name in ("link", "pipe", "."):
        assert refused(core, tmp_path / name)


def test_a_session_without_room_leaves_all_as_it_was(core: EngineCore, saved: Path) -> None:
    running = request("r", [9] * 500)
    core.add(running)
    core.step()
    moved = sessions.move(core, order(saved, restores=True))
    assert moved.error == "the cache has no room for 150 tokens just now"
    core.abort("r")
    while core.has_work():
        core.step()
    core.scheduler.check()


def test_a_session_beside_cached_blocks_of_its_own_shares_them(core: EngineCore, saved: Path) -> None:
    prompt = [i % 250 for i in PROMPT]
    run(core, [request("c", prompt[:50])])
    before = core.scheduler.pool.num_allocations
    assert sessions.move(core, order(saved, restores=True)).error == ""
    assert num_cached(core, prompt) == 144
    assert core.scheduler.pool.num_allocations == before + 1
    core.scheduler.check()


def test_S_24_a_session_is_restored_under_the_salt_of_who_asks(core: EngineCore, saved: Path) -> None:
    prompt = [i % 250 for i in PROMPT]
    assert sessions.move(core, order(saved, restores=True, cache_salt="alice")).error == ""
    assert (num_cached(core, prompt, "alice"), num_cached(core, prompt), num_cached(core, prompt, "bob")) == (144, 0, 0)
    # Nor does a save find the blocks of another.
    assert sessions.move(core, order(saved, token_ids=prompt, cache_salt="bob")).token_ids == []


def test_a_file_is_bounded_and_written_whole_or_not_at_all(
    core: EngineCore, saved: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompt, raw = [i % 250 for i in PROMPT], saved.read_bytes()
    run(core, [request("a", prompt)])
    moved = sessions.move(core, order(saved, token_ids=prompt, max_bytes=len(raw) - 1))
    assert moved.error == f"the storage is full: the file takes {len(raw)} bytes, {len(raw) - 1} are left"

    def full(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    assert "No space left" in sessions.move(core, order(saved, token_ids=prompt)).error
    assert saved.read_bytes() == raw
    assert [path.name for path in saved.parent.iterdir()] == ["s"]


def test_what_has_no_cache_to_move_is_refused(core: EngineCore, saved: Path) -> None:
    core.executor = RecordingExecutor(core.executor, None)  # type: ignore[arg-type]
    assert "while the schedule is recorded" in sessions.move(core, order(saved)).error
    other = fake.build(EngineConfig(model="fake", enable_prefix_caching=False))
    assert sessions.move(other, order(saved)) == SessionMoved(
        error="the server runs with --no-enable-prefix-caching", moves_none=True
    )


@pytest.mark.parametrize("dtype", STORED)
@pytest.mark.parametrize("block_size", [4, 16, 24])
def test_a_block_of_the_native_cache_is_moved_alone(dtype: str, block_size: int) -> None:
    source, target = (
        HostCache([LayerShape(3, 20), LayerShape(2, 20, 9, 1)], [6, 6], block_size, dtype) for _ in range(2)
    )
    random = np.random.default_rng(3)
    for cache in (source, target):
        for layer in cache.layers:
            for array in layer.by_slot():
                array = array.view if isinstance(array, Fours) else array
                raw = array.base if array.base is not None else array
                raw.view(np.uint8)[...] = random.integers(0, 100, raw.view(np.uint8).shape)
    before = [target.read_block(block) for block in range(6)]
    target.write_block(4, source.read_block(2))
    assert [target.read_block(block) for block in range(6)] == [*before[:4], source.read_block(2), before[5]]
    assert source.read_block(2) != before[4]
    assert all((layer.key_scales is not None) == (dtype in SCALED) for layer in source.layers)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int8", "fp8_e4m3", "fp8_e5m2"])
def test_a_block_of_the_gpus_cache_is_moved_alone(dtype: str) -> None:
    source, target = (
        DeviceCache([LayerShape(2, 24), LayerShape(1, 16, kind=1)], [6, 6], 8, dtype, torch.device("cpu"))
        for _ in range(2)
    )
    generator = torch.Generator().manual_seed(3)
    for cache in (source, target):
        for layer in cache.layers:
            for codes in (layer.keys, layer.values):
                codes.view(torch.uint8).random_(0, 100, generator=generator)
            for scales in (layer.key_scales, layer.value_scales):
                if scales is not None:
                    scales.uniform_(generator=generator)
    before = [target.read_block(block) for block in range(6)]
    target.write_block(4, source.read_block(2))
    assert [target.read_block(block) for block in range(6)] == [*before[:4], source.read_block(2), before[5]]
    assert source.read_block(2) != before[4]
