"""The generations of a take: `LLM` on every model type, number format and file format, and every parameter; and the
small random checkpoints that it reads, written with `transformers`.

Uses `LLM`, `SamplingParams`, `BeamSearchParams` and their outputs' public fields. `__main__` calls `write_all` once for
a folder (what is there already stays), and `take`.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import math
import re
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from headrace import LLM, BeamSearchParams, SamplingParams

if TYPE_CHECKING:
    from tests.campaigns.digests.__main__ import Record

ROOT = Path(__file__).resolve().parents[3]
REAL = ROOT.parent / "shared" / "data" / "models"
THREADS = 2
BLOCKS = 512

COMMON: dict[str, Any] = {
    "vocab_size": 199, "hidden_size": 48, "intermediate_size": 112, "num_hidden_layers": 2, "num_attention_heads": 6,
    "num_key_value_heads": 2, "max_position_embeddings": 512, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
GEMMA = {
    "num_hidden_layers": 4, "num_attention_heads": 4, "head_dim": 16, "query_pre_attn_scalar": 20, "sliding_window": 29,
}  # fmt: skip
LAYER_TYPES = ["sliding_attention", "sliding_attention", "full_attention", "sliding_attention"]
YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 128}

CONFIGS: dict[str, dict[str, Any]] = {
    "llama": {"model_type": "llama", "tie_word_embeddings": False} | COMMON,
    "mistral": {"model_type": "mistral", "head_dim": 12, "sliding_window": 37} | COMMON,
    "qwen2": COMMON | {"model_type": "qwen2", "num_hidden_layers": 3, "use_sliding_window": True, "sliding_window": 21,
                       "max_window_layers": 2, "tie_word_embeddings": True},
    "qwen3": COMMON | {"model_type": "qwen3", "num_attention_heads": 4, "head_dim": 20, "tie_word_embeddings": False},
    "gemma2": COMMON | GEMMA | {"model_type": "gemma2", "attn_logit_softcapping": 50.0,
                                "final_logit_softcapping": 30.0},
    "gemma3_text": COMMON | GEMMA | {"model_type": "gemma3_text", "num_key_value_heads": 1,
                                     "query_pre_attn_scalar": 16, "layer_types": LAYER_TYPES},
    "gpt2": {"model_type": "gpt2", "vocab_size": 199, "n_embd": 48, "n_layer": 2, "n_head": 4, "n_positions": 512,
             "bos_token_id": 1, "eos_token_id": 2},
    "mixtral": COMMON | {"model_type": "mixtral", "intermediate_size": 80, "num_local_experts": 5,
                         "num_experts_per_tok": 2},
    "yarn": COMMON | {"model_type": "llama", "rope_parameters": YARN, "attention_bias": True},
    "wide": COMMON | {"model_type": "llama", "hidden_size": 256, "intermediate_size": 512, "num_attention_heads": 4,
                      "tie_word_embeddings": False},
}  # fmt: skip
"""The eight model types, a llama with a scaled rope and biases, and one wide enough for groups of 256 inputs."""

# Lengths below, at and above a block, and beyond the windows of attention.
PROMPTS = [[(5 * i * i + 7 * i + 11 * k) % 196 + 3 for i in range(length)] for k, length in enumerate((3, 16, 41, 150))]
TEXTS = [
    "Once upon a time",
    "The dog ran to the park. The dog ran to the",
    'Tom said: "Hello',
    "Lily had a red ball.\n",
]
LINES = (
    "One day, a boy named Tim found a big box. The box was red. Tim wanted to open the box. He asked his mom to help. "
) * 3

QUANTIZATIONS = (
    "int4", "int4-g32", "int4-g64", "int4-g128", "int4-g32-asym", "int4-g64-asym", "int4-g128-asym",
    "int6", "int8", "int8-channel", "int8-g128", "fp8-channel", "fp8-g128", "nf4", "mxfp4", "iq4_nl", "none",
)  # fmt: skip
KV_DTYPES = ("float32", "bfloat16", "float16", "int8", "int8_dot", "int4", "fp8", "fp8_e4m3", "fp8_e5m2")

GREEDY = {"temperature": 0.0, "max_tokens": 12, "logprobs": 3, "ignore_eos": True}
SAMPLED = {"temperature": 0.9, "top_p": 0.95, "seed": 7, "max_tokens": 12, "logprobs": 2, "prompt_logprobs": 2}
PLAIN: dict[str, dict[str, Any]] = {"greedy": GREEDY, "sampled": SAMPLED}

SAMPLERS: dict[str, dict[str, Any]] = {
    "temperature-0": {"temperature": 0.0}, "temperature-0.3": {"temperature": 0.3}, "temperature-2": {"temperature": 2},
    "top_p": {"top_p": 0.6}, "top_k": {"top_k": 5}, "top_k-1": {"top_k": 1}, "min_p": {"min_p": 0.1},
    "typical_p": {"typical_p": 0.5}, "top_n_sigma": {"top_n_sigma": 1.0},
    "repetition_penalty": {"repetition_penalty": 1.5}, "frequency_penalty": {"frequency_penalty": 1.2},
    "presence_penalty": {"presence_penalty": 1.7}, "repetition_penalty-low": {"repetition_penalty": 0.7},
    "repeat_last_n": {"repetition_penalty": 1.8, "repeat_last_n": 4},
    "repeat_last_n-0": {"repetition_penalty": 1.8, "repeat_last_n": 0},
    "dry": {"dry_multiplier": 2.0}, "dry-all": {
        "dry_multiplier": 3.0, "dry_base": 2.0, "dry_allowed_length": 1, "dry_penalty_last_n": 16,
        "dry_sequence_breakers": [".", "the"]},
    "xtc": {"xtc_probability": 1.0}, "xtc-half": {"xtc_probability": 0.5, "xtc_threshold": 0.05},
    "mirostat-1": {"mirostat": 1}, "mirostat-2": {"mirostat": 2, "mirostat_tau": 2.0, "mirostat_eta": 0.3},
    "dynatemp": {"dynatemp_range": 0.5, "dynatemp_exponent": 1.5},
    "adaptive": {"adaptive_target": 0.3, "min_p": 0.02},
    "adaptive-decay": {"adaptive_target": 0.6, "adaptive_decay": 0.5, "min_p": 0.02},
    "logit_bias": {"logit_bias": {264: 5.0, 17: -100.0}},
    "allowed_token_ids": {"allowed_token_ids": [17, 19, 264, 267, 411, 297]},
    "bad_words": {"bad_words": ["the", "a", " little girl"]},
    "no_repeat_ngram_size": {"no_repeat_ngram_size": 2, "temperature": 0.0, "max_tokens": 40},
    "thinking_token_budget": {"thinking_token_budget": 3},
    "trace": {"trace_decode_token_ids": [17, 411, 297, 264, 1, 19]},
    "watermark": {"watermark": True},
    "watermark-key": {"watermark": {"gamma": 0.4, "delta": 4.0, "hashing_key": 77}},
    "samplers": {"samplers": ["top_k", "temperature"], "top_k": 4, "temperature": 1.5},
    "samplers-llama": {
        "samplers": ["penalties", "dry", "top_n_sigma", "top_k", "typ_p", "top_p", "min_p", "xtc", "temperature"],
        "top_k": 40, "typical_p": 0.9, "top_p": 0.9, "min_p": 0.02, "temperature": 0.8, "repetition_penalty": 1.1},
    "samplers-none": {"samplers": [], "temperature": 0.0},
    "stop": {"stop": ["."], "max_tokens": 60}, "stop-list": {"stop": ["and", " the"], "max_tokens": 60},
    "stop-kept": {"stop": ["and", "."], "include_stop_str_in_output": True, "max_tokens": 60},
    "stop_token_ids": {"stop_token_ids": [19, 17], "max_tokens": 60},
    "min_tokens": {"min_tokens": 20, "stop_token_ids": [19, 17], "max_tokens": 40},
    "min_tokens-stop": {"min_tokens": 12, "stop": ["."], "max_tokens": 40},
    "max_tokens-1": {"max_tokens": 1}, "max_tokens-none": {"max_tokens": None},
    "ignore_eos": {"ignore_eos": True, "max_tokens": 200, "temperature": 0.5},
    "detokenize": {"detokenize": False}, "special": {"skip_special_tokens": False, "max_tokens": 150},
    "spaces": {"spaces_between_special_tokens": False, "skip_special_tokens": False, "max_tokens": 150},
    "speculation": {"speculation": False},
    "logprobs-0": {"logprobs": 0, "prompt_logprobs": 0}, "logprobs-20": {"logprobs": 20, "prompt_logprobs": 5},
    "n": {"n": 3}, "n-greedy": {"n": 2, "temperature": 0.0}, "best_of": {"n": 2, "best_of": 4, "logprobs": 1},
    "bad_words_token_ids": {"bad_words_token_ids": [[17], [264, 419]]},
    "processor": {"logits_processors": [lambda prompt, ids, logits: logits * (1.0 if len(ids) % 2 else 0.5)]},
}  # fmt: skip
MIXES = (
    ("penalties", {"repetition_penalty": 1.2, "frequency_penalty": 0.4, "presence_penalty": -0.3, "repeat_last_n": 9}),
    ("filters", {"top_k": 30, "top_p": 0.9, "min_p": 0.02, "typical_p": 0.9, "top_n_sigma": 2.0}),
    ("scale", {"temperature": 0.8, "dynatemp_range": 0.3, "xtc_probability": 0.5, "dry_multiplier": 1.0}),
    ("bans", {"bad_words": ["girl"], "no_repeat_ngram_size": 3, "min_tokens": 8, "logit_bias": {297: 1.5}}),
    ("texts", {"stop": ["!", "?"], "include_stop_str_in_output": True, "watermark": True, "n": 2}),
)  # fmt: skip

PET = {
    "type": "object", "additionalProperties": False, "required": ["name", "age", "kind"],
    "properties": {
        "name": {"type": "string", "maxLength": 12}, "age": {"type": "integer", "minimum": 0, "maximum": 30},
        "kind": {"enum": ["cat", "dog", None]}, "tags": {"type": "array", "items": {"type": "boolean"}, "maxItems": 3}},
}  # fmt: skip
GBNF = 'root ::= "yes " word | "no " word\nword ::= [a-z]+ "."'
LARK = 'start: "it " VERB " " WORD\nVERB: "is" | "was"\nWORD: /[a-z]{2,8}/'
FORMS: dict[str, dict[str, Any]] = {
    "json": {"json": PET}, "json-tight": {"json": PET, "disable_any_whitespace": True},
    "json-blank": {"json": PET, "whitespace_pattern": "[ ]?"}, "json-text": {"json": '{"type": "boolean"}'},
    "json-not": {"json": {"type": "object", "properties": {"a": {"type": "integer", "not": {"const": 3}}},
                          "required": ["a"], "additionalProperties": False}},
    "json-one-of": {"json": {"oneOf": [{"type": "integer", "maximum": 5}, {"type": "string", "maxLength": 4}]}},
    "json-format": {"json": {"type": "string", "format": "date"}},
    "json-closed": {"json": {"type": "object", "properties": {"b": {"type": "null"}}},
                    "disable_additional_properties": True},
    "json_object": {"json_object": True}, "regex": {"regex": r"[A-Z][a-z]{2,6} (was|is) \d{1,3}\."},
    "choice": {"choice": ["cat", "dog", "a small bird"]}, "gbnf": {"grammar": GBNF}, "lark": {"grammar": LARK},
    "tag": {"structural_tag": '{"type": "structural_tag", "structures": [{"begin": "<f>", "schema": '
            '{"type": "boolean"}, "end": "</f>"}], "triggers": ["<f>"]}'},
    "refused-unique": {"json": {"type": "array", "uniqueItems": True}}, "refused-regex": {"regex": "(?=a)b"},
    "refused-grammar": {"grammar": "root ::= nothing"}, "refused-reference": {"json": {"$ref": "http://a/b"}},
}  # fmt: skip

METHODS: dict[str, dict[str, Any]] = {
    name: {"num_speculative_tokens": 4} for name in
    ("ngram", "suffix", "lookahead", "draft_model", "early_exit", "medusa", "eagle", "eagle3", "mtp")
} | {
    "eagle-tree": {"method": "eagle", "num_speculative_tokens": 4, "num_tree_nodes": 12, "tree_width": 3},
    "medusa-tree": {"method": "medusa", "num_speculative_tokens": 4, "num_tree_nodes": 12},
    "draft_model-tree": {"method": "draft_model", "num_speculative_tokens": 3, "num_tree_nodes": 8},
    "ngram-long": {"method": "ngram", "num_speculative_tokens": 12, "prompt_lookup_min": 1, "prompt_lookup_max": 3},
    "suffix-shared": {"method": "suffix", "suffix_decoding_max_cached_requests": 8},
    "eagle-int8": {"method": "eagle", "num_speculative_tokens": 3, "quantization": "int8"},
}  # fmt: skip


def write_all(directory: Path) -> None:
    """Write each checkpoint that `directory` lacks. The weights depend on the name's config alone."""
    for seed, (name, config) in enumerate(CONFIGS.items()):
        done = directory / name / "config.json"
        if not done.is_file() or not (directory / name / "model.safetensors").is_file():
            write_random(directory / name, config, seed)


def write_random(directory: Path, config: dict[str, Any], seed: int) -> None:
    """Write a checkpoint with weights that give logits of about unit size, float32."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    model = AutoModelForCausalLM.from_config(
        AutoConfig.for_model(**config), attn_implementation="eager", dtype=torch.float32
    ).eval()
    generator = torch.Generator().manual_seed(seed)
    scale = 1.4 / math.sqrt(config.get("hidden_size", 48))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            if parameter.dim() > 1:
                parameter.copy_(noise * scale)
            else:
                parameter.copy_(parameter + 0.3 * noise if "norm" in name or "ln_" in name else 0.5 * noise)
    directory.mkdir(parents=True, exist_ok=True)
    model.save_pretrained(directory)
    (directory / "generation_config.json").write_text(json.dumps({"eos_token_id": 2}))


def exact(value: float | None) -> str | None:
    """The bits of a number, as readable hexadecimal."""
    return None if value is None else float(value).hex()


def logprobs_of(entries: Any) -> Any:
    if entries is None:
        return None
    return [
        entry and [[token_id, exact(item.logprob), item.rank, item.decoded_token] for token_id, item in entry.items()]
        for entry in entries
    ]


def plain(output: Any) -> dict[str, Any]:
    """A `RequestOutput` without times and its number."""
    return {
        "prompt": output.prompt,
        "prompt_token_ids": list(output.prompt_token_ids),
        "finished": output.finished,
        "num_cached_tokens": output.num_cached_tokens,
        "prompt_logprobs": logprobs_of(output.prompt_logprobs),
        "outputs": [
            {
                "index": one.index, "text": one.text, "token_ids": list(one.token_ids),
                "cumulative_logprob": exact(one.cumulative_logprob), "logprobs": logprobs_of(one.logprobs),
                "finish_reason": one.finish_reason, "stop_reason": one.stop_reason, "seed": one.seed,
            } for one in output.outputs
        ],
    }  # fmt: skip


def error_of(error: Exception) -> dict[str, str]:
    """What a caller sees of an error. Folders differ between machines: only their last two names are kept."""
    return {"error": type(error).__name__, "text": re.sub(r"/\S*/(?=[^/\s]+/[^/\s]*)", "<path>/", str(error))}


def attempt(call: Callable[[], Any]) -> Any:
    try:
        return call()
    except Exception as error:
        return error_of(error)


class Engines:
    """Opens engines one after the other, and records what they give."""

    def __init__(self, record: Record) -> None:
        self.record = record

    def generate(
        self, name: str, model: str, prompts: list[Any], params: dict[str, dict[str, Any]], **options: Any
    ) -> None:
        """Each prompt under each of `params` alone, then all in one batch, on an engine of its own."""

        def both(llm: LLM) -> None:
            result = {
                title: attempt(lambda fields=fields: SamplingParams(**fields)) for title, fields in params.items()
            }
            requests = []
            for (title, one), (place, prompt) in itertools.product(result.items(), enumerate(prompts)):
                if isinstance(one, dict):
                    self.record.add(f"{name}/{title}/{place}", one, "errors")
                    continue
                value = self.note(
                    f"{name}/{title}/{place}/alone",
                    lambda prompt=prompt, one=one: plain(llm.generate(prompt, one)[0]),  # type: ignore[misc]
                )
                if "error" not in value:
                    requests.append((f"{name}/{title}/{place}/batch", prompt, one))
            llm.reset_prefix_cache()
            outputs = attempt(lambda: llm.generate([r[1] for r in requests], [r[2] for r in requests]))
            if isinstance(outputs, dict):
                self.record.add(f"{name}/batch", outputs, "errors")
                return
            for (title, _, _), output in zip(requests, outputs, strict=True):
                self.record.add(title, plain(output), "generations")

        self.use(name, model, both, **options)

    def note(self, name: str, call: Callable[[], dict[str, Any]]) -> dict[str, Any]:
        """Record what a call gives or raises, and return it."""
        value: dict[str, Any] = attempt(call)
        self.record.add(name, value, "errors" if "error" in value else "generations")
        return value

    def use(self, name: str, model: str, call: Callable[[LLM], None], **options: Any) -> None:
        """Open `model`, run `call` on it and close it; record what the start raises."""
        if not self.record.wants(name):
            return
        fields = {"num_threads": THREADS, "num_gpu_blocks_override": BLOCKS, "seed": 3} | options
        try:
            llm = LLM(model, **fields)
        except Exception as error:
            self.record.add(f"{name}/start", error_of(error), "errors")
            return
        try:
            call(llm)
        finally:
            llm.close()


def take(record: Record, models: Path, work: Path) -> None:
    """Record all cases under offline/."""
    if not record.wants("offline/"):
        return
    engines = Engines(record)
    take_models(engines, models)
    take_formats(engines, models)
    take_samplers(engines)
    take_forms(engines)
    take_speculation(engines, models)
    take_calls(engines, models)
    take_bounds(engines.record)


def take_models(engines: Engines, models: Path) -> None:
    for name in CONFIGS:
        weights = hashlib.sha256((models / name / "model.safetensors").read_bytes()).hexdigest()
        engines.record.add(f"offline/models/{name}/weights", weights, "files")
        engines.generate(f"offline/models/{name}", str(models / name), PROMPTS, PLAIN)
    for name in ("llama", "gemma2", "gpt2", "mixtral", "yarn"):
        engines.generate(f"offline/torch_ref/{name}", str(models / name), PROMPTS[:3], PLAIN, backend="torch_ref")
    for dtype in ("float32", "bfloat16", "float16"):
        for name in ("llama", "gemma3_text"):
            engines.generate(f"offline/dtype/{dtype}/{name}", str(models / name), PROMPTS[1:3], PLAIN, dtype=dtype)
    scheduled = {
        "chunks": {"max_num_batched_tokens": 32, "long_prefill_token_threshold": 8},
        "whole": {"enable_chunked_prefill": False},
        "few": {"max_num_seqs": 2},
        "cold": {"enable_prefix_caching": False},
        "small": {"num_gpu_blocks_override": 24, "max_model_len": 200},
        "blocks-8": {"block_size": 8},
        "priority": {"scheduling_policy": "priority"},
        "fair": {"scheduling_policy": "fair"},
    }
    for name, options in scheduled.items():
        engines.generate(f"offline/scheduler/{name}", str(models / "qwen3"), PROMPTS, PLAIN, **options)
    for name in ("builtin", str(REAL / "TinyStories-656K")):
        engines.generate(f"offline/real/{Path(name).name}", name, TEXTS, PLAIN)
    engines.generate("offline/real/stories260K-hf", str(REAL / "derived" / "stories260K-hf"), PROMPTS, PLAIN)


def take_formats(engines: Engines, models: Path) -> None:
    wide = str(models / "wide")
    for quantization in QUANTIZATIONS:
        engines.generate(f"offline/quantization/{quantization}", wide, PROMPTS[1:3], PLAIN, quantization=quantization)
    for quantization in ("int8", "int4"):
        name = f"offline/quantization/{quantization}"
        engines.generate(f"{name}/builtin", "builtin", TEXTS[:2], PLAIN, quantization=quantization)
        engines.generate(f"{name}/mixtral", str(models / "mixtral"), PROMPTS[:2], PLAIN, quantization=quantization)
        options = {"quantization": quantization, "backend": "torch_ref"}
        engines.generate(f"{name}/torch_ref", wide, PROMPTS[:2], PLAIN, **options)
    for dtype in KV_DTYPES:
        engines.generate(f"offline/kv/{dtype}", wide, PROMPTS[2:], PLAIN, kv_cache_dtype=dtype)
        engines.generate(f"offline/kv/{dtype}/builtin", "builtin", TEXTS[1:2], PLAIN, kv_cache_dtype=dtype)
    engines.generate("offline/kv/int8/torch_ref", wide, PROMPTS[1:3], PLAIN, kv_cache_dtype="int8", backend="torch_ref")
    for path in sorted((REAL / "derived" / "gguf").glob("*.gguf")):
        engines.generate(f"offline/gguf/{path.stem}", str(path), TEXTS[:2], PLAIN)
        if path.stem.endswith(("Q4_0", "Q8_0")):
            engines.generate(f"offline/gguf/{path.stem}/none", str(path), TEXTS[:1], PLAIN, quantization="none")


def take_samplers(engines: Engines) -> None:
    base = {"seed": 5, "max_tokens": 24}
    engines.generate("offline/sampling", "builtin", TEXTS[:2], {k: base | v for k, v in SAMPLERS.items()})
    pairs = {f"{a}+{b}": base | first | second for (a, first), (b, second) in itertools.combinations(MIXES, 2)} | {
        "all": base | {key: value for _, fields in MIXES for key, value in fields.items()}
    }
    engines.generate("offline/mixes", "builtin", TEXTS[1:3], pairs)


def take_forms(engines: Engines) -> None:
    base = {"seed": 9, "max_tokens": 48}
    params = {name: base | {"structured_outputs": form} for name, form in FORMS.items()}
    params |= {f"{name}-greedy": base | {"structured_outputs": FORMS[name], "temperature": 0.0, "logprobs": 1}
               for name in ("json", "regex", "choice", "gbnf", "lark")}  # fmt: skip
    params["json-short"] = base | {"structured_outputs": FORMS["json"], "max_tokens": 5}
    params["json-ignore-eos"] = base | {"structured_outputs": FORMS["json"], "ignore_eos": True}
    params["choice-min"] = base | {"structured_outputs": FORMS["choice"], "min_tokens": 30}
    params["regex-mirostat"] = base | {"structured_outputs": FORMS["regex"], "mirostat": 2}
    engines.generate("offline/forms", "builtin", TEXTS[:1] + TEXTS[2:3], params)


def take_speculation(engines: Engines, models: Path) -> None:
    params = {"greedy": {"temperature": 0.0, "max_tokens": 40}, "sampled": {"seed": 4, "max_tokens": 40, "logprobs": 1},
              "form": {"seed": 6, "max_tokens": 40, "structured_outputs": FORMS["json"]}}  # fmt: skip
    for (name, fields), mode in itertools.product(METHODS.items(), ("coupled", "rejection")):
        config = {"method": name, "mode": mode, "adaptive": False} | fields
        engines.generate(f"offline/speculation/{name}/{mode}", "builtin", [LINES, TEXTS[0]], params,
                         speculative_config=config)  # fmt: skip
    drafts = {"draft_model": {"model": str(models / "mistral"), "num_speculative_tokens": 3}, "early_exit":
              {"method": "early_exit", "exit_layer": 1, "num_speculative_tokens": 2}, "ngram": {"method": "ngram"},
              "mtp": {"method": "mtp"}, "none": {"method": "no-such"}, "depth": {"method": "ngram",
              "num_speculative_tokens": 65}, "unknown": {"method": "ngram", "colour": 1}}  # fmt: skip
    for name, config in drafts.items():
        engines.generate(f"offline/speculation/tiny/{name}", str(models / "llama"), PROMPTS[:3], PLAIN,
                         speculative_config=config | {"adaptive": False})  # fmt: skip


def take_calls(engines: Engines, models: Path) -> None:
    """`embed`, `beam_search`, `chat`, `stream`, and calls that are refused."""

    def replies(call: Callable[..., Any], *args: Any, **options: Any) -> dict[str, Any]:
        return {"replies": [*map(plain, call(*args, **options))]}

    def vectors(name: str, prompts: list[Any]) -> Callable[[LLM], None]:
        def call(llm: LLM) -> None:
            forms = {"last": {}, "mean": {"pooling": "mean"}, "raw": {"normalize": False},
                     "cut": {"dimensions": 8}, "max": {"pooling": "max"}, "wide": {"dimensions": 10**6}}  # fmt: skip
            for title, fields in forms.items():
                for place, inputs in enumerate([*prompts, prompts]):
                    engines.note(f"{name}/{title}/{place}", partial(embedded, llm, inputs, fields))

        return call

    def embedded(llm: LLM, inputs: Any, fields: dict[str, Any]) -> dict[str, Any]:
        outputs = llm.embed(inputs, **fields)
        return {"vectors": [[[*map(exact, one.outputs.embedding)], list(one.prompt_token_ids)] for one in outputs]}

    for model in ("llama", "gpt2", "gemma3_text"):
        engines.use(f"offline/embed/{model}", str(models / model), vectors(f"offline/embed/{model}", PROMPTS[:3]))
    engines.use("offline/embed/builtin", "builtin", vectors("offline/embed/builtin", TEXTS[:2]))

    def beams(llm: LLM) -> None:
        changes = [{}, {"length_penalty": 0.0}, {"early_stopping": True}, {"early_stopping": "never"}, {"n": 1},
                   {"num_beam_groups": 2, "diversity_penalty": 1.0}, {"ignore_eos": True}, {"stop_token_ids": [19]},
                   {"include_stop_str_in_output": True}, {"beam_width": 0}, {"temperature": 0.5}]  # fmt: skip
        for place, change in enumerate(changes):
            engines.note(f"offline/beams/{place}", partial(found, llm, {"beam_width": 4, "max_tokens": 12} | change))

    def found(llm: LLM, fields: dict[str, Any]) -> dict[str, Any]:
        outputs = llm.beam_search(TEXTS[:2], BeamSearchParams(**fields))
        return {"answers": [
            [[one.text, list(one.tokens), exact(one.cum_logprob), one.finish_reason, one.stop_reason]
             for one in output.sequences] for output in outputs
        ]}  # fmt: skip

    engines.use("offline/beams", "builtin", beams)

    def talks(llm: LLM) -> None:
        talk = [{"role": "system", "content": "Be kind."}, {"role": "user", "content": "Tell me a story."}]
        answer = [{"role": "assistant", "content": "Once there was"}]
        calls: dict[str, tuple[Any, dict[str, Any]]] = {
            "one": (talk, {}), "two": ([talk, talk[1:]], {}), "open": (talk, {"add_generation_prompt": False}),
            "continued": (talk + answer, {"continue_final_message": True, "add_generation_prompt": False}),
            "template": (talk, {"chat_template": "{% for m in messages %}{{ m['content'] }} {% endfor %}"}),
            "empty": ([], {}), "role": ([{"role": "nobody", "content": "x"}], {}), "bad": ([{"content": 3}], {}),
            "broken": (talk, {"chat_template": "{% for %}"}), "words": (talk, {"chat_template_kwargs": {"a": 1}}),
        }  # fmt: skip
        params = SamplingParams(seed=2, max_tokens=24, logprobs=1)
        for name, (messages, options) in calls.items():
            engines.note(f"offline/chat/{name}", partial(replies, llm.chat, messages, params, **options))
        streams = {"plain": {}, "n": {"n": 2}, "stop": {"stop": ["and"]}, "greedy": {"temperature": 0.0}}
        for name, fields in streams.items():
            chosen = SamplingParams(**{"seed": 3, "max_tokens": 10} | fields)  # type: ignore[arg-type]
            pieces = [*map(plain, llm.stream(TEXTS[0], chosen))]
            engines.record.add(f"offline/stream/{name}", {"pieces": pieces}, "generations")
        wrong: dict[str, tuple[Any, Any]] = {
            "nothing": ("", None), "none": (None, None), "number": (5, None), "long": ([5] * 5000, None),
            "id": ([10**6], None), "negative": ([-1], None), "params": (["a", "b"], [SamplingParams()]),
            "wide": ("a", SamplingParams(logprobs=21)), "bias": ("a", SamplingParams(logit_bias={10**6: 1.0})),
            "allowed": ("a", SamplingParams(allowed_token_ids=[10**6])), "key": ({"text": "a"}, None),
            "list": ([["a"]], None), "both": ({"prompt": "a", "prompt_token_ids": [5]}, None),
        }  # fmt: skip
        for name, (prompt, chosen) in wrong.items():
            chosen = chosen or SamplingParams(seed=1, max_tokens=2)
            engines.note(f"offline/wrong/{name}", partial(replies, llm.generate, prompt, chosen))

    engines.use("offline/", "builtin", talks, max_model_len=256)
    for name, options in {
        "model": {"model": "/no/such/model"}, "field": {"colour": 1}, "dtype": {"dtype": "int3"},
        "quantization": {"quantization": "int3"}, "kv": {"kv_cache_dtype": "int3"}, "backend": {"backend": "none"},
        "device": {"device": "tpu"}, "length": {"max_model_len": 1}, "long": {"max_model_len": 10**9},
        "threads": {"num_threads": 257}, "seed": {"seed": -1}, "policy": {"scheduling_policy": "lifo"},
        "blocks": {"num_gpu_blocks_override": 0}, "seqs": {"max_num_seqs": 0}, "logprobs": {"max_logprobs": -2},
        "bytes": {"kv_cache_memory_bytes": 1}, "block": {"block_size": "x"},
    }.items():  # fmt: skip
        engines.use(f"offline/start/{name}", options.pop("model", "builtin"), lambda llm: None, **options)  # type: ignore[arg-type]


BAD_VALUES = (
    None, "x", -(2**70), -101, -3, -1, 0, 1.5, 300, 2**70, float("nan"), True, [], ["x", 1], {"a": 1},
)  # fmt: skip


def take_bounds(record: Record) -> None:
    """Each field of `SamplingParams` and `BeamSearchParams` with values of wrong types and out of its bounds.

    The fields are those of docs/limits.md and of the signatures, so that a new field is noticed.
    """
    for maker in (SamplingParams, BeamSearchParams):
        base = {"beam_width": 2} if maker is BeamSearchParams else {}
        for field in maker.__struct_fields__:
            for value in BAD_VALUES:
                outcome = attempt(lambda fields=base | {field: value}, maker=maker: repr(maker(**fields)))
                record.add(f"offline/bounds/{maker.__name__}/{field}/{value!r}", outcome, "parameter checks")
