"""Qwen2 and Qwen2.5 (Yang et al. 2024): Llama with biases on q, k, v; the upper layers may have a sliding window."""

from __future__ import annotations

from headrace.models.decoder import Attention, AttentionOptions, Decoder, PreNormLayer

TINY = {
    "model_type": "qwen2",
    "vocab_size": 199,
    "hidden_size": 48,
    "intermediate_size": 112,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "use_sliding_window": True,
    "sliding_window": 21,
    "max_window_layers": 2,
    "tie_word_embeddings": True,
}


class Layer(PreNormLayer):
    def make_attention(self, decoder: Decoder, name: str, layer_id: int) -> Attention:
        return Attention(decoder, name, layer_id, AttentionOptions(qkv_bias=True, window=decoder.window(layer_id)))


class Model(Decoder):
    Layer = Layer
    default_first_window = 28
    """Return the number of the first layer with a window."""

    def default_layer_type(self, layer_id: int) -> str:
        slides = self.config.flag("use_sliding_window", False)
        upper = layer_id >= self.config.integer("max_window_layers", self.default_first_window, low=0)
        return "sliding_attention" if slides and upper else "full_attention"
