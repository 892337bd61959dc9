"""Groups of ranks on this machine: their law against one process, their processes, and what they must do when one of
them is lost. `field` is `tensor_parallel_size` or `pipeline_parallel_size`."""

from __future__ import annotations

import functools
import os
import shutil
import signal
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import msgspec
import pytest
from tests.e2e.test_law_speculation import varied
from tests.support.checkpoints import llama_tensors, write_llama
from tests.support.harness import random_ids
from tests.support.law import Bits, assert_same, groups_of, make_core, make_requests, run
from tests.support.shallow import shallow

from headrace import models
from headrace.engine.core import EngineCore
from headrace.parallel.pipeline import PipelinedProgram
from headrace.parallel.program import RankedProgram, RankLostError
from headrace.protocol.params import SamplingParams
from headrace.protocol.step import Request

TP, PP = "tensor_parallel_size", "pipeline_parallel_size"
PROGRAMS = {TP: RankedProgram, PP: PipelinedProgram}


# -- the law


def requests_of(vocab_size: int, longest: int = 150) -> list[Request]:
    """For models without a tokenizer: prompts of several lengths, greedy and drawn."""
    lengths = (1, 5, 17, 40, longest)
    return [
        Request(
            request_id=str(i),
            prompt_token_ids=random_ids(length, vocab_size, seed=i),
            params=SamplingParams(temperature=i % 2 * 0.9, seed=i, max_tokens=8, ignore_eos=True, logprobs=2),
        )
        for i, length in enumerate(lengths * 2)
    ]


def case_of(name: str, path: Path) -> tuple[dict[str, Any], list[Request]]:
    """The config of a random model, and requests for it."""
    config = models.find(name).TINY
    sizes = config.get("text_config", config)
    longest = min(150, sizes.get("max_position_embeddings", 512) // 2)
    form = {"model": str(path), "skip_tokenizer_init": True, "max_num_seqs": 8}
    return form, requests_of(sizes["vocab_size"], longest)


@functools.cache
def few() -> tuple[Request, ...]:
    return tuple(make_requests()[::7])


def bits(requests: list[Request], ranks: int = 1, field: str = TP, **form: Any) -> dict[str, Bits]:
    """All together; over ranks then in groups too, whose prefixes are cached."""
    core = make_core(**{field: ranks}, **form)
    try:
        assert (type(core.executor.program) is PROGRAMS[field]) == (ranks > 1)  # type: ignore[attr-defined]
        result = run(core, requests)
        for part in groups_of(requests, 3) if ranks > 1 else ():
            assert_same(run(core, part), result)
    finally:
        core.close()
    return result


@functools.cache
def alone() -> dict[str, Bits]:
    """The bits of one process."""
    return bits(list(few()), model=shallow(2))


def check(
    requests: list[Request], ranks: int, field: str = TP, ranked: Mapping[str, Any] = {}, **form: Any
) -> dict[str, Bits]:
    """Compare with one process, whose bits are returned. `ranked` has more fields of the config over ranks."""
    alone = bits(requests, **form)
    assert len({tuple(ids) for ids, _ in alone.values()}) > len(alone) / 2
    assert_same(bits(requests, ranks, field, **ranked, **form), alone)
    return alone


def check_uneven(requests: int, ranks: int, field: str, folder: Path, sizes: dict[str, int], **form: Any) -> None:
    """The law for a llama of these `sizes`, which its ranks do not share out evenly."""
    config = {"model_type": "llama", "vocab_size": 211, "num_hidden_layers": 2, "max_position_embeddings": 512,
              "rms_norm_eps": 1e-5, "tie_word_embeddings": False} | sizes  # fmt: skip
    path = write_llama(folder / "odd", llama_tensors(config), **config)
    check(requests_of(211)[:requests], ranks, field, model=str(path), skip_tokenizer_init=True, **form)


def check_in_a_small_cache(field: str) -> None:
    """The law with speculation, grammars, penalties, chunks and preemption."""
    requests = [msgspec.structs.replace(r, params=varied(r.params, i)) for i, r in enumerate(make_requests()[::5])]
    more = {"max_num_batched_tokens": 24, "num_gpu_blocks_override": 70, "max_model_len": 512, "block_size": 8}
    spec = {"method": "ngram", "num_speculative_tokens": 4, "adaptive": False}
    one = make_core(model=shallow(2), enable_prefix_caching=False)
    expected = run(one, requests)
    one.close()
    core = make_core(model=shallow(2), speculative_config=spec, **{field: 2}, **more)
    assert_same(run(core, requests, preempt_every=5), expected)
    stats = core.stats()
    assert stats.num_preemptions > 3
    assert stats.num_draft_tokens > 0
    core.close()


def check_of_a_packed_file(
    model: str, ranks: int, field: str, quantization: str, folder: Path, caplog: pytest.LogCaptureFixture
) -> Callable[[int], None]:
    """The law where each rank reads its part of a packed file. Returns the same check for another number of ranks,
    which says nothing of the file."""
    path = shutil.copytree(model, folder / "model")
    form = {"model": str(path), "quantization": quantization, "field": field}
    alone = bits(list(few()), save_packed=True, **form)
    assert len(list(path.glob("*.packed"))) == 1
    caplog.clear()
    assert_same(bits(list(few()), ranks, **form), alone)
    assert not [record for record in caplog.records if "is not used" in record.getMessage()]
    return lambda others: assert_same(bits(list(few()), others, **form), alone)


# -- processes


def group_of(core: EngineCore) -> Any:
    return core.executor.program._others  # type: ignore[attr-defined]


def until(condition: Callable[[], object], seconds: float = 20.0) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.01)


def is_gone(pid: int) -> bool:
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rpartition(")")[2].split()[0] == "Z"
    except (FileNotFoundError, ProcessLookupError):  # the latter where it ends between the two calls
        return True


def check_end(core: EngineCore, message: str) -> None:
    """Rank 1 ends after a request: it takes the others with it, and the next step says so."""
    requests = make_requests()[:2]
    run(core, requests[:1])
    pids = group_of(core).pids
    os.kill(pids[0], signal.SIGKILL)
    until(lambda: all(map(is_gone, pids)))
    core.add(requests[1])
    with pytest.raises(RankLostError, match=message):
        core.step()


def check_standstill(core: EngineCore, rank: int, message: str) -> None:
    """A rank that stands still is given up after the timeout."""
    pids = group_of(core).pids
    os.kill(pids[rank - 1], signal.SIGSTOP)
    core.add(make_requests()[0])
    with pytest.raises(RankLostError, match=message):
        core.step()
    until(lambda: all(map(is_gone, pids)))


def check_out_of_step(core: EngineCore) -> None:
    """Ranks that gather find it out when a call is lost on its way to the others."""
    group = group_of(core)
    core.add(make_requests()[0])
    begin = group.begin

    def begin_again() -> int:
        number = begin()
        group.native.begin(number + 1)
        return int(number)

    group.begin = begin_again
    with pytest.raises(RankLostError, match="out of step"):
        core.step()


def check_closing(core: EngineCore) -> None:
    """Closing, once or twice, ends all ranks."""
    pids = group_of(core).pids
    core.close()
    core.close()
    assert all(map(is_gone, pids))
