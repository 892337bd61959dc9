"""Nomic BERT (Nussbaum et al. 2024): BERT with rotary positions and SwiGLU, without biases. The config.json of its
first files has GPT-2's keys."""

from __future__ import annotations

from typing import TYPE_CHECKING

from headrace.models.config import ModelConfig
from headrace.models.encoders import gte
from headrace.models.encoders.base import Keys
from headrace.models.encoders.gte import NEWER, Names
from headrace.models.unread import Unread

if TYPE_CHECKING:
    from headrace.backends.base import Ops
    from headrace.models.weights import Weights

TINY = gte.TINY | {"model_type": "nomic_bert"}
FIRST = Names(
    "emb_ln",
    "encoder.layers",
    ("attn.Wqkv",),
    "attn.out_proj",
    "norm1",
    ("mlp.fc12", "mlp.fc11"),
    "mlp.fc2",
    "norm2",
)


class Model(gte.Model):
    unread = (
        Unread("prenorm", False, "norms before each part"),
        Unread("rotary_emb_fraction", 1.0, "heads of which a part turns"),
        Unread("rotary_emb_interleaved", False, "numbers that turn in neighbouring pairs"),
        Unread("rotary_scaling_factor", None, "positions that are stretched"),
        Unread("rotary_emb_scale_base", None, "positions that are scaled"),
        Unread("use_rms_norm", False, "RMS norms"),
        Unread("causal", False, "attention to earlier tokens alone"),
        Unread("qkv_proj_bias", False, "biases of attention"),
        Unread("mlp_fc1_bias", False, "biases of the MLP"),
        Unread("mlp_fc2_bias", False, "biases of the MLP"),
        Unread("parallel_block", False, "attention and MLP side by side"),
    )
    roots = ("nomic_bert.", "bert.")
    layouts = (NEWER, FIRST)
    bias, down_bias = False, False
    default_theta = 1000.0

    def __init__(self, config: ModelConfig, weights: Weights, ops: Ops, max_model_len: int) -> None:
        if "n_embd" in config.values:
            self.keys = Keys("n_embd", "n_inner", "n_layer", "n_head", "activation_function", "layer_norm_epsilon")
            if config.values.get("activation_function") == "swiglu":
                config = ModelConfig(config.values | {"activation_function": "silu"})
        else:
            self.keys = Keys(default_activation="silu")
        super().__init__(config, weights, ops, max_model_len)

    @classmethod
    def max_positions(cls, config: ModelConfig) -> int:
        most = super().max_positions(config)
        return config.integer("max_trained_positions", most, high=most)

    def rope(self, config: ModelConfig) -> ModelConfig:
        if config.values.get("rotary_emb_base") is None:
            return config.rope
        return ModelConfig({"rope_type": "default", "rope_theta": config.number("rotary_emb_base")})
