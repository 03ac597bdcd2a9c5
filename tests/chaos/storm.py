"""T-08: a whole farm under constant kills, in which no job is lost, doubled or told twice.

`python -m tests.chaos.storm [--jobs 1000] [--seeds 1 2 3] [--engine chaos|magi2] [--json FILE]`. Clients
submit over HTTP with idempotency keys; a random process of a random role is killed every five seconds; the
broker is killed three times and emptied once, and PostgreSQL is ended without a checkpoint once. When all
jobs have ended, all invariants (`invariants.py`) are checked. It prints a line of progress every ten seconds,
and exits 1 if anything is wrong; the folder with all logs is kept then.

A seed decides who is killed when, when the servers fail, which job takes how long and which ones have an
image: the same seed is the same storm, though not the same interleaving.
"""

import argparse
import io
import json
import os
import platform
import random
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import httpx
from PIL import Image
from sqlalchemy import text
from sqlalchemy.exc import SQLAlchemyError

from farm.db.session import unit_of_work
from farm.jobs.states import TERMINAL
from tests.chaos.farm import PROFILE, ROOT, ChaosFarm
from tests.chaos.invariants import Breaches, Traces, all_keys, breaches, sample_leases
from worker.sweeps import Sweeper, sweep_deleted, sweep_lost_attempts

TICK_S = 0.1
SAMPLE_S = 1.0
SAY_S = 10.0
NUM_CLIENTS = 4
STEPS = 4
IMAGE_EVERY = 25
NEVER_DELIVERED = "SELECT count(*) FROM webhook_delivery WHERE status NOT IN ('ok', 'canceled')"
READY = "SELECT count(*) FROM worker_group WHERE state = 'ready' AND heartbeat_at > now() - interval '20 s'"
# A render of the real engine takes long: workers are killed as often as any other process.
REAL = {"is_by_role": False, "apis": 3, "tickers": 3, "timeout_s": 7200.0}
# Whatever a restart or a kill may make a client see; it repeats the request under the same key.
AGAIN = frozenset({409, 429, 500, 502, 503, 504})


@dataclass(frozen=True)
class Plan:
    """What a storm does; everything random in it comes from the seed."""

    jobs: int = 1000
    seed: int = 1
    engine: str = "chaos"
    apis: int = 2
    tickers: int = 2
    workers: int = 3
    kill_every_s: float = 5.0
    is_by_role: bool = True  # a random role first, then one of its processes; otherwise any process
    submits_per_s: float = 4.0
    shortest_s: float = 0.1
    longest_s: float = 2.0
    lease_s: float = 30.0
    heartbeat_s: float = 5.0
    num_broker_restarts: int = 3
    timeout_s: float = 3600.0
    settle_s: float = 300.0


@dataclass
class Report:
    """What came of a storm."""

    plan: Plan
    at: str
    machine: dict[str, Any]
    kills: Counter[str] = field(default_factory=Counter)
    outages: list[str] = field(default_factory=list)
    refusals: Counter[str] = field(default_factory=Counter)  # answers and failures that made a client repeat
    wall_s: float = 0.0
    states: dict[str, int] = field(default_factory=dict)
    attempts: int = 0
    wasted_renders: int = 0
    most_attempts_of_a_job: int = 0
    breaches: Breaches = field(default_factory=dict)
    wrong: list[str] = field(default_factory=list)

    @property
    def is_clean(self) -> bool:
        return not self.wrong and not any(self.breaches.values())

    def to_json(self) -> dict[str, Any]:
        counted = {"kills": dict(self.kills), "refusals": dict(self.refusals), "is_clean": self.is_clean}
        return asdict(replace(self, kills=Counter(), refusals=Counter())) | counted


class Client(threading.Thread):
    """Submits its share of the jobs, each until it is accepted once."""

    def __init__(self, storm: "Storm", number: int) -> None:
        super().__init__(name=f"client{number}")
        self._storm, self._number = storm, number
        self.accepted: dict[int, str] = {}
        self.refusals: Counter[str] = Counter()
        self.failure = ""

    def run(self) -> None:
        storm, farm = self._storm, self._storm.farm
        headers = {"Authorization": f"Bearer {farm.key}"}
        with httpx.Client(headers=headers, timeout=30, trust_env=False) as http:
            for job in range(self._number, storm.plan.jobs, NUM_CLIENTS):
                storm.leaving.wait(
                    max(0.0, storm.begun_s + job / storm.plan.submits_per_s - time.monotonic())
                )
                while job not in self.accepted and not self.failure:
                    if storm.leaving.is_set():
                        return
                    self._submit(http, job)

    def _submit(self, http: httpx.Client, job: int) -> None:
        port = random.choice(self._storm.farm.api_ports)
        headers = {"Idempotency-Key": f"storm-{job}"}
        try:
            answer = http.post(
                f"http://127.0.0.1:{port}/v1/videos", headers=headers, **self._storm.request(job)
            )
        except httpx.HTTPError as error:
            self._repeat(type(error).__name__)
            return
        if answer.status_code == 200:
            self.accepted[job] = answer.json()["id"]
        elif answer.status_code in AGAIN:
            self._repeat(f"{answer.status_code} {answer.json().get('code')}")
        else:
            self.failure = f"job {job}: {answer.status_code} {answer.text[:300]}"

    def _repeat(self, why: str) -> None:
        self.refusals[why] += 1
        self._storm.leaving.wait(0.2)


class Storm:
    """One run of a plan."""

    def __init__(self, plan: Plan, variables: dict[str, str] | None = None) -> None:
        self.plan = plan
        self.leaving = threading.Event()
        self.begun_s = time.monotonic()
        leases = {
            "FARM_WORKER__LEASE_S": str(plan.lease_s),
            "FARM_WORKER__HEARTBEAT_S": str(plan.heartbeat_s),
        }
        num_of_role = {"api": plan.apis, "ticker": plan.tickers, "worker": plan.workers}
        self.farm = ChaosFarm(num_of_role, plan.engine, leases | (variables or {}))
        self._traces = Traces(dead=self.farm.dead, secrets=self.farm.secrets())
        self._chance = random.Random(plan.seed)
        self._jobs = [self._make_request(number) for number in range(plan.jobs)]
        self._outages = self._draw_outages()
        self._clients = [Client(self, number) for number in range(NUM_CLIENTS)]
        self._counts: Counter[str] = Counter()
        machine = {"cpus": os.cpu_count(), "python": platform.python_version(), "load": os.getloadavg()[0]}
        self.report = Report(plan, datetime.now(UTC).isoformat(timespec="seconds"), machine)

    def request(self, job: int) -> dict[str, Any]:
        """Return what httpx needs to submit a job."""
        return self._jobs[job]

    def run(self) -> Report:
        """Let it blow until all jobs have ended, then look what is left."""
        farm, report = self.farm, self.report
        try:
            farm.start()
            self._wait("idle groups", self._all_ready, self.plan.settle_s)
            self._wait("answers of all roles", self._all_answer, self.plan.settle_s)
            self._traces.keys_before = all_keys(farm.broker)
            self.begun_s = time.monotonic()
            for client in self._clients:
                client.start()
            self._blow()
            report.wall_s = round(time.monotonic() - self.begun_s, 1)
            self._settle()
            self._judge()
        finally:
            self.leaving.set()
            for client in self._clients:
                if client.ident is not None:
                    client.join()
            farm.close(keep=not report.is_clean)
        if not report.is_clean:
            report.wrong.append(f"logs are kept in {farm.directory}")
        return report

    def _blow(self) -> None:
        """Kill and restart until every job has ended."""
        next_kill_s = time.monotonic() + self.plan.kill_every_s
        next_sample_s = next_say_s = 0.0
        while not self._is_over():
            now_s = time.monotonic()
            if now_s > self.begun_s + self.plan.timeout_s:
                self.report.wrong.append(f"not over within {self.plan.timeout_s:.0f} s: {dict(self._counts)}")
                return
            self.report.wrong += self.farm.fallen()
            if now_s >= next_sample_s:
                self._sample()
                next_sample_s = now_s + SAMPLE_S
            if now_s >= next_kill_s:
                self._kill()
                next_kill_s = now_s + self.plan.kill_every_s
            self._break_what_is_due()
            if now_s >= next_say_s:
                self._say()
                next_say_s = now_s + SAY_S
            time.sleep(TICK_S)

    def _is_over(self) -> bool:
        if any(client.failure for client in self._clients):
            self.report.wrong += [client.failure for client in self._clients if client.failure]
            return True
        num_accepted = sum(len(client.accepted) for client in self._clients)
        return num_accepted == self.plan.jobs and self._num_ended() == self.plan.jobs and not self._outages

    def _num_ended(self) -> int:
        return sum(self._counts[state] for state in TERMINAL)

    def _kill(self) -> None:
        slots = self.farm.slots
        if self.plan.is_by_role:
            role = self._chance.choice(("api", "ticker", "worker"))
            slots = [slot for slot in slots if slot.role == role]
        slot = self._chance.choice(slots)
        self.farm.kill(slot)
        self.report.kills[slot.role] += 1

    def _draw_outages(self) -> list[tuple[float, str]]:
        """Spread the failures of servers over the run, by the share of jobs that have ended."""
        kinds = ["broker"] * self.plan.num_broker_restarts + ["flush", "database"]
        self._chance.shuffle(kinds)
        width = 0.8 / len(kinds)
        return [(0.05 + width * (number + self._chance.random()), kind) for number, kind in enumerate(kinds)]

    def _break_what_is_due(self) -> None:
        if self._outages and self._num_ended() >= self._outages[0][0] * self.plan.jobs:
            _, kind = self._outages.pop(0)
            acts: dict[str, Callable[[], None]] = {
                "broker": self.farm.restart_broker,
                "flush": self.farm.flush_broker,
                "database": self.farm.restart_database,
            }
            acts[kind]()
            self.report.outages.append(f"{kind} at {time.monotonic() - self.begun_s:.0f} s")

    def _sample(self) -> None:
        """Count jobs by state and look for jobs that nobody holds; a database that recovers answers later."""
        try:
            with unit_of_work(self.farm.database) as conn:
                rows = conn.execute(text("SELECT state, count(*) FROM job GROUP BY state")).all()
            sample_leases(self.farm.database, self._traces)
        except SQLAlchemyError:
            return
        self._counts = Counter({row[0]: row[1] for row in rows})

    def _say(self) -> None:
        seconds = time.monotonic() - self.begun_s
        say(
            f"seed {self.plan.seed} {seconds:6.0f} s  {self._num_ended()}/{self.plan.jobs} ended"
            f"  {dict(self._counts)}  kills {dict(self.report.kills)}"
            f"  outages {len(self.report.outages)}  load {os.getloadavg()[0]:.1f}"
        )

    def _settle(self) -> None:
        """Let what is under way come to rest: deliveries, groups, and the reaper of objects."""
        self._wait("the last webhook", lambda: self._count(NEVER_DELIVERED) == 0, self.plan.settle_s)
        self._wait("idle groups", self._all_ready, self.plan.settle_s)
        self._wait("answers of all roles", self._all_answer, self.plan.settle_s)
        for client in self._clients:
            client.join()
            self._traces.accepted |= set(client.accepted.values())
            self.report.refusals.update(client.refusals)
        sweeper = Sweeper(self.farm.database, self.farm.store, self.farm.settings.rules())
        sweep_lost_attempts(sweeper)
        sweep_deleted(sweeper)
        self._traces.pages = self._fetch_pages()

    def _judge(self) -> None:
        """Check what T-08 promises, then all invariants, then that everything ends well."""
        report, farm = self.report, self.farm
        self._sample()
        report.states = dict(self._counts)
        attempts = (
            "SELECT count(*), count(*) FILTER (WHERE outcome <> 'succeeded' AND running_at IS NOT NULL)"
        )
        with unit_of_work(farm.database) as conn:
            row = conn.execute(text(f"{attempts} FROM job_attempt")).one()
            report.attempts, report.wasted_renders = row[0], row[1]
            most = text("SELECT coalesce(max(epoch), 0) FROM job")
            report.most_attempts_of_a_job = conn.execute(most).scalar_one()
        if report.states != {"succeeded": self.plan.jobs}:
            report.wrong.append(f"not all succeeded: {report.states}")
        if len(self._traces.accepted) != self.plan.jobs:
            report.wrong.append(f"{len(self._traces.accepted)} videos for {self.plan.jobs} keys")
        if report.wasted_renders > report.kills["worker"]:
            report.wrong.append("more renders were wasted than workers were killed")
        told = farm.receiver.seen["video.completed"]
        report.wrong += [f"{job_id} was told under {ids}" for job_id, ids in told.items() if len(ids) != 1]
        report.wrong += [f"{job_id} was never told" for job_id in self._traces.accepted - set(told)]
        logs_at_rest = farm.stop()
        self._traces.logs = farm.logs()
        listed = farm.stored_keys()
        report.breaches = breaches(farm.database, farm.store, farm.broker, listed, self._traces)
        report.wrong += logs_at_rest

    def _all_ready(self) -> bool:
        return self._count(READY) == self.plan.workers

    def _all_answer(self) -> bool:
        urls = [f"http://127.0.0.1:{port}/readyz" for port in self.farm.api_ports]
        urls += [f"http://127.0.0.1:{port}/metrics" for port in self.farm.metrics_ports]
        try:
            with httpx.Client(timeout=30, trust_env=False) as http:
                return all(http.get(url).status_code == 200 for url in urls)
        except httpx.TransportError:
            return False

    def _count(self, query: str) -> int:
        with unit_of_work(self.farm.database) as conn:
            number: int = conn.execute(text(query)).scalar_one()
            return number

    def _wait(self, what: str, condition: Callable[[], bool], timeout_s: float) -> None:
        until_s = time.monotonic() + timeout_s
        while not condition():
            self.report.wrong += self.farm.fallen()
            if time.monotonic() > until_s:
                self.report.wrong.append(f"not within {timeout_s:.0f} s: {what}")
                return
            time.sleep(TICK_S)

    def _fetch_pages(self) -> dict[str, str]:
        """Return what the pages answer that anybody or the account may see."""
        paths = [
            "/livez",
            "/readyz",
            "/openapi.json",
            "/docs",
            "/metrics",
            "/admin/login",
            "/v1/videos?limit=100",
        ]
        some = [f"/v1/videos/{job_id}" for job_id in sorted(self._traces.accepted)[:20]]
        paths += [*some, *(f"{path}/timeline" for path in some)]
        base = f"http://127.0.0.1:{self.farm.api_ports[0]}"
        urls = [base + path for path in paths]
        urls += [f"http://127.0.0.1:{port}/metrics" for port in self.farm.metrics_ports]
        headers = {"Authorization": f"Bearer {self.farm.key}"}
        with httpx.Client(headers=headers, timeout=30, trust_env=False, follow_redirects=True) as http:
            return {url: http.get(url).text for url in urls}

    def _make_request(self, number: int) -> dict[str, Any]:
        seconds = self._chance.uniform(self.plan.shortest_s, self.plan.longest_s)
        steps = STEPS if self.plan.engine == "chaos" else 1
        script = {"step_s": round(seconds / steps, 3)}
        prompt = "chaos " + json.dumps(script) if self.plan.engine == "chaos" else "A kite over dunes."
        fields = {
            "prompt": prompt,
            "num_inference_steps": str(steps),
            "seed": str(number),
            "profile": PROFILE,
        }
        if number % IMAGE_EVERY == self.plan.seed % IMAGE_EVERY:
            return {"data": fields, "files": {"input_reference": ("view.png", _png(number), "image/png")}}
        return {"json": fields | {"num_inference_steps": steps, "seed": number}}


def _png(number: int) -> bytes:
    file = io.BytesIO()
    Image.new("RGB", (512, 320), (number % 256, 90, 160)).save(file, "PNG")
    return file.getvalue()


def short_checkpoint(folder: Path) -> dict[str, str]:
    """Make a checkpoint for the real engine and return the variable that names it.

    It has two of the tiny one's five layers, one of each kind: a render must fit between two kills of its
    worker on the machine that runs everything else too.
    """
    target = folder / "short-checkpoint"
    if not target.exists():
        # In a process of its own: this one has no need of torch.
        make = f"from tests.short_checkpoint import *; write_short_checkpoint(Path({str(target)!r}))"
        subprocess.run([sys.executable, "-c", make], cwd=ROOT, check=True)
    return {"MAGI2_CKPT_ROOT": str(target)}


def say(line: str) -> None:
    """Print a line at once."""
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


def main(argv: Iterable[str] | None = None) -> int:
    """Run one storm for every seed; return 1 if one of them left something wrong."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--jobs", type=int, default=1000)
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--engine", choices=("chaos", "magi2"), default="chaos")
    parser.add_argument("--workers", type=int, default=3)
    parser.add_argument("--kill-every", type=float, default=5.0, help="seconds between kills")
    parser.add_argument("--state", type=Path, default=Path(".state"), help="folder of the checkpoint")
    parser.add_argument("--json", type=Path, help="file that gets the reports of all seeds")
    options = parser.parse_args(None if argv is None else list(argv))
    variables = short_checkpoint(options.state.resolve()) if options.engine == "magi2" else {}
    reports = []
    for seed in options.seeds:
        plan = Plan(
            jobs=options.jobs,
            seed=seed,
            engine=options.engine,
            workers=options.workers,
            kill_every_s=options.kill_every,
            **(REAL if options.engine == "magi2" else {}),
        )
        reports.append(Storm(plan, variables).run().to_json())
        say(json.dumps(reports[-1]))
        if options.json:
            options.json.write_text(json.dumps(reports, indent=1))
    return 0 if all(report["is_clean"] for report in reports) else 1


if __name__ == "__main__":
    sys.exit(main())
