"""Makes command-line options from the fields of the config structs, so that flags and fields cannot drift apart.

A command is written with `**fields` and decorated with `options(EngineConfig, ServerConfig)`: the decorator gives it
one option per field, with the field's name, type and default, and the text in `HELP`. `build` makes the struct from
the values of the flags. A test fails when a field has no text. Knows no command; no torch.
"""

from __future__ import annotations

import functools
import inspect
import json
import types
import typing
from collections.abc import Callable
from typing import Annotated, Any, TypeVar

import msgspec
import typer

from headrace.protocol.bounds import BOUNDS
from headrace.protocol.config import (
    DTYPES,
    KV_DTYPES,
    QUANTIZATIONS,
    WHILE_LOADING,
    EngineConfig,
    ServerConfig,
)
from headrace.protocol.errors import RequestError
from headrace.protocol.human import human_int
from headrace.protocol.kinds import POLICIES
from headrace.protocol.parameters import MAX_INT32, PARAMETERS
from headrace.protocol.params import SamplingParams
from headrace.protocol.speculation import METHODS, SpeculativeConfig, speculative_config

T = TypeVar("T", bound=msgspec.Struct)

HELP: dict[type[msgspec.Struct], dict[str, str]] = {
    EngineConfig: {
        "model": "A directory, a .gguf file, a hub id, or 'builtin'.",
        "tokenizer": "Directory or hub id of the tokenizer, if not the model's own.",
        "revision": "Branch, tag or commit of a hub model.",
        "hf_overrides": "Values in place of those of config.json, as a JSON object, such as "
        '{"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}; those of one object are merged.',
        "model_impl": "Whose code computes the model: headrace (its own model files), transformers (that package's "
        "classes, one row at a time, which is slow; needs the extra transformers), or auto: transformers for the types "
        "that headrace has no file for.",
        "dtype": f"Number format of the weights and activations: {', '.join(DTYPES)}.",
        "quantization": f"Quantise the weights while loading, to the nearest code: {', '.join(QUANTIZATIONS)}; "
        f"{', '.join(f'{theirs} is {ours}' for theirs, ours in WHILE_LOADING.items())} for plain weights "
        "(int8 where a GPU has no fp8); "
        "none: dequantise a GGUF file's blocks into dtype; or the checkpoint's own method, such as awq.",
        "activations": "What quantised weights are multiplied with: int8 (W8A8, fast), 16bit (W8A16: activations are "
        "not quantised), fp8 (rounded to E4M3 beside weights of 8-bit floats; on torch_ref and on GPUs), or "
        "auto: what a checkpoint of LLM.int8() or fp8 needs, else int8, but 16bit for the matrices whose products int8 "
        "spoils, as measured at load.",
        "save_packed": "Keep the weights in the kernels' layout, beside the model or else in ~/.cache/headrace; "
        "the next start reads that file.",
        "verify_packed": "Compare that file with its checksums when it is read (a second for each 4 GB), and read the "
        "checkpoint instead where it is damaged.",
        "backend": "Operators to run on: auto, cpu (native kernels), cuda (Triton kernels for NVIDIA GPUs; needs the "
        "extra cuda), torch_ref.",
        "device": "auto, cpu, cuda or cuda:N. Backend cuda on cpu is plain torch, for tests.",
        "seed": "Seed of the seeds given to requests without one, to make them repeatable; random by default.",
        "max_model_len": "Context length in tokens; by default the model's own.",
        "block_size": "Tokens in a block of the KV cache.",
        "num_gpu_blocks_override": "Blocks in the KV cache, instead of as many as fit the memory.",
        "kv_cache_dtype": f"Number format of the KV cache: {', '.join(KV_DTYPES)}; fp8 is fp8_e4m3; int8_dot "
        "(CPU) is int8 with products of integers. With --backend torch_ref, the quantised formats save no memory.",
        "num_threads": "Threads of the native kernels; 0 is one for each core that the process may use.",
        "tensor_parallel_size": "Processes that compute the model together, each some columns and heads of each layer; "
        "the output is the same. On CPUs of this host, or with --rendezvous of several; see howto-scale.md.",
        "enable_expert_parallel": "Of a mixture of experts, each of these processes has some experts whole instead of "
        "some columns of each; the output is the same.",
        "pipeline_parallel_size": "Processes that compute the model one after the other, each some layers; the output "
        "is the same. For CPUs; see howto-scale.md.",
        "rendezvous": "Where ranks of other hosts come: host, port, distributed_interface and the fleet's files.",
        "distributed_timeout": "Seconds that these processes wait for each other before all are replaced.",
        "async_scheduling": "Schedule and start a step while the one before runs on the device; the output is the "
        "same. By default on a GPU; never with --speculative-config or --record-schedule.",
        "kv_cache_memory_bytes": "Memory for the KV cache, in bytes.",
        "gpu_memory_utilization": "Share of a GPU's memory that weights, working memory and KV cache may take.",
        "enable_prefix_caching": "Keep the KV of finished prompts and reuse it for equal prefixes.",
        "max_num_seqs": "Sequences running at once.",
        "max_num_batched_tokens": "Tokens computed in one step: the budget that chunks long prompts.",
        "enable_chunked_prefill": "Cut long prompts to the token budget of a step, so that they delay no others.",
        "long_prefill_token_threshold": "Most tokens of one prompt in one step; 0: only the budget limits them.",
        "scheduling_policy": f"Order of requests: auto, {', '.join(POLICIES)}. fair gives each holder of keys an equal "
        "share of what runs; auto is fair where keys have several holders, else fcfs.",
        "max_logprobs": "Log-probabilities a request may ask for per token; -1 allows the whole vocabulary.",
        "enable_lora": "Take adapters (LoRA): by --lora-modules, or while the server runs; see howto-adapters.md.",
        "lora_modules": "Adapter that requests may name in the model's place, as name=path of a folder in PEFT's "
        "layout or of a GGUF file; may be given more than once.",
        "max_loras": "Adapters in memory at once.",
        "max_lora_rank": "Greatest rank of an adapter.",
        "limit_mm_per_prompt": 'Most pictures of a prompt, as a JSON object such as {"image": 4}; with 0 the tower '
        "that reads pictures is not loaded.",
        "record_schedule": "File to write the scheduler's decisions to, for headrace replay. It holds the token ids of "
        "prompts and answers, so keep it private. The four files before it are kept as FILE.1 to FILE.4.",
        "max_record_bytes": "Most bytes of one recording file; the recording ends there and the engine continues.",
        "skip_tokenizer_init": "Load no tokenizer: token ids in, token ids out.",
        "speculative_config": "Guess tokens ahead and verify them together, as a JSON object: "
        f"method ({', '.join(METHODS)}), num_speculative_tokens, model and more; see howto-speculate.md.",
    },
    ServerConfig: {
        "host": "Address to listen on; several with commas.",
        "port": "TCP port; 0 chooses a free one.",
        "api_key": "Key that clients must send; may be given more than once. The only key of a server is an "
        "administrator's; of several, those of --admin-api-key. Better in HEADRACE_API_KEY or a file.",
        "generate_api_key": "Make a key where none is set, and show it once, in the log.",
        "admin_api_key": "Key of the class admin, which opens every route; may be given more than once.",
        "api_key_file": "TOML file of keys with the classes and rates of each holder: see docs/security.md.",
        "allowed_origins": "Web page that may call the server, such as https://chat.example, localhost for any page "
        "of this machine, or *; a JSON list, or given more than once. By default the server's own pages only.",
        "allowed_hosts": "Host name that requests may use, or *; may be given more than once. IP addresses, "
        "localhost and the machine's own name always are. By default, any name if there are keys and --host is no "
        "loopback address.",
        "inspector": "The web page: the chat at /, and the engine at work at /inspect.",
        "max_requests_per_minute": "Most requests of one key in a minute; further ones get 429. None by default.",
        "max_tokens_per_minute": "Most prompt and answer tokens of one key in a minute; beyond, 429. None by default.",
        "models_dir": "Folder of models, each loaded when a request first names it; see howto-models.md. Without "
        "MODEL, these are all that is served.",
        "models_max": "Models of the folder loaded at once; for a further one the least recently used is unloaded. 0 "
        "for no bound.",
        "models_memory": "Memory that the loaded models of the folder may take together, in bytes; none by default.",
        "keep_alive": "Time that a model of the folder stays loaded after its last use, such as 30s, 5m or 1h; 0 "
        "unloads it at once, -1 never. Requests to Ollama's API may say otherwise.",
        "served_model_name": "Name of the model in the API, if not MODEL; several may follow MODEL, and replies have "
        "the first.",
        "any_model_name": "Answer requests for any model by the one that is served; replies have its true name. By "
        "default while no key is set.",
        "allowed_media_domains": "Host name from which the server fetches pictures that requests name by their "
        "address; may be given more than once. By default it fetches none.",
        "enable_auto_tool_choice": "Let the model choose whether to call tools; without it a chat must name the tool.",
        "tool_call_parser": "Format of the model's tool calls; read from its chat template by default; none: off.",
        "reasoning_parser": "Format of the model's reasoning; read from its chat template by default; none: off.",
        "tags": "Words that the model's card in /v1/models has; several with commas, or given more than once.",
        "chat_template": "Chat template instead of the model's own: a file, a Jinja source, or the name of a common "
        "format, such as chatml. A model that has none takes chatml.",
        "default_chat_template_kwargs": "Variables of the chat template for requests that do not set them, as a JSON "
        'object, such as {"enable_thinking": false}.',
        "prefill_assistant": "Go on with the assistant's message that ends a conversation, unless a request sets "
        "add_generation_prompt.",
        "max_num_queued_reqs": "Requests that may wait; further ones get 429.",
        "max_num_queued_tokens": "Prompt tokens that may wait; further ones get 429.",
        "storage_dir": "Folder for files, batches, responses and conversations; without it they are kept in memory.",
        "max_storage_bytes": "Most bytes of files, responses, conversations, and of session files; holders share them.",
        "max_blob_bytes": "Most bytes of files sent to /api/blobs that no model was made of; by default as many as "
        "leave 256 MiB of the disk free.",
        "trust_request_chat_template": "Take a chat_template in a chat request, and render it in the sandbox.",
        "slot_save_path": "A folder for session files: POST /slots/ID?action=save and restore, as in llama-server.",
        "sleep_idle_seconds": "Seconds without a call after which the engine ends, until the next call starts it "
        "again; -1: never. Models of a folder have --keep-alive.",
        "slots": "GET /slots is served.",
        "metrics": "/metrics has llama-server's names (llamacpp:...) too.",
        "max_batch_concurrency": "Requests of batches that are open at once; none starts while other requests wait.",
        "data_parallel_size": "Engines on this host behind one address, each with processors of its own; auto: one "
        "for each NUMA node (not measured on two sockets).",
        "router": "What chooses the engine of a request: round-robin, least-work, or prefix, which counts what each "
        "has cached.",
        "max_restarts": "Restarts of the engine in ten minutes before the server gives up.",
        "watchdog_timeout": "Seconds without a step or processor time after which an engine with open requests "
        "is killed and restarted; ten times that if it computes. 0 turns it off.",
        "max_request_timeout": "Most seconds that a request may take in all, whatever its own timeout; 0: no bound.",
        "max_connections_per_peer": "Most open connections of one address (of an IPv6 network of 64 bits); by default "
        "half of all. Behind a proxy, all come from its address: set as many as the proxy may open.",
        "overload_config": "Bounds near which the server refuses calls, as a JSON object: memory_bytes of its process "
        "(4 GiB, or half of the memory if that is less), lag_seconds of its event loop (2); see docs/reliability.md.",
        "shutdown_delay": "Seconds after SIGTERM in which /health/ready is 503 and calls are still accepted, so that a "
        "load balancer can leave first. A second signal, or Ctrl-C, ends the delay.",
        "shutdown_timeout": "Seconds that open requests may continue after the delay before they end with an error.",
        "uvicorn_log_level": "critical, error, warning, info, debug or trace.",
        "log_format": "text, or json: one object a line.",
        "crash_report_dir": "Folder for crash reports of the engine, without prompts, keys or token ids; the last "
        "ten are kept. Empty: none are written.",
        "otlp_traces_endpoint": "Address that receives OpenTelemetry traces by OTLP over HTTP, such as "
        "http://localhost:4318/v1/traces; needs the extra otel.",
        "log_stats_interval": "Seconds between two log lines of statistics; 0 for none.",
        "generation_config": "auto: sampling defaults from the model's generation_config.json; headrace: none.",
        "override_generation_config": "Sampling defaults for requests that do not set them, as a JSON object, such as "
        '{"temperature": 0.6, "top_k": 20}. They precede those of generation_config.json.',
    },
}

SHORT = {
    "quantization": "-q",
    "speculative_config": "-sc",
    "data_parallel_size": "-dp",
    "tensor_parallel_size": "-tp",
    "pipeline_parallel_size": "-pp",
}
"""Letters of vLLM's."""

COMPOSED = {(EngineConfig, "rendezvous")}
"""Fields that a command makes of several flags (`cli.engine.RankFlags`)."""

PANELS = {EngineConfig: "Engine", ServerConfig: "Server", SamplingParams: "Sampling"}


def integer(text: str | int) -> int:
    """Parse a whole number, negative or human: -1, 4096, 32k (32,000), 32K (32,768). Raises ValueError."""
    if isinstance(text, int):  # a default, which typer parses too
        return text
    return -human_int(text[1:]) if text.startswith("-") else human_int(text)


def json_object(name: str, text: str | dict[str, Any]) -> dict[str, Any]:
    """Parse a JSON object. Raises `RequestError`."""
    try:
        value = text if isinstance(text, dict) else json.loads(text)
    except (ValueError, RecursionError):
        value = None
    if not isinstance(value, dict):
        raise RequestError(name, text, 'a JSON object such as {"key": "value"}')
    return value


def help_of(struct: type[msgspec.Struct], field: msgspec.structs.FieldInfo) -> str:
    """Return the text of a flag: the field's own, or from `HELP`, or from the tables of parameters and bounds.

    Empty if there is none: the flag works, and a test reports the missing text.
    """
    meta = meta_of(field)
    if meta is not None and meta.description:
        return meta.description
    if field.name in HELP.get(struct, {}):
        return HELP[struct][field.name]
    row, bound = PARAMETERS.get(field.name), BOUNDS.get(field.name)
    doc = row.doc if row is not None else bound.doc if bound is not None else ""
    if bound is None:
        allowed = ""
    elif bound.kind == "size":
        allowed = "; may be given more than once"
    else:
        # The ends of a machine integer tell a reader nothing.
        allowed = f"; at least {bound.low:g}" if bound.high >= MAX_INT32 else f"; {bound.describe()}"
    return doc and f"{doc[0].upper()}{doc[1:]}{allowed}."


def meta_of(field: msgspec.structs.FieldInfo) -> msgspec.Meta | None:
    """Return the `Meta` of a field's annotation, if it has one."""
    return next((part for part in getattr(field.type, "__metadata__", ()) if isinstance(part, msgspec.Meta)), None)


def option(struct: type[msgspec.Struct], field: msgspec.structs.FieldInfo, default: Any) -> inspect.Parameter:
    """Return the parameter that stands for one field of a struct in a command's signature.

    A field's `Meta` may have `extra`: a `metavar`, for a flag that is on or off the name of its `opposite`, and a
    second name, `also`.
    """
    name = "--" + field.name.replace("_", "-")
    settings: dict[str, Any] = {"help": help_of(struct, field), "rich_help_panel": PANELS.get(struct)}
    meta = meta_of(field)
    words = (meta.extra if meta is not None else None) or {}
    plain = field.type if meta is None else typing.get_args(field.type)[0]
    union = isinstance(plain, types.UnionType) or typing.get_origin(plain) is typing.Union
    kinds = [part for part in (typing.get_args(plain) if union else (plain,)) if part is not type(None)]
    many = next((kind for kind in kinds if typing.get_origin(kind) is list), None)
    kind: Any = typing.get_args(many)[0] if many else kinds[0]
    if kind is not bool:
        metavars = {int: "INT", float: "FLOAT", str: "TEXT"}
        settings["metavar"] = words.get("metavar", metavars.get(kind, "JSON"))
    if meta is not None and meta.le is not None:
        settings |= {"min": meta.ge, "max": meta.le}
    elif kind is int:
        settings["parser"] = integer
    if kind is SpeculativeConfig:
        settings["parser"] = speculative_config
    if typing.get_origin(kind) is dict:
        settings["parser"], kind = functools.partial(json_object, name), dict
    # --no-json would be of no use.
    opposite = words.get("opposite", f"no-{name[2:]}")
    decls = [f"{name}/--{opposite}"] if kind is bool and field.name != "json" else [name]
    if struct in (EngineConfig, ServerConfig) and field.name in SHORT:
        decls.append(SHORT[field.name])
    if "also" in words:
        decls.append(words["also"])
    if many:
        kind = list[kind]
    if default is None:
        kind = kind | None
    info = typer.Option(*decls, **settings)
    return inspect.Parameter(
        field.name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=Annotated[kind, info]
    )


def options(
    *structs: type[msgspec.Struct], skip: tuple[str, ...] = (), only: tuple[str, ...] = (), **defaults: Any
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Return a decorator that replaces a command's `**fields` by one option for each field of the structs.

    Args:
        structs: where the fields come from.
        skip: fields that the command has no option for, or declares itself.
        only: if given, the only fields of SamplingParams that become options.
        defaults: defaults of this command that differ from the struct's.
    """

    def decorate(command: Callable[..., None]) -> Callable[..., None]:
        signature = inspect.signature(command, eval_str=True)
        declared = [p for p in signature.parameters.values() if p.kind is not inspect.Parameter.VAR_KEYWORD]
        names = {p.name for p in declared} | set(skip)
        generated: list[inspect.Parameter] = []
        for struct in structs:
            for field in msgspec.structs.fields(struct):
                if (struct, field.name) in COMPOSED:
                    continue
                if field.name in names or (struct is SamplingParams and only and field.name not in only):
                    continue
                names.add(field.name)
                default = None if field.default is msgspec.NODEFAULT else field.default
                generated.append(option(struct, field, defaults.get(field.name, default)))
        command.__signature__ = signature.replace(parameters=[*declared, *generated])  # type: ignore[attr-defined]
        return command

    return decorate


def build(struct: type[T], values: dict[str, Any]) -> T:
    """Make the struct from those `values` that are its fields. Raises `RequestError` for a value out of bounds."""
    fields = {field.name: field for field in msgspec.structs.fields(struct)}
    for name, field in fields.items():
        value, meta = values.get(name), meta_of(field)
        if value is None or meta is None:
            continue
        if meta.ge is not None and not value >= meta.ge:
            raise RequestError(name, value, f"at least {meta.ge}")
        if meta.gt is not None and not value > meta.gt:
            raise RequestError(name, value, f"more than {meta.gt}")
    return struct(**{name: value for name, value in values.items() if name in fields})
