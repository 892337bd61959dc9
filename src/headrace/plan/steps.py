"""The time of a step, from its bytes and operations and the machine's rates (a roofline, Williams et al. 2009), and the
small formulas of plans. Knows no scheduler. Called by `plan.planner` and `headrace simulate`."""

from __future__ import annotations

from collections.abc import Sequence

from headrace.plan.counting import Counts
from headrace.plan.hardware import Hardware


class Roofline:
    """Seconds of a step of a model on a machine: the longer one of reading and computing, and the overhead.

    The experts that rows choose are taken as evenly spread.
    """

    def __init__(self, counts: Counts, machine: Hardware, kv_dtype: str) -> None:
        self._counts, self._overhead = counts, machine.step_overhead
        self._byte = 1 / (machine.bandwidth * machine.bandwidth_share)
        self._mac = 2 / (machine.flops * machine.flops_share)
        self._layers = [
            (layer.window, layer.read_bytes(kv_dtype) * num, layer.macs * num) for layer, num in counts.layers
        ]
        self._whole_bytes = sum(num_bytes for window, num_bytes, _ in self._layers if window is None)
        self._whole_macs = sum(macs for window, _, macs in self._layers if window is None)
        self._token_bytes = counts.kv_token_bytes(kv_dtype)
        self._windows = [layer for layer in self._layers if layer[0] is not None]
        self._mixtures = [(each.num_bytes * num, 1 - each.top_k / each.num) for each, num in counts.mixtures]

    def num_bytes(self, starts: Sequence[int], lens: Sequence[int], num_logits: int) -> float:
        """Return the bytes that a step reads and writes: weights once, and the cached positions that each chunk looks
        back on."""
        num_rows, counts = sum(lens), self._counts
        total = counts.dense + (counts.head if num_logits else 0)
        for num_bytes, left in self._mixtures:
            total += num_bytes * (1 - left**num_rows)
        # A state is read and written, whatever came before.
        total += 2 * counts.state_bytes * len(starts) + self._whole_bytes * sum(starts) + self._token_bytes * num_rows
        for window, num_bytes, _ in self._windows:
            total += num_bytes * sum(min(start, window or start) for start in starts)
        return total

    def num_macs(self, starts: Sequence[int], lens: Sequence[int], num_logits: int) -> float:
        """Return the multiplications of a step: of each row with the weights, and with each position that it sees."""
        num_rows = sum(lens)
        seen: float = sum(starts)
        if num_rows != len(lens):
            seen = sum(n * (s + n / 2) for s, n in zip(starts, lens, strict=True))
        total = self._counts.macs * num_rows + self._counts.head_macs * num_logits + self._whole_macs * seen
        for window, _, macs in self._windows:
            wide = window or 0
            total += macs * sum(n * min(s + n / 2, wide) for s, n in zip(starts, lens, strict=True))
        return total

    def __call__(self, starts: Sequence[int], lens: Sequence[int], num_logits: int) -> float:
        reading = self.num_bytes(starts, lens, num_logits) * self._byte
        return self._overhead + max(reading, self.num_macs(starts, lens, num_logits) * self._mac)


def latency(ttft: float, tpot: float, num_tokens: int) -> float:
    """Return the seconds of an answer of `num_tokens`: the first comes after `ttft`, each other after `tpot`."""
    return ttft + tpot * (num_tokens - 1)


def dollars_per_million(price: float, tokens_per_second: float) -> float:
    """Return dollars for a million tokens at `price` dollars an hour."""
    return price / (tokens_per_second * 3600) * 1e6


def tokens_per_pass(alpha: float, num_guesses: float) -> float:
    """Return the tokens that a pass of the target gives when each of `num_guesses` guesses is right with probability
    `alpha` (Leviathan et al. 2023, equation 1): kept guesses, and the one token that the target draws itself."""
    return num_guesses + 1.0 if alpha >= 1 else (1 - alpha ** (num_guesses + 1)) / (1 - alpha)


def kept_guesses(alpha: float, num_guesses: float) -> float:
    """Return the guesses that such a pass keeps: one fewer than its tokens."""
    return tokens_per_pass(alpha, num_guesses) - 1
