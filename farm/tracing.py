"""Traces of a job, from its submit to its webhook, for whoever runs a collector (extra `otel`).

Off unless FARM_OTEL__ENDPOINT is set, and then nothing of OpenTelemetry is imported elsewhere. A submit joins
the trace that its `traceparent` header names; the job keeps the `traceparent` of that submit, and every
process that moves the job adds its spans to the same trace: queue wait, claim, phases, upload, webhook. Spans
carry ids, profile and epoch, never a prompt, an address or a secret. Losing spans costs nothing else.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from datetime import UTC, datetime, timedelta
from typing import Any

import structlog

from farm.clock import now
from farm.errors import SettingsError
from farm.jobs.job import Job
from farm.jobs.states import ACTIVE, State
from farm.settings import Settings

HEADER = "traceparent"
TIMEOUT_S = 5
_current: ContextVar[str | None] = ContextVar("traceparent", default=None)


class _Tracing:
    """The one tracer of this process, if there is any."""

    tracer: Any = None
    provider: Any = None


def configure_tracing(settings: Settings, *, service: str) -> None:
    """Send the spans of this process to the configured collector, if there is one.

    Raises:
        SettingsError: The extra is not installed.
    """
    endpoint = settings.otel.endpoint
    if endpoint is None:
        return
    try:
        # Optional, and slow to import.
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
    except ImportError:
        raise SettingsError(
            "FARM_OTEL__ENDPOINT is set, but the extra is missing: "
            'pip install -c constraints.txt -e ".[otel]", or unset it'
        ) from None
    provider = TracerProvider(resource=Resource({"service.name": f"magi2-{service}"}), shutdown_on_exit=False)
    exporter = OTLPSpanExporter(endpoint=f"{endpoint.rstrip('/')}/v1/traces", timeout=TIMEOUT_S)
    provider.add_span_processor(BatchSpanProcessor(exporter))
    _Tracing.provider, _Tracing.tracer = provider, provider.get_tracer("magi2-farm")


def close_tracing() -> None:
    """Send what is left, and stop; a collector that is away is not waited for long."""
    if _Tracing.provider is not None:
        _Tracing.provider.shutdown()
    _Tracing.provider = _Tracing.tracer = None


def current() -> str | None:
    """Return the `traceparent` that a job submitted now belongs to."""
    return _current.get()


@contextmanager
def submitting(header: str | None) -> Iterator[None]:
    """Trace a submit, and bind its ids to the log lines written meanwhile; `header` is the client's own."""
    if _Tracing.tracer is None:
        yield
        return
    span = _Tracing.tracer.start_span("submit", context=_context(header))
    traceparent = _traceparent(span)
    token = _current.set(traceparent)
    try:
        with structlog.contextvars.bound_contextvars(**log_members(traceparent)):
            yield
    finally:
        _current.reset(token)
        span.end()


def log_members(traceparent: str | None) -> dict[str, str]:
    """Return what a log line says of a trace; nothing for a job without one."""
    if traceparent is None:
        return {}
    _, trace_id, span_id, _ = traceparent.split("-")
    return {"trace_id": trace_id, "span_id": span_id}


def trace_move(before: Job, after: Job, failure: str | None) -> None:
    """Add the spans that end with a move; called after its commit."""
    if _Tracing.tracer is None or after.traceparent is None:
        return
    if after.state is State.STARTING:
        _add(after, "queue wait", max(before.queued_at, before.not_before), after.started_at)
    elif after.state is State.RUNNING:
        _add(after, "claim", after.started_at, after.running_at)
    elif after.state is State.SUCCEEDED:
        _add_phases(after)
        _add(after, "upload", after.uploading_at, after.finished_at)
    elif before.state in ACTIVE and after.state not in ACTIVE:
        attributes = {"outcome": after.state.value, "failure": failure or ""}
        _add(before, "attempt ended early", before.started_at, now(), attributes)


def trace_webhook(traceparent: str | None, duration_s: float, attributes: Mapping[str, Any]) -> None:
    """Add an attempt to deliver that has just ended."""
    if traceparent is not None:
        ended_at = now()
        emit(traceparent, "webhook", ended_at - timedelta(seconds=duration_s), ended_at, attributes)


def emit(
    traceparent: str, name: str, begun_at: datetime, ended_at: datetime, attributes: Mapping[str, Any]
) -> None:
    """Add a finished span to a trace."""
    if _Tracing.tracer is None:
        return
    begun_at = min(begun_at, ended_at)
    span = _Tracing.tracer.start_span(
        name, context=_context(traceparent), start_time=_nanoseconds(begun_at), attributes=dict(attributes)
    )
    span.end(end_time=_nanoseconds(ended_at))


def _add(
    job: Job,
    name: str,
    begun_at: datetime | None,
    ended_at: datetime | None,
    more: Mapping[str, Any] | None = None,
) -> None:
    if job.traceparent is None or begun_at is None or ended_at is None:
        return
    attributes = {"job_id": job.id, "epoch": job.epoch, "profile": job.profile, "group": job.group_id or ""}
    emit(job.traceparent, name, begun_at, ended_at, {**attributes, **(more or {})})


def _add_phases(job: Job) -> None:
    """Lay the phases of a finished clip one after the other, in the order in which they ran."""
    begun_at = job.running_at
    for phase, seconds in (job.result or {}).get("stage_durations", {}).items():
        if begun_at is not None:
            ended_at = begun_at + timedelta(seconds=seconds)
            _add(job, f"phase {phase}", begun_at, ended_at)
            begun_at = ended_at


def _context(traceparent: str | None) -> Any:
    # Optional, and only where tracing is on.
    from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

    carrier = {} if traceparent is None else {HEADER: traceparent}
    return TraceContextTextMapPropagator().extract(carrier)


def _traceparent(span: Any) -> str:
    made = span.get_span_context()
    return f"00-{made.trace_id:032x}-{made.span_id:016x}-{int(made.trace_flags):02x}"


def _nanoseconds(at: datetime) -> int:
    since = at - datetime(1970, 1, 1, tzinfo=UTC)
    return (since.days * 86_400 + since.seconds) * 1_000_000_000 + since.microseconds * 1_000
