"""T-13 and T-14: webhooks to flaky, dead and fast receivers, through a real ticker on real servers.

`python -m benchmarks.webhooks [--scale 1.0] [--plots docs/img]` starts PostgreSQL, Valkey, SeaweedFS, a
ticker and a receiver (`webhook_receiver.py`), each as a process of its own, and prints one JSON line per
scenario; exit 1 where a target is missed. Scenarios:

- flaky: a receiver that fails half of all requests at random, and a ticker that is killed (SIGKILL) three
  times on the way. The schedule of retries is shortened (whatever waits is made due at once), the number of
  tries is not; what is dead after ten of them is replayed.
- isolation: the delay from the state change to the healthy receiver, alone, beside 50 endpoints of another
  account that never answer, and beside 50 of its own account.
- throughput: a backlog to a fast receiver, for one endpoint with one delivery at a time (the default), for
  one with ten, and for twenty endpoints.
- backlog: the same beside a dead endpoint with 50,000 deliveries that are due.
"""

import argparse
import json
import os
import platform
import secrets
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import sqlalchemy as sa

from farm.accounts import ensure_account
from farm.db import schema
from farm.db.session import make_engine, unit_of_work
from farm.embedded.ports import free_ports
from farm.embedded.servers import EmbeddedServers, ServerSecrets
from farm.jobs.control import request_cancel
from farm.jobs.submit import Submission, submit
from farm.secretbox import seal
from farm.settings import environment, load_settings
from farm.webhooks.delivery_log import replay_range
from farm.webhooks.endpoints import HMAC, NewEndpoint, create_endpoint
from farm.webhooks.signing import new_secret
from magi2.contract import default_limits, validate

ROOT = Path(__file__).resolve().parents[1]
NUM_DEAD = 50
NUM_KILLS = 3
CHUNK = 5_000
BUCKET = "farm"
SEED = 20
TARGET_P50_S = 1.0
TARGET_PER_S = 100.0


class Bench:
    """One farm without workers: its database, its ticker, and a receiver."""

    def __init__(self, variables: dict[str, str]) -> None:
        self.environment = environment(None) | variables
        self.settings = load_settings(None, overrides=variables)
        self.engine = make_engine(self.settings, application="bench")
        self.port = free_ports(1)[0]
        self._receiver = subprocess.Popen(
            [sys.executable, ROOT / "benchmarks/webhook_receiver.py", str(self.port), str(SEED)]
        )
        self._ticker: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Start a ticker."""
        command = [sys.executable, "-m", "worker.ticker"]
        self._ticker = subprocess.Popen(command, cwd=ROOT, env=self.environment, stderr=subprocess.DEVNULL)

    def stop(self, *, is_killed: bool = False) -> None:
        """End the ticker, as a deployment or as a crash does."""
        if self._ticker is not None:
            (self._ticker.kill if is_killed else self._ticker.terminate)()
            self._ticker.wait()
            self._ticker = None

    def close(self) -> None:
        self.stop()
        self._receiver.kill()
        self._receiver.wait()
        self.engine.dispose()

    def sql(self, statement: str, **values: Any) -> Any:
        with unit_of_work(self.engine) as conn:
            result = conn.execute(sa.text(statement), values)
            return result.all() if result.returns_rows else result.rowcount

    def account(self, name: str) -> str:
        with unit_of_work(self.engine) as conn:
            return ensure_account(conn, name, {"max_queued": 10**6})

    def endpoint(self, account_id: str, path: str, max_in_flight: int = 1) -> str:
        url = f"http://127.0.0.1:{self.port}{path}"
        new = NewEndpoint(url=url, event_types=["video.canceled"], max_in_flight=max_in_flight)
        with unit_of_work(self.engine) as conn:
            sealed = {HMAC: seal(self.settings.secret_key, new_secret())}
            return create_endpoint(conn, account_id, new, sealed).id

    def cancel_one(self, account_id: str) -> str:
        """Queue a job and end it: one state change that is to be told."""
        fields = {"prompt": "A paper boat.", "resolution": "272p", "seed": 7}
        request = validate(fields, limits=default_limits()).request
        with unit_of_work(self.engine) as conn:
            job = submit(
                conn, Submission(account_id, request, "tiny-cpu", exec_timeout_s=900, retention_s=3600)
            )
        with unit_of_work(self.engine) as conn:
            request_cancel(conn, account_id, job.id, "bench")
        return job.id

    def copy_messages(self, endpoint_id: str, count: int) -> None:
        """Write many messages at once, as if that many states had changed while no ticker ran."""
        for start in range(0, count, CHUNK):
            self._copy_chunk(endpoint_id, min(CHUNK, count - start))

    def _copy_chunk(self, endpoint_id: str, count: int) -> None:
        self.sql(
            "WITH m AS (INSERT INTO webhook_message (id, account_id, type, body)"
            " SELECT 'evt_' || gen_random_uuid(), e.account_id, 'video.canceled', jsonb_build_object("
            "'id', 'evt', 'data', jsonb_build_object('id', n::text, 'object', 'video', 'state', 'canceled'))"
            " FROM webhook_endpoint e, generate_series(1, :count) n WHERE e.id = :endpoint RETURNING id)"
            " INSERT INTO webhook_delivery (id, message_id, endpoint_id)"
            " SELECT 'whd_' || gen_random_uuid(), id, :endpoint FROM m",
            endpoint=endpoint_id,
            count=count,
        )

    def count_ok(self, endpoint_ids: list[str]) -> int:
        query = "SELECT count(*) FROM webhook_delivery WHERE endpoint_id = ANY(:ids) AND status = 'ok'"
        return int(self.sql(query, ids=endpoint_ids)[0][0])

    def received(self) -> list[list[Any]]:
        with urllib.request.urlopen(f"http://127.0.0.1:{self.port}/log") as answer:
            return [json.loads(line) for line in answer.read().decode().splitlines()]

    def wipe(self) -> None:
        self.sql("TRUNCATE webhook_message, webhook_endpoint CASCADE")


@contextmanager
def running() -> Iterator[Bench]:
    """Start the servers and a bench on them."""
    directory = Path(tempfile.mkdtemp(prefix="magi2-farm-bench-"))
    directory.chmod(0o755)
    servers = EmbeddedServers(directory, environment(None), ServerSecrets.generate(), bucket=BUCKET)
    servers.start()
    bench = Bench(
        servers.variables()
        | {
            "FARM_SECRET_KEY": secrets.token_urlsafe(32),
            "FARM_KEY_PEPPER": secrets.token_urlsafe(32),
            "FARM_STATE_DIR": str(directory / "state"),
            "FARM_WEBHOOK__ALLOW_HTTP": "true",
            "FARM_WEBHOOK__ALLOW_CIDRS": "127.0.0.0/8",
        }
    )
    schema.upgrade(bench.engine)
    try:
        yield bench
    finally:
        bench.close()
        servers.stop()


def wait_until(condition: Callable[[], bool], what: str, timeout_s: float = 300.0) -> None:
    until_s = time.monotonic() + timeout_s
    while not condition():
        if time.monotonic() > until_s:
            sys.exit(f"not within {timeout_s:.0f} s: {what}")
        time.sleep(0.25)


def flaky(bench: Bench, scale: float) -> dict[str, Any]:
    """Deliver everything to a receiver that fails half of the time, and count what came."""
    num_jobs = max(20, int(500 * scale))
    account_id = bench.account("flaky")
    endpoint_id = bench.endpoint(account_id, "/flaky", max_in_flight=10)
    jobs = {bench.cancel_one(account_id) for _ in range(num_jobs)}
    bench.environment["FARM_WEBHOOK__TIMEOUT_S"] = "1"
    started_s = time.monotonic()
    num_replayed = num_kills = 0
    bench.start()
    while (num_ok := bench.count_ok([endpoint_id])) < num_jobs:
        if num_kills < NUM_KILLS and num_ok > num_jobs * (num_kills + 1) / (NUM_KILLS + 2):
            bench.stop(is_killed=True)
            num_kills += 1
            bench.sql("UPDATE webhook_delivery SET lease_until = now() WHERE status = 'leased'")
            bench.start()
        bench.sql("UPDATE webhook_delivery SET next_attempt_at = now() WHERE status = 'pending'")
        bench.sql("UPDATE webhook_endpoint SET paused_until = NULL")
        with unit_of_work(bench.engine) as conn:
            since = datetime.fromtimestamp(0, UTC)
            num_replayed += replay_range(
                conn, account_id, endpoint_id, since=since, until=None, only_failed=True
            )
        time.sleep(0.1)
    wall_s = time.monotonic() - started_s
    bench.stop()
    del bench.environment["FARM_WEBHOOK__TIMEOUT_S"]
    lines = [line for line in bench.received() if line[0] == "/flaky"]
    taken = Counter(line[1] for line in lines if line[4])
    tries = Counter(line[1] for line in lines)
    result = {
        "scenario": "flaky",
        "messages": num_jobs,
        "requests": len(lines),
        "failed_share": round(1 - sum(taken.values()) / len(lines), 3),
        "lost": len(jobs - {line[2] for line in lines if line[4]}),
        "dead_then_replayed": num_replayed,
        "taken_more_than_once": sum(count > 1 for count in taken.values()),
        "ids_of_one_video": max(Counter(video for _, video in {(x[1], x[2]) for x in lines}).values()),
        "kills": num_kills,
        "wall_s": round(wall_s, 1),
        "tries": sorted(Counter(tries.values()).items()),
    }
    result["is_met"] = result["lost"] == 0 and result["ids_of_one_video"] == 1
    bench.wipe()
    return result


def isolation(bench: Bench, scale: float) -> dict[str, Any]:
    """Measure from the state change to the healthy receiver."""
    num_events = max(5, int(60 * scale))
    delays = {}
    for name, dead_account in (("alone", None), ("50 dead elsewhere", "dead"), ("50 dead beside", "healthy")):
        healthy = bench.account("healthy")
        bench.endpoint(healthy, "/ok")
        if dead_account is not None:
            dead = bench.account(dead_account)
            for _ in range(NUM_DEAD):
                bench.endpoint(dead, "/hang")
            for _ in range(3):
                bench.cancel_one(dead)
        bench.start()
        if dead_account is not None:
            wait_until(lambda: bench.sql(_NUM_LEASED)[0][0] >= NUM_DEAD, "dead deliveries on the wire")
        delays[name] = _delays_s(bench, healthy, num_events)
        bench.stop(is_killed=True)
        bench.wipe()
    result: dict[str, Any] = {"scenario": "isolation", "events": num_events}
    for name, values in delays.items():
        result[f"{name}: p50_s"] = round(statistics.median(values), 3)
        result[f"{name}: p99_s"] = round(sorted(values)[int(len(values) * 0.99)], 3)
    result["delays_s"] = {name: [round(value, 3) for value in values] for name, values in delays.items()}
    result["is_met"] = all(statistics.median(values) <= TARGET_P50_S for values in delays.values())
    return result


_NUM_LEASED = "SELECT count(*) FROM webhook_delivery WHERE status = 'leased'"


def _delays_s(bench: Bench, account_id: str, num_events: int) -> list[float]:
    first = bench.cancel_one(account_id)  # the ticker is up when this one has come
    wait_until(lambda: any(line[2] == first for line in bench.received()), "the first delivery", 60)
    jobs = []
    for _ in range(num_events):
        jobs.append(bench.cancel_one(account_id))
        time.sleep(0.4)
    told = bench.sql(
        "SELECT job_id, extract(epoch FROM finished_at)::float8 FROM job JOIN webhook_message m"
        " ON m.job_id = job.id WHERE job.id = ANY(:jobs)",
        jobs=jobs,
    )
    ended = dict(told)

    def came() -> dict[str, float]:
        return {line[2]: line[3] for line in bench.received() if line[0] == "/ok" and line[2] in ended}

    wait_until(lambda: len(came()) == num_events, "healthy deliveries", timeout_s=60)
    return [came_s - float(ended[job_id]) for job_id, came_s in came().items()]


def throughput(bench: Bench, scale: float) -> dict[str, Any]:
    """Measure deliveries per second of a backlog."""
    count = max(100, int(2000 * scale))
    result: dict[str, Any] = {"scenario": "throughput", "messages": count}
    account_id = bench.account("fast")
    for name, num_endpoints, max_in_flight in (
        ("1 endpoint, 1 at a time", 1, 1),
        ("1 endpoint, 10 at a time", 1, 10),
        ("20 endpoints, 1 at a time", 20, 1),
    ):
        endpoint_ids = [bench.endpoint(account_id, "/ok", max_in_flight) for _ in range(num_endpoints)]
        for endpoint_id in endpoint_ids:
            bench.copy_messages(endpoint_id, count // num_endpoints)
        result[name] = round(_per_s(bench, endpoint_ids, count // num_endpoints * num_endpoints), 1)
        bench.wipe()
    result["is_met"] = result["1 endpoint, 10 at a time"] >= TARGET_PER_S
    return result


def backlog(bench: Bench, scale: float) -> dict[str, Any]:
    """Measure the same beside a dead endpoint with a long line."""
    count, num_waiting = max(100, int(2000 * scale)), max(1000, int(50_000 * scale))
    bench.copy_messages(bench.endpoint(bench.account("dead"), "/hang"), num_waiting)
    endpoint_id = bench.endpoint(bench.account("fast"), "/ok", 10)
    bench.copy_messages(endpoint_id, count)
    bench.sql("ANALYZE webhook_delivery")
    value = round(_per_s(bench, [endpoint_id], count), 1)
    bench.wipe()
    return {"scenario": "backlog", "due": num_waiting, "per_s": value, "is_met": value >= TARGET_PER_S}


def _per_s(bench: Bench, endpoint_ids: list[str], count: int) -> float:
    before = len(bench.received())
    bench.start()
    wait_until(lambda: bench.count_ok(endpoint_ids) == count, "the whole backlog")
    bench.stop(is_killed=True)
    times = sorted(line[3] for line in bench.received()[before:])
    return (len(times) - 1) / (times[-1] - times[0])


def plot(results: list[dict[str, Any]], folder: Path) -> None:
    """Draw one small picture per scenario that has something to show."""
    import matplotlib as mpl  # only where pictures are asked for

    mpl.use("Agg")
    import matplotlib.pyplot as plt

    folder.mkdir(parents=True, exist_ok=True)
    by_name = {result["scenario"]: result for result in results}
    figure, axes = plt.subplots(1, 3, figsize=(12, 3.4), dpi=80)
    if "isolation" in by_name:
        for name, values in by_name["isolation"]["delays_s"].items():
            ordered = sorted(values)
            share = [(place + 1) / len(ordered) for place in range(len(ordered))]
            axes[0].step(ordered, share, where="post", label=name)
        axes[0].axvline(TARGET_P50_S, color="grey", linestyle=":")
        axes[0].set(xlabel="s from state change to receiver", ylabel="share", title="T-13: healthy endpoint")
        axes[0].legend(fontsize=8)
    if "flaky" in by_name:
        tries, counts = zip(*by_name["flaky"]["tries"], strict=True)
        axes[1].bar(tries, counts)
        expected = [by_name["flaky"]["messages"] * 0.5**n for n in range(1, max(tries) + 1)]
        axes[1].plot(range(1, max(tries) + 1), expected, "k.", label="half of the rest each time")
        axes[1].set(xlabel="requests per message", ylabel="messages", title="T-13: fails 50 % at random")
        axes[1].legend(fontsize=8)
    if "throughput" in by_name:
        bars = {name: value for name, value in by_name["throughput"].items() if "at a time" in name}
        if "backlog" in by_name:
            bars["10 at a time, beside\n50,000 due elsewhere"] = by_name["backlog"]["per_s"]
        axes[2].barh([name.replace(", ", "\n") for name in bars], list(bars.values()))
        axes[2].axvline(TARGET_PER_S, color="grey", linestyle=":")
        axes[2].set(xlabel="deliveries/s", title="T-14: throughput")
        axes[2].tick_params(axis="y", labelsize=8)
    figure.tight_layout()
    figure.savefig(folder / "webhooks.png", metadata={"Software": None})


SCENARIOS = {"throughput": throughput, "backlog": backlog, "isolation": isolation, "flaky": flaky}


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--scale", type=float, default=1.0, help="share of the full numbers of messages")
    parser.add_argument("--plots", type=Path, help="folder for a picture")
    parser.add_argument("--only", choices=SCENARIOS, action="append", help="run these scenarios only")
    options = parser.parse_args()
    results = []
    with running() as bench:
        for name in options.only or SCENARIOS:
            result = SCENARIOS[name](bench, options.scale)
            print(json.dumps({key: value for key, value in result.items() if key != "delays_s"}), flush=True)
            results.append(result)
    machine = {"cpus": os.cpu_count(), "load": os.getloadavg()[0], "python": platform.python_version()}
    print(json.dumps({"machine": machine, "at": datetime.now(UTC).isoformat(timespec="seconds")}))
    if options.plots:
        plot(results, options.plots)
    return 0 if all(result["is_met"] for result in results) else 1


if __name__ == "__main__":
    sys.exit(main())
