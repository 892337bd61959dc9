"""Bugs planted in how guesses are placed and kept; the simulation must catch each."""

from __future__ import annotations

from functools import partial

import pytest
from tests.programs.sim.planting import Bugs, expect_caught, register

from headrace.core.sequence import Status
from headrace.protocol.step import Draft

BUGS: Bugs = {}
bug = partial(register, BUGS)


@bug("I-8", "I-12", "I-4")
def slot_of_a_rejected_token_reused(s, _):
    """The tokens after a rejected guess are taken for computed, so its slot is read as if it were theirs."""
    accept = s.tables.accept

    def too_far(seq):
        accept(seq)
        seq.num_computed = min(seq.num_computed + 1, len(seq.tokens) - 1)

    s.tables.accept = too_far
    settle = s.drafts.settle

    def settle_too_far(batch, flight, result):
        settle(batch, flight, result)
        for index, draft in batch.drafts.items():
            seq = flight[index]
            if seq.status is Status.RUNNING and index not in result.column("further") and len(draft.token_ids) > 1:
                seq.num_computed += 1

    s.drafts.settle = settle_too_far


@bug("I-8")
def blocks_of_rejected_guesses_kept(s, _):
    s.tables.trim = lambda seq: None


@bug("I-2", "I-1", "I-3", "I-7")
def tails_never_given_back(s, _):
    def adopt(seq, num_whole, path):
        tails, seq.tails = seq.tails, []
        if path:
            seq.block_table = seq.block_table[:num_whole] + tails[path - 1]

    s.tables.adopt = adopt


@bug("I-12", "I-8")
def the_wrong_path_kept(s, _):
    adopt = s.tables.adopt
    s.tables.adopt = lambda seq, num_whole, path: adopt(seq, num_whole, 0 if path else len(seq.tails))


@bug("I-12", "I-8", "I-13")
def tails_begin_without_the_copy(s, _):
    place = s.drafts.place

    def without(chunks, budget):
        before = [list(pairs) for pairs in s.tables.copies]
        placed = place(chunks, budget)
        s.tables.copies = before
        return placed

    s.drafts.place = without


@bug("I-15")
def guesses_beyond_the_budget(s, _):
    place = s.drafts.place
    s.drafts.place = lambda chunks, budget: place(chunks, budget + 8)


@bug("I-19", "I-12", "I-8")
def guesses_beyond_the_end(s, monkeypatch):
    cut = Draft.cut
    monkeypatch.setattr(Draft, "cut", lambda draft, depth, nodes: cut(draft, depth + 20, nodes))


@bug("I-12", checking=False)
def tokens_after_guesses_dropped(s, monkeypatch):
    from headrace.core import scheduler

    monkeypatch.setattr(scheduler, "append_known", lambda *args: None)


@pytest.mark.parametrize("name", BUGS)
def test_a_planted_bug_is_caught(name, monkeypatch):
    expect_caught(BUGS[name], monkeypatch)
