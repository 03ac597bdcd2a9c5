"""Run the whole farm on this machine: servers, schema, bucket, key, checkpoint, api, ticker and one worker.

Parts that `DATABASE_URL`, `REDIS_URL` and `S3_ENDPOINT_URL` name are used and not started. Everything that is
started listens on loopback only and ends with the supervisor, within 5 s when it is asked and at once when it
is killed. It starts children from the thread that calls it, which has to live as long as the farm. It renders
nothing itself and keeps no truth: jobs left unfinished are finished by the next start.
"""

import shutil
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import httpx
from sqlalchemy import Engine

from farm import audit
from farm.accounts import authenticate, create_key, ensure_account
from farm.db import schema
from farm.db.session import make_engine, unit_of_work
from farm.embedded.ports import LOOPBACK
from farm.embedded.process import Child, ChildSpec, EmbeddedError, log_tail
from farm.embedded.roles import API, TICKER, Role, RoleProcess, worker_role
from farm.embedded.servers import EmbeddedServers
from farm.embedded.state import Access, Secrets, StateDirectory
from farm.settings import Settings, load_settings
from farm.storage import ObjectStore

PROFILE = "tiny-cpu"
ACCOUNT = "embedded"
BUCKET = "farm"
API_READY_TIMEOUT_S = 60.0
CHECKPOINT_TIMEOUT_S = 180.0
# A role that takes longer is killed, which the farm survives by design: leases and sweeps take over.
ROLES_END_S = 1.0
TICKER_END_S = 1.5
ROOT = Path(__file__).resolve().parents[2]
# The variable that names a part, and the server that is not started because of it.
_NAMED_PARTS = {"DATABASE_URL": "postgres", "REDIS_URL": "valkey", "S3_ENDPOINT_URL": "seaweedfs"}


@dataclass(frozen=True)
class Started:
    """What `start` reports: how to reach the farm, and whether its key was made just now."""

    access: Access
    is_new_key: bool


class Supervisor:
    """The embedded farm of one state folder."""

    def __init__(
        self, state: StateDirectory, environment: Mapping[str, str], *, say: Callable[[str], None]
    ) -> None:
        """Prepare; nothing runs yet.

        Args:
            state: The folder; locked by `start`.
            environment: The variables that the farm's processes get, beside what the supervisor adds.
            say: Takes one line about what happens, for a person.
        """
        self._state = state
        self._environment = environment
        self._say = say
        self._servers: EmbeddedServers | None = None
        self._roles: list[RoleProcess] = []
        self._making_checkpoint: Child | None = None

    def start(self) -> Started:
        """Start everything and wait until the api is ready.

        Raises:
            EmbeddedError: A part was not found or does not work, or another supervisor has the folder.
        """
        self._state.lock()
        self._start_making_checkpoint()
        variables = self._start_servers(self._state.secrets())
        settings = load_settings(overrides=variables)
        self._state.keep_variables(variables)
        started = self._prepare(settings)
        environment = {**self._environment, **variables, "MAGI2_CKPT_ROOT": str(self._state.checkpoint)}
        api = self._start_role(API, environment)
        self._start_role(TICKER, environment)
        self._finish_checkpoint()
        self._start_role(worker_role(PROFILE), environment)
        api.child.wait_ready(lambda: _is_ready(settings.base_url), timeout_s=API_READY_TIMEOUT_S)
        return started

    def keep_running(self) -> None:
        """Start again what has ended by itself; call it a few times per second."""
        if self._servers is not None:
            for line in self._servers.keep_running():
                self._say(line)
        for role in self._roles:
            event = role.keep_running()
            if event:
                self._say(event)

    def stop(self) -> None:
        """End everything within 5 s: api, worker and ticker, then object store, database, broker."""
        if self._making_checkpoint is not None:
            self._making_checkpoint.kill()
        started_s = time.monotonic()
        for role in self._roles:
            role.ask_to_end()
        for role in self._roles:
            if role.name != TICKER.name:
                role.end_by(started_s + ROLES_END_S)
        if self._servers is not None:
            self._servers.ask_store_to_end()
        for role in self._roles:
            role.end_by(started_s + TICKER_END_S)
        self._roles = []
        if self._servers is not None:
            self._servers.stop()
        self._state.unlock()

    def _start_role(self, role: Role, environment: Mapping[str, str]) -> RoleProcess:
        process = RoleProcess(role, environment, self._state.logs, ROOT)
        self._roles.append(process)
        return process

    def _start_servers(self, drawn: Secrets) -> dict[str, str]:
        """Start the parts that nothing names; return the settings that differ from the environment."""
        variables = {
            "FARM_STATE_DIR": str(self._state.path),
            "FARM_API_HOST": LOOPBACK,
            "FARM_API_PORT": str(self._state.api_port()),
            "FARM_WORKER__STOP_GRACE_S": "0",  # an unfinished job goes back to the queue for the next start
        }
        if not self._names("FARM_SECRET_KEY"):
            variables["FARM_SECRET_KEY"] = drawn.secret_key
        if not self._names("FARM_KEY_PEPPER"):
            variables["FARM_KEY_PEPPER"] = drawn.key_pepper
        bucket = self._environment.get("FARM_S3_BUCKET", BUCKET)
        wanted = [server for name, server in _NAMED_PARTS.items() if not self._names(name)]
        self._servers = EmbeddedServers(
            self._state.path, self._environment, drawn.servers, bucket=bucket, wanted=wanted
        )
        self._servers.start()
        return variables | self._servers.variables()

    def _names(self, variable: str) -> bool:
        return bool(self._environment.get(variable) or self._environment.get(f"{variable}_FILE"))

    def _prepare(self, settings: Settings) -> Started:
        for line in ObjectStore(settings).ensure_bucket():
            self._say(f"object store: {line}")
        engine = make_engine(settings, application="supervisor")
        try:
            schema.upgrade(engine)
            return self._ensure_key(engine, settings)
        finally:
            engine.dispose()

    def _ensure_key(self, engine: Engine, settings: Settings) -> Started:
        pepper = settings.key_pepper
        if pepper is None:
            raise EmbeddedError("FARM_KEY_PEPPER is empty; remove it, and one is drawn")
        kept = self._state.access()
        with unit_of_work(engine) as conn:
            is_valid = kept is not None and authenticate(conn, kept.key, pepper) is not None
            if kept is not None and is_valid:
                key = kept.key
            else:
                made = create_key(conn, ensure_account(conn, ACCOUNT), pepper, name="embedded")
                audit.record(conn, audit.SYSTEM, "key.create", made.id8, None, {"name": "embedded"})
                key = made.text
        access = Access(settings.base_url, key)
        self._state.keep_access(access)
        return Started(access, is_new_key=not is_valid)

    def _start_making_checkpoint(self) -> None:
        if self._state.checkpoint.exists():
            return
        self._say("Making the tiny random checkpoint (first start only)")
        unfinished = self._state.unfinished_checkpoint
        shutil.rmtree(unfinished, ignore_errors=True)
        command = [sys.executable, "-m", "magi2", "tiny-checkpoint", str(unfinished)]
        log = self._state.logs / "tiny-checkpoint.log"
        self._making_checkpoint = Child(ChildSpec("tiny-checkpoint", command, ROOT, log, self._environment))

    def _finish_checkpoint(self) -> None:
        making, self._making_checkpoint = self._making_checkpoint, None
        if making is None:
            return
        if not making.wait(CHECKPOINT_TIMEOUT_S) or making.returncode != 0:
            making.kill()
            raise EmbeddedError(f"the tiny checkpoint was not made:\n{log_tail(making.spec.log_path)}")
        self._state.unfinished_checkpoint.rename(self._state.checkpoint)


def _is_ready(url: str) -> bool:
    try:
        return httpx.get(f"{url}/readyz", timeout=2.0, trust_env=False).status_code == 200
    except httpx.HTTPError:
        return False
