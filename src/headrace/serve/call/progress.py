"""The progress of prompts in a stream (`return_progress`). Called by the replies of OpenAI's and llama-server's API."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from typing import Any, NamedTuple

from headrace.serve.call.call import Answer
from headrace.serve.call.replies import FollowPrompt, PromptProgress, Timings, prompt_timings
from headrace.text.outputs import MessagePart, TextDelta


class Progressed(NamedTuple):
    """The progress of a prompt's computation, and the times so far."""

    progress: PromptProgress
    timings: Timings


Piece = tuple[int, TextDelta | Progressed, list[MessagePart]]


async def parts(answer: Answer, follow: FollowPrompt | None) -> AsyncIterator[Piece]:
    """Yield `answer.parts`, and before the first part of each place the progress of its prompt: once at its beginning,
    and after each step. Raises the engine's errors."""
    if follow is None:
        async for part in answer.parts():
            yield part
        return
    reports: list[tuple[int, Progressed]] = []
    wake = asyncio.Event()

    def noter(place: int) -> Callable[[int, int, int, float], None]:
        def note(total: int, cache: int, processed: int, time_ms: float) -> None:
            progress = PromptProgress(total=total, cache=cache, processed=processed, time_ms=int(time_ms))
            reports.append((place, Progressed(progress, prompt_timings(progress, time_ms))))
            wake.set()

        return note

    states = answer.generation.states
    ends = {place: follow(state.request.request_id, noter(place)) for place, state in enumerate(states)}
    reading: asyncio.Future[Any] | None = None
    async with contextlib.aclosing(answer.parts()) as pieces:  # type: ignore[type-var]
        try:
            while ends:
                reading = reading or asyncio.ensure_future(anext(pieces, None))
                waking = asyncio.ensure_future(wake.wait())
                try:
                    await asyncio.wait({reading, waking}, return_when=asyncio.FIRST_COMPLETED)
                finally:
                    waking.cancel()
                wake.clear()
                while reports:
                    place, progressed = reports.pop(0)
                    yield place, progressed, []
                if reading.done():
                    piece, reading = reading.result(), None
                    if piece is None:
                        return
                    if piece[0] in ends and piece[1].token_ids:
                        ends.pop(piece[0])()
                    yield piece
        finally:
            for end in ends.values():
                end()
            if reading is not None:
                reading.cancel()
                with contextlib.suppress(asyncio.CancelledError, Exception):
                    await reading
        async for piece in pieces:
            yield piece
