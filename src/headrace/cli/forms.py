"""Measures the forms that a model can be served in here, speed against loss, for `headrace doctor --forms`.

Each form is a whole engine. Its loss is measured on the sample (`text.sample`), beside the form that loses nothing: the
stored one with 16-bit activations. Called by `cli.doctor`; `headrace bench quality` measures one form on a long text.
"""

from __future__ import annotations

from contextlib import closing
from typing import Any, NamedTuple

from headrace import hub
from headrace.cli.bench.divergence import Tally, score
from headrace.cli.bench.quality import decode_speed, is_quantised, opened, program_of
from headrace.engine.progress import Progress
from headrace.protocol.config import EngineConfig
from headrace.protocol.errors import RequestError
from headrace.text import sample

MAX_KL = 0.002
"""The greatest KL, in nats, of a form that is recommended: a loss that other settings of a request hide."""
SPEED_TOKENS = 32
FLAGS: dict[str, Any] = {"num_gpu_blocks_override": 64, "max_model_len": 512, "max_num_seqs": 1, "backend": "cpu"}


class Form(NamedTuple):
    """Values of `--quantization` (empty: as stored) and `--activations`."""

    quantization: str
    activations: str


STORED = (Form("", "16bit"), Form("", "auto"), Form("", "int8"))
"""Forms of a model whose weights are quantised; the first loses nothing."""
MADE = (
    Form("", "auto"), Form("int8", "auto"), Form("int8", "int8"), Form("int4-g32-asym", "auto"), Form("int4", "auto"),
    Form("int4", "int8"),
)  # fmt: skip


def measure(model: str, on_form: Progress) -> list[dict[str, Any]]:
    """Return a row for each form: its two names, the choice of activations, decode speed, KL in nats, and the share of
    tokens that change; `recommended` is the fastest whose KL is at most MAX_KL.

    Raises `HeadraceError` for a model that cannot be served, or has no tokenizer.
    """
    path = hub.resolve(model)
    token_ids = sample.token_ids(path)
    if not token_ids:
        raise RequestError("model", model, "a model with a tokenizer, by which its forms are measured")
    forms = STORED if is_quantised(path) else MADE
    rows: list[dict[str, Any]] = []

    def open_form(form: Form) -> Any:
        fields: dict[str, Any] = {"quantization": form.quantization or None, "activations": form.activations}
        return closing(opened(EngineConfig(model=model, **fields, **FLAGS)))

    with open_form(forms[0]) as reference:
        for form in forms:
            on_form(len(rows), len(forms), " ".join(filter(None, form)))
            try:
                with open_form(form) as llm:
                    tally = Tally()
                    for _ in score(program_of(llm), program_of(reference), [token_ids], tally):
                        pass
                    figures = tally.figures(0)
                    speed = decode_speed(llm, SPEED_TOKENS)
            except RequestError as error:
                # Such as int8 activations beside weights of floats.
                if error.field not in Form._fields:
                    raise
                continue
            rows.append(
                form._asdict() | {
                    "chosen": llm.core.info.activations or llm.core.info.dtype,
                    "decode_tokens_per_s": round(speed, 1),
                    "mean_kl": figures["mean_kl"],
                    "top1_flip_rate": figures["top1_flip_rate"],
                }
            )  # fmt: skip
        on_form(len(forms), len(forms))
    good = [row for row in rows if row["mean_kl"] <= MAX_KL]
    best = max(good, key=lambda row: float(row["decode_tokens_per_s"]))
    return [row | {"recommended": row is best} for row in rows]


def show(rows: list[dict[str, Any]]) -> None:
    """Print the rows as a table, and the flags of the recommended form."""
    from headrace.doctor import printed_table

    with printed_table() as table:
        for title in ("quantization", "activations", "chosen"):
            table.add_column(title, no_wrap=True)
        for title in ("decode, tok/s", "KL, mnats", "flips"):
            table.add_column(title, justify="right", no_wrap=True)
        for row in rows:
            style = "bold" if row["recommended"] else None
            table.add_row(
                row["quantization"] or "as stored", row["activations"], row["chosen"],
                f"{row['decode_tokens_per_s']:.1f}", f"{1000 * row['mean_kl']:.2f}", f"{row['top1_flip_rate']:.1%}",
                style=style,
            )  # fmt: skip
    (best,) = (row for row in rows if row["recommended"])
    flags = [f"--quantization {best['quantization']}"] * bool(best["quantization"])
    flags += [f"--activations {best['activations']}"] * (best["activations"] != "auto")
    advice = " ".join(flags) or "no flag"
    print(f"recommended: {advice}")
    print(f"(the fastest with a KL of at most {1000 * MAX_KL:g} mnats from the first row)")
