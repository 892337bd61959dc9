"""Bounds on what one call asks for in total, and on its labels."""

from __future__ import annotations

from typing import Any

import pytest
from tests.serve.test_refusals import refused
from tests.support.server import Live

WIDE = {"use_beam_search": True, "beam_width": 64, "max_tokens": 1}


def test_S_11_beams_and_prompts_are_bounded_together(live: Live) -> None:
    message = refused(live.post("/v1/completions", WIDE | {"prompt": ["x"] * 17}))
    assert message.startswith("beam_width: 64 ")
    assert "at most 1024 in one call; there are 17 prompts" in message
    # The control: as many beams as are allowed.
    assert live.post("/v1/completions", WIDE | {"prompt": ["x"] * 16}).status_code == 200


@pytest.mark.parametrize("name", ["user", "safety_identifier", "prompt_cache_key"])
@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/completions", {"prompt": "x", "max_tokens": 1}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "x"}], "max_tokens": 1}),
        ("/v1/responses", {"input": "x", "max_output_tokens": 2, "store": False}),
        ("/v1/embeddings", {"input": "x"}),
    ],
)
def test_S_11_labels_are_bounded(live: Live, path: str, body: dict[str, Any], name: str) -> None:
    if path == "/v1/embeddings" and name != "user":
        pytest.skip("no field of this request")
    assert live.post(path, body | {name: "u" * 512}).status_code == 200
    assert refused(live.post(path, body | {name: "u" * 513})).startswith(f"{name}: 513 ")
