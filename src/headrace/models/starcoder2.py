"""StarCoder2 (Lozhkov et al. 2024): Llama's attention with biases, layer norms, an MLP without a gate."""

from __future__ import annotations

from headrace.models import mistral
from headrace.models.decoder import MLP, Attention, AttentionOptions, Decoder, LayerNorm

TINY = {
    "model_type": "starcoder2",
    "vocab_size": 199,
    "hidden_size": 48,
    "intermediate_size": 112,
    "num_hidden_layers": 2,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "sliding_window": 37,
}


class Layer(mistral.Layer):
    def make_attention(self, decoder: Decoder, name: str, layer_id: int) -> Attention:
        bias, window = decoder.config.flag("use_bias", True), decoder.window(layer_id)
        return Attention(decoder, name, layer_id, AttentionOptions(bias, bias, window=window))

    def make_mlp(self, decoder: Decoder, name: str, layer_id: int) -> MLP:
        return MLP(decoder, f"{name}.mlp", decoder.config.flag("use_bias", True), ("c_fc", "c_proj"))


class Model(mistral.Model):
    Layer = Layer
    default_activation = "gelu_pytorch_tanh"
    default_tied = True
    default_window = None

    def make_norm(self, name: str) -> LayerNorm:
        eps = self.config.number("norm_epsilon", 1e-5)
        return LayerNorm(self, name, eps)
