"""The metadata and names of encoders in GGUF files, as llama.cpp's converter writes them: BERT (RoBERTa and XLM-RoBERTa
too, whose positions begin at the file's first row) and Nomic BERT.

Called by `gguf_config`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from headrace.checkpoint.gguf_keys import MAX_CONTEXT, Keys, Reading, rope, vocabulary
from headrace.checkpoint.gguf_parts import FLOATS, Part, parts_of
from headrace.checkpoint.gguf_rows import GGUFFile, Rows
from headrace.gguf import GGUF
from headrace.models.config import MAX_LAYERS
from headrace.models.encoders.head import Dense
from headrace.quant.formats import gguf_blocks

BERT = {
    "attn_q": "attention.self.query",
    "attn_k": "attention.self.key",
    "attn_v": "attention.self.value",
    "attn_output": "attention.output.dense",
    "attn_output_norm": "attention.output.LayerNorm",
    "ffn_up": "intermediate.dense",
    "ffn_down": "output.dense",
    "layer_output_norm": "output.LayerNorm",
}
BERT_ENDS = {
    "token_embd": "embeddings.word_embeddings",
    "position_embd": "embeddings.position_embeddings",
    "token_types": "embeddings.token_type_embeddings",
    "token_embd_norm": "embeddings.LayerNorm",
}
NOMIC = {
    "attn_qkv": "attn.Wqkv",
    "attn_output": "attn.out_proj",
    "attn_output_norm": "norm1",
    "ffn_up": "mlp.fc11",
    "ffn_gate": "mlp.fc12",
    "ffn_down": "mlp.fc2",
    "layer_output_norm": "norm2",
}
NOMIC_ENDS = BERT_ENDS | {"token_embd_norm": "emb_ln"}


BEHIND = ("dense_2.weight", "dense_3.weight")
"""Dense layers behind the pooling, by the numbers of sentence-transformers' modules."""


def layers_behind(file: GGUF) -> tuple[Dense, ...]:
    """Return the layers behind the pooling, which EmbeddingGemma's files have."""
    layers: list[Dense] = []
    for name in BEHIND if file.text("general.architecture") == "gemma-embedding" else ():
        info = file.tensors.get(name)
        if info is None:
            continue
        ins = len(layers[-1].weight) if layers else info.shape[0]
        if len(info.shape) != 2 or info.shape[0] != ins:
            raise file.fault(f"shape of {name}", info.shape, f"of 2 dimensions, the first {ins}")
        if info.type not in FLOATS and info.type not in gguf_blocks.TYPES:
            raise file.fault(f"type of {name}", info.type, "one of floats and blocks")
        rows = Rows(GGUFFile(file), Part(info, (info.shape[1], info.shape[0])))
        layers.append(Dense(rows.read(0, rows.num_out).dequantize().astype(np.float64)))
    return tuple(layers)


def _sizes(keys: Keys, model_type: str) -> dict[str, Any]:
    types = keys.file.tensors.get("token_types.weight")
    if types is None or len(types.shape) != 2:
        raise keys.file.fault("token_types.weight", None if types is None else types.shape, "there, with 2 dimensions")
    if keys.flag("attention.causal"):
        keys.refuse("attention.causal", True, "false: a row of an encoder sees its whole text")
    if "cls.output.weight" in keys.file.tensors:
        raise keys.file.fault("cls.output.weight", "there", "absent: classes of a GGUF file are not computed")
    return {
        "model_type": model_type,
        "max_position_embeddings": keys.integer("context_length", MAX_CONTEXT),
        "hidden_size": keys.integer("embedding_length"),
        "intermediate_size": keys.integer("feed_forward_length"),
        "num_hidden_layers": keys.integer("block_count", MAX_LAYERS),
        "num_attention_heads": keys.integer("attention.head_count"),
        "layer_norm_eps": keys.real("attention.layer_norm_epsilon"),
        "type_vocab_size": types.shape[1],
        **vocabulary(keys),
    }


def _bert(keys: Keys) -> Reading:
    values = _sizes(keys, "bert")
    # Files of llama.cpp's first days have more positions than the context.
    table = keys.file.tensors.get("position_embd.weight")
    if table is not None and len(table.shape) == 2:
        values["max_position_embeddings"] = table.shape[1]
    return Reading(values, parts_of(keys.file, BERT, BERT_ENDS, "encoder.layer"))


def _nomic(keys: Keys) -> Reading:
    values = _sizes(keys, "nomic_bert")
    turned = values["hidden_size"] // values["num_attention_heads"]
    values |= {"rope_theta": keys.real("rope.freq_base") or 10000.0, "rope_scaling": rope(keys, turned)}
    return Reading(values, parts_of(keys.file, NOMIC, NOMIC_ENDS, "encoder.layers"))


ARCHITECTURES: dict[str, Callable[[Keys], Reading]] = {"bert": _bert, "nomic-bert": _nomic}
REFUSED = {"jina-bert-v2": "its safetensors: positions that are biases by distance (ALiBi) are not read from GGUF"}
"""Architectures that the reader knows to be beyond the models."""
