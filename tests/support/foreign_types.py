"""Tiny random checkpoints of any causal type of transformers, and a comparison of headrace with transformers on them.

Used by `tests.campaigns.foreign` for all types, and by tests/models/test_by_transformers.py for some.
"""

from __future__ import annotations

import copy
import dataclasses
import json
import logging
import math
from contextlib import closing
from pathlib import Path
from typing import Any, NamedTuple

import torch
import transformers
from tests.support.harness import stepped
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
from transformers.utils import logging as their_logging

from headrace import LLM, SamplingParams, transformers_models
from headrace.protocol.errors import HeadraceError

SIZES: dict[str, Any] = {
    "vocab_size": 199, "vocab_size_per_layer_input": 199, "hidden_size": 64, "d_model": 64, "n_embd": 64, "dim": 64,
    "embedding_dim": 64, "emb_dim": 64, "embedding_size": 64, "word_embed_proj_dim": 64, "input_embedding_size": 64,
    "intermediate_size": 96, "ffn_dim": 96, "ffn_hidden_size": 96, "dff": 96, "d_ff": 96, "n_inner": 96,
    "encoder_ffn_dim": 96, "decoder_ffn_dim": 96, "dim_ff": 96, "mlp_hidden_size": 96, "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 32, "expert_ffn_hidden_size": 32, "num_hidden_layers": 2, "num_layers": 2,
    "n_layer": 2, "n_layers": 2, "encoder_layers": 2, "decoder_layers": 2, "num_encoder_layers": 2,
    "num_decoder_layers": 2, "num_blocks": 2, "num_attention_heads": 4, "n_head": 4, "n_heads": 4, "num_heads": 4,
    "encoder_attention_heads": 4, "decoder_attention_heads": 4, "num_encoder_attention_heads": 4,
    "num_decoder_attention_heads": 4, "attention_heads": 4, "num_key_value_heads": 2, "num_kv_heads": 2,
    "head_dim": 16, "attention_hidden_size": 64, "rotary_dim": 8, "kv_lora_rank": 16, "q_lora_rank": 16,
    "qk_nope_head_dim": 8, "qk_rope_head_dim": 8, "qk_head_dim": 16, "v_head_dim": 16, "num_experts": 4,
    "n_routed_experts": 4, "num_local_experts": 4, "moe_num_experts": 4, "num_experts_per_tok": 2, "moe_topk": 2,
    "n_shared_experts": 1, "n_group": 1, "topk_group": 1, "max_position_embeddings": 256, "n_positions": 256,
    "n_ctx": 256, "max_seq_len": 256, "max_target_positions": 256, "max_source_positions": 64, "context_length": 256,
    "seq_length": 256, "sliding_window": 12, "attention_window_size": 12, "lru_width": 64, "state_size": 8,
    "mamba_d_state": 8, "mamba_n_heads": 4, "mamba_d_head": 32, "mamba_num_heads": 4, "mamba_head_dim": 32,
    "mamba_n_groups": 1, "mamba_dt_rank": 4, "time_step_rank": 4, "n_mamba_heads": 2, "index_n_heads": 16,
    "index_head_dim": 16, "index_topk": 8, "pad_token_id": 1, "bos_token_id": 2, "eos_token_id": 3, "is_decoder": True,
    "type_vocab_size": 1, "attention_dropout": 0.0, "layer_types": None, "first_k_dense_replace": 1,
}  # fmt: skip
"""Small values of the fields that configs have for sizes."""
LINEAR = {"layer_types": ["linear_attention", "full_attention"]}
CHANGES: dict[str, dict[str, Any]] = {
    "bailing_hybrid": LINEAR,
    "bamba": {"attn_layer_indices": [1]},
    "gemma3n_text": {"num_hidden_layers": 5, "num_kv_shared_layers": 0},
    "gpt_neo": {"attention_types": [[["global", "local"], 1]], "window_size": 12},
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1},
    "kimi_linear": LINEAR,
    "lfm3": {"layer_types": ["conv", "full_attention"]},
    "longcat_flash": {"head_dim": 8},
    "mamba2": {"num_heads": 8, "head_dim": 16},
    "qwen3_5_moe_text": LINEAR,
    "qwen3_5_text": LINEAR,
    "qwen3_next": LINEAR,
    "xmod": {"languages": ["en_XX"], "default_language": "en_XX"},
    "zamba": {"num_hidden_layers": 6},
    "zamba2": {"layers_block_type": ["mamba", "hybrid"]},
    "zaya": {"num_experts_per_tok": 1},
}
"""Values of single types beside or in place of them."""
OMITTED: dict[str, str] = {"dbrx": "attn_config ffn_config"}
"""Fields of `SIZES` that a type must have by default."""
TOLERANCE = 1e-4
LENGTHS = (37, 11)
NUM_TOKENS = 6


class Outcome(NamedTuple):
    """kind: right, wrong, refused (a reason by headrace), failed (any other exception) or unmade (transformers itself
    cannot make or run the checkpoint)."""

    name: str
    kind: str
    why: str = ""


class Scores(NamedTuple):
    """A text's answer, the log-probabilities of its tokens (of the prompt's after the first too, where they were asked
    for), and how many tokens of the prompt were cached."""

    answer: list[int]
    logprobs: list[float]
    num_cached: int


def types() -> list[str]:
    """All causal types of the installed transformers."""
    return sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)


def tiny_config(model_type: str) -> Any:
    """A config of transformers with small sizes."""
    changes = CHANGES.get(model_type, {})
    values = _small(CONFIG_MAPPING[model_type], OMITTED.get(model_type, "").split(), changes)
    return CONFIG_MAPPING[model_type](**values)


def _small(kind: Any, omitted: list[str], changes: dict[str, Any]) -> dict[str, Any]:
    names = {field.name for field in dataclasses.fields(kind)}
    values = {name: value for name, value in SIZES.items() if name in names and name not in omitted}
    if "kv_lora_rank" in names:  # each head has keys of its own, made from the latent vector
        values["num_key_value_heads"] = values["num_attention_heads"]
    for name, inner in getattr(kind, "sub_configs", {}).items():
        if name in omitted:
            continue
        if not dataclasses.is_dataclass(inner):  # any config: the one that the type has by default
            inner = type(getattr(kind(), name))
        if dataclasses.is_dataclass(inner):
            values[name] = _small(inner, omitted, {}) | {"model_type": inner.model_type}
    return values | copy.deepcopy(changes)


def save_tiny(model_type: str, directory: Path) -> Any:
    """Write a checkpoint with random weights (logits of about unit size). Return the model as transformers loads it."""
    kind: Any = getattr(transformers, MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[model_type])
    whole = config = tiny_config(model_type)
    if kind.config_class is not type(whole) and kind.config_class is whole.sub_configs.get("text_config"):
        config = whole.get_text_config()
    with torch.device("meta"):
        num = sum(parameter.numel() for parameter in kind(copy.deepcopy(config)).parameters())
    if num > 50e6:
        raise ValueError(f"the small config has {num:,} weights")
    model = kind._from_config(config, attn_implementation="eager", dtype=torch.float32).eval()
    generator = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            if parameter.dim() > 1:
                parameter.copy_(noise * 1.4 / math.sqrt(parameter.shape[-1]))
            elif "norm" in name or "ln_" in name:
                parameter.copy_(parameter + 0.3 * noise)
            else:
                parameter.copy_(parameter + 0.1 * noise)
    model.save_pretrained(directory)
    if whole is not config:
        whole.save_pretrained(directory)
    return kind.from_pretrained(directory, config=config, attn_implementation="eager", dtype=torch.float32).eval()


def prompts(vocab_size: int) -> list[list[int]]:
    """Texts of two lengths, longer than windows are."""
    generator = torch.Generator().manual_seed(3)
    return [torch.randint(10, vocab_size, (length,), generator=generator).tolist() for length in LENGTHS]


def scores(llm: LLM, texts: list[list[int]], of_prompts: bool = False) -> list[Scores]:
    """The greedy continuation of each text."""
    params = SamplingParams(
        temperature=0.0, max_tokens=NUM_TOKENS, ignore_eos=True, detokenize=False, logprobs=0,
        prompt_logprobs=0 if of_prompts else None,
    )  # fmt: skip
    rows = []
    for text, output in zip(texts, llm.generate(texts, params, use_tqdm=False), strict=True):
        answer = list(output.outputs[0].token_ids)
        steps = [*(output.prompt_logprobs or [])[1:], *(output.outputs[0].logprobs or [])]
        tokens = [*text[1:], *answer][-len(steps) :]
        logprobs = [step[token].logprob for step, token in zip(steps, tokens, strict=True) if step]
        rows.append(Scores(answer, logprobs, output.num_cached_tokens or 0))
    return rows


def open_llm(directory: Path, **changes: Any) -> LLM:
    fields = {"skip_tokenizer_init": True, "num_gpu_blocks_override": 64, "dtype": "float32", "block_size": 8}
    return LLM(str(directory), **(fields | {"model_impl": "transformers", "max_model_len": 128} | changes))


def compare(theirs: Any, texts: list[list[int]], rows: list[Scores], by_token: bool = False) -> str:
    """Return where log-probabilities differ from transformers' by more than `TOLERANCE`, or "". by_token: transformers
    computes token by token, with its own cache."""
    for text, (answer, ours, _) in zip(texts, rows, strict=True):
        whole = [*text, *answer]
        with torch.inference_mode():
            if by_token:
                logits = stepped(theirs, whole).float()
            else:
                logits = theirs(input_ids=torch.tensor([whole]), use_cache=False).logits[0].float()
        expected = logits.log_softmax(-1)[range(len(whole) - 1), whole[1:]]
        apart = (expected - torch.tensor(ours)).abs()
        if not apart.max() <= TOLERANCE:
            return f"log-probability {int(apart.argmax())} of {len(ours)} differs by {apart.max():.2g}"
        best = logits[len(text) - 1 : -1].max(-1).values - logits[range(len(text) - 1, len(whole) - 1), answer]
        if not best.max() <= TOLERANCE:
            return f"token {int(best.argmax())} of the answer is not the likeliest"
    return ""


def check(model_type: str, directory: Path) -> Outcome:
    """Compare a type with transformers, and with itself: in a batch, alone, in chunks, after a hit of the prefix cache
    and after a preemption."""
    their_logging.set_verbosity(logging.ERROR)
    if model_type in transformers_models.REFUSED:
        (directory / "config.json").write_text(json.dumps({"model_type": model_type}))
        try:
            open_llm(directory).close()
        except HeadraceError as error:
            return Outcome(model_type, "refused", str(error).partition("config.json: ")[2])
        return Outcome(model_type, "wrong", "it was loaded")
    try:
        theirs = save_tiny(model_type, directory)
        texts = prompts(min(199, int(theirs.get_output_embeddings().weight.shape[0])))
        with torch.inference_mode():
            logits = theirs(input_ids=torch.tensor([texts[0]]), use_cache=False).logits
        if not torch.isfinite(logits).all():
            raise ValueError("logits that are not finite")
    except Exception as error:
        return Outcome(model_type, "unmade", f"{type(error).__name__}: {error!s:.200}")
    try:
        with closing(open_llm(directory)) as llm:
            rows = scores(llm, texts, of_prompts=True)
            if why := compare(theirs, texts, rows):
                if compare(theirs, texts, rows, by_token=True):
                    return Outcome(model_type, "wrong", why)
                why = "as transformers token by token, whose pass over a whole text differs"
            expected = [row.logprobs[-NUM_TOKENS:] for row in rows]
            first, again = scores(llm, texts[::-1])[::-1], scores(llm, texts)
        if not again[0].num_cached:
            return Outcome(model_type, "wrong", "no hit of the prefix cache")
        with closing(open_llm(directory, max_num_batched_tokens=5, enable_prefix_caching=False)) as llm:
            chunked = [scores(llm, [text])[0] for text in texts]
        # Six blocks for one text, and seven in all.
        with closing(open_llm(directory, max_model_len=48, num_gpu_blocks_override=7, max_num_seqs=2)) as llm:
            preempted = scores(llm, texts)
    except HeadraceError as error:
        return Outcome(model_type, "refused", str(error).removeprefix(f"{directory}: ")[:300])
    except Exception as error:
        return Outcome(model_type, "failed", f"{type(error).__name__}: {error!s:.300}")
    ways = {"in another order": first, "cached": again, "alone and in chunks": chunked, "preempted": preempted}
    others = [name for name, way in ways.items() if [row.logprobs for row in way] != expected]
    if others:
        return Outcome(model_type, "wrong", f"other bits {', '.join(others)}")
    return Outcome(model_type, "right", why)
