"""Makes the one request of a beam search, and turns its result into `n` answers.

Called by `LLM`, `AsyncLLM` and the HTTP server. The search itself is `core.beams`; knows no HTTP.
"""

from __future__ import annotations

from collections.abc import Iterator

import msgspec

from headrace.protocol.beam import BeamSearchParams, check_combination
from headrace.protocol.errors import HeadraceError
from headrace.protocol.params import SamplingParams
from headrace.protocol.step import EngineInfo, Finish, Request
from headrace.text.inputs import RequestOptions, make_requests
from headrace.text.outputs import Delta, RequestState
from headrace.text.tokenizer import Tokenizer


class BeamSearchSequence(msgspec.Struct):
    """One answer, as vLLM gives it: `tokens` and `text` begin with the prompt. Answers are ranked by `score`."""

    tokens: list[int]
    text: str | None
    cum_logprob: float
    score: float
    finish_reason: str
    stop_reason: int | str | None = None


class BeamSearchOutput(msgspec.Struct):
    """All answers to one prompt, best first, and the most KV blocks that the beams held at once, and would have held
    without sharing."""

    sequences: list[BeamSearchSequence]
    num_blocks: int
    num_blocks_unshared: int


def make_search(
    token_ids: list[int],
    beam: BeamSearchParams,
    params: SamplingParams,
    info: EngineInfo,
    options: RequestOptions = RequestOptions(),
) -> Request:
    """Return the request that searches for answers to one prompt. Raises `RequestError`."""
    check_combination(params)
    # A search draws nothing, so the seed has no effect; but a complete request has one.
    (request,) = make_requests(token_ids, params, info, options._replace(draw=lambda: 0))
    return msgspec.structs.replace(request, beam=beam)


def parts_of(delta: Delta, num_answers: int) -> Iterator[Delta]:
    """Yield a delta for each answer of a search."""
    beams = delta.beams.beams if delta.beams is not None else []
    for place in range(num_answers):
        part = msgspec.structs.replace(delta, token_ids=[])
        if delta.beams is not None and place < len(beams):
            beam = beams[place]
            part.token_ids, part.finish = list(beam.token_ids), beam.finish
            part.beams = msgspec.structs.replace(delta.beams, beams=[beam])
        elif delta.beams is not None:
            # The vocabulary is too small for so many answers.
            part.finish = Finish("error", message=f"the search found {len(beams)} answers")
        yield part


def beam_output(states: list[RequestState], prompt: str | None, tokenizer: Tokenizer | None) -> BeamSearchOutput:
    """Return the result of a search that has ended; its answers are in one state together, or in one state each.
    `prompt` is the prompt's text; None: it is decoded.

    Raises `HeadraceError` with the engine's message if the search failed.
    """
    state = states[0]
    if state.beams is None:
        message = state.finish.message if state.finish else "it has not ended"
        raise HeadraceError(f"the search failed: {message}")
    params, prompt_ids = state.request.params, state.request.prompt_token_ids
    sequences = []
    for beam in [beam for each in states if each.beams is not None for beam in each.beams.beams]:
        text = None
        if tokenizer is not None:
            part = RequestState(state.request, tokenizer)
            part.feed(Delta(0.0, 0.0, 0.0, token_ids=list(beam.token_ids), finish=beam.finish))
            prompt_text = tokenizer.decode(prompt_ids, params.skip_special_tokens) if prompt is None else prompt
            text = prompt_text + part.text
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
