"""The sampler: from one row of logits to one token id, and to log-probabilities where they are asked for.

Order of vLLM V1: log-probabilities of the raw logits; logit_bias and the min_tokens mask; temperature; min_p; top_k;
top_p; then the argmax of (what is left + keyed Gumbel noise), which is a draw from the filtered distribution
(Gumbel-max: Maddison, Tarlow, Minka, "A* Sampling", 2014, section 2). Ties fall to the lower token id everywhere.
Every row is worked on alone, in float64 and by one thread, in calls whose shapes depend on that row only: what comes
out can not depend on the batch. Knows no sequences and no requests; called by the runner.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from headrace.errors import RequestError
from headrace.sampling import noise
from headrace.sampling.params import SamplingParams
from headrace.types import TokenLogprob

F32 = NDArray[np.float32]
F64 = NDArray[np.float64]
Ids = NDArray[np.int64]


class NonFiniteLogitsError(ValueError):
    """A row of logits with a NaN, with +inf, or with nothing but -inf. (-inf alone means: this token never.)"""


@dataclass(slots=True)
class Row:
    """What is to be known of a row of logits to draw from it.

    `position` is the index, in its sequence, of the token to be drawn; `num_prompt` of the tokens before it are the
    prompt; `history` are all of them, or nothing unless `params.needs_history`. `best` is the row's likeliest token,
    the lowest id of equals, where that is known. `state` is what the sampler told after the sequence's last token.
    `mask`: bit t % 32 of word t // 32 is set if token t is allowed.
    """

    params: SamplingParams
    position: int
    num_prompt: int
    history: list[int] = field(default_factory=list)
    best: int | None = None
    state: float | None = None
    mask: NDArray[np.uint32] | None = None


@dataclass(slots=True)
class Drawn:
    """A row's token; log-probabilities and the sampler's state where there are any."""

    token_id: int
    logprob: TokenLogprob | None = None
    state: float | None = None


class Sampler:
    """Samples rows of `vocab_size` logits that lie on the host."""

    def __init__(self, vocab_size: int, eos_token_ids: list[int]) -> None:
        self.vocab_size = vocab_size
        self.eos_token_ids = list(eos_token_ids)

    def sample(
        self, logits: F32, params: list[SamplingParams], positions: list[int], num_prompts: list[int]
    ) -> tuple[list[int], dict[int, TokenLogprob]]:
        """One token id for every row of `logits` [S, V], and by row the log-probabilities that were asked for.

        `positions[i]` is the index, in its sequence, of the token to be sampled; `num_prompts[i]` of the tokens
        before it are the prompt. Raises `NonFiniteLogitsError` or `RequestError` as `sample_row` does; who wants the
        other rows to go on calls that.
        """
        self._verify(logits)
        if not len(logits) == len(params) == len(positions) == len(num_prompts):
            raise ValueError(
                f"{len(logits)} rows, {len(params)} params, {len(positions)}, {len(num_prompts)} positions"
            )
        token_ids: list[int] = []
        logprobs: dict[int, TokenLogprob] = {}
        for i, row in enumerate(logits):
            token_id, logprob = self.sample_row(row, params[i], positions[i], num_prompts[i])
            token_ids.append(token_id)
            if logprob is not None:
                logprobs[i] = logprob
        return token_ids, logprobs

    def sample_rows(self, logits: F32, rows: list[Row]) -> list[Drawn | ValueError]:
        """For each row of `logits` [S, V] its token, or why there is none: an error belongs to its row alone."""
        self._verify(logits)
        drawn: list[Drawn | ValueError] = []
        for x, row in zip(logits, rows, strict=True):
            try:
                drawn.append(Drawn(*self.sample_row(x, row.params, row.position, row.num_prompt, row.best)))
            except ValueError as error:
                drawn.append(error)
            except RequestError as error:
                drawn.append(ValueError(str(error)))
        return drawn

    def sample_row(
        self, row: F32, params: SamplingParams, position: int, num_prompt: int, best: int | None = None
    ) -> tuple[int, TokenLogprob | None]:
        """`sample` for one row [V]. `best` is its likeliest token, the lowest id of equals, where that is known.

        Raises `NonFiniteLogitsError` for a row that no token can be drawn from, `RequestError` for a biased token id
        beyond the vocabulary, a missing seed, or a min_tokens that forbids the whole vocabulary.
        """
        token_id = self._draw(row, params, position, num_prompt, best)
        if params.logprobs is None:
            return token_id, None
        return token_id, token_logprob(row, token_id, params.logprobs)

    def prompt_logprobs(self, logits: F32, next_token_ids: list[int], num_top: int) -> list[TokenLogprob]:
        """Log-probabilities of known tokens: row i of `logits` [P, V] foretold `next_token_ids[i]`."""
        self._verify(logits)
        if len(logits) != len(next_token_ids):
            raise ValueError(f"{len(logits)} rows of logits, {len(next_token_ids)} tokens")
        return [token_logprob(row, token_id, num_top) for row, token_id in zip(logits, next_token_ids, strict=True)]

    def _verify(self, logits: F32) -> None:
        if logits.ndim != 2 or logits.shape[1] != self.vocab_size:
            raise ValueError(f"logits have shape {logits.shape}, expected [S, {self.vocab_size}]")

    def _draw(self, row: F32, params: SamplingParams, position: int, num_prompt: int, best: int | None) -> int:
        forbids = params.min_tokens > 0 and position - num_prompt < params.min_tokens
        x: F32 | F64 = row
        if params.logit_bias or forbids:
            if best is None:
                # numpy's argmax stops at a NaN and so finds it; a mask must not hide it.
                _likeliest(row)
            x, best = self._biased(row, params, forbids), None
        if best is None:
            try:
                best = _likeliest(x)
            except NonFiniteLogitsError:
                if not forbids:
                    raise
                raise RequestError("min_tokens", params.min_tokens, "such that some token may be sampled") from None
        if params.greedy:
            return best
        if params.seed is None:
            raise RequestError("seed", None, "set before a token is sampled at a temperature above 0")
        token_ids, scaled = filtered(x, float(x[best]), params)
        return _gumbel_argmax(token_ids, scaled, params.seed, position)

    def _biased(self, row: F32, params: SamplingParams, forbids: bool) -> F64:
        x = row.astype(np.float64)
        for token_id, bias in (params.logit_bias or {}).items():
            if token_id >= self.vocab_size:
                raise RequestError("logit_bias", token_id, f"a token id below {self.vocab_size}")
            x[token_id] += bias
        if forbids:
            # As vLLM: the ends of a text stay out of reach under ignore_eos too.
            for token_id in (*self.eos_token_ids, *(params.stop_token_ids or ())):
                if token_id < self.vocab_size:
                    x[token_id] = -np.inf
        return x


def token_logprob(row: F32, token_id: int, num_top: int) -> TokenLogprob:
    """Log-softmax of `row` [V] at `token_id`, its rank, and the `num_top` likeliest (-1: all), best first."""
    if not 0 <= token_id < len(row):
        raise ValueError(f"token id {token_id} is not below the vocabulary size {len(row)}")
    x = row.astype(np.float64)
    greatest = x[_likeliest(row)]
    log_sum = greatest + np.log(np.exp(x - greatest).sum())
    here = x[token_id]
    rank = 1 + int(np.count_nonzero(x > here)) + int(np.count_nonzero(x[:token_id] == here))
    top = _largest(x, len(x) if num_top < 0 else num_top)
    return TokenLogprob(
        token_id=token_id,
        logprob=float(here - log_sum),
        rank=rank,
        top=list(zip(top.tolist(), (x[top] - log_sum).tolist(), strict=True)),
    )


def filtered(x: F32 | F64, greatest: float, params: SamplingParams) -> tuple[Ids, F64]:
    """The token ids that temperature, min_p, top_k and top_p leave, ascending, and their scaled logits.

    `x` [V] are the logits after bias and masks, `greatest` is their maximum, which becomes 0. Each filter keeps a
    head of the ranking, so that their order matters in one place only: top_p counts its mass among what min_p and
    top_k left.
    """
    if 0 < params.top_k < len(x):
        token_ids = np.sort(_largest(x, params.top_k))
        scaled = x[token_ids].astype(np.float64)
    else:
        token_ids = np.arange(len(x))
        scaled = x.astype(np.float64)
    scaled -= greatest
    # A tiny temperature sends all but the likeliest to -inf, which is its meaning.
    with np.errstate(over="ignore"):
        scaled /= params.temperature
    weights = np.exp(scaled) if params.min_p > 0 or params.top_p < 1 else None
    if weights is None:
        keep = scaled > -np.inf
    else:
        # A weight of 0 would pass min_p = 0, but lies hundreds below the likeliest, out of reach of any noise.
        keep = weights >= params.min_p if params.min_p > 0 else weights > 0
    if not keep.all():
        token_ids, scaled = token_ids[keep], scaled[keep]
        weights = None if weights is None else weights[keep]
    if weights is not None and params.top_p < 1:
        kept = np.sort(_nucleus(x[token_ids], weights, params.top_p))
        token_ids, scaled = token_ids[kept], scaled[kept]
    return token_ids, scaled


def _nucleus(x: F32 | F64, weights: F64, top_p: float) -> Ids:
    """Indices of the shortest head of the ranking by `x` that holds `top_p` of the sum of `weights`, best first."""
    target = top_p * weights.sum()
    width = min(256, len(x))
    while True:
        # Mass is summed from the likeliest on, one by one, so a wider head does not change the sums before it.
        head = _largest(x, width)
        mass = np.cumsum(weights[head])
        if mass[-1] >= target or width == len(x):
            return head[: int(np.searchsorted(mass, target)) + 1]
        width = min(8 * width, len(x))


def _gumbel_argmax(token_ids: Ids, scaled: F64, seed: int, position: int) -> int:
    """The id whose scaled logit plus noise is greatest. `token_ids` ascend; the greatest `scaled` is 0."""
    if len(token_ids) == 1:
        return int(token_ids[0])
    if len(token_ids) > 512:
        # Whoever is further below the likeliest token's sum than noise can lift need not be looked at.
        first = token_ids[np.argmax(scaled)][None]
        floor = noise.gumbel(noise.bits(seed, position, first))[0] - noise.GUMBEL_MAX - 1e-6
        near = scaled >= floor
        token_ids, scaled = token_ids[near], scaled[near]
    size = int(token_ids[-1]) + 1
    if 2 * len(token_ids) > size:
        words = noise.bits_of_all(seed, position, size)
        words = words if len(token_ids) == size else words[token_ids]
    else:
        words = noise.bits(seed, position, token_ids)
    return int(token_ids[np.argmax(scaled + noise.gumbel(words))])


def _likeliest(x: F32 | F64) -> int:
    """Lowest index of the greatest entry. numpy's argmax gives the first, and the first NaN where there is one."""
    best = int(np.argmax(x))
    if not np.isfinite(x[best]):
        raise NonFiniteLogitsError(f"logits are not finite: the greatest, of token {best}, is {x[best]}")
    return best


def _largest(x: F32 | F64, k: int) -> Ids:
    """Indices of the `k` greatest entries, best first, ties by lower index."""
    if k <= 0:
        return np.empty(0, np.int64)
    if k >= len(x):
        return np.argsort(-x, kind="stable")
    near = np.flatnonzero(x >= np.partition(x, len(x) - k)[len(x) - k])
    order = np.argsort(-x[near], kind="stable")[:k]
    return near[order]
