"""docs/howto-add-a-model.md shows what is: its model file is the package's, and what it quotes is in its files."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
from tests.laws import rules

from headrace import models
from headrace.backends.base import Matrix
from headrace.models import llama, nemotron_h
from headrace.models.config import ModelConfig
from headrace.models.decoder import Attention
from headrace.models.weights import Linear, Weights
from headrace.plan.counting import NUM_POSITIONS, CountingOps, CountingWeights
from headrace.plan.forms import Forms

PAGE = (rules.ROOT / "docs" / "howto-add-a-model.md").read_text(encoding="utf-8")
NAME = "starcoder2"


class InterleavedAttention(Attention):
    def make_qkv(self, weights: Weights, linear: Linear) -> Matrix:
        rows = np.arange(sum(linear.num_outs)).reshape(self.heads.num_kv_heads, -1, self.heads.head_dim)
        order = np.concatenate([rows[:, :-2].ravel(), rows[:, -2].ravel(), rows[:, -1].ravel()])
        name = linear.names[0].replace("q_proj", "query_key_value")
        return weights.matrix(linear._replace(names=[name], num_outs=[len(order)], orders=[order]))


class Layer(llama.Layer):
    make_attention = InterleavedAttention


class Model(llama.Model):
    Layer = Layer
    head_name = "embed_out"


class NotedWeights(CountingWeights):
    """Notes the requests of a model."""

    def __init__(self) -> None:
        super().__init__(Forms("bfloat16", None, None))
        self.linears: dict[str, Linear] = {}
        self.end_names: tuple[str, str] = ("", "")

    def matrix(self, linear: Linear) -> Any:
        self.linears[linear.names[0]] = linear
        return super().matrix(linear)

    def ends(self, embedding: str, head: str, shape: tuple[int, int], *, tied: bool) -> Any:
        self.end_names = embedding, head
        return super().ends(embedding, head, shape, tied=tied)


def noted(model: type[Any], config: dict[str, Any]) -> NotedWeights:
    weights = NotedWeights()
    model(ModelConfig(config), weights, CountingOps(), NUM_POSITIONS)
    return weights


def model_file(page: str) -> str:
    """The Python block of the page that is a whole module."""
    (source,) = (block for block in re.findall(r"^```python\n(.*?)^```$", page, re.M | re.S) if block.startswith('"""'))
    return str(source)


def excerpts(page: str) -> list[tuple[str, str]]:
    """(path, code) of each indented block that follows the name of its file."""
    pairs = re.findall(r"`([\w./]+\.(?:py|h|cpp))`[^`\n]*:\n\n   ```\w+\n(.*?)^   ```$", page, re.M | re.S)
    return [(path, re.sub(r"^   ", "", code, flags=re.M)) for path, code in pairs]


def absent(page: str) -> list[str]:
    """Files that lack what the page quotes from them."""
    return [path for path, code in excerpts(page) if code not in (rules.ROOT / path).read_text(encoding="utf-8")]


def test_the_pages_model_is_the_one_that_headrace_ships() -> None:
    path = rules.PACKAGE / "models" / f"{NAME}.py"
    assert model_file(PAGE) == path.read_text(encoding="utf-8")
    assert NAME in models.names()


def test_control_another_model_on_the_page_is_noticed() -> None:
    path = rules.PACKAGE / "models" / f"{NAME}.py"
    assert model_file(PAGE.replace('flag("use_bias", True)', 'flag("use_bias", False)')) != path.read_text()


def test_the_page_names_every_member_of_a_model() -> None:
    table = PAGE[PAGE.index("| member |") : PAGE.index("## Worked example")]
    members = {name for name in vars(models.Model) if not name.startswith("_")} | models.Model.__annotations__.keys()
    assert len(members) == 22
    assert {name for name in members if f"`{name}`" not in table and f"`{name}(" not in table} == set()


def test_what_the_page_quotes_is_in_the_files() -> None:
    assert len(excerpts(PAGE)) == 10
    assert absent(PAGE) == []


def test_control_a_stale_excerpt_is_noticed() -> None:
    assert absent(PAGE.replace("cap, tanh(div(v, cap))", "cap, tanh(mul(v, cap))")) == ["csrc/generic/elementwise.cpp"]
    assert excerpts(PAGE)[1][1].startswith("    def softcap")


def test_every_file_that_the_page_names_exists() -> None:
    roots = [rules.ROOT, rules.PACKAGE, rules.PACKAGE / "backends"]
    paths = set(re.findall(r"`([\w/]+\.(?:py|h|cpp))`", PAGE))
    assert len(paths) > 8
    assert [path for path in sorted(paths) if not any((root / path).exists() for root in roots)] == []


def test_a_class_declares_the_names_of_its_ends() -> None:
    assert noted(Model, llama.TINY).end_names == ("model.embed_tokens", "embed_out")
    assert noted(nemotron_h.Model, nemotron_h.TINY).end_names == ("backbone.embeddings", "lm_head")


def test_the_pages_order_puts_interleaved_heads_part_by_part() -> None:
    """Six heads of eight numbers, two KV heads: the tensor has q0 q1 q2 k0 v0 q3 q4 q5 k1 v1."""
    linear = noted(Model, llama.TINY).linears["model.layers.1.self_attn.query_key_value"]
    (order,) = linear.orders
    stored = np.repeat(["q0", "q1", "q2", "k0", "v0", "q3", "q4", "q5", "k1", "v1"], 8)
    assert order is not None
    assert stored[order][::8].tolist() == ["q0", "q1", "q2", "q3", "q4", "q5", "k0", "k1", "v0", "v1"]
    assert [part % 8 for part in order.tolist()] == [*range(8)] * 10
    assert stored[::8].tolist() != stored[order][::8].tolist()
