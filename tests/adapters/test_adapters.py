"""Adapters on a model: the numbers of merged weights, the bits of each request in any company, and what is refused."""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from tests.formats.gguf.models import convert
from tests.support.adapters import merged, write_adapter
from tests.support.checkpoints import llama_tensors, write_llama
from tests.support.packing import tiny

from headrace import LLM, LoRARequest, SamplingParams
from headrace.backends.cpu.check.verify import verify
from headrace.backends.cpu.program import TapedProgram
from headrace.backends.step import Chunks
from headrace.checkpoint.adapters import read
from headrace.protocol.adapters import LoadAdapter, UnloadAdapter
from headrace.protocol.config import EngineConfig
from headrace.protocol.errors import CheckpointError, RequestError
from headrace.runner.runner import Runner
from headrace.text.inputs import RequestOptions, make_requests

WEIGHTS = llama_tensors()
PROMPT = [5, 9, 17, 33, 41, 8, 2, 2, 30] * 3
GREEDY = SamplingParams(max_tokens=10, temperature=0, ignore_eos=True, logprobs=4, prompt_logprobs=2)
Answer = tuple[list[int], list[float]]


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_llama(tmp_path_factory.mktemp("base"))


@pytest.fixture(scope="module")
def paths(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Adapters of float32, of bfloat16 with another rank, of all layers with rank-stabilised scales, and of all layers
    with magnitudes."""
    folder = tmp_path_factory.mktemp("adapters")
    every = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
    return [
        write_adapter(folder / "a", WEIGHTS, seed=1),
        write_adapter(folder / "b", WEIGHTS, seed=2, rank=9, alpha=3, dtype=torch.bfloat16),
        write_adapter(folder / "c", WEIGHTS, seed=3, rank=2, alpha=4, targets=every, use_rslora=True),
        write_adapter(folder / "d", WEIGHTS, seed=4, rank=3, alpha=6, targets=every, use_dora=True),
    ]


SCALES = [2.0, 1 / 3, 4 / math.sqrt(2), 2.0]


def chosen(path: Path | None) -> LoRARequest | None:
    return None if path is None else LoRARequest(path.name, 1, str(path))


def answers(llm: LLM, requests: Sequence[Path | None], prompts: Sequence[list[int]] | None = None) -> list[Answer]:
    prompts = prompts or [PROMPT] * len(requests)
    outputs = llm.generate(list(prompts), GREEDY, lora_request=[chosen(path) for path in requests])
    numbers: list[Answer] = []
    for output in outputs:
        steps = cast(list[Any], output.outputs[0].logprobs)
        rows = [*(output.prompt_logprobs or [])[1:], *steps]
        numbers.append((output.outputs[0].token_ids, [each.logprob for row in rows for each in row.values()]))
    return numbers


def engine(directory: Path, backend: str, **options: Any) -> LLM:
    settings: dict[str, Any] = {"backend": backend, "dtype": "float32", "skip_tokenizer_init": True, "num_threads": 1}
    return LLM(str(directory), **(settings | options))


@pytest.mark.parametrize("backend", ["cpu", "torch_ref"])
def test_an_adapter_gives_what_merged_weights_give(backend: str, base: Path, paths: list[Path], tmp_path: Path) -> None:
    llm, plain = engine(base, backend, enable_lora=True), engine(base, backend)
    [without] = answers(plain, [None])
    assert answers(llm, [None]) == [without]  # to the bit, though others could have adapters
    for path, scale in zip(paths, SCALES, strict=True):
        whole = engine(write_llama(tmp_path / path.name, merged(WEIGHTS, path, scale)), backend)
        (ids, numbers), (expected_ids, expected) = answers(llm, [path])[0], answers(whole, [None])[0]
        assert ids == expected_ids
        np.testing.assert_allclose(numbers, expected, atol=1e-4)
        assert np.abs(np.array(expected) - without[1]).max() > 0.1  # control: the adapter shows
        whole.close()


@pytest.mark.parametrize(
    ("backend", "options"),
    [
        ("cpu", {}),
        ("cpu", {"quantization": "int4", "kv_cache_dtype": "int8"}),
        ("cpu", {"quantization": "int8", "max_num_batched_tokens": 7, "max_num_seqs": 7, "num_threads": 2}),
        ("cpu", {"speculative_config": {"method": "ngram", "num_speculative_tokens": 3, "adaptive": False}}),
        ("torch_ref", {}),
    ],
    ids=str,
)
def test_no_request_sees_the_adapters_of_others(
    backend: str, options: dict[str, Any], base: Path, paths: list[Path]
) -> None:
    llm = engine(base, backend, enable_lora=True, **options)
    requests = [None, *paths, paths[0], None, paths[3], paths[2], paths[1]]
    prompts = [PROMPT[: 9 + 3 * (i % 4)] for i in range(len(requests))]
    together = answers(llm, requests, prompts)
    llm.reset_prefix_cache()
    alone = [answers(llm, [request], [prompt])[0] for request, prompt in zip(requests, prompts, strict=True)]
    assert together == alone
    again = [answers(llm, [request], [prompt])[0] for request, prompt in zip(requests, prompts, strict=True)]
    assert again == alone  # from cached prefixes, of which each adapter has its own
    assert together[1] != together[0]
    llm.close()


def test_a_cached_prefix_belongs_to_its_adapter(base: Path, paths: list[Path]) -> None:
    llm = engine(base, "cpu", enable_lora=True)
    params = SamplingParams(max_tokens=1, temperature=0)

    def num_cached(path: Path | None) -> int:
        return llm.generate([PROMPT], params, lora_request=chosen(path))[0].num_cached_tokens or 0

    assert [num_cached(path) for path in (None, paths[0], paths[1])] == [0, 0, 0]
    assert [num_cached(path) for path in (None, paths[0], paths[1])] == [16, 16, 16]


def test_the_records_of_adapters_are_those_of_the_reference(base: Path, paths: list[Path]) -> None:
    llm = engine(base, "cpu", enable_lora=True)
    answers(llm, paths)
    program = cast(TapedProgram, cast(Runner, llm.core.executor).program)
    chunks = Chunks([0, 0, 0], [PROMPT, PROMPT[:5], PROMPT[:7]], [[0, 1], [2], [3]], adapters=[3, -1, 0])
    dims = program.fill(chunks, [26, 31, 38])
    assert verify(program.tape, dims) == []
    # The controls: a slot that has another adapter's scale, and one whose gains are left out.
    for op, name in (("adapt_in", "scale"), ("adapt_out", "gains")):
        [node] = [node for node in program.tape.nodes if node.op == op][:1]
        whole = node.fields["table"]
        node.fields["table"] = whole.copy()
        node.fields["table"][name] *= 2 if name == "scale" else 0
        assert op in [each.op for each in verify(program.tape, dims)][:1]
        node.fields["table"] = whole


def test_slots_are_loaded_freed_and_bounded(base: Path, paths: list[Path]) -> None:
    llm = engine(base, "cpu", enable_lora=True, max_loras=2, max_lora_rank=9)
    core = llm.core
    first, second = (core.change_adapters(LoadAdapter(str(path))).adapter for path in paths[:2])
    assert first is not None
    assert second is not None
    assert (first.rank, first.num_layers, second.rank) == (4, 10, 9)
    assert core.change_adapters(LoadAdapter(str(paths[0]))).adapter == first  # once in memory
    refused = core.change_adapters(LoadAdapter(str(paths[2]))).refused
    assert refused is not None
    assert refused[0] == "max_loras"
    assert core.change_adapters(UnloadAdapter(first.digest)).refused is None
    [request] = make_requests(PROMPT, GREEDY, core.info, RequestOptions(adapter=first.digest))
    with pytest.raises(RequestError, match="an adapter that is loaded"):
        core.add(request)
    assert core.change_adapters(LoadAdapter(str(paths[2]))).adapter is not None


def test_an_adapter_in_use_stays(base: Path, paths: list[Path]) -> None:
    llm = engine(base, "cpu", enable_lora=True)
    adapter = llm.core.change_adapters(LoadAdapter(str(paths[0]))).adapter
    assert adapter is not None
    [request] = make_requests(PROMPT, GREEDY, llm.core.info, RequestOptions(adapter=adapter.digest))
    llm.core.add(request)
    llm.core.step()
    refused = llm.core.change_adapters(UnloadAdapter(adapter.digest)).refused
    assert refused is not None
    assert refused[2].startswith("one that no request uses")
    while llm.core.has_work():
        llm.core.step()
    assert llm.core.change_adapters(UnloadAdapter(adapter.digest)).refused is None


BAD: list[tuple[dict[str, Any], str]] = [
    ({"peft_type": "IA3"}, "peft_type 'IA3'; headrace takes LORA alone"),
    ({"use_dora": "yes"}, "use_dora is 'yes', expected true or false"),
    ({"modules_to_save": ["lm_head"]}, "modules_to_save .* is not computed here"),
    ({"bias": "all"}, "bias 'all' is not computed here"),
    ({"init_lora_weights": "pissa_niter_4"}, "changes the base's weights"),
    ({"rank_pattern": {"(a+)+$": 3}}, "is a regular expression"),
    ({"rank_pattern": {"q_proj": -1}}, "a number above 0 is expected"),
    ({"r": "many"}, "r"),
    ({"lora_alpha": None, "r": 5}, "rank|lora_alpha"),
]


@pytest.mark.parametrize(("config", "message"), BAD, ids=str)
def test_configs_that_would_change_the_output_are_refused(tmp_path: Path, config: dict[str, Any], message: str) -> None:
    directory = write_adapter(tmp_path, WEIGHTS, **config)
    with pytest.raises(CheckpointError, match=message):
        read(directory)


def damage(change: Callable[[dict[str, torch.Tensor]], None]) -> Callable[[Path], None]:
    def apply(directory: Path) -> None:
        path = directory / "adapter_model.safetensors"
        tensors = {name: tensor.clone() for name, tensor in load_file(path).items()}
        change(tensors)
        save_file(tensors, path)

    return apply


NAME = "base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight"
DAMAGES: dict[str, Callable[[Path], None]] = {
    "has no .lora_A.weight": damage(lambda tensors: tensors.__delitem__(NAME)),
    "no matrix of floats": damage(lambda tensors: tensors.update({NAME: torch.zeros(3, dtype=torch.int64)})),
    "is no base_model.model": damage(lambda tensors: tensors.update({"other.weight": torch.zeros(2, 2)})),
    "lm_head.weight changes the embedding or the head": damage(
        lambda tensors: tensors.update({"base_model.model.lm_head.weight": torch.zeros(2, 2)})
    ),
    "its rank in adapter_config.json is 4": damage(lambda tensors: tensors.update({NAME: torch.zeros(5, 32)})),
    "has no adapter_model.safetensors": lambda directory: (directory / "adapter_model.safetensors").unlink(),
    "not a readable safetensors|header": lambda directory: (directory / "adapter_model.safetensors").write_bytes(b"12"),
}


@pytest.mark.parametrize("message", DAMAGES)
def test_files_that_are_damaged_are_named(tmp_path: Path, message: str) -> None:
    directory = write_adapter(tmp_path, WEIGHTS)
    DAMAGES[message](directory)
    with pytest.raises(CheckpointError, match=message):
        read(directory)


MAGNITUDES = "base_model.model.model.layers.0.self_attn.q_proj.lora_magnitude_vector"
WRONG_MAGNITUDES: dict[str, Callable[[Path], None]] = {
    "q_proj has no .lora_magnitude_vector": damage(lambda tensors: tensors.__delitem__(MAGNITUDES)),
    "no vector of floats": damage(lambda tensors: tensors.update({MAGNITUDES: torch.ones(32, 1)})),
    "q_proj: 31 magnitudes; the layer has 32 outputs": damage(
        lambda tensors: tensors.update({MAGNITUDES: torch.ones(31)})
    ),
    "q_proj: 2 of 32 outputs .* is not finite; the first has the magnitude nan": damage(
        lambda tensors: tensors.update({MAGNITUDES: torch.cat([torch.ones(30), torch.full((2,), torch.nan)])})
    ),
}


@pytest.mark.parametrize("message", WRONG_MAGNITUDES)
def test_magnitudes_that_fit_no_rows_are_refused(base: Path, tmp_path: Path, message: str) -> None:
    path = write_adapter(tmp_path, WEIGHTS, use_dora=True)
    llm = engine(base, "cpu", enable_lora=True)
    assert answers(llm, [path])
    WRONG_MAGNITUDES[message](path)
    with pytest.raises(RequestError, match=message):
        answers(engine(base, "cpu", enable_lora=True), [path])


def test_a_row_of_zeros_has_no_norm(tmp_path: Path) -> None:
    name = "model.layers.1.self_attn.o_proj.weight"
    weights = WEIGHTS | {name: WEIGHTS[name].clone()}
    weights[name][7] = 0
    path = write_adapter(tmp_path / "adapter", WEIGHTS, spread=0.0, use_dora=True)
    llm = engine(write_llama(tmp_path / "base", weights), "cpu", enable_lora=True)
    with pytest.raises(RequestError, match=r"o_proj: 1 of 32 outputs have a norm that is 0.*the magnitude 0\.9"):
        answers(llm, [path])


def test_magnitudes_are_read_only_where_the_config_names_them(tmp_path: Path) -> None:
    path = write_adapter(tmp_path, WEIGHTS, use_dora=True)
    digest = read(path).digest
    damage(lambda tensors: tensors[MAGNITUDES].mul_(2))(path)
    assert read(path).digest != digest  # which cached prefixes belong to
    config = json.loads((path / "adapter_config.json").read_text())
    (path / "adapter_config.json").write_text(json.dumps(config | {"use_dora": False}))
    with pytest.raises(CheckpointError, match="lora_magnitude_vector is no base_model.model"):
        read(path)


def test_an_adapter_of_another_model_is_refused(base: Path, tmp_path: Path) -> None:
    llm = engine(base, "cpu", enable_lora=True)
    others = {"model.layers.7.self_attn.q_proj.weight": torch.zeros(32, 32)}
    wide = {"model.layers.0.self_attn.q_proj.weight": torch.zeros(32, 48)}
    head = {"lm_head.weight": torch.zeros(50, 32)}
    for name, weights in (("deep", others), ("wide", wide), ("head", head)):
        path = write_adapter(tmp_path / name, weights, targets=("q_proj", "lm_head"))
        with pytest.raises(RequestError, match="no such layer|the layer takes|changes the embedding or the head"):
            llm.generate([PROMPT], GREEDY, lora_request=chosen(path))
    assert answers(llm, [None])  # nothing is lost


def test_the_config_is_checked() -> None:
    with pytest.raises(RequestError, match="enable_lora"):
        EngineConfig(lora_modules=["a=b"])
    for text in ("a", "=b", '{"name": 3}'):
        with pytest.raises(RequestError, match="name=path"):
            EngineConfig(enable_lora=True, lora_modules=[text])
    with pytest.raises(RequestError, match="max_loras"):
        EngineConfig(enable_lora=True, max_loras=1, lora_modules=["a=b", "c=d"])
    with pytest.raises(RequestError, match="tensor_parallel_size"):
        EngineConfig(enable_lora=True, tensor_parallel_size=2)
    EngineConfig(
        enable_lora=True, lora_modules=["a=b=c", json.dumps({"name": "x", "path": "y", "base_model_name": "z"})]
    )


@pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning")
@pytest.mark.parametrize("options", [{"rank_pattern": {"k_proj": 2}}, {"use_dora": True}], ids=str)
def test_peft_s_own_files_are_read(options: dict[str, Any], tmp_path: Path) -> None:
    """PEFT writes, adapts and merges: its merged model is the measure."""
    peft, transformers = pytest.importorskip("peft"), pytest.importorskip("transformers")
    torch.manual_seed(1)
    config = transformers.Qwen2Config(
        vocab_size=99, hidden_size=48, intermediate_size=80, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=128,
    )  # fmt: skip
    transformers.Qwen2ForCausalLM(config).save_pretrained(tmp_path / "base")
    model = transformers.Qwen2ForCausalLM.from_pretrained(tmp_path / "base")
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("bias"):
                parameter.normal_()
    model.save_pretrained(tmp_path / "base")
    lora = peft.LoraConfig(r=6, lora_alpha=5, target_modules="all-linear", **options)
    adapted = peft.get_peft_model(model, lora)
    for name, parameter in adapted.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.3)
        if "magnitude" in name:
            parameter.data *= torch.empty_like(parameter).uniform_(0.5, 1.5)
    adapted.save_pretrained(tmp_path / "adapter")
    adapted.merge_and_unload().save_pretrained(tmp_path / "merged")
    [got] = answers(engine(tmp_path / "base", "cpu", enable_lora=True), [tmp_path / "adapter"])
    [expected] = answers(engine(tmp_path / "merged", "cpu"), [None])
    assert got[0] == expected[0]
    np.testing.assert_allclose(got[1], expected[1], atol=1e-4)


@pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning")
def test_what_peft_writes_and_is_not_computed_is_refused_by_name(tmp_path: Path) -> None:
    peft, transformers = pytest.importorskip("peft"), pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        vocab_size=99, hidden_size=32, intermediate_size=48, num_hidden_layers=1, num_attention_heads=4
    )
    wrong: list[tuple[dict[str, Any], str]] = [
        ({"target_modules": ["embed_tokens"]}, "embed_tokens.* changes the embedding or the head"),
        ({"target_modules": ["lm_head"]}, "lm_head.* changes the embedding or the head"),
        ({"target_modules": ["q_proj"], "modules_to_save": ["lm_head"]}, "modules_to_save .* is not computed here"),
        ({"target_modules": ["q_proj"], "bias": "lora_only"}, "bias 'lora_only' is not computed here"),
        ({"target_modules": ["q_proj"], "trainable_token_indices": [1]}, "trainable_token_indices .* is not computed"),
    ]
    for place, (settings, message) in enumerate(wrong):
        adapted = peft.get_peft_model(transformers.LlamaForCausalLM(config), peft.LoraConfig(**settings))
        adapted.save_pretrained(tmp_path / str(place))
        with pytest.raises(CheckpointError, match=message):
            read(tmp_path / str(place))


def test_the_base_may_be_a_gguf_file(base: Path, paths: list[Path], tmp_path: Path) -> None:
    """Whose rows of q and k are stored in another order than PEFT's."""
    file = convert(base, tmp_path / "base.gguf")
    for path in paths:
        [ours], [theirs] = (answers(engine(each, "cpu", enable_lora=True), [path]) for each in (file, base))
        assert ours[0] == theirs[0]
        np.testing.assert_allclose(ours[1], theirs[1], atol=1e-4)


@pytest.mark.parametrize("use_dora", [False, True])
@pytest.mark.parametrize("model_type", ["phi3", "gpt_oss", "deepseek_v3", "qwen3_5_text"])
def test_layers_of_other_families_are_found_by_name(model_type: str, use_dora: bool, tmp_path: Path) -> None:
    """Fused ones, ones whose outputs are reordered, latent attention with shared experts, layers with a state."""
    whole = load_file(tiny(tmp_path / "base", model_type) / "model.safetensors")
    llm = engine(tmp_path / "base", "cpu", enable_lora=True)
    places = cast(TapedProgram, cast(Runner, llm.core.executor).program).model.ops.adapters.places
    layers = {f"{name}.weight": whole[f"{name}.weight"] for name in places}
    path = write_adapter(tmp_path / "adapter", layers, rank=3, alpha=3, spread=0.1, targets=("",), use_dora=use_dora)
    shutil.copytree(tmp_path / "base", tmp_path / "merged")
    weights = {name: tensor.float() for name, tensor in whole.items()}
    save_file(merged(weights, path, 1.0), tmp_path / "merged" / "model.safetensors")
    [got], [expected] = answers(llm, [path]), answers(engine(tmp_path / "merged", "cpu"), [None])
    assert got[0] == expected[0]
    np.testing.assert_allclose(got[1], expected[1], atol=1e-4)
    assert answers(llm, [None]) != [expected]
