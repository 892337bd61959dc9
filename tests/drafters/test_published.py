"""Checkpoints in published layouts, made by hand with random weights: what the drafter foretells at every depth is what
the published forward pass in plain torch says. One fault in each layout is planted, and seen."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from tests.drafters import plain
from tests.drafters.play import GREEDY, Greedy, spec_of, target_of
from tests.drafters.published import (
    BLOCK,
    EAGLE3,
    HIDDEN,
    MTP,
    TARGET,
    VOCAB,
    eagle1_files,
    eagle3_files,
    medusa_files,
    mtp_files,
    save,
)
from tests.support.harness import save_random
from torch import Tensor

from headrace.backends.cpu.check.verify import verify
from headrace.drafters import eagle, medusa, mtp
from headrace.drafters.base import F32, Context, Drafter
from headrace.protocol.errors import CheckpointError, RequestError

NUM_TOKENS, DEPTH = 41, 3
TOLERANCE = 1e-4


class Recording(Greedy):
    """Keeps the logits that it was asked to choose from."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[F32] = []

    def choose(self, logits: F32, contexts: Any, tails: Any) -> list[int]:
        self.seen.append(logits.copy())
        return super().choose(logits, contexts, tails)


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Tensor, Tensor]:
    """A target: its directory, embedding and head."""
    directory = tmp_path_factory.mktemp("target")
    model = save_random(TARGET, directory)
    return directory, model.model.embed_tokens.weight.detach(), model.lm_head.weight.detach()


def foretold(
    drafter: Drafter, guide: Recording, width: int, chunk: int = 17, close: bool = True
) -> tuple[list[int], Tensor, list[int]]:
    """Play a random sequence; -> its tokens, its features, the draft. The guide has the logits."""
    random = np.random.default_rng(3)
    tokens = random.integers(0, VOCAB, NUM_TOKENS).tolist()
    features = random.normal(size=(NUM_TOKENS - 1, width)).astype(np.float32)
    for start in range(0, NUM_TOKENS - 1, chunk):
        drafter.observe(7, start, tokens[start : NUM_TOKENS - 1][:chunk], features[start : start + chunk])
    (draft,) = drafter.propose([Context(7, tokens, 5, GREEDY, DEPTH, DEPTH)])
    assert len(draft.token_ids) == DEPTH
    if close:
        drafter.close()
    return tokens, torch.from_numpy(features), draft.token_ids


def followed(step: Callable[[Tensor, Tensor], Any], features: Tensor, embedded: Callable[[list[int]], Tensor],
             tokens: list[int], drafted: list[int]) -> list[Tensor]:  # fmt: skip
    """Logits at each depth: after the target's features the drafter's own."""
    ids, result = tokens[1:], []
    for depth in range(DEPTH):
        state_features, logits = step(features, embedded(ids))
        result.append(logits[-1])
        features = torch.cat([features, state_features[-1:]])
        ids = [*ids, drafted[depth]]
    return result


def agree(seen: list[F32], expected: list[Tensor], token_ids: Tensor | None = None) -> bool:
    for row, logits in zip(seen, expected, strict=True):
        logits_row = row[0] if token_ids is None else row[0][token_ids.numpy()]
        if np.abs(logits_row - logits.numpy()).max() > TOLERANCE:
            return False
        if token_ids is not None:
            others = np.delete(row[0], token_ids.numpy())
            assert (others == -np.inf).all()
    return True


EAGLE1 = [{}, {"bias": True}, {"num_hidden_layers": 2}]


@pytest.mark.parametrize("backend", ["cpu", "torch_ref"])
@pytest.mark.parametrize("change", EAGLE1, ids=["plain", "bias", "two layers"])
def test_eagle_1(change: dict[str, Any], backend: str, base: Any, tmp_path: Path) -> None:
    directory, table, head = base
    config = BLOCK | change
    weights = eagle1_files(tmp_path, config)
    guide = Recording()
    drafter = eagle.make(spec_of(method="eagle", model=str(tmp_path)), target_of(directory, backend, guide))
    assert drafter.feature_layers == ()
    tokens, features, drafted = foretold(drafter, guide, HIDDEN)
    expected = followed(lambda x, e: plain.eagle1(x, e, weights, config, head), features, lambda ids: table[ids],
                      tokens, drafted)  # fmt: skip
    assert agree(guide.seen, expected)
    assert not agree(guide.seen, [logits.roll(1) for logits in expected])  # control


@pytest.mark.parametrize("backend", ["cpu", "torch_ref"])
@pytest.mark.parametrize("kind", EAGLE3)
def test_eagle_3(kind: str, backend: str, base: Any, tmp_path: Path) -> None:
    directory, table, _ = base
    weights, config = eagle3_files(tmp_path, EAGLE3[kind], own_table=kind == "two layers")
    guide = Recording()
    drafter = eagle.make(spec_of(method="eagle3", model=str(tmp_path)), target_of(directory, backend, guide))
    wanted_layers = {"layers told": (1, 3, 6), "layers told inside": (0, 5)}.get(kind, (2, 3, 3))
    assert drafter.feature_layers == wanted_layers
    tokens, features, drafted = foretold(drafter, guide, len(wanted_layers) * HIDDEN)
    if "embed_tokens.weight" in weights:
        table = weights["embed_tokens.weight"]
    expected = followed(
        lambda x, e: plain.eagle3(x, e, weights, config, weights["lm_head.weight"], config["name"]),
        plain.fused(features, weights, config), lambda ids: table[ids], tokens, drafted,
    )  # fmt: skip
    ids = weights["d2t"] + torch.arange(config["size"]) if "d2t" in weights else None
    assert agree(guide.seen, expected, ids)
    assert all(token_id in ids.tolist() for token_id in drafted) if ids is not None else True
    other = config | {"norm_before_residual": not config.get("norm_before_residual", False)}
    wrong = followed(
        lambda x, e: plain.eagle3(x, e, weights, other, weights["lm_head.weight"], config["name"]),
        plain.fused(features, weights, config), lambda ids: table[ids], tokens, drafted,
    )  # fmt: skip
    assert not agree(guide.seen, wrong, ids)  # control: the two kinds of residual differ


@pytest.mark.parametrize("backend", ["cpu", "torch_ref"])
@pytest.mark.parametrize("kind", MTP)
def test_mtp_beside_the_target(kind: str, backend: str, base: Any, tmp_path: Path) -> None:
    directory, table, head = base
    weights, names = mtp_files(kind, TARGET)
    save(tmp_path, TARGET | {"num_nextn_predict_layers": 1}, weights)
    guide = Recording()
    drafter = mtp.make(spec_of(method="mtp", model=str(tmp_path)), target_of(directory, backend, guide))
    tokens, features, drafted = foretold(drafter, guide, HIDDEN)
    expected = followed(lambda x, e: plain.mtp(x, e, weights, TARGET, head, names), features, lambda ids: table[ids],
                      tokens, drafted)  # fmt: skip
    assert agree(guide.seen, expected)
    turned = (*names[:5], not names[5], names[6])
    wrong = followed(lambda x, e: plain.mtp(x, e, weights, TARGET, head, turned), features, lambda ids: table[ids],
                     tokens, drafted)  # fmt: skip
    assert not agree(guide.seen, wrong)  # control: the order of the two halves counts


def test_mtp_with_an_embedding_and_a_head_of_its_own_beside_further_layers(base: Any, tmp_path: Path) -> None:
    directory, _, _ = base
    weights, names = mtp_files("deepseek", TARGET)
    random_weights = plain.random_weights(
        {"model.layers.6.embed_tokens.weight": (VOCAB, HIDDEN),
         "model.layers.6.shared_head.head.weight": (VOCAB, HIDDEN),
         "model.layers.7.eh_proj.weight": (HIDDEN, 2 * HIDDEN)}, seed=9
    )  # fmt: skip
    save(tmp_path, TARGET | {"num_nextn_predict_layers": 2}, weights | random_weights)
    guide = Recording()
    drafter = mtp.make(spec_of(method="mtp", model=str(tmp_path)), target_of(directory, guide=guide))
    tokens, features, drafted = foretold(drafter, guide, HIDDEN)
    table, head = (
        random_weights["model.layers.6.embed_tokens.weight"],
        random_weights["model.layers.6.shared_head.head.weight"],
    )
    expected = followed(lambda x, e: plain.mtp(x, e, weights, TARGET, head, names), features, lambda ids: table[ids],
                      tokens, drafted)  # fmt: skip
    assert agree(guide.seen, expected)


@pytest.mark.parametrize("model_type", ["llama", "qwen2", "qwen3"])
def test_mtp_in_the_targets_own_checkpoint(model_type: str, tmp_path: Path) -> None:
    config = TARGET | {"model_type": model_type, "num_nextn_predict_layers": 1}
    if model_type == "qwen3":
        config["head_dim"] = 12
    model = save_random(config, tmp_path)
    weights, names = mtp_files("deepseek", config, bias=model_type == "qwen2")
    if model_type == "qwen3":
        shapes = {f"model.layers.6.self_attn.{p}_norm.weight": (12,) for p in "qk"}
        weights |= plain.random_weights(shapes, seed=4)
    save_file(weights | {k: v.contiguous() for k, v in model.state_dict().items()}, str(tmp_path / "model.safetensors"))
    guide = Recording()
    drafter = mtp.make(spec_of(method="mtp"), target_of(tmp_path, guide=guide))
    tokens, features, drafted = foretold(drafter, guide, HIDDEN)
    table, head = model.model.embed_tokens.weight.detach(), model.lm_head.weight.detach()
    expected = followed(lambda x, e: plain.mtp(x, e, weights, config, head, names), features, lambda ids: table[ids],
                      tokens, drafted)  # fmt: skip
    assert agree(guide.seen, expected)


MEDUSA = ("vllm", "vllm, one head", "vllm, the target's head", "vllm, token_map", "published", "published, prefixed")


@pytest.mark.parametrize("backend", ["cpu", "torch_ref"])
@pytest.mark.parametrize("kind", MEDUSA)
def test_medusa(kind: str, backend: str, base: Any, tmp_path: Path) -> None:
    directory, _, own_head = base
    actual = medusa_files(tmp_path, kind)
    guide = Recording()
    spec = spec_of(method="medusa", model=str(tmp_path), num_speculative_tokens=DEPTH)
    drafter = medusa.make(spec, target_of(directory, backend, guide))
    assert drafter.feature_layers == ()
    _, features, _ = foretold(drafter, guide, HIDDEN)
    expected = []
    for k in range(DEPTH):
        y = features[-1]
        for j in range(2):
            y = y + torch.nn.functional.silu(plain.linear(y, actual["weights"], actual["block"].format(k=k, j=j)))
        name = actual["head"].format(k=0 if kind == "vllm, one head" else k)
        head = own_head if kind == "vllm, the target's head" else actual["weights"][f"{name}.weight"]
        expected.append(y @ head.T)
    ids = None if actual["ids"] is None else torch.tensor(actual["ids"])
    assert agree(guide.seen, expected, ids)
    assert not agree(guide.seen, expected[1:] + expected[:1], ids)  # control: heads are not the same


# A refusal names the part that does not fit.

REFUSED: list[tuple[str, Callable[[Path], Any], str]] = [
    ("eagle", lambda path: eagle1_files(path, BLOCK | {"vocab_size": 77}), "a vocabulary of 77, the model has 199"),
    ("eagle", lambda path: (eagle1_files(path, BLOCK), _config(path, intermediate_size=8))[0], "has shape"),
    ("eagle", lambda path: save(path, BLOCK, {"a.weight": torch.zeros(2)}), "no EAGLE checkpoint"),
    ("eagle", lambda path: save(path, BLOCK, {"fusion_fc.weight": torch.zeros(2)}), "older form"),
    ("eagle", lambda path: eagle3_files(path, {"eagle_aux_hidden_state_layer_ids": [1, 2, 7]}), "layers 0 to 6"),
    ("eagle", lambda path: (eagle3_files(path, {}), _config(path, eagle_aux_hidden_state_layer_ids=[1, 2]))[0],
     "fc.weight takes 144 features; the model gives 2 layers of 48"),
    ("eagle", lambda path: (eagle3_files(path, {}), _config(path, draft_vocab_size=9))[0], "there is no d2t"),
    ("eagle", lambda path: (eagle3_files(path, EAGLE3["published"]), _twice(path, "d2t"))[0], "d2t does not lead to"),
    ("eagle", lambda path: (eagle3_files(path, {}), _config(path, layernorms=True))[0], "layernorms is true"),
    ("eagle", lambda path: (eagle3_files(path, {}), _config(path, parallel_drafting=True))[0], "drafting is true"),
    ("eagle", lambda path: (eagle3_files(path, {}), _config(path, layer_types=["sliding_attention"]))[0], "no windows"),
    ("eagle", lambda path: (eagle3_files(path, EAGLE3["norms of its output and of all features"]),
                            _config(path, fc_norm=True))[0], "fc_norm is true, expected false"),
    ("mtp", lambda path: save(path, TARGET, {"a.weight": torch.zeros(2)}), "no layer for multi-token prediction"),
    ("mtp", lambda path: save(path, TARGET | {"vocab_size": 9}, mtp_files("deepseek", TARGET)[0]), "vocab_size is 9"),
    ("medusa", lambda path: save(path, {}, {"a.weight": torch.zeros(2)}), "has no Medusa heads"),
    ("medusa", lambda path: (medusa_files(path, "vllm"), _config(path, num_heads=3))[0], "says num_heads 3"),
    ("medusa", lambda path: (medusa_files(path, "vllm"), _config(path, hidden_size=7))[0], "hidden_size is 7"),
    ("medusa", lambda path: (medusa_files(path, "vllm"), _config(path, truncated_vocab_size=7))[0], "no token_map"),
    ("medusa", lambda path: (path / "medusa_lm_head.pt").write_bytes(b"PK"), "medusa_lm_head.pt, a pickle"),
    ("eagle", lambda path: ((path / "config.json").write_text(json.dumps(BLOCK)),
                            (path / "pytorch_model.bin").write_bytes(b"PK")), "pytorch_model.bin, a pickle"),
]  # fmt: skip


def _config(path: Path, **values: Any) -> None:
    data = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(data | values))


def _twice(path: Path, name: str) -> None:
    from safetensors.torch import load_file

    weights = load_file(str(path / "model.safetensors"))
    weights[name] = weights[name].clone()
    weights[name][1] = weights[name][0] - 1
    save_file(weights, str(path / "model.safetensors"))


@pytest.mark.parametrize(("method", "make_files", "words"), REFUSED, ids=[f"{m} {w}" for m, _, w in REFUSED])
def test_what_does_not_fit_the_target_is_told(
    method: str, make_files: Callable[[Path], Any], words: str, base: Any, tmp_path: Path
) -> None:
    make_files(tmp_path)
    module = MODULES[method]
    with pytest.raises(CheckpointError, match=words.replace(".", r"\.")) as caught:
        module.make(spec_of(method=method, model=str(tmp_path)), target_of(base[0]))
    assert str(tmp_path) in str(caught.value)


MODULES: dict[str, Any] = {"eagle": eagle, "mtp": mtp, "medusa": medusa}


def files(method: str, directory: Path) -> None:
    if method == "eagle 1":
        eagle1_files(directory, BLOCK)
    elif method == "eagle 3":
        eagle3_files(directory, EAGLE3["layers told"])
    elif method == "mtp":
        save(directory, TARGET | {"num_nextn_predict_layers": 1}, mtp_files("deepseek", TARGET)[0])
    else:
        medusa_files(directory, "vllm, token_map")


ODD: list[Any] = [None, -1, 0, 1, 7, 10**12, 0.5, 1e400, "x", "", True, [], [1], [[]], {}, {"a": 1}]


@pytest.mark.parametrize("method", ["eagle 1", "eagle 3", "mtp", "medusa"])
def test_S_28_odd_values_in_a_config_are_refused_or_do_no_harm(method: str, base: Any, tmp_path: Path) -> None:
    target = target_of(base[0])
    module = MODULES[method.split()[0]]
    files(method, tmp_path)
    right = json.loads((tmp_path / "config.json").read_text())
    random = np.random.default_rng(0)
    keys = [*right, "norm_before_residual", "eagle_config", "transformer_layer_config", "quantization_config",
            "rope_scaling", "layer_types", "attention_bias", "rope_parameters"]  # fmt: skip
    num_refused = 0
    for _ in range(60):
        changed = {
            keys[random.integers(len(keys))]: ODD[random.integers(len(ODD))] for _ in range(random.integers(1, 3))
        }
        (tmp_path / "config.json").write_text(json.dumps(right | changed))
        try:
            module.make(spec_of(method=method.split()[0], model=str(tmp_path)), target).close()
        except (CheckpointError, RequestError):
            num_refused += 1
    assert 5 < num_refused < 60


@pytest.mark.parametrize("method", ["eagle 1", "eagle 3", "mtp", "medusa"])
def test_each_record_of_a_drafters_tape_agrees_with_numpy(method: str, base: Any, tmp_path: Path) -> None:
    files(method, tmp_path)
    module = MODULES[method.split()[0]]
    drafter = module.make(spec_of(method=method.split()[0], model=str(tmp_path)), target_of(base[0]))
    foretold(drafter, Recording(), HIDDEN * len(drafter.feature_layers or (0,)), close=False)
    programs = [head._program for head in drafter._heads] if method == "medusa" else [drafter.private.program]
    programs += [drafter._fuse._program] if getattr(drafter, "_fuse", None) else []
    for program in programs:
        # The last row that was computed lies there still.
        assert verify(program.tape, [1, 1, 1]) == []
        assert program.tape.dump()
    node = next(node for node in programs[0].tape.nodes if node.op.startswith("linear"))
    node.fields["bias"] = np.ones(node.fields["num_out"], np.float32)
    assert verify(programs[0].tape, [1, 1, 1])[0].index == node.index  # control
    drafter.close()


def test_an_eagle_that_is_narrower_than_its_target(base: Any, tmp_path: Path) -> None:
    directory, _, _ = base
    config = BLOCK | {"hidden_size": 32, "draft_vocab_size": VOCAB, "target_hidden_size": HIDDEN}
    shapes: dict[str, tuple[int, ...]] = {
        "fc.weight": (32, 3 * HIDDEN), "norm.weight": (32,), "lm_head.weight": (VOCAB, 32),
        "midlayer.hidden_norm.weight": (32,), "embed_tokens.weight": (VOCAB, 32),
        **plain.layer_tensors("midlayer", config, wide=2),
    }  # fmt: skip
    weights = plain.random_weights(shapes)
    save(tmp_path, config, weights)
    guide = Recording()
    drafter = eagle.make(spec_of(method="eagle", model=str(tmp_path)), target_of(directory, guide=guide))
    tokens, features, drafted = foretold(drafter, guide, 3 * HIDDEN)
    table, head = weights["embed_tokens.weight"], weights["lm_head.weight"]
    expected = followed(lambda x, e: plain.eagle3(x, e, weights, config, head, "midlayer"),
                      features @ weights["fc.weight"].T, lambda ids: table[ids], tokens, drafted)  # fmt: skip
    assert agree(guide.seen, expected)
    del weights["embed_tokens.weight"]
    save(tmp_path, config, weights)
    with pytest.raises(CheckpointError, match="no embed_tokens"):
        eagle.make(spec_of(method="eagle", model=str(tmp_path)), target_of(directory))


@pytest.mark.parametrize("module", [eagle, mtp, medusa])
def test_a_method_that_needs_a_checkpoint_says_so(module: Any, base: Any) -> None:
    name = module.__name__.rpartition(".")[2]
    with pytest.raises(RequestError, match="speculative_config.model"):
        module.make(spec_of(method=name), target_of(base[0]))


def test_configs_of_published_eagle_checkpoints(shared_data: Path, base: Any, tmp_path: Path) -> None:
    """Their words are understood; sizes are made small, with the same number of heads for each key's head."""
    num = 0
    for path in sorted((shared_data / "quant" / "eagle_configs").glob("*_config.json")):
        values = json.loads(path.read_text())
        if "hidden_size" not in values:
            continue  # settings of a trainer
        num += 1
        ratio = values["num_attention_heads"] // values.get("num_key_value_heads", values["num_attention_heads"])
        small = {"hidden_size": HIDDEN, "intermediate_size": 80, "num_attention_heads": 8, "head_dim": 6,
                 "num_key_value_heads": max(1, 8 // ratio), "vocab_size": VOCAB}  # fmt: skip
        third = "draft_vocab_size" in values
        fields = values | small | ({"draft_vocab_size": 64} if third else {})
        directory = tmp_path / path.stem
        directory.mkdir()
        if third:
            eagle3_files(directory, fields)
        else:
            eagle1_files(directory, {"rms_norm_eps": 1e-6, "num_hidden_layers": 1, **fields})
        guide = Recording()
        drafter = eagle.make(spec_of(method="eagle", model=str(directory)), target_of(base[0], guide=guide))
        foretold(drafter, guide, HIDDEN * (3 if third else 1))
    assert num >= 8
