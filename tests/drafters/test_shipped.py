"""The drafters beside the built-in model: small, in their layouts, of use, and what they were when trained."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from tests.drafters import play
from tests.drafters.play import Play, spec_of, stories, target_of

from headrace import builtin
from headrace.drafters.base import Drafter
from headrace.drafters.build import make_drafter

torch = pytest.importorskip("torch")
DRAFTERS = builtin.PATH / "drafters"
METHODS = ["draft_model", "eagle", "mtp", "medusa"]
USE = {
    "draft_model": 2.0,
    "eagle": 2.0,
    "mtp": 1.8,
    "medusa": 1.3,
    "early_exit": 2.5,
}  # tokens a pass, of the stories in play.py
TRAINING = Path(__file__).resolve().parents[2] / "training"


def config_of(method: str) -> dict[str, Any]:
    values: dict[str, Any] = json.loads((DRAFTERS / method / "config.json").read_text("utf-8"))
    return values


def num_parameters(directory: Path) -> int:
    from safetensors import safe_open

    with safe_open(directory / "model.safetensors", "numpy") as file:
        sizes = {name: file.get_slice(name).get_shape() for name in file.keys()}  # noqa: SIM118
    return sum(int(torch.tensor(size).prod()) for name, size in sizes.items() if name not in ("d2t", "t2d"))


def test_size() -> None:
    """All that ships beside the code fits into 16 MB; the draft model is an eighth of the target at most."""
    assert sorted(p.name for p in DRAFTERS.iterdir()) == sorted([*METHODS, "early_exit"])
    assert all(
        sorted(p.name for p in (DRAFTERS / m).iterdir()) == ["config.json", "model.safetensors"] for m in METHODS
    )
    assert sum(p.stat().st_size for p in builtin.PATH.rglob("*") if p.is_file()) <= 16_000_000
    assert num_parameters(DRAFTERS / "draft_model") * 8 <= num_parameters(builtin.directory())


def test_they_are_of_the_target() -> None:
    target = json.loads((builtin.PATH / "config.json").read_text("utf-8"))
    for method in METHODS:
        assert config_of(method)["vocab_size"] == target["vocab_size"]
    assert config_of("eagle")["eagle_aux_hidden_state_layer_ids"][-1] == target["num_hidden_layers"]
    assert config_of("mtp")["num_hidden_layers"] == target["num_hidden_layers"]


@pytest.fixture(scope="module")
def training() -> Iterator[Any]:
    sys.path.insert(0, str(TRAINING))
    before = set(sys.modules)
    try:
        yield SimpleNamespace(**{name: __import__(name) for name in ("model", "acceptance", "speculators")})
    finally:
        sys.path.remove(str(TRAINING))
        for name in set(sys.modules) - before:
            if str(getattr(sys.modules[name], "__file__", "")).startswith(str(TRAINING)):
                del sys.modules[name]


def engines(method: str) -> Drafter:
    return make_drafter(spec_of(method=method, num_speculative_tokens=4), target_of())


@pytest.mark.sampled(3)
@pytest.mark.parametrize("method", USE)
def test_of_use_and_as_trained(method: str, training: Any) -> None:
    """The engine's drafts on a story are those of the code that trained them, but for a few near ties."""
    drafter = engines(method)
    target = training.model.load_model(builtin.directory())
    twin = training.acceptance.load_drafter(
        "early_exit:4" if method == "early_exit" else str(DRAFTERS / method), target
    )
    plays = [Play(i, story) for i, story in enumerate(stories(drafter.feature_layers))]
    known: list[list[int]] = [[] for _ in plays]
    while any(not p.done for p in plays):
        for p in plays:
            if not p.done:
                known[p.seq_id].append(p.known)
        play.step(drafter, [p for p in plays if not p.done])
    drafter.close()
    accepted = [count for p in plays for count in p.accepted]
    same = total = 0
    for p in plays:
        ids = torch.tensor([p.story.tokens])
        drafted = drafts_of(training, twin, target, ids)
        for at, draft in zip(known[p.seq_id], p.drafts, strict=True):
            first = draft.token_ids[0] if draft.token_ids else -1
            same += first == drafted[at - 2]
            total += 1
    assert same >= 0.97 * total, (same, total)
    assert 1 + sum(accepted) / len(accepted) >= USE[method]


@torch.inference_mode()
def drafts_of(training: Any, twin: Any, target: Any, ids: Any) -> list[int]:
    """The first token drafted at each position; entry i follows token i + 1, which is the text's."""
    view = training.speculators.view_of(target, ids)
    accepted = training.speculators.kept_of(twin)

    def of_text(depth: int, logits: Any) -> Any:
        return torch.cat([ids[:, 1:], ids[:, :1]], 1) if depth < 0 else logits.argmax(-1)

    first = next(iter(twin.draft(view, of_text, torch.arange(ids.shape[1]))))[0].argmax(-1)
    tokens: list[int] = (first if accepted is None else accepted[first]).tolist()
    return tokens
