"""Long calls in pieces (R-03): counts of what is handled without letting others run, and controls without the cut."""

from __future__ import annotations

import asyncio
import copy
import itertools
import threading
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
from tests.engine.test_client import read, run
from tests.support import fake
from tests.support.server import Live, child, inproc

from headrace.engine import generation, links, parts
from headrace.engine.client import EngineClient
from headrace.engine.generation import Generation, TextClient, free
from headrace.engine.links import ProcessLink
from headrace.insight.simulated import Oracle
from headrace.protocol import frames
from headrace.protocol.config import EngineConfig
from headrace.protocol.errors import RequestError
from headrace.protocol.params import SamplingParams
from headrace.protocol.step import Add, BeamResult, Finish, Request, Stats, StepOutput, TokenLogprob
from headrace.text.inputs import new_request_id
from headrace.text.outputs import Delta, RequestState, deltas_of
from headrace.text.tokenizer import Tokenizer

POSTED_BYTES = links.POSTED_BYTES


def entries(num: int, num_top: int = 3) -> list[TokenLogprob]:
    return [TokenLogprob(i, -float(i), 1, tuple((i, -float(k)) for k in range(num_top))) for i in range(num)]


def merged(outputs: list[StepOutput]) -> dict[str, Delta]:
    whole: dict[str, Delta] = {}
    for output in outputs:
        for request_id, delta in deltas_of(output):
            if request_id in whole:
                whole[request_id].merge(delta)
            else:
                whole[request_id] = delta
    return whole


OUTPUT = StepOutput(
    step_id=7, start_time=1.0, end_time=2.0,
    request_ids=["a", "b", "long"], token_ids=[[1], [2, 3], [4]],
    logprobs={"a": entries(1), "b": entries(2)},
    prompt_logprobs={"long": entries(50), "chunk": entries(40)},
    states={"b": 0.5}, pooled={"vector": [0.25] * 30},
    started={"a": 3, "long": 0, "chunk": 5, "bare": 1, "vector": 0},
    finished={"b": Finish("length"), "vector": Finish("stop"), "search": Finish("stop")},
    beams={"search": BeamResult(beams=[], num_blocks=1, num_blocks_unshared=1)},
    stats=Stats(num_steps=7), note=b"note",
)  # fmt: skip


def joined(outputs: list[StepOutput]) -> list[StepOutput]:
    """What the link makes of parts that crossed the socket."""
    joiner = parts.Joiner()
    crossed = [msgspec.msgpack.decode(msgspec.msgpack.encode(output), type=StepOutput) for output in outputs]
    for output in crossed:
        joiner.join(output)
    assert not joiner.rows
    for output in crossed:
        for column in (output.logprobs, output.prompt_logprobs):
            column.update({name: in_tuples(rows) for name, rows in column.items()})
    return crossed


def in_tuples(rows: list[TokenLogprob]) -> list[TokenLogprob]:
    """Rows that came in parts have lists."""
    return [msgspec.structs.replace(row, top=tuple(row.top)) for row in rows]


@pytest.mark.parametrize("most", [1, 8, 100, 10**6])
def test_R_03_an_output_is_cut_into_bounded_parts_that_say_the_same(monkeypatch: pytest.MonkeyPatch, most: int) -> None:
    monkeypatch.setattr(parts, "PART_NUMBERS", most)
    cut = list(parts.parts_of(OUTPUT))
    assert {key: state for part in cut for key, state in part.states.items()} == OUTPUT.states
    assert [part.stats for part in cut] == [None] * (len(cut) - 1) + [OUTPUT.stats]
    # The explanation of a request that ends in a later part is complete.
    assert [part.note for part in cut if part.note] == [OUTPUT.note]
    assert not any(part.finished for part in itertools.takewhile(lambda part: not part.note, cut))
    assert sum(len(part.started) for part in cut) == len(OUTPUT.started)
    for part in cut:
        rows = [entry for each in (*part.prompt_logprobs.values(), *part.logprobs.values()) for entry in each]
        numbers = sum(1 + len(entry.top) for entry in rows) + sum(map(len, part.pooled.values()))
        # A token of a sample, its alternatives and a vector stay together.
        assert numbers < most + 4 + 30
    assert (len(cut) == 1) is (most == 10**6)
    # The last, for it merges into the lists of the parts.
    assert merged(joined(cut)) == merged([copy.deepcopy(OUTPUT)])


def test_R_03_a_row_of_the_whole_vocabulary_is_cut_too() -> None:
    size = 5 * parts.PART_NUMBERS // 2
    output = StepOutput(
        step_id=1, request_ids=["a", "b"], token_ids=[[1], [2, 3, 4]],
        logprobs={"a": entries(1, size), "b": [*entries(1), *entries(2, size)]},
        prompt_logprobs={"long": [*entries(2, size), *entries(3), *entries(1, size)], "b": entries(1, size)},
        started={"long": 0, "b": 3}, finished={"a": Finish("length")}, stats=Stats(num_steps=1), note=b"note",
    )  # fmt: skip
    cut = list(parts.parts_of(output))
    frame_sizes = [len(frames.encode(frames.Output(part))) for part in cut]
    assert max(frame_sizes) < 2**17 < len(frames.encode(frames.Output(output)))
    # All tokens that a step sampled for a request come at once: the state of the sampler belongs to the last one.
    assert [pair for part in cut for pair in zip(part.request_ids, part.token_ids, strict=True)] == [
        ("a", [1]),
        ("b", [2, 3, 4]),
    ]
    assert merged(joined(cut)) == merged([copy.deepcopy(output)])
    # The control: a part that is lost is noticed.
    lost = next(place for place, part in enumerate(cut) if part.alternatives)
    assert merged(joined([*cut[:lost], *cut[lost + 1 :]])) != merged([copy.deepcopy(output)])


@pytest.mark.parametrize("make", [child, inproc])
def test_R_03_whole_rows_come_through_both_links(
    monkeypatch: pytest.MonkeyPatch, make: Callable[..., EngineClient]
) -> None:
    monkeypatch.setattr(parts, "PART_NUMBERS", 50)
    params = SamplingParams(max_tokens=3, seed=1, ignore_eos=True, prompt_logprobs=-1, logprobs=-1)
    request = Request(request_id=new_request_id(), prompt_token_ids=[7] * 4, params=params)
    oracle = Oracle(fake.VOCAB_SIZE, [fake.EOS])

    async def work(client: EngineClient) -> list[TokenLogprob]:
        rows: list[TokenLogprob] = []
        async for deltas in client.submit([request]):
            for _, delta in deltas:
                rows += [*delta.prompt_logprobs, *delta.logprobs]
        return rows

    rows = run(make(max_logprobs=-1), work)
    assert [len(row.top) for row in rows] == [fake.VOCAB_SIZE] * 6
    assert in_tuples(rows[:3]) == [oracle.logprob(7, 1 + place, -1) for place in range(3)]


def test_R_03_an_output_without_many_numbers_is_one_part() -> None:
    output = StepOutput(step_id=1, request_ids=["a"], token_ids=[[1]], stats=Stats())
    assert [part is output for part in parts.parts_of(output)] == [True]


def test_R_03_frames_of_the_engine_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes: list[int] = []
    decode = frames.decode_from_engine
    monkeypatch.setattr(frames, "decode_from_engine", lambda payload: (sizes.append(len(payload)), decode(payload))[1])
    params = SamplingParams(max_tokens=2, seed=1, ignore_eos=True, prompt_logprobs=20)
    requests = [Request(request_id=new_request_id(), prompt_token_ids=[i] * 1500, params=params) for i in range(2)]
    oracle = Oracle(fake.VOCAB_SIZE, [fake.EOS])
    answers = run(child(max_num_batched_tokens=4096), lambda client: read(client.submit(requests)))
    assert isinstance(answers, dict)
    for index, one in enumerate(requests):
        assert answers[index][0] == oracle.stream(one, 2048)
        assert answers[index][2] == [oracle.logprob(index, 1 + i, 20).logprob for i in range(1499)]
    # The control: one frame of all of it is above the bound.
    whole = StepOutput(step_id=1, prompt_logprobs={"a": entries(1499, 20)})
    assert max(sizes) < 2**17 < len(frames.encode(frames.Output(whole)))


def posted(monkeypatch: pytest.MonkeyPatch, turn_bytes: int) -> tuple[list[int], list[frames.ToEngine]]:
    """The bytes that are sent between two turns of the loop, and the messages, of 40 long requests and an end."""
    monkeypatch.setattr(links, "POSTED_BYTES", turn_bytes)
    messages = bytearray()

    async def work() -> list[int]:
        link = ProcessLink(EngineConfig(model="fake"))
        link._writer = SimpleNamespace(is_closing=lambda: False, write=messages.extend)  # type: ignore[assignment]
        params = SamplingParams(max_tokens=1, seed=1)
        for place in range(40):
            link.post(Add(Request(request_id=str(place), prompt_token_ids=[60_000] * 5000, params=params)))
        link.post(frames.Shutdown())
        turns = []
        while link._posted:
            before = len(messages)
            await asyncio.sleep(0)
            turns.append(len(messages) - before)
        return turns

    turns = asyncio.run(work())
    return turns, [frames.decode_to_engine(payload) for payload in frames.FrameBuffer().feed(bytes(messages))]


def test_R_03_messages_are_encoded_a_bounded_number_of_bytes_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    turns, messages = posted(monkeypatch, POSTED_BYTES)
    assert max(turns) < 2 * POSTED_BYTES
    ids = [message.request.request_id for message in messages if isinstance(message, Add)]
    assert ids == [str(place) for place in range(40)]
    assert isinstance(messages[-1], frames.Shutdown)


def test_R_03_control_all_messages_at_once_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    turns, messages = posted(monkeypatch, 10**9)
    assert max(turns) > 2 * POSTED_BYTES
    assert len(messages) == 41


def test_R_03_long_prompts_are_checked_beside_the_loop_and_texts_once(
    live: Live, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    threads: list[int] = []
    words: list[str] = []
    verify, encode = EngineClient.verify, Tokenizer.encode

    def noted(self: EngineClient, requests: Any) -> None:
        threads.append(threading.get_ident())
        verify(self, requests)

    def counted(self: Tokenizer, text: str, add_special_tokens: bool = True) -> list[int]:
        words.append(text)
        return encode(self, text, add_special_tokens)

    monkeypatch.setattr(EngineClient, "verify", noted)
    monkeypatch.setattr(Tokenizer, "encode", counted)

    async def work(client: EngineClient) -> None:
        front = TextClient(client, tokenizer)
        here = threading.get_ident()
        async with await front.open([[1] * 10] * 3, SamplingParams(max_tokens=1)):
            assert threads == [here] * 3
        async with await front.open([[1] * 1000] * 20, SamplingParams(max_tokens=1)):
            assert len(threads) == 23
            assert here not in threads[3:]
        async with await front.open([[1] * 10] * 20, SamplingParams(max_tokens=1, bad_words=["word"])):
            assert here not in threads[3:]
        assert words == ["word", " word"]
        # All or nothing: the last one has no such token, so none is queued.
        with pytest.raises(RequestError, match="300"):
            await front.open([[1] * 1000] * 20 + [[300]], SamplingParams(max_tokens=1))
        assert client.num_waiting == client.num_unfinished == 0

    run(child(), work)


class Full:
    """A stream whose reader is slow: many tokens of some answers have come."""

    def __init__(self, deltas: list[Delta]) -> None:
        self._deltas = list(enumerate(deltas))
        self.abort = self.close = lambda *args: None

    async def __anext__(self) -> list[tuple[int, Delta]]:
        if not self._deltas:
            raise StopAsyncIteration
        return self.take()

    def take(self) -> list[tuple[int, Delta]]:
        deltas, self._deltas = self._deltas, []
        return deltas


def generated(num: int, has_logprobs: bool) -> Generation:
    states, deltas = [], []
    for _ in range(4):
        request = Request(request_id=new_request_id(), prompt_token_ids=[1], params=SamplingParams(max_tokens=num))
        states.append(RequestState(request, None))
        logprobs = entries(num) if has_logprobs else []
        deltas.append(Delta(0.0, 0.0, 0.0, list(range(num)), logprobs, entries(9), finish=Finish("length")))
    stream: Any = Full(deltas)
    return Generation(stream, states, 1, None, num_returned=1, per_request=1)


@pytest.mark.parametrize("has_logprobs", [True, False])
def test_R_03_a_slow_reader_takes_a_bounded_number_of_tokens_at_a_time(has_logprobs: bool) -> None:
    result = generated(2000, has_logprobs)

    async def work() -> list[int]:
        task = asyncio.ensure_future(anext_all())
        turns = [0]
        while not task.done():
            await asyncio.sleep(0)
            turns.append(sum(len(state.token_ids) for state in result.states))
        return [after - before for before, after in itertools.pairwise(turns)]

    async def anext_all() -> None:
        async for _ in result:
            pass

    turns = asyncio.run(work())
    assert max(turns) <= 2 * generation.PART_TOKENS
    for state in result.states:
        assert state.token_ids == list(range(2000))
        assert len(state.logprobs) == (2000 if has_logprobs else 0)
        assert len(state.prompt_logprobs) == 9


class Counted(list[Any]):
    """A list that notes the threads and the sizes of deletions."""

    def __init__(self, items: list[Any]) -> None:
        super().__init__(items)
        self.sizes: list[int] = []
        self.threads: set[int] = set()

    def __delitem__(self, key: Any) -> None:
        before = len(self)
        super().__delitem__(key)
        self.sizes.append(before - len(self))
        self.threads.add(threading.get_ident())


def test_R_03_log_probabilities_are_freed_in_slices_beside_the_loop() -> None:
    result = generated(4, True)
    lists = [Counted(entries(1000)), Counted(entries(700))]
    result.states[0].logprobs, result.states[1].prompt_logprobs = lists[0], lists[1]

    async def work() -> None:
        result.release()
        result.release()
        await asyncio.get_running_loop().shutdown_default_executor()

    asyncio.run(work())
    for each in lists:
        assert not each
        assert max(each.sizes) <= generation.FREED
        assert each.threads.isdisjoint({threading.get_ident()})
    assert result.states[0].logprobs == []
    few = Counted(entries(2))
    free([few])
    assert few.sizes == [2]
