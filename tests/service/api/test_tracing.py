"""Traces arrive at a collector: one trace from the submit to the webhook, and nothing private in it."""

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

from farm import tracing
from farm.db.session import unit_of_work
from farm.jobs.lifecycle import fail, mark_running
from farm.jobs.policy import Failure, FailureKind
from farm.settings import OtelSettings
from farm.webhooks.deliveries import Outcome, Room, take_due
from tests.service.api.conftest import EVERY_HOST_IS_PUBLIC, PROFILE, SUBMIT, Farm
from worker import webhook_sender

TRACE = "0af7651916cd43dd8448eb211c80319c"
PARENT = f"00-{TRACE}-b7ad6b7169203331-01"
SECRET_WORDS = "A red fox walks through fresh snow."


class Collector:
    """What a collector has received, as it came over HTTP."""

    def __init__(self) -> None:
        self.bodies: list[bytes] = []
        collector = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                collector.bodies.append(self.rfile.read(int(self.headers["Content-Length"])))
                self.send_response(200)
                self.send_header("Content-Length", "0")
                self.end_headers()

            def log_message(self, *_: object) -> None:
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        threading.Thread(target=self.server.serve_forever, daemon=True).start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server.server_port}"

    def spans(self) -> list:
        tracing.close_tracing()  # which sends what is left
        found = []
        for body in self.bodies:
            request = ExportTraceServiceRequest.FromString(body)
            for resource in request.resource_spans:
                for scope in resource.scope_spans:
                    found.extend(scope.spans)
        return found


@pytest.fixture
def collector(farm: Farm, monkeypatch: pytest.MonkeyPatch) -> Iterator[Collector]:
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    made = Collector()
    traced = farm.settings.model_copy(update={"otel": OtelSettings(endpoint=made.url)})
    tracing.configure_tracing(traced, service="test")
    yield made
    tracing.close_tracing()
    made.server.shutdown()
    made.server.server_close()


def attributes_of(span) -> dict[str, str]:
    return {pair.key: pair.value.string_value or pair.value.int_value for pair in span.attributes}


async def test_one_trace_leads_from_the_submit_to_the_webhook(farm: Farm, collector: Collector) -> None:
    webhook = {"url": "https://hooks.example/in?token=hush", "events": ["video.completed"]}
    async with farm.client() as client:
        answer = await client.post(
            "/v1/videos", json={**SUBMIT, "webhook": webhook}, headers={"traceparent": PARENT}
        )
    assert answer.status_code == 200, answer.text
    farm.finish()
    with unit_of_work(farm.database) as conn:
        [delivery] = take_due(conn, Room(8, 8, 8))
    ok = Outcome(120, http_status=200, resolved_ip=EVERY_HOST_IS_PUBLIC)
    webhook_sender._log_recorded([(delivery, ok)], webhook_sender.Recorded(frozenset(), {}))

    spans = collector.spans()
    assert [span.name for span in spans] == [
        "submit",
        "queue wait",
        "claim",
        "phase denoise",
        "upload",
        "webhook",
    ]
    assert {span.trace_id.hex() for span in spans} == {TRACE}
    submit, *others = spans
    assert submit.parent_span_id.hex() == "b7ad6b7169203331"
    assert {span.parent_span_id for span in others} == {submit.span_id}
    assert all(span.end_time_unix_nano >= span.start_time_unix_nano for span in spans)
    job_id = answer.json()["id"]
    assert attributes_of(others[0]) == {"job_id": job_id, "epoch": 1, "profile": PROFILE, "group": "g1"}
    sent = b"".join(collector.bodies)
    for private in (SECRET_WORDS, "hooks.example", "hush", farm.key):
        assert private.encode() not in sent
    assert "traceparent" not in json.dumps(answer.json())


async def test_an_attempt_that_ends_early_is_a_span_with_its_reason(farm: Farm, collector: Collector) -> None:
    async with farm.client() as client:
        await client.post("/v1/videos", json=SUBMIT, headers={"traceparent": "nonsense"})
    claimed = farm.claim()
    with unit_of_work(farm.database) as conn:
        assert mark_running(conn, claimed.job.id, claimed.epoch)
    with unit_of_work(farm.database) as conn:
        fail(conn, claimed.job.id, claimed.epoch, Failure(FailureKind.CRASH))
    *_, ended = collector.spans()
    assert ended.name == "attempt ended early"
    found = attributes_of(ended)
    assert (found["failure"], found["outcome"]) == ("crash", "queued")


async def test_without_a_collector_a_job_has_no_trace(farm: Farm) -> None:
    async with farm.client() as client:
        await client.post("/v1/videos", json=SUBMIT, headers={"traceparent": PARENT})
    claimed = farm.claim()
    assert claimed.job.traceparent is None
    assert tracing.log_members(None) == {}


async def test_log_lines_of_a_submit_carry_the_ids_of_its_trace(collector: Collector) -> None:
    with tracing.submitting(PARENT):
        members = tracing.log_members(tracing.current())
    assert members["trace_id"] == TRACE
    [span] = collector.spans()
    assert members["span_id"] == span.span_id.hex()
