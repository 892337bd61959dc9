"""An output of the engine in parts: `parts_of` cuts it, and `Joiner` puts cut rows of log-probabilities together.

A frame of a whole output could hold up the server while it is decoded, or be above the cap. Called by `engine.child`,
which sends the parts, and by `engine.links`, which reads them. Knows no sockets.
"""

from __future__ import annotations

from collections.abc import Iterator

import msgspec

from headrace.protocol.step import StepOutput, TokenLogprob

PART_NUMBERS = 4096
"""Log-probabilities and hidden numbers after which an output goes on in another frame."""

RARE = ("states", "pooled", "finished", "beams")


def parts_of(output: StepOutput) -> Iterator[StepOutput]:
    """Yield `output` in parts, each with about `PART_NUMBERS` log-probabilities and hidden numbers at most.

    The parts of a request come in order, its prompt's log-probabilities first and its end last; the `note` comes before
    all ends, and `stats` and `cache_keys` are in the last part. The tokens that a step sampled for a request stay
    together, with their log-probabilities. The alternatives of a row that is too large by itself come before it
    (`StepOutput.alternatives`).
    """
    if not output.has_rows:
        yield output
        return
    times = {"step_id": output.step_id, "start_time": output.start_time, "end_time": output.end_time}
    columns = dict(zip(output.request_ids, output.token_ids, strict=True))
    part, size = StepOutput(**times, note=output.note), 0  # type: ignore[arg-type]
    rows = ("started", "prompt_logprobs", "logprobs")
    for request_id in dict.fromkeys([*columns, *(each for name in rows + RARE for each in getattr(output, name))]):
        if request_id in output.started:
            part.started[request_id] = output.started[request_id]
        for entry in output.prompt_logprobs.get(request_id, ()):
            if size >= PART_NUMBERS or (size and _is_long(entry)):
                yield part
                part, size = StepOutput(**times), 0  # type: ignore[arg-type]
            for piece in _pieces(entry):
                yield StepOutput(**times, alternatives={request_id: (0, piece)})  # type: ignore[arg-type]
            part.prompt_logprobs.setdefault(request_id, []).append(_short(entry))
            size += 1 + len(part.prompt_logprobs[request_id][-1].top)
        entries = output.logprobs.get(request_id, [])
        if size >= PART_NUMBERS or (size and any(map(_is_long, entries))):
            yield part
            part, size = StepOutput(**times), 0  # type: ignore[arg-type]
        for row, entry in enumerate(entries):
            for piece in _pieces(entry):
                yield StepOutput(**times, alternatives={request_id: (row, piece)})  # type: ignore[arg-type]
        if entries:
            part.logprobs[request_id] = [_short(entry) for entry in entries]
        if request_id in columns:
            part.request_ids.append(request_id)
            part.token_ids.append(columns[request_id])
        for name in RARE:
            if request_id in (column := getattr(output, name)):
                getattr(part, name)[request_id] = column[request_id]
        size += sum(1 + len(entry.top) for entry in part.logprobs.get(request_id, ()))
        size += len(part.pooled.get(request_id, ()))
    part.stats, part.cache_keys = output.stats, output.cache_keys
    yield part


def _is_long(entry: TokenLogprob) -> bool:
    return len(entry.top) > PART_NUMBERS


def _pieces(entry: TokenLogprob) -> Iterator[tuple[tuple[int, float], ...]]:
    """Yield the alternatives of a row that is too large for one part, in order."""
    if _is_long(entry):
        for start in range(0, len(entry.top), PART_NUMBERS):
            yield entry.top[start : start + PART_NUMBERS]


def _short(entry: TokenLogprob) -> TokenLogprob:
    return msgspec.structs.replace(entry, top=()) if _is_long(entry) else entry


class Joiner:
    """Puts the rows of one engine's outputs together again. `rows` are alternatives whose rows are to come; without any
    an output that brings none is whole."""

    def __init__(self) -> None:
        self.rows: dict[str, dict[int, list[tuple[int, float]]]] = {}

    def join(self, output: StepOutput) -> None:
        """Keep the alternatives in a part, and add to its rows the alternatives that came before."""
        for request_id, (row, more) in output.alternatives.items():
            self.rows.setdefault(request_id, {}).setdefault(row, []).extend(more)
        for request_id in [each for each in self.rows if each in output.prompt_logprobs or each in output.logprobs]:
            entries = output.prompt_logprobs.get(request_id) or output.logprobs[request_id]
            for row, alternatives in self.rows.pop(request_id).items():
                # The list itself: a copy of a million references holds up the server's loop for tens of milliseconds.
                entries[row] = msgspec.structs.replace(entries[row], top=alternatives)
