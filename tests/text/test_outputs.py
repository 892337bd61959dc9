"""From deltas to text: however the deltas are cut, the answer is the same; and how requests are filled in."""

from __future__ import annotations

import itertools

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.support import fake

from headrace.protocol.errors import ContextLengthError, RequestError
from headrace.protocol.params import SamplingParams
from headrace.protocol.step import EngineInfo, Finish, Request, StepOutput, TokenLogprob
from headrace.text.inputs import SEED_LIMIT, RequestOptions, draw_seed, make_requests, prompt_ids
from headrace.text.outputs import Delta, RequestState, deltas_of, request_output
from headrace.text.tokenizer import Tokenizer

INFO = EngineInfo(
    model="m",
    max_model_len=64,
    vocab_size=256,
    eos_token_ids=[fake.EOS],
    block_size=4,
    num_blocks=100,
    max_num_seqs=2,
    max_num_batched_tokens=5,
)
TEXT = "Süß ist’s — and so on: 日本語 and so on, no end"


def state(tokenizer: Tokenizer | None, **params: object) -> RequestState:
    sampling_params = SamplingParams(**({"seed": 1, "max_tokens": 999} | params))  # type: ignore[arg-type]
    return RequestState(
        Request(request_id="r", prompt_token_ids=[65], params=sampling_params), tokenizer, arrival_time=0.0
    )


def delta(token_ids: list[int], finish: Finish | None = None, time: float = 1.0) -> Delta:
    logprobs = [TokenLogprob(token_id, -token_id / 10, 1, ()) for token_id in token_ids]
    return Delta(time=time, first_time=time, last_time=time, token_ids=token_ids, logprobs=logprobs, finish=finish)


def cuts(token_ids: list[int], places: list[int]) -> list[list[int]]:
    edges = [0, *sorted(place % (len(token_ids) + 1) for place in places), len(token_ids)]
    return [token_ids[a:b] for a, b in itertools.pairwise(edges)]


@given(
    st.lists(st.integers(0, 999), max_size=30),
    st.sampled_from([[], ["so on"], ["’s"], ["本語 "], ["zzz", "no end"], ["end"]]),
    st.booleans(),
)
def test_I_14_R_15_any_cut_gives_the_same_answer(
    tokenizer: Tokenizer, places: list[int], stop: list[str], include: bool
) -> None:
    token_ids = list(TEXT.encode())
    actual = state(tokenizer, stop=stop, include_stop_str_in_output=include, logprobs=0)
    texts = []
    pieces = cuts(token_ids, places)
    for number, piece in enumerate(pieces):
        last = number == len(pieces) - 1
        texts.append(actual.feed(delta(piece, Finish("length") if last else None)).text)
    expected = TEXT
    if stop:
        ends = [(TEXT.index(s) + len(s), s) for s in stop if s in TEXT]
        end, result = min(ends)
        expected = TEXT[:end] if include else TEXT[: end - len(result)]
        assert actual.finish == Finish("stop", result)
        assert bytes(actual.token_ids).decode().endswith(result)
    assert "".join(texts) == actual.text == expected
    assert [entry.token_id for entry in actual.logprobs] == actual.token_ids
    output = actual.completion()
    assert output.cumulative_logprob == pytest.approx(sum(-x / 10 for x in actual.token_ids))


@given(st.lists(st.integers(0, 999), max_size=10))
def test_merged_deltas_are_the_same_as_single_ones(tokenizer: Tokenizer, places: list[int]) -> None:
    pieces = cuts(list(TEXT.encode()), places)
    deltas = [delta(piece, time=float(number)) for number, piece in enumerate(pieces)]
    deltas[0].num_cached_tokens, deltas[0].start_time = 7, 0.5
    deltas[-1].finish = Finish("length")
    single, merged = state(tokenizer), state(tokenizer)
    whole = Delta(time=0.0, first_time=0.0, last_time=0.0)
    for each in deltas:
        single.feed(each)
        whole.merge(each)
    merged.feed(whole)
    assert merged.completion() == single.completion()
    assert merged.metrics == single.metrics
    assert merged.num_cached_tokens == 7


def test_the_token_that_ends_an_answer_is_counted_and_not_shown(tokenizer: Tokenizer) -> None:
    result = state(tokenizer)
    result.feed(delta([72, 73, fake.EOS], Finish("stop")))
    assert (result.text, result.token_ids) == ("HI", [72, 73, fake.EOS])
    result = state(tokenizer, stop_token_ids=[73])
    result.feed(delta([72, 73], Finish("stop", 73)))
    assert result.text == "H"
    assert result.completion().stop_reason == 73
    result = state(tokenizer, stop_token_ids=[73], include_stop_str_in_output=True)
    result.feed(delta([72, 73], Finish("stop", 73)))
    assert result.text == "HI"


def test_after_the_end_nothing_is_added(tokenizer: Tokenizer) -> None:
    result = state(tokenizer, stop=["H"])
    assert result.feed(delta([71, 72])).text == "G"
    assert result.feed(delta([73, 74])) == ("", [], [])
    assert result.token_ids == [71, 72]


def test_after_the_engines_own_end_nothing_is_added(tokenizer: Tokenizer) -> None:
    result = state(tokenizer)
    result.feed(delta([71], Finish("length"), time=1.0))
    before = result.completion()
    late = delta([72], Finish("stop"), time=9.0)
    assert result.feed(late) == ("", [], [])
    assert result.completion() == before
    assert (result.metrics.last_token_time, result.metrics.finished_time) == (1.0, 1.0)


def test_without_a_tokenizer_there_are_ids_and_no_text() -> None:
    result = state(None, logprobs=0)
    result.feed(delta([1, 2], Finish("length")))
    output = request_output([result], "name", None, SamplingParams())
    assert (output.outputs[0].text, output.outputs[0].token_ids, output.finished) == ("", [1, 2], True)
    assert output.outputs[0].logprobs is not None
    assert output.outputs[0].logprobs[0][1].decoded_token is None


def test_a_step_is_cut_into_one_delta_for_each_request() -> None:
    output = StepOutput(
        step_id=1,
        start_time=1.0,
        end_time=2.0,
        request_ids=["a", "b"],
        token_ids=[[1], [2]],
        started={"a": 4, "c": 0},
        finished={"b": Finish("length"), "d": Finish("abort")},
        prompt_logprobs={"c": [TokenLogprob(1, -1.0, 1, ())]},
    )
    deltas = dict(deltas_of(output))
    assert list(deltas) == ["a", "b", "c", "d"]
    assert (deltas["a"].num_cached_tokens, deltas["a"].start_time, deltas["b"].num_cached_tokens) == (4, 1.0, None)
    assert (deltas["b"].finish, deltas["d"].finish) == (Finish("length"), Finish("abort"))
    assert len(deltas["c"].prompt_logprobs) == 1


def test_n_answers_are_n_requests_of_one_group_with_seeds_in_a_row() -> None:
    ranked = msgspec.structs.replace(INFO, scheduling_policy="priority")
    requests = make_requests([1, 2], SamplingParams(n=3, seed=10, max_tokens=None), ranked, RequestOptions(2, "s"))
    assert [one.params.seed for one in requests] == [10, 11, 12]
    assert {one.params.max_tokens for one in requests} == {62}
    assert len({one.request_id for one in requests}) == 3
    assert len({one.group for one in requests}) == 1
    assert requests[0].group
    assert {(one.params.n, one.priority, one.cache_salt) for one in requests} == {(1, 2, "s")}
    assert make_requests([1], SamplingParams(seed=2**63 - 1, n=2), INFO)[1].params.seed == 0


def test_a_seed_is_drawn_where_none_is_given() -> None:
    seeds = {make_requests([1], SamplingParams(), INFO)[0].params.seed for _ in range(50)}
    assert len(seeds) == 50
    assert all(seed is not None and 0 <= seed < SEED_LIMIT for seed in seeds)
    assert draw_seed() + 2**16 < 2**53


def test_prompts(tokenizer: Tokenizer) -> None:
    assert prompt_ids("AB", tokenizer, INFO) == ("AB", [65, 66])
    assert prompt_ids([1, 2], tokenizer, INFO) == (None, [1, 2])
    assert prompt_ids({"prompt": "A"}, tokenizer, INFO) == ("A", [65])
    assert prompt_ids({"prompt_token_ids": [7]}, None, INFO) == (None, [7])
    assert prompt_ids("ABCD", tokenizer, INFO, truncate_prompt_tokens=2)[1] == [67, 68]
    assert len(prompt_ids("A" * 500, tokenizer, INFO, truncate_prompt_tokens=-1)[1]) == 63
    # Both: the text is only told; what was cut has none.
    assert prompt_ids({"prompt": "A", "prompt_token_ids": [7]}, None, INFO) == ("A", [7])
    assert prompt_ids("ABCD", tokenizer, INFO, truncate_prompt_tokens=2)[0] is None
    assert prompt_ids("ABCD", tokenizer, INFO, truncate_prompt_tokens=4)[0] == "ABCD"
    with pytest.raises(ContextLengthError, match="at most 63"):
        prompt_ids("A" * 64, tokenizer, INFO)
    for bad in ("", [], {"text": "x"}, [-1], [True], "\ud800", 5, None, b"x", {"prompt": 5}, {"prompt_token_ids": "x"}):
        with pytest.raises(RequestError):
            prompt_ids(bad, tokenizer, INFO)  # type: ignore[arg-type]
    with pytest.raises(RequestError, match="without a tokenizer"):
        prompt_ids("A", None, INFO)


def test_R_09_a_small_cache_bounds_the_context_too() -> None:
    small = msgspec.structs.replace(INFO, num_blocks=2, max_model_len=9)
    assert make_requests([1, 2], SamplingParams(max_tokens=None), small)[0].params.max_tokens == 7
    with pytest.raises(ContextLengthError, match="at most 8"):
        prompt_ids([1] * 9, None, small)
