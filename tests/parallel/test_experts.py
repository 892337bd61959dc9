"""Whole experts shared out over ranks: the bits of one process, what each rank reads, and what is refused.

The last tests break the law on purpose, in all ranks alike, and see that it is noticed.
"""

from __future__ import annotations

import functools
import sys
from pathlib import Path
from typing import Any

import gguf
import pytest
from tests.formats.gguf.models import convert, random_blocks
from tests.support import ranks, wrong_ranks
from tests.support.harness import RandomModels, save_random
from tests.support.law import assert_same, make_core, run
from tests.support.ranks import bits, case_of, requests_of
from tests.support.shallow import shallow

from headrace import models
from headrace.backends.cpu.matrix import parts_of
from headrace.backends.shares import Plan, Seat
from headrace.engine.library.load import load_model
from headrace.parallel import group
from headrace.protocol.config import EngineConfig
from headrace.protocol.errors import RequestError
from headrace.quantize.base import Options
from headrace.quantize.driver import quantise_checkpoint

MIXTURES = ("mixtral", "qwen3_moe", "gpt_oss", "deepseek_v3", "gemma4", "llama4_text")
"""Weights of the chosen alone and of all, biases, groups, factors, weights of what goes in; shared experts and none."""
FORMS: dict[str, dict[str, Any]] = {
    "bfloat16": {},
    "int8": {"quantization": "int8"},
    "int4": {"quantization": "int4"},
    "int4, floats": {"quantization": "int4-g32", "activations": "16bit"},
}


def has_experts(name: str) -> bool:
    config = models.find(name).TINY
    return any("experts" in key for key in (config | config.get("text_config", {})))


check = functools.partial(ranks.check, ranked={"enable_expert_parallel": True})


@pytest.mark.sampled(9)
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("num", [2, 3])
@pytest.mark.parametrize("name", MIXTURES)
def test_whole_experts_change_no_bit(name: str, num: int, form: str, random_models: RandomModels) -> None:
    config, requests = case_of(name, random_models[name])
    check(requests, num, **config, **FORMS[form])


@pytest.mark.sampled(7, 3)
@pytest.mark.parametrize("name", [name for name in models.names() if has_experts(name)])
def test_every_mixture(name: str, random_models: RandomModels) -> None:
    config, requests = case_of(name, random_models[name])
    check(requests, 2, **config)


def test_with_threads_chunks_and_a_small_cache(random_models: RandomModels) -> None:
    config, requests = case_of("qwen3_moe", random_models["qwen3_moe"])
    expected = bits(requests, **config)
    more = {"max_num_batched_tokens": 24, "num_gpu_blocks_override": 70, "max_model_len": 512, "block_size": 8}
    core = make_core(tensor_parallel_size=2, enable_expert_parallel=True, **config | more | {"num_threads": 2})
    assert_same(run(core, requests, preempt_every=3), expected)
    assert core.stats().num_preemptions > 3
    core.close()


@pytest.fixture(scope="module")
def wide_mixture(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """As wide as blocks of K-quants are."""
    sizes = {"hidden_size": 256, "intermediate_size": 256, "num_attention_heads": 4}
    path = tmp_path_factory.mktemp("wide") / "mixtral"
    save_random(models.find("mixtral").TINY | sizes, path)
    return path


def test_k_quants_of_several_forms(wide_mixture: Path, tmp_path: Path) -> None:
    kinds = {"ffn_gate_exps": "Q4_K", "ffn_up_exps": "Q6_K", "ffn_down_exps": "Q3_K"}

    def form(name: str, weight: Any) -> tuple[Any, Any]:
        kind = next((kind for part, kind in kinds.items() if part in name), "Q5_K")
        if "ffn_gate_inp" in name:
            return weight, gguf.GGMLQuantizationType.F32
        return random_blocks(kind, weight.shape, seed=len(name))[0], gguf.GGMLQuantizationType[kind]

    path = convert(wide_mixture, tmp_path / "k.gguf", form)
    check(requests_of(199), 2, model=str(path), skip_tokenizer_init=True)


@pytest.mark.parametrize("activations", ["int8", "16bit"])
def test_experts_with_inputs_in_orders_of_their_own(
    activations: str, random_models: RandomModels, tmp_path: Path
) -> None:
    options = Options(method="gptq", group_size=16, act_order="group")
    text = [[(7 * i * i + 3 * i + k) % 199 for i in range(40)] for k in range(4)]
    quantise_checkpoint(random_models["mixtral"], tmp_path / "out", options, "gptq", text)
    check(requests_of(199), 2, model=str(tmp_path / "out"), skip_tokenizer_init=True, activations=activations)


def test_a_packed_file(random_models: RandomModels, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    save_random(models.find("mixtral").TINY, tmp_path / "mixtral")
    config, requests = case_of("mixtral", tmp_path / "mixtral")
    form = config | FORMS["int8"]
    alone = bits(requests, save_packed=True, **form)
    assert len(list((tmp_path / "mixtral").glob("*.packed"))) == 1
    assert_same(bits(requests, 2, enable_expert_parallel=True, **form), alone)


@pytest.mark.parametrize("name", ["qwen3_moe", "gpt_oss"])
def test_a_rank_reads_its_own_experts_alone(name: str, random_models: RandomModels) -> None:
    """Of 11 experts and of 5, over three ranks, each is read whole by one rank."""
    num = {"qwen3_moe": 11, "gpt_oss": 5}[name]
    config = EngineConfig(
        model=str(random_models[name]), skip_tokenizer_init=True, tensor_parallel_size=3, enable_expert_parallel=True
    )
    owners: dict[str, list[int]] = {}
    for rank in range(3):
        plan = Plan(rank, 3, whole_experts=True)
        backend, _, _ = load_model(config, Path(config.model), lambda done, total: None, Seat(plan, 0, 2**20))
        every = [part for matrix in backend.ops.matrices for part in parts_of(matrix) if ".experts." in part.name]
        for part in every:
            owners.setdefault(part.name, []).extend([rank] if part.data.nbytes else [])
        shares = {int(part.name.partition(".experts.")[2].split(".")[0]) for part in every if part.data.nbytes}
        assert shares == set(range(num * rank // 3, num * (rank + 1) // 3))
    assert all(len(each) == 1 for each in owners.values())
    assert len(owners) >= 2 * num


def test_a_model_file_that_does_not_say_whose_matrix_it_is_is_noticed(
    random_models: RandomModels, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("headrace.models.decoder.Expert", lambda expert_id, num, parts: parts)
    config, _ = case_of("mixtral", random_models["mixtral"])
    with pytest.raises(RequestError, match="enable_expert_parallel: True is not allowed; it must be left out for this"):
        make_core(tensor_parallel_size=2, enable_expert_parallel=True, **config)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"tensor_parallel_size": 1}, "enable_expert_parallel: True is not allowed; it must be left out unless"),
        (
            {"tensor_parallel_size": 6},
            "tensor_parallel_size: 6 is not allowed; it must be at most 5 with enable_expert",
        ),
        ({"model": shallow(1)}, "enable_expert_parallel: True is not allowed; it must be left out for this model"),
    ],
)
def test_what_can_not_be_shared_out_is_refused(
    fields: dict[str, Any], message: str, random_models: RandomModels
) -> None:
    config, _ = case_of("mixtral", random_models["mixtral"])
    with pytest.raises(RequestError, match=message):
        make_core(**config | {"tensor_parallel_size": 2, "enable_expert_parallel": True} | fields)


def test_experts_are_contiguous_and_balanced() -> None:
    for num, world in ((5, 2), (11, 3), (128, 7), (4, 4)):
        shares = [Plan(rank, world, whole_experts=True).experts(num) for rank in range(world)]
        assert [e for first, last in shares for e in range(first, last)] == list(range(num))
        assert max(last - first for first, last in shares) - min(last - first for first, last in shares) <= 1
    with pytest.raises(RequestError, match="at most 3 with enable_expert_parallel"):
        Plan(0, 4, whole_experts=True).experts(3)


@pytest.mark.parametrize("mode", ["small", "sum of experts", "late"])
def test_control_what_breaks_the_law_is_noticed(
    mode: str, random_models: RandomModels, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Parts that each rank sums and that are added in the order of ranks; rows of pairs in wrong places. Gathers in
    several portions break nothing."""
    config, requests = case_of("qwen3_moe", random_models["qwen3_moe"])
    alone = bits(requests, **config)
    monkeypatch.setattr(group, "COMMAND", (sys.executable, "-m", "tests.support.wrong_ranks", mode))
    wrong_ranks.patch(mode, monkeypatch.setattr)
    if mode == "small":
        assert_same(bits(requests, 2, enable_expert_parallel=True, **config), alone)
        return
    with pytest.raises(AssertionError, match="differ"):
        assert_same(bits(requests, 2, enable_expert_parallel=True, **config), alone)
