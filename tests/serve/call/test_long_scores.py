"""Calls that compare more texts than fit the queue at once: the same scores, and room for others in between."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from tests.support.server import Live, inproc

from headrace.engine.tenants import RateLimitError, Rates
from headrace.protocol.config import ServerConfig
from headrace.protocol.errors import QueueFullError
from headrace.serve.call import embedding
from headrace.text.tokenizer import Tokenizer

HTTP = httpx.Client(timeout=240)
DOCUMENTS = [f"document {i * i % 977}" for i in range(1000)]
MOST = 64


@pytest.fixture(scope="module")
def small(tokenizer: Tokenizer) -> Iterator[Live]:
    """A server whose queue takes fewer requests than a call has texts."""
    client = inproc(delay=0.001, max_num_seqs=8)
    client.admission.max_reqs = 100
    with Live(client, tokenizer, ServerConfig(log_stats_interval=0)) as result:
        yield result


def rerank(live: Live, documents: list[str], **more: Any) -> httpx.Response:
    return HTTP.post(f"{live.url}/v1/rerank", json={"query": "document 5", "documents": documents} | more)


def by_index(reply: httpx.Response) -> list[float]:
    assert reply.status_code == 200, reply.text
    results = sorted(reply.json()["results"], key=lambda each: each["index"])
    return [each["relevance_score"] for each in results]


def test_a_thousand_documents_have_the_scores_of_their_parts(small: Live) -> None:
    parts = [by_index(rerank(small, DOCUMENTS[at : at + MOST])) for at in range(0, len(DOCUMENTS), MOST)]
    expected = [score for part in parts for score in part]
    reply = rerank(small, DOCUMENTS)
    assert by_index(reply) == expected
    order = [each["index"] for each in reply.json()["results"]]
    assert order == sorted(range(len(DOCUMENTS)), key=lambda i: (-expected[i], i))
    assert len(rerank(small, DOCUMENTS, top_n=10).json()["results"]) == 10
    body: dict[str, Any] = {"text_1": "document 5", "text_2": DOCUMENTS}
    rated = HTTP.post(f"{small.url}/v1/score", json=body).json()["data"]
    assert [each["score"] for each in rated] == expected
    pairs = HTTP.post(f"{small.url}/v1/score", json=body | {"text_1": ["document 5"] * 1000}).json()["data"]
    assert [each["score"] for each in pairs] == expected


@pytest.mark.parametrize(
    ("path", "body", "field"),
    [
        ("/v1/rerank", {"query": "a", "documents": ["b"] * 2049}, "documents"),
        ("/v1/score", {"text_1": "a", "text_2": ["b"] * 2049}, "text_2"),
        ("/v1/score", {"text_1": ["a"] * 2049, "text_2": ["b"] * 2049}, "text_1"),
        ("/v1/rerank", {"query": "a", "documents": []}, "documents"),
    ],
)
def test_the_bound_is_named(small: Live, path: str, body: dict[str, Any], field: str) -> None:
    reply = HTTP.post(small.url + path, json=body)
    assert reply.status_code == 400
    assert reply.json()["error"]["param"] == field
    assert "a length from 1 to 2048" in reply.json()["error"]["message"]
    vectors = HTTP.post(f"{small.url}/v1/embeddings", json={"input": ["b"] * 257})
    assert "a length from 1 to 256" in vectors.json()["error"]["message"]


def sizes_of(live: Live, patch: pytest.MonkeyPatch) -> list[int]:
    """How many texts a long call has in the engine at once, turn by turn."""
    sizes: list[int] = []
    real = embedding.pooled

    async def noted(front: Any, prompts: Any, *others: Any) -> Any:
        sizes.append(len(prompts))
        return await real(front, prompts, *others)

    patch.setattr(embedding, "pooled", noted)
    rerank(live, DOCUMENTS[:90])
    return sizes


def test_a_call_takes_turns(small: Live, monkeypatch: pytest.MonkeyPatch) -> None:
    assert sizes_of(small, monkeypatch) == [1, 64, 26]


def test_control_a_call_without_turns_is_noticed(small: Live, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(embedding, "TURN", 10**6)
    assert sizes_of(small, monkeypatch) == [1, 90]


def test_others_are_served_meanwhile(small: Live) -> None:
    """A short answer comes while the long call, of many times as much work, goes on."""
    ended: list[bool] = []
    thread = threading.Thread(target=lambda: ended.append(rerank(small, DOCUMENTS * 2).status_code == 200))
    thread.start()
    small.wait(lambda: small.client.num_unfinished > 0)
    body = {"model": "fake", "prompt": "a", "max_tokens": 2}
    assert HTTP.post(f"{small.url}/v1/completions", json=body).status_code == 200
    assert not ended
    thread.join()
    assert ended == [True]


def test_a_callers_limit_is_that_of_the_whole_call(small: Live, monkeypatch: pytest.MonkeyPatch) -> None:
    """No turn of the documents begins if the tokens of all are more than the caller may send."""
    least = sum(map(len, DOCUMENTS[:MOST]))

    def check(rates: Rates, num_tokens: int) -> None:
        if num_tokens > least:
            raise RateLimitError("tokens")

    monkeypatch.setattr(Rates, "check_tokens", check)
    assert sizes_of(small, monkeypatch) == [1]
    assert rerank(small, DOCUMENTS[:MOST]).status_code == 200


def refusing(patch: pytest.MonkeyPatch, turn: int, times: int, error: Exception) -> None:
    """Refuse a turn so often: turn 0 is the query, 1 the first of the documents."""
    real, calls, left = embedding.pooled, [0], [times]

    async def refuse(*args: Any) -> Any:
        if calls[0] == turn and left[0]:
            left[0] -= 1
            raise error
        calls[0] += 1
        return await real(*args)

    patch.setattr(embedding, "pooled", refuse)


def test_the_rest_waits_for_room(small: Live, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = by_index(rerank(small, DOCUMENTS[:150]))
    monkeypatch.setattr(embedding, "PAUSE_S", 0.001)
    refusing(monkeypatch, 2, 3, QueueFullError("full"))
    assert by_index(rerank(small, DOCUMENTS[:150])) == expected


@pytest.mark.parametrize(
    ("turn", "error", "patience"),
    [(1, QueueFullError("full"), 60.0), (2, QueueFullError("full"), 0.0), (2, RateLimitError("full"), 60.0)],
)
def test_what_does_not_wait(
    small: Live, monkeypatch: pytest.MonkeyPatch, turn: int, error: Exception, patience: float
) -> None:
    """A call that was not begun, one that waited too long, and one above the caller's own limit."""
    monkeypatch.setattr(embedding, "PAUSE_S", 0.001)
    monkeypatch.setattr(embedding, "PATIENCE_S", patience)
    refusing(monkeypatch, turn, 10**6, error)
    assert rerank(small, DOCUMENTS[:150]).status_code == 429
