"""The sampler: from rows of logits to one token id each, and to log-probabilities where they are requested.

Order: log-probabilities of the raw logits; the caller's processors and logit_bias; penalties and DRY; the watermark;
masks and bans; then `SamplingParams.order` (by default vLLM V1's: temperature, min_p, top_k, top_p, others in between,
adaptive_p last) or mirostat; then the argmax of (scaled logits + keyed Gumbel noise), which is a draw from the filtered
distribution (Gumbel-max: Maddison, Tarlow, Minka, "A* Sampling", 2014, section 2). Ties fall to the lower token id
everywhere. A row's numbers are computed from that row alone, in orders that depend on nothing else: the result cannot
depend on the batch. Knows no sequences and no requests; called by the runner.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from headrace.protocol.errors import RequestError
from headrace.protocol.params import SamplingParams, Watermark
from headrace.protocol.step import TokenLogprob
from headrace.sampling import edits, filters, noise, watermark
from headrace.sampling.filters import F32, F64, I64, Candidates, Cut, Select, largest, select, select_all

SPAN = 32
"""Rows that are sampled together: bounds the memory for edited rows and for candidates."""

FEW = 512
"""Rows of at most so many candidates get their noise in one call."""

MAX_PLANS = 1024

PLACES = ("trace_decode_token_ids", "thinking_token_ids", "min_tokens", "bad_words_token_ids", "no_repeat_ngram_size")
"""Parameters by which tokens are forced or banned in some places of the answer."""

NONE_LEFT = "no token is left: biases, bans and masks forbid all of them"


class NonFiniteLogitsError(ValueError):
    """A row of logits with a NaN, with +inf, or with nothing but -inf. (A single -inf bans its token.)"""


@dataclass(slots=True)
class Row:
    """A row of logits to draw from, without the logits.

    `position` is the index, in its sequence, of the token to be drawn; `num_prompt` of the tokens before it are the
    prompt; `history` are all of them, or nothing unless `params.needs_history`. `best` is the row's likeliest token,
    the lowest id of equals, where that is known. `state` is `Drawn.state` of the sequence's last token.
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
    """The token drawn for a row, its log-probability if requested, and the sampler's state if it has one."""

    token_id: int
    logprob: TokenLogprob | None = None
    state: float | None = None


class _Plan(NamedTuple):
    """Stages of a set of parameters: the edits of the row, the cuts that `select` makes, and the stages after it.
    `places`: some tokens may be forced or banned, by the row's place or history."""

    first: list[str]
    cut: Cut
    stages: list[str]
    edits: bool
    places: bool
    greedy: bool
    steers: bool


class _Open(NamedTuple):
    """A row that needs a draw: its logits after all edits, their maximum, and the stages to come."""

    row: Row
    x: F32
    greatest: float
    cut: Cut
    plan: _Plan


class Sampler:
    """Samples rows of `vocab_size` logits in host memory. `select` may be a backend's own."""

    def __init__(self, vocab_size: int, eos_token_ids: list[int], select: Select = select_all) -> None:
        self.vocab_size = vocab_size
        self.eos_token_ids = list(eos_token_ids)
        self._select = select
        self._edited = np.empty((0, vocab_size), np.float32)
        # By the parameters' id, which no other object can have while the entry refers to them.
        self._plans: dict[int, tuple[SamplingParams, _Plan]] = {}

    def sample_rows(self, logits: F32, rows: list[Row]) -> list[Drawn | ValueError]:
        """Return for each row of `logits` [S, V] its token, or the error of that row alone.

        Errors: `NonFiniteLogitsError` for a row that no token can be drawn from; others for a biased token id beyond
        the vocabulary, a missing seed, bans that allow no token, and a logits processor that failed.
        """
        self._verify(logits)
        if len(logits) != len(rows):
            raise ValueError(f"{len(logits)} rows of logits, {len(rows)} rows")
        samples: list[Drawn | ValueError] = []
        for start in range(0, len(rows), SPAN):
            samples += self._sample_some(logits[start : start + SPAN], rows[start : start + SPAN])
        return samples

    def sample_fetched(
        self,
        rows: list[Row],
        fetch: Callable[[list[int]], F32],
        draw: Callable[[list[int], list[Cut]], list[int]],
    ) -> list[Drawn | ValueError]:
        """As `sample_rows`, for rows of logits that lie on a device: `draw` returns the tokens of some rows after their
        cuts, -1 where the device cannot tell, and `fetch` brings the rows whose numbers are needed to the host."""
        samples: list[Drawn | ValueError] = [Drawn(row.best or 0, state=row.state) for row in rows]
        cuts = {i: self.cut_of(row) for i, row in enumerate(rows)}
        cut_rows = {
            i: cut
            for i, cut in cuts.items()
            if cut is not None and (cut.temperature > 0 or rows[i].mask is not None or rows[i].best is None)
        }
        needed = [i for i, cut in cuts.items() if cut is None]
        if cut_rows:
            tokens = draw(list(cut_rows), list(cut_rows.values()))
            for i, token_id in zip(cut_rows, tokens, strict=True):
                samples[i] = Drawn(token_id, state=rows[i].state)
                if token_id < 0:
                    needed.append(i)
        if needed:
            for i, sample in zip(needed, self.sample_rows(fetch(needed), [rows[i] for i in needed]), strict=True):
                samples[i] = sample
        return samples

    def cut_of(self, row: Row) -> Cut | None:
        """Return the cut that alone decides the row's token, with its mask: the greatest sum of scaled logit and noise
        wins, or at temperature 0 the greatest logit. None where there is more to do, or numbers are reported."""
        params, plan = row.params, self._plan(row.params)
        if params.logprobs is not None or plan.edits or plan.stages or plan.steers:
            return None
        if plan.places:
            history = np.array(row.history, np.int64)
            if (
                edits.replayed(params, row.position - row.num_prompt) is not None
                or edits.forced(params, history) is not None
                or edits.banned(params, history, row.num_prompt, row.position, self.eos_token_ids)
            ):
                return None
        if plan.greedy:
            return Cut(temperature=0.0)
        return None if params.seed is None else plan.cut._replace(key=(params.seed, row.position))

    def shares(self, logits: F32, rows: list[Row]) -> list[tuple[I64, F64] | ValueError]:
        """Return the distribution that `sample_rows` draws from, for each row of `logits` [S, V]: token ids, ascending,
        and their probabilities, which add up to 1. One token alone where there is no choice. Raises the errors of
        `sample_rows`."""
        return [
            pool if isinstance(pool, ValueError) else (pool.token_ids, filters.probabilities(pool))
            for pool in self._pools(logits, rows)
        ]

    def rank(self, logits: F32, rows: list[Row], width: int) -> list[I64 | ValueError]:
        """Return the `width` tokens with the greatest sums of scaled logit and noise, best first, for each row of
        `logits` [S, V]: the first is the token of `sample_rows`. Where fewer may be drawn, there are fewer."""
        rankings: list[I64 | ValueError] = []
        for x, row, pool in zip(logits, rows, self._pools(logits, rows), strict=True):
            if isinstance(pool, ValueError):
                rankings.append(pool)
            elif row.params.greedy:
                # By the logits, without filters.
                rankings.append(largest(x.astype(np.float64), min(width, len(x))))
            else:
                sums = pool.scaled + noise.gumbel(noise.bits(row.params.seed or 0, row.position, pool.token_ids))
                rankings.append(pool.token_ids[largest(sums, min(width, len(sums)))])
        return rankings

    def _pools(self, logits: F32, rows: list[Row]) -> Iterator[Candidates | ValueError]:
        """Yield the candidates of each row after all filters, or its error."""
        self._verify(logits)
        for x, row in zip(logits, rows, strict=True):
            opened = self._opened(0, x, row)
            if isinstance(opened, _Open):
                pool = self._staged(opened, select(opened.x, opened.greatest, opened.cut._replace(key=None)))
                yield _steered(pool, row, self.vocab_size) if opened.plan.steers else pool
            elif isinstance(opened, Drawn):
                yield Candidates(np.array([opened.token_id]), np.zeros(1), 0.0)
            else:
                yield opened

    def prompt_logprobs(self, logits: F32, next_token_ids: list[int], num_top: int) -> list[TokenLogprob]:
        """Return log-probabilities of known tokens: `next_token_ids[i]` under row i of `logits` [P, V]."""
        self._verify(logits)
        if len(logits) != len(next_token_ids):
            raise ValueError(f"{len(logits)} rows of logits, {len(next_token_ids)} tokens")
        return [token_logprob(row, token_id, num_top) for row, token_id in zip(logits, next_token_ids, strict=True)]

    def _verify(self, logits: F32) -> None:
        if logits.ndim != 2 or logits.shape[1] != self.vocab_size:
            raise ValueError(f"logits have shape {logits.shape}, expected [S, {self.vocab_size}]")

    def _sample_some(self, logits: F32, rows: list[Row]) -> list[Drawn | ValueError]:
        opened = [self._opened(index, x, row) for index, (x, row) in enumerate(zip(logits, rows, strict=True))]
        samples = iter(self._draw([each for each in opened if isinstance(each, _Open)]))
        results = [next(samples) if isinstance(each, _Open) else each for each in opened]
        for index, sample in enumerate(results):
            if isinstance(sample, Drawn) and rows[index].params.logprobs is not None:
                try:
                    results[index] = self.with_logprob(logits[index], rows[index], sample)
                except ValueError as error:
                    results[index] = error
        return results

    def with_logprob(self, x: F32, row: Row, sample: Drawn) -> Drawn:
        """Return `sample` with its log-probability if the parameters request it, under the distribution before the
        samplers or the one after them. Raises `NonFiniteLogitsError`."""
        if row.params.logprobs is not None:
            for pool in self._pools(x[None], [row]) if row.params.post_sampling_probs else ():
                x = np.full_like(x, -np.inf)
                if isinstance(pool, Candidates):
                    x[pool.token_ids] = pool.scaled
            sample.logprob = token_logprob(x, sample.token_id, row.params.logprobs)
        return sample

    def _opened(self, index: int, x: F32, row: Row) -> _Open | Drawn | ValueError:
        """Return the row after all edits; or its token, where that needs no draw; or its error."""
        try:
            return self._open(index, x, row)
        except (RequestError, ValueError) as error:
            return error if isinstance(error, ValueError) else ValueError(str(error))

    def _open(self, index: int, x: F32, row: Row) -> _Open | Drawn:
        params, best, plan = row.params, row.best, self._plan(row.params)
        history, bans = np.array(row.history, np.int64), []
        if plan.places:
            token_id = edits.replayed(params, row.position - row.num_prompt)
            if token_id is None:
                token_id = edits.forced(params, history)
            allowed = row.mask is None or (token_id is not None and _allows(row.mask, token_id))
            if token_id is not None and token_id < self.vocab_size and allowed:
                return Drawn(token_id, state=row.state)
            bans = edits.banned(params, history, row.num_prompt, row.position, self.eos_token_ids)
        if plan.edits or bans or row.mask is not None:
            if best is None:
                # numpy's argmax stops at a NaN and so finds it; a mask must not hide it.
                _likeliest(x)
            x = self._edit(index, x, row, history, plan.first, bans)
            best = int(np.argmax(x))
            if x[best] == -np.inf:
                if params.min_tokens and row.position - row.num_prompt < params.min_tokens:
                    raise RequestError("min_tokens", params.min_tokens, "such that some token may be sampled")
                raise ValueError(NONE_LEFT)
            _verify_greatest(x, best)
        elif best is None:
            best = _likeliest(x)
        if plan.greedy:
            return Drawn(best, state=row.state)
        if params.seed is None:
            raise RequestError("seed", None, "set before a token is sampled at a temperature above 0")
        key = None if plan.stages or plan.steers else (params.seed, row.position)
        return _Open(row, x, float(x[best]), Cut(*plan.cut[:4], key), plan)

    def _plan(self, params: SamplingParams) -> _Plan:
        entry = self._plans.get(id(params))
        if entry is not None:
            return entry[1]
        if len(self._plans) >= MAX_PLANS:
            self._plans.clear()
        stages = _stages(params, self.vocab_size)
        first = []
        while stages and stages[0] in ("penalties", "dry"):
            first.append(stages.pop(0))
        edits = (first, params.logits_processors, params.logit_bias, params.allowed_token_ids, params.watermark)
        cut, stages = _leading_cut(params, stages)
        places = any(getattr(params, name) for name in PLACES)
        plan = _Plan(first, cut, stages, any(edits), places, params.greedy, params.steers)
        self._plans[id(params)] = params, plan
        return plan

    def _edit(self, index: int, x: F32, row: Row, history: I64, first: list[str], bans: list[int]) -> F32:
        """Return a copy of the row after processors, biases, penalties, the watermark, masks and bans."""
        params = row.params
        if index >= len(self._edited):
            self._edited = np.empty((min(SPAN, max(index + 1, 2 * len(self._edited))), self.vocab_size), np.float32)
        edited: F32 = self._edited[index]
        edited[:] = edits.processed(x, params, history, row.num_prompt) if params.logits_processors else x
        if params.logit_bias:
            edits.biased(edited, params.logit_bias)
        for stage in first:
            edits.edit(stage, edited, history, row.num_prompt, params)
        # The first token follows none, so it has no mark.
        if isinstance(params.watermark, Watermark) and row.history:
            watermark.marked(edited, params.watermark, row.history[-1])
        if params.allowed_token_ids:
            edits.allow_only(edited, params.allowed_token_ids)
        if row.mask is not None:
            edits.masked(edited, row.mask)
        edited[[token_id for token_id in bans if token_id < self.vocab_size]] = -np.inf
        return edited

    def _draw(self, open_rows: list[_Open]) -> list[Drawn]:
        if not open_rows:
            return []
        rows, greatest, cuts = zip(*((each.x, each.greatest, each.cut) for each in open_rows), strict=True)
        pools = self._select(list(rows), list(greatest), list(cuts))
        # A row without further stages costs no calls here.
        wholes = [
            self._staged(opened, pool) if opened.plan.stages else pool
            for opened, pool in zip(open_rows, pools, strict=True)
        ]
        finals = [
            _steered(whole, opened.row, self.vocab_size) if opened.plan.steers else whole
            for opened, whole in zip(open_rows, wholes, strict=True)
        ]
        token_ids = _gumbel_argmax(open_rows, finals)
        return [
            Drawn(token_id, state=_next_state(opened.row, whole, token_id) if opened.plan.steers else opened.row.state)
            for opened, whole, token_id in zip(open_rows, wholes, token_ids, strict=True)
        ]

    def _staged(self, opened: _Open, pool: Candidates) -> Candidates:
        for stage in opened.plan.stages:
            pool = self._stage(stage, pool, opened.row)
        return pool

    def _stage(self, stage: str, pool: Candidates, row: Row) -> Candidates:
        params = row.params
        if stage in ("penalties", "dry"):
            history = np.array(row.history, np.int64)
            values = pool.scaled + pool.base
            values = edits.edit_some(stage, pool.token_ids, values, history, row.num_prompt, params)
            return Candidates(pool.token_ids, values, 0.0).settled()
        if stage == "xtc":
            return filters.xtc(pool, params, noise.uniform(params.seed or 0, row.position, noise.XTC))
        return filters.FILTERS[stage].apply(pool, params)


def _allows(mask: NDArray[np.uint32], token_id: int) -> bool:
    return bool(int(mask[token_id // 32]) >> (token_id % 32) & 1)


def _state(row: Row) -> float:
    """Return mirostat's mu, twice the aim before the first token; or adaptive-p's mean, at its aim before that."""
    if row.state is not None:
        return row.state
    return 2.0 * row.params.mirostat_tau if row.params.mirostat else row.params.adaptive_target


def _steered(pool: Candidates, row: Row, vocab_size: int) -> Candidates:
    """Apply mirostat or adaptive-p to the candidates."""
    if row.params.mirostat:
        return filters.mirostat(pool, row.params, _state(row), vocab_size)
    return filters.adaptive_p(pool, row.params, _state(row))


def _next_state(row: Row, pool: Candidates, token_id: int) -> float:
    """Return the state of mirostat or adaptive-p after `token_id`; `pool` are the candidates before either."""
    params = row.params
    place = int(np.searchsorted(pool.token_ids, token_id))
    if params.mirostat:
        return _state(row) - params.mirostat_eta * (float(filters.surprise(pool)[place]) - params.mirostat_tau)
    share = float(filters.probabilities(pool)[place])
    return params.adaptive_decay * _state(row) + (1.0 - params.adaptive_decay) * share


def _stages(params: SamplingParams, vocab_size: int) -> list[str]:
    """Return the samplers with an effect, in their order. Mirostat takes the place of the filters."""
    active = {"penalties": params.penalizes, "dry": params.dries}
    if not params.mirostat:
        active["xtc"] = params.xtc_probability > 0.0
    for name, each in filters.FILTERS.items():
        active[name] = each.changes(params, vocab_size) and (name == "temperature" or not params.mirostat)
    return [stage for stage in params.order if active.get(stage)]


def _leading_cut(params: SamplingParams, stages: list[str]) -> tuple[Cut, list[str]]:
    """Split the stages into a part that one `select` does with the same result, and the rest.

    min_p and top_k both keep a head of the ranking, so their order does not matter, nor does temperature's to top_k.
    """
    cut, num_stages = Cut(), 0
    for stage in stages:
        if stage == "temperature" and cut.floor == -np.inf and params.dynatemp_range == 0.0:
            cut = cut._replace(temperature=params.temperature)
        elif stage == "min_p":
            cut = cut._replace(floor=float(np.log(params.min_p)))
        elif stage == "top_k":
            cut = cut._replace(top_k=params.top_k)
        elif stage == "top_p":
            return cut._replace(top_p=params.top_p), stages[num_stages + 1 :]
        else:
            break
        num_stages += 1
    return cut, stages[num_stages:]


def token_logprob(row: F32, token_id: int, num_top: int) -> TokenLogprob:
    """Return the log-softmax of `row` [V] at `token_id`, its rank, and the `num_top` likeliest (-1: all) in order."""
    if not 0 <= token_id < len(row):
        raise ValueError(f"token id {token_id} is not below the vocabulary size {len(row)}")
    x = row.astype(np.float64)
    greatest = x[_likeliest(row)]
    log_sum = greatest + np.log(np.exp(x - greatest).sum())
    here = x[token_id]
    rank = 1 + int(np.count_nonzero(x > here)) + int(np.count_nonzero(x[:token_id] == here))
    top = largest(x, len(x) if num_top < 0 else num_top)
    return TokenLogprob(
        token_id=token_id,
        logprob=float(here - log_sum),
        rank=rank,
        top=tuple(zip(top.tolist(), (x[top] - log_sum).tolist(), strict=True)),
    )


def _gumbel_argmax(open_rows: list[_Open], pools: list[Candidates]) -> list[int]:
    """Return for each pool the id whose scaled logit plus noise is greatest."""
    token_ids = [int(pool.token_ids[0]) if len(pool.token_ids) == 1 else -1 for pool in pools]
    few = [i for i, pool in enumerate(pools) if 1 < len(pool.token_ids) <= FEW]
    if few:
        counts = [len(pools[i].token_ids) for i in few]
        seeds = [open_rows[i].row.params.seed or 0 for i in few]
        positions = [open_rows[i].row.position for i in few]
        words = noise.bits_of_rows(seeds, positions, counts, np.concatenate([pools[i].token_ids for i in few]))
        sums = noise.gumbel(words) + np.concatenate([pools[i].scaled for i in few])
        start = 0
        for i, count in zip(few, counts, strict=True):
            best = int(np.argmax(sums[start : start + count]))
            if sums[start + best] >= pools[i].bar:
                token_ids[i] = int(pools[i].token_ids[best])
            start += count
    for i, opened in enumerate(open_rows):
        if token_ids[i] < 0 or (len(pools[i].token_ids) == 1 and pools[i].bar > -np.inf):
            # Too many for the common call; or the winner may have been left out, once in 10**8 draws.
            pool = pools[i] if pools[i].bar == -np.inf else select(opened.x, opened.greatest, opened.cut)
            token_ids[i] = _of_many(pool, opened.row.params.seed or 0, opened.row.position)
    return token_ids


def _of_many(pool: Candidates, seed: int, position: int) -> int:
    """Return the same for one pool of any size."""
    token_ids, scaled = pool.token_ids, pool.scaled
    # Noise cannot lift a token from further below the likeliest one's sum.
    first = token_ids[np.argmax(scaled)][None]
    floor = noise.gumbel(noise.bits(seed, position, first))[0] - noise.GUMBEL_MAX - 1e-6
    near = scaled >= floor
    if not near.all():
        token_ids, scaled = token_ids[near], scaled[near]
    size = int(token_ids[-1]) + 1
    if 2 * len(token_ids) > size:
        words = noise.bits_of_all(seed, position, size)
        words = words if len(token_ids) == size else words[token_ids]
    else:
        words = noise.bits(seed, position, token_ids)
    return int(token_ids[np.argmax(scaled + noise.gumbel(words))])


def _likeliest(x: F32 | F64) -> int:
    """Return the lowest index of the greatest entry: numpy's argmax gives the first, or the first NaN if there is one.

    Raises `NonFiniteLogitsError`.
    """
    best = int(np.argmax(x))
    _verify_greatest(x, best)
    return best


def _verify_greatest(x: F32 | F64, best: int) -> None:
    if not np.isfinite(x[best]):
        raise NonFiniteLogitsError(f"logits are not finite: the greatest, of token {best}, is {x[best]}")
