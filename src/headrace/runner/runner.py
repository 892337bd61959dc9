"""`Runner`: the real executor. A ScheduledBatch goes in, tensors live and die here, a StepResult comes out.

It owns the model, the KV cache and the sampler. It decides nothing: which tokens to compute and where their keys and
values go is written in the batch. A fault that belongs to one chunk ends that chunk alone. Called by `core.engine`.
"""

from __future__ import annotations

import torch
from torch import Tensor

from headrace.backends.base import Backend
from headrace.errors import RequestError
from headrace.models import Model
from headrace.runner.inputs import make_forward_batch, verify_chunk
from headrace.sampling.sampler import Sampler
from headrace.types import ScheduledBatch, StepResult, TokenLogprob

MAX_LOGITS = 2**24
"""Numbers in the logits of prompt rows that are held at once (64 MiB of float32)."""

NOT_FINITE = "numerical_error: the model's logits are not finite"


class Runner:
    """Computes steps of one model over one KV cache [layers, 2, num_blocks, block_size, kv_heads, head_dim]."""

    def __init__(self, model: Model, backend: Backend, kv: Tensor, sampler: Sampler, num_threads: int) -> None:
        self.model = model
        self.backend = backend
        self.kv = kv
        self.sampler = sampler
        self.num_threads = num_threads
        self.block_size = kv.shape[3]

    @torch.inference_mode()
    def run(self, batch: ScheduledBatch) -> StepResult:
        """One step: copies, forward, logits of the rows that are asked for, tokens.

        Raises only for faults that no single chunk owns (a broken device).
        """
        result = StepResult(step_id=batch.step_id, token_ids=[-1] * len(batch))
        before = torch.get_num_threads()
        torch.set_num_threads(self.num_threads)
        try:
            self.backend.ops.copy_blocks(self.kv, batch.copies)
            self._compute_what_fits(batch, *self._sound_chunks(batch, result), result)
        finally:
            torch.set_num_threads(before)  # the process may be somebody else's
        return result

    def _compute_what_fits(
        self, batch: ScheduledBatch, chunk_ids: list[int], token_ids: list[list[int]], result: StepResult
    ) -> None:
        """Compute the chunks, in halves where memory runs out; one that does not fit alone fails (R-25).

        To compute a chunk again, in other company, writes the same bits again.
        """
        if not chunk_ids:
            return
        try:
            self._compute(batch, chunk_ids, token_ids, result)
            return
        except (MemoryError, RuntimeError) as error:
            if not _is_out_of_memory(error):
                raise
            if len(chunk_ids) == 1:
                result.errors[chunk_ids[0]] = f"out_of_memory: {error}"
                return
        # Not in the except clause, whose traceback holds the tensors of the failed attempt.
        half = len(chunk_ids) // 2
        self._compute_what_fits(batch, chunk_ids[:half], token_ids[:half], result)
        self._compute_what_fits(batch, chunk_ids[half:], token_ids[half:], result)

    def _compute(
        self, batch: ScheduledBatch, chunk_ids: list[int], token_ids: list[list[int]], result: StepResult
    ) -> None:
        forward = make_forward_batch(batch, chunk_ids, token_ids, self.block_size, self.backend.device)
        hidden = self.model.forward(forward, self.kv)
        # A chunk without logits is looked at too: what it left in the cache must not be published.
        finite = torch.split(torch.isfinite(hidden).all(dim=-1), forward.lens)
        result.errors.update({i: NOT_FINITE for i, rows in zip(chunk_ids, finite, strict=True) if not rows.all()})
        wanted = [entry for entry in _wanted(batch, chunk_ids, token_ids) if entry[0] not in result.errors]
        self._foretell(batch, wanted, hidden, result)
        samples = [(i, rows[-1]) for i, rows, _ in wanted if batch.samples[i] and i not in result.errors]
        if samples:
            logits = self.model.logits(hidden, torch.tensor([row for _, row in samples], device=hidden.device))
            self._draw(batch, [i for i, _ in samples], logits, result)

    def close(self) -> None:
        """Give the cache's memory back. May be called twice."""
        self.kv = self.kv.new_empty(0)

    def _sound_chunks(self, batch: ScheduledBatch, result: StepResult) -> tuple[list[int], list[list[int]]]:
        """The chunks that can be computed, and their token ids. The others get an error each."""
        chunk_ids, token_ids = [], []
        row = 0
        num_slots = self.kv.shape[2] * self.block_size
        for i, length in enumerate(batch.lens):
            own = batch.token_ids[row : row + length]
            row += length
            reason = verify_chunk(batch, i, own, self.model.vocab_size, num_slots, self.block_size)
            if reason:
                result.errors[i] = f"invalid_chunk: {reason}"
            else:
                chunk_ids.append(i)
                token_ids.append(own)
        return chunk_ids, token_ids

    def _foretell(
        self, batch: ScheduledBatch, wanted: list[tuple[int, list[int], list[int]]], hidden: Tensor, result: StepResult
    ) -> None:
        """Log-probabilities of prompt tokens, some rows at a time: a prompt's logits are far larger than its text."""
        most = max(1, MAX_LOGITS // self.model.vocab_size)
        for i, rows, next_token_ids in wanted:
            found: list[TokenLogprob] = []
            for first in range(0, len(next_token_ids), most):
                foretold = next_token_ids[first : first + most]
                part = torch.tensor(rows[first : first + len(foretold)], device=hidden.device)
                logits = self.model.logits(hidden, part)
                if not torch.isfinite(logits).all():
                    result.errors[i] = NOT_FINITE
                    break
                found += self.sampler.prompt_logprobs(logits, foretold, batch.params[i].prompt_logprobs or 0)
            if next_token_ids and i not in result.errors:
                result.prompt_logprobs[i] = found

    def _draw(self, batch: ScheduledBatch, chunk_ids: list[int], logits: Tensor, result: StepResult) -> None:
        """Sample from logits [chunks, V]. NaN or infinity fails its own chunk (R-17)."""
        samples = []
        for at, (i, finite) in enumerate(zip(chunk_ids, torch.isfinite(logits).all(dim=-1).tolist(), strict=True)):
            if finite:
                samples.append((i, at))
            else:
                result.errors[i] = NOT_FINITE
        if samples:
            self._sample(batch, samples, logits, result)

    def _sample(
        self, batch: ScheduledBatch, samples: list[tuple[int, int]], logits: Tensor, result: StepResult
    ) -> None:
        """Sample for (chunk, row of `logits`) in `samples`; if that raises, row by row, to find whose fault it is."""
        try:
            self._sample_together(batch, samples, logits, result)
        except (RequestError, ValueError):
            for sample in samples:
                try:
                    self._sample_together(batch, [sample], logits, result)
                except (RequestError, ValueError) as error:
                    result.errors[sample[0]] = f"sampling_error: {error}"

    def _sample_together(
        self, batch: ScheduledBatch, samples: list[tuple[int, int]], logits: Tensor, result: StepResult
    ) -> None:
        chunk_ids = [i for i, _ in samples]
        token_ids, logprobs = self.sampler.sample(
            logits[[row for _, row in samples]],
            [batch.params[i] for i in chunk_ids],
            [batch.starts[i] + batch.lens[i] for i in chunk_ids],
            [batch.num_prompts[i] for i in chunk_ids],
        )
        for at, i in enumerate(chunk_ids):
            result.token_ids[i] = token_ids[at]
            if at in logprobs:
                result.logprobs[i] = logprobs[at]


def _is_out_of_memory(error: Exception) -> bool:
    """Python's and numpy's kind, a GPU's kind, and the words by which torch tells it of a CPU."""
    return isinstance(error, MemoryError | torch.OutOfMemoryError) or "can't allocate memory" in str(error)


def _wanted(
    batch: ScheduledBatch, chunk_ids: list[int], token_ids: list[list[int]]
) -> list[tuple[int, list[int], list[int]]]:
    """For each chunk: its id, the rows of the step whose logits it needs, and the prompt tokens that the first of
    these rows foretell. A row to sample from comes last; it never foretells a prompt token."""
    wanted = []
    row = 0
    for i, own in zip(chunk_ids, token_ids, strict=True):
        start, length = batch.starts[i], batch.lens[i]
        next_token_ids: list[int] = []
        if batch.params[i].prompt_logprobs is not None:
            num_rows = max(0, min(length, batch.num_prompts[i] - 1 - start))
            next_token_ids = own[1 : num_rows + 1]
            if len(next_token_ids) < num_rows:
                next_token_ids.append(batch.next_token_ids[i])
        rows = list(range(row, row + len(next_token_ids)))
        if batch.samples[i]:
            rows.append(row + length - 1)
        wanted.append((i, rows, next_token_ids))
        row += length
    return wanted
