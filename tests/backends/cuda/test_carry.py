"""What a step takes from the last one, and what the host receives of it."""

from __future__ import annotations

import pytest
import torch
from tests.support.interpreter import run_interpreted
from torch import Tensor

from headrace.backends.cuda.kernels.carry import carry, report
from headrace.backends.cuda.launch import Launch


def run(launch: Launch, mode: str) -> None:
    launch.run_twin() if mode == "twin" else run_interpreted(launch)


@pytest.mark.parametrize("mode", ["twin", "interpreted"])
def test_rows_with_a_place_take_its_token(mode: str) -> None:
    places = torch.full((600,), -1, dtype=torch.int32)
    places[torch.tensor([0, 3, 299, 300])] = torch.tensor([7, 0, 299, 5], dtype=torch.int32)
    tokens, token_ids = torch.arange(1000, 1600, dtype=torch.int32), torch.arange(600, dtype=torch.int32)
    run(carry(places, tokens, token_ids, torch.tensor([300, 1, 1], dtype=torch.int32), 600), mode)
    expected = torch.arange(600, dtype=torch.int32)
    expected[torch.tensor([0, 3, 299])] = torch.tensor([1007, 1000, 1299], dtype=torch.int32)
    assert torch.equal(token_ids, expected), "row 300 is not one of the step's"


def outcome(mode: str, num: int, num_rows: int) -> Tensor:
    rows = torch.arange(400, dtype=torch.int32)
    wholes = torch.zeros(400, 4, dtype=torch.int64)
    wholes[1::2, 3] = -1
    margins = torch.where(rows == 2, 1e-12, 1.0).double()
    margins[4] = -torch.inf
    ids = rows.clone()
    ids[4] = -1
    values = torch.where(rows == 6, -torch.inf, 0.0)
    out = torch.full((1700,), -9, dtype=torch.int32)
    best = rows + 1000, (rows != 3).int(), values
    sizes = torch.tensor([num_rows, 1, num], dtype=torch.int32)
    finite_rows = (torch.arange(500) % 2).int()
    run(report((ids, margins), wholes, best, finite_rows, out, torch.tensor([1e-9]).double(), sizes, 1300), mode)
    return out


@pytest.mark.parametrize("mode", ["twin", "interpreted"])
def test_the_outcome_of_a_step_lies_in_one_piece(mode: str) -> None:
    out = outcome(mode, 390, 450)
    ids, fit, sure = out[: 3 * 390].view(3, 390).tolist()
    assert ids[:7] == [0, 1001, 2, 1003, 0, 1005, 6]
    assert ids[301] == 1299, "within the vocabulary"
    assert [i for i in range(390) if not fit[i]] == [3, 6]
    assert [i for i in range(390) if not sure[i]] == [2, 4]
    assert out[3 * 390 : 3 * 390 + 450].tolist() == [i % 2 for i in range(450)]
    assert set(out[3 * 390 + 450 :].tolist()) == {-9}
    # A step without rows of logits.
    assert outcome(mode, 0, 3)[:4].tolist() == [0, 1, 0, -9]


def launches() -> list[Launch]:
    ints = torch.empty(8192, dtype=torch.int32, device="meta")
    real, few = torch.empty(256, dtype=torch.float64, device="meta"), ints[:256]
    wholes = torch.empty(256, 4, dtype=torch.int64, device="meta")
    best = few, few, torch.empty(256, device="meta")
    return [
        carry(ints, ints, ints, ints, 8192),
        report((few, real), wholes, best, ints, ints, real, ints, 128_256),
    ]
