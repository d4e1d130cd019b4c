"""Exports a finished call to OpenTelemetry: a span for the call and for each of its phases,
seconds, and bytes."""

from __future__ import annotations

from typing import Any

from opentelemetry import metrics, trace

from reshard.live.tensors import this_rank
from reshard.ranks.timespans import Span

# Made by whatever the program has set up, or sets up later.
_tracer = trace.get_tracer("reshard")
_meter = metrics.get_meter("reshard")
_seconds = _meter.create_histogram(
    "reshard.duration",
    unit="s",
    description="Duration of calls, including their work in the background",
    explicit_bucket_boundaries_advisory=[0.01, 0.03, 0.1, 0.3, 1, 3, 10, 30, 100, 300, 1000, 3000],
)
_bytes = _meter.create_counter("reshard.bytes", unit="By", description="Bytes that calls read, wrote, or moved here")


def tell(call: Span) -> None:
    """Export a call that has ended, including its work in the background."""
    nbytes, seconds = _bytes_of(call), call.seconds
    facts: dict[str, Any] = {"reshard.operation": call.name, "reshard.rank": this_rank()} | _failure(call)
    _seconds.record(seconds, facts)
    _bytes.add(nbytes, facts)
    where = {"reshard.path": call.path} if call.path else {}
    _tell_spans(call, f"reshard.{call.name}", {**facts, **where, "reshard.bytes": nbytes}, None, round(seconds * 1e9))


def _tell_spans(span: Span, name: str, facts: dict[str, Any], context: Any, took_ns: int) -> None:
    """Export a span and all within it. It belongs to the program's current span if `context` is None."""
    facts |= {"thread.name": span.thread}
    told = _tracer.start_span(name, context, attributes=facts, start_time=span.began_ns)
    if not told.is_recording():  # no exporter wants it
        return
    if span.error:
        told.set_status(trace.StatusCode.ERROR, span.error)
    within = trace.set_span_in_context(told, context)
    for inner in span.inner:
        some = {"reshard.rank": facts["reshard.rank"], "reshard.bytes": inner.nbytes} | _failure(inner)
        if inner.waits:
            some["reshard.waits"] = True
        _tell_spans(inner, inner.name, some, within, inner.ended_ns - inner.began_ns)
    told.end(span.began_ns + took_ns)


def _failure(span: Span) -> dict[str, Any]:
    return {"error.type": span.error} if span.error else {}


def _bytes_of(span: Span) -> int:
    """Return the bytes of the phase with the most: what is read is also checked, and counts once."""
    return max([span.nbytes, *map(_bytes_of, span.inner)])
