"""T-01 to T-04, T-12, T-15, T-17, T-19 and T-20: the api on real servers, under load.

`python -m benchmarks.api [--seconds 20] [--rows 1000000] [--plots docs/img]` starts PostgreSQL, Valkey and
SeaweedFS and one api process, each a process of its own, and prints one JSON line per target; exit 1 where a
number is missing or a request was lost. Eight accounts submit in turn: the submits of one account wait for
each other, each for the commit of the one before, because that is what makes its quota exact. T-01, T-03 and
T-12 are open loops; T-12 takes Redis away for `--seconds`, not for ten minutes. The limits of rates and
queues are lifted.
"""

import argparse
import asyncio
import io
import json
import os
import platform
import random
import secrets
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import sqlalchemy as sa
from PIL import Image

from api.dashboard.access import COOKIE, HOME
from benchmarks.http_load import Outcome, ask_json, closed_loop, open_loop, request_bytes
from farm.accounts import create_key, ensure_account
from farm.admin_sessions import open_session
from farm.admins import Role, hash_password
from farm.admins import create as create_admin
from farm.db import schema
from farm.db.session import make_engine, unit_of_work
from farm.embedded.ports import free_ports
from farm.embedded.servers import EmbeddedServers, ServerSecrets
from farm.groups import Group, heartbeat, register
from farm.jobs.control import request_cancel
from farm.settings import environment, load_settings

ROOT = Path(__file__).resolve().parents[1]
BODY = {
    "prompt": "A red fox walks through fresh snow.",
    "size": "448x256",
    "num_inference_steps": 4,
    "profile": "tiny-cpu",
}
NUM_ACCOUNTS = 8
NUM_GROUPS = 16
NUM_STREAMS, NUM_STALLED, STREAMS_PER_KEY = 500, 20, 20
TERMINAL_ROWS = """
    INSERT INTO job (id, account_id, state, profile, prompt, params, contract_version, wave_key, seed, steps,
        queue_deadline, expires_in_s, exec_timeout_s, retention_s, rank_at, created_at, finished_at)
    SELECT 'video_0' || lpad(to_hex(n), 25, '0'), :account, 'canceled', 'tiny-cpu', 'a fox',
        CAST(:params AS jsonb), 1, 'x', n, 4,
        now(), 86400, 900, 3600, now(), now() - n * interval '1 second', now()
    FROM generate_series(CAST(:first AS integer), CAST(:last AS integer)) n
"""


class Bench:
    """One api process on servers of its own, and an account without limits."""

    def __init__(self, servers: EmbeddedServers, variables: dict[str, str]) -> None:
        self.servers = servers
        self.port = free_ports(1)[0]
        variables = variables | {"FARM_API_PORT": str(self.port)}
        self.environment = environment(None) | variables
        self.settings = load_settings(None, overrides=variables)
        self.engine = make_engine(self.settings, application="ticker")  # for its longer time-out
        self.process: subprocess.Popen[bytes] | None = None
        schema.upgrade(self.engine)
        self.account_id, self.key = self.new_account("bench")
        self.keys = [self.key, *(self.new_account(f"bench-{number}")[1] for number in range(1, NUM_ACCOUNTS))]
        self.started_s = self.start()

    def new_account(self, name: str) -> tuple[str, str]:
        with unit_of_work(self.engine) as conn:
            account_id = ensure_account(conn, name, {"max_queued": 10**7})
        return account_id, self.new_key(account_id)

    def new_key(self, account_id: str) -> str:
        with unit_of_work(self.engine) as conn:
            return create_key(conn, account_id, self.settings.key_pepper).text

    def start(self) -> float:
        """Start the api and return the seconds until it is ready."""
        begun_s = time.perf_counter()
        command = [sys.executable, "-m", "api"]
        self.process = subprocess.Popen(
            command, cwd=ROOT, env=self.environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        while True:
            try:
                asyncio.run(ask_json(self.port, request_bytes("GET", "/readyz", self.key)))
            except (OSError, AssertionError):
                time.sleep(0.02)
            else:
                return time.perf_counter() - begun_s

    def stop(self) -> float:
        """Send SIGTERM and return the seconds until the process has ended."""
        begun_s = time.perf_counter()
        self.process.send_signal(signal.SIGTERM)
        self.process.wait(60)
        return time.perf_counter() - begun_s

    def submit(self, number: int) -> bytes:
        body = json.dumps({**BODY, "seed": number}).encode()
        return request_bytes("POST", "/v1/videos", self.keys[number % NUM_ACCOUNTS], body)

    def sql(self, statement: str, **values: Any) -> Any:
        with unit_of_work(self.engine) as conn:
            result = conn.execute(sa.text(statement), values)
            return result.all() if result.returns_rows else result.rowcount

    def memory_mb(self) -> float:
        pages = int(Path(f"/proc/{self.process.pid}/statm").read_text().split()[1])
        return round(pages * os.sysconf("SC_PAGE_SIZE") / 2**20, 1)


@contextmanager
def running() -> Iterator[Bench]:
    """Start the servers and a bench on them."""
    directory = Path(tempfile.mkdtemp(prefix="magi2-farm-bench-"))
    directory.chmod(0o755)
    servers = EmbeddedServers(directory, environment(None), ServerSecrets.generate(), bucket="farm")
    servers.start()
    bench = Bench(
        servers,
        servers.variables()
        | {
            "FARM_SECRET_KEY": secrets.token_urlsafe(32),
            "FARM_KEY_PEPPER": secrets.token_urlsafe(32),
            "FARM_STATE_DIR": str(directory / "state"),
            "FARM_RATE__REQUESTS_PER_MINUTE": "100000000",
            "FARM_RATE__SUBMITS_PER_MINUTE": "100000000",
        },
    )
    try:
        yield bench
    finally:
        if bench.process.poll() is None:
            bench.process.kill()
            bench.process.wait()
        bench.engine.dispose()
        servers.stop()
        shutil.rmtree(directory, ignore_errors=True)


def row(target: str, wanted: str, outcome: Outcome, **more: Any) -> dict[str, Any]:
    return {
        "id": target,
        "wanted": wanted,
        "p50_ms": outcome.percentile_ms(0.5),
        "p99_ms": outcome.percentile_ms(0.99),
        "per_s": outcome.per_s,
        "requests": len(outcome.times_s),
        "errors": outcome.errors,
        "reasons": dict(outcome.reasons),
        "times_s": outcome.times_s,
        **more,
    }


def submits(bench: Bench, options: argparse.Namespace) -> list[dict[str, Any]]:
    asyncio.run(closed_loop(bench.port, bench.submit, 4, 1))
    steady = asyncio.run(open_loop(bench.port, bench.submit, 50, options.seconds))
    flood = asyncio.run(closed_loop(bench.port, bench.submit, 16, options.seconds / 2))
    return [
        row("T-01", "p50 <= 15 ms, p99 <= 60 ms, 0 errors", steady),
        row("T-02", ">= 150/s", flood),
    ]


def images(bench: Bench, options: argparse.Namespace) -> list[dict[str, Any]]:
    """Submit large pictures while somebody asks for liveness every 20 ms: that shows stalls of the loop."""
    noise = Image.frombytes("RGB", (820, 820), random.Random(1).randbytes(820 * 820 * 3))
    buffer = io.BytesIO()
    noise.save(buffer, "PNG")
    media_type = "multipart/form-data; boundary=x"
    parts = "".join(
        f'--x\r\nContent-Disposition: form-data; name="{name}"\r\n\r\n{value}\r\n'
        for name, value in BODY.items()
    )
    head = f'{parts}--x\r\nContent-Disposition: form-data; name="input_reference"; filename="a.png"\r\n\r\n'
    body = head.encode() + buffer.getvalue() + b"\r\n--x--\r\n"
    request = request_bytes("POST", "/v1/videos", bench.key, body, media_type)
    alive = request_bytes("GET", "/livez", bench.key)

    async def both() -> tuple[Outcome, Outcome]:
        return await asyncio.gather(
            open_loop(bench.port, lambda _: request, 2, options.seconds / 2),
            open_loop(bench.port, lambda _: alive, 50, options.seconds / 2),
        )

    submitted, probed = asyncio.run(both())
    stall_ms = round(max(probed.times_s) * 1000, 1)
    return [
        row(
            "T-03",
            "p99 <= 500 ms, stall <= 50 ms",
            submitted,
            png_mb=round(len(body) / 2**20, 2),
            stall_ms=stall_ms,
        )
    ]


def polls(bench: Bench, options: argparse.Namespace) -> list[dict[str, Any]]:
    ids = [
        entry[0]
        for entry in bench.sql("SELECT id FROM job WHERE account_id = :a LIMIT 500", a=bench.account_id)
    ]

    def poll(number: int) -> bytes:
        return request_bytes("GET", f"/v1/videos/{ids[number % len(ids)]}", bench.key)

    outcome = asyncio.run(closed_loop(bench.port, poll, 8, options.seconds / 2))
    return [row("T-04", ">= 400/s, p99 <= 30 ms (waiting videos)", outcome)]


def lists(bench: Bench, options: argparse.Namespace) -> list[dict[str, Any]]:
    account_id, key = bench.new_account("many")
    params = bench.sql("SELECT params::text FROM job LIMIT 1")[0][0]
    chunk = 5_000
    for first in range(0, options.rows, chunk):
        bench.sql(
            TERMINAL_ROWS,
            account=account_id,
            params=params,
            first=first,
            last=min(first + chunk, options.rows) - 1,
        )
    with bench.engine.connect().execution_options(isolation_level="AUTOCOMMIT") as conn:
        conn.execute(sa.text("SET statement_timeout = 0"))
        conn.execute(sa.text("VACUUM ANALYZE job"))
    anchor = "video_0" + f"{options.rows // 2:x}".rjust(25, "0")
    paths = [
        "/v1/videos?limit=100",
        f"/v1/videos?limit=100&after={anchor}",
        "/v1/videos?limit=100&status=failed",
    ]
    requests = [request_bytes("GET", path, key) for path in paths]
    outcome = asyncio.run(
        closed_loop(bench.port, lambda number: requests[number % 3], 1, options.seconds / 2)
    )
    return [row("T-04", "list of 100 out of 1 M: p99 <= 60 ms", outcome, rows=options.rows)]


def dashboard(bench: Bench, options: argparse.Namespace) -> list[dict[str, Any]]:
    """Read the overview of operators beside the rows that `lists` made, with 16 groups."""
    with unit_of_work(bench.engine) as conn:
        for number in range(NUM_GROUPS):
            register(conn, Group(f"bench-{number}", "host", "tiny-cpu", "", f"boot-{number}"))
            heartbeat(conn, f"bench-{number}", f"boot-{number}", "ready", {"engine": "bench"})
        admin = create_admin(conn, "bench", Role.VIEWER, hash_password(secrets.token_urlsafe()), by="bench")
        cookie = f"{COOKIE}={open_session(conn, admin.id)}"
    overview = request_bytes("GET", HOME, "", cookie=cookie)
    outcome = asyncio.run(closed_loop(bench.port, lambda _: overview, 1, options.seconds / 2))
    jobs = bench.sql("SELECT count(*) FROM job")[0][0]
    return [row("T-19", "overview <= 300 ms", outcome, jobs=jobs, groups=NUM_GROUPS)]


def outage(bench: Bench, options: argparse.Namespace) -> list[dict[str, Any]]:
    bench.servers.valkey.stop()
    outcome = asyncio.run(open_loop(bench.port, bench.submit, 50, options.seconds))
    return [row("T-12", "Redis down: 0 errors, p99 <= 120 ms", outcome, outage_s=options.seconds)]


def streams(bench: Bench, options: argparse.Namespace) -> list[dict[str, Any]]:
    del options
    outcome, memory_mb = asyncio.run(_streams(bench))
    return [
        row(
            "T-15",
            "state <= 500 ms p99, <= 300 MB",
            outcome,
            streams=NUM_STREAMS,
            stalled=NUM_STALLED,
            memory_mb=memory_mb,
        )
    ]


async def _streams(bench: Bench) -> tuple[Outcome, float]:
    """Follow one waiting video per stream, end them all, and see when each listener hears of it."""
    account_id, key = bench.new_account("streams")
    keys = [bench.new_key(account_id) for _ in range(NUM_STREAMS // STREAMS_PER_KEY + 1)]
    outcome, heard = Outcome(), {}

    async def follow(number: int, video_id: str) -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", bench.port)
        writer.write(request_bytes("GET", f"/v1/videos/{video_id}/events", keys[number // STREAMS_PER_KEY]))
        await reader.readuntil(b"event: snapshot")
        ready.release()
        if number >= NUM_STREAMS - NUM_STALLED:
            await over.wait()
        else:
            await reader.readuntil(b"event: state")
            heard[video_id] = time.time()
        writer.close()

    body = json.dumps(BODY).encode()
    ids = [
        (await ask_json(bench.port, request_bytes("POST", "/v1/videos", key, body)))["id"]
        for _ in range(NUM_STREAMS)
    ]
    ready, over = asyncio.Semaphore(0), asyncio.Event()
    tasks = [asyncio.create_task(follow(number, video_id)) for number, video_id in enumerate(ids)]
    for _ in ids:
        await ready.acquire()
    memory_mb = bench.memory_mb()

    def end(video_id: str) -> None:
        with unit_of_work(bench.engine) as conn:
            request_cancel(conn, account_id, video_id, "bench")

    began_s = time.perf_counter()
    for video_id in ids[: NUM_STREAMS - NUM_STALLED]:
        await asyncio.to_thread(end, video_id)
        await asyncio.sleep(0.01)
    await asyncio.gather(*tasks[: NUM_STREAMS - NUM_STALLED])
    over.set()
    await asyncio.gather(*tasks)
    rows = bench.sql("SELECT job_id, extract(epoch FROM at)::float8 FROM job_event WHERE type = 'canceled'")
    at = dict(tuple(entry) for entry in rows)
    outcome.times_s = [heard_s - at[video_id] for video_id, heard_s in heard.items()]
    outcome.wall_s = time.perf_counter() - began_s
    return outcome, memory_mb


def stops(bench: Bench, options: argparse.Namespace) -> list[dict[str, Any]]:
    """Stop the api while streams are open and submits come in; every submit with a 2xx must be there."""
    del options
    accepted, stop_s = asyncio.run(_stops(bench))
    found = bench.sql("SELECT count(*) FROM job WHERE id = ANY(:ids)", ids=accepted)[0][0]
    ready_s = bench.start()
    return [
        {
            "id": "T-17",
            "wanted": "exit <= 10 s, none lost",
            "exit_s": round(stop_s, 2),
            "accepted": len(accepted),
            "errors": len(accepted) - found,
        },
        {
            "id": "T-20",
            "wanted": "ready <= 3 s",
            "ready_s": round(ready_s, 2),
            "first_s": round(bench.started_s, 2),
            "errors": 0,
        },
    ]


async def _stops(bench: Bench) -> tuple[list[str], float]:
    accepted: list[str] = []

    async def follow(video_id: str) -> bytes:
        reader, writer = await asyncio.open_connection("127.0.0.1", bench.port)
        writer.write(request_bytes("GET", f"/v1/videos/{video_id}/events", bench.key))
        try:
            return await reader.read(-1)
        finally:
            writer.close()

    async def keep_submitting() -> None:
        number = 0
        while True:
            number += 1
            try:
                accepted.append((await ask_json(bench.port, bench.submit(number)))["id"])
            except (OSError, asyncio.IncompleteReadError, AssertionError):
                return

    first = await ask_json(bench.port, bench.submit(0))
    tasks = [asyncio.create_task(follow(first["id"])) for _ in range(15)]
    tasks += [asyncio.create_task(keep_submitting()) for _ in range(4)]
    await asyncio.sleep(1)
    stop_s = await asyncio.to_thread(bench.stop)
    await asyncio.gather(*tasks, return_exceptions=True)
    return accepted, stop_s


def plot(results: list[dict[str, Any]], folder: Path) -> None:
    """Draw the share of requests that were answered within a time."""
    import matplotlib as mpl  # only where pictures are asked for

    mpl.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(8, 4), dpi=80)
    for result in results:
        if "times_s" in result:
            ordered = sorted(result["times_s"])
            shares = [(place + 1) / len(ordered) * 100 for place in range(len(ordered))]
            axes.step(
                [value * 1000 for value in ordered],
                shares,
                where="post",
                label=f"{result['id']} {result['wanted']}",
            )
    axes.set(xscale="log", xlabel="ms", ylabel="% answered within", title="The api")
    axes.legend(fontsize=7)
    figure.tight_layout()
    folder.mkdir(parents=True, exist_ok=True)
    figure.savefig(folder / "api.png", metadata={"Software": None})


SCENARIOS = {
    "submits": submits,
    "images": images,
    "polls": polls,
    "streams": streams,
    "stops": stops,
    "lists": lists,
    "dashboard": dashboard,
    # Last: Redis does not come back, nothing after it needs it, and a large table is the harder case.
    "outage": outage,
}


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seconds", type=float, default=20, help="length of the longest loops")
    parser.add_argument("--rows", type=int, default=1_000_000, help="finished jobs behind the list")
    parser.add_argument("--plots", type=Path, help="folder for a picture")
    parser.add_argument("--only", choices=SCENARIOS, action="append", help="run these scenarios only")
    options = parser.parse_args()
    results: list[dict[str, Any]] = []
    with running() as bench:
        for name in options.only or SCENARIOS:
            for result in SCENARIOS[name](bench, options):
                print(
                    json.dumps({key: value for key, value in result.items() if key != "times_s"}), flush=True
                )
                results.append(result)
    machine = {"cpus": os.cpu_count(), "load": os.getloadavg()[0], "python": platform.python_version()}
    print(json.dumps({"machine": machine, "at": datetime.now(UTC).isoformat(timespec="seconds")}))
    if options.plots:
        plot(results, options.plots)
    return 0 if all(result["errors"] == 0 for result in results) else 1


if __name__ == "__main__":
    sys.exit(main())
