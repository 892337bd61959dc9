"""`headrace bench quality` end to end: the order of the forms on the built-in model, both backends, what is kept."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from tests.support.shallow import shallow
from typer.testing import CliRunner

from headrace.cli.bench.outliers import plant
from headrace.cli.bench.plans import QualityPlan
from headrace.cli.bench.quality import (
    Text,
    file_text,
    judge,
    matrices_of,
    measure_quality,
    opened,
    outlier_figures,
    program_of,
    reference_config,
    sizes,
    written_text,
)
from headrace.cli.main import app
from headrace.insight import audit
from headrace.llm import LLM
from headrace.protocol.config import EngineConfig
from headrace.protocol.errors import HeadraceError, RequestError
from headrace.quantize.gguf_writer import convert

PATH = Path(shallow())

OWN = {"model": str(PATH), "dtype": "bfloat16", "backend": "cpu"}
SMALL = {"num_gpu_blocks_override": 512, "max_num_seqs": 16}
NUM_TOKENS = 2048


@pytest.fixture(scope="module")
def reference() -> Iterator[LLM]:
    with closing(opened(EngineConfig(model=str(PATH), dtype="float32", backend="cpu", **SMALL))) as llm:
        yield llm


@pytest.fixture(scope="module")
def text(reference: LLM) -> Text:
    return written_text(reference, 512, NUM_TOKENS)


def judged(reference: LLM, text: Text, **fields: Any) -> dict[str, Any]:
    with closing(opened(EngineConfig(**(OWN | SMALL | fields)))) as llm:
        return judge(llm, reference, text)


@pytest.fixture(scope="module")
def rows(reference: LLM, text: Text) -> dict[str, dict[str, Any]]:
    named = {"bf16": {}} | {name: {"quantization": name} for name in ("int8", "int6", "int4", "int4-g128", "nf4")}
    return {name: judged(reference, text, **fields) for name, fields in named.items()}


def loss(row: dict[str, Any]) -> float:
    return abs(row["perplexity"] / row["reference_perplexity"] - 1)


@pytest.mark.slow
def test_more_bits_lose_less(rows: dict[str, dict[str, Any]]) -> None:
    kl = {name: row["mean_kl"] for name, row in rows.items()}
    assert kl["bf16"] < kl["int8"] < kl["int6"] < kl["int4"] < kl["int4-g128"]
    flips = {name: row["top1_flip_rate"] for name, row in rows.items()}
    assert flips["bf16"] < flips["int8"] < flips["int6"] < flips["int4"]
    bits = {name: row["bits_per_weight"] for name, row in rows.items()}
    assert bits["int4-g128"] < bits["nf4"] < bits["int4"] < bits["int6"] < bits["int8"] < bits["bf16"] == 16


@pytest.mark.slow
def test_int8_is_within_three_thousandths_of_bf16(rows: dict[str, dict[str, Any]]) -> None:
    result = {name: row["perplexity"] for name, row in rows.items()}
    assert abs(result["int8"] / result["bf16"] - 1) < 3e-3
    # The bound can be missed.
    assert abs(result["int4"] / result["bf16"] - 1) > 3e-3


def test_errors_of_the_weights(rows: dict[str, dict[str, Any]]) -> None:
    assert all(layer["relative_error"] == 0 for layer in rows["bf16"]["layers"])
    worst = {name: row["layers"][0]["relative_error"] for name, row in rows.items()}
    assert worst["int8"] < worst["int6"] < worst["int4"] < worst["int4-g128"] < 0.2
    layers = rows["int4"]["layers"]
    assert len(layers) == 4 * 4 + 1
    assert [layer["relative_error"] for layer in layers] == sorted((e["relative_error"] for e in layers), reverse=True)


def test_bits_of_blocks_of_two_types(tmp_path: Path) -> None:
    """q, k and v of two types of GGUF's blocks are one matrix of parts, which takes what the file takes."""
    path = tmp_path / "model.gguf"
    convert(PATH, path, "Q4_K_M")
    with closing(opened(EngineConfig(model=str(path), backend="cpu", **SMALL))) as llm:
        output = sizes(program_of(llm), path)
        assert any(hasattr(matrix, "parts") for matrix in matrices_of(program_of(llm)))
    assert output["held_bits_per_weight"] == pytest.approx(output["stored_bits_per_weight"], rel=1e-6)


def test_figures_do_not_depend_on_threads_or_company(reference: LLM, text: Text) -> None:
    output = judged(reference, text, quantization="int4")
    others = judged(
        reference, text, quantization="int4", num_threads=1, max_num_batched_tokens=48, max_num_seqs=3, block_size=32
    )
    assert output == others


def test_both_backends_say_the_same_of_a_model(reference: LLM, text: Text) -> None:
    few = Text(text.name, [window[:100] for window in text.windows[:2]], 0)
    row = judged(reference, few, backend="torch_ref", dtype="float32")
    assert row["mean_kl"] < 1e-9
    assert row["top1_flip_rate"] == 0
    assert row["held_bits_per_weight"] == 32
    assert row["bits_per_weight"] == 16  # as stored
    torch_figures = judged(reference, few, backend="torch_ref", quantization="int4")
    assert torch_figures["held_bits_per_weight"] == pytest.approx(4.3, abs=0.05)


def test_written_text_is_the_same_each_time(reference: LLM, text: Text) -> None:
    judge(reference, None, text)  # which writes over the cache
    assert written_text(reference, 512, NUM_TOKENS) == text
    assert sum(len(window) - 1 for window in text.windows) == NUM_TOKENS
    assert max(map(len, text.windows)) <= 512
    decoded = "".join(reference.get_tokenizer().decode(window) for window in text.windows)
    assert 0 < text.num_bytes <= len(decoded.encode()) + 64 * len(text.windows)


def test_an_engine_with_a_prefix_cache_is_not_judged(text: Text) -> None:
    with closing(LLM("builtin", **SMALL)) as llm, pytest.raises(HeadraceError, match="no prefix cache"):
        judge(llm, None, text)


def test_a_file_is_cut_into_windows_that_begin_a_text(reference: LLM, tmp_path: Path) -> None:
    content = "Once upon a time there was a little girl named Lily. " * 200
    (tmp_path / "story.txt").write_text(content)
    tokenizer = reference.get_tokenizer()
    result = file_text(reference, tmp_path / "story.txt", 64, 500)
    assert sum(len(window) - 1 for window in result.windows) == 500
    assert result.name == "story.txt"
    begin = 1 if tokenizer.encode("")[:1] == [tokenizer.bos_token_id] else 0
    joined = [token_id for window in result.windows for token_id in window[begin:]]
    assert joined == tokenizer.encode(content, add_special_tokens=False)[: len(joined)]
    (tmp_path / "empty.txt").write_text("")
    with pytest.raises(HeadraceError, match="nothing to judge"):
        judge(reference, None, file_text(reference, tmp_path / "empty.txt", 64, 500))
    with pytest.raises(RequestError, match="text"):
        measure_quality(QualityPlan(text=["written", str(tmp_path / "absent.txt")]), EngineConfig(**SMALL))


def test_what_a_model_is_compared_with_if_nobody_says() -> None:
    plan = QualityPlan()
    plain = EngineConfig(model="builtin", backend="cpu")
    assert reference_config(plan, EngineConfig(model="builtin", backend="cpu", quantization="int4")) == plain
    assert reference_config(plan, EngineConfig(model="builtin", backend="cpu", kv_cache_dtype="int8")) == plain
    wide = EngineConfig(model="builtin", backend="cpu", quantization="int4", activations="16bit")
    assert reference_config(plan, wide) == plain
    assert reference_config(plan, plain) is None
    other = reference_config(QualityPlan(reference="builtin", reference_dtype="float32"), plain)
    assert other == EngineConfig(model="builtin", backend="cpu", dtype="float32")


def test_command_keeps_its_figures_beside_the_weights(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    shutil.copytree(PATH, folder)
    (tmp_path / "other.txt").write_text("Once upon a time there was a little girl named Lily. " * 30)
    words = ["bench", "quality", str(folder), "-q", "int4", "--max-tokens", "256", "--max-num-seqs", "16"]
    more = ["--text", "written", "--text", str(tmp_path / "other.txt"), "--outliers"]
    done = CliRunner().invoke(app, [*words, *more, "--json", "--save", "--speed"])
    assert done.exit_code == 0, done.output
    data = json.loads(done.stdout)
    assert data["num_tokens"] == 256
    assert data["decode_tokens_per_s"] > 0
    assert data["saved"] == audit.NAME
    assert data["reference"].startswith("model ")
    [other] = data["texts"]
    assert (other["text"], other["num_tokens"]) == ("other.txt", 256)
    assert data["outlier_kl"] > other["mean_kl"] > 0
    assert other["perplexity"] != data["perplexity"]
    assert data["disk_bytes"] == (folder / "model.safetensors").stat().st_size
    [entry] = audit.find(folder)
    assert entry["form"]["quantization"] == "int4"
    assert entry["measured"]["mean_kl"] == data["mean_kl"] > 0
    command_result = CliRunner().invoke(app, words)
    assert command_result.exit_code == 0, command_result.output
    assert f"{data['perplexity']:.4f}" in command_result.stdout


@pytest.mark.slow
@pytest.mark.usefixtures("shared_data")
def test_gguf_files_beside_the_model_they_were_made_of(shared_data: Path) -> None:
    base = shared_data / "models"
    config = EngineConfig(model=str(base / "TinyStories-656K"), backend="cpu", dtype="float32", **SMALL)
    with closing(opened(config)) as reference:
        text = written_text(reference, 256, 1024)
        rows = {}
        for kind in ("F32", "Q8_0", "Q5_1", "Q5_0", "Q4_1", "Q4_0"):
            path = base / "derived" / "gguf" / f"TinyStories-656K.{kind}.gguf"
            with closing(opened(EngineConfig(model=str(path), dtype="float32", backend="cpu", **SMALL))) as llm:
                rows[kind] = judge(llm, reference, text)
        assert rows["F32"]["mean_kl"] < 1e-9
        assert rows["F32"]["stored_bits_per_weight"] == 32
        assert rows["Q8_0"]["mean_kl"] < rows["Q5_1"]["mean_kl"] < rows["Q4_1"]["mean_kl"]
        assert rows["Q5_0"]["mean_kl"] < rows["Q4_0"]["mean_kl"]
        bits = {kind: row["stored_bits_per_weight"] for kind, row in rows.items()}
        assert bits == {"F32": 32, "Q8_0": 8.5, "Q5_1": 6, "Q5_0": 5.5, "Q4_1": 5, "Q4_0": 4.5}
    # Quantised already, it has no plainer form of its own to be compared with.
    alone = EngineConfig(model=str(path), backend="cpu", **SMALL)
    quality = measure_quality(QualityPlan(max_tokens=256), alone)
    assert "mean_kl" not in quality
    assert quality["perplexity"] > 1


def test_outliers_are_planted_to_the_bit(reference: LLM, text: Text, tmp_path: Path) -> None:
    """In floats the planted model is the model itself, and int8 activations are what it can not bear."""
    planted = {factor: plant(PATH, tmp_path / f"{factor}", 3, factor) for factor in (64.0, 512.0)}
    few = Text(text.name, text.windows[:1], text.num_bytes)
    assert judged(reference, few, model=str(planted[64.0]), dtype="float32")["mean_kl"] == 0
    with closing(opened(EngineConfig(**(OWN | SMALL | {"model": str(planted[512.0]), "quantization": "int8"})))) as llm:
        chosen = outlier_figures(llm, reference, few)
    forced = judged(reference, few, model=str(planted[512.0]), quantization="int8", activations="int8")
    assert chosen["outlier_activations"] != "int8"
    assert forced["mean_kl"] > 10 * chosen["outlier_kl"] > 0


def test_outliers_that_can_not_be_planted(tmp_path: Path) -> None:
    with pytest.raises(RequestError, match="a power of two"):
        plant(PATH, tmp_path / "a", 3, 48.0)
    stated = tmp_path / "quantised"
    stated.mkdir()
    config = json.loads((PATH / "config.json").read_text())
    (stated / "config.json").write_text(json.dumps(config | {"quantization_config": {"quant_method": "fp8"}}))
    with pytest.raises(RequestError, match="a model of plain floats of type llama"):
        plant(stated, tmp_path / "b")
    assert not (tmp_path / "a").exists()
    assert not (tmp_path / "b").exists()
