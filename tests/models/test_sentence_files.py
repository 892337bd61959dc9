"""The files beside a model that sentence-transformers writes: layers behind the pooling, prompts, lengths, likeness."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file, save_file
from tests.support.harness import BACKENDS
from tests.support.server import write_tokenizer
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM

from headrace import LLM, models
from headrace.models import qwen3
from headrace.models.encoders import bert
from headrace.protocol import bounds
from headrace.protocol.errors import CheckpointError, RequestError
from headrace.text.vectors import PoolingOutput

TEXTS = ["A cat sat on the mat.", "x", "Two dogs ran through the wood, and a third one slept."]
PROMPTS = {"query": "search: ", "document": "text: ", "plain": ""}
TORCH = "torch.nn.modules."
ACTIVATIONS: dict[str, Callable[[Any], Any]] = {
    "linear.Identity": lambda x: x,
    "activation.Tanh": torch.tanh,
    "activation.ReLU": torch.relu,
    "activation.GELU": torch.nn.functional.gelu,
    "activation.SiLU": torch.nn.functional.silu,
    "activation.Sigmoid": torch.sigmoid,
}


def save(directory: Path) -> Any:
    torch.manual_seed(0)
    config = AutoConfig.for_model(**bert.TINY | {"vocab_size": 256, "max_position_embeddings": 128})
    model = AutoModel.from_config(config).eval()
    model.save_pretrained(directory)
    write_tokenizer(directory)
    return model


def write_modules(directory: Path, *kinds: str, pooling: dict[str, Any] | None = None) -> None:
    """Write modules.json, and the pooling's settings."""
    rows = [
        {"idx": i, "name": str(i), "path": f"{i}_{kind}" if i else "", "type": f"sentence_transformers.models.{kind}"}
        for i, kind in enumerate(kinds)
    ]
    (directory / "modules.json").write_text(json.dumps(rows))
    if "Pooling" in kinds:
        folder = directory / f"{kinds.index('Pooling')}_Pooling"
        folder.mkdir(exist_ok=True)
        settings = {"word_embedding_dimension": 48} | (pooling or {"pooling_mode_mean_tokens": True})
        (folder / "config.json").write_text(json.dumps(settings))


def write_dense(directory: Path, place: int, ins: int, outs: int, activation: str, **more: Any) -> tuple[Any, Any]:
    """Write the module of a dense layer; return its weight and bias."""
    folder = directory / f"{place}_Dense"
    folder.mkdir()
    torch.manual_seed(place)
    bias = more.get("bias", True)
    layer = torch.nn.Linear(ins, outs, bias=bias)
    numbers = {"linear.weight": layer.weight.detach().numpy()}
    if bias:
        numbers["linear.bias"] = layer.bias.detach().numpy()
    save_file(numbers, folder / "model.safetensors")
    settings = {"in_features": ins, "out_features": outs, "bias": bias, "activation_function": TORCH + activation}
    (folder / "config.json").write_text(json.dumps(settings | more))
    return layer.weight.detach(), layer.bias.detach() if bias else None


def write_settings(directory: Path, **settings: Any) -> None:
    (directory / "config_sentence_transformers.json").write_text(json.dumps(settings))


def open_llm(directory: Path, backend: str = "cpu", **options: Any) -> LLM:
    return LLM(str(directory), backend=backend, dtype="float32", **options)


def vectors(llm: LLM, texts: Any, **options: Any) -> list[list[float]]:
    return [each.outputs.embedding for each in llm.embed(texts, use_tqdm=False, **options)]


def mean(model: Any, text: str) -> Any:
    with torch.no_grad():
        return model(input_ids=torch.tensor([list(text.encode())])).last_hidden_state[0].mean(0)


def test_vectors_are_those_of_sentence_transformers(tmp_path: Path) -> None:
    """All files at once: two layers behind the pooling, prompts, lengths."""
    theirs = pytest.importorskip("sentence_transformers")
    save(tmp_path)
    write_modules(tmp_path, "Transformer", "Pooling", "Dense", "Dense", "Normalize")
    write_dense(tmp_path, 2, 48, 64, "activation.Tanh")
    write_dense(tmp_path, 3, 64, 20, "linear.Identity", bias=False)
    write_settings(tmp_path, prompts=PROMPTS, default_prompt_name="document", similarity_fn_name="dot")
    (tmp_path / "sentence_bert_config.json").write_text(json.dumps({"max_seq_length": 100, "do_lower_case": False}))
    config = json.loads((tmp_path / "tokenizer_config.json").read_text())
    named = {"tokenizer_class": "PreTrainedTokenizerFast", "pad_token": "<eos>"}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config | named))
    model, llm = theirs.SentenceTransformer(str(tmp_path), device="cpu"), open_llm(tmp_path)
    assert llm.core.info.hidden_size == 20
    for name in (None, "query", "document", "plain"):
        expected = model.encode(TEXTS, prompt_name=name)
        np.testing.assert_allclose(vectors(llm, TEXTS, prompt_name=name), expected, atol=1e-6)
    scores = [each.outputs.score for each in llm.score(TEXTS[0], TEXTS, use_tqdm=False)]
    ours = model.encode(TEXTS)
    np.testing.assert_allclose(scores, model.similarity(ours[:1], ours)[0], atol=1e-6)


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_a_layer_behind_the_pooling(activation: str, tmp_path: Path) -> None:
    model = save(tmp_path)
    write_modules(tmp_path, "Transformer", "Pooling", "Dense")
    weight, bias = write_dense(tmp_path, 2, 48, 30, activation)
    llm = open_llm(tmp_path)
    right = [ACTIVATIONS[activation](weight @ mean(model, text) + bias).numpy() for text in TEXTS]
    np.testing.assert_allclose(vectors(llm, TEXTS), right, atol=1e-6)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("kind", ["cls_token", "mean_tokens", "lasttoken"])
def test_layers_change_no_bit_with_the_batch(kind: str, backend: str, tmp_path: Path) -> None:
    save(tmp_path)
    write_modules(tmp_path, "Transformer", "Pooling", "Dense", "Dense", pooling={f"pooling_mode_{kind}": True})
    write_dense(tmp_path, 2, 48, 96, "activation.Tanh")
    write_dense(tmp_path, 3, 96, 10, "linear.Identity")
    llm = open_llm(tmp_path, backend)
    assert vectors(llm, TEXTS) == [vectors(llm, text)[0] for text in TEXTS]


def test_vectors_have_length_one_where_the_files_say_so(tmp_path: Path) -> None:
    model = save(tmp_path)
    for kinds, is_one in ((("Transformer", "Pooling"), False), (("Transformer", "Pooling", "Normalize"), True)):
        write_modules(tmp_path, *kinds)
        llm = open_llm(tmp_path)
        for stated in (None, True, False):
            [vector] = vectors(llm, TEXTS[0], normalize=stated)
            length = 1.0 if (is_one if stated is None else stated) else float(mean(model, TEXTS[0]).norm())
            assert np.linalg.norm(vector) == pytest.approx(length, abs=1e-5)
    (tmp_path / "modules.json").unlink()
    assert np.linalg.norm(vectors(open_llm(tmp_path), TEXTS[0])[0]) == pytest.approx(1.0, abs=1e-6)


def test_the_mean_by_the_root_of_the_length(tmp_path: Path) -> None:
    model = save(tmp_path)
    write_modules(tmp_path, "Transformer", "Pooling", pooling={"pooling_mode_mean_sqrt_len_tokens": True})
    llm = open_llm(tmp_path)
    right = [(mean(model, text) * len(text) ** 0.5).numpy() for text in TEXTS]
    np.testing.assert_allclose(vectors(llm, TEXTS), right, atol=1e-5)
    np.testing.assert_allclose(vectors(llm, TEXTS[0], pooling="mean")[0], mean(model, TEXTS[0]), atol=1e-5)


FLAGS = {"cls": "cls_token", "max": "max_tokens", "mean": "mean_tokens", "weightedmean": "weightedmean_tokens"}
SEVERAL = ("cls", "max", "mean", "mean_sqrt_len_tokens", "weightedmean", "lasttoken")
POOLED: dict[str, Callable[[Any], Any]] = {
    "cls": lambda rows: rows[0],
    "max": lambda rows: rows.max(0),
    "mean": lambda rows: rows.mean(0),
    "mean_sqrt_len_tokens": lambda rows: rows.sum(0) / np.sqrt(len(rows)),
    "weightedmean": lambda rows: np.average(rows, 0, weights=np.arange(1, len(rows) + 1)),
    "lasttoken": lambda rows: rows[-1],
}


def states(model: Any, text: str) -> Any:
    with torch.no_grad():
        return model(input_ids=torch.tensor([list(text.encode())])).last_hidden_state[0].double().numpy()


@pytest.mark.parametrize("kinds", [("max",), ("weightedmean",), ("cls", "mean"), SEVERAL], ids="+".join)
def test_kinds_of_pooling_and_several_side_by_side(kinds: tuple[str, ...], tmp_path: Path) -> None:
    model = save(tmp_path)
    right = [np.concatenate([POOLED[kind](states(model, text)) for kind in kinds]) for text in TEXTS]
    forms: list[dict[str, Any]] = [{"pooling_mode": kinds[0] if len(kinds) == 1 else kinds}]
    # Older files have flags, whose order is not that of the vectors.
    forms.append({f"pooling_mode_{FLAGS.get(kind, kind)}": True for kind in reversed(kinds)})
    for form in forms:
        write_modules(tmp_path, "Transformer", "Pooling", pooling=form)
        llm = open_llm(tmp_path)
        assert llm.core.info.hidden_size == 48 * len(kinds)
        np.testing.assert_allclose(vectors(llm, TEXTS), right, atol=1e-5)
        assert vectors(llm, TEXTS) == [vectors(llm, text)[0] for text in TEXTS]
    if len(kinds) > 1:
        with pytest.raises(RequestError, match="pooling: 'max' is not allowed; it must be cls.*whose width"):
            llm.embed(TEXTS, pooling="max")
        assert len(vectors(llm, TEXTS[0], dimensions=50)[0]) == 50
    else:
        plain = vectors(llm, TEXTS, pooling="mean", normalize=False)
        np.testing.assert_allclose(plain, [mean(model, text) for text in TEXTS], atol=1e-5)


def test_control_another_kind_of_pooling_gives_other_vectors(tmp_path: Path) -> None:
    rows = states(save(tmp_path), TEXTS[0])
    for kind, other in (("max", "mean"), ("weightedmean", "mean")):
        assert np.abs(POOLED[kind](rows) - POOLED[other](rows)).max() > 1e-2


@pytest.mark.parametrize("kinds", [*((kind,) for kind in SEVERAL), ("cls", "mean"), SEVERAL], ids="+".join)
def test_pooling_is_that_of_the_package(kinds: tuple[str, ...], tmp_path: Path) -> None:
    theirs = pytest.importorskip("sentence_transformers")
    save(tmp_path)
    flags = dict.fromkeys(("cls_token", "max_tokens", "mean_tokens", "weightedmean_tokens"), False)
    flags |= {FLAGS.get(kind, kind): True for kind in kinds}
    write_modules(
        tmp_path, "Transformer", "Pooling", pooling={f"pooling_mode_{kind}": on for kind, on in flags.items()}
    )
    config = json.loads((tmp_path / "tokenizer_config.json").read_text())
    named = {"tokenizer_class": "PreTrainedTokenizerFast", "pad_token": "<eos>"}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config | named))
    model, llm = theirs.SentenceTransformer(str(tmp_path), device="cpu"), open_llm(tmp_path)
    np.testing.assert_allclose(vectors(llm, TEXTS), model.encode(TEXTS), atol=1e-5)


def test_a_layer_behind_several_kinds_of_pooling(tmp_path: Path) -> None:
    model = save(tmp_path)
    pooling = {"pooling_mode": ["mean_sqrt_len_tokens", "max"]}
    write_modules(tmp_path, "Transformer", "Pooling", "Dense", pooling=pooling)
    weight, bias = write_dense(tmp_path, 2, 96, 10, "activation.Tanh")
    right = []
    for text in TEXTS:
        pooled = np.concatenate([POOLED[kind](states(model, text)) for kind in pooling["pooling_mode"]])
        right.append(np.tanh(weight.numpy() @ pooled + bias.numpy()))
    np.testing.assert_allclose(vectors(open_llm(tmp_path), TEXTS), right, atol=1e-5)
    write_modules(tmp_path, "Transformer", "Pooling", "Dense", pooling={"pooling_mode": "max"})
    with pytest.raises(CheckpointError, match="a Dense layer reads 96 numbers, expected one of the model's 48"):
        open_llm(tmp_path)


def test_the_vectors_of_a_texts_tokens(tmp_path: Path) -> None:
    model = save(tmp_path)
    llm = open_llm(tmp_path)
    for text, output in zip(TEXTS, llm.encode(TEXTS, "token_embed", use_tqdm=False), strict=True):
        rows = states(model, text)
        right = rows / np.linalg.norm(rows, axis=1, keepdims=True)
        assert isinstance(output.outputs, PoolingOutput)
        np.testing.assert_allclose(output.outputs.data, right, atol=1e-5)
        assert (output.prompt, output.prompt_token_ids) == (text, list(text.encode()))
        [alone] = llm.encode(text, "token_embed", use_tqdm=False)
        assert alone.outputs == output.outputs
    write_modules(tmp_path, "Transformer", "Pooling", "Dense")
    weight, bias = write_dense(tmp_path, 2, 48, 10, "activation.Tanh")
    [output] = open_llm(tmp_path).encode(TEXTS[0], "token_embed", use_tqdm=False)
    projected = np.tanh(states(model, TEXTS[0]) @ weight.numpy().T + bias.numpy())
    assert isinstance(output.outputs, PoolingOutput)
    np.testing.assert_allclose(output.outputs.data, projected, atol=1e-5)
    write_modules(tmp_path, "Transformer", "Pooling", pooling={"pooling_mode": ["cls", "mean"]})
    with pytest.raises(RequestError, match="task: 'token_embed' is not allowed; it must be embed"):
        open_llm(tmp_path).encode(TEXTS[0], "token_embed", use_tqdm=False)


def test_the_vectors_of_tokens_have_a_bound(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save(tmp_path)
    llm = open_llm(tmp_path)
    rows = bounds.BOUNDS["row_numbers"]
    monkeypatch.setitem(bounds.BOUNDS, "row_numbers", rows._replace(high=48 * 5))
    assert llm.encode("abcde", "token_embed", use_tqdm=False)
    with pytest.raises(RequestError, match="prompt: 288 is not allowed; it must be an integer from 1 to 240"):
        llm.encode("abcdef", "token_embed", use_tqdm=False)
    assert llm.encode("abcdef", use_tqdm=False)


def test_prompts_are_put_before_texts(tmp_path: Path) -> None:
    save(tmp_path)
    write_settings(tmp_path, prompts=PROMPTS | {"none": None})
    llm = open_llm(tmp_path)
    assert vectors(llm, TEXTS[0], prompt_name="query") == vectors(llm, PROMPTS["query"] + TEXTS[0])
    assert vectors(llm, {"prompt": TEXTS[0]}, prompt_name="query") == vectors(llm, PROMPTS["query"] + TEXTS[0])
    assert vectors(llm, TEXTS[0], prompt_name="none") == vectors(llm, TEXTS[0])
    with pytest.raises(
        RequestError, match="prompt_name: 'passage' is not allowed.*one of query, document, plain, none"
    ):
        llm.embed(TEXTS, prompt_name="passage")
    with pytest.raises(RequestError, match="prompt_name: 'query' is not allowed.*left out for token ids"):
        llm.embed([[5, 6]], prompt_name="query")
    write_settings(tmp_path, prompts=PROMPTS, default_prompt_name="query")
    default = open_llm(tmp_path)
    assert vectors(default, TEXTS[0]) == vectors(llm, TEXTS[0], prompt_name="query")
    assert vectors(default, TEXTS[0], prompt_name="") == vectors(llm, TEXTS[0])
    assert vectors(default, [[5, 6]]) == vectors(llm, [[5, 6]])
    write_settings(tmp_path)
    with pytest.raises(RequestError, match="the model's files have no prompts"):
        open_llm(tmp_path).embed(TEXTS, prompt_name="query")


def test_the_files_cut_vectors(tmp_path: Path) -> None:
    save(tmp_path)
    whole = open_llm(tmp_path)
    write_settings(tmp_path, truncate_dim=16)
    llm = open_llm(tmp_path)
    assert vectors(llm, TEXTS) == vectors(whole, TEXTS, dimensions=16)
    assert vectors(llm, TEXTS, dimensions=40) == vectors(whole, TEXTS, dimensions=40)


def test_likeness_as_the_files_have_it(tmp_path: Path) -> None:
    save(tmp_path)
    write_modules(tmp_path, "Transformer", "Pooling")
    one, other = np.array(vectors(open_llm(tmp_path), TEXTS[:2]))
    cosine = one @ other / np.linalg.norm(one) / np.linalg.norm(other)
    for name, right in (("cosine", cosine), ("dot", one @ other), (None, cosine)):
        write_settings(tmp_path, similarity_fn_name=name)
        [output] = open_llm(tmp_path).score(TEXTS[0], TEXTS[1], use_tqdm=False)
        assert output.outputs.score == pytest.approx(right, rel=1e-5)


def test_rows_of_a_prompt_are_part_of_the_mean(tmp_path: Path) -> None:
    save(tmp_path)
    without = {"pooling_mode_mean_tokens": True, "include_prompt": False}
    write_modules(tmp_path, "Transformer", "Pooling", pooling=without)
    open_llm(tmp_path)  # without prompts there is nothing to leave out
    write_settings(tmp_path, prompts=PROMPTS)
    with pytest.raises(CheckpointError, match="include_prompt false"):
        open_llm(tmp_path)


def test_layers_read_one_kind_of_pooling(tmp_path: Path) -> None:
    save(tmp_path)
    write_modules(tmp_path, "Transformer", "Pooling", "Dense")
    write_dense(tmp_path, 2, 48, 8, "linear.Identity")
    llm = open_llm(tmp_path)
    assert vectors(llm, TEXTS, pooling="mean") == vectors(llm, TEXTS)
    with pytest.raises(RequestError, match="pooling: 'cls' is not allowed; it must be mean, which the model's Dense"):
        llm.embed(TEXTS, pooling="cls")
    with pytest.raises(RequestError, match="dimensions: 9 is not allowed; it must be from 1 to 8"):
        llm.embed(TEXTS, dimensions=9)


ORDER = ("Transformer", "Pooling", "Dense")


@pytest.mark.parametrize(
    ("kinds", "settings", "message"),
    [
        (ORDER, {"in_features": 47}, "linear.weight has shape"),
        (ORDER, {"out_features": 0}, "out_features is 0, expected an integer from 1"),
        (ORDER, {"use_residual": True}, "use_residual is set"),
        (ORDER, {"module_input_name": "token_embeddings"}, "module_input_name is 'token_embeddings'"),
        (ORDER, {"activation_function": "elsewhere.Tanh"}, "activation_function is 'elsewhere.Tanh'"),
        (ORDER, {"activation_function": TORCH + "activation.Softmax"}, "expected torch's identity, tanh"),
        (("Transformer", "Pooling", "Normalize", "Dense"), {}, "a module Dense, expected"),
        (("Transformer", "Pooling", "LayerNorm", "Dense"), {}, "a module LayerNorm"),
        (("Transformer", "Dense", "Pooling"), {}, "a module Pooling, expected"),
    ],
)
def test_layers_that_are_not_computed_are_refused(
    kinds: tuple[str, ...], settings: dict[str, Any], message: str, tmp_path: Path
) -> None:
    save(tmp_path)
    write_modules(tmp_path, *kinds)
    write_dense(tmp_path, kinds.index("Dense"), 48, 8, "linear.Identity")
    path = tmp_path / f"{kinds.index('Dense')}_Dense" / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | settings))
    with pytest.raises(CheckpointError, match=message):
        open_llm(tmp_path)


def test_weights_of_a_layer_are_no_pickle(tmp_path: Path) -> None:
    save(tmp_path)
    write_modules(tmp_path, *ORDER)
    write_dense(tmp_path, 2, 48, 8, "linear.Identity")
    weights = tmp_path / "2_Dense" / "model.safetensors"
    save_file({"linear.weight": load_file(weights)["linear.weight"]}, weights)
    with pytest.raises(CheckpointError, match="linear.bias is missing"):
        open_llm(tmp_path)
    weights.rename(tmp_path / "2_Dense" / "pytorch_model.bin")
    with pytest.raises(CheckpointError, match="2_Dense has its weights in pytorch_model.bin, a pickle"):
        open_llm(tmp_path)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"similarity_fn_name": "euclidean"}, "similarity_fn_name is 'euclidean', expected cosine or dot"),
        ({"truncate_dim": "many"}, "truncate_dim is 'many'"),
        ({"prompts": ["a"]}, "prompts is no object"),
        ({"prompts": {"query": 1}}, "the prompt query is no text"),
        ({"prompts": PROMPTS, "default_prompt_name": "passage"}, "expected one of query, document, plain"),
        ({"default_prompt_name": "query"}, "default_prompt_name is 'query', expected one of none"),
    ],
)
def test_settings_that_are_not_known_are_refused(settings: dict[str, Any], message: str, tmp_path: Path) -> None:
    save(tmp_path)
    write_settings(tmp_path, **settings)
    with pytest.raises(CheckpointError, match=message):
        open_llm(tmp_path)


QUERY = "Instruct: Given a web search query, retrieve relevant passages that answer the query\nQuery:"


def save_decoder(directory: Path) -> Any:
    """Write a checkpoint as Qwen3-Embedding has it: of the layers alone, without an output head, and with a tokenizer
    that ends each text."""
    torch.manual_seed(0)
    model = AutoModel.from_config(AutoConfig.for_model(**qwen3.TINY | {"vocab_size": 256})).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.05 * torch.randn_like(parameter)
    model.save_pretrained(directory)
    write_tokenizer(directory)
    path = directory / "tokenizer.json"
    end = {"SpecialToken": {"id": "<eos>", "type_id": 0}}
    single = [{"Sequence": {"id": "A", "type_id": 0}}, end]
    special = {"<eos>": {"id": "<eos>", "ids": [255], "tokens": ["<eos>"]}}
    pair = [*single, {"Sequence": {"id": "B", "type_id": 1}}, end]
    processor = {"type": "TemplateProcessing", "single": single, "pair": pair, "special_tokens": special}
    path.write_text(json.dumps(json.loads(path.read_text()) | {"post_processor": processor}))
    pooling = {"pooling_mode_lasttoken": True, "pooling_mode_mean_tokens": False, "include_prompt": True}
    write_modules(directory, "Transformer", "Pooling", "Normalize", pooling=pooling)
    prompts = {"query": QUERY, "document": ""}
    write_settings(directory, prompts=prompts, default_prompt_name=None, similarity_fn_name="cosine")
    return model


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_decoder_with_the_files_of_qwen3_embedding(backend: str, tmp_path: Path) -> None:
    model = save_decoder(tmp_path)
    llm = open_llm(tmp_path, backend, max_num_batched_tokens=64)
    assert (llm.core.info.pooling, llm.core.info.generates) == ("last", False)
    for name, prompt in (("query", QUERY), ("document", ""), (None, "")):
        right = []
        for text in TEXTS:
            with torch.no_grad():
                ids = [*(prompt + text).encode(), 255]
                last = model(input_ids=torch.tensor([ids])).last_hidden_state[0, -1]
            right.append((last / last.norm()).numpy())
        together = vectors(llm, TEXTS, prompt_name=name)
        np.testing.assert_allclose(together, right, atol=1e-5)
        assert together == [vectors(llm, text, prompt_name=name)[0] for text in TEXTS]
    with pytest.raises(RequestError, match="a model that answers: this one gives vectors or classes"):
        llm.generate("x", use_tqdm=False)
    # The tokenizer ends each text with the token that the vector is read at.
    assert vectors(llm, [[*b"abcd", 255]]) == vectors(llm, "abcd")


def test_weights_without_a_head_are_refused_where_no_file_speaks_of_vectors(tmp_path: Path) -> None:
    save_decoder(tmp_path)
    (tmp_path / "modules.json").unlink()
    path = tmp_path / "config.json"
    assert json.loads(path.read_text())["architectures"] == ["Qwen3Model"]
    assert not open_llm(tmp_path).core.info.generates
    path.write_text(json.dumps(json.loads(path.read_text()) | {"architectures": ["Qwen3ForCausalLM"]}))
    with pytest.raises(CheckpointError, match="lm_head.weight is missing"):
        open_llm(tmp_path)


def test_a_decoders_files_as_sentence_transformers_reads_them(tmp_path: Path) -> None:
    theirs = pytest.importorskip("sentence_transformers")
    save_decoder(tmp_path)
    config = json.loads((tmp_path / "tokenizer_config.json").read_text())
    named = {"tokenizer_class": "PreTrainedTokenizerFast", "pad_token": "<eos>", "padding_side": "left"}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config | named))
    model, llm = theirs.SentenceTransformer(str(tmp_path), device="cpu"), open_llm(tmp_path)
    for name in (None, "query"):
        np.testing.assert_allclose(
            vectors(llm, TEXTS, prompt_name=name), model.encode(TEXTS, prompt_name=name), atol=1e-5
        )


@pytest.mark.parametrize(("mode", "kind"), [("mean_tokens", "mean"), ("cls_token", "cls"), ("lasttoken", "last")])
def test_layers_behind_the_pooling_read_the_whole_text_of_a_decoder(mode: str, kind: str, tmp_path: Path) -> None:
    """However the prompt is cut into chunks: they are applied once, at its end."""
    torch.manual_seed(0)
    config = AutoConfig.for_model(**models.find("llama").TINY | {"max_position_embeddings": 300})
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    width, modules = config.hidden_size, ("Transformer", "Pooling", "Dense")
    listed = [
        {"idx": i, "name": str(i), "path": f"{i}_{each}" if i else "", "type": f"sentence_transformers.models.{each}"}
        for i, each in enumerate(modules)
    ]
    (tmp_path / "modules.json").write_text(json.dumps(listed))
    sizes = {"in_features": width, "out_features": width, "bias": False, "activation_function": "torch.nn.Tanh"}
    for folder, values in (("1_Pooling", {f"pooling_mode_{mode}": True}), ("2_Dense", sizes)):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "config.json").write_text(json.dumps(values))
    save_file({"linear.weight": torch.randn(width, width).numpy()}, tmp_path / "2_Dense" / "model.safetensors")
    inputs: Any = [{"prompt_token_ids": [5 + i % 90 for i in range(200)]}]
    vectors = []
    for num_tokens in (512, 64, 48):
        options: dict[str, Any] = {"dtype": "float32", "skip_tokenizer_init": True}
        llm = LLM(str(tmp_path), max_num_batched_tokens=num_tokens, **options)
        assert llm.core.info.pooling == kind
        vectors.append(llm.embed(inputs, use_tqdm=False)[0].outputs.embedding)
    assert vectors[0] == vectors[1] == vectors[2]
