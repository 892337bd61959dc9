"""S-15, S-17, S-32: media and tensors are refused, refusals tell nothing of the house, and leave nothing behind."""

from __future__ import annotations

import re
from typing import Any

import pytest
from tests.security import rig
from tests.support.server import HTTP, Live

MEDIA: list[dict[str, Any]] = [
    {"prompt_embeds": "AAAA"},
    {"multi_modal_data": {"image": "AAAA"}},
    {"mm_processor_kwargs": {"x": 1}},
    {"images": ["AAAA"]},
    {"audio": {"data": "AAAA"}},
]


def test_S_15_no_route_takes_tensors_or_media(live: Live) -> None:
    """Refused, or told to be ignored: nothing decodes them."""
    for path in rig.posts():
        plain = rig.call(live, "POST", path, json=rig.body_of(path) | {"seed": 1})
        for inputs in MEDIA:
            reply = rig.call(live, "POST", path, json=rig.body_of(path) | {"seed": 1} | inputs)
            assert reply.status_code in (400, 404, plain.status_code), (path, inputs)
            assert reply.status_code < 500
    kinds = ["image_url", "input_audio", "video_url", "file", "image_embeds"]
    for kind in kinds:
        part = {"type": kind, kind: {"url": "data:image/png;base64,AAAA", "data": "AAAA"}}
        body = {"messages": [{"role": "user", "content": [part]}]}
        assert live.post("/v1/chat/completions", body).status_code == 400


def test_S_17_S_22_no_refusal_tells_of_the_house(live: Live) -> None:
    """Nothing of addresses, paths, users or tracebacks in any error that any route gives."""
    output = []
    for method, path in rig.routes(live.app):
        for content in (b"", b"{", b"[1]", b'{"prompt": {}}', b'{"messages": 1}', b"\x00" * 50):
            output.append(rig.call(live, method, path, content=content, headers={"content-type": "application/json"}))
    for path in rig.posts():
        output += [rig.call(live, "POST", path, json=body) for body in rig.planted(rig.body_of(path), {"a": [None]})]
    errors = [reply for reply in output if reply.status_code >= 400]
    assert len(errors) > 200
    leaks = re.compile(
        r"0x[0-9a-f]{6,}|Traceback|File \"|\.py\b|/src/|site-packages|/home/|/root/|/tmp/|msgspec|headrace\."
    )
    assert [reply.text for reply in errors if leaks.search(reply.text)] == []
    assert leaks.search("<object at 0x7f00aa11>")


def gauges(live: Live) -> dict[str, float]:
    expected = ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc")
    actual = {name: live.metric(name) for name in expected}
    return actual | {"load": float(HTTP.get(live.url + "/load").json()["server_load"])}


REFUSED: list[tuple[str, dict[str, Any]]] = [
    ("/v1/completions", {"prompt": "x", "max_tokens": -1}),
    ("/v1/completions", {"prompt": "x" * 5000}),
    ("/v1/completions", {"prompt": [300]}),
    ("/v1/completions", {"prompt": "x", "structured_outputs": {"regex": "("}}),
    ("/v1/completions", {"prompt": "x", "model": "other"}),
    ("/v1/completions", {"prompt": ["x"] * 100, "n": 128}),
    ("/v1/chat/completions", {"messages": [{"role": "user", "content": "x"}], "chat_template_kwargs": {"self": 1}}),
    ("/v1/responses", {"input": "x", "previous_response_id": "resp_x"}),
    ("/v1/batches", {"input_file_id": "file-0", "endpoint": "/v1/completions", "completion_window": "1h"}),
]


@pytest.mark.parametrize(("path", "body"), REFUSED)
def test_S_32_what_is_refused_at_any_stage_leaves_nothing(live: Live, path: str, body: dict[str, Any]) -> None:
    before = gauges(live)
    for _ in range(20):
        assert 400 <= live.post(path, body).status_code < 500
    Live.wait(lambda: gauges(live) == before)
    assert before["load"] == 0
