"""The flags of `headrace bench`: one struct per command, whose fields become its flags (vLLM's names).

They are apart from the code that measures, so that `--help` does not import it. The fields' annotations contain bounds
and texts, which `cli.options` reads.
"""

from __future__ import annotations

import math
from typing import Annotated

import msgspec
from msgspec import Meta

Model = Annotated[str, Meta(description="A directory, a hub id, or 'builtin'.")]
Goodput = Annotated[
    list[str] | None,
    Meta(
        description="Goals in ms, such as ttft:200 tpot:50 (of ttft, tpot, e2el); requests that keep all are counted."
    ),
]
Seed = Annotated[int, Meta(description="Seed of prompts, lengths and arrival times.", ge=0)]
Json = Annotated[bool, Meta(description="Print one JSON object and nothing else.")]
OutputJson = Annotated[str | None, Meta(description="File to write the JSON object to as well.")]
DatasetName = Annotated[str, Meta(description="random, custom (JSON lines with a prompt) or sharegpt.")]
DatasetPath = Annotated[str | None, Meta(description="File of a custom or sharegpt dataset.")]


class LatencyPlan(msgspec.Struct, frozen=True, kw_only=True):
    """Batches of requests that start together."""

    model: Model = "builtin"
    input_len: Annotated[int, Meta(description="Tokens of each prompt.", ge=1)] = 32
    output_len: Annotated[int, Meta(description="Tokens of each answer.", ge=1)] = 128
    batch_size: Annotated[int, Meta(description="Requests in one batch.", ge=1)] = 8
    num_iters: Annotated[int, Meta(description="Batches to measure.", ge=1)] = 30
    num_iters_warmup: Annotated[int, Meta(description="Batches to run first, unmeasured.", ge=0)] = 10
    kv_cache: Annotated[
        bool, Meta(description="Keep keys and values; without, the grown prompt is computed again for each token.")
    ] = True
    goodput: Goodput = None
    seed: Seed = 0
    output_json: OutputJson = None
    json: Json = False


class QualityPlan(msgspec.Struct, frozen=True, kw_only=True):
    """A model and its reference, compared on the same tokens."""

    reference: Annotated[
        str | None,
        Meta(description="Model to compare with; by default MODEL itself, not quantised, where it is stored so."),
    ] = None
    reference_dtype: Annotated[str, Meta(description="Number format of the reference, as --dtype.")] = "auto"
    text: Annotated[
        list[str] | None,
        Meta(
            description="File with a text, or 'written' for one that the reference writes with fixed seeds (the "
            "default); may be given more than once."
        ),
    ] = None
    outliers: Annotated[
        bool, Meta(description="Judge the same form with outliers planted in the norms as well (3 inputs, 64 times).")
    ] = False
    max_tokens: Annotated[int, Meta(description="Tokens of the text that are scored, about.", ge=2)] = 4096
    window: Annotated[int, Meta(description="Tokens that are read in one piece, each piece anew.", ge=2)] = 512
    speed: Annotated[bool, Meta(description="Time decoding as well, one sequence alone.")] = False
    save: Annotated[bool, Meta(description="Keep the figures beside the weights; /v1/models shows them.")] = False
    output_json: OutputJson = None
    json: Json = False


class ThroughputPlan(msgspec.Struct, frozen=True, kw_only=True):
    """All requests at once, until the last is done."""

    model: Model = "builtin"
    forms: Annotated[
        str | None,
        Meta(
            description="Compare each model in these forms, with commas between, such as stored,int8,int4. "
            "Further models may follow MODEL.",
            extra={"metavar": "FORMS"},
        ),
    ] = None
    rounds: Annotated[
        int, Meta(description="Of a comparison: rounds, in each of which every model and form has one turn.", ge=1)
    ] = 3
    num_prompts: Annotated[int, Meta(description="Requests to run.", ge=1)] = 100
    dataset_name: DatasetName = "random"
    dataset_path: DatasetPath = None
    input_len: Annotated[int, Meta(description="Tokens of each random prompt.", ge=1)] = 128
    output_len: Annotated[int, Meta(description="Tokens of each answer.", ge=1)] = 128
    goodput: Goodput = None
    seed: Seed = 0
    output_json: OutputJson = None
    json: Json = False


class SpeculatePlan(msgspec.Struct, frozen=True, kw_only=True):
    """The same requests with and without speculation, in turns."""

    load: Annotated[
        list[int] | None, Meta(description="Streams at once, 1 by default; may be given more than once.")
    ] = None
    temperature: Annotated[
        list[float] | None,
        Meta(description="Temperatures at which guesses are counted, 0 by default; may be given more than once."),
    ] = None
    texts: Annotated[
        str,
        Meta(
            description="builtin, random, edit or summary (answers that echo their prompt), or a file or folder of "
            "JSON lines (Spec-Bench, MT-bench, HumanEval)."
        ),
    ] = "builtin"
    num_prompts: Annotated[int, Meta(description="Texts to take.", ge=1)] = 8
    output_len: Annotated[int, Meta(description="Tokens of each answer.", ge=2)] = 128
    rounds: Annotated[int, Meta(description="Rounds; in each, both engines run once.", ge=1)] = 3
    alpha: Annotated[
        float | None,
        Meta(description="Instead of a drafter: guesses that are each right with this probability.", ge=0.0),
    ] = None
    rejection: Annotated[bool, Meta(description="Count guesses under rejection sampling as well.")] = False
    control: Annotated[
        bool, Meta(description="Run the engine without speculation twice a round: its ratio to itself is the noise.")
    ] = False
    plot: Annotated[str | None, Meta(description="File for a picture (SVG); needs matplotlib.")] = None
    output_json: OutputJson = None
    json: Json = False


class AblatePlan(msgspec.Struct, frozen=True, kw_only=True):
    """The same requests with one technique after the other. Lengths are spread around their means, up to three times
    as long."""

    num_prompts: Annotated[int, Meta(description="Requests, all at once.", ge=2)] = 64
    streams: Annotated[int, Meta(description="Sequences running at once at most.", ge=1)] = 32
    input_len: Annotated[int, Meta(description="Mean tokens of each prompt beside the shared prefix.", ge=1)] = 128
    output_len: Annotated[int, Meta(description="Mean tokens of each answer.", ge=2)] = 128
    prefix_len: Annotated[int, Meta(description="Tokens that all prompts share.", ge=0)] = 128
    cache_seqs: Annotated[
        int,
        Meta(description="Sequences of the whole context that the KV cache has room for, in every batched rung.", ge=1),
    ] = 8
    chunk: Annotated[int, Meta(description="Tokens of a step with chunked prefill.", ge=1)] = 256
    sample: Annotated[
        int, Meta(description="Requests that the rungs without batches run; the others' times are derived.", ge=1)
    ] = 2
    rounds: Annotated[int, Meta(description="Rounds; in each, every rung runs once.", ge=1)] = 3
    quick: Annotated[
        bool, Meta(description="Fewer and shorter requests: at most 3 minutes with the built-in model.")
    ] = False
    plot: Annotated[str | None, Meta(description="File for a picture (SVG); needs matplotlib.")] = None
    seed: Seed = 0
    output_json: OutputJson = None
    json: Json = False


class SweepPlan(msgspec.Struct, frozen=True, kw_only=True):
    """Rates at which `ServePlan` is run."""

    num_rates: Annotated[int, Meta(description="Rates to measure.", ge=1)] = 8
    slo_share: Annotated[float, Meta(description="Percent of the requests that must keep all goals.", gt=0)] = 99.0
    plot: Annotated[str | None, Meta(description="File for a picture (SVG); needs matplotlib.")] = None
    output_json: OutputJson = None


class ServePlan(msgspec.Struct, frozen=True, kw_only=True):
    """Requests over HTTP to any OpenAI-compatible server."""

    backend: Annotated[str, Meta(description="openai (completions) or openai-chat.")] = "openai"
    base_url: Annotated[
        str | None, Meta(description="The server, if not http://HOST:PORT.", extra={"metavar": "URL", "also": "--url"})
    ] = None
    host: Annotated[str, Meta(description="The server's address.")] = "127.0.0.1"
    port: Annotated[int, Meta(description="The server's port.", ge=1)] = 8000
    endpoint: Annotated[str | None, Meta(description="Path of the API; by default the backend's.")] = None
    api_key: Annotated[str | None, Meta(description="Key to send; better given in HEADRACE_API_KEY.")] = None
    cacert: Annotated[
        str | None, Meta(description="PEM file of the CA of an https server.", extra={"metavar": "FILE"})
    ] = None
    model: Annotated[str | None, Meta(description="Model to ask for; by default the server's first.")] = None
    tokenizer: Annotated[str | None, Meta(description="Directory or hub id; by default the model's.")] = None
    dataset_name: Annotated[
        str,
        Meta(
            description="random, custom (JSON lines with a prompt), sharegpt, or the traces azure and mooncake, whose "
            "requests come when they came there."
        ),
    ] = "random"
    dataset_path: DatasetPath = None
    num_prompts: Annotated[int, Meta(description="Requests to send.", ge=1)] = 1000
    input_len: Annotated[int | None, Meta(description="The same as --random-input-len.", ge=1)] = None
    output_len: Annotated[int | None, Meta(description="Tokens of each answer, in any dataset.", ge=1)] = None
    random_input_len: Annotated[int, Meta(description="Tokens of a random prompt.", ge=1)] = 1024
    random_output_len: Annotated[int, Meta(description="Tokens of the answer to it.", ge=1)] = 128
    random_range_ratio: Annotated[float, Meta(description="Spread of both lengths: 0.5 is 50% up and down.")] = 0.0
    random_prefix_len: Annotated[int, Meta(description="Tokens that all random prompts share.", ge=0)] = 0
    speed_up: Annotated[
        float, Meta(description="How many times as fast as in an azure or mooncake trace requests come.", gt=0)
    ] = 1.0
    request_rate: Annotated[float, Meta(description="Requests per second; inf sends all at once.", gt=0)] = math.inf
    burstiness: Annotated[float, Meta(description="Shape of the gaps: 1 is Poisson, less is burstier.", gt=0)] = 1.0
    max_concurrency: Annotated[int | None, Meta(description="Requests open at once at most.", ge=1)] = None
    num_warmups: Annotated[int, Meta(description="Requests to send first, unmeasured.", ge=0)] = 0
    ready_check_timeout_sec: Annotated[float, Meta(description="Seconds to wait for a starting server.", ge=0)] = 0.0
    ignore_eos: Annotated[bool, Meta(description="Make every answer its full length.")] = False
    temperature: Annotated[float | None, Meta(description="Sent with every request, if given.", ge=0)] = None
    extra_body: Annotated[str | None, Meta(description="JSON object that is added to every request.")] = None
    percentile_metrics: Annotated[str, Meta(description="What to report, of ttft, tpot, itl, e2el.")] = "ttft,tpot,itl"
    metric_percentiles: Annotated[str, Meta(description="Percentiles to report, such as 50,99.")] = "99"
    goodput: Goodput = None
    seed: Seed = 0
    label: Annotated[str | None, Meta(description="Name of the run, for the result.")] = None
    metadata: Annotated[list[str] | None, Meta(description="KEY=VALUE for the result; may be repeated.")] = None
    save_result: Annotated[bool, Meta(description="Write the JSON object to a file.")] = False
    save_detailed: Annotated[bool, Meta(description="The same, with the times and texts of each request.")] = False
    result_dir: Annotated[str, Meta(description="Folder of that file.")] = "."
    result_filename: Annotated[str | None, Meta(description="Its name, if not made of date and model.")] = None
    plot: Annotated[str | None, Meta(description="File for a picture (SVG); needs matplotlib.")] = None
    disable_tqdm: Annotated[bool, Meta(description="Show no progress bar.")] = False
    json: Json = False
