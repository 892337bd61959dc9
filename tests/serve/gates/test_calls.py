"""Every call has an id, its caller's or a fresh one: in its reply, in the log, in its traces."""

from __future__ import annotations

import io
import json
import logging
import sys
from collections.abc import Iterator
from typing import Any

import pytest
from tests.security import rig
from tests.support.server import HTTP, Live, inproc, logged

from headrace.engine import context, generation
from headrace.engine.context import CallContext, answering
from headrace.engine.logs import JsonFormatter, record_of
from headrace.insight import tracing
from headrace.protocol.config import EngineConfig, ServerConfig
from headrace.protocol.errors import HeadraceError
from headrace.serve import app
from headrace.serve.gates.calls import by_name, context_of
from headrace.text.tokenizer import Tokenizer

PARENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
BODY = {"prompt": "xyzzy of a client", "max_tokens": 5, "ignore_eos": True, "seed": 1}


@pytest.fixture
def log() -> Iterator[io.StringIO]:
    with logged("json") as text:
        yield text


def test_every_reply_has_an_id(live: Live) -> None:
    seen = set()
    for method, path in rig.routes(live.app):
        mine = rig.call(live, method, path, headers={"x-request-id": "mine:7"}).headers
        assert mine["x-request-id"] == "mine:7", path
        fresh = rig.call(live, method, path).headers["x-request-id"]
        assert context.REQUEST_ID.fullmatch(fresh)
        seen.add(fresh)
    assert len(seen) == len(rig.routes(live.app))
    # Refused before any route is looked for, too.
    assert (
        HTTP.get(live.url + "/", headers={"host": "evil.example", "x-request-id": "a"}).headers["x-request-id"] == "a"
    )


def test_a_reply_and_its_header_go_by_one_id(live: Live) -> None:
    for body in (BODY, BODY | {"stream": True}):
        reply = live.post("/v1/completions", body)
        [first, *_] = reply.text.removeprefix("data: ").split("\n")
        assert reply.headers["x-request-id"] == json.loads(first)["id"]


def test_what_breaks_is_logged_under_the_id_that_the_reply_tells(
    live: Live, log: io.StringIO, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*args: object, **more: object) -> None:
        raise ValueError(f"in {BODY['prompt']}\n\u2028forged \ud800")

    monkeypatch.setattr(generation.TextClient, "check_room", broken)
    reply = live.post("/v1/completions", BODY, headers={"x-request-id": "trace-7"})
    assert reply.json()["error"]["message"].endswith("of the request trace-7")
    logging.getLogger("uvicorn.error").critical("a line of %s\n\x1b[2J\u202e", "uvicorn's")
    lines = [json.loads(line) for line in log.getvalue().splitlines()]
    [output] = [line for line in lines if line["level"] == "error"]
    assert (output["request_id"], output["logger"]) == ("trace-7", "headrace.server")
    assert output["exception"][-1].startswith("ValueError: (")
    assert any("in broken" in line for line in output["exception"])
    assert lines[-1]["message"] == "a line of uvicorn's\n\x1b[2J\u202e"
    assert "request_id" not in lines[-1]
    # S-22: whatever is in a message, an object is one line of printable ASCII.
    assert "xyzzy" not in log.getvalue()
    assert log.getvalue().replace("\n", "").isascii()
    assert log.getvalue().replace("\n", "").isprintable()


@pytest.mark.parametrize(
    ("headers", "expected"),
    [
        ([(b"traceparent", PARENT.encode())], {"traceparent": PARENT}),
        ([(b"traceparent", PARENT.encode()), (b"tracestate", b"a=1")], {"traceparent": PARENT, "tracestate": "a=1"}),
        ([(b"traceparent", PARENT.encode())] * 2, {}),
        ([(b"traceparent", PARENT.upper().encode())], {}),
        ([(b"traceparent", PARENT.encode() + b"\n"), (b"tracestate", b"a=1")], {}),
    ],
)
def test_a_callers_trace_is_taken_over_if_it_is_well_formed(headers: list[Any], expected: dict[str, str]) -> None:
    assert context_of(by_name({"headers": headers}), "/").trace == expected


def test_outside_of_a_call_there_is_none() -> None:
    assert context.current() == CallContext()
    with answering(CallContext("a", True)):
        assert context.current().call_id == "a"
        assert context.fresh_id() == ""
    assert context.current().call_id == ""


def test_a_server_that_can_not_start_says_so_in_the_logs_form(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(app.logs, "set_up", lambda *arguments: None)
    with pytest.raises(SystemExit):
        app.serve(EngineConfig(model="/nope"), ServerConfig(port=0, log_format="json"))
    assert "/nope: no such directory" in caplog.text
    with pytest.raises(HeadraceError):
        app.serve(EngineConfig(model="/nope"), ServerConfig(port=0))


def test_a_line_of_another_process_is_logged_as_it_was(log: io.StringIO) -> None:
    try:
        raise ValueError("x" * 7)
    except ValueError as error:
        logging.getLogger("headrace.engine").error("100 %% of %s", "it\x1b\n", exc_info=error)
    [line] = log.getvalue().splitlines()
    record = record_of(line)
    assert record is not None
    assert JsonFormatter().format(record) == line
    assert json.loads(line)["exception"][-1].startswith("ValueError: (7 ")


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{",
        "[]",
        "3",
        "{}",
        '{"time": 3}',
        '{"time": "x", "level": "error", "logger": "a", "message": "b"}',
        '{"time": "2026-11-22", "level": "loud", "logger": "a", "message": "b"}',
        "[" * 9000,
    ],
)
def test_another_text_is_no_line_of_a_log(text: str) -> None:
    assert record_of(text) is None


# -- traces


def test_each_answer_is_a_span(tokenizer: Tokenizer) -> None:
    memory = pytest.importorskip("opentelemetry.sdk.trace.export.in_memory_span_exporter")
    exporter = memory.InMemorySpanExporter()
    with Live(inproc(delay=0.001), tokenizer, ServerConfig(log_stats_interval=0), exporter=exporter) as live:
        headers = {"traceparent": PARENT, "x-request-id": "trace-7"}
        assert live.post("/v1/completions", BODY | {"n": 2, "temperature": 0.5}, headers=headers).status_code == 200
        chat = {"messages": [{"role": "user", "content": "xyzzy of a client"}], "max_tokens": 3, "stream": True}
        assert live.post("/v1/chat/completions", chat).status_code == 200
        assert live.post("/v1/embeddings", {"input": "xyzzy of a client"}).status_code == 200
    # All that was left was sent when the server stopped.
    first, second, third, fourth = exporter.get_finished_spans()
    for span in (first, second):
        attributes = dict(span.attributes)
        assert (span.name, span.kind.name, span.status.status_code.name) == ("text_completion fake", "SERVER", "UNSET")
        assert f"{span.context.trace_id:032x}" == PARENT.split("-")[1]
        assert f"{span.parent.span_id:016x}" == PARENT.split("-")[2]
        assert (attributes["gen_ai.usage.input_tokens"], attributes["gen_ai.usage.output_tokens"]) == (
            len(BODY["prompt"]),
            5,
        )  # type: ignore[arg-type]
        assert attributes["gen_ai.response.finish_reasons"] == ("length",)
        assert (attributes["gen_ai.request.temperature"], attributes["headrace.call.id"]) == (0.5, "trace-7")
        assert attributes["headrace.replica"] == 0
        assert 0 <= attributes["gen_ai.latency.time_in_queue"] <= attributes["gen_ai.latency.time_to_first_token"]
        assert attributes["gen_ai.latency.time_to_first_token"] <= attributes["gen_ai.latency.e2e"]
        assert span.end_time - span.start_time == pytest.approx(attributes["gen_ai.latency.e2e"] * 1e9, rel=1e-3)
        assert [event.name for event in span.events] == ["scheduled", "first_token"]
        assert span.start_time <= span.events[0].timestamp <= span.events[1].timestamp <= span.end_time
        assert span.resource.attributes["service.name"] == "headrace"
    assert (third.name, fourth.name) == ("chat fake", "embeddings fake")
    assert third.parent is None
    output = "".join(span.to_json() for span in (first, second, third, fourth))
    assert "xyzzy" not in output


def test_an_answer_that_fails_is_an_error_in_its_span(tokenizer: Tokenizer) -> None:
    memory = pytest.importorskip("opentelemetry.sdk.trace.export.in_memory_span_exporter")
    from headrace.protocol.params import SamplingParams
    from headrace.protocol.step import Finish, Request
    from headrace.text.outputs import RequestState

    exporter = memory.InMemorySpanExporter()
    tracer = tracing.Tracer(exporter, "fake", batched=False)
    request = Request(request_id="a", prompt_token_ids=[1], params=SamplingParams(seed=1, max_tokens=2))
    state = RequestState(request, None)
    state.finish = Finish("error", message="out_of_memory: 12 of xyzzy")
    tracer.on_finish(state, "error")
    [span] = exporter.get_finished_spans()
    assert (span.attributes["error.type"], span.status.status_code.name) == ("out_of_memory", "ERROR")
    assert "xyzzy" not in span.to_json()
    tracer.close()


def test_without_opentelemetry_the_remedy_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "opentelemetry.exporter.otlp.proto.http.trace_exporter", None)
    with pytest.raises(HeadraceError, match=r"pip install -c constraints.txt -e '\.\[otel\]'"):
        tracing.otlp("http://127.0.0.1:9/v1/traces")
