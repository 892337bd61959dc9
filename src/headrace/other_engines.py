"""The settings of other engines: which of them set a field here, which have no effect, and what replaces the rest.

Users bring their command lines and scripts along. `translate` turns the flags of vLLM's `vllm serve` and of
llama-server into headrace's own, `translate_keywords` does so for the keywords of vLLM's `LLM`. The pages
docs/from-vllm.md, from-llama-server.md and from-ollama.md are written from these tables. Called by `cli` and `llm`.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import msgspec

from headrace.protocol.errors import RequestError, UnsupportedError

logger = logging.getLogger("headrace")

VLLM, LLAMA_SERVER = "vLLM", "llama-server"


class Setting(msgspec.Struct, frozen=True, kw_only=True):
    """A flag of another engine.

    ours: the field here that it sets, if any; `convert` changes its value, and a flag without a value sets `fixed`.
    neutral: the values with which it has no effect here; None: any value.
    why: why it has no effect, or what to use in its place.
    takes_value: whether a value follows the flag.
    """

    source: str
    names: tuple[str, ...]
    ours: str = ""
    convert: Callable[[str], str] | None = None
    fixed: str = ""
    neutral: tuple[str, ...] | None = ()
    why: str = ""
    takes_value: bool = True

    @property
    def has_no_effect(self) -> bool:
        """Whether it is accepted, with some value, and has no effect."""
        return not self.ours and self.neutral != ()


def _settings(source: str) -> tuple[Callable[..., Setting], ...]:
    """Return the makers of a source's rows: done here, without effect here, a switch without effect, refused."""

    def done(names: str, ours: str, **more: Any) -> Setting:
        return Setting(source=source, names=tuple(names.split()), ours=ours, **more)

    def no_effect(names: str, why: str, *neutral: str) -> Setting:
        return Setting(source=source, names=tuple(names.split()), why=why, neutral=neutral or None)

    def switch(names: str, why: str) -> Setting:
        return Setting(source=source, names=tuple(names.split()), why=why, neutral=None, takes_value=False)

    def refused(names: str, why: str, **more: Any) -> Setting:
        return Setting(source=source, names=tuple(names.split()), why=why, **more)

    return done, no_effect, switch, refused


def _cache_type(text: str) -> str:
    """Return our name of llama-server's type of a KV cache."""
    names = {"f32": "float32", "f16": "float16", "bf16": "bfloat16", "q8_0": "int8", "q4_0": "int4"}
    return names.get(text, text)


def _dtype(text: str) -> str:
    return {"half": "float16", "float": "float32"}.get(text, text)


_done, _no_effect, _switch, _refused = _settings(VLLM)
_ONE_RANK = "the ranks of a model are processes of one host; see --tensor-parallel-size and --pipeline-parallel-size"
_HOSTS = "ranks of other hosts come by themselves, each by a headrace rank; see --rendezvous"
_TEXT_ONLY = "models read text only"
_NO_LORA = "merge the adapter into the checkpoint"
_TLS = "put a proxy with TLS in front; docs/howto-deploy.md has configurations"

VLLM_SETTINGS: tuple[Setting, ...] = (
    _done("--model", "model"),
    _done("--dtype", "dtype", convert=_dtype),
    _done("--disable-log-stats", "log_stats_interval", fixed="0", takes_value=False),
    _switch("--trust-remote-code", "code from a checkpoint is never run; the model type must be one that headrace has"),
    _switch("--enforce-eager", "the program of a step is recorded once; there is no slower mode to fall back to"),
    _no_effect("--decode-context-parallel-size -dcp", _ONE_RANK, "1"),
    _no_effect("--nnodes", _HOSTS, "1"),
    _no_effect("--node-rank", _HOSTS, "0"),
    _no_effect("--api-server-count", "one process serves HTTP", "1"),
    _no_effect("--distributed-executor-backend", "the engine runs in one process of its own", "mp", "uni"),
    _refused("--master-addr --master-port", _HOSTS),
    _switch("--disable-custom-all-reduce", "ranks gather, and reduce nothing"),
    _no_effect("--swap-space", "preempted requests are computed again, to the same bits; nothing is swapped"),
    _no_effect("--cpu-offload-gb", "weights are not offloaded", "0"),
    _no_effect("--kv-offloading-size", "the KV cache is not offloaded", "0"),
    _no_effect("--kv-offloading-backend", "the KV cache is not offloaded"),
    _no_effect("--load-format", "the format is read from the files", "auto", "safetensors", "gguf"),
    _no_effect("--config-format", "the format is read from the files", "auto", "hf"),
    _no_effect("--tokenizer-mode", "tokenizers are loaded by the tokenizers library", "auto", "hf", "fast"),
    _no_effect("--model-impl", "headrace has models of its own", "auto", "vllm"),
    _no_effect("--runner", "one server generates and embeds", "auto", "generate", "pooling"),
    _no_effect("--task", "one server generates and embeds", "auto", "generate", "embed", "embedding", "score"),
    _no_effect("--convert", "one server generates and embeds", "auto", "none", "embed"),
    _no_effect("--logprobs-mode", "log-probabilities are those of the model, before biases", "raw_logprobs"),
    _no_effect("--max-num-partial-prefills", "as many prompts as fit are computed in a step", "1"),
    _no_effect("--max-long-partial-prefills", "see --long-prefill-token-threshold", "1"),
    _no_effect("--stream-interval", "each token is sent when it is there", "1"),
    _no_effect("--prefix-caching-hash-algo", "keys are SHA-256 and compared token by token", "sha256", "builtin"),
    _no_effect("--structured-outputs-config", "llguidance compiles every grammar"),
    _no_effect("--guided-decoding-backend", "llguidance compiles every grammar"),
    _no_effect("--compilation-config -cc -O", "the program of a step is recorded once, without a compiler"),
    _no_effect("--attention-backend", "the backend has one attention kernel; see --backend"),
    _no_effect("--max-seq-len-to-capture", "every length runs on the recorded program"),
    _no_effect("--num-scheduler-steps", "the scheduler runs each step", "1"),
    _no_effect("--num-lookahead-slots", "see --speculative-config", "0"),
    _switch("--use-v2-block-manager", "there is one block manager"),
    _switch("--disable-sliding-window", "windows are the model's own"),
    _switch("--calculate-kv-scales", "the scales of a quantised KV cache are computed for each block"),
    _switch("--enable-sleep-mode", "/sleep and /wake_up are always there"),
    _no_effect("--limit-mm-per-prompt", _TEXT_ONLY),
    _no_effect("--mm-processor-kwargs", _TEXT_ONLY),
    _no_effect("--mm-processor-cache-gb", _TEXT_ONLY),
    _switch("--disable-mm-preprocessor-cache", _TEXT_ONLY),
    _switch("--language-model-only", _TEXT_ONLY),
    _no_effect("--chat-template-content-format", "the form of a message's content is detected for each template"),
    _no_effect("--response-role", "an answer's role is assistant", "assistant"),
    _switch("--enable-request-id-headers", "every reply has X-Request-Id"),
    _switch("--enable-prompt-tokens-details", "usage always has prompt_tokens_details"),
    _switch("--enable-per-request-metrics", "every reply has timings"),
    _switch("--enable-server-load-tracking", "/load and /metrics always count open requests"),
    _switch("--enable-log-requests --disable-log-requests", "requests are never logged, because prompts are private"),
    _switch("--enable-log-outputs", "answers are never logged, because they are private"),
    _no_effect("--max-log-len", "requests are never logged, because prompts are private"),
    _switch("--disable-uvicorn-access-log", "requests are not logged"),
    _switch("--disable-fastapi-docs", "/docs needs no other host; with keys, it needs one"),
    _no_effect("--collect-detailed-traces", "see --otlp-traces-endpoint"),
    _switch("--kv-cache-metrics", "/metrics has the metrics of the cache that there are"),
    _no_effect("--show-hidden-metrics-for-version", "no metric is hidden"),
    _refused("--download-dir", "set HF_HOME"),
    _refused("--hf-token", "set HF_TOKEN"),
    _refused("--code-revision", "code from a checkpoint is never run"),
    _refused("--tokenizer-revision", "give the tokenizer as a directory, by --tokenizer"),
    _refused("--hf-overrides", "change config.json in a copy of the model"),
    _refused("--rope-scaling --rope-theta", "change config.json in a copy of the model"),
    _refused("--enable-prompt-embeds", "prompts are text or token ids", takes_value=False),
    _refused("--logits-processors", "SamplingParams.logits_processors takes functions, offline"),
    _refused("--scheduler-cls", "see --scheduling-policy"),
    _refused("--worker-cls --worker-extension-cls", "headrace has no plugins"),
    _refused("--tool-parser-plugin --reasoning-parser-plugin", "see --tool-call-parser for the formats that there are"),
    _refused("--middleware", "headrace has no plugins"),
    _refused("--kv-transfer-config --kv-events-config", "one process computes prompts and answers"),
    _refused("--enable-lora", _NO_LORA, takes_value=False),
    _refused("--lora-modules --max-loras --max-lora-rank --lora-dtype --max-cpu-loras", _NO_LORA),
    _refused("--ssl-keyfile --ssl-certfile --ssl-ca-certs --ssl-cert-reqs", _TLS),
    _refused("--root-path", "let the proxy strip the prefix"),
    _refused("--allow-credentials --allowed-methods --allowed-headers", "see --allowed-origins"),
    _refused("--return-tokens-as-token-ids", "set return_token_ids in a request", takes_value=False),
    _refused("--enable-force-include-usage", "set stream_options.include_usage in a request", takes_value=False),
    _refused("--headless", _ONE_RANK, takes_value=False),
)  # fmt: skip

_done, _no_effect, _switch, _refused = _settings(LLAMA_SERVER)
_IN_REQUEST = "set it in a request, or in the model's generation_config.json"
_ROPE = "rotary embedding follows the model's file"
_GPU = "see --backend and --device"

LLAMA_SERVER_SETTINGS: tuple[Setting, ...] = (
    _done("-m", "model"),
    _done("-hf -hfr --hf-repo", "model"),
    _done("-c --ctx-size", "max_model_len", neutral=("0",)),
    _done("-t --threads", "num_threads", convert=lambda text: "0" if text == "-1" else text),
    _done("-np --parallel", "max_num_seqs", neutral=("-1",)),
    _done("-b --batch-size", "max_num_batched_tokens"),
    _done("-a --alias", "served_model_name"),
    _done("-ctk --cache-type-k", "kv_cache_dtype", convert=_cache_type),
    _done("-ctv --cache-type-v", "kv_cache_dtype", convert=_cache_type),
    _done("-s", "seed", neutral=("-1",)),
    _done("--chat-template-file", "chat_template"),
    _done("--log-jsonl", "log_format", fixed="json", takes_value=False),
    _done("-v --verbose --log-verbose", "uvicorn_log_level", fixed="debug", takes_value=False),
    _done("--no-cache-prompt", "enable_prefix_caching", fixed="false", takes_value=False),
    _no_effect("-ngl --gpu-layers --n-gpu-layers", f"a model is not split between CPU and GPU; {_GPU}"),
    _no_effect("-ub --ubatch-size", "see --max-num-batched-tokens"),
    _no_effect("-tb --threads-batch", "one number of threads for all; see --num-threads"),
    _no_effect("-fa --flash-attn", "attention never stores its scores"),
    _switch("-cb --cont-batching", "requests are always batched so"),
    _switch("--jinja", "templates are always rendered by Jinja"),
    _switch("--props", "/props is always there to read"),
    _switch("--cache-prompt", "prefixes are always cached; see --enable-prefix-caching"),
    _no_effect("--cache-reuse", "only whole prefixes keep an answer's bits", "0"),
    _no_effect("-cram --cache-ram", "the prefix cache takes what the KV cache has free; see --kv-cache-memory-bytes"),
    _no_effect("-ctxcp --ctx-checkpoints --swa-checkpoints", "blocks of the KV cache are kept, not checkpoints"),
    _switch("-kvu --kv-unified -no-kvu --no-kv-unified", "blocks of the KV cache are shared by all requests"),
    _switch("--context-shift --no-context-shift", "an answer ends where the context ends"),
    _switch("--warmup --no-warmup", "the server generates a token before it is ready"),
    _switch("--embedding --embeddings --rerank --reranking", "one server generates, embeds and ranks"),
    _no_effect("--pooling", "set by the model, or in a request"),
    _no_effect("-lm --load-mode", "packed files and GGUF files are mapped into memory", "auto", "mmap"),
    _switch("--no-mmap --mlock", "packed files and GGUF files are mapped into memory"),
    _no_effect("--numa", "start the server under numactl", "distribute"),
    _no_effect("-fit --fit", "the KV cache takes what the memory has free"),
    _no_effect("--prio", "start the server under nice", "0"),
    _no_effect("--poll", "threads wait by spinning shortly"),
    _switch("--no-webui --no-ui --webui --ui", "no page is served but /docs"),
    _switch("--models-autoload", "a model of the folder is loaded when a request names it"),
    _refused("--no-models-autoload", "a model of the folder is loaded when a request names it", takes_value=False),
    _refused("--models-preset", "the flags hold for every model of the folder"),
    _switch("--offline", "set HF_HUB_OFFLINE=1 to forbid the network"),
    _no_effect("-to --timeout", "see --max-request-timeout"),
    _no_effect("--threads-http", "one thread serves HTTP"),
    _no_effect("--sse-ping-interval", "a heartbeat is sent after ten seconds of silence"),
    _switch("--repack -nr --no-repack", "weights always take the kernels' layout"),
    _switch("--no-kv-offload -nkvo", _GPU),
    _switch("--log-disable --log-prefix --log-timestamps", "see --uvicorn-log-level and --log-format"),
    _switch("--no-log-prefix --no-log-timestamps", "see --log-format"),
    _no_effect("--log-colors", "the log has no colours"),
    _no_effect("-lv --verbosity --log-verbosity", "see --uvicorn-log-level"),
    _switch("--perf --no-perf", "every reply has timings"),
    _refused("-dev", _GPU),
    _no_effect("-mg --main-gpu", _GPU, "0"),
    _no_effect("-sm --split-mode", _ONE_RANK, "none", "layer"),
    _refused("-ts --tensor-split", _ONE_RANK),
    _refused("--rpc", _ONE_RANK),
    _refused("-n --predict --n-predict", "set max_tokens in a request"),
    _refused("--temp", _IN_REQUEST),
    _refused("--temperature --top-k --top-p --min-p --top-nsigma --top-n-sigma --typical --typical-p", _IN_REQUEST),
    _refused("--repeat-penalty --repeat-last-n --presence-penalty --frequency-penalty", _IN_REQUEST),
    _refused("--samplers --mirostat", _IN_REQUEST),
    _refused("--grammar --grammar-file -j --json-schema -jf --json-schema-file -l --logit-bias", "set it in a request"),
    _refused("--chat-template-kwargs", "set chat_template_kwargs in a request"),
    _refused("--reasoning-format", "see --reasoning-parser; none leaves the reasoning in the content"),
    _refused("-rea --reasoning --reasoning-budget", "set reasoning_effort or thinking_token_budget in a request"),
    _refused("-mu --model-url -dr --docker-repo", "fetch the file, and give its path"),
    _refused("-hff --hf-file", "give the repository and the file as one path, or fetch the file"),
    _refused("-hft --hf-token", "set HF_TOKEN"),
    _refused("-mm --mmproj --mmproj-url", _TEXT_ONLY),
    _refused("--lora --lora-scaled", _NO_LORA),
    _refused("--control-vector --control-vector-scaled", "control vectors are not supported"),
    _refused("-md --model-draft", "see --speculative-config, method draft_model"),
    _refused("--draft-max --draft --draft-n --draft-min", "see --speculative-config, num_speculative_tokens"),
    _refused("--rope-scaling --rope-scale --rope-freq-base --rope-freq-scale --yarn-orig-ctx", _ROPE),
    _refused("--override-kv", "change the file's metadata"),
    _refused("--path --api-prefix", "put a proxy in front"),
    _refused("--ssl-key-file --ssl-cert-file", _TLS),
    _refused("--cors-origins", "see --allowed-origins"),
    _refused("--tools --agent --mcp-servers-config", "the server runs no tools; the client does"),
)  # fmt: skip

OLLAMA_VARIABLES: tuple[tuple[str, str], ...] = (
    ("OLLAMA_HOST", "`--host` and `--port`"),
    ("OLLAMA_CONTEXT_LENGTH", "`--max-model-len`"),
    ("OLLAMA_NUM_PARALLEL", "`--max-num-seqs`; requests are batched without splitting the context"),
    ("OLLAMA_MAX_QUEUE", "`--max-num-queued-reqs`"),
    ("OLLAMA_KV_CACHE_TYPE", "`--kv-cache-dtype`; q8_0 is int8, q4_0 is int4"),
    ("OLLAMA_ORIGINS", "`--allowed-origins`"),
    ("OLLAMA_LOAD_TIMEOUT", "not needed: loading has no time limit"),
    ("OLLAMA_KEEP_ALIVE", "`--keep-alive`, for the models of a folder; the model named at the start stays"),
    ("OLLAMA_FLASH_ATTENTION", "not needed: attention never stores its scores"),
    ("OLLAMA_DEBUG", "`--uvicorn-log-level debug`"),
    ("OLLAMA_NOHISTORY", "not needed: `headrace chat` keeps no history"),
    ("OLLAMA_MODELS", "`--models-dir`; see [models](howto-models.md)"),
    ("OLLAMA_MAX_LOADED_MODELS", "`--models-max`, and `--models-memory` for their memory"),
    ("OLLAMA_NOPRUNE", "not needed: uploads that no model was made of go when the server starts"),
    ("OLLAMA_GPU_OVERHEAD", "`--gpu-memory-utilization`"),
    ("OLLAMA_SCHED_SPREAD", "one process computes the model"),
)

SETTINGS: dict[str, Setting] = {
    name: setting for setting in (*LLAMA_SERVER_SETTINGS, *VLLM_SETTINGS) for name in setting.names
}
"""By name. Where both engines have a name, vLLM's meaning counts: headrace's flags are vLLM's."""


def translate(arguments: Iterable[str], ours: Mapping[str, bool]) -> tuple[list[str], list[str]]:
    """Return a command line with our flags only, and a note for each flag that has no effect here.

    Args:
        arguments: the words after the command's name.
        ours: the command's own flags, and whether a value follows.

    Raises `RequestError` for a flag of another engine that is not supported, naming what to use.
    """
    words: list[str] = []
    notes: list[str] = []
    has_model, last_flag = False, ""
    rest = iter(arguments)
    for word in rest:
        name, equals, value = word.partition("=")
        if name.startswith("--"):
            name = name.replace("_", "-")
        setting = SETTINGS.get(name)
        if name in ours and (setting is None or setting.convert is None):
            words.append(name + equals + value)
            if ours[name] and not equals:
                words += [value for value in (next(rest, None),) if value is not None]
            last_flag = name
            continue
        if setting is None:
            # vLLM's way to give several names; before MODEL there is one.
            if last_flag == "--served-model-name" and has_model and not word.startswith("-"):
                words.append(last_flag)
            elif not word.startswith("-"):
                has_model, last_flag = True, ""
            words.append(word)
            continue
        has_model, last_flag = has_model or setting.ours == "model", ""
        if setting.takes_value and not equals:
            value = next(rest, "")
        fresh = _translated(setting, name, value, notes)
        if len(fresh) == 2 and fresh[0] in words and words[words.index(fresh[0]) + 1] != fresh[1]:
            raise RequestError(name, value, f"{words[words.index(fresh[0]) + 1]}, as {fresh[0]} was set before")
        words += fresh
    return words, notes


def translate_keywords(fields: Mapping[str, Any], ours: Iterable[str]) -> dict[str, Any]:
    """Return the keywords of `LLM` that are `ours`, with our values; log each of vLLM's that has no effect here.

    Raises `RequestError` for a keyword that is not supported, and for an unknown one."""
    values: dict[str, Any] = {}
    known = set(ours)
    for name, value in fields.items():
        flag = "--" + name.replace("_", "-")
        setting = SETTINGS.get(flag)
        if name in known:
            values[name] = setting.convert(value) if setting and setting.convert and isinstance(value, str) else value
        elif setting is None or setting.source != VLLM:
            raise RequestError(name, value, "a field of EngineConfig")
        elif value is None or (value is False and not setting.takes_value):
            continue
        elif setting.has_no_effect and (setting.neutral is None or str(value) in setting.neutral):
            logger.warning("%s=%r has no effect here: %s", name, value, setting.why)
        else:
            raise _refusal(setting, name, value)
    return values


def _translated(setting: Setting, name: str, value: str, notes: list[str]) -> list[str]:
    """Return the words of ours that one flag becomes."""
    if setting.ours and value not in (setting.neutral or ()):
        value = setting.fixed or (setting.convert(value) if setting.convert else value)
        if setting.ours == "model":
            return [value]
        flag = "--" + setting.ours.replace("_", "-")
        return [f"--no-{flag[2:]}"] if value == "false" else [flag, value]
    if setting.ours:
        return []
    if setting.neutral is None or value in setting.neutral:
        notes.append(f"{name} has no effect here: {setting.why}")
        return []
    raise _refusal(setting, name, value)


def _refusal(setting: Setting, name: str, value: object) -> RequestError:
    if setting.neutral:
        return RequestError(name, value, f"{' or '.join(setting.neutral)}: {setting.why}")
    return UnsupportedError(name, value, setting.why)
