"""`BeamSearchParams`: the parameters of a beam search. Names are vLLM's, or transformers' where vLLM has none.

Frozen, checked against `headrace.protocol.bounds` at construction, and sent as it is from the server to the engine.
Knows no tensors and no model; the search itself is `core.beams`.
"""

from __future__ import annotations

import msgspec

from headrace.protocol import bounds
from headrace.protocol.errors import RequestError
from headrace.protocol.params import SamplingParams

# Other parameters of a request with beams: where answers end and how they become text. The rest changes the
# distribution that is searched, or belongs to a draw, and there is none.
KEPT = frozenset(
    "seed max_tokens ignore_eos stop_token_ids include_stop_str_in_output detokenize skip_special_tokens "
    "spaces_between_special_tokens".split()
)


class BeamSearchParams(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Parameters of one search, which keeps the `beam_width` likeliest beginnings and returns the `n` best answers (all
    `beam_width` if not given).

    An answer's score is the sum of its tokens' log-probabilities / (number of tokens ** `length_penalty`), so that
    penalties above 0 favour long answers. `early_stopping` True ends the search with the first `beam_width` answers,
    False when the best running beam, at its present length, cannot beat the worst of them, "never" when none can at any
    length. With `num_beam_groups` above 1 the beams are searched in groups, and a token costs `diversity_penalty` for
    each beam of an earlier group that has chosen it in the same step (Vijayakumar et al., "Diverse Beam Search",
    arXiv:1610.02424, section 3).

    Raises `RequestError` naming the field, the value and the bound.
    """

    beam_width: int
    max_tokens: int = 16
    ignore_eos: bool = False
    temperature: float = 0.0
    length_penalty: float = 1.0
    include_stop_str_in_output: bool = False
    early_stopping: bool | str = False
    num_beam_groups: int = 1
    diversity_penalty: float = 0.0
    n: int | None = None
    stop_token_ids: list[int] | None = None

    def __post_init__(self) -> None:
        for name in ("beam_width", "max_tokens", "length_penalty", "num_beam_groups", "diversity_penalty"):
            bounds.check(name, getattr(self, name))
        if not isinstance(self.early_stopping, bool) and self.early_stopping != "never":
            raise RequestError("early_stopping", self.early_stopping, 'true, false or "never"')
        if self.temperature != 0:
            raise RequestError("temperature", self.temperature, "0 or left out: a beam search draws nothing")
        if self.beam_width % self.num_beam_groups:
            raise RequestError("num_beam_groups", self.num_beam_groups, f"a divisor of beam_width ({self.beam_width})")
        if self.num_beam_groups == 1 and self.diversity_penalty:
            raise RequestError("diversity_penalty", self.diversity_penalty, "0 unless num_beam_groups is above 1")
        if self.n is not None:
            bounds.check("n", self.n)
            if self.n > self.beam_width:
                raise RequestError("n", self.n, f"at most beam_width ({self.beam_width})")
        self.sampling_params()

    @property
    def num_answers(self) -> int:
        return self.beam_width if self.n is None else self.n

    def sampling_params(self) -> SamplingParams:
        """The part of the parameters that every request has. Raises `RequestError` for a value out of range."""
        return SamplingParams(
            max_tokens=self.max_tokens,
            ignore_eos=self.ignore_eos,
            temperature=0.0,
            include_stop_str_in_output=self.include_stop_str_in_output,
            stop_token_ids=self.stop_token_ids,
        )

    def num_kept(self, num_stop_ids: int) -> int:
        """Continuations of one group that a step ranks, over all of its beams: enough for the group to go on if each
        beam meets every stop token (transformers' rule)."""
        return max(2, 1 + num_stop_ids) * self.beam_width // self.num_beam_groups

    def num_candidates(self, num_stop_ids: int) -> int:
        """Continuations of each beam from which a step's best can be chosen. Other groups can push down as many tokens
        as they have beams."""
        return self.num_kept(num_stop_ids) + (self.beam_width if self.num_beam_groups > 1 else 0)

    def step_params(self, params: SamplingParams, num_stop_ids: int) -> SamplingParams:
        """Parameters of one step of a beam: its likeliest tokens, nothing drawn."""
        num_top = self.num_candidates(num_stop_ids)
        return msgspec.structs.replace(params, temperature=0.0, logprobs=num_top, speculation=False)


def check_combination(params: SamplingParams) -> None:
    """Raise `RequestError` for the first parameter that a beam search does not support."""
    plain = SamplingParams(temperature=params.temperature)
    if params.temperature not in (0.0, 1.0):
        raise RequestError("temperature", params.temperature, "0, 1 or left out: a beam search draws nothing")
    for name in params.__struct_fields__:
        if name not in KEPT and getattr(params, name) not in (getattr(plain, name), []):
            raise RequestError(name, getattr(params, name), "left out of a beam search")
