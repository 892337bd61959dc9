"""Real checkpoints behind the OpenAI API: the greedy continuations are the golden ones, token for token."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import openai
import pytest
from tests.support.serving import serve, wait_for

MODELS = {
    "stories260K": ("derived/stories260K-hf", "stories260K/tok512.bin", "stories260K/golden.json"),
    "TinyStories-656K": ("TinyStories-656K", None, "TinyStories-656K/golden.json"),
}


@pytest.mark.parametrize("name", MODELS)
def test_golden_greedy_over_the_api(name: str, shared_data: Path) -> None:
    model, tokenizer, golden = (None if p is None else shared_data / "models" / p for p in MODELS[name])
    assert model is not None
    assert golden is not None
    cases = json.loads(golden.read_text())["cases"]
    options = ["--served-model-name", name, *([] if tokenizer is None else ["--tokenizer", str(tokenizer)])]
    with serve(str(model), *options) as served:
        client = openai.OpenAI(base_url=f"{served.url}/v1", api_key="none", max_retries=0)
        for case in cases:
            want = case["greedy_ids"]
            # The golden runs stop after an end token, which they keep or not; ours reports it among the ids.
            ask: dict[str, Any] = {"model": name, "max_tokens": len(want), "temperature": 0}
            more = {"return_token_ids": True}
            by_ids = client.completions.create(prompt=case["prompt_ids"], extra_body=more, **ask)
            assert by_ids.choices[0].token_ids[: len(want)] == want  # type: ignore[attr-defined]
            by_text = client.completions.create(prompt=case["prompt"], extra_body=more, **ask)
            assert by_text.choices[0].prompt_token_ids == case["prompt_ids"]  # type: ignore[attr-defined]
            assert by_text.choices[0].token_ids[: len(want)] == want  # type: ignore[attr-defined]
            streamed = client.completions.create(prompt=case["prompt_ids"], stream=True, **ask)
            assert "".join(chunk.choices[0].text for chunk in streamed if chunk.choices) == by_text.choices[0].text
            assert by_text.choices[0].text.strip()
        wait_for(served.url, "headrace:kv_cache_usage_perc", 0.0)
