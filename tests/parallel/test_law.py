"""The determinism law over ranks: how many processes compute a model changes no token and no bit.

The same requests run in one process and over ranks, in every form of weights and cache. The last tests break the law on
purpose, in all ranks alike, and see that it is noticed.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import gguf
import msgspec
import pytest
from tests.campaigns.ranks import FORMS
from tests.formats.gguf.models import convert, random_blocks
from tests.support import wrong_ranks
from tests.support.harness import RandomModels
from tests.support.law import assert_same, make_core
from tests.support.ranks import (
    TP,
    alone,
    bits,
    case_of,
    check,
    check_in_a_small_cache,
    check_of_a_packed_file,
    check_uneven,
    few,
    requests_of,
)  # fmt: skip
from tests.support.shallow import shallow
from tests.support.stored import mixed

from headrace import models
from headrace.parallel import group
from headrace.protocol.params import SamplingParams

K_KINDS = {"attn_q": "Q4_K", "attn_k": "Q4_K", "attn_v": "Q6_K", "attn_output": "Q3_K", "ffn_gate": "Q2_K",
           "ffn_up": "Q2_K", "ffn_down": "Q5_K", "token_embd": "Q6_K"}  # fmt: skip


@pytest.mark.sampled(7)
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("ranks", [2, 3, 4, 8])
def test_ranks_change_no_bit(ranks: int, form: str) -> None:
    check(list(few()), ranks, model=shallow(2), **FORMS[form])


def test_uneven_shares_change_no_bit(tmp_path: Path) -> None:
    """Eight KV heads over three ranks are two, three and three."""
    sizes = {"num_attention_heads": 16, "num_key_value_heads": 8, "hidden_size": 64, "intermediate_size": 104}
    check_uneven(10, 3, TP, tmp_path, sizes)


def k_form(name: str, weight: Any) -> tuple[Any, Any]:
    """Random blocks of K-quants, of different kinds in the matrices of a layer."""
    kind = next(kind for part, kind in K_KINDS.items() if part in name)
    return random_blocks(kind, weight.shape, seed=len(name))[0], gguf.GGMLQuantizationType[kind]


@pytest.fixture(scope="module")
def k_quants(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(convert(Path(shallow(2)), tmp_path_factory.mktemp("law") / "k.gguf", k_form))


@pytest.mark.parametrize("ranks", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_k_quants(ranks: int, k_quants: str) -> None:
    check(list(few()), ranks, model=k_quants)


@pytest.mark.parametrize("activations", ["int8", pytest.param("16bit", marks=pytest.mark.slow)])
def test_inputs_in_an_order_of_their_own(activations: str, tmp_path: Path) -> None:
    path = mixed(Path(shallow(2)), tmp_path / "mixed")
    check(list(few()), 2, model=str(path), activations=activations)


@pytest.mark.parametrize("form", [{}, {"quantization": "int8", "kv_cache_dtype": "int8"}], ids=["floats", "int8"])
def test_experts(form: dict[str, Any], random_models: RandomModels) -> None:
    check(requests_of(199), 2, model=str(random_models["mixtral"]), skip_tokenizer_init=True, **form)


@pytest.mark.sampled(12, 5)
@pytest.mark.parametrize("name", models.names())
def test_every_model_type(name: str, random_models: RandomModels) -> None:
    """States, latents, windows, shared caches, sinks, fused matrices: what ranks do not share out, each has whole."""
    form, requests = case_of(name, random_models[name])
    check(requests, 2, **form)


def test_with_speculation_grammars_penalties_chunks_and_a_small_cache() -> None:
    check_in_a_small_cache(TP)


@pytest.mark.parametrize("quantization", ["int4", "int8"])
def test_each_rank_reads_its_panels_of_a_packed_file(
    quantization: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    over = check_of_a_packed_file(shallow(2), 2, TP, quantization, tmp_path, caplog)
    # Three ranks do not have whole panels, so they read the checkpoint.
    over(3)
    assert [record for record in caplog.records if "within a panel" in record.getMessage()]


def test_hidden_states_and_prompt_logprobs() -> None:
    params = SamplingParams(max_tokens=2, seed=1, temperature=0.0, prompt_logprobs=2, logprobs=1)
    requests = [msgspec.structs.replace(r, params=params) for r in few()[:4]]
    result = []
    for ranks in (1, 2):
        core = make_core(model=shallow(2), tensor_parallel_size=ranks)
        for i, request in enumerate(requests):
            core.add(request)
            pooled = {"request_id": f"pooled {i}", "pooling": ("last", "mean")[i % 2]}
            core.add(msgspec.structs.replace(request, params=SamplingParams(seed=1, max_tokens=1), **pooled))
        rows: dict[str, Any] = {}
        while core.has_work():
            output = core.step()
            for name, entries in output.prompt_logprobs.items():
                rows.setdefault(name, []).extend((e.logprob, *e.top) for e in entries)
            rows |= output.pooled
        core.close()
        result.append(rows)
    assert len(result[0]) == 8
    assert result[0] == result[1]


WRONG_RANKS = (sys.executable, "-m", "tests.support.wrong_ranks")


@pytest.mark.parametrize("mode", ["reverse", "sum"])
def test_control_what_breaks_the_law_is_noticed(mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Gathers in another order, and a product split by its inputs whose parts are summed over the ranks."""
    expected = alone()
    monkeypatch.setattr(group, "COMMAND", (*WRONG_RANKS, mode))
    wrong_ranks.patch(mode, monkeypatch.setattr)
    with pytest.raises(AssertionError, match="differ"):
        assert_same(bits(list(few()), 2, model=shallow(2)), expected)


def test_the_program_of_the_control_breaks_nothing_by_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(group, "COMMAND", (*WRONG_RANKS, "right"))
    assert_same(bits(list(few()), 2, model=shallow(2)), alone())
