"""`magi2-farm up`: the embedded farm, until Ctrl-C."""

import argparse
import time

from farm.commands import connection
from farm.commands.console import note, result
from farm.commands.exits import Exit
from farm.commands.parsers import Subcommands
from farm.commands.stopping import StopRequested, stop_signals
from farm.embedded.state import Access, StateDirectory
from farm.embedded.supervisor import Started, Supervisor
from farm.settings import environment

TICK_S = 0.2


def add_to(subcommands: Subcommands) -> None:
    """Declare the command."""
    parser = subcommands.add_parser("up", help="run everything on this machine and keep it running")
    parser.set_defaults(run=run)


def run(_: argparse.Namespace) -> int:
    """Start, say how to use it, keep it running, stop it."""
    state = StateDirectory(connection.state_path())
    supervisor = Supervisor(state, environment(), say=note)
    try:
        with stop_signals():
            try:
                announce(supervisor.start(), state)
                while True:
                    time.sleep(TICK_S)
                    supervisor.keep_running()
            finally:
                note("Stopping")
                supervisor.stop()
    except StopRequested:
        return Exit.OK


def announce(started: Started, state: StateDirectory) -> None:
    """Say where the farm is and how to use it; the key itself only when it is new."""
    access = started.access
    result(f"URL   {access.url}")
    if started.is_new_key:
        result(f"key   {access.key}   (shown this once; kept in {state.access_file})")
    else:
        result(f"key   in {state.access_file}")
    result(f"admin {access.url}/admin   (make a login: ./magi2-farm admin create NAME)")
    result("try   " + curl_line(access, state))
    result("or    ./magi2-farm submit 'A lighthouse in a storm' -o lighthouse.mp4")
    note(f"Logs in {state.logs}. Ctrl-C stops everything.")


def curl_line(access: Access, state: StateDirectory) -> str:
    """Return a command that submits a job; the key stays in a file, out of the process list."""
    return (
        f"curl -s {access.url}/v1/videos -H @{state.header_file} -H 'Content-Type: application/json' "
        """-d '{"prompt": "A lighthouse in a storm", "num_inference_steps": 4}'"""
    )
