"""The flags of llama-server that are not headrace's own: see `settings`.

docs/from-llama-server.md is written from this table. Read by `headrace.other_engines`. Sampling flags become the
server's defaults, which a request overrides.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from headrace.migration import settings
from headrace.migration.settings import (
    LLAMA_SERVER,
    ROPE,
    SAMPLING,
    SPECULATION,
    TEMPLATE_VARIABLES,
    NoEffectError,
    RefusedError,
    Setting,
    number,
    read_text,
    share,
    whole,
    words,
)
from headrace.migration.vllm import NO_TOOLS, ONE_RANK, PICTURES

CACHE_TYPES = {
    "f32": "float32", "f16": "float16", "bf16": "bfloat16", "q8_0": "int8", "q5_0": "int8", "q5_1": "int8",
    "q4_0": "int4", "q4_1": "int4", "iq4_nl": "int4",
}  # fmt: skip
SAMPLERS = {
    "e": "penalties", "d": "dry", "s": "top_n_sigma", "k": "top_k", "y": "typ_p", "p": "top_p", "m": "min_p",
    "x": "xtc", "t": "temperature", "a": "adaptive_p",
}  # fmt: skip
"""The letters of --sampling-seq."""
DRAFTERS = {
    "draft-simple": "draft_model", "draft-eagle3": "eagle3", "draft-mtp": "mtp", "ngram-simple": "ngram",
    "ngram-map-k": "ngram", "ngram-map-k4v": "ngram", "ngram-mod": "ngram", "ngram-cache": "ngram",
}  # fmt: skip
METADATA = {
    "context_length": "max_position_embeddings",
    "rope.freq_base": "rope_theta",
    "rope.scaling.type": "rope_scaling.rope_type",
    "rope.scaling.factor": "rope_scaling.factor",
    "rope.scaling.original_context_length": "rope_scaling.original_max_position_embeddings",
    "expert_used_count": "num_experts_per_tok",
    "attention.sliding_window": "sliding_window",
    "attention.layer_norm_rms_epsilon": "rms_norm_eps",
    "final_logit_softcapping": "final_logit_softcapping",
}
"""Keys of a GGUF file, after the architecture's name, and the place in config.json."""
TYPES: dict[str, Callable[[str], Any]] = {
    "int": whole,
    "float": number,
    "bool": lambda word: word == "true",
    "str": str,
}


def _cache_type(text: str) -> str:
    """Return our name of the type of a KV cache: the nearest with at least as many bits, but of q4_1 and iq4_nl."""
    return CACHE_TYPES.get(text, text)


def _samplers(text: str) -> list[str]:
    return [name.strip() for name in text.split(";") if name.strip()]


def _sequence(text: str) -> list[str]:
    return [SAMPLERS.get(letter, letter) for letter in text]


def _bias(text: str) -> dict[str, float]:
    match = re.fullmatch(r"(\d+)([+-].+)", text)
    if match is None:
        raise ValueError("a token id and a bias, such as 15043+1 or 2-inf")
    # A bias beyond 100 decides like one of 100.
    return {match[1]: max(-100.0, min(100.0, number(match[2])))}


def _metadata(text: str) -> dict[str, Any]:
    """Return the values of config.json for KEY=TYPE:VALUE,... of a GGUF file."""
    values: dict[str, Any] = {}
    for part in words(text):
        key, _, typed = part.partition("=")
        kind, _, value = typed.partition(":")
        if kind not in TYPES:
            raise ValueError("KEY=TYPE:VALUE, with one of the types int, float, bool, str")
        place = METADATA.get(key.partition(".")[2])
        if place is None:
            raise RefusedError(
                f"{key} can not be changed at the start; write it into a copy of the file with llama.cpp's "
                "gguf_set_metadata.py, or set a value of config.json with --hf-overrides"
            )
        at = values
        *outer, last = place.split(".")
        for name in outer:
            at = at.setdefault(name, {})
        at[last] = TYPES[kind](value)
    return values


def _reasoning_format(text: str) -> str:
    if text == "deepseek-legacy":
        raise NoEffectError("the reasoning is in reasoning_content alone; with none it stays in the content")
    if text != "none":
        raise ValueError("one of none, auto, deepseek, deepseek-legacy")
    return "none"


def _reasoning(text: str) -> dict[str, bool | str]:
    if text not in ("on", "off"):
        raise ValueError("one of on, off, auto")
    mode = "enabled" if text == "on" else "disabled"
    return {"enable_thinking": text == "on", "thinking": text == "on", "thinking_mode": mode}


def _drafter(text: str) -> str:
    """Return the first method that headrace has."""
    names = words(text)
    known = next((DRAFTERS[name] for name in names if name in DRAFTERS), None)
    if known is None:
        raise RefusedError("see --speculative-config for the methods that there are")
    return known


def _drafts(text: str) -> int:
    """Return the number of guesses: at most the 64 that are verified together here."""
    if whole(text) < 1:
        raise NoEffectError("leave out the model that drafts")
    return min(whole(text), 64)


def _adapters(text: str) -> list[str]:
    """Return adapters for --lora-modules, which requests use that name the model itself."""
    return [_adapter(path, 1.0) for path in words(text)]


def _scaled_adapters(text: str) -> list[str]:
    adapters = []
    for each in words(text):
        path, colon, scale = each.rpartition(":")
        if not colon or not path:
            raise ValueError("PATH:SCALE, several with commas, or PATH SCALE")
        adapters.append(_adapter(path, number(scale)))
    return adapters


def _adapter(path: str, scale: float) -> str:
    """Return an adapter as JSON: its name is that of the file or folder."""
    name = Path(path).stem if path.endswith(".gguf") else Path(path).name
    return json.dumps({"name": name, "path": path, "scale": scale})


def _slower(text: str) -> float:
    return 1.0 / number(text) if number(text) else 1.0


def _only(text: str) -> str:
    """Return nothing: these values are neutral where the known scaling is YaRN."""
    raise RefusedError(f"set attention_factor, beta_fast or beta_slow by --hf-overrides ({text} has no place there)")


def _threads(text: str) -> str:
    return "0" if text == "-1" else text


def _device(text: str) -> str:
    """Return our name of a device. Of several the first computes."""
    first = text.partition(",")[0]
    match = re.fullmatch(r"CUDA(\d+)", first)
    if match is None and re.fullmatch(r"[A-Z]\w*\d+", first):
        raise NoEffectError("see --device for those that there are")
    return f"cuda:{match[1]}" if match else {"none": "cpu"}.get(first, text)


_done, _no_effect, _switch, _refused = settings.makers(LLAMA_SERVER)
_GPU = "a model is not split between CPU and GPU; see --backend and --device"
_MAPPED = "packed files and GGUF files are mapped into memory"
LORA = "lora_modules"
NO_MMPROJ = "no tower is read from a GGUF file as yet: pictures need the model's safetensors folder"
_TAKES_LORA = (("enable_lora", "true"),)
_LOG = "see --uvicorn-log-level and --log-format"
_PINNED = "start the server under taskset or nice"
_LOOKUP = "see --speculative-config, method ngram"
_DRAFTER = "the drafter runs like the model"
_ON_OFF = ("on", "off", "auto", "0", "1", "true", "false")
_PAGE = "see --inspector for the web page"
_SLOTS = "requests have no slots of their own; see --max-num-seqs"

LLAMA_SERVER_SETTINGS: tuple[Setting, ...] = (
    _done("-m", "model"),
    _done("-hf -hfr --hf-repo", "model"),
    _done("-c --ctx-size", "max_model_len", neutral=("0",)),
    _done("--kv-unified-per-slot", "max_model_len"),
    _done("-t --threads", "num_threads", convert=_threads),
    _done("--ssl-cert-file", "ssl_certfile"),
    _done("--ssl-key-file", "ssl_keyfile"),
    _done("--api-prefix", "root_path", why="the routes stay where they are without it, too"),
    _done("--device", "device", convert=_device, why="none is cpu, and CUDA0 is cuda:0"),
    _done("-np --parallel", "max_num_seqs", neutral=("-1",)),
    _done("-b --batch-size", "max_num_batched_tokens"),
    _done("-a --alias", "served_model_name", convert=words),
    _done("-ctk --cache-type-k", "kv_cache_dtype", convert=_cache_type, why="one type for both, that with more bits"),
    _done("-ctv --cache-type-v", "kv_cache_dtype", convert=_cache_type, why="one type for both, that with more bits"),
    _done("--chat-template-file", "chat_template"),
    _done("--chat-template-kwargs", TEMPLATE_VARIABLES, convert=settings.json_object),
    _done("-rea --reasoning", TEMPLATE_VARIABLES, convert=_reasoning, neutral=("auto",),
          why="enable_thinking, thinking and thinking_mode"),
    _done("--reasoning-effort", f"{TEMPLATE_VARIABLES}.reasoning_effort", convert=str, neutral=("default",)),
    _done("--reasoning-format", "reasoning_parser", convert=_reasoning_format, neutral=("auto", "deepseek"),
          why="none leaves the reasoning in the content; auto and deepseek part it"),
    _done("--reasoning-budget", f"{SAMPLING}.thinking_token_budget", convert=whole, neutral=("-1",)),
    _done("--skip-chat-parsing", "tool_call_parser", fixed="none", also=(("reasoning_parser", "none"),),
          takes_value=False, why="and --reasoning-parser none"),
    _done("--log-jsonl", "log_format", fixed="json", takes_value=False),
    _done("-v --verbose --log-verbose", "uvicorn_log_level", fixed="debug", takes_value=False),
    _done("--no-cache-prompt", "enable_prefix_caching", fixed="false", takes_value=False),
    _done("--cors-origins", "allowed_origins", convert=words),
    _done("-s", f"{SAMPLING}.seed", convert=whole, neutral=("-1",), why="--seed has vLLM's meaning"),
    _done("-n --predict --n-predict", f"{SAMPLING}.max_tokens", convert=whole, neutral=("-1", "-2")),
    _done("--temp --temperature", f"{SAMPLING}.temperature", convert=number),
    _done("--top-k", f"{SAMPLING}.top_k", convert=whole),
    _done("--top-p", f"{SAMPLING}.top_p", convert=share),
    _done("--min-p", f"{SAMPLING}.min_p", convert=number),
    _done("--typical --typical-p", f"{SAMPLING}.typical_p", convert=share),
    _done("--top-nsigma --top-n-sigma", f"{SAMPLING}.top_n_sigma", convert=number),
    _done("--xtc-probability", f"{SAMPLING}.xtc_probability", convert=number),
    _done("--xtc-threshold", f"{SAMPLING}.xtc_threshold", convert=number),
    _done("--repeat-penalty", f"{SAMPLING}.repetition_penalty", convert=number),
    _done("--repeat-last-n", f"{SAMPLING}.repeat_last_n", convert=whole),
    _done("--presence-penalty", f"{SAMPLING}.presence_penalty", convert=number),
    _done("--frequency-penalty", f"{SAMPLING}.frequency_penalty", convert=number),
    _done("--dry-multiplier", f"{SAMPLING}.dry_multiplier", convert=number),
    _done("--dry-base", f"{SAMPLING}.dry_base", convert=number),
    _done("--dry-allowed-length", f"{SAMPLING}.dry_allowed_length", convert=whole),
    _done("--dry-penalty-last-n", f"{SAMPLING}.dry_penalty_last_n", convert=whole),
    _done("--dry-sequence-breaker", f"{SAMPLING}.dry_sequence_breakers+", convert=str),
    _done("--mirostat", f"{SAMPLING}.mirostat", convert=whole),
    _done("--mirostat-lr", f"{SAMPLING}.mirostat_eta", convert=number),
    _done("--mirostat-ent", f"{SAMPLING}.mirostat_tau", convert=number),
    _done("--dynatemp-range", f"{SAMPLING}.dynatemp_range", convert=number),
    _done("--dynatemp-exp", f"{SAMPLING}.dynatemp_exponent", convert=number),
    _done("--adaptive-target", f"{SAMPLING}.adaptive_target", convert=number),
    _done("--adaptive-decay", f"{SAMPLING}.adaptive_decay", convert=number),
    _done("--samplers", f"{SAMPLING}.samplers", convert=_samplers),
    _done("--sampler-seq --sampling-seq", f"{SAMPLING}.samplers", convert=_sequence),
    _done("-l --logit-bias", f"{SAMPLING}.logit_bias", convert=_bias),
    _done("--ignore-eos", f"{SAMPLING}.ignore_eos", fixed="true", takes_value=False),
    _done("-r --reverse-prompt", f"{SAMPLING}.stop+", convert=str),
    _done("-sp --special", f"{SAMPLING}.skip_special_tokens", fixed="false", takes_value=False),
    _done("--grammar", f"{SAMPLING}.structured_outputs.grammar", convert=str),
    _done("--grammar-file", f"{SAMPLING}.structured_outputs.grammar", convert=read_text),
    _done("-j --json-schema", f"{SAMPLING}.structured_outputs.json", convert=settings.json_object),
    _done("-jf --json-schema-file", f"{SAMPLING}.structured_outputs.json",
          convert=lambda path: settings.json_object(read_text(path))),
    _done("-md --model-draft --spec-draft-model -hfd -hfrd --hf-repo-draft --spec-draft-hf", f"{SPECULATION}.model",
          convert=str),
    _done("--draft-max --draft --draft-n --spec-draft-n-max --spec-ngram-mod-n-max",
          f"{SPECULATION}.num_speculative_tokens", convert=_drafts, why="at most 64"),
    _done("--spec-type", f"{SPECULATION}.method", convert=_drafter, neutral=("none",),
          why="the first of the list that there is: " + ", ".join(DRAFTERS)),
    _done("--spec-default", f"{SPECULATION}.method", fixed='"ngram"', takes_value=False),
    _done("--rope-scaling", ROPE, convert=settings.rope_scaling),
    _done("--rope-scale", f"{ROPE}.factor", convert=number, neutral=("0",)),
    _done("--rope-freq-scale", f"{ROPE}.factor", convert=_slower, neutral=("0", "1", "1.0")),
    _done("--rope-freq-base", "hf_overrides.rope_theta", convert=number, neutral=("0", "0.0")),
    _done("--yarn-orig-ctx", f"{ROPE}.original_max_position_embeddings", convert=whole, neutral=("0",)),
    _done("--yarn-beta-slow", f"{ROPE}.beta_slow", convert=number, neutral=("-1", "-1.0")),
    _done("--yarn-beta-fast", f"{ROPE}.beta_fast", convert=number, neutral=("-1", "-1.0")),
    _done("--yarn-ext-factor --yarn-attn-factor", ROPE, convert=_only, neutral=("-1", "-1.0", "1", "1.0"),
          why="with -1 or 1; others are refused"),
    _done("--override-kv", "hf_overrides", convert=_metadata, why="of " + ", ".join(METADATA)),
    _no_effect("--draft-min --draft-n-min --spec-draft-n-min --spec-ngram-mod-n-min --spec-ngram-mod-n-match",
               "a guess is as long as it pays"),
    _no_effect("--draft-p-min --spec-draft-p-min --draft-p-split --spec-draft-p-split",
               "a guess is as long as it pays"),
    _no_effect("--spec-draft-sampling", "see --speculative-config, mode"),
    _no_effect("-td --threads-draft --spec-draft-threads -tbd --threads-batch-draft --spec-draft-threads-batch",
               _DRAFTER),
    _no_effect("-ngld --gpu-layers-draft --n-gpu-layers-draft --spec-draft-ngl", _DRAFTER),
    _no_effect("-devd --device-draft --spec-draft-device", _DRAFTER),
    _no_effect("-cd --ctx-size-draft -ctkd --cache-type-k-draft --spec-draft-type-k", _DRAFTER),
    _no_effect("-ctvd --cache-type-v-draft --spec-draft-type-v", _DRAFTER),
    _no_effect("-ncmoed --n-cpu-moe-draft --spec-draft-n-cpu-moe --spec-draft-ncmoe -otd --override-tensor-draft",
               _DRAFTER),
    _switch("-cmoed --cpu-moe-draft --spec-draft-cpu-moe", _DRAFTER),
    _no_effect("-lcs --lookup-cache-static -lcd --lookup-cache-dynamic", _LOOKUP),
    _no_effect("--spec-ngram-simple-size-n --spec-ngram-simple-size-m --spec-ngram-simple-min-hits", _LOOKUP),
    _no_effect("--spec-ngram-map-k-size-n --spec-ngram-map-k-size-m --spec-ngram-map-k-min-hits", _LOOKUP),
    _no_effect("--spec-ngram-map-k4v-size-n --spec-ngram-map-k4v-size-m --spec-ngram-map-k4v-min-hits", _LOOKUP),
    _no_effect("-ngl --gpu-layers --n-gpu-layers -mg --main-gpu -sm --split-mode -ts --tensor-split -dev", _GPU),
    _no_effect("-ncmoe --n-cpu-moe -ncffn --n-cpu-ffn --moe-cache-mib -ot --override-tensor", _GPU),
    _switch("-cmoe --cpu-moe --no-op-offload --op-offload --no-host", _GPU),
    _switch("--kv-offload -kvo --no-kv-offload -nkvo", _GPU),
    _switch("-bs --backend-sampling", _GPU),
    _no_effect("-fit --fit", "the KV cache takes what the memory has free", may_follow=_ON_OFF),
    _no_effect("-fitt --fit-target -fitc --fit-ctx", "the KV cache takes what the memory has free"),
    _no_effect("--rpc", ONE_RANK),
    _no_effect("-ub --ubatch-size", "see --max-num-batched-tokens"),
    _no_effect("-tb --threads-batch", "one number of threads for all; see --num-threads"),
    _no_effect("-fa --flash-attn", "attention never stores its scores", may_follow=_ON_OFF),
    _switch("-cb --cont-batching -nocb --no-cont-batching", "requests are always batched so"),
    _switch("--jinja --no-jinja", "templates are always rendered by Jinja"),
    _switch("--props", "/props is always there to read"),
    _switch("--cache-prompt", "prefixes are always cached; see --enable-prefix-caching"),
    _no_effect("--cache-reuse", "only whole prefixes keep an answer's bits"),
    _no_effect("-cram --cache-ram", "the prefix cache takes what the KV cache has free; see --kv-cache-memory-bytes"),
    _switch("--cache-idle-slots --no-cache-idle-slots", "the prefix cache is of all requests"),
    _no_effect("-ctxcp --ctx-checkpoints --swa-checkpoints -cms --checkpoint-min-step",
               "blocks of the KV cache are kept, not checkpoints"),
    _switch("--swa-full", "blocks behind a window go, and cached prefixes are used as far as they are there"),
    _no_effect("-dt --defrag-thold", "blocks of the KV cache need no neighbours"),
    _switch("-kvu --kv-unified -no-kvu --no-kv-unified", "blocks of the KV cache are shared by all requests"),
    _no_effect("-sps --slot-prompt-similarity", _SLOTS),
    _switch("--context-shift --no-context-shift", "an answer ends where the context ends"),
    _no_effect("--keep", "an answer ends where the context ends"),
    _switch("--warmup --no-warmup", "the server generates a token before it is ready"),
    _switch("--embedding --embeddings --rerank --reranking", "one server generates, embeds and ranks"),
    _no_effect("--pooling", "set by the model, or in a request"),
    _no_effect("--embd-normalize", "set embd_normalize in a request", "2"),
    _switch("--spm-infill", "/infill has the order of the model's own tokens"),
    _no_effect("-lm --load-mode -lzm --lazy-mode", _MAPPED),
    _switch("--no-mmap --mlock --mmap -dio --direct-io --no-direct-io", _MAPPED),
    _switch("--check-tensors", "the sizes of tensors are always checked"),
    _no_effect("--numa", "start the server under numactl; see --data-parallel-size auto"),
    _no_effect("--prio --prio-batch -C --cpu-mask -Cr --cpu-range -Cb --cpu-mask-batch", _PINNED),
    _no_effect("-Crb --cpu-range-batch --cpu-strict --cpu-strict-batch", _PINNED),
    _no_effect("--poll --poll-batch", "threads wait by spinning shortly"),
    _switch("--verbose-prompt", "prompts are never logged, because they are private"),
    _switch("-e --escape --no-escape", "prompts come in requests, as they are"),
    _switch("--no-webui --no-ui --webui --ui", _PAGE),
    _no_effect("--path --ui-config --webui-config --ui-config-file --webui-config-file", _PAGE),
    _switch("--ui-mcp-proxy --webui-mcp-proxy --no-ui-mcp-proxy --no-webui-mcp-proxy", _PAGE),
    _switch("--models-autoload --no-models-autoload", "a POST loads the model that it names, and a GET none"),
    _switch("--offline", "set HF_HUB_OFFLINE=1 to forbid the network"),
    _no_effect("-to --timeout", "see --max-request-timeout"),
    _no_effect("--threads-http", "one thread serves HTTP"),
    _switch("--reuse-port", "one process listens at the port"),
    _no_effect("--sse-ping-interval", "a heartbeat is sent after ten seconds of silence"),
    _switch("--repack -nr --no-repack", "weights always take the kernels' layout"),
    _switch("--log-disable --log-prefix --log-timestamps --no-log-prefix --no-log-timestamps --no-log-jsonl", _LOG),
    _no_effect("--log-colors", "the log has no colours", may_follow=_ON_OFF),
    _no_effect("-lv --verbosity --log-verbosity", _LOG),
    _no_effect("--log-file", "the log goes to stderr"),
    _no_effect("--log-prompts-dir", "prompts are never logged, because they are private"),
    _switch("--perf --no-perf", "every reply has timings"),
    _no_effect("--reasoning-budget-message", "the reasoning ends without a message"),
    _switch("--reasoning-preserve --no-reasoning-preserve", "the chat template decides; see --chat-template-kwargs"),
    _no_effect("-mm --mmproj -mmu --mmproj-url -mmdev --mmproj-device --media-path", NO_MMPROJ),
    _no_effect("--image-min-tokens --image-max-tokens --mtmd-batch-max-tokens --video-fps", PICTURES),
    _no_effect("--video-timestamp-interval --video-ffmpeg-dir", PICTURES),
    _switch("--mmproj-auto --no-mmproj --no-mmproj-auto --mmproj-offload --no-mmproj-offload", PICTURES),
    _no_effect("--cors-methods --cors-headers", "see --allowed-origins"),
    _switch("--cors-credentials --no-cors-credentials", "see --allowed-origins"),
    _no_effect("--tools --tools-runtime --mcp-servers-config --mcp-servers-json", NO_TOOLS),
    _switch("-ag --agent -no-ag --no-agent", NO_TOOLS),
    _done("--lora", LORA, convert=_adapters, also=_TAKES_LORA),
    _done("--lora-scaled", LORA, convert=_scaled_adapters, also=_TAKES_LORA, takes_number=True),
    _done("--lora-init-without-apply", f"{LORA}.scale", takes_value=False, fixed="0", why="of all adapters"),
    _refused("--models-preset", "the flags hold for every model of the folder"),
    _refused("-mu --model-url -dr --docker-repo", "fetch the file, and give its path"),
    _refused("-hff --hf-file", "give the repository and the file as one path, or fetch the file"),
    _refused("-hft --hf-token", "set HF_TOKEN"),
    _refused("--control-vector --control-vector-scaled --control-vector-layer-range", "change the weights of a copy"),
    _refused("--gpt-oss-20b-default --gpt-oss-120b-default --vision-gemma-4b-default --vision-gemma-12b-default",
             "name the model", takes_value=False),
    _refused("--embd-gemma-default --fim-qwen-1.5b-default --fim-qwen-3b-default --fim-qwen-7b-default",
             "name the model", takes_value=False),
    _refused("--fim-qwen-7b-spec --fim-qwen-14b-spec --fim-qwen-30b-default", "name the model", takes_value=False),
)  # fmt: skip
