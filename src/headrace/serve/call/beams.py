"""The parameters of a beam search, read from a request of the API."""

from __future__ import annotations

from typing import Any

from headrace.protocol.beam import BeamSearchParams
from headrace.protocol.errors import RequestError
from headrace.serve.call.schema import Sampled

# What asks for nothing without `use_beam_search`.
NEUTRAL = {
    "beam_width": None,
    "length_penalty": 1,
    "early_stopping": False,
    "num_beam_groups": 1,
    "diversity_penalty": 0,
}


def beam_params(request: Sampled) -> BeamSearchParams | None:
    """The search that a request over the API asks for: as wide as `beam_width`, or `best_of`, or `n` (as vLLM has it),
    with the best `n` told. Raises `RequestError`; also for a parameter of a search without `use_beam_search`."""
    if not request.use_beam_search:
        for name, neutral in NEUTRAL.items():
            value = getattr(request, name)
            if value is not None and value != neutral:
                raise RequestError(name, value, "left out unless use_beam_search is true")
        return None
    num_answers = 1 if request.n is None else request.n
    given: dict[str, Any] = {name: getattr(request, name) for name in NEUTRAL if getattr(request, name) is not None}
    given.setdefault("beam_width", request.best_of or num_answers)
    return BeamSearchParams(n=num_answers, **given)
