"""Keys of config.json that a model file does not read: those that would change its output, and harmless ones.

`Values` notes the keys that are read. A model class lists in `unread` the keys by which transformers would compute
something else; `verify` refuses a file that uses one of them. Other unread keys are logged. A test compares
the lists with the configuration classes of transformers. Called by `models.config`, the model files and
`engine.library.load`.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from headrace.protocol.errors import CheckpointError

logger = logging.getLogger(__name__)


class Unread(NamedTuple):
    """A key that changes the output and is not read. `harmless`: the value, besides null, with which headrace's
    output is right. `meaning`: the feature that another value switches on."""

    key: str
    harmless: Any
    meaning: str


class Alias(NamedTuple):
    """A key that transformers takes for `name`, which alone is read."""

    key: str
    name: str


Rules = Sequence[Unread | Alias]

CAUSAL = (Unread("use_bidirectional_attention", False, "attention to later tokens"),)

_REASONS = {
    "training": "initializer_range initializer_factor rescale_prenorm_residual time_step_floor time_step_max "
    "attention_dropout hidden_dropout residual_dropout embedding_dropout attn_pdrop embd_pdrop resid_pdrop "
    "router_aux_loss_coef router_z_loss_coef router_jitter_noise output_router_logits seq_aux aux_loss_alpha "
    "ep_size use_cache gradient_checkpointing",
    "the order of a computation, or the type of its numbers": "pretraining_tp reorder_and_upcast_attn chunk_size "
    "mamba_chunk_size use_mamba_kernels mamba_ssm_cache_dtype enable_moe_fp32_combine moe_shared_expert_overlap "
    "num_logits_to_keep use_flash_attn attn_implementation _attn_implementation experts_implementation",
    "the tokenizer, or the choice of tokens": "bos_token_id eos_token_id pad_token_id sep_token_id eod_token_id "
    "unk_token_id decoder_start_token_id forced_bos_token_id forced_eos_token_id task_specific_params "
    "tokenizer_class image_token_id video_token_id vision_start_token_id vision_end_token_id vision_token_id "
    "image_token_index",
    "heads for other tasks than text": "id2label label2id problem_type finetuning_task num_labels summary_activation "
    "summary_first_dropout summary_proj_to_labels summary_type summary_use_proj classifier_dropout",
    "what transformers returns": "return_dict output_hidden_states output_attentions torchscript "
    "chunk_size_feed_forward is_encoder_decoder is_decoder keys_to_ignore_at_inference",
    "the file": "architectures auto_map transformers_version model_type _name_or_path name_or_path torch_dtype dtype "
    "_commit_hash unsloth_version unsloth_fixed",
    "read by the loader": "quantization_config text_config vision_config audio_config",
    "layers for multi-token prediction, which a drafter reads": "num_nextn_predict_layers num_mtp_layers "
    "mtp_layers_block_type mtp_num_hidden_layers mtp_use_dedicated_embeddings",
}
HARMLESS = {key: reason for reason, keys in _REASONS.items() for key in keys.split()}
"""Keys that change no output of any model at any value, each with its topic."""


class Values(dict[str, Any]):
    """The values of a config.json, and the set of keys that were read. The results of `|` share that set."""

    def __init__(self, values: Mapping[str, Any], read: set[str] | None = None) -> None:
        super().__init__(values)
        self.read = set[str]() if read is None else read

    def get(self, key: str, default: Any = None) -> Any:
        self.read.add(key)
        return super().get(key, default)

    def __getitem__(self, key: str) -> Any:
        self.read.add(key)
        return super().__getitem__(key)

    def __contains__(self, key: object) -> bool:
        self.read.add(str(key))
        return super().__contains__(key)

    def __or__(self, other: Mapping[str, Any]) -> Values:  # type: ignore[override]
        return Values({**self, **other}, self.read)


def verify(values: Mapping[str, Any], unread: Rules) -> None:
    """Raise `CheckpointError` for a key of `unread` whose value would change the output."""
    stated = {key: value for key, value in values.items() if value is not None}
    for rule in unread:
        value = stated.get(rule.key)
        if isinstance(rule, Alias):
            if value is not None and rule.name not in stated:
                change = json.dumps({rule.name: value})
                raise CheckpointError(
                    f"config.json: {rule.key} is {json.dumps(value):.80}, and headrace reads {rule.name} instead: set "
                    f"{change:.200} in the file, or by --hf-overrides"
                )
        elif value is not None and value != rule.harmless:
            harmless = json.dumps(rule.harmless)
            change = json.dumps({rule.key: rule.harmless})
            raise CheckpointError(
                f"config.json: {rule.key} is {json.dumps(value):.80}, expected {harmless}: headrace does not have "
                f"{rule.meaning}, and its output would be another. {change} in the file, or by --hf-overrides, runs "
                "the model without"
            )


def log_unread(values: Values, unread: Rules) -> None:
    """Log the keys that nothing has read and that no list names, if there are any."""
    keys = {key for key, value in values.items() if value is not None}
    if names := sorted(keys - values.read - HARMLESS.keys() - {rule.key for rule in unread}):
        logger.info("config.json: without effect on this model: %s", ", ".join(names))
