"""Hunyuan's mixtures of experts (Tencent 2025): Hunyuan with experts and an MLP that all rows share."""

from __future__ import annotations

from headrace.backends.base import Routing
from headrace.models import hunyuan_v1_dense
from headrace.models.config import ModelConfig
from headrace.models.decoder import MAX_EXPERTS, Decoder, Experts, GatedMLP, SharedExperts
from headrace.models.unread import Alias
from headrace.protocol.errors import CheckpointError

TINY = {
    "model_type": "hunyuan_v1_moe",
    "vocab_size": 199,
    "hidden_size": 48,
    "intermediate_size": 40,
    "num_hidden_layers": 2,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 20,
    "num_experts": 5,
    "moe_topk": [2, 3],
    "max_position_embeddings": 512,
}


def of_layer(config: ModelConfig, name: str, layer_id: int, num_layers: int, high: int) -> int:
    """Return a layer's number under a key that has one number for all layers, or a list of one for each."""
    value = config.values.get(name)
    if not isinstance(value, list):
        return config.integer(name, 1, high=high)
    if len(value) != num_layers:
        raise CheckpointError(f"config.json: {name} has {len(value)} numbers for {num_layers} layers")
    return ModelConfig({name: value[layer_id]}).integer(name, high=high)


class Layer(hunyuan_v1_dense.Layer):
    def make_mlp(self, decoder: Decoder, name: str, layer_id: int) -> SharedExperts:
        """Weight experts by the softmax over the chosen ones."""
        config, name = decoder.config, f"{name}.mlp"
        num = of_layer(config, "num_experts", layer_id, decoder.num_layers, MAX_EXPERTS)
        routing = Routing(of_layer(config, "moe_topk", layer_id, decoder.num_layers, num))
        experts = Experts(decoder, name, num, decoder.intermediate_size, routing, router="gate.wg")
        return SharedExperts(experts, GatedMLP(decoder, f"{name}.shared_mlp"))


class Model(hunyuan_v1_dense.Model):
    Layer = Layer
    unread = (Alias("num_experts_per_tok", "moe_topk"), Alias("num_local_experts", "num_experts"))
