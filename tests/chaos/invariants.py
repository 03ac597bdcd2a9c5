"""What must hold after every run, however it was disturbed: I1 to I12 of the farm's specification.

`breaches` returns what is wrong by the name of the invariant, so that a run can report all of it. Rows are
judged by the queries of `tests/row_invariants.py`; here are the invariants that need the object store, the
broker, processes, logs or what a client saw. I9 is no end state: it is sampled while the run lasts.
"""

import hashlib
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import redis
from sqlalchemy import Engine, text

from farm.db.session import unit_of_work
from farm.doorbell import queue_of
from farm.jobs.states import TERMINAL
from farm.storage import ObjectMissingError, ObjectStore
from tests.row_invariants import IN_FLIGHT, NEVER
from worker.group_folder import ProcessMark

NAMES = tuple(f"I{number}" for number in range(1, 13))
MAX_TTL_S = 3600
LEASE_GRACE_S = 45
# What Celery keeps under names of its own, however many messages there are.
CELERY_KEYS = ("_kombu.binding.", "unacked", queue_of(""))
PRESIGNED = "X-Amz-Signature="
# Everything that is kept as free text or JSON and shown or sent to somebody.
_TEXTS = (
    "SELECT data::text FROM job_event",
    "SELECT coalesce(error::text, '') || coalesce(timings::text, '') FROM job_attempt",
    "SELECT coalesce(error::text, '') || coalesce(result::text, '') FROM job",
    "SELECT body::text FROM webhook_message",
    "SELECT coalesce(error, '') || payload::text FROM outbox",
    "SELECT coalesce(error, '') || coalesce(response_excerpt, '') FROM webhook_attempt",
)
_WITHOUT_LEASE = text(
    "SELECT id FROM job WHERE state IN ('starting', 'running', 'uploading')"
    " AND lease_until < clock_timestamp() - make_interval(secs => :grace_s)"
)

Breaches = dict[str, list[str]]


@dataclass
class Traces:
    """What a run leaves behind outside rows and objects."""

    accepted: set[str] = field(default_factory=set)  # ids that a client saw in a 2xx
    leaseless: set[str] = field(default_factory=set)  # ids that I9's samples found
    dead: set[ProcessMark] = field(default_factory=set)  # processes of agents that were killed or ended
    secrets: Mapping[str, str] = field(default_factory=dict)  # name -> value
    logs: Collection[Path] = ()
    pages: Mapping[str, str] = field(default_factory=dict)  # path -> what it answered
    keys_before: set[str] = field(default_factory=set)  # of the broker, before anything was submitted


def breaches(
    database: Engine, store: ObjectStore, broker: redis.Redis, listed: Collection[str], traces: Traces
) -> Breaches:
    """Check everything; the lists of all twelve are empty where nothing is wrong.

    Args:
        database: Of the farm, at rest.
        store: Of the farm.
        broker: Of the farm.
        listed: Every key in the store, after the reaper.
        traces: What else is known of the run.
    """
    found: Breaches = {name: [] for name in NAMES}
    for name, query in NEVER.items():
        found[name.split()[0]] += [f"{name}: {row}" for row in _rows(database, query)]
    found["I1"] += never_ended(database, traces.accepted)
    kept, wrong = check_objects(database, store)
    found["I4"] += wrong
    found["I5"] += sorted(set(listed) - kept)
    found["I9"] += sorted(traces.leaseless)
    found["I10"] += [str(mark) for mark in traces.dead if mark.is_alive()]
    found["I11"] += check_keys(broker, traces.keys_before)
    found["I12"] += leaked(database, traces)
    return found


def never_ended(database: Engine, accepted: Iterable[str]) -> list[str]:
    """Find accepted jobs that do not exist or have not ended, and what ended jobs still hold (I1)."""
    states = {row.id: row.state for row in _rows(database, "SELECT id, state FROM job")}
    lost = [f"{job_id}: lost" for job_id in accepted if job_id not in states]
    alive = [f"{job_id}: {state}" for job_id, state in states.items() if state not in TERMINAL]
    return lost + alive + [f"{row}: an open attempt" for row in _rows(database, IN_FLIGHT)]


def check_objects(database: Engine, store: ObjectStore) -> tuple[set[str], list[str]]:
    """Return the keys that rows name, and those whose object is missing or another (I4)."""
    rows = _rows(database, "SELECT key, sha256, bytes FROM asset WHERE deleted_at IS NULL")
    wrong = []
    for row in rows:
        try:
            body = store.open_range(row.key).read()
        except ObjectMissingError:
            wrong.append(f"{row.key}: missing")
            continue
        if (len(body), hashlib.sha256(body).hexdigest()) != (row.bytes, row.sha256):
            wrong.append(f"{row.key}: not what its row says")
    return {row.key for row in rows}, wrong


def sample_leases(database: Engine, traces: Traces) -> None:
    """Note active jobs that nobody has kept alive or taken back for too long (I9)."""
    with unit_of_work(database) as conn:
        traces.leaseless |= set(conn.execute(_WITHOUT_LEASE, {"grace_s": LEASE_GRACE_S}).scalars())


def lasting_keys(broker: redis.Redis) -> set[str]:
    """Return the keys that do not go away by themselves and are not Celery's."""
    return {key for key in _keys(broker) if not key.startswith(CELERY_KEYS) and broker.ttl(key) == -1}


def check_keys(broker: redis.Redis, before: set[str]) -> list[str]:
    """Find keys that would stay for ever, or for longer than any should (I11)."""
    wrong = [f"{key}: no time to live" for key in lasting_keys(broker) - before]
    wrong += [f"{key}: lives too long" for key in _keys(broker) if broker.ttl(key) > MAX_TTL_S]
    own = {key for key in _keys(broker) if key.startswith(CELERY_KEYS)}
    known = {key for key in before if key.startswith(CELERY_KEYS)}
    fixed = {"unacked", "unacked_index", "unacked_mutex"}
    return wrong + [f"{key}: a new key of Celery" for key in own - known - fixed]


def all_keys(broker: redis.Redis) -> set[str]:
    """Return every key there is."""
    return set(_keys(broker))


def leaked(database: Engine, traces: Traces) -> list[str]:
    """Find secrets in logs, stored texts and pages, and presigned links in logs (I12)."""
    places = {str(path): path.read_text("utf-8", "replace") for path in traces.logs}
    wrong = [f"{place}: a presigned link" for place, content in places.items() if PRESIGNED in content]
    for query in _TEXTS:
        places[query] = "\n".join(row[0] for row in _rows(database, query))
    places |= traces.pages
    for name, secret in traces.secrets.items():
        wrong += [f"{place}: {name}" for place, content in places.items() if secret in content]
    return wrong


def _keys(broker: redis.Redis) -> list[str]:
    return [key.decode() for key in broker.scan_iter(count=1000)]


def _rows(database: Engine, query: str):
    with unit_of_work(database) as conn:
        return conn.execute(text(query)).all()
