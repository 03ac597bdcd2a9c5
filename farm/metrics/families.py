"""Every metric that a process counts by itself: names, labels and buckets, and nothing else.

Labels are closed lists: routes, profiles of `profiles.yaml`, states, codes; never an id of a job, an account
or a host. What the database knows better (queues, groups, the outbox) is in `farm/metrics/gauges.py`. A
process counts what it does itself, so a farm's number is the sum over its processes.
"""

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

REGISTRY = CollectorRegistry()

_QUICK = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60)
_STEPS = (0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 7.5, 10, 15, 30, 60)
_LONG = (1, 5, 10, 30, 60, 120, 300, 600, 900, 1800, 3600, 7200, 14_400, 43_200, 86_400)


def _counter(name: str, text: str, *labels: str) -> Counter:
    return Counter(f"magi2_{name}", text, labels, registry=REGISTRY)


def _gauge(name: str, text: str, *labels: str) -> Gauge:
    return Gauge(f"magi2_{name}", text, labels, registry=REGISTRY)


def _histogram(name: str, text: str, buckets: tuple[float, ...], *labels: str) -> Histogram:
    return Histogram(f"magi2_{name}", text, labels, registry=REGISTRY, buckets=buckets)


HTTP_REQUESTS = _counter("http_requests_total", "Answers of the api.", "route", "method", "status_class")
HTTP_SECONDS = _histogram(
    "http_request_seconds", "Time to the end of an answer.", _QUICK, "route", "method", "status_class"
)
SUBMIT_SECONDS = _histogram("submit_seconds", "Time of a submit, by how it was answered.", _QUICK, "outcome")

FINISHED = _counter("jobs_finished_total", "Jobs that reached an end.", "profile", "outcome", "error_code")
QUEUE_WAIT = _histogram(
    "queue_wait_seconds", "From when a job could start to its claim.", _LONG, "profile", "resolution"
)
RENDER_SECONDS = _histogram(
    "render_seconds", "From the first report of a rank to the checked clip.", _LONG, "profile", "resolution"
)
UPLOAD_SECONDS = _histogram(
    "upload_seconds", "From the checked clip to the end of its upload.", _LONG, "profile", "resolution"
)
E2E_SECONDS = _histogram("e2e_seconds", "From submit to success.", _LONG, "profile", "resolution")
PHASE_SECONDS = _histogram("phase_seconds", "Phases of finished clips.", _LONG, "profile", "phase")
STEP_SECONDS = _histogram(
    "step_seconds", "Mean denoising step of a finished clip.", _STEPS, "profile", "resolution"
)

ATTEMPTS = _counter("attempts_total", "Claims.", "profile")
LEASE_LOST = _counter("lease_lost_total", "Attempts whose lease ran out.", "profile")
FENCED = _counter("fenced_writes_total", "Writes of a stale epoch; they changed nothing.", "profile")
POISON = _counter("poison_total", "Jobs given up since they crash workers.", "profile")
PREEMPTIONS = _counter("preemptions_total", "Jobs given back by a drain.", "profile")

WAVES = _counter("waves_total", "Waves that were formed.", "profile")
WAVE_GHOSTS = _counter("wave_ghosts_total", "Slots of waves without a live job.", "profile")
WAVE_WAIT = _histogram("wave_wait_seconds", "Wait of a wave's oldest member.", _LONG, "profile")

DOORBELLS = _counter("doorbells_total", "Doorbells by what the claim found.", "result")
for _result in ("claimed", "empty"):
    DOORBELLS.labels(_result)

WEBHOOK_ATTEMPTS = _counter("webhook_attempts_total", "Attempts to deliver a webhook.")
WEBHOOK_SECONDS = _histogram("webhook_seconds", "Time of an attempt.", _QUICK)
WEBHOOK_BLOCKED = _counter("webhook_blocked_total", "Attempts that the guard refused.", "reason")

SSE_CLIENTS = _gauge("sse_clients", "Open event streams of this process.")
SSE_DROPPED = _counter("sse_dropped_total", "Streams that were cut since their reader was stuck.")

STORAGE_ERRORS = _counter("storage_errors_total", "Calls of the object store that failed.")
QUOTA_REJECTIONS = _counter("quota_rejections_total", "Submits refused by a quota or a full queue.")
SWEEP_SECONDS = _histogram("sweep_seconds", "Time of a sweep.", _QUICK, "sweep")
SWEEP_SUCCESS = _gauge("sweep_last_success_timestamp", "When a sweep last ended well.", "sweep")
