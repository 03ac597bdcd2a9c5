"""`magi2-farm doctor`: ask every part that the settings name whether it works, and print what to change.

Each check does what the farm does (query, read a policy, sign and fetch, encode and probe), one after the
other; one that fails does not hide the next. It changes nothing but one small object, which it removes. With
a profile it also judges whether this machine can run it (`farm/commands/doctor_checks.py`).
"""

import argparse
import importlib.util
import subprocess
import sys
import tempfile
import uuid
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

import httpx
import redis
from sqlalchemy import text
from sqlalchemy.exc import SQLAlchemyError

from farm.commands.connection import effective_settings, remedy
from farm.commands.console import result, result_json
from farm.commands.doctor_checks import MACHINE_CHECKS, Finding, Purpose
from farm.commands.doctor_layouts import fit
from farm.commands.doctor_machine import read_machine
from farm.commands.exits import CommandError, Exit
from farm.commands.parsers import Subcommands
from farm.db import schema
from farm.db.session import make_engine
from farm.groups import list_groups
from farm.profiles import load_profiles
from farm.settings import Settings
from farm.storage import CLOCK_REFUSE_S, CLOCK_WARN_S, ObjectStore, StorageError
from magi2.media.probe import breaches, probe

OLDEST_POSTGRES = 15
PRESIGN_TTL_S = 60
ENCODE_TIMEOUT_S = 180
SIDE = (448, 256)
# In a process of its own: the command line never imports torch.
_ENCODE = """
import pathlib, sys, torch
from magi2.media.clip import Clip
from magi2.media.mp4 import write_mp4
frames = torch.zeros((125, {height}, {width}, 3), dtype=torch.uint8)
write_mp4(pathlib.Path(sys.argv[1]), Clip(frames=frames, samples=torch.zeros((441000, 2))))
"""


def add_to(subcommands: Subcommands) -> None:
    """Declare the command."""
    parser = subcommands.add_parser("doctor", help="check the parts that the settings name")
    parser.add_argument("--profile", help="that this machine shall run (default: FARM_WORKER__PROFILE)")
    parser.add_argument("--devices", help="such as 0,1,2,3 (default: FARM_WORKER__DEVICES)")
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Run all checks; exit 1 if one failed."""
    settings = effective_settings()
    purpose = _purpose(settings, arguments.profile, arguments.devices)
    findings = examine(settings, purpose)
    if arguments.json:
        result_json([asdict(finding) for finding in findings])
    else:
        for finding in findings:
            word = "FAIL" if not finding.is_ok else "warn" if finding.fix else "ok  "
            fix = f"\n      {finding.fix}" if finding.fix else ""
            result(f"{word}  {finding.part}: {finding.message}{fix}")
    return Exit.OK if all(finding.is_ok for finding in findings) else Exit.FAILED


def examine(settings: Settings, purpose: Purpose) -> list[Finding]:
    """Run all checks, those of the parts first."""
    return [
        *(check(settings) for check in CHECKS),
        *(check_machine(purpose) for check_machine in MACHINE_CHECKS),
    ]


def _purpose(settings: Settings, profile: str | None, devices: str | None) -> Purpose:
    name = profile or settings.worker.profile
    chosen = load_profiles(settings.profiles_file).get(name) if name else None
    try:
        numbers = tuple(int(part) for part in devices.split(",") if part.strip()) if devices else ()
    except ValueError:
        raise CommandError(
            f"--devices must be numbers such as 0,1,2,3 (got {devices!r})", Exit.USAGE
        ) from None
    machine = read_machine(settings.state_dir)
    return Purpose(machine, chosen, numbers or tuple(settings.worker.devices))


def check_database(settings: Settings) -> Finding:
    """Query the version and compare the schema with this code."""
    engine = make_engine(settings, application="cli")
    try:
        with engine.connect() as conn:
            version = int(conn.execute(text("SHOW server_version_num")).scalar_one()) // 10_000
            current = schema.current_revision(conn)
    except SQLAlchemyError as error:
        return Finding("database", False, type(error).__name__, remedy("DATABASE_URL"))
    finally:
        engine.dispose()
    newest = schema.newest_revision()
    if version < OLDEST_POSTGRES:
        return Finding("database", False, f"PostgreSQL {version}", f"use version {OLDEST_POSTGRES} or newer")
    if current != newest:
        return Finding("database", False, f"schema {current}, code {newest}", "run: magi2-farm migrate")
    return Finding("database", True, f"PostgreSQL {version}, schema {current}")


def check_groups(settings: Settings) -> Finding:
    """Name the groups that are sick, and why their agents say so."""
    engine = make_engine(settings, application="cli")
    try:
        with engine.connect() as conn:
            found = list_groups(conn, with_gone=False)
    except SQLAlchemyError as error:
        return Finding("groups", True, f"not checked: {type(error).__name__}")
    finally:
        engine.dispose()
    sick = [group for group in found if group.state == "sick" and group.is_live]
    if sick:
        told = "; ".join(f"{group.id} on {group.host}: {group.stats.get('sick_reason')}" for group in sick)
        fix = "mend what it names, then: magi2-farm groups restart ID"
        return Finding("groups", False, f"sick: {told}", fix)
    return Finding("groups", True, f"{sum(group.is_live for group in found)} live, none sick")


def check_broker(settings: Settings) -> Finding:
    """Read the eviction policy: with any other than noeviction, doorbells vanish under load."""
    try:
        with redis.Redis.from_url(settings.redis_url, socket_timeout=5) as client:
            policy = client.config_get("maxmemory-policy")["maxmemory-policy"]
    except redis.RedisError as error:
        return Finding("broker", False, type(error).__name__, remedy("REDIS_URL"))
    if policy != "noeviction":
        return Finding("broker", False, f"maxmemory-policy {policy}", "set maxmemory-policy noeviction")
    return Finding("broker", True, f"maxmemory-policy {policy}")


def check_store(settings: Settings) -> Finding:
    """Put an object, fetch it by a presigned link as a client would, remove it."""
    store, key, content = ObjectStore(settings), f"doctor/{uuid.uuid4().hex}", b"magi2-farm doctor"
    try:
        store.put(key, content, "text/plain")
        try:
            link = store.presign(key, PRESIGN_TTL_S, "doctor.txt", "text/plain")
            fetched = httpx.get(link, timeout=10, trust_env=False)
        finally:
            store.delete(key)
    except (StorageError, httpx.HTTPError) as error:
        return Finding(
            "object store", False, f"{type(error).__name__}: {error}",
            remedy("S3_ENDPOINT_URL, FARM_S3_PUBLIC_ENDPOINT_URL, the bucket, the AWS_* keys"),
        )  # fmt: skip
    if fetched.content != content:
        return Finding(
            "object store", False, f"a presigned link answered HTTP {fetched.status_code}",
            "check FARM_S3_PUBLIC_ENDPOINT_URL and FARM_S3_ADDRESSING: the host is part of the signature",
        )  # fmt: skip
    return Finding("object store", True, "put, presigned get and delete work")


def check_store_clock(settings: Settings) -> Finding:
    """Compare the clocks: signatures fail when they are far apart."""
    try:
        offset_s = ObjectStore(settings).clock_offset_s()
    except StorageError as error:
        return Finding("clock", False, str(error), "mend the object store first")
    fix = f"set both clocks by NTP; the store refuses requests beyond {CLOCK_REFUSE_S:.0f} s"
    is_ok = abs(offset_s) < CLOCK_WARN_S
    return Finding("clock", is_ok, f"the store is {offset_s:+.1f} s off", "" if is_ok else fix)


def check_encoder(_: Settings) -> Finding:
    """Encode a black clip and probe it against the output contract."""
    if importlib.util.find_spec("torch") is None:
        return Finding("encoder", True, "not checked: no engine is installed here")
    width, height = SIDE
    with tempfile.TemporaryDirectory() as folder:
        clip = Path(folder) / "doctor.mp4"
        encoded = subprocess.run(
            [sys.executable, "-c", _ENCODE.format(width=width, height=height), str(clip)],
            capture_output=True,
            text=True,
            timeout=ENCODE_TIMEOUT_S,
            check=False,
        )
        if encoded.returncode != 0:
            return Finding("encoder", False, encoded.stderr[-500:], "install the engine extra again")
        problems = breaches(probe(clip), width, height)
    if problems:
        return Finding("encoder", False, "; ".join(problems), "check the versions of av and constraints.txt")
    return Finding("encoder", True, "encodes and passes the output contract")


def check_layouts(settings: Settings) -> Finding:
    """Compare what each profile needs with this machine's devices and memory."""
    return Finding("layouts", *fit(settings))


CHECKS: tuple[Callable[[Settings], Finding], ...] = (
    check_database,
    check_groups,
    check_broker,
    check_store,
    check_store_clock,
    check_layouts,
    check_encoder,
)
