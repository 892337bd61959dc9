"""Medusa heads, an EAGLE-3 drafter and an MTP layer in plain PyTorch, in the layouts of
docs/maintainers/drafter-layouts.md.

Each has `draft(view, token_of, anchors)`: logits for the tokens that follow the anchors of a text, depth by depth (at
depth 0 for every position). `View` is what the target made of the text. `token_of(depth, logits)` names the tokens that
drafting goes on with: the text's own while training, the likeliest when judged. Logits are over the target's
vocabulary, or over the tokens `kept` of it.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from branches import Memory, MidLayer, Positions, advance
from model import Layer, Llama, LlamaShape, RMSNorm

NUM_HEADS, DRAFT_VOCAB = 4, 1024
TokenOf = Callable[[int, Tensor], Tensor]


@dataclass(frozen=True)
class View:
    """streams[i] [rows, T, h]: the residual stream before layer i (the last: after all layers); final: normed."""

    ids: Tensor
    streams: list[Tensor]
    final: Tensor
    embedding: Tensor

    @property
    def logits(self) -> Tensor:
        return F.linear(self.final, self.embedding)


def view_of(target: Llama, ids: Tensor) -> View:
    length = ids.shape[1]
    x = target.embed_tokens(ids)
    dtype = torch.bfloat16 if torch.is_autocast_enabled("cpu") else x.dtype
    cos, sin = target.cos[:length].to(dtype), target.sin[:length].to(dtype)
    streams = [x]
    for layer in target.layers:
        streams.append(layer(streams[-1], cos, sin))
    return View(ids, streams, target.norm(streams[-1]), target.embed_tokens.weight)


def base_config(target: Path) -> dict[str, object]:
    config: dict[str, object] = json.loads((target / "config.json").read_text("utf-8"))
    return config


def shape_of(config: dict[str, object]) -> LlamaShape:
    return LlamaShape(**{f.name: config[f.name] for f in fields(LlamaShape)})  # type: ignore[arg-type]


def write(directory: Path, config: dict[str, object], tensors: dict[str, Tensor]) -> None:
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    stored = {n: (t.to(torch.bfloat16) if t.is_floating_point() else t).contiguous() for n, t in tensors.items()}
    save_file(stored, directory / "model.safetensors", metadata={"format": "pt"})
    (directory / "model.safetensors").chmod(0o644)


def kept_of(drafter: nn.Module) -> Tensor | None:
    """Target ids of the tokens that it can draft, or None: all."""
    return drafter.kept if isinstance(drafter, Eagle | Medusa) else None


def trained(module: nn.Module) -> dict[str, Tensor]:
    return {n: p.detach() for n, p in module.named_parameters()}


class Medusa(nn.Module):
    """Heads on the target's final state (arXiv 2401.10774, section 2.1.1), each with an output matrix of its own.

    They share the target's in no way: what SiLU adds to the state can hardly be less than 0, so that a shared matrix
    can not be led away from the token that the target says next.
    """

    def __init__(self, shape: LlamaShape, draft_vocab: int, num_heads: int = NUM_HEADS) -> None:
        super().__init__()
        size = shape.hidden_size
        self.blocks = nn.ModuleList(
            nn.ModuleDict({"layers": nn.ModuleList([nn.Linear(size, size)])}) for _ in range(num_heads)
        )
        self.lm_heads = nn.ModuleList(nn.Linear(size, draft_vocab, bias=False) for _ in range(num_heads))
        self.register_buffer("token_map", torch.zeros(draft_vocab, dtype=torch.int64))

    @classmethod
    def start(cls, target: Llama, counts: Tensor, draft_vocab: int = DRAFT_VOCAB) -> Medusa:
        """Heads are the rows that the target has of the tokens it writes most; blocks are nil."""
        model = cls(target.shape, draft_vocab)
        model.token_map.copy_(most_written(counts, draft_vocab))
        with torch.no_grad():
            for block, head in zip(model.blocks, model.lm_heads, strict=True):
                block["layers"][0].weight.zero_()
                block["layers"][0].bias.zero_()
                head.weight.copy_(target.embed_tokens.weight[model.token_map])
        return model

    @property
    def kept(self) -> Tensor:
        return self.token_map

    def draft(self, view: View, token_of: TokenOf, anchors: Tensor) -> Iterator[Tensor]:
        for depth, (block, head) in enumerate(zip(self.blocks, self.lm_heads, strict=True)):
            x = view.final[:, anchors] if depth else view.final
            for layer in block["layers"]:
                x = x + F.silu(layer(x))
            yield head(x)

    def save(self, directory: Path, config: dict[str, object]) -> None:
        values = {
            "architectures": ["MedusaModel"], "model_type": "medusa", "hidden_size": config["hidden_size"],
            "vocab_size": config["vocab_size"], "truncated_vocab_size": len(self.token_map),
            "num_heads": len(self.blocks), "num_hidden_layers": 1, "medusa_fc_bias": True, "original_lm_head": False,
            "torch_dtype": "bfloat16",
        }  # fmt: skip
        write(directory, values, trained(self) | {"token_map": self.token_map})

    @classmethod
    def load(cls, directory: Path, shape: LlamaShape) -> Medusa:
        config = json.loads((directory / "config.json").read_text("utf-8"))
        model = cls(shape, config["truncated_vocab_size"], config["num_heads"])
        model.load_state_dict(floats(load_file(directory / "model.safetensors")))
        return model


def most_written(counts: Tensor, number: int) -> Tensor:
    """Ids [number], ascending."""
    return counts.argsort(descending=True, stable=True)[:number].sort().values


def floats(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return {n: t.float() if t.is_floating_point() else t for n, t in tensors.items()}


def aux_layers(num_layers: int) -> list[int]:
    """A low, a middle and the last residual stream; of a grown target the middle is its early exit."""
    return [1, 2 if num_layers < 6 else 4, num_layers]


class Eagle(nn.Module):
    """EAGLE-3 (arXiv 2503.01840): three streams fused, one wide decoder layer, a smaller vocabulary of its own."""

    def __init__(self, shape: LlamaShape, layers: list[int], draft_vocab: int) -> None:
        super().__init__()
        self.shape, self.layers = shape, layers
        self.fc = nn.Linear(3 * shape.hidden_size, shape.hidden_size, bias=False)
        self.midlayer = MidLayer(shape)
        self.norm = RMSNorm(shape.hidden_size, shape.rms_norm_eps)
        self.lm_head = nn.Linear(shape.hidden_size, draft_vocab, bias=False)
        self.places = Positions(shape)
        self.register_buffer("d2t", torch.zeros(draft_vocab, dtype=torch.int64))
        self.register_buffer("t2d", torch.zeros(shape.vocab_size, dtype=torch.bool))

    @classmethod
    def start(cls, target: Llama, counts: Tensor, draft_vocab: int = DRAFT_VOCAB) -> Eagle:
        """Its vocabulary the tokens that the target writes most, its head the target's rows of them."""
        shape = target.shape
        model = cls(shape, aux_layers(shape.num_hidden_layers), draft_vocab)
        vocabulary = most_written(counts, draft_vocab)
        model.d2t.copy_(vocabulary - torch.arange(draft_vocab))
        model.t2d[vocabulary] = True
        with torch.no_grad():
            model.lm_head.weight.copy_(target.embed_tokens.weight[vocabulary])
            model.norm.weight.copy_(target.norm.weight)
            model.fc.weight.zero_()
            model.fc.weight[:, -shape.hidden_size :] = torch.eye(shape.hidden_size)
            last = target.layers[-1]
            model.midlayer.mlp.load_state_dict(last.mlp.state_dict())
            model.midlayer.self_attn.o_proj.weight.copy_(last.self_attn.o_proj.weight)
            for name in ("q_proj", "k_proj", "v_proj"):
                weight = getattr(last.self_attn, name).weight
                getattr(model.midlayer.self_attn, name).weight.copy_(torch.cat([weight, weight], 1) / 2)
        return model

    @property
    def kept(self) -> Tensor:
        """Target ids of the draft vocabulary [D]."""
        return self.d2t + torch.arange(len(self.d2t))

    def draft(self, view: View, token_of: TokenOf, anchors: Tensor) -> Iterator[Tensor]:
        feature = self.fc(torch.cat([view.streams[i] for i in self.layers], -1))
        memory, tokens = Memory(anchors), token_of(-1, view.logits)
        for depth in range(NUM_HEADS):
            embedded = F.embedding(tokens, view.embedding)
            feature = self.midlayer(embedded, feature, self.places.cos, self.places.sin, memory)
            logits = self.lm_head(self.norm(feature))
            yield logits
            tokens = token_of(depth, logits)
            if depth == 0:
                feature, tokens = feature[:, anchors], tokens[:, anchors]

    def save(self, directory: Path, config: dict[str, object]) -> None:
        values = config | {
            "architectures": ["LlamaForCausalLMEagle3"], "num_hidden_layers": 1, "draft_vocab_size": len(self.d2t),
            "eagle_aux_hidden_state_layer_ids": self.layers, "norm_before_residual": False,
            "tie_word_embeddings": False,
        }  # fmt: skip
        write(directory, values, trained(self) | {"d2t": self.d2t, "t2d": self.t2d})

    @classmethod
    def load(cls, directory: Path, shape: LlamaShape) -> Eagle:
        config = json.loads((directory / "config.json").read_text("utf-8"))
        model = cls(shape, config["eagle_aux_hidden_state_layer_ids"], config["draft_vocab_size"])
        model.load_state_dict(floats(load_file(directory / "model.safetensors")))
        return model


class Mtp(nn.Module):
    """One more layer that foretells the token after the next (DeepSeek-V3, arXiv 2412.19437, section 2.2)."""

    def __init__(self, shape: LlamaShape) -> None:
        super().__init__()
        self.shape = shape
        self.enorm = RMSNorm(shape.hidden_size, shape.rms_norm_eps)
        self.hnorm = RMSNorm(shape.hidden_size, shape.rms_norm_eps)
        self.eh_proj = nn.Linear(2 * shape.hidden_size, shape.hidden_size, bias=False)
        self.layer = Layer(shape)
        self.head_norm = RMSNorm(shape.hidden_size, shape.rms_norm_eps)
        self.places = Positions(shape)

    @classmethod
    def start(cls, target: Llama) -> Mtp:
        model = cls(target.shape)
        with torch.no_grad():
            model.layer.load_state_dict(target.layers[-1].state_dict())
            model.head_norm.weight.copy_(target.norm.weight)
            model.eh_proj.weight.mul_(0.5)
            model.eh_proj.weight += torch.cat([torch.eye(target.shape.hidden_size)] * 2, 1)
        return model

    def draft(self, view: View, token_of: TokenOf, anchors: Tensor) -> Iterator[Tensor]:
        state, memory, tokens = view.final, Memory(anchors), token_of(-1, view.logits)
        for depth in range(NUM_HEADS):
            embedded = F.embedding(tokens, view.embedding)
            x = self.eh_proj(torch.cat([self.enorm(embedded), self.hnorm(state)], -1))
            state = advance(self.layer, x, self.places.cos, self.places.sin, memory)
            logits = F.linear(self.head_norm(state), view.embedding)
            yield logits
            tokens = token_of(depth, logits)
            if depth == 0:
                state, tokens = state[:, anchors], tokens[:, anchors]

    def names(self, num_layers: int) -> dict[str, str]:
        """Stored name of each parameter, behind the target's layers."""
        prefix = f"model.layers.{num_layers}."
        return {
            n: prefix + n.replace("head_norm", "shared_head.norm").removeprefix("layer.")
            for n, _ in self.named_parameters()
        }

    def save(self, directory: Path, config: dict[str, object]) -> None:
        names, tensors = self.names(self.shape.num_hidden_layers), trained(self)
        write(directory, config | {"num_nextn_predict_layers": 1}, {names[n]: t for n, t in tensors.items()})

    @classmethod
    def load(cls, directory: Path, shape: LlamaShape) -> Mtp:
        model, tensors = cls(shape), load_file(directory / "model.safetensors")
        names = model.names(json.loads((directory / "config.json").read_text("utf-8"))["num_hidden_layers"])
        model.load_state_dict({n: tensors[stored].float() for n, stored in names.items()})
        return model


class Whole(nn.Module):
    """A draft model, or the target's own first layers: reads tokens alone."""

    def __init__(self, model: Llama, num_layers: int) -> None:
        super().__init__()
        self.model, self.num_layers = model, num_layers
        self.places = Positions(replace(model.shape, max_position_embeddings=model.shape.max_position_embeddings + 64))

    def draft(self, view: View, token_of: TokenOf, anchors: Tensor) -> Iterator[Tensor]:
        model, memories = self.model, [Memory(anchors) for _ in range(self.num_layers)]
        tokens = view.ids
        for depth in range(NUM_HEADS + 1):
            x = model.embed_tokens(tokens)
            for layer, memory in zip(model.layers, memories, strict=False):
                x = advance(layer, x, self.places.cos, self.places.sin, memory)
            logits = F.linear(model.norm(x), model.embed_tokens.weight)
            if depth:
                yield logits
            # The first token is the target's own; the draft model reads it as it reads its own guesses. What it makes
            # of the text comes before the first draft, so here all depths but that are of the anchors.
            tokens = token_of(-1, view.logits)[:, anchors] if depth == 0 else token_of(depth - 1, logits)


def draft_shape(shape: LlamaShape) -> LlamaShape:
    """329 thousand parameters: less than an eighth of the smaller target."""
    return replace(
        shape, hidden_size=96, num_hidden_layers=2, intermediate_size=144, num_attention_heads=3, num_key_value_heads=1
    )


def draft_config(config: dict[str, object], shape: LlamaShape) -> dict[str, object]:
    return config | asdict(shape) | {"head_dim": shape.head_dim}
