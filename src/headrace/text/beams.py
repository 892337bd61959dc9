"""Beam searches between a caller and the engine: one request goes in, and comes out as `n` answers.

Used alike by `LLM`, `AsyncLLM` and the HTTP server. The search itself is `core.beams`; knows no HTTP.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import msgspec

from headrace.protocol.beam import BeamSearchParams, check_combination
from headrace.protocol.errors import HeadraceError
from headrace.protocol.params import SamplingParams
from headrace.protocol.step import EngineInfo, Finish, Request
from headrace.text.inputs import make_requests
from headrace.text.outputs import Delta, RequestState
from headrace.text.tokenizer import Tokenizer


class BeamSearchSequence(msgspec.Struct):
    """One answer, as vLLM gives it: `tokens` and `text` begin with the prompt. `score` is what ranked it."""

    tokens: list[int]
    text: str | None
    cum_logprob: float
    score: float
    finish_reason: str
    stop_reason: int | str | None = None


class BeamSearchOutput(msgspec.Struct):
    """All answers to one prompt, best first, and the most KV blocks that the beams held at once: as they shared them,
    and as many as they would have held without sharing."""

    sequences: list[BeamSearchSequence]
    num_blocks: int
    num_blocks_unshared: int


def make_search(
    token_ids: list[int],
    beam: BeamSearchParams,
    params: SamplingParams,
    info: EngineInfo,
    *,
    priority: int = 0,
    cache_salt: str = "",
    tokenizer: Tokenizer | None = None,
) -> Request:
    """The one request that searches for answers to one prompt. Raises `RequestError`."""
    check_combination(params)
    # Nothing is drawn, so the seed is nobody's business; but a complete request has one.
    drawn = {"draw": lambda: 0, "priority": priority, "cache_salt": cache_salt, "tokenizer": tokenizer}
    (request,) = make_requests(token_ids, params, info, **drawn)  # type: ignore[arg-type]
    return msgspec.structs.replace(request, beam=beam)


def parts_of(delta: Delta, num_answers: int) -> Iterator[Delta]:
    """One delta of a search as one for each of its answers."""
    found = delta.beams.beams if delta.beams is not None else []
    for place in range(num_answers):
        part = msgspec.structs.replace(delta, token_ids=[])
        if delta.beams is not None and place < len(found):
            beam = found[place]
            part.token_ids, part.finish = list(beam.token_ids), beam.finish
            part.beams = msgspec.structs.replace(delta.beams, beams=[beam])
        elif delta.beams is not None:
            # A vocabulary too small for so many answers.
            part.finish = Finish("error", message=f"the search found {len(found)} answers")
        yield part


def beam_output(states: list[RequestState], prompt: str | None, tokenizer: Tokenizer | None) -> BeamSearchOutput:
    """What an ended search found, whose answers are in one state or in one each. `prompt` is its text, decoded if it
    was given as ids.

    Raises `HeadraceError` with the engine's words if it failed.
    """
    state = states[0]
    if state.beams is None:
        message = state.finish.message if state.finish else "it has not ended"
        raise HeadraceError(f"the search failed: {message}")
    params, prompt_ids = state.request.params, state.request.prompt_token_ids
    sequences = []
    for beam in [beam for told in states if told.beams is not None for beam in told.beams.beams]:
        text = None
        if tokenizer is not None:
            part = RequestState(state.request, tokenizer)
            part.feed(Delta(0.0, 0.0, 0.0, token_ids=list(beam.token_ids), finish=beam.finish))
            told = tokenizer.decode(prompt_ids, params.skip_special_tokens) if prompt is None else prompt
            text = told + part.text
        sequences.append(
            BeamSearchSequence(
                tokens=[*prompt_ids, *beam.token_ids],
                text=text,
                cum_logprob=beam.cumulative_logprob,
                score=beam.score,
                finish_reason=beam.finish.reason,
                stop_reason=beam.finish.stop_reason,
            )
        )
    return BeamSearchOutput(sequences, state.beams.num_blocks, state.beams.num_blocks_unshared)


def blocks_of(groups: list[list[RequestState]]) -> dict[str, Any]:
    """What a reply tells of the memory of its searches, summed over the prompts; nothing if there was none."""
    found = [group[0].beams for group in groups if group[0].beams is not None]
    if not found:
        return {}
    unshared = sum(result.num_blocks_unshared for result in found)
    return {"beam_search": {"num_blocks": sum(r.num_blocks for r in found), "num_blocks_unshared": unshared}}
