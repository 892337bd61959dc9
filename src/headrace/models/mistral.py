"""Mistral 7B (Jiang et al. 2023): Llama with a sliding window, which some later releases leave out."""

from __future__ import annotations

from headrace.models.decoder import Attention, AttentionOptions, Decoder, PreNormLayer

TINY = {
    "model_type": "mistral",
    "vocab_size": 199,
    "hidden_size": 48,
    "intermediate_size": 112,
    "num_hidden_layers": 2,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 12,
    "max_position_embeddings": 512,
    "sliding_window": 37,
}


class Layer(PreNormLayer):
    def make_attention(self, decoder: Decoder, name: str, layer_id: int) -> Attention:
        return Attention(decoder, name, layer_id, AttentionOptions(window=decoder.window(layer_id)))


class Model(Decoder):
    Layer = Layer

    def default_layer_type(self, layer_id: int) -> str:
        # null means no window; a file without the key means the first release's window.
        window = self.config.values.get("sliding_window", self.default_window)
        return "full_attention" if window is None else "sliding_attention"
