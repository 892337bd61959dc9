"""The metrics of llama-server, under its names, of all models together. `/metrics` has them too with `--metrics`.

Knows no HTTP and no engine; called by `serve.app`.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import msgspec

from headrace.insight.observer import Totals

COUNTERS = {
    "prompt_tokens_total": ("num_prompt_tokens", "Prompt tokens that were computed."),
    "prompt_tokens_cached_total": ("num_cached_tokens", "Prompt tokens that the prefix cache had."),
    "prompt_seconds_total": ("prompt_seconds", "Seconds from the first step of a request to its first token."),
    "tokens_predicted_total": ("num_generated_tokens", "Generated tokens."),
    "tokens_predicted_seconds_total": ("decode_seconds", "Seconds from the first token of a request to its last."),
    "n_decode_total": ("num_steps", "Steps of the engine."),
    "n_tokens_max": ("most_tokens", "Tokens of the longest request, prompt and answer."),
    "spec_decode_num_draft_tokens_total": ("num_draft_tokens", "Draft tokens that were verified."),
    "spec_decode_num_accepted_tokens_total": ("num_accepted_tokens", "Draft tokens that were kept."),
    "spec_decode_num_drafts_total": ("num_drafts", "Drafts that were verified."),
}
"""Names, each with the field of `Totals` that it shows."""


class LlamaMetrics:
    """Renders the metrics. The rates are those since the last scrape, as llama-server has them."""

    def __init__(self) -> None:
        self._before = Totals()

    def render(self, models: Iterable[Totals]) -> bytes:
        """Return the exposition text of one scrape."""
        now = _sum(models)
        before, self._before = self._before, now
        gauges = {
            "prompt_tokens_seconds": (
                _rate(now.num_prompt_tokens - before.num_prompt_tokens, now.prompt_seconds - before.prompt_seconds),
                "Prompt tokens computed in a second, since the last scrape.",
            ),
            "predicted_tokens_seconds": (
                _rate(
                    now.num_generated_tokens - before.num_generated_tokens, now.decode_seconds - before.decode_seconds
                ),
                "Tokens generated in a second of a request, since the last scrape.",
            ),
            "requests_processing": (now.num_running, "Requests in the running batch."),
            "requests_deferred": (now.num_waiting, "Requests that wait for room."),
            "n_busy_slots_per_decode": (_rate(now.num_busy, now.num_steps), "Requests in a step, on average."),
        }
        lines = [
            line
            for name, (field, doc) in COUNTERS.items()
            for line in _lines(name, "counter", doc, getattr(now, field))
        ]
        for name, (value, doc) in gauges.items():
            lines += _lines(name, "gauge", doc, value)
        return "".join(lines).encode()


def _sum(models: Iterable[Totals]) -> Totals:
    values: dict[str, Any] = dict.fromkeys(Totals.__struct_fields__, 0)
    for each in models:
        for name, value in msgspec.structs.asdict(each).items():
            values[name] = max(values[name], value) if name == "most_tokens" else values[name] + value
    return Totals(**values)


def _rate(number: float, seconds: float) -> float:
    return number / seconds if number > 0 and seconds > 0 else 0.0


def _lines(name: str, kind: str, doc: str, value: float) -> Iterable[str]:
    whole = f"llamacpp:{name}"
    return (f"# HELP {whole} {doc}\n", f"# TYPE {whole} {kind}\n", f"{whole} {value:.12g}\n")
