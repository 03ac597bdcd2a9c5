"""What the database knows: queues, groups, outbox and webhooks, read anew for each scrape.

Lengths of queues come from SQL and never from the broker's lists; whether a group is up comes from its
heartbeat, so one whose process was killed is seen as down within 40 s. A group that is gone loses its series
after a while. Every api process answers with the same values: take `max`, not `sum`, over them.
"""

from collections.abc import Collection, Iterable, Iterator

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector
from sqlalchemy import Connection, text

from farm.jobs.states import ACTIVE, State

STATES = (State.QUEUED, *sorted(ACTIVE))
FRESH_S = 30
# A group that left is shown as down for so long, for an alert to see it; then its series end.
FORGET_GONE_S = 900

_JOBS = text(
    """
    SELECT profile, state, count(*) AS num,
           coalesce(extract(epoch FROM now() - min(greatest(queued_at, not_before))), 0)::float AS oldest_s
    FROM job WHERE state = 'queued' GROUP BY profile, state
    UNION ALL
    SELECT profile, state, count(*), 0 FROM job
    WHERE state IN ('starting', 'running', 'uploading') GROUP BY profile, state
    """
)
_GROUPS = text(
    """
    SELECT id, profile, stats,
           state <> 'gone' AND heartbeat_at > now() - make_interval(secs => :fresh_s) AS is_up
    FROM worker_group
    WHERE state <> 'gone' OR heartbeat_at > now() - make_interval(secs => :forget_s)
    ORDER BY id
    """
)
_SERVICE = text(
    """
    SELECT (SELECT count(*) FROM outbox WHERE sent_at IS NULL) AS unsent,
           (SELECT coalesce(extract(epoch FROM now() - min(created_at)), 0)::float
            FROM outbox WHERE sent_at IS NULL) AS oldest_s,
           (SELECT count(*) FROM webhook_delivery WHERE status IN ('pending', 'leased')) AS pending,
           (SELECT count(*) FROM webhook_delivery WHERE status = 'dead') AS dead
    """
)


class Reading(Collector):
    """The values of one moment, in the form that an exposition wants."""

    def __init__(self, families: Iterable[Metric]) -> None:
        """Keep them."""
        self._families = list(families)

    def collect(self) -> Iterable[Metric]:
        """Return them."""
        return self._families


def read(conn: Connection, profiles: Collection[str]) -> Reading:
    """Read everything; every profile has its series, also while nothing waits for it."""
    return Reading([*_jobs(conn, profiles), *_groups(conn), *_service(conn)])


def _jobs(conn: Connection, profiles: Collection[str]) -> Iterator[Metric]:
    rows = conn.execute(_JOBS).all()
    numbers = {(profile, state): 0 for profile in profiles for state in STATES}
    oldest = dict.fromkeys(profiles, 0.0)
    for row in rows:
        numbers[row.profile, State(row.state)] = row.num
        oldest[row.profile] = max(0.0, row.oldest_s, oldest.get(row.profile, 0.0))
    jobs = GaugeMetricFamily("magi2_jobs", "Jobs that wait or run.", labels=["profile", "state"])
    for (profile, state), number in sorted(numbers.items()):
        jobs.add_metric([profile, state.value], number)
    yield jobs
    age = GaugeMetricFamily(
        "magi2_queue_oldest_age_seconds", "How long the oldest job could have started.", labels=["profile"]
    )
    for profile, seconds in sorted(oldest.items()):
        age.add_metric([profile], seconds)
    yield age


def _groups(conn: Connection) -> Iterator[Metric]:
    """Read what agents say of their groups (`worker/health.py`); one that is down says nothing any more."""
    labels = ["group", "profile"]
    up = GaugeMetricFamily("magi2_group_up", "1 while the group's heartbeat is fresh.", labels=labels)
    busy = GaugeMetricFamily("magi2_group_busy_ratio", "Share of the last hour with a job.", labels=labels)
    restarts = CounterMetricFamily("magi2_group_restarts", "Restarts of the ranks.", labels=labels)
    memory = GaugeMetricFamily("magi2_gpu_memory_bytes", "Device memory in use, all devices.", labels=labels)
    utilization = GaugeMetricFamily(
        "magi2_gpu_utilization", "Mean utilization of the devices, 0 to 1.", labels=labels
    )
    for row in conn.execute(_GROUPS, {"fresh_s": FRESH_S, "forget_s": FORGET_GONE_S}):
        of_group = [row.id, row.profile]
        up.add_metric(of_group, float(row.is_up))
        if not row.is_up:
            continue
        busy.add_metric(of_group, row.stats.get("busy_1h", 0.0))
        restarts.add_metric(of_group, row.stats.get("restarts", 0))
        devices = row.stats.get("devices", ())
        used = [device["memory_used_bytes"] for device in devices if device["memory_used_bytes"] is not None]
        if used:
            memory.add_metric(of_group, sum(used))
        shares = [
            device["utilization_percent"] / 100
            for device in devices
            if device["utilization_percent"] is not None
        ]
        if shares:
            utilization.add_metric(of_group, sum(shares) / len(shares))
    yield from (up, busy, restarts, memory, utilization)


def _service(conn: Connection) -> Iterator[Metric]:
    row = conn.execute(_SERVICE).one()
    for name, help_text, value in (
        ("magi2_outbox_unsent", "Doorbells that wait to be sent.", row.unsent),
        ("magi2_outbox_oldest_age_seconds", "How long the oldest of them has waited.", row.oldest_s),
        ("magi2_webhook_pending", "Deliveries that are due or wait for another try.", row.pending),
        ("magi2_webhook_dead", "Deliveries that were given up.", row.dead),
    ):
        yield GaugeMetricFamily(name, help_text, value=value)
