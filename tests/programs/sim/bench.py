"""`Bench`: a scheduler over the oracle runner, driven step by step by tests that can be followed by hand."""

from headrace.core.options import SchedulerOptions
from headrace.core.scheduler import Scheduler
from headrace.insight.simulated import Behaviour, Oracle, SimulatedExecutor
from headrace.protocol.kinds import CacheKind
from headrace.protocol.params import SamplingParams
from headrace.protocol.step import Request

EOS = 0


class Bench:
    """A scheduler, an oracle, and what came out so far."""

    def __init__(self, fail=None, **numbers):
        defaults = {
            "num_blocks": 64,
            "block_size": 4,
            "max_num_seqs": 8,
            "max_num_batched_tokens": 64,
            "max_model_len": 128,
            "eos_token_ids": [EOS],
        }
        self.scheduler = Scheduler(SchedulerOptions(**{**defaults, **numbers}))
        pool = self.scheduler.pool
        kinds = {name: numbers[name] for name in ("kinds", "more_blocks") if name in numbers}
        self.oracle = Oracle(1000, [EOS], kinds=kinds.get("kinds", (CacheKind(),)))
        self.executor = SimulatedExecutor(pool.num_blocks, pool.block_size, self.oracle, Behaviour(fail=fail), **kinds)
        self.tokens, self.finished, self.started = {}, {}, {}
        self.prompt_logprobs = {}

    def add(self, name, prompt, **inputs):
        fields = {name: inputs.pop(name) for name in list(inputs) if name in Request.__struct_fields__}
        params = SamplingParams(**{"seed": 1, "max_tokens": 4, **inputs})
        if isinstance(prompt, int):
            prompt = list(range(1, prompt + 1))
        request = Request(request_id=name, prompt_token_ids=prompt, params=params, **fields)
        self.scheduler.add(request)
        return self.scheduler.sequences[name], self.oracle.stream(request, self.scheduler.max_model_len)

    def step(self):
        """One step; returns {request id: (start, length)} of what was scheduled."""
        scheduler = self.scheduler
        batch = scheduler.schedule()
        scheduler.check()
        chunks = zip(scheduler.flight, batch.starts, batch.lens, strict=True)
        scheduled = {seq.request_id: (start, length) for seq, start, length in chunks}
        self.copies = list(batch.copies)
        self.commit(batch, self.executor.run(batch))
        return scheduled

    def commit(self, batch, result):
        self.output = output = self.scheduler.commit(batch, result)
        self.scheduler.check()
        for name, tokens in zip(output.request_ids, output.token_ids, strict=True):
            self.tokens.setdefault(name, []).extend(tokens)
        for name, entries in output.prompt_logprobs.items():
            self.prompt_logprobs.setdefault(name, []).extend(entries)
        self.started.update(output.started)
        assert not self.finished.keys() & output.finished.keys()
        self.finished.update(output.finished)

    def drain(self):
        while self.scheduler.has_work():
            self.step()
        assert self.scheduler.stats().num_blocks_held == 0
