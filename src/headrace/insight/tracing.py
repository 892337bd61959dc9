"""OpenTelemetry traces: one span for each answer, with its times. Needs the extra `otel`.

Names follow the GenAI semantic conventions, and vLLM where these have none (time in the queue, to the first token). A
span is a child of the caller's W3C traceparent. It holds counts, times and parameters, never a text or a token. A
thread of the exporter sends the spans. Made by `serve.app`; called by `engine.generation` at the end of answers.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from headrace.engine import context
from headrace.engine.generation import FinishObserver
from headrace.protocol.errors import HeadraceError
from headrace.text.outputs import RequestState

CHAT_PATHS = ("/v1/chat/", "/v1/messages", "/v1/responses", "/api/chat")
CLOSE_MS = 5000
"""Milliseconds, at the end, in which the last spans are sent."""
MISSING = (
    "--otlp-traces-endpoint needs OpenTelemetry, which is not installed; in a checkout: "
    ".venv/bin/python -m pip install -c constraints.txt -e '.[otel]'"
)


class Tracer:
    """An observer that makes a span of each answer that has ended, and calls the next observer.

    Args:
        exporter: an OpenTelemetry `SpanExporter`, which sends the spans; see `otlp`.
        model: the served name.
        after: the next observer.
        batched: send spans together, on a thread; else each at once, for tests.

    Raises `HeadraceError` if OpenTelemetry is not installed.
    """

    def __init__(self, exporter: Any, model: str, after: FinishObserver | None = None, batched: bool = True) -> None:
        try:
            from opentelemetry.sdk.resources import Resource
            from opentelemetry.sdk.trace import TracerProvider
            from opentelemetry.sdk.trace.export import BatchSpanProcessor, SimpleSpanProcessor
            from opentelemetry.trace import SpanKind, Status, StatusCode
            from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator
        except ImportError as error:
            raise HeadraceError(MISSING) from error
        # OTEL_SERVICE_NAME may set the name, as in every traced program.
        attributes = {"service.name": "headrace"} | dict(Resource.create().attributes)
        if str(attributes["service.name"]).startswith("unknown_service"):
            attributes["service.name"] = "headrace"
        self._provider = TracerProvider(resource=Resource(attributes))
        process = BatchSpanProcessor if batched else SimpleSpanProcessor
        self._provider.add_span_processor(process(exporter))
        self._tracer = self._provider.get_tracer("headrace")
        self._propagator = TraceContextTextMapPropagator()
        self._kind = SpanKind.SERVER
        self._error = Status(StatusCode.ERROR)
        self._model = model
        self._after = after
        self.replica_of: Callable[[str], int | None] = lambda request_id: None
        """Returns which engine computed the end of a request's answer, None where that is not known."""

    def on_finish(self, state: RequestState, reason: str) -> None:
        if self._after is not None:
            self._after.on_finish(state, reason)
        call, times, replica = context.current(), state.metrics, self.replica_of(state.request.request_id)
        # From monotonic seconds to seconds since 1970.
        shift = time.time() - time.monotonic()
        ended = times.finished_time if times.finished_time is not None else time.monotonic()
        operation = operation_of(state, call.path)
        span = self._tracer.start_span(
            f"{operation} {self._model}",
            context=self._propagator.extract(call.trace),
            kind=self._kind,
            attributes=attributes_of(state, reason, ended)
            | {
                "gen_ai.operation.name": operation,
                "gen_ai.request.model": self._model,
                "gen_ai.response.model": self._model,
                **({"headrace.call.id": call.call_id} if call.call_id else {}),
                **({} if replica is None else {"headrace.replica": replica}),
            },
            start_time=nanoseconds(times.arrival_time + shift),
        )
        for name, at in (("scheduled", times.first_scheduled_time), ("first_token", times.first_token_time)):
            if at is not None:
                span.add_event(name, timestamp=nanoseconds(at + shift))
        if reason == "error":
            span.set_attribute(
                "error.type", (state.finish.message if state.finish else "").partition(":")[0] or "error"
            )
            span.set_status(self._error)
        span.end(nanoseconds(ended + shift))

    def close(self) -> None:
        """Send the last spans, for `CLOSE_MS` at most. May block for as long, so do not call this on an event loop."""
        self._provider.force_flush(CLOSE_MS)
        self._provider.shutdown()


def otlp(endpoint: str) -> Any:
    """Return an exporter to `endpoint`, by OTLP over HTTP. Raises `HeadraceError` if OpenTelemetry is not installed."""
    try:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
    except ImportError as error:
        raise HeadraceError(MISSING) from error
    return OTLPSpanExporter(endpoint=endpoint)


def nanoseconds(seconds: float) -> int:
    return int(seconds * 1e9)


def operation_of(state: RequestState, path: str) -> str:
    """Return the conventions' name of the operation."""
    if state.request.pooling:
        return "embeddings"
    return "chat" if path.startswith(CHAT_PATHS) else "text_completion"


def attributes_of(state: RequestState, reason: str, ended: float) -> dict[str, Any]:
    """Return the attributes of an answer's span. Times are in seconds."""
    request, times = state.request, state.metrics
    params = request.params
    first = None if times.first_token_time is None else times.first_token_time - times.arrival_time
    attributes = {
        "gen_ai.provider.name": "headrace",
        "gen_ai.request.id": request.request_id,
        "gen_ai.request.seed": params.seed,
        "gen_ai.request.max_tokens": params.max_tokens,
        "gen_ai.request.temperature": params.temperature,
        "gen_ai.request.top_p": params.top_p,
        "gen_ai.request.top_k": params.top_k or None,
        "gen_ai.request.frequency_penalty": params.frequency_penalty or None,
        "gen_ai.request.presence_penalty": params.presence_penalty or None,
        "gen_ai.response.finish_reasons": [reason],
        "gen_ai.usage.input_tokens": len(request.prompt_token_ids),
        "gen_ai.usage.output_tokens": len(state.token_ids),
        "gen_ai.usage.cache_read.input_tokens": state.num_cached_tokens,
        "gen_ai.latency.time_in_queue": times.time_in_queue,
        "gen_ai.latency.time_to_first_token": first,
        "gen_ai.latency.time_in_model_prefill": times.prefill_time,
        "gen_ai.latency.time_in_model_decode": times.decode_time,
        "gen_ai.latency.e2e": ended - times.arrival_time,
    }
    return {name: value for name, value in attributes.items() if value is not None}
