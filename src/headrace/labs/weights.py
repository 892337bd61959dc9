"""Labs of weights: the effect of fewer bits on them, on speed and on memory; and the experts of a mixture."""

from __future__ import annotations

import math
from typing import Any

from headrace import hub
from headrace.labs.base import Lab
from headrace.labs.engine import opened
from headrace.plan import hardware, planner
from headrace.plan.plans import Workload
from headrace.plan.steps import Roofline
from headrace.protocol.errors import HeadraceError
from headrace.protocol.params import SamplingParams
from headrace.protocol.step import Request
from headrace.quant.schemes import parse
from headrace.quantize import samples

WIDTH = 4096
"""Inputs of a row for which bits a weight are counted."""
MIXTRAL = {
    "model_type": "mixtral", "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32,
    "num_attention_heads": 32, "num_key_value_heads": 8, "vocab_size": 32000, "max_position_embeddings": 32768,
    "rms_norm_eps": 1e-5, "rope_theta": 1e6, "num_local_experts": 8, "num_experts_per_tok": 2,
    "tie_word_embeddings": False, "torch_dtype": "bfloat16",
}  # fmt: skip
"""The config.json of Mixtral-8x7B (arXiv:2401.04088, table 1)."""


def rounding(model: str, small: bool) -> Lab:
    """The errors of weights and of answers in 8 and 4 bits."""
    path = hub.resolve(model)
    names = samples.names_of(path)[: 3 if small else 24]
    sums: dict[str, list[float]] = {}
    for name in names:
        for each in samples.group_of(path, name, 3)["roundings"]:
            sums.setdefault(each["format"], []).append(each["relative_error"] ** 2)
    errors = {form: math.sqrt(sum(squares) / len(squares)) for form, squares in sums.items()}
    length = 48 if small else 256
    exact, logprobs = _logprobs(model, None, length, [])
    rows: list[list[str | int | float]] = []
    for form in ("int8-g128", "int4-g64"):
        _, theirs = _logprobs(model, form, length, exact)
        distance = sum(abs(a - b) for a, b in zip(logprobs, theirs, strict=True)) / len(theirs)
        rows.append([form, parse(form).layer.bits_per_weight(WIDTH), 100 * errors[form], distance])
    bits, ratio = float(rows[1][1]), float(rows[1][2]) / float(rows[0][2])
    return Lab(
        name="rounding",
        title="Errors of 8 and 4 bits",
        measured=f"Groups of 128 weights of {len(names)} matrices of the model, rounded as --quantization does; "
        "the error "
        "is relative to their size (root mean square). Then the model in that form: by how many nats the "
        f"log-probabilities of the {length} tokens differ that the exact model has written.",
        wrong="int4 weights take 4 bits, and half the bits double the error.",
        right=[
            f"With scales, {rows[1][0]} takes {bits:g} bits a weight, and {rows[0][0]} {float(rows[0][1]):g}.",
            f"Each bit that goes doubles the error: four bits fewer make it {ratio:.0f} times as large here.",
        ],
        columns=["form", "bits a weight", "error of weights, %", "nats a token"],
        rows=rows,
        x="form",
        series=["error of weights, %", "nats a token"],
        y="error",
        logarithmic=True,
        counts=["bits a weight", "error of weights, %"],
    )


def _logprobs(model: str, form: str | None, length: int, text: list[int]) -> tuple[list[int], list[float]]:
    """Return a text of `length` tokens, the model's own if there is none, and the log-probability of each but the
    first."""
    with opened(model, quantization=form) as bench:
        if not text:
            [answer] = bench.run([bench.prompt(1, 5)], [length - 1], temperature=1.0)
            text = bench.prompt(1, 5) + answer.token_ids
        params = SamplingParams(temperature=0.0, seed=1, max_tokens=1, prompt_logprobs=0)
        bench.core.add(Request(request_id="text", prompt_token_ids=text, params=params))
        values = list[float]()
        while bench.core.has_work():
            output = bench.core.step()
            for entries in output.prompt_logprobs.values():
                values += [entry.logprob for entry in entries]
    return text, values


def precision(model: str, small: bool) -> Lab:
    """Plain floats against int8 and int4: memory and speed of one sequence."""
    num_new, repeats = (8, 1) if small else (64, 3)
    rows: list[list[str | int | float]] = []
    for form in (None, "int8", "int4"):
        with opened(model, quantization=form) as bench:
            prompt = bench.prompt(16, 1)
            bench.run([prompt], [4])
            tpot = min(bench.run([prompt], [num_new])[0].tpot for _ in range(repeats))
            info = bench.core.info
            rows.append([form or info.dtype, info.weight_bytes, 1e3 * tpot])
    whole, plain = float(rows[0][1]), float(rows[0][2])
    for row in rows:
        row += [whole / float(row[1]), plain / float(row[2])]
    return Lab(
        name="precision",
        title="Plain floats against int8 and int4",
        measured=f"The bytes of weights that a step reads, as the engine counts them, and the time of a token of one "
        f"sequence after a prompt of 16: the fastest of {repeats} answers of {num_new} tokens.",
        wrong="int4 is four times as small as 16-bit floats, and four times as fast.",
        right=[
            f"A step reads {float(rows[2][3]):.2f} times fewer bytes in int4 than in {rows[0][0]}: scales "
            "count, and what "
            "is no matrix stays in floats.",
            f"A token is {float(rows[2][4]):.2f} times as fast here. It is as many times as the bytes are fewer only "
            "where reading "
            "them is all that a step waits for: one sequence, and weights that the processor's caches do not hold.",
        ],
        columns=["weights", "bytes a step reads", "TPOT ms", "fewer bytes", "faster"],
        rows=rows,
        x="weights",
        series=["fewer bytes", "faster"],
        y="times",
        counts=["bytes a step reads", "fewer bytes"],
    )


def experts(model: str, small: bool) -> Lab:
    """Active against total parameters of a mixture, and the bytes that its steps read."""
    config: dict[str, Any] = MIXTRAL
    if model != "builtin":
        config = planner.read(model).values
    machine = hardware.TABLE["h100"]
    one = planner.Planner(planner.Subject("mixture", config), machine, Workload())
    counts = one.counts
    if not counts.mixtures:
        raise HeadraceError(f"{model} has no experts: name a mixture, or leave MODEL out for Mixtral-8x7B's config")
    step = Roofline(counts, machine, one.kv_dtype)
    experts_bytes = sum(each.num_bytes * num for each, num in counts.mixtures)
    each = counts.mixtures[0][0]
    rows: list[list[str | int | float]] = []
    for num in (1, 2, 4, 8, 16, 32, 64):
        share = 1 - (1 - each.top_k / each.num) ** num
        rows.append([num, share, (step.num_bytes([0] * num, [1] * num, num)) / 1e9])
    return Lab(
        name="experts",
        title="Active and total parameters of a mixture of experts",
        measured="The config.json of Mixtral-8x7B (or of MODEL), counted by running the engine's own model file over "
        "operators that only count. Choices of experts are taken as even.",
        wrong="8 experts of 7 B are 56 B parameters; 2 of 8 active make the model as fast and as small as one of 14 B.",
        right=[
            f"It has {counts.parameters:,} parameters: attention and embeddings are not multiplied by {each.num}. A "
            f"token meets {counts.active_parameters:,}.",
            f"All of it must be in memory: {counts.weight_bytes / 1e9:.1f} GB, of which experts are "
            f"{experts_bytes / counts.weight_bytes:.0%}.",
            f"A step of n rows reads 1 - (1 - {each.top_k}/{each.num})^n of the experts: "
            f"{float(rows[0][1]):.0%} for one "
            f"row, {float(rows[3][1]):.0%} for 8. The fewer bytes are those of single requests.",
        ],
        columns=["rows of a step", "experts read", "GB read"],
        rows=rows,
        x="rows of a step",
        series=["experts read"],
        y="share of the experts",
        counts=["experts read", "GB read"],
    )
