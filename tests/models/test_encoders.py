"""Encoders: the vectors are transformers' hidden states, and the bits of a text are its own."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.support.harness import BACKENDS
from transformers import AutoConfig, AutoModel
from transformers.models.mpnet.modeling_mpnet import MPNetEncoder

from headrace import LLM, models
from headrace.models.encoders import base, mpnet
from headrace.protocol.errors import CheckpointError, ContextLengthError, RequestError

LENGTHS = (1, 2, 40, 129, 300, 512)
POOLINGS = ("cls", "mean", "last")
TYPES = [name for name in models.encoder_names() if name not in ("new", "jina-bert-v2")]


def save(name: str, directory: Path, first_layout: bool = True, **sizes: Any) -> Any:
    """Write a random checkpoint of a type, in the layout of the type's first files or in transformers' own, and return
    the transformers model."""
    torch.manual_seed(0)
    model = AutoModel.from_config(AutoConfig.for_model(**models.find(name).TINY | sizes)).eval().float()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.05 * torch.randn_like(parameter)
    model.save_pretrained(directory, save_original_format=first_layout)
    return model


def texts_of(lengths: tuple[int, ...] = LENGTHS) -> list[list[int]]:
    rng = random.Random(1)
    return [[rng.randrange(5, 199) for _ in range(num)] for num in lengths]


def open_llm(directory: Path, backend: str = "cpu", **options: Any) -> LLM:
    return LLM(str(directory), backend=backend, dtype="float32", skip_tokenizer_init=True, **options)


def vectors(llm: LLM, texts: list[list[int]], pooling: str | None = None) -> list[list[float]]:
    inputs: Any = [{"prompt_token_ids": text} for text in texts]
    outputs = llm.embed(inputs, pooling=pooling, normalize=False, use_tqdm=False)
    return [output.outputs.embedding for output in outputs]


def error(model: Any, texts: list[list[int]], computed: list[list[float]], pooling: str = "mean") -> float:
    """The greatest difference from transformers, as a share of the greatest number."""
    worst = 0.0
    for text, vector in zip(texts, computed, strict=True):
        with torch.no_grad():
            hidden = model(input_ids=torch.tensor([text])).last_hidden_state[0]
        right = {"cls": hidden[0], "mean": hidden.mean(0), "last": hidden[-1]}[pooling].numpy()
        worst = max(worst, float(np.abs(np.array(vector) - right).max() / np.abs(right).max()))
    return worst


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", TYPES)
def test_vectors_are_transformers_hidden_states(name: str, backend: str, tmp_path: Path) -> None:
    model, texts = save(name, tmp_path), texts_of()
    llm = open_llm(tmp_path, backend, max_num_batched_tokens=600)
    for pooling in POOLINGS:
        together = vectors(llm, texts, pooling)
        assert error(model, texts, together, pooling) < 1e-5
        # Law: the batch, and what was computed before, change no bit.
        assert [vectors(llm, [text], pooling)[0] for text in texts[:4]] == together[:4]


@pytest.mark.parametrize("backend", BACKENDS)
def test_biases_by_distance_at_every_length(backend: str, tmp_path: Path) -> None:
    model, texts = save("mpnet", tmp_path), texts_of((*range(1, 20), *range(20, 201, 9)))
    computed = vectors(open_llm(tmp_path, backend), texts)
    assert max(error(model, [text], [vector]) for text, vector in zip(texts, computed, strict=True)) < 1e-5


def test_the_buckets_of_mpnet_are_transformers() -> None:
    distances = torch.arange(-1999, 2000)
    assert np.array_equal(mpnet.buckets(2000), MPNetEncoder.relative_position_bucket(distances).numpy())


@pytest.mark.parametrize("change", [lambda table: 0 * table, lambda table: table[:, ::-1].copy()])
def test_control_other_biases_are_noticed(change: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """None, and those of the other direction."""
    scoring = base.Scoring
    monkeypatch.setattr(base, "Scoring", lambda *parts, bias, **others: scoring(*parts, bias=change(bias), **others))
    model = save("mpnet", tmp_path)
    assert error(model, texts_of((40,)), vectors(open_llm(tmp_path), texts_of((40,)))) > 1e-3


GEMMA = {"use_bidirectional_attention": True, "sliding_window": 28}


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_decoder_that_sees_both_ways_is_an_encoder(backend: str, tmp_path: Path) -> None:
    """EmbeddingGemma: its local layers see half a window to each side."""
    model, texts = save("gemma3_text", tmp_path, **GEMMA), texts_of((1, 2, 14, 15, 16, 29, 129, 300))
    llm = open_llm(tmp_path, backend, max_num_batched_tokens=400)
    assert (llm.core.info.pooling, llm.core.info.generates) == ("mean", False)
    for pooling in POOLINGS:
        together = vectors(llm, texts, pooling)
        assert error(model, texts, together, pooling) < 1e-5
        assert [vectors(llm, [text], pooling)[0] for text in texts] == together


def test_control_gemma_as_a_decoder_has_other_vectors(tmp_path: Path) -> None:
    model = save("gemma3_text", tmp_path, **GEMMA)
    path = tmp_path / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"use_bidirectional_attention": None}))
    llm = open_llm(tmp_path)
    assert llm.core.info.generates
    assert error(model, texts_of((20,)), vectors(llm, texts_of((20,)), "mean")) > 1e-2


def test_gemmas_vectors_by_packed_weights(tmp_path: Path) -> None:
    model, texts = save("gemma3_text", tmp_path, **GEMMA), texts_of((30, 60))
    computed = []
    for saves in (False, True, False):  # read while they are quantised, twice, and mapped
        computed.append(vectors(open_llm(tmp_path, quantization="int8", save_packed=saves), texts))
    assert computed[0] == computed[1] == computed[2]
    assert 1e-5 < error(model, texts, computed[0]) < 0.1


@pytest.mark.parametrize("name", ["gte", "nomic_bert"])
def test_both_layouts_give_the_same_bits(name: str, tmp_path: Path) -> None:
    computed = []
    for first in (True, False):
        save(name, tmp_path / str(first), first)
        computed.append(vectors(open_llm(tmp_path / str(first)), texts_of()))
    assert computed[0] == computed[1]


def test_narrow_embeddings_of_electra_are_refused(tmp_path: Path) -> None:
    save("electra", tmp_path, embedding_size=32)
    with pytest.raises(CheckpointError, match="embedding_size is 32, expected 48, as hidden_size"):
        open_llm(tmp_path)


def test_the_first_files_of_gte_have_another_type(tmp_path: Path) -> None:
    model = save("gte", tmp_path)
    path = tmp_path / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"model_type": "new"}))
    assert error(model, texts_of(), vectors(open_llm(tmp_path), texts_of())) < 1e-5


def test_the_first_files_of_nomic_bert_have_other_keys(tmp_path: Path) -> None:
    model = save("nomic_bert", tmp_path)
    tiny = models.find("nomic_bert").TINY
    sizes = {"n_embd": tiny["hidden_size"], "n_inner": tiny["intermediate_size"], "n_layer": 2, "n_head": 4}
    others = {"n_positions": 512, "activation_function": "swiglu", "rotary_emb_base": 1000, "type_vocab_size": 2}
    others |= {"layer_norm_epsilon": 1e-12, "vocab_size": tiny["vocab_size"], "max_trained_positions": 300}
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "nomic_bert", "prenorm": False, **sizes, **others}))
    llm = open_llm(tmp_path)
    assert llm.core.info.max_model_len == 300
    assert error(model, texts_of()[:-1], vectors(llm, texts_of()[:-1])) < 1e-5


def test_stretched_positions_of_gte(tmp_path: Path) -> None:
    """Of the files on the hub: a base `factor` times as great, and frequencies divided by factor^(2 / dim)."""
    model = save("gte", tmp_path)
    path = tmp_path / "config.json"
    scaling = {"rope_theta": 10000.0, "rope_scaling": {"type": "ntk", "factor": 8.0}, "rope_parameters": None}
    path.write_text(json.dumps(json.loads(path.read_text()) | {"model_type": "new"} | scaling))
    computed = vectors(open_llm(tmp_path), texts_of())
    assert error(model, texts_of(), computed) > 1e-4
    dim = len(model.rotary_emb.inv_freq) * 2
    exponents = torch.arange(0, dim, 2, dtype=torch.float64) / dim
    model.rotary_emb.inv_freq = ((8e4**-exponents) / 8 ** (2 / dim)).float()
    assert error(model, texts_of(), computed) < 1e-5


@pytest.mark.parametrize("task", ["TokenClassification", "QuestionAnswering", "MultipleChoice"])
def test_a_head_for_another_task_gives_no_vectors(task: str, tmp_path: Path) -> None:
    save("bert", tmp_path)
    path = tmp_path / "config.json"
    values = json.loads(path.read_text())
    path.write_text(json.dumps(values | {"architectures": ["BertForMaskedLM"]}))
    open_llm(tmp_path)
    path.write_text(json.dumps(values | {"architectures": [f"BertFor{task}"]}))
    with pytest.raises(CheckpointError, match="expected a model of vectors"):
        open_llm(tmp_path)


def test_threads_steps_and_order_change_no_bit(tmp_path: Path) -> None:
    save("bert", tmp_path)
    texts = texts_of()
    expected = vectors(open_llm(tmp_path, num_threads=1), texts)
    llm = open_llm(tmp_path, num_threads=2, max_num_batched_tokens=512, max_num_seqs=2)
    assert vectors(llm, texts) == expected
    assert vectors(llm, texts[::-1])[::-1] == expected


def test_texts_that_do_not_fit_one_step_wait_for_the_next(tmp_path: Path) -> None:
    """None is cut to what a step has room for, since its first rows would not see its last ones."""
    save("bert", tmp_path)
    texts = texts_of((300, 300, 300))
    llm = open_llm(tmp_path, max_num_batched_tokens=512, max_num_seqs=16)
    assert vectors(llm, texts) == [vectors(llm, [text])[0] for text in texts]


@pytest.mark.parametrize("pooling", POOLINGS)
def test_a_text_takes_nothing_from_one_that_begins_alike(pooling: str, tmp_path: Path) -> None:
    """The keys of the same first tokens are others in another text."""
    model = save("bert", tmp_path)
    (text,) = texts_of((100,))
    texts = [text, [*text[:-1], 7], [*text, 9], text[:60]]
    llm = open_llm(tmp_path)
    computed = [vectors(llm, [each], pooling)[0] for each in texts]
    assert error(model, texts, computed, pooling) < 1e-5


def test_a_text_may_be_longer_than_a_usual_call_has_rows(tmp_path: Path) -> None:
    model, texts = save("modernbert", tmp_path, max_position_embeddings=1100), texts_of((1100, 700, 30))
    llm = open_llm(tmp_path)
    assert llm.core.info.max_model_len == 1100
    assert error(model, texts, vectors(llm, texts)) < 1e-5


def test_control_attention_to_earlier_tokens_alone_is_noticed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    scoring = base.Scoring
    monkeypatch.setattr(base, "Scoring", lambda scale, window, **_: scoring(scale, window))
    model = save("bert", tmp_path)
    assert error(model, texts_of(), vectors(open_llm(tmp_path), texts_of())) > 1e-3


def test_an_encoder_generates_nothing(tmp_path: Path) -> None:
    save("bert", tmp_path)
    llm = open_llm(tmp_path)
    assert not llm.core.info.generates
    with pytest.raises(RequestError, match="a model that answers: this one gives vectors or classes"):
        llm.generate([{"prompt_token_ids": [5, 6]}], use_tqdm=False)
    with pytest.raises(ContextLengthError, match="at most 512 tokens"):
        vectors(llm, [[5] * 513])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"speculative_config": {"method": "ngram", "num_speculative_tokens": 3}}, "speculative_config"),
        ({"enable_lora": True}, "enable_lora"),
    ],
)
def test_settings_of_decoders_are_refused(options: dict[str, Any], message: str, tmp_path: Path) -> None:
    save("bert", tmp_path)
    with pytest.raises(RequestError, match=message):
        open_llm(tmp_path, **options)


def write_modules(directory: Path, modules: list[str], pooling: dict[str, Any], max_length: Any = None) -> None:
    kinds = enumerate(modules)
    rows = [{"idx": i, "path": f"{i}_{kind}", "type": f"sentence_transformers.models.{kind}"} for i, kind in kinds]
    (directory / "modules.json").write_text(json.dumps(rows))
    (directory / "1_Pooling").mkdir(exist_ok=True)
    (directory / "1_Pooling" / "config.json").write_text(json.dumps(pooling))
    if max_length is not None:
        (directory / "sentence_bert_config.json").write_text(json.dumps({"max_seq_length": max_length}))


@pytest.mark.parametrize(
    ("pooling", "kind"),
    [
        ({"pooling_mode_cls_token": True, "pooling_mode_mean_tokens": False}, "cls"),
        ({"pooling_mode_cls_token": False, "pooling_mode_mean_tokens": True}, "mean"),
        ({"pooling_mode_lasttoken": True}, "last"),
        ({"pooling_mode": "cls"}, "cls"),
    ],
)
def test_the_files_of_sentence_transformers_choose(pooling: dict[str, Any], kind: str, tmp_path: Path) -> None:
    save("bert", tmp_path)
    write_modules(tmp_path, ["Transformer", "Pooling", "Normalize"], pooling, 100)
    llm = open_llm(tmp_path)
    assert (llm.core.info.pooling, llm.core.info.max_model_len) == (kind, 100)
    assert vectors(llm, texts_of()[:3]) == vectors(llm, texts_of()[:3], kind)
    assert open_llm(tmp_path, max_model_len=60).core.info.max_model_len == 60
    with pytest.raises(RequestError, match="max_model_len: 101 is not allowed; it must be at most 100"):
        open_llm(tmp_path, max_model_len=101)


@pytest.mark.parametrize(
    ("modules", "pooling", "max_length", "message"),
    [
        (["Transformer", "Pooling", "CNN"], {"pooling_mode_mean_tokens": True}, None, "a module CNN"),
        (["Transformer", "Pooling"], {"pooling_mode": "median"}, None, "pooling_mode is 'median', expected"),
        (["Transformer", "Pooling"], {"pooling_mode_mean_tokens": False}, None, r"pooling_mode is \[\], expected one"),
        (["Transformer", "Pooling"], {"pooling_mode": ["cls", "cls"]}, None, r"pooling_mode is \['cls', 'cls'\]"),
        (["Transformer", "Pooling"], {"pooling_mode_mean_tokens": True}, "many", "max_seq_length is 'many'"),
    ],
)
def test_files_that_mean_other_vectors_are_refused(
    modules: list[str], pooling: dict[str, Any], max_length: Any, message: str, tmp_path: Path
) -> None:
    save("bert", tmp_path)
    write_modules(tmp_path, modules, pooling, max_length)
    with pytest.raises(CheckpointError, match=message):
        open_llm(tmp_path)


def test_a_pooling_folder_lies_beside_the_file(tmp_path: Path) -> None:
    save("bert", tmp_path)
    rows = [{"path": "../elsewhere", "type": "sentence_transformers.models.Pooling"}]
    (tmp_path / "modules.json").write_text(json.dumps(rows))
    with pytest.raises(CheckpointError, match="a folder beside the file"):
        open_llm(tmp_path)
