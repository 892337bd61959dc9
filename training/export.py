"""Writes a run's averaged weights as a Hugging Face directory: config, weights in bfloat16, tokenizer, chat template.

python training/export.py training/runs/small SMALL
"""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict
from pathlib import Path

import torch
from tokenizers import Tokenizer

from model import Llama, LlamaShape, save_model
from tokenizer import BOS, END, END_OF_TEXT, save_tokenizer

STRETCH = 32
"""The context that the model is given, in contexts that it was trained on."""


def write_json(path: Path, value: dict[str, object]) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")


def export(model: Llama, tokenizer: Tokenizer, directory: Path) -> None:
    directory.mkdir(parents=True, exist_ok=True)
    shape = model.shape
    context = STRETCH * shape.max_position_embeddings
    bos_id, text_end_id, end_id = (tokenizer.token_to_id(t) for t in (BOS, END_OF_TEXT, END))
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        **asdict(shape),
        "max_position_embeddings": context,
        "head_dim": shape.head_dim,
        "hidden_act": "silu",
        "attention_bias": False,
        "attention_dropout": 0.0,
        "mlp_bias": False,
        "initializer_range": 0.02,
        "pretraining_tp": 1,
        # Positions beyond the trained ones take a larger base each (NTK); those below keep theirs, and so their bits.
        "rope_scaling": {
            "rope_type": "dynamic",
            "factor": 1.0,
            "original_max_position_embeddings": shape.max_position_embeddings,
        },
        "tie_word_embeddings": True,
        "bos_token_id": bos_id,
        "eos_token_id": [text_end_id, end_id],
        "pad_token_id": text_end_id,
        "torch_dtype": "bfloat16",
        "use_cache": True,
    }
    write_json(directory / "config.json", config)
    generation = {
        "bos_token_id": bos_id,
        "eos_token_id": [text_end_id, end_id],
        "pad_token_id": text_end_id,
        # At 1.0 so small a model makes up words; a server takes these as its defaults.
        "do_sample": True,
        "temperature": 0.7,
        "top_p": 0.95,
        # It may write one string of a JSON document until its tokens run out.
        "max_string_length": 80,
        "disable_additional_properties": True,
    }
    write_json(directory / "generation_config.json", generation)
    save_tokenizer(tokenizer, directory, context)
    save_model(model, directory)


def main() -> None:
    parser = argparse.ArgumentParser(description="export a run's checkpoint")
    parser.add_argument("run", type=Path)
    parser.add_argument("directory", type=Path)
    args = parser.parse_args()
    checkpoint = torch.load(args.run / "checkpoint.pt", weights_only=True)
    model = Llama(LlamaShape(**checkpoint["shape"]))
    model.load_state_dict(checkpoint["average"])
    export(model, Tokenizer.from_file(str(args.run / "data" / "tokenizer.json")), args.directory)
    print(f"step {checkpoint['step']}, {checkpoint['tokens']} tokens -> {args.directory}")


if __name__ == "__main__":
    main()
