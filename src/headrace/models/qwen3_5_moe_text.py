"""The text of Qwen3.5's and 3.6's mixtures of experts (Qwen Team 2026): Qwen3.5 with small experts and a shared one."""

from __future__ import annotations

from collections.abc import Callable

from headrace.backends.base import Array
from headrace.models import qwen3_5_text
from headrace.models.decoder import Decoder
from headrace.models.qwen2_moe import SharedExperts

TINY = {name: value for name, value in qwen3_5_text.TINY.items() if name != "intermediate_size"} | {
    "model_type": "qwen3_5_moe_text",
    "moe_intermediate_size": 24,
    "shared_expert_intermediate_size": 40,
    "num_experts": 7,
    "num_experts_per_tok": 3,
}


class Layer(qwen3_5_text.Layer):
    def make_mlp(self, decoder: Decoder, name: str, layer_id: int) -> Callable[[Array], Array]:
        return SharedExperts(decoder, f"{name}.mlp", renormalise=True)


class Model(qwen3_5_text.Model):
    Layer = Layer
    has_mlp = False
