"""A whole farm that may be hurt: servers of its own, and several processes of every role, each in its slot.

Whatever is killed is started again in its slot at once, as a supervisor would. Every slot has a working
directory and a state folder of its own, so that no role finds files of another. All children hang on the
thread that starts them: it must be the main one.
"""

import secrets
import shutil
import signal
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

import redis
from sqlalchemy import Engine

from farm.accounts import create_key, ensure_account
from farm.db import schema
from farm.db.session import make_engine, unit_of_work
from farm.embedded.ports import free_ports
from farm.embedded.process import leashed
from farm.embedded.servers import EmbeddedServers, ServerSecrets
from farm.secretbox import seal
from farm.settings import environment, load_settings
from farm.storage import ObjectStore
from farm.webhooks.endpoints import HMAC, NewEndpoint, create_endpoint
from farm.webhooks.signing import new_secret
from tests.chaos.receiver import Receiver
from tests.service.worker.harness import descendants
from tests.state_guard import install_state_guard
from worker.group_folder import ProcessMark

ROOT = Path(__file__).parents[2]
PROFILE = "tiny-cpu"
EVENT_TYPES = ["video.queued", "video.started", "video.completed", "video.failed", "video.canceled"]
STOP_S = 60.0
NO_LIMIT = "100000000"


@dataclass
class Slot:
    """One place for one process of a role."""

    role: str
    number: int
    command: list[str]
    environment: dict[str, str]
    folder: Path
    process: subprocess.Popen[bytes]

    @property
    def name(self) -> str:
        return f"{self.role}{self.number}"

    @property
    def log(self) -> Path:
        return self.folder / f"{self.role}.log"


class ChaosFarm:
    """The servers, the slots, and one account with a webhook."""

    def __init__(
        self,
        num_of_role: dict[str, int],
        engine: str,
        variables: dict[str, str],
        *,
        is_guarded: bool = True,
    ) -> None:
        """Start the servers and make the account; roles are started by `start`.

        Args:
            num_of_role: How many processes of api, ticker and worker there shall be.
            engine: Of the workers.
            variables: More settings of all roles.
            is_guarded: Let a trigger refuse illegal moves; benchmarks go without it.
        """
        self.directory = Path(tempfile.mkdtemp(prefix="magi2-farm-chaos-"))
        self.directory.chmod(0o755)
        base = environment(None)
        self._servers = EmbeddedServers(self.directory, base, ServerSecrets.generate(), bucket="farm")
        self._servers.start()
        self.slots: list[Slot] = []
        self.receiver = Receiver()
        self.api_ports = free_ports(num_of_role["api"]) if num_of_role["api"] else []
        self.metrics_ports: list[int] = []
        self.dead: set[ProcessMark] = set()
        self._num_of_role = num_of_role
        self._engine_name = engine
        own = self._servers.variables() | {
            "FARM_SECRET_KEY": secrets.token_urlsafe(32),
            "FARM_KEY_PEPPER": secrets.token_urlsafe(32),
            "FARM_STATE_DIR": str(self.directory / "state"),
            "FARM_QUOTA__MAX_QUEUED": NO_LIMIT,
            "FARM_QUOTA__MAX_RUNNING": "1000",
            "FARM_LIMITS__MAX_INFRA_LOSSES": NO_LIMIT,
            "FARM_RATE__REQUESTS_PER_MINUTE": NO_LIMIT,
            "FARM_RATE__SUBMITS_PER_MINUTE": NO_LIMIT,
            "FARM_WEBHOOK__ALLOW_HTTP": "true",
            "FARM_WEBHOOK__ALLOW_CIDRS": "127.0.0.0/8",
        }
        given = own | variables
        self.settings_given = {name: value for name, value in given.items() if not name.startswith("MAGI2_")}
        self.settings = load_settings(None, overrides=self.settings_given)
        self._environment = base | own | variables | {"MAGI2_TESTING": "1", "PYTHONPATH": str(ROOT)}
        self.database: Engine = make_engine(self.settings, application="ticker")
        self.store = ObjectStore(self.settings)
        self.broker = redis.Redis.from_url(self.settings.redis_url)
        schema.upgrade(self.database)
        if is_guarded:
            with unit_of_work(self.database) as conn:
                install_state_guard(conn)
        self.key, self._hook_secret = self._make_account()

    def start(self) -> None:
        """Start every role."""
        for role, number in self._num_of_role.items():
            self.slots += [self._open_slot(role, index) for index in range(number)]

    def kill(self, slot: Slot) -> None:
        """Kill a process without a warning and start its successor."""
        self._note_family(slot)
        slot.process.kill()
        slot.process.wait()
        slot.process = self._spawn(slot.command, slot.environment, slot.folder, slot.log)

    def restart_broker(self) -> None:
        """Kill the broker and start it again on its file."""
        assert self._servers.valkey is not None
        self._servers.valkey.child.kill()
        self._servers.keep_running()

    def stop_broker(self) -> None:
        """End the broker for good."""
        assert self._servers.valkey is not None
        self._servers.valkey.child.kill()

    def slot_of(self, group_id: str) -> Slot:
        """Return the slot whose worker is a group."""
        workers = (slot for slot in self.slots if slot.role == "worker")
        return next(slot for slot in workers if group_id in _group_ids(slot.folder))

    def flush_broker(self) -> None:
        """Empty the broker."""
        self.broker.flushall()

    def restart_database(self) -> None:
        """End PostgreSQL at once, so that it has to recover, and start it again."""
        assert self._servers.postgres is not None
        self._servers.postgres.child.stop(signal.SIGQUIT, timeout_s=30)
        self._servers.keep_running()

    def fallen(self) -> list[str]:
        """Return the slots whose process ended by itself, and start them again."""
        lines = []
        for slot in self.slots:
            if slot.process.poll() is not None:
                lines.append(f"{slot.name} ended by itself with {slot.process.returncode}")
                slot.process = self._spawn(slot.command, slot.environment, slot.folder, slot.log)
        return lines

    def secrets(self) -> dict[str, str]:
        """Return every secret of this farm by its name."""
        assert self.settings.secret_key is not None
        assert self.settings.key_pepper is not None
        assert self.settings.aws_secret_access_key is not None
        return {
            "the secret key": self.settings.secret_key.get_secret_value(),
            "the pepper": self.settings.key_pepper.get_secret_value(),
            "the key of the object store": self.settings.aws_secret_access_key.get_secret_value(),
            "the password of the database": self.settings.database_url.split(":")[2].split("@")[0],
            "an API key": self.key,
            "a webhook secret": self._hook_secret,
        }

    def logs(self) -> list[Path]:
        """Return the logs of all roles and ranks."""
        return [path for slot in self.slots for path in slot.folder.rglob("*.log*") if path.is_file()]

    def stored_keys(self) -> set[str]:
        """List the whole bucket."""
        client = self.store._client
        pages = client.get_paginator("list_objects_v2").paginate(Bucket=self.settings.s3_bucket)
        return {entry["Key"] for page in pages for entry in page.get("Contents", [])}

    def stop(self) -> list[str]:
        """Drain everything and return which processes did not end well."""
        for slot in self.slots:
            self._note_family(slot)
            slot.process.terminate()
        wrong = []
        for slot in self.slots:
            try:
                code = slot.process.wait(STOP_S)
            except subprocess.TimeoutExpired:
                code = None
            if code != 0:
                wrong.append(f"{slot.name} ended with {code} after SIGTERM")
        return wrong

    def close(self, *, keep: bool) -> None:
        """End all processes, and remove the folder unless it is to be looked at."""
        for slot in self.slots:
            if slot.process.poll() is None:
                slot.process.kill()
            slot.process.wait()
        self.receiver.close()
        self.broker.close()
        self.database.dispose()
        self._servers.stop()
        if not keep:
            shutil.rmtree(self.directory, ignore_errors=True)

    def _make_account(self) -> tuple[str, str]:
        assert self.settings.secret_key is not None
        assert self.settings.key_pepper is not None
        secret = new_secret()
        endpoint = NewEndpoint(url=self.receiver.url, event_types=EVENT_TYPES, max_in_flight=10)
        with unit_of_work(self.database) as conn:
            account_id = ensure_account(conn, "storm")
            create_endpoint(conn, account_id, endpoint, {HMAC: seal(self.settings.secret_key, secret)})
            return create_key(conn, account_id, self.settings.key_pepper).text, secret

    def _open_slot(self, role: str, number: int) -> Slot:
        folder = self.directory / f"{role}{number}"
        folder.mkdir()
        own = self._environment | {"FARM_STATE_DIR": str(folder / "state")}
        modules = {
            "api": ["api"],
            "ticker": ["worker.ticker"],
            "worker": ["worker", "--profile", PROFILE, "--engine", self._engine_name],
        }
        if role == "api":
            own["FARM_API_PORT"] = str(self.api_ports[number])
        else:
            (port,) = free_ports(1)
            own["FARM_METRICS__PORT"] = str(port)
            self.metrics_ports.append(port)
        command = [sys.executable, "-m", *modules[role]]
        process = self._spawn(command, own, folder, folder / f"{role}.log")
        return Slot(role, number, command, own, folder, process)

    @staticmethod
    def _spawn(
        command: list[str], variables: dict[str, str], folder: Path, path: Path
    ) -> subprocess.Popen[bytes]:
        with path.open("ab") as log:
            return subprocess.Popen(
                leashed(command), cwd=folder, env=variables, stdout=log, stderr=log, start_new_session=True
            )

    def _note_family(self, slot: Slot) -> None:
        """Remember who belongs to a process that is about to end."""
        family = [slot.process.pid, *descendants(slot.process.pid)]
        self.dead |= {mark for mark in map(ProcessMark.of, family) if mark is not None}


def _group_ids(folder: Path) -> set[str]:
    return {file.read_text() for file in (folder / "state" / "worker").glob("*/group_id")}
