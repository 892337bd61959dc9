"""The two frozen config objects: `EngineConfig` for the engine, `ServerConfig` for the HTTP server.

They are read at the composition roots only (`llm`, `async_llm`, `engine.child`, `serve.app`, `cli`), which
hand each component its own numbers. Names and defaults are vLLM's where vLLM has the thing. No torch; the process
that runs the engine gets its config as msgpack bytes.
"""

from __future__ import annotations

import re
from typing import Any

import msgspec

from headrace.protocol.adapters import MAX_LORA_RANK, MAX_LORAS, named_paths
from headrace.protocol.defaults import sampling_defaults
from headrace.protocol.errors import RequestError
from headrace.protocol.kinds import POLICIES, ROUTERS
from headrace.protocol.speculation import SpeculativeConfig, speculative_config

LOG_FORMATS = ("text", "json")
OVERLOAD_BOUNDS = ("memory_bytes", "lag_seconds")
LOG_LEVELS = ("critical", "error", "warning", "info", "debug", "trace")
DTYPES = ("auto", "float32", "bfloat16", "float16")
KV_DTYPES = ("auto", "float32", "bfloat16", "float16", "int8", "int8_dot", "int4", "fp8", "fp8_e4m3", "fp8_e5m2")
ACTIVATIONS = ("auto", "int8", "16bit", "fp8")
KV_ALIASES = {"fp8": "fp8_e4m3"}
MODEL_IMPLS = ("auto", "headrace", "transformers")
MAX_REPLICAS = 64
MAX_NUM_THREADS = 256
"""The most threads of the native core's team (csrc/include/team.h)."""
QUANTIZATIONS = (
    "int4", "int4-g32", "int4-g64", "int4-g128", "int4-g32-asym", "int4-g64-asym", "int4-g128-asym",
    "int6", "int8", "int8-channel", "int8-g128", "fp8-channel", "fp8-g128", "nf4", "mxfp4", "iq4_nl",
)  # fmt: skip
DEQUANTIZE = "none"
"""The quantization that computes with plain floats whatever the checkpoint has."""

STORED_METHODS = {
    "awq": "awq", "awq_marlin": "awq", "bitsandbytes": "bitsandbytes", "compressed-tensors": "compressed-tensors",
    "fp8": "fp8", "gguf": "gguf", "gptq": "gptq", "gptq_marlin": "gptq", "modelopt": "modelopt", "mxfp4": "mxfp4",
}  # fmt: skip
"""vLLM's names of a quantised checkpoint's own method, and the method: they load the weights as they are stored."""

WHILE_LOADING = {
    "fp8": "fp8-channel", "fp8_per_tensor": "fp8-channel", "fp8_per_block": "fp8-g128",
    "int8_per_channel_weight_only": "int8-channel", "bitsandbytes": "nf4",
}  # fmt: skip
"""vLLM's methods that quantise plain weights while loading them, and the form here: 8 bits with a scale for each output
channel or group, and the 16 values of NF4 with a scale for each 64."""

WITHOUT_FP8 = {"fp8-channel": "int8-channel", "fp8-g128": "int8-g128"}
"""The nearest form on a backend without kernels for 8-bit floats."""

FORMS = (*dict.fromkeys((*QUANTIZATIONS, DEQUANTIZE, *STORED_METHODS, *WHILE_LOADING)),)


class Rendezvous(msgspec.Struct, frozen=True, kw_only=True):
    """Where rank 0 awaits ranks of other hosts, and the files of their proofs. distributed_interface: through which
    ranks with columns gather; stages of a pipeline need none."""

    host: str
    port: int
    distributed_interface: str | None = None
    fleet_secret_file: str
    tls_cert: str
    tls_key: str
    tls_ca: str


MEDIA = ("image", "video", "audio")
"""The names of media in vLLM's limit_mm_per_prompt."""


class EngineConfig(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The model to load, and how to run it. `None` means: take it from the model or measure it."""

    model: str = "builtin"
    tokenizer: str | None = None
    revision: str | None = None
    hf_overrides: dict[str, Any] | None = None
    model_impl: str = "auto"
    dtype: str = "auto"
    quantization: str | None = None
    activations: str = "auto"
    save_packed: bool = False
    verify_packed: bool = True
    backend: str = "auto"
    device: str = "auto"
    seed: int | None = None
    max_model_len: int | None = None
    block_size: int = 16
    num_gpu_blocks_override: int | None = None
    kv_cache_memory_bytes: int | None = None
    gpu_memory_utilization: float = 0.9
    kv_cache_dtype: str = "auto"
    enable_prefix_caching: bool = True
    max_num_seqs: int = 128
    max_num_batched_tokens: int = 2048
    enable_chunked_prefill: bool = True
    long_prefill_token_threshold: int = 0
    scheduling_policy: str = "auto"
    max_logprobs: int = 20
    skip_tokenizer_init: bool = False
    num_threads: int = 0
    tensor_parallel_size: int = 1
    enable_expert_parallel: bool = False
    pipeline_parallel_size: int = 1
    distributed_timeout: float = 10.0
    rendezvous: Rendezvous | None = None
    async_scheduling: bool | None = None
    speculative_config: SpeculativeConfig | None = None
    enable_lora: bool = False
    lora_modules: list[str] | None = None
    max_loras: int = 8
    max_lora_rank: int = 64
    limit_mm_per_prompt: dict[str, int] | None = None
    mmproj: str = "auto"
    record_schedule: str | None = None
    max_record_bytes: int = 2**30

    def __post_init__(self) -> None:
        _member("model_impl", self.model_impl, MODEL_IMPLS)
        _member("dtype", self.dtype, DTYPES)
        if self.quantization is not None:
            _member("quantization", self.quantization, FORMS)
        _member("activations", self.activations, ACTIVATIONS)
        _member("kv_cache_dtype", self.kv_cache_dtype, KV_DTYPES)
        _at_least(self, 0, "num_threads", "long_prefill_token_threshold")
        if self.num_threads > MAX_NUM_THREADS:
            raise RequestError("num_threads", self.num_threads, f"an integer from 0 to {MAX_NUM_THREADS}")
        _member("scheduling_policy", self.scheduling_policy, ("auto", *POLICIES))
        if not 0 < self.distributed_timeout < float("inf"):
            raise RequestError("distributed_timeout", self.distributed_timeout, "above 0 seconds")
        _at_least(self, 1, "tensor_parallel_size", "pipeline_parallel_size", "block_size", "max_record_bytes")
        _at_least(self, 1, "max_num_seqs", "max_num_batched_tokens", "max_loras", "max_lora_rank")
        self._check_adapters()
        if not self.mmproj.strip():
            raise RequestError("mmproj", self.mmproj, "auto, none, or a GGUF file with a tower for pictures")
        _record("limit_mm_per_prompt", self.limit_mm_per_prompt)
        if self.limit_mm_per_prompt is not None:
            limits = {kind: _count(num) for kind, num in self.limit_mm_per_prompt.items()}
            if not set(limits) <= set(MEDIA) or any(type(num) is not int or num < 0 for num in limits.values()):
                bound = f"an object of numbers from 0 on: {', '.join(MEDIA)}"
                raise RequestError("limit_mm_per_prompt", self.limit_mm_per_prompt, bound)
            msgspec.structs.force_setattr(self, "limit_mm_per_prompt", limits)
        if self.enable_expert_parallel and self.tensor_parallel_size == 1:
            raise RequestError("enable_expert_parallel", True, "left out unless tensor_parallel_size is 2 or more")
        # One token of prompt and one of answer.
        _at_least(self, 2, "max_model_len", optional=True)
        _at_least(self, 1, "num_gpu_blocks_override", "kv_cache_memory_bytes", optional=True)
        if not 0 < self.gpu_memory_utilization <= 1:
            raise RequestError("gpu_memory_utilization", self.gpu_memory_utilization, "above 0 and at most 1")
        _at_least(self, -1, "max_logprobs")
        _at_least(self, 0, "seed", optional=True)
        _record("hf_overrides", self.hf_overrides)
        if self.speculative_config is not None:
            msgspec.structs.force_setattr(self, "speculative_config", speculative_config(self.speculative_config))
        place: object = self.rendezvous
        if isinstance(place, dict):
            try:
                msgspec.structs.force_setattr(self, "rendezvous", msgspec.convert(place, Rendezvous))
            except msgspec.ValidationError as error:
                raise RequestError("rendezvous", sorted(place), str(error)) from None
        if self.rendezvous is not None:
            self._check_hosts(self.rendezvous)

    def _check_adapters(self) -> None:
        for name, most in (("max_loras", MAX_LORAS), ("max_lora_rank", MAX_LORA_RANK)):
            if getattr(self, name) > most:
                raise RequestError(name, getattr(self, name), f"an integer from 1 to {most}")
        if self.lora_modules and not self.enable_lora:
            raise RequestError("lora_modules", self.lora_modules, "left out without enable_lora")
        if len(named_paths(self.lora_modules or ())) > self.max_loras:
            raise RequestError("lora_modules", self.lora_modules, f"at most max_loras, {self.max_loras}")
        if self.enable_lora and self.ranks[1] > 1:
            raise RequestError("enable_lora", True, f"left out with {self.ranks[0]} {self.ranks[1]}")

    def _check_hosts(self, place: Rendezvous) -> None:
        if self.ranks[1] == 1:
            bound = "left out with tensor_parallel_size 1 and pipeline_parallel_size 1"
            raise RequestError("rendezvous", f"{place.host}:{place.port}", bound)
        if self.enable_expert_parallel:
            raise RequestError(
                "enable_expert_parallel", True, "left out with rendezvous: only ranks of one host have it"
            )
        name, gathers = place.distributed_interface, self.pipeline_parallel_size == 1
        if gathers and name is None:
            bound = (
                "an interface in a trusted network: what is gathered through it is neither encrypted nor authenticated"
            )
            raise RequestError("distributed_interface", None, bound)
        if not gathers and name is not None:
            bound = "left out with pipeline_parallel_size: stages send their rows over the connection with TLS"
            raise RequestError("distributed_interface", name, bound)

    @property
    def policy(self) -> str:
        """The scheduling policy. A server has replaced auto by now."""
        return "fcfs" if self.scheduling_policy == "auto" else self.scheduling_policy

    @property
    def ranks(self) -> tuple[str, int]:
        """The field that says how the model is shared out, and the number of its ranks."""
        field = "pipeline_parallel_size" if self.pipeline_parallel_size > 1 else "tensor_parallel_size"
        return field, getattr(self, field)


class ServerConfig(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The config of the HTTP server. The bounds on waiting work are on by default; beyond them a client gets a 429."""

    host: str = "127.0.0.1"
    port: int = 8000
    api_key: str | list[str] | None = None
    generate_api_key: bool = False
    admin_api_key: str | list[str] | None = None
    api_key_file: str | None = None
    allowed_origins: list[str] | None = None
    allowed_hosts: list[str] | None = None
    inspector: bool = True
    max_requests_per_minute: int | None = None
    max_tokens_per_minute: int | None = None
    models_dir: str | None = None
    models_max: int = 4
    models_memory: int | None = None
    keep_alive: str = "5m"
    sleep_idle_seconds: int = -1
    served_model_name: list[str] | None = None
    any_model_name: bool | None = None
    allowed_media_domains: list[str] | None = None
    tags: list[str] | None = None
    chat_template: str | None = None
    default_chat_template_kwargs: dict[str, Any] | None = None
    prefill_assistant: bool = False
    trust_request_chat_template: bool = False
    enable_auto_tool_choice: bool = True
    tool_call_parser: str | None = None
    reasoning_parser: str | None = None
    max_num_queued_reqs: int = 1024
    max_num_queued_tokens: int = 2**20
    data_parallel_size: str = "1"
    router: str = "prefix"
    max_restarts: int = 5
    watchdog_timeout: float = 60.0
    max_request_timeout: float = 3600.0
    max_connections_per_peer: int | None = None
    overload_config: dict[str, Any] | None = None
    shutdown_delay: float = 5.0
    shutdown_timeout: float = 30.0
    storage_dir: str | None = None
    max_storage_bytes: int = 2**28
    max_blob_bytes: int | None = None
    max_batch_concurrency: int = 16
    slot_save_path: str | None = None
    slots: bool = True
    metrics: bool = False
    uvicorn_log_level: str = "info"
    log_format: str = "text"
    crash_report_dir: str = "~/.cache/headrace/crash-reports"
    otlp_traces_endpoint: str | None = None
    log_stats_interval: float = 10.0
    generation_config: str = "auto"
    override_generation_config: dict[str, Any] | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.port, int) or not 0 <= self.port <= 65535:
            raise RequestError("port", self.port, "an integer from 0 to 65535")
        _at_least(self, 0, "max_restarts", "models_max")
        _at_least(self, -1, "sleep_idle_seconds")
        _at_least(self, 1, "max_num_queued_reqs", "max_num_queued_tokens", "max_storage_bytes", "max_batch_concurrency")
        _at_least(self, 1, "max_requests_per_minute", "max_tokens_per_minute", optional=True)
        _at_least(self, 1, "max_connections_per_peer", "models_memory", "max_blob_bytes", optional=True)
        for name in ("max_request_timeout", "shutdown_delay", "shutdown_timeout", "watchdog_timeout"):
            if not 0 <= getattr(self, name) < float("inf"):
                raise RequestError(name, getattr(self, name), "0 or more seconds")
        size = self.data_parallel_size
        if size != "auto" and not (size.isdecimal() and 1 <= int(size) <= MAX_REPLICAS):
            raise RequestError("data_parallel_size", size, f"auto, or an integer from 1 to {MAX_REPLICAS}")
        _member("router", self.router, ROUTERS)
        _member("uvicorn_log_level", self.uvicorn_log_level, LOG_LEVELS)
        _member("log_format", self.log_format, LOG_FORMATS)
        if self.otlp_traces_endpoint is not None and not re.match(r"https?://[^\s/]", self.otlp_traces_endpoint):
            raise RequestError("otlp_traces_endpoint", self.otlp_traces_endpoint, "an address that begins with http")
        _member("generation_config", self.generation_config, ("auto", "headrace"))
        _record("default_chat_template_kwargs", self.default_chat_template_kwargs)
        _record("overload_config", self.overload_config)
        for name, bound in (self.overload_config or {}).items():
            is_number = isinstance(bound, int | float) and not isinstance(bound, bool)
            if name not in OVERLOAD_BOUNDS or not is_number or bound <= 0:
                allowed = "an object of numbers above 0: " + ", ".join(OVERLOAD_BOUNDS)
                raise RequestError("overload_config", self.overload_config, allowed)
        _record("override_generation_config", self.override_generation_config)
        sampling_defaults(self.override_generation_config)


def _member(name: str, value: str, allowed: tuple[str, ...]) -> None:
    if value not in allowed:
        raise RequestError(name, value, "one of " + ", ".join(allowed))


def _count(limit: Any) -> Any:
    """Return the number of a limit; in vLLM it may be an object that bounds sizes too."""
    return limit.get("count") if isinstance(limit, dict) else limit


def _record(name: str, value: object) -> None:
    if value is not None and not isinstance(value, dict):
        raise RequestError(name, value, "an object")


def _at_least(config: msgspec.Struct, low: int, *names: str, optional: bool = False) -> None:
    """Check fields that are integers, or None if `optional`. Raises `RequestError`."""
    for name in names:
        value = getattr(config, name)
        is_integer = isinstance(value, int) and not isinstance(value, bool)
        if not (is_integer and value >= low) and not (optional and value is None):
            raise RequestError(name, value, f"at least {low}")
