"""Adaptive speculation over whole texts: the real `Speculator`, `Pace` and n-gram drafter, and a simulated clock. Steps
take the time of a formula by rows, calls of the drafter a fixed time; so the costs and gains are counted."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import pytest
from tests.drafters.paced import Seconds, processor, small

from headrace.drafters.base import Context, Drafter
from headrace.drafters.ngram import NgramDrafter
from headrace.drafters.pace import Pace
from headrace.drafters.speculator import Outcome, Speculator
from headrace.protocol.params import SamplingParams
from headrace.protocol.step import Draft, ScheduledBatch, StepResult

VOCAB = 30_000
NUM_DRAFTS = 16
PROMPT, ANSWER = 128, 128
CALL = 10e-6
"""Seconds of a guess, and of all else that is done for a sequence in a step with guesses."""


class Priced(Drafter):
    """A drafter whose calls take time on the simulated clock."""

    looks_back = True

    def __init__(self, streams: Streams) -> None:
        self.streams, self.inner = streams, NgramDrafter(2, 5)

    def propose(self, contexts: Sequence[Context]) -> list[Draft]:
        self.streams.clock += CALL * len(contexts)
        return self.inner.propose(contexts)

    def drop(self, seq_id: int) -> None:
        self.inner.drop(seq_id)

    def close(self) -> None:
        self.inner.close()


class Streams:
    """Sequences whose texts are fixed, run in steps as the scheduler and the runner take them."""

    def __init__(self, seconds: Seconds, pace: Pace | None) -> None:
        self.seconds, self.clock, self.step_id, self.rest, self.rest_seqs = seconds, 0.0, 0, 0, 0
        self.num_rows = self.num_drafted = self.num_accepted = self.num_asks = self.next_id = 0
        self.ended: list[int] = []
        self.drafted_of: dict[int, list[int]] = {}
        self.noise = random.Random(7)
        self.speculator = Speculator(
            Priced(self), pace, vocab_size=VOCAB, num_drafts=NUM_DRAFTS, num_nodes=NUM_DRAFTS, max_model_len=4096,
            eos_token_ids=[], take_probs=None, clock=lambda: self.clock,
        )  # fmt: skip

    def run(self, texts: Sequence[list[int]]) -> float:
        """Run answers to the first `PROMPT` tokens of each text to their ends. Returns the seconds."""
        start, first = self.clock, self.next_id
        self.next_id += len(texts)
        known = {first + i: PROMPT for i in range(len(texts))}
        drafts: dict[int, Draft] = {}
        while known:
            drafts = self._step(known, drafts, texts, first)
            for seq_id in [each for each, num in known.items() if num >= len(texts[each - first])]:
                self.ended.append(seq_id)
                del known[seq_id]
                drafts.pop(seq_id, None)
        return self.clock - start

    def _step(
        self, known: dict[int, int], drafts: dict[int, Draft], texts: Sequence[list[int]], first: int
    ) -> dict[int, Draft]:
        self.step_id += 1
        seq_ids = list(known)
        asks = not (self.rest > 0 and len(seq_ids) >= self.rest_seqs)
        self.rest = 0 if asks else self.rest - 1
        params, num = SamplingParams(max_tokens=len(texts[0]) - PROMPT, ignore_eos=True), len(seq_ids)
        placed = {i: drafts[seq_id] for i, seq_id in enumerate(seq_ids) if seq_id in drafts}
        histories = {i: texts[s - first][: known[s]] for i, s in enumerate(seq_ids)} if asks else {}
        batch = ScheduledBatch(
            step_id=self.step_id, seq_ids=seq_ids, starts=[known[s] - 1 for s in seq_ids], lens=[1] * num,
            token_ids=[0] * num, block_tables=[[]] * num, samples=[True] * num, params=[params] * num,
            num_prompts=[PROMPT] * num, copies=[], histories=histories, drafts=placed, ended=self.ended, asks=asks,
        )  # fmt: skip
        self.ended = []
        takes_part = asks or placed or batch.ended
        record = self.speculator.begin_step(batch) if takes_part else None
        num_rows = num + sum(len(draft.token_ids) for draft in placed.values())
        seconds = self.seconds(num_rows)
        self.clock += seconds
        self.num_rows += num_rows
        self.num_asks += asks
        result = StepResult(step_id=self.step_id, token_ids=[-1] * num)
        for i, seq_id in enumerate(seq_ids):
            text, at = texts[seq_id - first], known[seq_id]
            guess = placed[i].token_ids if i in placed else []
            num_right = next(
                (k for k, token in enumerate(guess) if at + k >= len(text) or text[at + k] != token), len(guess)
            )
            num_right = min(num_right, len(text) - at - 1)
            result.token_ids[i] = text[at]
            if num_right:
                result.row(i).further = text[at + 1 : at + 1 + num_right]
            if record is not None and guess:
                best = [text[at]] * len(guess)
                record.outcomes.append(Outcome(seq_id, placed[i], best, list(range(num_right))))
            self.num_drafted += len(guess)
            self.num_accepted += num_right
            self.drafted_of.setdefault(seq_id, []).extend([at] if guess else [])
            known[seq_id] += 1 + num_right
        if record is None:
            return {}
        # What was measured has noise, and an accident at times; the clock of the count has none.
        before = self.clock
        self.clock += seconds * (0.05 * self.noise.random() + 2.0 * (self.noise.random() < 0.01))
        shift = self.clock - before
        self.speculator.end_step(batch, result, record)
        self.clock -= shift
        if asks:
            self.rest, self.rest_seqs = result.rest, num
        return {seq_ids[i]: row.draft for i, row in result.rows.items() if row.draft is not None}


def random_text(seed: int, num: int = PROMPT + ANSWER) -> list[int]:
    return random.Random(seed).choices(range(VOCAB), k=num)


def quoting_text(seed: int, first: int = 0) -> list[int]:
    """An answer that quotes its prompt in pieces of 20 to 50 tokens, from its `first` token on."""
    noise, text = random.Random(seed), random_text(seed, PROMPT + first)
    while len(text) < PROMPT + ANSWER:
        at = noise.randrange(PROMPT - 50)
        text += [noise.randrange(VOCAB) for _ in range(2)] + text[at : at + noise.randint(20, 50)]
    return text[: PROMPT + ANSWER]


def new_pace(kind: type[Pace] = Pace) -> Pace:
    return kind(NUM_DRAFTS, NUM_DRAFTS, looks_back=True)


def speeds(seconds: Seconds, pace: Pace | None, rounds: Sequence[Sequence[list[int]]]) -> tuple[float, Streams]:
    """The tokens per second of rounds of texts, and the streams."""
    streams = Streams(seconds, pace)
    num_seconds = sum(streams.run(texts) for texts in rounds)
    return sum(len(text) - PROMPT for texts in rounds for text in texts) / num_seconds, streams


def plain_speed(seconds: Seconds, num: int) -> float:
    return num / seconds(num)


class Eager(Pace):
    """The planted fault: it drafts without having looked."""

    def current(self, seq_ids: Sequence[int]) -> dict[int, int]:
        return dict.fromkeys(seq_ids, self.num_drafts)


class Blind(Pace):
    """The planted fault: what looks back show is not counted."""

    def foretold(self, seq_id: int, num_guessed: int, num_right: int) -> None:
        return None


class Restless(Pace):
    """The planted fault: it looks back in every step."""

    may_look = True  # type: ignore[assignment]

    def rest(self, seconds: float) -> int:
        self._until = self._step
        return 0


@pytest.mark.parametrize("load", [1, 8, 32])
@pytest.mark.parametrize("seconds", [processor, small], ids=lambda each: str(each.__name__))
def test_random_text_costs_next_to_nothing(seconds: Seconds, load: int) -> None:
    rounds = [[random_text(100 * number + i) for i in range(load)] for number in range(4)]
    speed, streams = speeds(seconds, new_pace(), rounds)
    assert speed > 0.99 * plain_speed(seconds, load)
    assert streams.num_drafted - streams.num_accepted <= 0.01 * streams.num_rows
    # It rests from the start: in few steps does the executor do anything for drafts.
    assert streams.num_asks < 0.2 * streams.step_id


def test_control_looks_in_every_step_cost_more() -> None:
    rounds = [[random_text(100 * number + i) for i in range(32)] for number in range(2)]
    assert speeds(small, new_pace(Restless), rounds)[0] < 0.97 * plain_speed(small, 32)


@pytest.mark.parametrize(("seconds", "load"), [(processor, 1), (processor, 4), (processor, 8), (small, 1)])
def test_text_that_repeats_is_drafted_as_well_as_always(seconds: Seconds, load: int) -> None:
    rounds = [[quoting_text(100 * number + i) for i in range(load)] for number in range(9)]
    plain, always = plain_speed(seconds, load), speeds(seconds, None, rounds[1:])[0]
    streams = Streams(seconds, new_pace())
    streams.run(rounds[0])
    num_seconds = sum(streams.run(texts) for texts in rounds[1:])
    speed = 8 * load * ANSWER / num_seconds
    assert speed - plain > 0.95 * (always - plain)


def test_where_rows_cost_as_much_as_tokens_it_is_no_slower_than_none() -> None:
    rounds = [[quoting_text(100 * number + i) for i in range(32)] for number in range(6)]
    plain = plain_speed(processor, 32)
    assert speeds(processor, None, rounds)[0] < 0.9 * plain
    assert speeds(processor, new_pace(), rounds)[0] > 0.98 * plain


def first_draft(streams: Streams, seq_id: int) -> int:
    """The number of tokens of the answer before its first draft; more than all if there is none."""
    places = streams.drafted_of[seq_id]
    return places[0] - PROMPT if places else ANSWER + 1


def rows_to_spare(rows: int) -> float:
    """Weights are read anyway, and some rows more cost little, also beside 32."""
    return 0.030 + 0.0002 * rows


@pytest.mark.parametrize("load", [1, 8, 32])
@pytest.mark.parametrize("kind", [Pace, Blind])
def test_one_that_repeats_among_random_ones_is_found(load: int, kind: type[Pace]) -> None:
    texts = [quoting_text(1), *(random_text(i) for i in range(2, load + 1))]
    speed, streams = speeds(rows_to_spare, new_pace(kind), [texts])
    assert (first_draft(streams, 0) <= 32) == (kind is Pace)
    others = [seq_id for seq_id in range(1, load) if streams.drafted_of[seq_id]]
    assert not others
    if kind is Pace:
        assert streams.num_accepted > 0.5 * ANSWER
        assert speed > 0.99 * plain_speed(rows_to_spare, load)


@pytest.mark.parametrize("load", [1, 8, 32])
def test_text_that_begins_to_repeat_is_found(load: int) -> None:
    texts = [quoting_text(i, first=48) for i in range(load)]
    _, streams = speeds(rows_to_spare, new_pace(), [[random_text(1000 + i) for i in range(load)], texts])
    places = [first_draft(streams, seq_id) for seq_id in range(load, 2 * load)]
    assert all(48 <= place <= 48 + 40 for place in places)


def test_what_one_request_showed_is_expected_of_the_next() -> None:
    """A new sequence is drafted for at once after others that repeated, and not after random ones."""
    for make, is_early in ((quoting_text, True), (random_text, False)):
        streams = Streams(processor, new_pace())
        for seed in range(6):
            streams.run([make(seed)])
        streams.run([quoting_text(50)])
        assert (first_draft(streams, 6) <= 5) == is_early


def test_looks_back_change_no_draft() -> None:
    """Guesses about the beginning of a text change no later draft."""
    text: Any = quoting_text(3)
    plain, looked = NgramDrafter(2, 5), NgramDrafter(2, 5)
    for num in range(PROMPT, len(text), 7):
        at = Context(1, text[:num], PROMPT, SamplingParams(), NUM_DRAFTS, NUM_DRAFTS)
        looked.propose([Context(1, text[: num - 5], PROMPT, SamplingParams(), NUM_DRAFTS, NUM_DRAFTS)])
        assert plain.propose([at])[0].token_ids == looked.propose([at])[0].token_ids
