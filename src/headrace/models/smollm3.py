"""SmolLM3 (Hugging Face 2025): Llama with layers that have no positions at all (NoPE), each fourth by default."""

from __future__ import annotations

from headrace.models import llama
from headrace.models.decoder import Attention, AttentionOptions, Decoder
from headrace.protocol.errors import CheckpointError

TINY = {
    "model_type": "smollm3",
    "vocab_size": 199,
    "hidden_size": 48,
    "intermediate_size": 112,
    "num_hidden_layers": 4,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "no_rope_layers": [1, 0, 1, 0],
    "use_sliding_window": True,
    "sliding_window": 33,
    "layer_types": ["full_attention", "full_attention", "sliding_attention", "sliding_attention"],
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


class Layer(llama.Layer):
    def make_attention(self, decoder: Decoder, name: str, layer_id: int) -> Attention:
        bias = decoder.config.flag("attention_bias", False)
        window, rotates = decoder.window(layer_id), has_rope(decoder, layer_id)
        return Attention(decoder, name, layer_id, AttentionOptions(bias, bias, window=window, rotates=rotates))


def has_rope(decoder: Decoder, layer_id: int) -> bool:
    """Return whether a layer has a rope: then `no_rope_layers` has 1 for it, in spite of its name."""
    flags = decoder.config.values.get("no_rope_layers")
    if flags is None:
        return (layer_id + 1) % decoder.config.integer("no_rope_layer_interval", 4) != 0
    if not isinstance(flags, list) or len(flags) != decoder.num_layers or any(flag not in (0, 1) for flag in flags):
        raise CheckpointError(f"config.json: no_rope_layers must be a list of {decoder.num_layers} numbers 0 or 1")
    return bool(flags[layer_id])


class Model(llama.Model):
    Layer = Layer
    default_tied = True
    default_theta = 2_000_000.0
    default_window = None

    def default_layer_type(self, layer_id: int) -> str:
        slides = self.config.flag("use_sliding_window", False) and self.config.values.get("sliding_window") is not None
        return "sliding_attention" if slides and not has_rope(self, layer_id) else "full_attention"
