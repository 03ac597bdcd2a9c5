"""The state folder of embedded mode: what must survive from one start to the next, and the lock on it.

It holds generated credentials (mode 0600, made once, never printed but for the API key), the data of the
embedded servers, the tiny checkpoint and the logs. One supervisor at a time: a second one is refused. Nothing
outside this folder is written, except where root must run PostgreSQL as nobody (`postgres.py`).
"""

import fcntl
import json
import os
import secrets
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO

from farm.embedded.ports import free_ports, is_free
from farm.embedded.process import EmbeddedError
from farm.embedded.servers import ServerSecrets


@dataclass(frozen=True)
class Secrets:
    """Everything that embedded mode draws for itself."""

    postgres_password: str
    s3_access_key: str
    s3_secret_key: str
    secret_key: str
    key_pepper: str

    @classmethod
    def generate(cls) -> "Secrets":
        """Draw fresh ones."""
        return cls(
            **asdict(ServerSecrets.generate()),
            secret_key=secrets.token_urlsafe(48),
            key_pepper=secrets.token_urlsafe(48),
        )

    @property
    def servers(self) -> ServerSecrets:
        """The part that the servers need."""
        return ServerSecrets(self.postgres_password, self.s3_access_key, self.s3_secret_key)


@dataclass(frozen=True)
class Access:
    """How to reach the farm that runs, or last ran, in a state folder."""

    url: str
    key: str


class StateDirectory:
    """One state folder."""

    def __init__(self, path: Path) -> None:
        """Make the folder if it is missing."""
        self.path = path.resolve()
        # Others may pass through, not look around: PostgreSQL runs as nobody where the supervisor is root.
        self.path.mkdir(mode=0o711, parents=True, exist_ok=True)
        self._lock: IO[str] | None = None

    @property
    def checkpoint(self) -> Path:
        """Where the tiny checkpoint lies."""
        return self.path / "tiny-checkpoint"

    @property
    def unfinished_checkpoint(self) -> Path:
        """Where the tiny checkpoint is made; renamed when complete."""
        return self.path / "tiny-checkpoint.unfinished"

    @property
    def logs(self) -> Path:
        """Where the farm's own processes write what they print."""
        return self.path / "logs"

    def lock(self) -> None:
        """Keep other supervisors out for as long as this process lives.

        Raises:
            EmbeddedError: Another one has the folder.
        """
        lock = (self.path / "lock").open("a+")
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            lock.seek(0)
            owner = lock.read().strip()
            lock.close()
            raise EmbeddedError(
                f"another magi2-farm (process {owner}) uses {self.path}; "
                "stop it, use it with `magi2-farm submit`, or set FARM_STATE_DIR to another folder"
            ) from None
        lock.truncate(0)
        lock.write(str(os.getpid()))
        lock.flush()
        self._lock = lock

    def unlock(self) -> None:
        """Let others in again."""
        if self._lock is not None:
            self._lock.close()
            self._lock = None

    def secrets(self) -> Secrets:
        """Return the generated credentials, drawn on first use."""
        path = self.path / "secrets.json"
        if not path.exists():
            _write_private(path, json.dumps(asdict(Secrets.generate())))
        return Secrets(**json.loads(path.read_text()))

    def api_port(self) -> int:
        """Return the port of the api: the same at every start as long as it is free."""
        path = self.path / "api-port"
        port = int(path.read_text()) if path.exists() else 0
        if not port or not is_free(port):
            port = free_ports(1)[0]
            path.write_text(str(port))
        return port

    @property
    def access_file(self) -> Path:
        """Where URL and key are kept, readable by this user only."""
        return self.path / "access.json"

    @property
    def header_file(self) -> Path:
        """Where the key is kept as an HTTP header line, for `curl -H @FILE`."""
        return self.path / "authorization.header"

    def access(self) -> Access | None:
        """Return URL and key of the farm of this folder; None before its first start."""
        path = self.access_file
        return Access(**json.loads(path.read_text())) if path.exists() else None

    def keep_variables(self, variables: Mapping[str, str]) -> None:
        """Remember where the servers of this start are, for commands that use the database themselves."""
        _write_private(self.path / "variables.json", json.dumps(dict(variables)))

    def variables(self) -> dict[str, str] | None:
        """Return the settings of the farm that runs, or last ran, here; None before its first start."""
        path = self.path / "variables.json"
        return dict(json.loads(path.read_text())) if path.exists() else None

    def keep_access(self, access: Access) -> None:
        """Remember URL and key for the command line, readable by this user only."""
        _write_private(self.access_file, json.dumps(asdict(access)))
        _write_private(self.header_file, f"Authorization: Bearer {access.key}\n")


def _write_private(path: Path, text: str) -> None:
    fresh = path.with_name(path.name + ".new")
    fresh.unlink(missing_ok=True)
    fresh.touch(mode=0o600)
    fresh.write_text(text)
    fresh.replace(path)
