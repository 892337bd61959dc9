"""A plan: whether a model fits a machine, with how many sequences of which length, how fast, at which price, and the
changes that would make it fit. Knows configs and machines; prints nothing. Called by `headrace plan`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from headrace import gguf, hub, models
from headrace.checkpoint import gguf_config
from headrace.checkpoint.names import text_config
from headrace.models.config import ModelConfig
from headrace.plan import formulas, hardware
from headrace.plan.counting import Counts, count
from headrace.plan.forms import FLOAT_BITS, KV_ITEM_BYTES, Forms, Served
from headrace.plan.hardware import Hardware
from headrace.plan.plans import MAX_TOKENS, Change, Plan, Speed, Workload
from headrace.plan.steps import Roofline, dollars_per_million, latency
from headrace.protocol import step_model
from headrace.protocol.errors import CheckpointError, RequestError

DTYPES = {"float32": "float32", "bfloat16": "bfloat16", "float16": "float16", "float64": "float32"}
StepTime = Callable[[Sequence[int], Sequence[int], int], float]
"""A function that returns the seconds of a step, from the starts and lengths of its chunks and its rows of logits."""
OTHERS = ("l4", "rtx4090", "a100", "h100", "h200")
"""Machines to look at when a model does not fit, the smallest first."""
MAX_PRICE = 1e9


class Subject(NamedTuple):
    """A model as its files describe it: the values of a config.json, and the bytes of a GGUF file's tensors."""

    name: str
    values: dict[str, Any]
    stored_bytes: float = 0.0


def read(model: str) -> Subject:
    """Return the model of a folder, a config.json, a GGUF file or a hub id. Reads no weights.

    Raises `ModelNotFoundError` or `CheckpointError`."""
    path = Path(model).expanduser()
    if not (path.is_file() and path.suffix == ".json"):
        path = hub.resolve(model, weights=False)
    if path.suffix == ".gguf" and path.is_file():
        file = gguf.read(path)
        return Subject(model, gguf_config.read(file).values, float(sum(info.size for info in file.tensors.values())))
    if path.suffix == ".json":
        return Subject(path.parent.name or model, hub.with_quantization(hub.read_json(path), path.parent))
    return Subject(model, hub.read_config(path))


def counts_of(subject: Subject, workload: Workload) -> tuple[Counts, Forms, dict[str, Any]]:
    """Return the counts of the model in the forms of the plan, and the config of its text model.

    Raises `CheckpointError` for a type that neither headrace nor the planner's table has."""
    values = text_config(subject.values, [*models.names(), *formulas.TABLE])
    model_type = values.get("model_type")
    stated = str(values.get("dtype") or values.get("torch_dtype") or "bfloat16").removeprefix("torch.")
    dtype = DTYPES.get(stated, "bfloat16") if workload.dtype == "auto" else workload.dtype
    forms = Forms(dtype, workload.quantization, values.get("quantization_config"))
    if model_type in models.names():
        counts = count(values, forms)
    elif model_type in formulas.TABLE:
        counts = formulas.TABLE[model_type](ModelConfig(values), forms)
    else:
        raise CheckpointError(
            f"config.json: the planner knows no model_type {model_type!r:.80}; it knows "
            f"{', '.join(sorted({*models.names(), *formulas.TABLE}))}"
        )
    if subject.stored_bytes and workload.quantization is None:
        # A GGUF file's blocks keep their sizes.
        rest = (counts.weight_bytes - counts.tables) or 1.0
        scale = max(subject.stored_bytes - counts.tables, 1.0) / rest
        counts = counts._replace(dense=counts.dense * scale, head=counts.head * scale, mixtures=tuple(
            (each._replace(num_bytes=each.num_bytes * scale), num) for each, num in counts.mixtures
        ), forms={"gguf": subject.stored_bytes})  # fmt: skip
    return counts, forms, values


def _check(workload: Workload) -> None:
    """Raise `RequestError`, which names a field of the workload, for a value that no model and no machine has."""
    for name, value, allowed in (
        ("dtype", workload.dtype, ("auto", *FLOAT_BITS)),
        ("kv_cache_dtype", workload.kv_cache_dtype, ("auto", *KV_ITEM_BYTES)),
    ):
        if value not in allowed:
            raise RequestError(name, value, f"one of {', '.join(allowed)}")
    for name, number in (
        ("context", workload.context),
        ("output_len", workload.output_len),
        ("concurrency", workload.concurrency),
    ):
        if number is not None and not 1 <= number <= MAX_TOKENS:
            raise RequestError(name, number, f"from 1 to {MAX_TOKENS}")
    if not 0 <= workload.price <= MAX_PRICE:
        raise RequestError("price", workload.price, f"from 0 to {MAX_PRICE:,.0f} dollars an hour")


class Planner:
    """Figures of one model, in its forms, on one machine.

    Raises `RequestError` for a field of the workload, `CheckpointError` for a model that cannot be planned."""

    def __init__(self, subject: Subject, machine: Hardware, workload: Workload) -> None:
        _check(workload)
        self.subject, self.machine, self.workload = subject, machine, workload
        self.counts, forms, values = counts_of(subject, workload)
        self.model_type = str(values.get("model_type"))
        self.form = "gguf, as stored" if "gguf" in self.counts.forms else forms.name
        self.served = forms.served
        if self.model_type not in models.names():
            self.served = Served("no", f"a plan alone: headrace has no model file for {self.model_type}")
        self.kv_dtype = forms.dtype if workload.kv_cache_dtype == "auto" else workload.kv_cache_dtype
        self.max_context = ModelConfig(values).max_positions()
        if workload.context is not None and workload.context > self.max_context:
            raise RequestError("context", workload.context, f"at most {self.max_context}, the model's own")
        self.context = workload.context or min(self.max_context, 4096)
        if not 0 < workload.output_len < self.context:
            raise RequestError("output_len", workload.output_len, f"from 1 to {self.context - 1}, below the context")
        self.working = 4.0 * self.counts.widest * workload.max_num_batched_tokens
        self.working += 4.0 * self.counts.vocab_size * workload.max_num_seqs
        usable = machine.memory * machine.utilization
        self.free = usable - self.counts.weight_bytes - self.working
        self.step: StepTime = Roofline(self.counts, machine, self.kv_dtype)
        self.step_source = (
            f"at {machine.bandwidth_share:.0%} of bandwidth and {machine.flops_share:.0%} of the operations"
        )

    def use_measured_steps(self) -> None:
        """Take the times of steps from the measurements of `--check` for this model on this machine, if there are
        any."""
        model = step_model.load(step_model.path_of(self.subject.name, self.form, self.kv_dtype))
        if model is not None:
            self.step, self.step_source = model, "by steps that --check measured here"

    def kv_bytes(self, context: int) -> float:
        return self.counts.kv_bytes(context, self.kv_dtype, windowed=True)

    @property
    def largest_batch(self) -> int:
        return max(0, int(self.free // self.kv_bytes(self.context)))

    @property
    def largest_context(self) -> int:
        """Of one sequence."""
        low, high = 0, self.max_context
        while low < high:
            middle = (low + high + 1) // 2
            low, high = (middle, high) if self.kv_bytes(middle) <= self.free else (low, middle - 1)
        return low

    def ttft(self, num_prompt: int) -> float:
        """Return the seconds of the steps of a prompt alone, in chunks of `max_num_batched_tokens`."""
        size, seconds = self.workload.max_num_batched_tokens, 0.0
        for start in range(0, num_prompt, size):
            length = min(size, num_prompt - start)
            seconds += self.step([start], [length], int(start + length == num_prompt))
        return seconds

    def speed(self, batch: int) -> Speed:
        """Return the times of `batch` sequences."""
        num_new = self.workload.output_len
        num_prompt = self.context - num_new
        ttft, middle = self.ttft(num_prompt), num_prompt + num_new // 2
        tpot = self.step([middle] * batch, [1] * batch, batch)
        # While a sequence decodes, each of the others ends once, and a prompt takes its place.
        mixed = tpot + (batch - 1) * ttft / max(num_new - 1, 1)
        rate = batch * num_new / (batch * ttft + (num_new - 1) * tpot)
        return Speed(
            batch=batch, ttft=ttft, tpot=tpot, tpot_mixed=mixed, latency=latency(ttft, mixed, num_new),
            tokens_per_second=rate, requests_per_second=rate / num_new,
            dollars_per_million=dollars_per_million(self.workload.price, rate) if self.workload.price else None,
        )  # fmt: skip

    def keeps(self, speed: Speed) -> bool:
        """Whether these times are within the goals."""
        have = {"ttft": speed.ttft, "tpot": speed.tpot_mixed, "e2el": speed.latency}
        return all(1e3 * have[name] <= goal for name, goal in self.workload.slo.items())

    def with_goodput(self, speed: Speed, most: int) -> Speed:
        """Add the most requests a second of a batch from 1 to `most` that keep the goals."""
        best = None
        low, high = 0, most
        while low < high:
            # Larger batches are slower for each of their sequences.
            middle = (low + high + 1) // 2
            one = self.speed(middle)
            low, high, best = (middle, high, one) if self.keeps(one) else (low, middle - 1, best)
        return msgspec.structs.replace(
            speed, goodput=best.requests_per_second if best else 0.0, goodput_batch=best.batch if best else 0
        )

    def plan(self, *, advises: bool = True) -> Plan:
        workload, counts = self.workload, self.counts
        largest = self.largest_batch
        concurrency = workload.concurrency or max(1, min(largest, workload.max_num_seqs))
        fits = largest >= concurrency
        speed = None
        if fits:
            speed = self.speed(concurrency)
            if workload.slo:
                speed = self.with_goodput(speed, min(largest, workload.max_num_seqs))
        return Plan(
            model=self.subject.name,
            model_type=self.model_type,
            source=counts.source,
            parameters=counts.parameters,
            active_parameters=counts.active_parameters,
            form=self.form,
            forms=counts.forms,
            served=self.served.kind,
            served_how=self.served.how,
            weight_bytes=counts.weight_bytes,
            kv_cache_dtype=self.kv_dtype,
            kv_token_bytes=counts.kv_token_bytes(self.kv_dtype),
            kv_sequence_bytes=counts.kv_bytes(self.context, self.kv_dtype, windowed=False),
            kv_windowed_bytes=self.kv_bytes(self.context),
            kv_batch_bytes=concurrency * self.kv_bytes(self.context),
            flops_per_token=2.0 * (counts.macs + counts.head_macs),
            machine=self.machine,
            working_bytes=self.working,
            free_bytes=self.free,
            needed_bytes=(counts.weight_bytes + self.working + concurrency * self.kv_bytes(self.context))
            / self.machine.utilization,
            context=self.context,
            output_len=workload.output_len,
            max_context=self.max_context,
            largest_context=self.largest_context,
            largest_batch=largest,
            concurrency=concurrency,
            step_source=self.step_source,
            fits=fits,
            speed=speed,
            changes=[] if fits or not advises else list(self.changes(concurrency)),
        )

    def changes(self, concurrency: int) -> list[Change]:
        """Return the changes that make room for `concurrency` sequences: one change each, or all that save memory
        together."""
        workload, changes = self.workload, list[Change]()

        def tried(flags: str, machine: Hardware | None = None, **fields: Any) -> bool:
            other = msgspec.structs.replace(workload, **fields)
            try:
                planner = Planner(self.subject, machine or self.machine, other)
            except (RequestError, CheckpointError):
                return False  # this model cannot be had in that form
            if planner.largest_batch < concurrency:
                return False
            outcome = f"{planner.counts.weight_bytes / 1e9:.1f} GB of weights, room for {planner.largest_batch:,}"
            changes.append(Change(flags=flags, outcome=f"{outcome} sequences of {planner.context:,} tokens"))
            return True

        if self.largest_batch:
            outcome = f"as many sequences of {self.context:,} tokens as fit"
            changes.append(Change(flags=f"--concurrency {self.largest_batch}", outcome=outcome))
        shorter = _largest(lambda n: concurrency * self.kv_bytes(n) <= self.free, self.context)
        if shorter > workload.output_len:
            outcome = f"the longest context of {concurrency:,} sequences"
            changes.append(Change(flags=f"--context {shorter}", outcome=outcome))
        if self.kv_dtype not in ("int8", "int4", "fp8_e4m3", "fp8_e5m2"):
            tried("--kv-cache-dtype int8", kv_cache_dtype="int8")
        if workload.quantization is None:
            if not tried("--quantization int8", quantization="int8"):
                tried("--quantization int4", quantization="int4")
            if not changes:
                tried("--quantization int4 --kv-cache-dtype int8", quantization="int4", kv_cache_dtype="int8")
        for name in OTHERS:
            if hardware.TABLE[name].memory > self.machine.memory and tried(f"--hardware {name}", hardware.TABLE[name]):
                break
        return changes


def _largest(fits: Callable[[int], bool], high: int) -> int:
    """Return the largest number up to `high` that fits, by bisection; 0 if none does."""
    low = 0
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if fits(middle) else (low, middle - 1)
    return low
