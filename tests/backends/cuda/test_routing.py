"""The choice of experts: the reference's, for every rule that a model file has, and a row's by itself."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import pytest
import torch
from tests.support.kernels import assert_close, backwards, poisoned, written
from torch import Tensor

from headrace.backends.base import Routing
from headrace.backends.cuda.kernels.routing import route
from headrace.backends.cuda.launch import Launch
from headrace.backends.torch_ref.ops import RefOps

ROWS = 6


def launches() -> list[Launch]:
    """The choice of a bucket of 64 rows by each rule."""

    def empty(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
        return torch.empty(shape, dtype=dtype, device="meta")

    listed = []
    for num, routing in CASES:
        weights, ids = empty(64, routing.top_k, dtype=torch.float32), empty(64, routing.top_k, dtype=torch.int32)
        parts = {name: empty(num) for name in ("bias", "factors") if getattr(routing, name) is not None}
        listed.append(
            route(empty(64, num), routing._replace(**parts), weights, ids, empty(4, dtype=torch.int32), 0, 64)
        )
    return listed


def numbers(*shape: int, seed: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def bias(num: int) -> Tensor:
    """Of halves of bfloat16, so that scores tie where they are equal."""
    return (numbers(num, seed=2) / 2).bfloat16()


CASES: list[tuple[int, Routing]] = [
    (512, Routing(10)),  # Qwen3-Next
    (64, Routing(6, bias=bias(64))),  # Ernie 4.5
    (128, Routing(4, factors=bias(128).abs())),  # Gemma 4
    (256, Routing(8, "sigmoid", bias(256), (8, 4, 2), scale=2.5)),  # DeepSeek-V3
    (160, Routing(6, groups=(8, 3, 1), renormalise=False, scale=16.0)),  # DeepSeek-V2
    (384, Routing(8, "sigmoid", bias(384), scale=2.827)),  # Kimi K2
    (512, Routing(22, "sigmoid", bias(512), scale=5.0)),  # Nemotron 3
    (16, Routing(1, "sigmoid", renormalise=False, scale_input=True)),  # Llama 4
    (15, Routing(4, "sigmoid", bias(15), (5, 3, 2), False)),
    (12, Routing(5, groups=(12, 6, 2))),
]


def logits(num: int, score: str) -> Tensor:
    """Row 0 has few different numbers, row 1 scores of 0 or nearly so but for one, row 2 zeros of both signs."""
    rows = torch.full((ROWS, num + 3), torch.nan)[:, :num]
    rows.copy_(numbers(ROWS, num, seed=1))
    rows[0] = rows[0].round()
    rows[1] = -torch.inf if score == "softmax" else -30.0
    rows[1, num // 2] = 1.0
    rows[2] = torch.where(rows[2] > 0, 0.0, -0.0)
    return rows


def chosen(rows: Tensor, routing: Routing, mode: str, bucket: int, turned: bool = False) -> dict[str, Tensor]:
    outputs = {
        "weights": poisoned(bucket, routing.top_k, dtype=torch.float32),
        "ids": poisoned(bucket, routing.top_k, dtype=torch.int32),
    }
    counts = torch.tensor([len(rows)], dtype=torch.int32)
    padded = torch.full((bucket, rows.shape[1]), torch.nan)
    padded[: len(rows)] = rows

    def make(out: Mapping[str, Tensor]) -> Sequence[Launch]:
        return [route(padded, routing, out["weights"], out["ids"], counts, 0, bucket)]

    return written(make, outputs, mode, backwards if turned else None)


@pytest.mark.parametrize(("num", "routing"), CASES, ids=[str(num) for num, _ in CASES])
def test_experts_and_weights_are_those_of_the_reference(num: int, routing: Routing) -> None:
    rows = logits(num, routing.score)
    weights, ids = RefOps(torch.device("cpu"), torch.float32).route(rows, routing)
    ascending = ids.sort(-1)
    weights = weights.gather(1, ascending.indices)
    twin = chosen(rows, routing, "twin", ROWS + 1)
    assert torch.equal(twin["ids"][:ROWS], ascending.values.int())
    assert torch.equal(twin["weights"][:ROWS], weights)
    kernel = chosen(rows, routing, "interpreted", ROWS + 1)
    assert torch.equal(kernel["ids"], twin["ids"])
    assert_close(kernel["weights"], twin["weights"], 1e-6)
    assert kernel["weights"][ROWS].isnan().all(), "a row beyond the step's rows was written"


@pytest.mark.parametrize("mode", ["twin", "interpreted"])
def test_a_row_has_the_same_choice_in_any_company(mode: str) -> None:
    num, routing = CASES[3]
    rows = logits(num, routing.score)
    among = chosen(rows, routing, mode, 8, turned=True)
    alone = chosen(rows[4:5], routing, mode, 1)
    for name in ("ids", "weights"):
        assert torch.equal(among[name][4], alone[name][0])


@pytest.mark.parametrize("mode", ["twin", "interpreted"])
def test_equal_scores_go_to_the_lower_id_and_the_lower_group(mode: str) -> None:
    flat = torch.zeros(1, 12)
    assert chosen(flat, Routing(3), mode, 1)["ids"].tolist() == [[0, 1, 2]]
    flat[0, 5] = flat[0, 11] = 1.0
    # Groups 1 and 3 have the best experts; the third place is a tie within both.
    routing = Routing(3, groups=(4, 2, 2))
    assert chosen(flat, routing, mode, 1)["ids"].tolist() == [[3, 5, 11]]
    # More experts than the chosen groups have: the lowest of the rest.
    assert chosen(flat, Routing(8, groups=(4, 2, 2)), mode, 1)["ids"].tolist() == [[0, 1, 3, 4, 5, 9, 10, 11]]


def test_nan_shows_in_the_weights_whatever_its_sign() -> None:
    rows = torch.zeros(2, 8)
    rows[0, 3], rows[1, 3] = torch.nan, -torch.tensor(torch.nan)
    out = chosen(rows, Routing(2), "interpreted", 2)
    assert out["ids"].tolist() == [[0, 3], [0, 3]]
    assert out["weights"].isnan().any(1).all()
