"""The flags of `vllm serve`, and keywords of its `LLM`, that are not headrace's own: see `settings`.

docs/from-vllm.md is written from this table. Read by `headrace.other_engines`.
"""

from __future__ import annotations

from headrace.migration import settings
from headrace.migration.settings import ROPE, SPECULATION, VLLM, RefusedError, Setting

_done, _no_effect, _switch, _refused = settings.makers(VLLM)
ONE_RANK = "the ranks of a model are processes of one host; see --tensor-parallel-size and --pipeline-parallel-size"
_HOSTS = "ranks of other hosts come by themselves, each by a headrace rank; see --rendezvous"
_ENGINES = "engines of other hosts are named: run a headrace engine on each, and name them with --engine"
PICTURES = "pictures are read as the model's own files say; no sound and no video"
TLS = "put a proxy with TLS in front; docs/howto-deploy.md has configurations"
NO_TOOLS = "the server runs no tools; the client does"
_FORMATS = "formats are those of the chat template; see --tool-call-parser and --reasoning-parser"
_READ = "the format is read from the files"
_KERNELS = "each operator has one kernel for a form of weights; see --backend"
_RECORDED = "the program of a step is recorded once, without a compiler"
_NEITHER = "weights and the KV cache are not offloaded"
_EXPERTS = "see --enable-expert-parallel"
_METRICS = "/metrics has the metrics that there are"


def _dtype(text: str) -> str:
    return {"half": "float16", "float": "float32"}.get(text, text)


def _same(text: str) -> str:
    return text


def _advice(text: str) -> str:
    return "headrace" if text == "vllm" else text


def _impl(text: str) -> str:
    if text == "terratorch":
        raise RefusedError("auto, headrace or transformers")
    return "headrace" if text == "vllm" else text


def _draft(text: str) -> dict[str, str]:
    return {"method": "ngram"} if text == "[ngram]" else {"model": text}


def _with_weights(text: str) -> str:
    if text == "dummy":
        raise ValueError("a format with weights; headrace plan needs none")
    return text


VLLM_SETTINGS: tuple[Setting, ...] = (
    _done("--model", "model"),
    _done("--dtype", "dtype", convert=_dtype),
    _done("--max-model-len", "max_model_len", convert=_same, neutral=("auto", "-1"),
          why="auto and -1: the model's own"),
    _done("--disable-log-stats", "log_stats_interval", fixed="0", takes_value=False),
    _done("--generation-config", "generation_config", convert=_advice, why="vllm is headrace: none is read"),
    _done("-ep", "enable_expert_parallel", fixed="true", takes_value=False),
    _done("--distributed-timeout-seconds", "distributed_timeout"),
    _done("--rope-scaling", ROPE, convert=settings.rope_scaling),
    _done("--rope-theta", "hf_overrides.rope_theta", convert=settings.number),
    _done("--speculative-model", SPECULATION, convert=_draft),
    _done("--num-speculative-tokens", f"{SPECULATION}.num_speculative_tokens", convert=settings.whole),
    _done("--ngram-prompt-lookup-max", f"{SPECULATION}.prompt_lookup_max", convert=settings.whole),
    _done("--ngram-prompt-lookup-min", f"{SPECULATION}.prompt_lookup_min", convert=settings.whole),
    _no_effect("--load-format", _READ, convert=_with_weights),
    _no_effect("--speculative-draft-tensor-parallel-size -spec-draft-tp", "see --speculative-config"),
    _switch("--trust-remote-code", "code from a checkpoint is never run; see --model-impl"),
    _no_effect("--code-revision", "code from a checkpoint is never run"),
    _switch("--enforce-eager", "the program of a step is recorded once; there is no slower mode to fall back to"),
    _no_effect("--decode-context-parallel-size -dcp --prefill-context-parallel-size -pcp", ONE_RANK),
    _no_effect("--dcp-comm-backend --dcp-kv-cache-interleave-size --cp-kv-cache-interleave-size", ONE_RANK),
    _no_effect("--nnodes", _HOSTS, "1"),
    _no_effect("--node-rank", _HOSTS, "0"),
    _no_effect("--api-server-count -asc", "one process serves HTTP"),
    _switch("--disable-frontend-multiprocessing", "the engine has a process of its own"),
    _no_effect("--distributed-executor-backend", "ranks are processes of this host", "mp", "uni", "ray"),
    _refused("--master-addr --master-port", _HOSTS),
    _refused("--data-parallel-size-local -dpl --data-parallel-address -dpa --data-parallel-rpc-port -dpp", _ENGINES),
    _refused("--data-parallel-rank -dpn --data-parallel-start-rank -dpr", _ENGINES),
    _refused("--data-parallel-hybrid-lb -dph --data-parallel-external-lb -dpe", _ENGINES, takes_value=False),
    _no_effect("--data-parallel-backend -dpb", "engines are processes of this host", "mp", "ray"),
    _switch("--disable-custom-all-reduce", "ranks gather, and reduce nothing"),
    _switch("--disable-nccl-for-dp-synchronization", "engines behind one address do not wait for each other"),
    _switch("--enable-eplb --enable-elastic-ep --enable-dbo", _EXPERTS),
    _no_effect("--eplb-config --expert-placement-strategy --all2all-backend", _EXPERTS),
    _no_effect("--dbo-decode-token-threshold --dbo-prefill-token-threshold --ubatch-size", _EXPERTS),
    _no_effect("--swap-space", "preempted requests are computed again, to the same bits; nothing is swapped"),
    _no_effect("--cpu-offload-gb --cpu-offload-params --offload-backend --offload-params", _NEITHER),
    _no_effect("--offload-group-size --offload-num-in-group --offload-prefetch-step", _NEITHER),
    _no_effect("--kv-offloading-size --kv-offloading-backend", _NEITHER),
    _no_effect("--config-format --model-loader-extra-config --ignore-patterns --pt-load-map-location", _READ),
    _no_effect("--safetensors-load-strategy --max-parallel-loading-workers", _READ),
    _switch("--use-tqdm-on-load", "a bar is drawn where stderr is a terminal"),
    _no_effect("--tokenizer-mode", "the tokenizer is read from its files; the chat template writes the chats"),
    _done("--model-impl", "model_impl", convert=_impl, why="vllm is headrace"),
    _no_effect("--runner", "the files say if it answers, embeds or classifies", "auto", "generate", "pooling"),
    _no_effect("--task", "as --runner", "auto", "generate", "embed", "embedding", "score", "classify"),
    _no_effect("--convert", "as --runner", "auto", "none", "embed", "classify"),
    _no_effect("--pooler-config --override-pooler-config", "set by the model, or in a request"),
    _no_effect("--logprobs-mode", "log-probabilities are those of the model, before biases", "raw_logprobs"),
    _no_effect("--max-num-partial-prefills", "as many prompts as fit are computed in a step"),
    _no_effect("--max-long-partial-prefills", "see --long-prefill-token-threshold"),
    _no_effect("--stream-interval", "each token is sent when it is there"),
    _no_effect("--prefix-caching-hash-algo", "keys are SHA-256 and compared token by token"),
    _no_effect("--structured-outputs-config", "llguidance compiles every grammar"),
    _no_effect("--guided-decoding-backend", "llguidance compiles every grammar"),
    _no_effect("--compilation-config -cc -O --optimization-level --performance-mode", _RECORDED),
    _no_effect("--max-seq-len-to-capture --cudagraph-capture-sizes --max-cudagraph-capture-size", _RECORDED),
    _no_effect("--attention-backend --attention-config -ac --kernel-config --moe-backend --linear-backend", _KERNELS),
    _switch("--enable-flashinfer-autotune --disable-cascade-attn", _KERNELS),
    _no_effect("--override-attention-dtype", _KERNELS),
    _no_effect("--num-scheduler-steps", "the scheduler runs each step"),
    _no_effect("--num-lookahead-slots", "see --speculative-config"),
    _switch("--use-v2-block-manager --disable-hybrid-kv-cache-manager", "there is one block manager"),
    _switch("--disable-sliding-window", "windows are the model's own"),
    _switch("--calculate-kv-scales", "the scales of a quantised KV cache are computed for each block"),
    _switch("--kv-sharing-fast-prefill", "the layers that share a cache are the model's own"),
    _no_effect("--mamba-cache-dtype --mamba-ssm-cache-dtype --mamba-block-size --mamba-backend",
               "states are kept as they are computed"),
    _no_effect("--mamba-cache-mode", "states are kept at the ends of prompts and of known prefixes"),
    _switch("--enable-sleep-mode", "/sleep and /wake_up are always there"),
    _switch("--enable-prompt-embeds", "prompts are text or token ids"),
    _switch("--allow-deprecated-quantization", "see --quantization for the forms that there are"),
    _no_effect("--mm-processor-kwargs --media-io-kwargs --allowed-local-media-path", PICTURES),
    _no_effect("--mm-processor-cache-gb --mm-processor-cache-type", PICTURES),
    _no_effect("--mm-shm-cache-max-object-size-mb --mm-encoder-tp-mode --mm-encoder-attn-backend", PICTURES),
    _no_effect("--video-pruning-rate --ec-transfer-config", PICTURES),
    _switch("--disable-mm-preprocessor-cache --disable-chunked-mm-input", PICTURES),
    _switch("--language-model-only", 'see --limit-mm-per-prompt {"image": 0}'),
    _switch("--enable-mm-embeds --interleave-mm-strings --skip-mm-profiling", PICTURES),
    _refused("--omni --mm-encoder-only", PICTURES, takes_value=False),
    _no_effect("--chat-template-content-format", "the form of a message's content is detected for each template"),
    _no_effect("--response-role", "an answer's role is assistant", "assistant"),
    _switch("--exclude-tools-when-tool-choice-none", "a prompt has no tools where none may be called"),
    _no_effect("--tool-server", NO_TOOLS),
    _no_effect("--reasoning-config", "see --reasoning-parser"),
    _no_effect("--tool-parser-plugin --reasoning-parser-plugin --tool-call-parser-plugin", _FORMATS),
    _switch("--enable-request-id-headers", "every reply has X-Request-Id"),
    _switch("--enable-prompt-tokens-details", "usage always has prompt_tokens_details"),
    _switch("--enable-per-request-metrics", "every reply has timings"),
    _switch("--enable-server-load-tracking", "/load and /metrics always count open requests"),
    _switch("--enable-tokenizer-info-endpoint", "/tokenizer_info is always there"),
    _switch("--enable-log-requests --disable-log-requests", "requests are never logged, because prompts are private"),
    _switch("--enable-log-outputs --enable-log-deltas", "answers are never logged, because they are private"),
    _no_effect("--max-log-len", "requests are never logged, because prompts are private"),
    _switch("--disable-uvicorn-access-log", "requests are not logged"),
    _no_effect("--disable-access-log-for-endpoints", "requests are not logged"),
    _no_effect("--log-config-file", "see --uvicorn-log-level and --log-format"),
    _switch("--aggregate-engine-logging", "one line of statistics has all engines"),
    _switch("--log-error-stack", "an unexpected error is logged with its traceback"),
    _switch("--disable-fastapi-docs --enable-offline-docs", "/docs needs no other host; with keys, it needs one"),
    _no_effect("--collect-detailed-traces", "see --otlp-traces-endpoint"),
    _switch("--kv-cache-metrics --cudagraph-metrics --enable-mfu-metrics --enable-logging-iteration-details", _METRICS),
    _no_effect("--kv-cache-metrics-sample", _METRICS),
    _no_effect("--show-hidden-metrics-for-version", "no metric is hidden"),
    _no_effect("--profiler-config", "see headrace bench, and the page /inspect"),
    _switch("--enable-layerwise-nvtx-tracing --ray-workers-use-nsight", "see headrace bench, and the page /inspect"),
    _switch("--fail-on-environ-validation", "an environment variable that is not known is no error"),
    _no_effect("--additional-config", "headrace has no plugins"),
    _no_effect("--allowed-methods --allowed-headers", "see --allowed-origins"),
    _switch("--allow-credentials", "see --allowed-origins"),
    _no_effect("--h11-max-incomplete-event-size --h11-max-header-count", "the server has bounds of its own"),
    _refused("--uds", "put a proxy in front, which listens there"),
    _refused("--download-dir", "set HF_HOME"),
    _refused("--hf-token", "set HF_TOKEN"),
    _refused("--hf-config-path", "copy the config.json to the model, or change its values with --hf-overrides"),
    _refused("--tokenizer-revision", "give the tokenizer as a directory, by --tokenizer"),
    _refused("--logits-processors --io-processor-plugin", "SamplingParams.logits_processors takes functions, offline"),
    _refused("--scheduler-cls", "see --scheduling-policy"),
    _refused("--worker-cls --worker-extension-cls", "headrace has no plugins"),
    _refused("--middleware", "headrace has no plugins; put a proxy in front"),
    _refused("--kv-transfer-config --kv-events-config", "one process computes prompts and answers"),
    _refused("--weight-transfer-config", "start engines with the new weights; see howto-scale.md"),
    _refused("--enable-return-routed-experts --tokens-only", "replies do not have them", takes_value=False),
    _no_effect("--max-cpu-loras --lora-dtype", "adapters stay in memory as they are stored; see --max-loras"),
    _switch("--fully-sharded-loras --specialize-active-lora", "adapters cost what their rows take"),
    _refused("--default-mm-loras", PICTURES),
    _refused("--enable-tower-connector-lora", PICTURES, takes_value=False),
    _refused("--ssl-ciphers", TLS),
    _refused("--enable-ssl-refresh", TLS, takes_value=False),
    _refused("--return-tokens-as-token-ids", "set return_token_ids in a request", takes_value=False),
    _refused("--enable-force-include-usage", "set stream_options.include_usage in a request", takes_value=False),
    _refused("--headless", ONE_RANK, takes_value=False),
)  # fmt: skip

SPECULATION_WITHOUT_EFFECT = frozenset(
    "draft_tensor_parallel_size revision code_revision disable_by_batch_size enforce_eager attention_backend "
    "moe_backend draft_sample_method rejection_sample_method disable_padded_drafter_batch parallel_drafting "
    "disable_logprobs acceptance_method posterior_threshold posterior_alpha use_local_argmax_reduction "
    "draft_load_config tensor_parallel_size".split()
)
"""Fields of vLLM's speculative_config that change the speed alone, or that have nothing to set here."""
