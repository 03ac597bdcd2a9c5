"""T-05, T-06, T-07, T-09, T-10, T-11 and T-18: the queue on real servers.

`python -m benchmarks.job_queue [--scale 1.0] [--plots docs/img] [--only NAME]` starts PostgreSQL (default
fsync), Valkey and SeaweedFS, and as many apis, tickers and workers as a scenario needs, each its own process.
It prints one JSON line per row; exit 1 where a row has no number. Scenarios:

- pickup: T-05, from the request of a client to the claim by an idle worker (engine `null`), with and without
  the broker.
- throughput: T-06, 16 groups and a webhook per job. The groups are threads that do to the database all that
  an agent does (`job_queue_groups.py`): checking, cutting and storing a clip is the work of others.
  A row without a target says what one real worker does.
- claims: T-07, 32 groups at 100,000 waiting jobs of 8 accounts; PostgreSQL itself refuses a job above
  `max_running`.
- worker_loss, rank_loss, cancel: T-09, T-10 and T-11, with real workers on the engine `chaos`.
- churn: T-18, claims before and after a day's jobs (at 64 groups of 6.4 clips per hour) beside a million that
  have ended, while as many old ones are deleted.
"""

import argparse
import json
import os
import platform
import random
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import httpx
import sqlalchemy as sa

from benchmarks.job_queue_groups import PROFILE, Done, Orders, work
from farm.accounts import ensure_account
from farm.db.session import unit_of_work
from farm.jobs.job import Rules
from farm.jobs.submit import Submission, submit
from farm.retention import Retention, delete_old_jobs
from magi2.contract import GenerationRequest
from tests.chaos.farm import ChaosFarm
from tests.service.worker.harness import chaos, descendants

NUM_ACCOUNTS = 8
# Of each account; the second is fewer than the groups could take.
MAX_RUNNING, TIGHT = 20, 3
NUM_PROCESSES = 2
WAIT_S = 300.0
DAY_JOBS = 64 * 6.4 * 24
_COLUMNS = """
    id, account_id, state, profile, prompt, params, contract_version, wave_key, seed, steps, seq,
    queue_deadline, expires_in_s, exec_timeout_s, retention_s, rank_at, created_at, queued_at, finished_at
"""
_VALUES = """
    (CAST(:accounts AS text[]))[1 + n % :num], CAST(:state AS text), 'tiny-cpu', 'a fox',
    CAST(:params AS jsonb), 1, '272p/4/det=0', n, 4, 0,
    now() + interval '1 day', 86400, 900, 3600, now() - n * interval '1 ms'
"""
QUEUED_ROWS = f"""
    INSERT INTO job ({_COLUMNS}) SELECT 'video_q' || lpad(to_hex(n), 25, '0'), {_VALUES}, now(), now(), NULL
    FROM generate_series(CAST(:first AS integer), CAST(:last AS integer)) n
"""
ENDED_ROWS = f"""
    INSERT INTO job ({_COLUMNS}) SELECT 'video_0' || lpad(to_hex(n), 25, '0'), {_VALUES},
        now() - n * interval '1 s', now() - n * interval '1 s', now() - n * interval '1 s'
    FROM generate_series(CAST(:first AS integer), CAST(:last AS integer)) n
"""
COUNT_QUEUED = """
    UPDATE account_usage u SET running = 0,
        queued = (SELECT count(*) FROM job j WHERE j.account_id = u.account_id AND j.state = 'queued')
"""
MISCOUNTED = """
    SELECT account_id FROM account_usage u WHERE running <> 0
        OR queued <> (SELECT count(*) FROM job j WHERE j.account_id = u.account_id AND state = 'queued')
"""
LOADED = "SELECT 1 FROM worker_group WHERE state IN ('ready', 'busy')"
CHUNK = 10_000
Row = dict[str, Any]


class Bench:
    """A farm of its own for one scenario."""

    def __init__(self, num_of_role: dict[str, int], engine: str = "null") -> None:
        self.farm = ChaosFarm(num_of_role, engine, {}, is_guarded=False)
        self.variables = self.farm.settings_given
        self.engine = self.farm.database
        self.http = httpx.Client(
            base_url=f"http://127.0.0.1:{self.farm.api_ports[0]}"
            if self.farm.api_ports
            else "http://nowhere",
            headers={"Authorization": f"Bearer {self.farm.key}"},
            timeout=30,
            trust_env=False,
        )
        self.farm.start()

    def sql(self, statement: str, **values: Any) -> Any:
        with unit_of_work(self.engine) as conn:
            result = conn.execute(sa.text(statement), values)
            return result.all() if result.returns_rows else result.rowcount

    def accounts(self, number: int) -> list[str]:
        with unit_of_work(self.engine) as conn:
            return [ensure_account(conn, f"bench-{n}", {"max_queued": 10**7}) for n in range(number)]

    def submit(self, account_id: str) -> str:
        request = GenerationRequest("A paper boat.", "272p", 4, seed=7)
        with unit_of_work(self.engine) as conn:
            submission = Submission(account_id, request, PROFILE, exec_timeout_s=900, retention_s=3600)
            return submit(conn, submission, rules=Rules(max_queued=10**7)).id

    def post(self, prompt: str = "A paper boat.", steps: int = 1) -> str:
        fields = {"prompt": prompt, "num_inference_steps": steps, "profile": PROFILE}
        return str(self.http.post("/v1/videos", json=fields).raise_for_status().json()["id"])

    def job(self, job_id: str) -> Any:
        return self.sql("SELECT * FROM job WHERE id = :id", id=job_id)[0]

    def wait_for_state(self, job_id: str, *states: str, epoch: int = 0) -> Any:
        return wait_until(
            lambda: (job := self.job(job_id)).state in states and job.epoch >= epoch and job, f"{states}"
        )

    def wait_ready(self, number: int) -> None:
        query = "SELECT 1 FROM worker_group WHERE state = 'ready'"
        wait_until(lambda: len(self.sql(query)) == number, f"{number} idle groups")
        if self.farm.api_ports:
            wait_until(self._api_answers, "a ready api")

    def insert(self, statement: str, count: int, accounts: list[str]) -> None:
        """Insert many rows of jobs by one of the statements above."""
        params = json.dumps(GenerationRequest("a fox", "272p", 4, seed=7).to_json())
        for first in range(1, count + 1, CHUNK):
            last = min(count, first + CHUNK - 1)
            state = "queued" if statement is QUEUED_ROWS else "canceled"
            values = {"accounts": accounts, "num": len(accounts), "params": params, "state": state}
            self.sql(statement, first=first, last=last, **values)

    def close(self) -> None:
        self.http.close()
        self.farm.close(keep=False)

    def _api_answers(self) -> bool:
        try:
            return self.http.get("/readyz").status_code == 200
        except httpx.TransportError:
            return False


@contextmanager
def running(num_of_role: dict[str, int], engine: str = "null") -> Iterator[Bench]:
    """Start what a scenario needs."""
    bench = Bench({"api": 0, "ticker": 0, "worker": 0} | num_of_role, engine)
    try:
        bench.wait_ready(num_of_role.get("worker", 0))
        yield bench
    finally:
        bench.close()


def wait_until(condition: Callable[[], Any], what: str, timeout_s: float = WAIT_S) -> Any:
    until_s = time.monotonic() + timeout_s
    while not (answer := condition()):
        if time.monotonic() > until_s:
            raise TimeoutError(f"not within {timeout_s:.0f} s: {what}")
        time.sleep(0.02)
    return answer


def percentile(values: list[float], share: float) -> float:
    ordered = sorted(values)
    return round(ordered[min(len(ordered) - 1, int(len(ordered) * share))], 4)


def row(target: str, what: str, wanted: str, value: Any, *, is_met: bool | None, **more: Any) -> Row:
    return {"id": target, "what": what, "wanted": wanted, "value": value, "is_met": is_met, **more}


def pickup(scale: float) -> list[Row]:
    """Measure from the moment at which a client sends a submit to the claim."""
    chance = random.Random(5)
    with running({"api": 1, "ticker": 1, "worker": 1}) as bench:

        def measure(count: int) -> list[float]:
            found = []
            for _ in range(count):
                time.sleep(chance.uniform(0.05, 0.6))
                sent_at = time.time()
                job_id = bench.post()
                job = bench.wait_for_state(job_id, "succeeded", "failed")
                found.append(job.started_at.timestamp() - sent_at)
            return found

        measure(3)
        times = measure(max(5, int(100 * scale)))
        bench.farm.stop_broker()
        alone = measure(max(3, int(20 * scale)))
    p50, p99 = percentile(times, 0.5), percentile(times, 0.99)
    return [
        row(
            "T-05",
            "submit to claim, idle group",
            "p50 <= 0.15 s, p99 <= 1 s",
            f"p50 {p50} s, p99 {p99} s",
            is_met=p50 <= 0.15 and p99 <= 1,
            times_s=times,
        ),
        row(
            "T-05",
            "the same without Redis",
            "<= 6 s",
            f"max {max(alone):.2f} s",
            is_met=max(alone) <= 6,
            times_s=alone,
        ),
    ]


def throughput(scale: float) -> list[Row]:
    """Push jobs through 16 groups while clients submit and a ticker relays and delivers."""
    num_jobs = max(50, int(2000 * scale))
    with running({"ticker": 1}) as bench:
        bench.sql("UPDATE webhook_endpoint SET event_types = '{video.completed}', max_in_flight = 10")
        (account,) = bench.sql("SELECT id FROM account")[0]
        clients = threading.Thread(target=submit_all, args=[bench, [account] * 4, num_jobs // 4])
        clients.start()
        work(Orders(bench.variables, tuple(range(16)), Rules(max_running=1000), quiet_s=5), NUM_PROCESSES)
        clients.join()
        begun, ended, count = bench.sql(
            "SELECT min(created_at), max(finished_at), count(*) FROM job WHERE state = 'succeeded'"
        )[0]
        wait_until(
            lambda: len(bench.farm.receiver.seen["video.completed"]) == count, "all webhooks", WAIT_S * 5
        )
        (told,) = bench.sql("SELECT max(at) FROM webhook_attempt")[0]
    with running({"api": 1, "ticker": 1, "worker": 1}) as bench:
        jobs = [bench.post() for _ in range(max(3, int(30 * scale)))]
        for job_id in jobs:
            bench.wait_for_state(job_id, "succeeded")
        (alone_s,) = bench.sql("SELECT extract(epoch FROM max(finished_at) - min(started_at)) FROM job")[0]
    per_s = round(count / (max(told, ended) - begun).total_seconds(), 1)
    real = round(len(jobs) / float(alone_s), 2)
    return [
        row(
            "T-06",
            f"{count} jobs through 16 groups, events and one webhook each",
            ">= 60/s",
            f"{per_s}/s",
            is_met=per_s >= 60,
            per_s=per_s,
        ),
        row(
            "-",
            "one real worker with the null engine: render, check, cut, store",
            "none",
            f"{real}/s",
            is_met=None,
            per_s=real,
        ),
    ]


def claims(scale: float) -> list[Row]:
    """Claim against many waiting jobs with many groups at once, with room and without."""
    num_jobs, seconds = max(1000, int(100_000 * scale)), max(3.0, 30 * scale)
    with running({}) as bench:
        accounts = bench.accounts(NUM_ACCOUNTS)
        bench.insert(QUEUED_ROWS, num_jobs, accounts)
        bench.sql(COUNT_QUEUED)
        bench.sql("ANALYZE job")
        free = claim_under_limit(bench, MAX_RUNNING, seconds)
        tight = claim_under_limit(bench, TIGHT, seconds / 3)
    what = f"32 groups, {num_jobs} waiting jobs of {NUM_ACCOUNTS} accounts"
    p99_s, per_s, is_exact, value, times = free
    wanted = "p99 <= 60 ms, >= 200/s, none twice, max_running kept"
    is_fast = p99_s <= 0.06 and per_s >= 200
    return [
        row("T-07", what, wanted, value, is_met=is_fast and is_exact, times_s=times),
        row(
            "T-07",
            f"the same with max_running {TIGHT}",
            "none twice, max_running kept",
            tight[3],
            is_met=tight[2],
        ),
    ]


def claim_under_limit(
    bench: Bench, limit: int, seconds: float
) -> tuple[float, float, bool, str, list[float]]:
    """Claim for a while under a CHECK of the limit; return p99, rate, whether all was exact, text, times."""
    bench.sql("DELETE FROM job_attempt")
    bench.sql("ALTER TABLE account_usage DROP CONSTRAINT IF EXISTS bench_limit")
    bench.sql(f"ALTER TABLE account_usage ADD CONSTRAINT bench_limit CHECK (running <= {limit})")
    done = measure_claims(bench, num_groups=32, seconds=seconds, max_running=limit)
    twice = len(done.claims) - len({claim[:2] for claim in done.claims})
    first, last = bench.sql("SELECT min(started_at), max(started_at) FROM job_attempt")[0]
    wrong = len(bench.sql(MISCOUNTED))
    times = [seconds for _, _, seconds in done.claims]
    p50, p99 = percentile(times, 0.5), percentile(times, 0.99)
    per_s = round(len(times) / (last - first).total_seconds(), 1)
    value = f"p50 {p50 * 1000:.1f} ms, p99 {p99 * 1000:.1f} ms, {per_s}/s, {twice} twice, {wrong} miscounts"
    return p99, per_s, not twice and not wrong, value, times


def measure_claims(bench: Bench, *, num_groups: int, seconds: float, max_running: int = MAX_RUNNING) -> Done:
    orders = Orders(
        bench.variables,
        tuple(range(num_groups)),
        Rules(max_running=max_running),
        does_render=False,
        timeout_s=seconds,
    )
    return work(orders, NUM_PROCESSES)


def worker_loss(scale: float) -> list[Row]:
    """Kill a worker in the middle of a render and wait until another one renders."""
    times = []
    with running({"api": 1, "ticker": 1, "worker": 2}, "chaos") as bench:
        for _ in range(max(1, int(5 * scale))):
            job_id = bench.post(chaos(step_s=0.5, epochs=[1]), steps=20)
            job = bench.wait_for_state(job_id, "running")
            slot = bench.farm.slot_of(job.group_id)
            killed_at = time.time()
            bench.farm.kill(slot)
            again = bench.wait_for_state(job_id, "running", "succeeded", epoch=2)
            times.append(again.running_at.timestamp() - killed_at)
            bench.wait_for_state(job_id, "succeeded")
            bench.wait_ready(2)
    return [
        row(
            "T-09",
            f"kill -9 of a worker to running elsewhere, {len(times)} times",
            "<= 45 s",
            f"max {max(times):.1f} s",
            is_met=max(times) <= 45,
            times_s=times,
        )
    ]


def rank_loss(scale: float) -> list[Row]:
    """Kill the rank of a render; the job goes back to the queue and the group comes back."""
    requeued, ready = [], []
    for _ in range(max(1, int(3 * scale))):
        with running({"api": 1, "ticker": 1, "worker": 1}, "chaos") as bench:
            job_id = bench.post(chaos(step_s=0.5), steps=20)
            bench.wait_for_state(job_id, "running")
            rank = max(descendants(bench.farm.slots[-1].process.pid))
            killed_at = time.time()
            os.kill(rank, signal.SIGKILL)
            bench.wait_for_state(job_id, "queued")
            query = (
                "SELECT at FROM job_event WHERE job_id = :id AND type = 'queued' ORDER BY seq DESC LIMIT 1"
            )
            requeued.append(bench.sql(query, id=job_id)[0][0].timestamp() - killed_at)
            wait_until(lambda bench=bench: not bench.sql(LOADED), "the group being seen as down")
            wait_until(lambda bench=bench: bench.sql(LOADED), "the group coming back")
            ready.append(time.time() - killed_at)
    return [
        row(
            "T-10",
            f"kill -9 of a rank to the job queued again, {len(ready)} times",
            "<= 10 s",
            f"max {max(requeued):.2f} s",
            is_met=max(requeued) <= 10,
            times_s=requeued,
        ),
        row(
            "T-10",
            "the same to the group ready again",
            "<= 30 s",
            f"max {max(ready):.1f} s",
            is_met=max(ready) <= 30,
            times_s=ready,
        ),
    ]


def cancel(scale: float) -> list[Row]:
    """Cancel running and waiting jobs over HTTP."""
    step_s, running_s, queued_s = 0.5, [], []
    with running({"api": 1, "ticker": 1, "worker": 1}, "chaos") as bench:
        for _ in range(max(2, int(15 * scale))):
            job_id = bench.post(chaos(step_s=step_s), steps=20)
            bench.wait_for_state(job_id, "running")
            waiting = [bench.post() for _ in range(4)]
            for each in waiting:
                begun_s = time.perf_counter()
                bench.http.post(f"/v1/videos/{each}/cancel").raise_for_status()
                queued_s.append(time.perf_counter() - begun_s)
            sent_at = time.time()
            bench.http.post(f"/v1/videos/{job_id}/cancel").raise_for_status()
            job = bench.wait_for_state(job_id, "canceled", "succeeded")
            running_s.append(job.finished_at.timestamp() - sent_at)
            bench.wait_ready(1)
    most, waiting_p99 = max(running_s), percentile(queued_s, 0.99)
    return [
        row(
            "T-11",
            f"cancel to idle ranks, steps of {step_s} s, {len(running_s)} times",
            "<= 5 s + one step",
            f"p50 {percentile(running_s, 0.5):.2f} s, max {most:.2f} s",
            is_met=most <= 5 + step_s,
            times_s=running_s,
        ),
        row(
            "T-11",
            f"cancel of a waiting job over HTTP, {len(queued_s)} times",
            "<= 200 ms",
            f"p50 {percentile(queued_s, 0.5) * 1000:.0f} ms, p99 {waiting_p99 * 1000:.0f} ms",
            is_met=waiting_p99 <= 0.2,
            times_s=queued_s,
        ),
    ]


def churn(scale: float) -> list[Row]:
    """Compare claims on an empty table with those after a day beside a million rows, and look at the size."""
    num_rows, num_jobs = int(1_000_000 * scale), max(200, int(DAY_JOBS * scale))
    seconds = max(2.0, 15 * scale)
    with running({}) as bench:
        accounts = bench.accounts(NUM_ACCOUNTS)
        empty = p99_of_claims(bench, accounts, seconds)
        bench.sql("TRUNCATE job CASCADE")
        bench.sql("UPDATE account_usage SET queued = 0, running = 0")
        bench.insert(ENDED_ROWS, num_rows, accounts)
        bench.sql("ANALYZE job")
        run_a_day(bench, accounts, num_jobs, num_rows)
        full = p99_of_claims(bench, accounts, seconds)
        sizes = {}
        for table in ("job", "job_event", "account_usage", "outbox"):
            (before,) = bench.sql(f"SELECT pg_total_relation_size('{table}')")[0]
            with bench.engine.connect().execution_options(isolation_level="AUTOCOMMIT") as conn:
                conn.exec_driver_sql("SET statement_timeout = 0")
                conn.exec_driver_sql(f"VACUUM FULL {table}")
            (after,) = bench.sql(f"SELECT pg_total_relation_size('{table}')")[0]
            sizes[table] = round(before / after, 2)
    ratio = round(full / empty, 2)
    return [
        row(
            "T-18",
            f"p99 of a claim (8 groups) beside {num_rows} ended jobs and after {num_jobs} more",
            "within 2 x of the empty table",
            f"{full * 1000:.1f} ms after {empty * 1000:.1f} ms: {ratio} x",
            is_met=ratio <= 2,
            ratio=ratio,
        ),
        row(
            "T-18",
            "size of job over its size after VACUUM FULL",
            "< 2 x",
            f"{sizes['job']} x",
            is_met=sizes["job"] < 2,
            sizes=sizes,
        ),
    ]


def p99_of_claims(bench: Bench, accounts: list[str], seconds: float) -> float:
    """Queue enough for a moment, claim, and return the p99 in seconds."""
    bench.sql("DELETE FROM job WHERE id LIKE 'video_q%'")
    bench.insert(QUEUED_ROWS, max(500, int(seconds * 400)), accounts)
    bench.sql(COUNT_QUEUED)
    done = measure_claims(bench, num_groups=8, seconds=seconds)
    bench.sql("DELETE FROM job WHERE state = 'queued'")
    bench.sql("UPDATE account_usage SET queued = 0")
    return percentile([seconds for _, _, seconds in done.claims], 0.99)


def run_a_day(bench: Bench, accounts: list[str], num_jobs: int, num_rows: int) -> None:
    """Submit and render a day's jobs, and let as many old ones go, in small steps as the sweep does."""
    rounds = max(2, min(10, num_jobs // 500))
    share = num_jobs // rounds
    for number in range(rounds):
        submit_all(bench, accounts, share // len(accounts))
        work(Orders(bench.variables, tuple(range(16)), Rules(max_running=1000), num_beats=4), NUM_PROCESSES)
        days = (num_rows - share * (number + 1)) / 86_400
        while delete_some(bench, Retention(days, days)):
            pass


def submit_all(bench: Bench, accounts: list[str], per_account: int) -> None:
    def act(account_id: str) -> None:
        for _ in range(per_account):
            bench.submit(account_id)

    threads = [threading.Thread(target=act, args=[account_id]) for account_id in accounts]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def delete_some(bench: Bench, kept: Retention) -> int:
    with unit_of_work(bench.engine) as conn:
        return delete_old_jobs(conn, kept)


SCENARIOS = {
    "pickup": pickup,
    "throughput": throughput,
    "claims": claims,
    "worker_loss": worker_loss,
    "rank_loss": rank_loss,
    "cancel": cancel,
    "churn": churn,
}


def plot(rows: list[Row], folder: Path) -> None:
    """Draw how the times of each row are spread, beside their limit."""
    import matplotlib as mpl  # only where pictures are asked for

    mpl.use("Agg")
    import matplotlib.pyplot as plt

    folder.mkdir(parents=True, exist_ok=True)
    panels = [
        ("T-05", "s from submit to claim", 1.0),
        ("T-07", "s per claim", 0.06),
        ("T-09", "s to running elsewhere", 45.0),
        ("T-11", "s from cancel to end", 5.5),
    ]
    figure, axes = plt.subplots(1, len(panels), figsize=(14, 3.4), dpi=80)
    for axis, (target, label, limit) in zip(axes, panels, strict=True):
        for each in rows:
            if each["id"] == target and each.get("times_s"):
                ordered = sorted(each["times_s"])
                share = [(place + 1) / len(ordered) for place in range(len(ordered))]
                axis.step(ordered, share, where="post", label=each["what"][:34])
        axis.axvline(limit, color="grey", linestyle=":")
        axis.set(xlabel=label, ylabel="share", title=target)
        if axis.get_legend_handles_labels()[0]:
            axis.legend(fontsize=7)
    figure.tight_layout()
    figure.savefig(folder / "queue.png", metadata={"Software": None})


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--scale", type=float, default=1.0, help="share of the full numbers")
    parser.add_argument("--plots", type=Path, help="folder for a picture")
    parser.add_argument("--only", choices=SCENARIOS, action="append", help="run these scenarios only")
    options = parser.parse_args(argv)
    rows: list[Row] = []
    for name in options.only or SCENARIOS:
        try:
            found = SCENARIOS[name](options.scale)
        except TimeoutError as error:
            found = [row(name, name, "", None, is_met=False, error=str(error))]
        for each in found:
            each["load"] = round(os.getloadavg()[0], 1)
            print(json.dumps({key: value for key, value in each.items() if key != "times_s"}), flush=True)
        rows += found
    machine = {"cpus": os.cpu_count(), "python": platform.python_version(), "scale": options.scale}
    print(json.dumps({"machine": machine, "at": datetime.now(UTC).isoformat(timespec="seconds")}))
    if options.plots:
        plot(rows, options.plots)
    return 1 if any(each["value"] is None for each in rows) else 0


if __name__ == "__main__":
    sys.exit(main())
