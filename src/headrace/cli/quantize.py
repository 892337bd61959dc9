"""`headrace quantize`: makes a quantised checkpoint (or GGUF file) of a model, with its loss measured.

Methods, layouts of Hugging Face directories and levels of GGUF files (Q4_K_M, ...) come from `headrace.quantize`; on
the command line a level is a method.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

import msgspec
import typer
from msgspec import Meta

from headrace import hub
from headrace.cli.options import build, options
from headrace.engine.progress import progress_bar
from headrace.protocol.errors import CheckpointError, HeadraceError, RequestError

if TYPE_CHECKING:
    from headrace.quantize.driver import Report


class Default(NamedTuple):
    """A method's defaults. follows: whether the group may be smaller where the widths of a model ask for it."""

    bits: int = 4
    group_size: int = 128
    layout: str = "compressed-tensors"
    follows: bool = True


DEFAULTS = {
    "gptq": Default(layout="gptq"),
    "awq": Default(layout="awq"),
    "smoothquant": Default(8, -1),
    "nf4": Default(4, 64, "bitsandbytes"),
    "llm_int8": Default(8, -1, "bitsandbytes"),
    "fp8": Default(8, -1, "fp8"),
    "fp8_e5m2": Default(8, -1, "fp8"),
    "mxfp4": Default(4, 32, follows=False),
}
"""Of the methods that differ from `Default()`."""
MIXED, MIXED_BITS = "mixed", 4.5
NUM_TOKENS = {"qat": 65536}
"""Tokens of the calibration text, where they are not 32,768."""
METHOD_OPTIONS = (
    "method", "symmetric", "act_order", "damping", "clip", "alpha", "num_steps", "learning_rate", "seed", "bfloat16",
)  # fmt: skip
"""The flags that a method takes as they are."""


def _flag(metavar: str, text: str, low: int | None = None, high: int | None = None) -> Meta:
    return Meta(description=text, extra={"metavar": metavar}, ge=low, le=high)


class QuantizePlan(msgspec.Struct, frozen=True, kw_only=True):
    """The flags of the command. None stands for the method's default."""

    method: Annotated[
        str,
        _flag(
            "M",
            "rtn, gptq, awq, smoothquant, hqq, qat, nf4, llm_int8, fp8, fp8_e5m2, mxfp4; or of a .gguf file its level "
            "(Q4_K_M, Q8_0, ...), or mixed: types by measured loss within --bits a weight.",
        ),
    ] = "rtn"
    bits: Annotated[float | None, _flag("B", "Bits of a code; by default the method's usual number.")] = None
    group_size: Annotated[
        int | None,
        _flag(
            "G",
            "Inputs that share a scale; -1: one scale an output, 0: one scale. By default the method's usual (of 4 "
            "bits mostly 128), or the largest power of two below it that divides the inputs of all layers.",
        ),
    ] = None
    symmetric: Annotated[
        bool | None,
        Meta(
            description="Codes without or with zero points; by default the method's way.",
            extra={"opposite": "asymmetric"},
        ),
    ] = None
    format: Annotated[
        str | None,
        _flag("F", "compressed-tensors, gptq, awq, bitsandbytes, fp8, mxfp4 or gguf; by default the method's own."),
    ] = None
    calibration: Annotated[
        str | None,
        _flag(
            "FILE", 'Text, or .jsonl with a "text" or "token_ids" in each line; by default the model writes the text.'
        ),
    ] = None
    num_calibration_tokens: Annotated[
        int | None,
        _flag("INT", "Tokens of the calibration text that are used; by default 32768, for qat 65536.", 2, 2**22),
    ] = None
    calibration_length: Annotated[
        int, _flag("INT", "Tokens of each piece of the calibration text; at most the context.", 2, 2**17)
    ] = 512
    act_order: Annotated[str, _flag("O", "gptq: none, static (any kernel runs it) or group (with a g_idx).")] = "static"
    damping: Annotated[float, Meta(description="gptq: added to the Hessian's diagonal, as a share of its mean.")] = 0.01
    clip: Annotated[bool, Meta(description="awq: search for the ends of each group's grid.")] = True
    alpha: Annotated[float, Meta(description="smoothquant: how much of the difficulty goes into the weights.")] = 0.5
    num_steps: Annotated[
        int, _flag("INT", "qat: steps of training, of 2,048 tokens each; 0: none, which is rtn.", 0, 10**6)
    ] = 120
    learning_rate: Annotated[
        float, Meta(description="qat: the highest rate; by default 0.0003, of 2 and 3 bits 0.001.", ge=0)
    ] = 0.0
    seed: Annotated[int, Meta(description="qat: the order of the text. The same seed gives the same bytes.", ge=0)] = 0
    bfloat16: Annotated[
        bool, Meta(description="qat: products of the training in bfloat16, faster on CPUs that have it.")
    ] = False


@options(QuantizePlan)
def quantize(
    model: Annotated[str, typer.Argument(help="A directory, a hub id, or 'builtin': plain floats.")],
    out: Annotated[Path, typer.Argument(metavar="OUT", help="The directory to make; or the .gguf file.")],
    **fields: Any,
) -> None:
    """Quantise a model's weights. The same command resumes an interrupted run."""
    plan = build(QuantizePlan, fields)
    from headrace.quantize.base import TRAINED, Options, find_method, find_writer, method_names
    from headrace.quantize.driver import quantise_checkpoint, train_checkpoint, verify_checkpoint
    from headrace.quantize.gguf_writer import LEVELS
    from headrace.quantize.state import verify_out

    if plan.method == MIXED or plan.method in LEVELS:
        _gguf(model, out, plan)
        return
    if plan.method not in method_names():
        raise RequestError("method", plan.method, "one of " + ", ".join([*method_names(), MIXED, *LEVELS]))
    default = DEFAULTS.get(plan.method, Default())
    if plan.bits is not None and plan.bits != int(plan.bits):
        raise RequestError("bits", plan.bits, f"a whole number for method {plan.method}")
    if plan.act_order not in ("none", "static", "group"):
        raise RequestError("act_order", plan.act_order, "one of none, static, group")
    choices: dict[str, Any] = {name: getattr(plan, name) for name in METHOD_OPTIONS}
    choices["bits"] = default.bits if plan.bits is None else int(plan.bits)
    # AWQ's own layout holds 4 bits only.
    usual = default.layout if default.layout != "awq" or choices["bits"] == default.bits else Default().layout
    layout = plan.format or usual
    choices["group_size"] = default.group_size if plan.group_size is None else plan.group_size
    choices["follows_widths"] = plan.group_size is None and default.follows
    # Every refusal comes before the model generates a text, which takes minutes.
    chosen = find_method(plan.method).verify(Options(**choices))
    find_writer(layout).verify(chosen)
    verify_out(out)
    directory = hub.resolve(model)
    verify_out(out, verify_checkpoint(directory, chosen, layout))
    pieces: list[list[int]] = []
    if find_method(plan.method).CALIBRATED or plan.calibration is not None:
        pieces = calibration_of(plan, model, directory)
    if plan.method in TRAINED:
        with progress_bar("steps of training") as show:
            train_checkpoint(directory, out, chosen, layout, pieces, show)
    with progress_bar("quantising") as show:
        report = quantise_checkpoint(directory, out, chosen, layout, pieces, progress=show)
    print(summary(report, out), file=sys.stderr)


def summary(report: Report, out: Path) -> str:
    """Describe the checkpoint and its loss in one line."""
    errors, groups = report.errors, sorted(set(report.groups.values()))
    line = f"{out}: {report.num_bytes / 2**20:.1f} MiB, {len(errors)} layers quantised"
    if groups:
        line += f" in groups of {' and '.join(map(str, groups))}"
    if report.kl is not None:
        before, after = (1e3 * kl for kl in report.kl)
        gain = f" ({100 * (1 - after / before):.0f}% less)" if before > after else ""
        line += f"; {before:.1f} mnats a token from the model when rounded to nearest, {after:.1f} when trained{gain}"
    elif errors:
        worst = max(errors, key=lambda name: errors[name])
        of = "outputs" if report.num_calibration_tokens else "weights"
        line += (
            f"; their {of} are off by {100 * sum(errors.values()) / len(errors):.2f}% on average, by "
            f"{100 * errors[worst]:.2f}% in {worst}"
        )
    return line


def calibration_of(plan: QuantizePlan, model: str, directory: Path) -> list[list[int]]:
    file = None if plan.calibration is None else Path(plan.calibration)
    num_tokens = plan.num_calibration_tokens or NUM_TOKENS.get(plan.method, 32768)
    return calibration_text(model, directory, file, num_tokens, plan.calibration_length)


def calibration_text(model: str, directory: Path, file: Path | None, num_tokens: int, length: int) -> list[list[int]]:
    """Return pieces of token ids, from `file` or from text that the model generates."""
    from headrace.models.config import ModelConfig
    from headrace.quantize.calibration import cut, generated_text, read_texts

    if directory.is_file():
        raise CheckpointError(f"{directory} is a GGUF file; headrace quantises directories of safetensors")
    values = hub.read_json(directory / "config.json")
    length = min(length, ModelConfig(values).max_positions())
    if file is not None:
        from headrace.text.tokenizer import Tokenizer

        texts = read_texts(file)
        tokenizer = Tokenizer.load_if_present(hub.resolve_tokenizer(model, None))

        def ids(text: str | list[int]) -> list[int]:
            if not isinstance(text, str):
                return text
            if tokenizer is None:
                raise HeadraceError(f"{model} has no tokenizer, and --calibration is a text; leave it out")
            return tokenizer.encode(text)

        return cut(map(ids, texts), length, num_tokens)
    from headrace.llm import LLM
    from headrace.protocol.params import SamplingParams

    ends = hub.eos_token_ids(directory)
    first = values.get("bos_token_id")
    prompt = [first if type(first) is int and first >= 0 else ends[0] if ends else 0]
    length = max(2, min(length, num_tokens))  # the text beyond num_tokens is cut off
    with closing(LLM(str(directory), skip_tokenizer_init=True, max_model_len=length)) as llm:

        def answer(seeds: range) -> Sequence[Sequence[int]]:
            params = [
                SamplingParams(temperature=1.0, max_tokens=length - 1, seed=seed, detokenize=False) for seed in seeds
            ]
            outputs = llm.generate([{"prompt_token_ids": prompt}] * len(params), params, use_tqdm=False)
            return [[*prompt, *output.outputs[0].token_ids] for output in outputs]

        with progress_bar("tokens of calibration text", has_long_steps=True) as show:
            show(0, num_tokens, "the model writes it")
            return generated_text(answer, length, num_tokens, show)


def _gguf(model: str, out: Path, plan: QuantizePlan) -> None:
    """Write a GGUF file of one of its levels, or of types chosen by measured loss."""
    from headrace.quantize import gguf_writer, mixed
    from headrace.quantize.state import verify_out

    if out.suffix != ".gguf":
        raise RequestError("out", str(out), f"a name that ends in .gguf for method {plan.method}")
    if out.exists():
        raise RequestError("out", str(out), "a file that is not there yet")
    verify_out(out)
    directory = hub.resolve(model)
    with progress_bar("quantising") as show:
        if plan.method == MIXED:
            bits = MIXED_BITS if plan.bits is None else plan.bits
            mixed.verify(gguf_writer.Source(directory), bits)
            mixture = mixed.write(directory, out, bits, calibration_of(plan, model, directory), show)
            written, loss = mixture.written, f"; {mixture.measured:.4f} nats a token from the plain model"
        else:
            for name in ("bits", "calibration"):
                if getattr(plan, name) is not None:
                    raise RequestError(name, plan.method, "left out: the level says it")
            written, loss = gguf_writer.convert(directory, out, plan.method, show), ""
    print(f"{out}: {written.num_bytes / 2**20:.1f} MiB, {written.bits:.2f} bits a weight{loss}", file=sys.stderr)
