"""The law with pictures: an answer depends on its request alone, and no picture answers for another one."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.support import picture_model
from tests.support.picture_model import noisy

from headrace import LLM, AsyncLLM, BeamSearchParams, SamplingParams
from headrace.engine.records.blind import notes_of, open_recording
from headrace.protocol.config import EngineConfig
from headrace.protocol.errors import RequestError
from headrace.protocol.pictures import FIRST_ROW_ID, Picture, digest_of, flaw, named, row_ids

TEXT = "Look at <image> and <image>. What is it?"
GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True, logprobs=2)
DRAWN = SamplingParams(temperature=0.9, seed=7, max_tokens=12, ignore_eos=True, logprobs=2)
Bits = tuple[Any, ...]


@pytest.fixture(scope="module")
def theirs(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any, Any]:
    directory = tmp_path_factory.mktemp("model")
    return directory, *picture_model.write(directory)


@pytest.fixture(scope="module")
def directory(theirs: tuple[Path, Any, Any]) -> Path:
    return theirs[0]


def asked(*seeds: int, text: str = TEXT) -> dict[str, Any]:
    return {"prompt": text, "multi_modal_data": {"image": [noisy(seed) for seed in seeds]}}


def bits(output: Any) -> Bits:
    [answer] = output.outputs
    return tuple(answer.token_ids), tuple((i, each.logprob) for row in answer.logprobs for i, each in row.items())


@pytest.fixture(scope="module")
def alone(directory: Path) -> Iterator[dict[tuple[int, int], list[Bits]]]:
    llm = LLM(str(directory), enable_prefix_caching=False)
    yield {
        pair: [bits(llm.generate(asked(*pair), params)[0]) for params in (GREEDY, DRAWN)]
        for pair in ((1, 2), (2, 1), (1, 3))
    }
    llm.close()


def test_pictures_matter_and_the_tokens_are_those_of_transformers(
    theirs: tuple[Path, Any, Any], alone: dict[tuple[int, int], list[Bits]]
) -> None:
    assert len({each[0] for each in alone.values()}) == 3  # negative control
    _, model, processor = theirs
    for pair, (greedy, _) in alone.items():
        inputs = processor(images=[noisy(seed) for seed in pair], text=TEXT, return_tensors="pt")
        with torch.inference_mode():
            out = model.generate(**inputs, max_new_tokens=12, min_new_tokens=12, do_sample=False)
        assert tuple(out[0, inputs["input_ids"].shape[1] :].tolist()) == greedy[0]


@pytest.mark.parametrize(
    "settings",
    [
        {"max_num_batched_tokens": 7},
        {"max_num_batched_tokens": 64, "max_num_seqs": 2},
        {"num_gpu_blocks_override": 12, "max_model_len": 160},  # preempted
        {"speculative_config": {"method": "ngram"}},
        {"kv_cache_dtype": "float32", "block_size": 4},
    ],
    ids=lambda settings: next(iter(settings)),
)
def test_I_13_in_company_in_pieces_cached_preempted(
    settings: dict[str, Any], directory: Path, alone: dict[tuple[int, int], list[Bits]]
) -> None:
    llm = LLM(str(directory), **settings)
    pairs = [*alone, *alone]
    for _ in range(2):  # the second time from the prefix cache
        outputs = llm.generate(
            [asked(*pair) for pair in pairs] + ["Once upon a time"], [GREEDY] * 3 + [DRAWN] * 3 + [GREEDY]
        )
        for place, pair in enumerate(pairs):
            assert bits(outputs[place]) == alone[pair][place // 3]
    llm.close()


def test_S_23_the_cache_knows_pictures_by_their_pixels(directory: Path) -> None:
    llm = LLM(str(directory), block_size=4)
    first = llm.generate(asked(1, 2), GREEDY)[0]
    same = llm.generate(asked(1, 2), GREEDY)[0]
    second = llm.generate(asked(1, 3), GREEDY)[0]
    assert same.num_cached_tokens == len(first.prompt_token_ids) - 1
    assert first.prompt_token_ids == second.prompt_token_ids
    row_id = llm.get_tokenizer().token_to_id("<image>")
    places = [place for place, token_id in enumerate(first.prompt_token_ids) if token_id == row_id]
    # Up to the first row of the second picture, and not further: the placeholders after it are the same tokens.
    assert places[0] < second.num_cached_tokens <= places[len(places) // 2]
    # The tower computes a picture once, whatever is asked about it.
    rows: Any = llm.core.executor
    num_computed = rows.pictures.num_computed
    assert num_computed > 0
    llm.generate(asked(1, 2, text="Other words, <image> and <image>?"), GREEDY)
    assert rows.pictures.num_computed == num_computed
    llm.close()


def test_a_replayed_recording_has_no_pixels(directory: Path, tmp_path: Path) -> None:
    log = tmp_path / "schedule.log"
    llm = LLM(str(directory), record_schedule=str(log))
    llm.generate([asked(1, 2), asked(1, 2), asked(2, 1)], GREEDY)
    llm.close()
    assert log.stat().st_size < len(noisy(1).tobytes())
    assert list(notes_of(open_recording(log)))


def test_further_numbers_of_prompts_with_pictures(directory: Path) -> None:
    llm = LLM(str(directory))
    params = SamplingParams(
        temperature=0, max_tokens=4, prompt_logprobs=1, repetition_penalty=1.3, presence_penalty=0.5, n=1
    )
    [output] = llm.generate(asked(1, 2), params)
    assert output.prompt_logprobs is not None
    assert len(output.prompt_logprobs) == len(output.prompt_token_ids)
    [several] = llm.generate(asked(1, 2), SamplingParams(temperature=0.8, seed=1, n=3, max_tokens=4))
    assert len(several.outputs) == 3
    llm.close()


@pytest.mark.parametrize(
    ("prompt", "field", "bound"),
    [
        (asked(1), "prompt", "as many as pictures, 1"),
        (asked(1, 2, 3), "prompt", "as many as pictures, 3"),
        ({"prompt": "<image>", "multi_modal_data": {"video": [1]}}, "multi_modal_data", "not read"),
        ({"prompt": "<image>", "multi_modal_data": {"image": [3.5]}}, "multi_modal_data.image[0]", "Pillow"),
        ({"prompt": "<image>", "multi_modal_data": {"image": [b"no"]}}, "multi_modal_data.image[0]", "none of PNG"),
        ({"prompt_token_ids": [1], "multi_modal_data": {"image": [b""]}}, "prompt", "a text"),
    ],
)
def test_bad_pictures_name_their_field(directory: Path, prompt: Any, field: str, bound: str) -> None:
    llm = LLM(str(directory))
    with pytest.raises(RequestError, match=re.escape(bound)) as refusal:
        llm.generate(prompt, GREEDY)
    assert refusal.value.field == field
    llm.close()


def test_a_limit_of_pictures(directory: Path) -> None:
    for limit, bound in ((1, "at most 1 pictures"), (0, "reads text only")):
        llm = LLM(str(directory), limit_mm_per_prompt={"image": limit})
        assert bool(llm.core.info.pictures) == bool(limit)
        with pytest.raises(RequestError, match=bound):
            llm.generate(asked(1, 2), GREEDY)
        llm.close()


def test_both_engines_read_pictures_and_other_calls_refuse_them(
    directory: Path, alone: dict[tuple[int, int], list[Bits]]
) -> None:
    async def answer() -> Any:
        async with AsyncLLM(model=str(directory)) as llm:
            async for output in llm.generate(asked(1, 2), GREEDY):
                last = output
            with pytest.raises(RequestError, match="left out of this call"):
                await llm.beam_search(asked(1, 2), BeamSearchParams(beam_width=2, max_tokens=2))
            return last

    assert bits(asyncio.run(answer())) == alone[1, 2][0]
    llm = LLM(str(directory))
    with pytest.raises(RequestError, match="left out of this call"):
        llm.embed(asked(1, 2))
    parts = [
        {"type": "image_url", "image_url": {"url": picture_model.data_url(noisy(1))}},
        {"type": "text", "text": "What is it?"},
    ]
    [chat] = llm.chat([{"role": "user", "content": parts}], GREEDY)
    assert chat.prompt_token_ids.count(llm.get_tokenizer().token_to_id("<image>")) == 20  # five tiles
    llm.close()


def test_ids_of_rows_belong_to_one_picture() -> None:
    one, other = (picture(bytes([value] * 12)) for value in (1, 2))
    ids = row_ids(one)
    assert len(set(ids)) == 4
    assert min(ids) >= FIRST_ROW_ID
    assert max(ids) < 2**63
    assert not set(ids) & set(row_ids(other))
    assert named(list(range(9)), [one]) == [0, 1, *ids[:2], 4, *ids[2:], 7, 8]
    assert named([5, 6], []) == [5, 6]


def picture(pixels: bytes, spans: tuple[tuple[int, int], ...] = ((2, 2), (5, 2))) -> Picture:
    return Picture(digest_of(pixels, 2, 2), pixels, 2, 2, list(spans))


def test_pictures_that_do_not_fit_a_prompt_are_told_apart() -> None:
    good = picture(b"123456789012")
    assert flaw([good], 7) == ""
    assert flaw([], 1) == ""
    assert "prompt of 6 tokens" in flaw([good], 6)
    assert "11 bytes" in flaw([Picture("", b"x" * 11, 2, 2, [(0, 1)])], 7)
    assert "not that of its pixels" in flaw([Picture("00", b"x" * 12, 2, 2, [(0, 1)])], 7)
    assert "behind" in flaw([good, good], 20)
    assert "behind" in flaw([picture(b"123456789012", ((2, 2), (3, 2)))], 20)


def test_limits_in_vllms_forms() -> None:
    sized: Any = {"image": {"count": 3, "width": 512}, "video": 0}
    assert EngineConfig(limit_mm_per_prompt=sized).limit_mm_per_prompt == {"image": 3, "video": 0}
    wrong: Any
    for wrong in ({"image": -1}, {"image": True}, {"smell": 1}, {"image": {"width": 5}}, [1]):
        with pytest.raises(RequestError, match="limit_mm_per_prompt"):
            EngineConfig(limit_mm_per_prompt=wrong)
