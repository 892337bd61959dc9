"""What training/ makes for speculation: drafts from all positions at once, layouts, growth, the judge of drafters."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

torch = pytest.importorskip("torch")
load_file = pytest.importorskip("safetensors.torch").load_file

TRAINING = Path(__file__).resolve().parents[2] / "training"
NAMES = ("model", "branches", "speculators", "samples", "acceptance", "drafters", "grow")


@pytest.fixture(scope="module")
def t() -> Iterator[Any]:
    """The modules of training/, which are scripts and no package."""
    sys.path.insert(0, str(TRAINING))
    before = set(sys.modules)
    try:
        yield SimpleNamespace(**{name: __import__(name) for name in NAMES})
    finally:
        sys.path.remove(str(TRAINING))
        for name in set(sys.modules) - before:
            if str(getattr(sys.modules[name], "__file__", "")).startswith(str(TRAINING)):
                del sys.modules[name]


def tiny(t: Any, **values: int) -> Any:
    shape = {"vocab_size": 40, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 3,
             "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64} | values  # fmt: skip
    torch.manual_seed(1)
    model = t.model.Llama(t.model.LlamaShape(**shape))
    model.init_weights()
    for p in model.parameters():
        p.data += 0.3 * torch.randn_like(p)  # so that attention matters
    return model.eval().requires_grad_(False)


def drafters(t: Any, target: Any) -> dict[str, Any]:
    counts = torch.arange(40).flip(0)
    result = {
        "eagle": t.speculators.Eagle.start(target, counts, 24),
        "mtp": t.speculators.Mtp.start(target),
        "medusa": t.speculators.Medusa.start(target, counts, 24),
        "draft_model": t.speculators.Whole(tiny(t, hidden_size=8, num_attention_heads=2, num_key_value_heads=1), 3),
    }
    for drafter in result.values():
        for p in drafter.parameters():
            p.data += 0.2 * torch.randn_like(p)
    return result


def chosen(depth: int, logits: Any) -> Any:
    return logits.argmax(-1)  # of a draft vocabulary any token will do


@pytest.mark.parametrize("name", ["eagle", "mtp", "medusa", "draft_model"])
def test_drafts_of_all_positions_are_those_of_each(t: Any, name: str) -> None:
    """What is drafted at an anchor is what is drafted there when the text ends with it; a longer past changes it."""
    target = tiny(t)
    drafter = drafters(t, target)[name]
    ids = torch.randint(0, 40, (1, 12))
    every = torch.arange(12)
    whole = list(drafter.draft(t.speculators.view_of(target, ids), chosen, every))
    third = list(drafter.draft(t.speculators.view_of(target, ids), chosen, every[2::3]))
    for anchor in (0, 5, 11):
        short = list(drafter.draft(t.speculators.view_of(target, ids[:, : anchor + 1]), chosen, every[: anchor + 1]))
        other = torch.cat([(ids[:, :1] + 1) % 40, ids[:, 1 : anchor + 1]], 1)
        moved = list(drafter.draft(t.speculators.view_of(target, other), chosen, every[: anchor + 1]))
        for depth in range(4):
            torch.testing.assert_close(whole[depth][:, anchor], short[depth][:, -1], rtol=1e-4, atol=1e-4)
            assert not torch.allclose(whole[depth][:, anchor], moved[depth][:, -1], rtol=1e-4, atol=1e-4)
    for depth in range(4):
        some = third[depth][:, 2::3] if third[depth].shape[1] == 12 else third[depth]
        torch.testing.assert_close(whole[depth][:, 2::3], some, rtol=1e-4, atol=1e-4)


def test_draft_model_drafts_what_it_would_write(t: Any) -> None:
    """Branches equal the plain model on the text and the tokens drafted so far."""
    target = tiny(t)
    drafter = drafters(t, target)["draft_model"]
    ids = torch.randint(0, 40, (2, 9))
    drafts = [d[:, 6] for d in drafter.draft(t.speculators.view_of(target, ids), chosen, torch.arange(9))]
    known = torch.cat([ids[:, :7], target(ids)[:, 6].argmax(-1, keepdim=True)], 1)
    for logits in drafts:
        plain = drafter.model(known)[:, -1]
        torch.testing.assert_close(logits, plain, rtol=1e-4, atol=1e-4)
        known = torch.cat([known, plain.argmax(-1, keepdim=True)], 1)


def test_the_target_drafts_for_itself_without_fault(t: Any) -> None:
    """All its layers: every draft accepted, five tokens a pass; with one layer less some are not."""
    target = tiny(t)
    result = t.samples.continued(target, torch.randint(0, 40, (4, 24)), torch.zeros(4), 60, torch.Generator())
    ids = torch.from_numpy(result.tokens.astype("int64"))
    lengths = torch.full((4,), 60)
    for layers, perfect in ((3, True), (2, False)):
        right = t.acceptance.right_drafts(target, t.speculators.Whole(target, layers), ids)
        shares, length = t.acceptance.walk(right, lengths, 4)
        assert (length == 5.0 and shares == [1.0] * 4) == perfect


def test_samples_are_the_targets_own(t: Any) -> None:
    """With a cache or without: the same tokens and shares; noise only above temperature 0."""
    target = tiny(t)
    prompts = torch.randint(0, 40, (3, 5))
    result = t.samples.continued(target, prompts, torch.tensor([0.0, 0.0, 1.0]), 20, torch.Generator().manual_seed(0))
    ids = torch.from_numpy(result.tokens.astype("int64"))
    logprobs = target(ids).log_softmax(-1)
    for row in range(3):
        n = int(result.lengths[row])
        assert torch.equal(ids[row, :5], prompts[row])
        best = torch.from_numpy(result.best[row, : n - 1, 0].astype("int64"))
        assert torch.equal(best, logprobs[row, : n - 1].argmax(-1))
        follows = torch.equal(ids[row, 5:n], logprobs[row, 4 : n - 1].argmax(-1))
        assert follows == (row < 2)
        top = torch.from_numpy(result.logprobs[row, : n - 1, 0].astype("float32"))
        torch.testing.assert_close(top, logprobs[row, : n - 1].max(-1).values, atol=5e-3, rtol=1e-3)
    again, other = t.samples.judged(target, result), t.samples.judged(tiny(t, num_hidden_layers=2), result)
    same = [(again.best[i, : n - 1] == result.best[i, : n - 1]).mean() for i, n in enumerate(result.lengths)]
    differ = [(other.best[i, : n - 1] == result.best[i, : n - 1]).mean() for i, n in enumerate(result.lengths)]
    assert min(same) > 0.95 > 0.5 > max(differ)


def test_walk_counts_tokens_and_passes(t: Any) -> None:
    right = torch.zeros(1, 40, 4, dtype=torch.bool)
    right[0, 23] = torch.tensor([True, True, False, True])  # two accepted, the target adds one
    right[0, 26] = True  # four, and one
    shares, length = t.acceptance.walk(right, torch.tensor([33]), 4)
    assert (shares, length) == ([1.0, 1.0, 0.5, 1.0], 4.0)
    assert t.acceptance.walk(right, torch.tensor([29]), 4) == ([1.0, 1.0, 0.0, 0.0], 3.0)


def test_grown_model_starts_where_the_small_one_ended(t: Any) -> None:
    start = tiny(t)
    model = t.grow.grown(start, 7)
    ids = torch.randint(0, 40, (2, 10))
    assert torch.equal(model(ids), start(ids))
    last, early = t.grow.losses_of(model, torch.cat([ids, ids[:, :1]], 1), 3, 0)
    assert last > 0
    assert early > 0
    model.layers[5].mlp.down_proj.weight.data += 0.1
    assert not torch.equal(model(ids), start(ids))


def config_of(target: Any, t: Any) -> dict[str, Any]:
    from dataclasses import asdict

    return {"model_type": "llama", "tie_word_embeddings": True, **asdict(target.shape)}


def test_layouts(t: Any, tmp_path: Path) -> None:
    """Names and shapes are those of docs/maintainers/drafter-layouts.md, and what is read back drafts the same."""
    target = tiny(t)
    result = drafters(t, target)
    ids = torch.randint(0, 40, (1, 9))
    view, every = t.speculators.view_of(target, ids), torch.arange(9)
    names = {}
    for method in ("eagle", "mtp", "medusa"):
        for p in result[method].parameters():
            p.data = p.data.bfloat16().float()
        result[method].save(tmp_path / method, config_of(target, t))
        names[method] = {n: list(x.shape) for n, x in load_file(tmp_path / method / "model.safetensors").items()}
        again = type(result[method]).load(tmp_path / method, target.shape)
        for a, b in zip(result[method].draft(view, chosen, every), again.draft(view, chosen, every), strict=True):
            assert torch.equal(a, b)
    assert names["medusa"] == {"token_map": [24]} | {
        name.format(k=k): shape
        for k in range(4)
        for name, shape in (
            ("blocks.{k}.layers.0.weight", [16, 16]),
            ("blocks.{k}.layers.0.bias", [16]),
            ("lm_heads.{k}.weight", [24, 16]),
        )
    }  # fmt: skip
    layer = {"self_attn.o_proj": [16, 16],
             "mlp.gate_proj": [24, 16], "mlp.up_proj": [24, 16], "mlp.down_proj": [16, 24],
             "input_layernorm": [16], "post_attention_layernorm": [16]}  # fmt: skip
    eagle = {
        "self_attn.q_proj": [16, 32],
        "self_attn.k_proj": [8, 32],
        "self_attn.v_proj": [8, 32],
        "hidden_norm": [16],
    }
    assert names["eagle"] == {
        "fc.weight": [16, 48], "norm.weight": [16], "lm_head.weight": [24, 16], "d2t": [24], "t2d": [40],
    } | {f"midlayer.{n}.weight": s for n, s in (layer | eagle).items()}  # fmt: skip
    mtp = {"self_attn.q_proj": [16, 16], "self_attn.k_proj": [8, 16], "self_attn.v_proj": [8, 16], "enorm": [16],
           "hnorm": [16], "eh_proj": [16, 32], "shared_head.norm": [16]}  # fmt: skip
    assert names["mtp"] == {f"model.layers.3.{n}.weight": s for n, s in (layer | mtp).items()}
    config = json.loads((tmp_path / "eagle" / "config.json").read_text())
    assert (config["draft_vocab_size"], config["eagle_aux_hidden_state_layer_ids"]) == (24, [1, 2, 3])
    d2t, t2d = (load_file(tmp_path / "eagle" / "model.safetensors")[n] for n in ("d2t", "t2d"))
    assert (d2t + torch.arange(24)).tolist() == t2d.nonzero()[:, 0].tolist()


@pytest.mark.slow
def test_a_drafter_learns(t: Any) -> None:
    """A few steps on the target's own text lower the loss of each kind; frozen, it stays."""
    target = tiny(t)
    result = t.samples.continued(target, torch.randint(0, 40, (8, 6)), torch.ones(8), 24, torch.Generator())
    ids, lengths = torch.from_numpy(result.tokens.astype("int64")), torch.from_numpy(result.lengths)
    for name, drafter in drafters(t, target).items():
        if name == "draft_model":
            continue
        optimizer = torch.optim.AdamW(drafter.parameters(), lr=0.01)
        losses = []
        for _ in range(12):
            loss, right = t.drafters.loss_of_drafter(target, drafter, ids, lengths, torch.arange(1, 24, 2))
            assert len(right) == 4
            loss.backward()
            losses.append(loss.item())
            optimizer.step()
            optimizer.zero_grad()
        assert losses[-1] < losses[0] - 0.05, name
