"""`headrace bench quality`: loads a model and its reference, compares them by `cli.bench.divergence`, and measures
sizes and speed.

Both are whole engines, so that the figures hold for the served model. `bench.quality` runs it over all forms of a
model.
"""

from __future__ import annotations

import math
import tempfile
import time
from collections import defaultdict
from collections.abc import Sequence
from contextlib import closing, nullcontext
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from headrace import gguf, hub
from headrace.backends.base import Program
from headrace.checkpoint import gguf_config, gguf_parts
from headrace.checkpoint.mapped import MappedCheckpoint
from headrace.cli.bench.data import Sample
from headrace.cli.bench.divergence import LayerError, Tally, layer_errors, score, short_name
from headrace.cli.bench.offline import PARAMS, run_batch
from headrace.cli.bench.plans import QualityPlan
from headrace.engine.progress import progress_bar
from headrace.insight import audit
from headrace.llm import LLM
from headrace.protocol.config import EngineConfig
from headrace.protocol.errors import HeadraceError, RequestError
from headrace.protocol.params import SamplingParams
from headrace.protocol.step import EngineInfo

SHOWN_LAYERS = 8
WRITTEN_AT_ONCE = 8
MAX_TEXTS = 4096
WRITTEN = "written"
"""In place of a file: the reference writes the text."""
FIRST_SEED = 2**20
"""Far from the seeds that `headrace quantize` calibrates with, so that no model is scored on its calibration text."""
CHARACTERS_OF_TOKEN = 16
"""Characters of a file that are read for each token to score."""
SPEED_TOKENS, SPEED_RUNS = 64, 3
TIED = {"lm_head": "embed_tokens"}


class Text(NamedTuple):
    """Windows of token ids, all but the first of each scored. num_bytes: of the text of the scored tokens."""

    name: str
    windows: list[list[int]]
    num_bytes: int


def measure_quality(plan: QualityPlan, config: EngineConfig) -> dict[str, Any]:
    """Return the figures of `config.model`: see docs/quantisation.md for the names. `layers` has the worst first.

    Raises `HeadraceError` for a reference that cannot be compared with, `RequestError` for a text that is not there,
    and for outliers in a model that they cannot be planted in.
    """
    texts = plan.text or [WRITTEN]
    for name in texts:  # before a model is loaded
        if name != WRITTEN and not Path(name).is_file():
            raise RequestError("text", name, f"a file, or {WRITTEN}")
    plain = reference_config(plan, config)
    with closing(opened(config)) as llm:
        with nullcontext() if plain is None else closing(opened(plain)) as reference:
            first, *others = [quality_text(plan, name, reference or llm) for name in texts]
            result = judge(llm, reference, first)
            if others:
                result["texts"] = [{"text": text.name} | scored(llm, reference, text) for text in others]
            if plan.outliers:
                result |= judge_outliers(config, reference or llm, first)
        if plan.speed:
            result["decode_tokens_per_s"] = decode_speed(llm)
        if plan.save:
            path = hub.resolve(config.model, config.revision)
            measured = result | {"date": time.strftime("%Y-%m-%d"), "version": llm.core.info.version}
            result["saved"] = audit.save(path, audit.precision_of(llm.core.info), measured).name
    return result


def opened(config: EngineConfig) -> LLM:
    """Open an engine without a prefix cache: blocks are overwritten here, which a prefix cache would not notice."""
    return LLM(**msgspec.structs.asdict(config) | {"enable_prefix_caching": False})


def reference_config(plan: QualityPlan, config: EngineConfig) -> EngineConfig | None:
    """Return the config of the reference; None if the plan names none and the model has no plainer form."""
    plain: dict[str, Any] = {
        "quantization": None,
        "activations": "auto",
        "kv_cache_dtype": "auto",
        "save_packed": False,
    }
    if plan.reference is not None:
        plain |= {"model": plan.reference, "revision": None}
    elif is_quantised(hub.resolve(config.model, config.revision)):
        return None
    reference = msgspec.structs.replace(config, dtype=plan.reference_dtype, **plain)
    return None if reference == config else reference


def is_quantised(path: Path) -> bool:
    """Return whether the weights of a directory or of a GGUF file are codes."""
    if path.is_file():
        tensors = gguf.read(path).tensors.values()
        return any(len(info.shape) > 1 and info.type not in gguf_parts.FLOATS for info in tensors)
    return hub.read_config(path).get("quantization_config") is not None


def quality_text(plan: QualityPlan, name: str, writer: LLM) -> Text:
    """Return the text of a file, or for WRITTEN one that `writer` generates."""
    window = min(plan.window, writer.core.info.max_model_len - 1)
    if name == WRITTEN:
        return written_text(writer, window, plan.max_tokens)
    return file_text(writer, Path(name), window, plan.max_tokens)


def file_text(llm: LLM, path: Path, window: int, max_tokens: int) -> Text:
    """Return the beginning of a UTF-8 file, in windows that each begin with the model's begin-of-text token."""
    tokenizer = llm.get_tokenizer()
    with path.open(encoding="utf-8", errors="replace", newline="") as file:
        content = file.read(CHARACTERS_OF_TOKEN * max_tokens)
    token_ids = tokenizer.encode(content, add_special_tokens=False)
    begin = tokenizer.encode("")[:1]
    begin = begin if begin == [tokenizer.bos_token_id] else []
    step = window - len(begin)
    windows, num_left = [], max_tokens
    for first in range(0, len(token_ids), max(step, 1)):
        piece = begin + token_ids[first : first + min(step, num_left + 1 - len(begin))]
        if num_left < 1 or len(piece) < 2:
            break
        windows.append(piece)
        num_left -= len(piece) - 1
    return Text(path.name, windows, num_bytes(llm, windows))


def written_text(llm: LLM, window: int, max_tokens: int) -> Text:
    """Return the tokens that the model samples at temperature 1 from the beginning of a text, with seeds from
    FIRST_SEED on."""
    tokenizer = llm.get_tokenizer()
    begin = tokenizer.bos_token_id if tokenizer.bos_token_id is not None else tokenizer.eos_token_id
    begin = 0 if begin is None else begin
    windows: list[list[int]] = []
    num_left = max_tokens
    for round_id in range(MAX_TEXTS // WRITTEN_AT_ONCE):
        params = [
            SamplingParams(temperature=1.0, max_tokens=window - 1, seed=FIRST_SEED + round_id * WRITTEN_AT_ONCE + i)
            for i in range(WRITTEN_AT_ONCE)
        ]
        prompts: list[Any] = [{"prompt_token_ids": [begin]}] * WRITTEN_AT_ONCE
        for output in llm.generate(prompts, params, use_tqdm=False):
            piece = [begin, *output.outputs[0].token_ids][: num_left + 1]
            if num_left > 0 and len(piece) > 1:
                windows.append(piece)
                num_left -= len(piece) - 1
        if num_left < 1:
            return Text("written by the reference", windows, num_bytes(llm, windows))
    raise HeadraceError(f"the reference ends its texts too soon to write {max_tokens} tokens; name a file with --text")


def num_bytes(llm: LLM, windows: Sequence[Sequence[int]]) -> int:
    """Return the bytes of the text of all scored tokens."""
    tokenizer = llm.get_tokenizer()
    return sum(len(tokenizer.token_bytes(token_id)) for window in windows for token_id in window[1:])


def judge(llm: LLM, reference: LLM | None, text: Text) -> dict[str, Any]:
    """Return all figures but the speed."""
    program, expected = program_of(llm), None if reference is None else program_of(reference)
    result: dict[str, Any] = audit.precision_of(llm.core.info) | {"text": text.name}
    if reference is not None:
        result["reference"] = named(reference.core.info)
    result |= scored(llm, reference, text)
    path = hub.resolve(llm.config.model, llm.config.revision)
    result |= sizes(program, path)
    if expected is not None:
        layers: list[LayerError] = []
        with progress_bar("comparing weights") as show:
            for layer in layer_errors(matrices_of(program), matrices_of(expected)):
                layers.append(layer)
                show(len(layers), len(matrices_of(program)))
        layers.sort(key=lambda layer: (-layer.relative_error, layer.name))
        result["layers"] = [layer._asdict() for layer in layers]
    return result


def named(info: EngineInfo) -> str:
    """Describe a model and the form it runs in, without the folders above it."""
    name = Path(info.model).name if Path(info.model).exists() else info.model
    return " ".join(part for part in (name, info.quantization, info.dtype, info.backend) if part)


def program_of(llm: LLM) -> Program:
    """Return an engine's program. Raises `HeadraceError` for a prefix cache, whose blocks would be overwritten."""
    if llm.config.enable_prefix_caching:
        raise HeadraceError("an engine that is judged must have no prefix cache")
    program: Program = llm.core.executor.program  # type: ignore[attr-defined]
    return program


def matrices_of(program: Program) -> Sequence[Any]:
    matrices: Sequence[Any] = program.model.ops.matrices
    return matrices


def scored(llm: LLM, reference: LLM | None, text: Text) -> dict[str, float]:
    """Return the figures of one text (`Tally.figures`)."""
    tally = Tally()
    with progress_bar("scoring") as show:
        expected = None if reference is None else program_of(reference)
        for num_done in score(program_of(llm), expected, text.windows, tally):
            show(num_done, len(text.windows))
    return tally.figures(text.num_bytes)


def judge_outliers(config: EngineConfig, reference: LLM, text: Text) -> dict[str, Any]:
    """Return the loss of the form of `config` on its model with planted outliers. The function of the model stays the
    same, so it is compared with the model as it is. Raises `RequestError` for a model in which none can be planted."""
    # It imports torch, which the other figures do not need.
    from headrace.cli.bench.outliers import plant

    with tempfile.TemporaryDirectory() as folder:
        planted = plant(hub.resolve(config.model, config.revision), Path(folder) / "planted")
        changed = msgspec.structs.replace(config, model=str(planted), revision=None, save_packed=False)
        with closing(opened(changed)) as llm:
            return outlier_figures(llm, reference, text)


def outlier_figures(llm: LLM, reference: LLM, text: Text) -> dict[str, Any]:
    """Return the figures of `llm`, a form of the planted model."""
    figures = scored(llm, reference, text)
    return {
        "outlier_kl": figures["mean_kl"],
        "outlier_kl_stderr": figures["mean_kl_stderr"],
        "outlier_activations": llm.core.info.activations,
    }


def sizes(program: Program, path: Path) -> dict[str, Any]:
    """Return bytes, and bits for each weight of a matrix: in the files, in memory, and the lesser of both."""
    matrices = matrices_of(program)
    num_weights = sum(matrix.num_out * matrix.num_in for matrix in matrices)
    bits = sum(held_bits(matrix) * matrix.num_out * matrix.num_in for matrix in matrices) / num_weights
    sizes: dict[str, Any] = {
        "num_weights": num_weights,
        "disk_bytes": sum(file.stat().st_size for file in audit.weight_files(path) if file.suffix != ".json"),
        "memory_bytes": program.model.ops.weight_bytes,
        "held_bits_per_weight": bits,
    }
    stored = stored_bytes(path, [matrix.name for matrix in matrices])
    if stored is not None:
        sizes["stored_bits_per_weight"] = 8 * stored / num_weights
        bits = min(bits, sizes["stored_bits_per_weight"])
    return sizes | {"bits_per_weight": bits}


def held_bits(matrix: Any) -> float:
    """Return the bits of a weight in memory, scales and minimums included, padding not."""
    parts = getattr(matrix, "parts", None)  # of other forms, one under the other
    if parts is not None:
        return float(sum(held_bits(part) * part.num_out for part in parts) / sum(part.num_out for part in parts))
    outliers, order = getattr(matrix, "outliers", None), getattr(matrix, "permutation", None)
    bits: float = matrix.scheme.bits_per_weight(matrix.num_in) + (0 if order is None else 32 / matrix.num_out)
    return bits if outliers is None else bits + 16 * len(outliers.columns) / matrix.num_in


def stored_bytes(path: Path, names: Sequence[str]) -> int | None:
    """Return the bytes of the tensors that the matrices `names` are made of; None if one has no tensor of its name."""
    if path.is_file():
        parts = gguf_config.read(gguf.read(path)).parts
        tensors = {name: _part_bytes(part) for name, part in parts.items()}
    else:
        checkpoint = MappedCheckpoint(path)
        tensors = {name: checkpoint.entry(name).end - checkpoint.entry(name).begin for name in checkpoint.names}
    owners: defaultdict[str, int] = defaultdict(int)
    for name, size in tensors.items():
        if not name.endswith(".bias"):
            # bitsandbytes names the parts of a weight after it: q_proj.weight.absmax.
            layer, weight, _ = f"{name}.".partition(".weight.")
            owners[short_name(layer if weight else name.rpartition(".")[0])] += size
    total = 0
    for name in names:
        head, _, tail = short_name(name).rpartition(".")
        for part in tail.split("+"):
            layer = f"{head}.{part}" if head else part
            num_bytes = owners.get(layer, owners.get(TIED.get(layer, "")))
            if num_bytes is None:
                return None
            total += num_bytes
    return total


def _part_bytes(part: gguf_parts.Part) -> int:
    elements, size = gguf_parts.BLOCK_BYTES[part.info.type]
    return math.prod(part.shape) * size // elements


def decode_speed(llm: LLM, num_tokens: int = SPEED_TOKENS) -> float:
    """Return the tokens a second that the engine makes of one sequence alone, scheduler and sampler included, after the
    first: the best of some short runs."""
    sample = Sample([0], 1, num_tokens + 1)
    times = [run_batch(llm.core, [sample], PARAMS)[0].token_times for _ in range(SPEED_RUNS)]
    return num_tokens / min(last - first for first, *_, last in times)


LINES: tuple[tuple[str, str, str], ...] = (
    ("reference", "Reference", "{}"),
    ("text", "Text", "{}"),
    ("num_tokens", "Scored tokens", "{:,}"),
    ("perplexity", "Perplexity", "{:.4f}"),
    ("reference_perplexity", "Perplexity of the reference", "{:.4f}"),
    ("bits_per_byte", "Bits per byte of text", "{:.4f}"),
    ("mean_kl", "Mean KL from the reference (nats)", "{:.6f}"),
    ("mean_kl_stderr", "Its standard error (nats)", "{:.6f}"),
    ("max_kl", "Largest KL (nats)", "{:.4f}"),
    ("top1_flip_rate", "Top-1 flips", "{:.2%}"),
    ("outlier_kl", "Mean KL with planted outliers (nats)", "{:.6f}"),
    ("max_logit_difference", "Largest difference of a logit", "{:.4f}"),
    ("bits_per_weight", "Bits per weight", "{:.2f}"),
    ("disk_bytes", "Weights on disk (bytes)", "{:,}"),
    ("memory_bytes", "Matrices in memory (bytes)", "{:,}"),
    ("decode_tokens_per_s", "Decode, one sequence (tokens/s)", "{:.1f}"),
)


def print_quality(result: dict[str, Any]) -> None:
    """Print the figures, and the matrices that are furthest from the reference's."""
    from rich.console import Console
    from rich.table import Table

    console = Console()
    table = Table(title=f"Quality of {result['model_id']}: {described(result)}", show_header=False)
    for name, heading, form in LINES:
        if name in result:
            table.add_row(heading, form.format(result[name]))
    for text in result.get("texts", ()):
        for name, heading, form in LINES:
            if name in ("perplexity", "reference_perplexity", "mean_kl") and name in text:
                table.add_row(f"{heading}, on {text['text']}", form.format(text[name]))
    console.print(table)
    if result.get("layers"):
        layers = Table(title="Matrices furthest from the reference's")
        for heading in ("matrix", "shape", "relative error", "largest error"):
            layers.add_column(heading, justify="left" if heading == "matrix" else "right")
        for layer in result["layers"][:SHOWN_LAYERS]:
            shape = f"{layer['num_out']} x {layer['num_in']}"
            layers.add_row(layer["name"], shape, f"{layer['relative_error']:.4%}", f"{layer['max_error']:.4%}")
        console.print(layers)


def described(result: dict[str, Any]) -> str:
    """Describe the form in words."""
    weights = result["quantization"] or result["dtype"]
    return f"{weights}, KV cache {result['kv_cache_dtype']}, {result['backend']}"
