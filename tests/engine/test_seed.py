"""`EngineConfig.seed`: it decides the seeds of requests without one; without it they are fresh."""

from __future__ import annotations

from headrace import LLM, SamplingParams
from headrace.text.inputs import seed_source


def test_seed_source() -> None:
    first, again, other, fresh = seed_source(7), seed_source(7), seed_source(8), seed_source(None)
    samples = [first() for _ in range(5)]
    assert samples == [again() for _ in range(5)]
    assert len({*samples, *(other() for _ in range(5)), *(fresh() for _ in range(5))}) == 15
    assert all(0 <= seed < 2**53 for seed in samples)


def test_an_engine_s_seed_makes_a_run_repeatable(model: str) -> None:
    answers = []
    for _ in range(2):
        llm = LLM(model, seed=7, num_gpu_blocks_override=64)
        outputs = llm.generate(["Once", "Once"], SamplingParams(max_tokens=4), use_tqdm=False)
        answers.append([(output.outputs[0].seed, output.outputs[0].token_ids) for output in outputs])
        llm.close()
    assert answers[0] == answers[1]
    assert answers[0][0][0] != answers[0][1][0]
