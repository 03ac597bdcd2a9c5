"""Start and stop the three servers together: those that the caller wants, at the same time, on fresh ports.

The order of stopping is the one that loses nothing: the object store, then the database, then the broker. The
farm's own roles, which use them, must have ended before.
"""

import secrets
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path

from farm.embedded.postgres import PostgresServer
from farm.embedded.process import Child, EmbeddedError
from farm.embedded.seaweed import REGION, SeaweedServer
from farm.embedded.valkey import ValkeyServer

ALL_SERVERS = ("postgres", "valkey", "seaweedfs")
_NUM_TRIES = 3


@dataclass(frozen=True)
class ServerSecrets:
    """Generated credentials of the embedded servers."""

    postgres_password: str
    s3_access_key: str
    s3_secret_key: str

    @classmethod
    def generate(cls) -> "ServerSecrets":
        """Draw fresh credentials."""
        return cls(secrets.token_urlsafe(24), secrets.token_hex(10), secrets.token_urlsafe(30))


class EmbeddedServers:
    """The servers that run here; one that was not wanted is None."""

    postgres: PostgresServer | None = None
    valkey: ValkeyServer | None = None
    seaweedfs: SeaweedServer | None = None

    def __init__(
        self,
        directory: Path,
        environment: Mapping[str, str],
        credentials: ServerSecrets,
        *,
        bucket: str,
        wanted: Collection[str] = ALL_SERVERS,
        is_disposable: bool = False,
    ) -> None:
        """Remember what to run; `start` runs it.

        Args:
            directory: One folder per server is made in it.
            environment: Of the child processes, and where `MAGI2_*_BIN` is looked up.
            credentials: Must be those of the first start on this folder.
            bucket: Made at start where SeaweedFS is wanted.
            wanted: Names out of `ALL_SERVERS`.
            is_disposable: Trade safety of the data for speed (tests).
        """
        self._directory = directory
        self._environment = environment
        self._credentials = credentials
        self._bucket = bucket
        self._wanted = wanted
        self._is_disposable = is_disposable

    def start(self) -> None:
        """Start all wanted servers at the same time and wait until each works; again if a port got taken.

        Raises:
            EmbeddedError: A server was not found or did not start.
        """
        for tries_left in reversed(range(_NUM_TRIES)):
            try:
                self._start_once()
            except BaseException as error:
                self.stop()
                if tries_left == 0 or not _is_port_conflict(error):
                    raise
            else:
                return

    def ask_store_to_end(self) -> None:
        """Let the object store begin its end, nearly all of which is waiting; `stop` finishes it."""
        if self.seaweedfs is not None:
            self.seaweedfs.ask_to_end()

    def stop(self) -> None:
        """Stop what runs: object store, database, broker."""
        for server in (self.seaweedfs, self.postgres, self.valkey):
            if server is not None:
                server.stop()
        self.seaweedfs = self.postgres = self.valkey = None

    def variables(self) -> dict[str, str]:
        """Return the settings that name what runs here."""
        found = {}
        if self.postgres is not None:
            found["DATABASE_URL"] = self.postgres.url
        if self.valkey is not None:
            found["REDIS_URL"] = self.valkey.url
        if self.seaweedfs is not None:
            found |= {
                "S3_ENDPOINT_URL": self.seaweedfs.url,
                "AWS_ACCESS_KEY_ID": self.seaweedfs.access_key,
                "AWS_SECRET_ACCESS_KEY": self.seaweedfs.secret_key,
                "FARM_S3_BUCKET": self.seaweedfs.bucket,
                "FARM_S3_REGION": REGION,
                "FARM_S3_ADDRESSING": "path",
            }
        return found

    def keep_running(self) -> list[str]:
        """Start a server again, on its port, that ended by itself; return a line for each."""
        lines = []
        for server in (self.valkey, self.postgres, self.seaweedfs):
            if server is not None and server.child.returncode is not None:
                name, code = server.child.spec.name, server.child.returncode
                lines.append(
                    f"{name} ended with exit code {code}; starting it again ({server.child.spec.log_path})"
                )
                server.child = Child(server.child.spec)
                server.wait_ready()
        return lines

    def _start_once(self) -> None:
        keys = self._credentials
        if "seaweedfs" in self._wanted:
            self.seaweedfs = SeaweedServer(
                self._directory / "seaweedfs",
                self._environment,
                access_key=keys.s3_access_key,
                secret_key=keys.s3_secret_key,
                bucket=self._bucket,
            )
        if "valkey" in self._wanted:
            self.valkey = ValkeyServer(self._directory / "valkey", self._environment)
        if "postgres" in self._wanted:
            self.postgres = PostgresServer(
                self._directory / "postgres",
                self._environment,
                password=keys.postgres_password,
                is_disposable=self._is_disposable,
            )
        for server in (self.valkey, self.postgres, self.seaweedfs):
            if server is not None:
                server.wait_ready()


def _is_port_conflict(error: BaseException) -> bool:
    return isinstance(error, EmbeddedError) and "in use" in str(error).lower()
