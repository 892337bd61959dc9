"""Negative controls of what a step does beyond one token for each sequence: forced tokens, states, beam searches."""

from functools import partial

import pytest
from tests.programs.sim.planting import Bugs, expect_caught, register

import headrace.core.scheduler as scheduler_module
from headrace.core.beams.searches import Search
from headrace.core.steps import make_batch

BUGS: Bugs = {}
bug = partial(register, BUGS)


@bug("I-12", checking=False)
def forced_tokens_dropped(s, monkeypatch):
    monkeypatch.setattr(scheduler_module, "append_known", lambda *args: None)


@bug("I-11", "I-12", "I-13", checking=False)
def forced_past_the_end(s, monkeypatch):
    def without_rules(more, flight, seqs, added, ended, eos_token_ids):
        for index, token_ids in more.items():
            seq = flight[index]
            if seq in seqs:
                seq.tokens += token_ids
                added[seqs.index(seq)] += token_ids

    monkeypatch.setattr(scheduler_module, "append_known", without_rules)


@bug("I-12", checking=False)
def sampler_state_lost_by_a_preemption(s, _):
    release = s.tables.release

    def forgetful(seq):
        release(seq)
        seq.state = None

    s.tables.release = forgetful


@bug("I-12", checking=False)
def history_without_the_resumed_tokens(s, monkeypatch):
    def short(*args):
        flight, batch = make_batch(*args)
        for index, history in batch.histories.items():
            batch.histories[index] = history[: batch.num_prompts[index]] if len(history) > 20 else history
        return flight, batch

    monkeypatch.setattr(scheduler_module, "make_batch", short)


@bug("I-4")
def beams_write_where_others_read(s, _):
    s.tables.shares_tail = lambda *args: False


@bug("I-4", "I-13", checking=False)
def beams_write_where_others_read_seen_from_outside(s, _):
    s.tables.shares_tail = lambda *args: False


@bug("I-2", "I-3", "I-7")
def fork_without_a_reference(s, _):
    fork = s.tables.fork

    def careless(source, seq, num):
        fork(source, seq, num)
        s.pool.release(seq.block_table)

    s.tables.fork = careless


@bug("I-13", checking=False)
def fork_that_knows_its_parents_next_token(s, _):
    advance = s.searches.advance

    def late(search):
        before = list(search.live)
        result = advance(search)
        for seq in search.live:
            if seq not in before and seq.tokens[-1] != before[0].tokens[-1]:
                seq.tokens[-1] = before[0].tokens[-1]
                break
        return result

    s.searches.advance = late


@bug("I-10")
def beams_left_behind_by_a_preemption(s, monkeypatch):
    monkeypatch.setattr(Search, "retire", lambda self: self.live[0])


@bug("I-10", "I-15", first_seed=73)
def beams_without_room_to_run(s, _):
    s.searches.num_absent = lambda: 0


@bug("I-17", "I-19", "R-11")
def searches_claim_one_beam(s, monkeypatch):
    monkeypatch.setattr(Search, "claim", lambda self, kind: kind.worst_case(self.live[0]))


@bug("I-8", "I-12", "I-13", checking=False)
def beams_do_not_wait_for_one_another(s, _):
    advance = s.searches.advance

    def hasty(search):
        if 0 < len(search.tops) == len(search.live) - 1 and not search.pending:
            lost = next(seq for seq in search.live if seq.seq_id not in search.tops)
            search.tops[lost.seq_id] = next(iter(search.tops.values()))
        return advance(search)

    s.searches.advance = hasty


@pytest.mark.sampled(3)
@pytest.mark.parametrize("name", BUGS)
def test_a_planted_bug_is_caught(name, monkeypatch):
    expect_caught(BUGS[name], monkeypatch)
