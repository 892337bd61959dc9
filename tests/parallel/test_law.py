"""The determinism law over ranks: how many processes compute a model changes no token and no bit.

The same requests run in one process and over ranks, in every form of weights and cache. The last tests break the law on
purpose, in all ranks alike, and see that it is noticed.
"""

from __future__ import annotations

import functools
import shutil
import sys
from pathlib import Path
from typing import Any

import gguf
import msgspec
import pytest
from tests.campaigns.ranks import FORMS
from tests.e2e.test_law_speculation import varied
from tests.formats.gguf.models import convert, random_blocks
from tests.support import wrong_ranks
from tests.support.checkpoints import llama_tensors, write_llama
from tests.support.harness import RandomModels, random_ids
from tests.support.law import Bits, assert_same, groups_of, make_core, make_requests, run
from tests.support.shallow import shallow
from tests.support.stored import mixed

from headrace import models
from headrace.parallel import group
from headrace.parallel.pipeline import PipelinedProgram
from headrace.parallel.program import RankedProgram
from headrace.protocol.params import SamplingParams
from headrace.protocol.step import Request

K_KINDS = {"attn_q": "Q4_K", "attn_k": "Q4_K", "attn_v": "Q6_K", "attn_output": "Q3_K", "ffn_gate": "Q2_K",
           "ffn_up": "Q2_K", "ffn_down": "Q5_K", "token_embd": "Q6_K"}  # fmt: skip


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


@functools.cache
def few() -> tuple[Request, ...]:
    return tuple(make_requests()[::7])


PROGRAMS = {"tensor_parallel_size": RankedProgram, "pipeline_parallel_size": PipelinedProgram}


def bits(requests: list[Request], ranks: int = 1, field: str = "tensor_parallel_size", **form: Any) -> dict[str, Bits]:
    """All together, then in groups, whose prefixes are cached."""
    core = make_core(**{field: ranks}, **form)
    try:
        assert (type(core.executor.program) is PROGRAMS[field]) == (ranks > 1)  # type: ignore[attr-defined]
        result = run(core, requests)
        for part in groups_of(requests, 3):
            assert_same(run(core, part), result)
    finally:
        core.close()
    return result


def check(requests: list[Request], ranks: int, **form: Any) -> None:
    alone = bits(requests, **form)
    assert len({tuple(ids) for ids, _ in alone.values()}) > len(alone) / 2
    assert_same(bits(requests, ranks, **form), alone)


@pytest.mark.sampled(7)
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("ranks", [2, 3, 4, 8])
def test_ranks_change_no_bit(ranks: int, form: str) -> None:
    check(list(few()), ranks, model=shallow(2), **FORMS[form])


def test_uneven_shares_change_no_bit(tmp_path: Path) -> None:
    """Eight KV heads over three ranks are two, three and three."""
    sizes = {"num_attention_heads": 16, "num_key_value_heads": 8, "hidden_size": 64, "intermediate_size": 104}
    config = {"model_type": "llama", "vocab_size": 211, "num_hidden_layers": 2, "max_position_embeddings": 512,
              "rms_norm_eps": 1e-5, "tie_word_embeddings": False} | sizes  # fmt: skip
    path = write_llama(tmp_path / "odd", llama_tensors(config), **config)
    check(requests_of(211), 3, model=str(path), skip_tokenizer_init=True)


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


@pytest.fixture(scope="module")
def random_models(tmp_path_factory: pytest.TempPathFactory) -> RandomModels:
    return RandomModels(tmp_path_factory.mktemp("models"))


@pytest.mark.parametrize("form", [{}, {"quantization": "int8", "kv_cache_dtype": "int8"}], ids=["floats", "int8"])
def test_experts(form: dict[str, Any], random_models: RandomModels) -> None:
    check(requests_of(199), 2, model=str(random_models["mixtral"]), skip_tokenizer_init=True, **form)


@pytest.mark.sampled(12, 5)
@pytest.mark.parametrize("name", models.names())
def test_every_model_type(name: str, random_models: RandomModels) -> None:
    """States, latents, windows, shared caches, sinks, fused matrices: what ranks do not share out, each has whole."""
    config = models.find(name).TINY
    sizes = config.get("text_config", config)
    longest = min(150, sizes.get("max_position_embeddings", 512) // 2)
    form = {"model": str(random_models[name]), "skip_tokenizer_init": True, "max_num_seqs": 8}
    check(requests_of(sizes["vocab_size"], longest), 2, **form)


def test_with_speculation_grammars_penalties_chunks_and_a_small_cache() -> None:
    requests = [msgspec.structs.replace(r, params=varied(r.params, i)) for i, r in enumerate(make_requests()[::5])]
    more = {"max_num_batched_tokens": 24, "num_gpu_blocks_override": 70, "max_model_len": 512, "block_size": 8}
    spec = {"method": "ngram", "num_speculative_tokens": 4, "adaptive": False}
    alone = make_core(model=shallow(2), enable_prefix_caching=False)
    expected = run(alone, requests)
    alone.close()
    core = make_core(model=shallow(2), tensor_parallel_size=2, speculative_config=spec, **more)
    assert_same(run(core, requests, preempt_every=5), expected)
    stats = core.stats()
    assert stats.num_preemptions > 3
    assert stats.num_draft_tokens > 0
    core.close()


@pytest.mark.parametrize("quantization", ["int4", "int8"])
def test_each_rank_reads_its_panels_of_a_packed_file(
    quantization: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = shutil.copytree(shallow(2), tmp_path / "model")
    form = {"model": str(path), "quantization": quantization}
    alone = bits(list(few()), save_packed=True, **form)
    assert len(list(path.glob("*.packed"))) == 1
    caplog.clear()
    assert_same(bits(list(few()), 2, **form), alone)
    assert not [record for record in caplog.records if "is not used" in record.getMessage()]
    # Three ranks do not have whole panels, so they read the checkpoint.
    assert_same(bits(list(few()), 3, **form), alone)
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


@pytest.mark.parametrize("mode", ["reverse", "sum"])
def test_control_what_breaks_the_law_is_noticed(mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Gathers in another order, and a product split by its inputs whose parts are summed over the ranks."""
    alone = bits(list(few()), model=shallow(2))
    program = (sys.executable, "-m", "tests.support.wrong_ranks")
    monkeypatch.setattr(group, "COMMAND", (*program, "right"))
    assert_same(bits(list(few()), 2, model=shallow(2)), alone)
    monkeypatch.setattr(group, "COMMAND", (*program, mode))
    wrong_ranks.patch(mode, monkeypatch.setattr)
    with pytest.raises(AssertionError, match="differ"):
        assert_same(bits(list(few()), 2, model=shallow(2)), alone)
