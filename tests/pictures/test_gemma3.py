"""Gemma 3, whose rows see their picture whole, as transformers' processor and model have it."""

from __future__ import annotations

import re
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from tests.support.harness import BACKENDS, load
from tests.support.picture_model import noisy
from tests.support.pictures import (
    Theirs,
    answers,
    logits_of,
    make_tokenizer,
    refusal,
    save_random,
    verify_logits,
    verify_reading,
)
from transformers import Gemma3Config, Gemma3ForConditionalGeneration, Gemma3Processor
from transformers.models.gemma3.image_processing_pil_gemma3 import Gemma3ImageProcessorPil

from headrace import LLM, SamplingParams
from headrace.backends.cpu import Cpu
from headrace.backends.cpu.check.verify import verify
from headrace.backends.cpu.tape import Tape
from headrace.backends.step import Chunks, StepSizes, make_step_rows
from headrace.core.sequence import NEVER, Sequence
from headrace.protocol.errors import RequestError
from headrace.protocol.kinds import CacheKind
from headrace.protocol.pictures import wholes_of
from headrace.runner.pictures import whole_rows
from headrace.runner.pieces import Piece

SIDE = 56
TEXT = {
    "model_type": "gemma3_text", "hidden_size": 48, "intermediate_size": 80, "num_hidden_layers": 3,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "query_pre_attn_scalar": 16,
    "max_position_embeddings": 512, "sliding_window": 11,
    "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
}  # fmt: skip


@pytest.fixture(scope="module")
def theirs(tmp_path_factory: pytest.TempPathFactory) -> Theirs:
    words = {"boi_token": "<start_of_image>", "eoi_token": "<end_of_image>", "image_token": "<image_soft_token>"}
    directory = tmp_path_factory.mktemp("gemma3")
    tokenizer = make_tokenizer([*words.values()], extra_special_tokens=words)
    vision = {
        "model_type": "siglip_vision_model", "hidden_size": 48, "intermediate_size": 80, "num_hidden_layers": 2,
        "num_attention_heads": 4, "image_size": SIDE, "patch_size": 7, "vision_use_head": False,
    }  # fmt: skip
    config = Gemma3Config(
        text_config=TEXT | {"vocab_size": len(tokenizer) + 5}, vision_config=vision, mm_tokens_per_image=16,
        image_token_index=tokenizer.convert_tokens_to_ids(words["image_token"]),
        boi_token_index=tokenizer.convert_tokens_to_ids(words["boi_token"]),
        eoi_token_index=tokenizer.convert_tokens_to_ids(words["eoi_token"]),
    )  # fmt: skip
    model = Gemma3ForConditionalGeneration._from_config(config, attn_implementation="eager", dtype=torch.float32)
    # Crops are made where a call asks for them, not where the file does.
    images = Gemma3ImageProcessorPil(size={"height": SIDE, "width": SIDE}, do_pan_and_scan=True)
    processor = Gemma3Processor(images, tokenizer, None, image_seq_length=16)
    return answers(directory, save_random(model, directory), processor, words["boi_token"])


@pytest.mark.parametrize("backend", BACKENDS)
def test_pixels_tokens_and_logits_are_those_of_transformers(theirs: Theirs, backend: str) -> None:
    prompt = verify_reading(theirs)
    assert [picture.spans[0][1] for picture in prompt.pictures] == [16, 16, 16]
    verify_logits(theirs, prompt, backend)


def test_control_rows_that_see_no_later_ones_give_other_logits(theirs: Theirs) -> None:
    prompt = verify_reading(theirs)
    one_way = [msgspec.structs.replace(picture, sees_whole=False) for picture in prompt.pictures]
    runner = load(theirs.directory)
    [logits] = logits_of(runner, [prompt._replace(pictures=one_way)], [512])
    first = prompt.pictures[0].spans[0][0]
    np.testing.assert_allclose(logits[:first], theirs.logits[:first], atol=1e-4, rtol=0)
    assert abs(logits[first] - theirs.logits[first]).max() > 1e-2
    assert abs(logits[-1] - theirs.logits[-1]).max() > 1e-2
    runner.close()


def test_a_pass_that_ends_inside_a_picture_is_refused(theirs: Theirs) -> None:
    first, num = 3, 16
    assert whole_rows([Piece(0, 0, [0] * 25, [], wholes=[(first, first + num)])]) == [(3, 19)]
    assert whole_rows([Piece(0, 0, [0] * 3, [], wholes=[(3, 19)]), Piece(0, 7, [0] * 12, [], wholes=[(3, 19)])]) == [
        (3, 15)
    ]
    with pytest.raises(ValueError, match=re.escape("rows up to 17 of a picture at 3 ... 18, which is seen whole")):
        whole_rows([Piece(0, 0, [0] * 18, [], wholes=[(3, 19)])])
    rows = make_step_rows(lambda n: np.zeros(n, np.int32), [CacheKind()], 4, StepSizes(8, 2, 8))
    with pytest.raises(ValueError, match="a program that has none"):
        rows.fill(Chunks([0], [[1, 2, 3]], [[0]], wholes=[(0, 2)]))


def test_each_record_agrees_with_torch_ref_and_a_wrong_one_is_named(theirs: Theirs) -> None:
    prompt = verify_reading(theirs)
    runner: Any = load(theirs.directory, dtype="float32")
    program, num = runner.program, len(prompt.token_ids)
    chunks = Chunks([0], [prompt.token_ids], [list(range(-(-num // program.block_size)))])
    program.forward(chunks._replace(wholes=wholes_of(prompt.pictures)), [])
    dims = [num, 1, 0]
    assert verify(program.tape, dims) == []
    node = [node for node in program.tape.nodes if node.op == "attention"][1]
    seen = node.fields["seen"]
    positions = np.arange(len(seen), dtype=np.int32)  # outlives the tape, which has its address
    node.fields["seen"] = positions
    tape = Tape(program.tape.graph, program.tape.most)
    node.fields["seen"] = seen
    [first, *_] = verify(tape, dims)
    assert (first.index, first.op) == (node.index, "attention")
    runner.close()


TEXT_OF = "Look at <start_of_image> and <start_of_image>. What is it?"
GREEDY = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True, logprobs=2, prompt_logprobs=1)
DRAWN = SamplingParams(temperature=0.9, seed=7, max_tokens=6, ignore_eos=True, logprobs=2)
PAIRS = ((1, 2), (2, 1), (1, 3))


def asked(*seeds: int) -> dict[str, Any]:
    return {"prompt": TEXT_OF, "multi_modal_data": {"image": [noisy(seed) for seed in seeds]}}


def bits(output: Any) -> tuple[Any, ...]:
    [answer] = output.outputs
    rows = [*answer.logprobs, *(row for row in output.prompt_logprobs or () if row)]
    return tuple(answer.token_ids), tuple((i, each.logprob) for row in rows for i, each in row.items())


@pytest.fixture(scope="module")
def alone(theirs: Theirs) -> dict[tuple[int, int], list[Any]]:
    llm = LLM(str(theirs.directory), enable_prefix_caching=False)
    outs = {pair: [bits(llm.generate(asked(*pair), params)[0]) for params in (GREEDY, DRAWN)] for pair in PAIRS}
    llm.close()
    assert len({each[0] for each in outs.values()}) == 3
    return outs


@pytest.mark.parametrize(
    "settings",
    [
        {"max_num_batched_tokens": 16},
        {"max_num_batched_tokens": 21, "max_num_seqs": 3},
        {"long_prefill_token_threshold": 5},
        {"num_gpu_blocks_override": 14, "block_size": 8, "max_model_len": 96},  # preempted
        {"speculative_config": {"method": "ngram"}},
        {"block_size": 4, "scheduling_policy": "fair"},
    ],
    ids=lambda settings: next(iter(settings)),
)
def test_I_13_in_company_in_pieces_cached_preempted(
    settings: dict[str, Any], theirs: Theirs, alone: dict[tuple[int, int], list[Any]]
) -> None:
    llm = LLM(str(theirs.directory), **settings)
    for _ in range(2):  # the second time from the prefix cache
        prompts = [asked(*pair) for pair in PAIRS] * 2 + ["Once upon a time"]
        outputs = llm.generate(prompts, [GREEDY] * 3 + [DRAWN] * 3 + [GREEDY])
        for place, pair in enumerate([*PAIRS, *PAIRS]):
            assert bits(outputs[place]) == alone[pair][place // 3]
    assert "num_gpu_blocks_override" not in settings or llm.core.scheduler.counters.num_preemptions
    llm.close()


def found_at_most(find: Any, cut: int, seq: Any, most: int = NEVER) -> Any:
    return find(seq, min(most, cut))


def test_S_23_a_cached_prefix_may_end_inside_a_picture(theirs: Theirs, alone: dict[tuple[int, int], list[Any]]) -> None:
    llm = LLM(str(theirs.directory), block_size=4)
    params = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True, logprobs=2)
    [first] = llm.generate(asked(1, 2), params)
    token = llm.get_tokenizer().token_to_id("<image_soft_token>")
    places = [place for place, token_id in enumerate(first.prompt_token_ids) if token_id == token]
    for cut in (places[3], places[16] + 5, places[-1]):
        llm.core.scheduler.reset_prefix_cache()
        llm.generate(asked(1, 2), params)
        find = llm.core.scheduler.tables.find_shared
        with pytest.MonkeyPatch.context() as patch:
            limited = partial(found_at_most, find, cut)
            patch.setattr(llm.core.scheduler.tables, "find_shared", limited)
            [again] = llm.generate(asked(1, 2), params)
        assert again.num_cached_tokens == cut
        assert bits(again)[0] == alone[1, 2][0][0]
        assert bits(again)[1] == alone[1, 2][0][1][: len(bits(again)[1])]
    llm.close()


def test_a_picture_larger_than_a_step_is_refused_by_its_request(theirs: Theirs) -> None:
    llm = LLM(str(theirs.directory), max_num_batched_tokens=15)
    with pytest.raises(RequestError, match=re.escape("at most 15 for a picture")) as refusal:
        llm.generate(asked(1, 2), GREEDY)
    assert refusal.value.field == "pictures"
    assert llm.generate("Once upon a time", GREEDY)[0].outputs[0].token_ids
    llm.close()


def test_control_a_step_that_cuts_a_picture_is_caught(theirs: Theirs, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Sequence, "fit", lambda seq, start, length, most: length)
    llm = LLM(str(theirs.directory), max_num_batched_tokens=21)
    [output] = llm.generate(asked(1, 2), GREEDY)
    assert output.outputs[0].finish_reason == "error"
    llm.close()


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"mm_tokens_per_image": 15}, "mm_tokens_per_image is 15, expected the square of a divisor of 8"),
        ({"mm_tokens_per_image": 9}, "mm_tokens_per_image is 9"),
        ({"mm_tokens_per_image": 1024}, "mm_tokens_per_image is 1024"),
        ({"vision_config.hidden_act": "silly"}, "hidden_act is 'silly', expected one of silu"),
    ],
)
def test_a_config_that_the_tower_does_not_fit_is_refused(
    theirs: Theirs, changes: dict[str, Any], reason: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    assert reason in refusal(theirs.directory, tmp_path / "wrong", changes, caplog)


def test_a_backend_that_computes_no_wholes_refuses_pictures(
    theirs: Theirs, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    monkeypatch.setattr(Cpu, "sees_wholes", False)
    message = refusal(theirs.directory, tmp_path / "same", {}, caplog)
    assert "rows see pictures whole, which cpu does not compute as yet" in message
