"""A rank is killed inside a step under the farm's own agent: the job is tried again and ends with its clip.

Database, broker and store are the embedded ones; api, ticker and worker are processes of their own. Where a
server's program is missing, the stage is not run.
"""

import secrets
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from benchmarks.four_gpus import launch
from benchmarks.four_gpus.rank import NotHereError, Place, needing
from benchmarks.four_gpus.record import Row

# Of the farm; of the wheels that its roles and its servers need.
PACKAGES = (
    *("alembic", "argon2", "av", "boto3", "celery", "cryptography", "diffusers", "fastapi", "httpx", "PIL"),
    *("psycopg", "pydantic_settings", "redis", "safetensors", "sqlalchemy", "structlog", "transformers"),
    "uvicorn",
)
PROFILE = "four-ranks"
NUM_STEPS, NUM_STEPS_ON_CPU = 200, 2
FIELDS = {"prompt": "A red kite climbs over dunes.", "resolution": "272p", "seed": 5}
PATIENCE_S = 1000.0


def run_agent(place: Place) -> None:
    """Start the farm, submit, kill a rank, and wait for the clip."""
    with needing(*PACKAGES), tempfile.TemporaryDirectory(prefix="agent-") as name:
        # Imported here: it needs the farm's libraries, which a machine may lack.
        from magi2.checkpoint.tiny import write_tiny_checkpoint

        folder = Path(name)
        folder.chmod(0o755)
        write_tiny_checkpoint(folder / "tiny")
        profiles = folder / "profiles.yaml"
        profiles.write_text(profiles_of(place), encoding="utf-8")
        with servers(folder) as variables:
            lose_a_rank(place, folder, variables | {"FARM_PROFILES_FILE": str(profiles)})


def profiles_of(place: Place) -> str:
    """Return a profiles file with one row, of all ranks."""
    num_devices = 0 if place.device_type == "cpu" else place.world
    return f"""deterministic: false
auto: [{PROFILE}]
profiles:
  {PROFILE}:
    devices: {num_devices}
    ulysses: {place.world}
    vae_patch_parallel: {place.world}
    default_tier: 272p
    execution_timeout_s: 900
    cache_dit: forbidden
"""


@contextmanager
def servers(folder: Path) -> Iterator[dict[str, str]]:
    """Run the embedded servers, and yield the settings that name them.

    Raises:
        NotHereError: A server's program was not found.
    """
    # Imported here: the farm's libraries.
    from farm.embedded.binaries import POSTGRES, VALKEY, WEED, find_program
    from farm.embedded.process import EmbeddedError
    from farm.embedded.servers import EmbeddedServers, ServerSecrets

    environ = launch.environment(on_cpu=True)
    try:
        for program in (POSTGRES, VALKEY, WEED):
            find_program(program, environ)
    except EmbeddedError as error:
        raise NotHereError(f"the embedded servers are not here: {error}") from error
    running = EmbeddedServers(folder, environ, ServerSecrets.generate(), bucket="farm")
    try:
        running.start()
        yield running.variables()
    finally:
        running.stop()


def lose_a_rank(place: Place, folder: Path, variables: dict[str, str]) -> None:
    """Kill the last rank of a job that denoises, and follow the job to its end."""
    # Imported here: the farm's libraries.
    from magi2.media.probe import breaches, probe
    from tests.service.farm_processes import FarmProcesses

    environ, key = farm_of(place, folder, variables)
    farm = FarmProcesses(environ, key, folder / "logs", profile=PROFILE)
    try:
        farm.start("api", "ticker", "worker")
        place.rows.say("api, ticker and worker are started")
        is_cpu = place.device_type == "cpu"
        steps = NUM_STEPS_ON_CPU if is_cpu else NUM_STEPS
        job = farm.submit({**FIELDS, "num_inference_steps": steps})["id"]
        farm.wait_for(job, is_denoising, "denoising", PATIENCE_S)
        farm.kill_engine()
        killed_at = time.monotonic()
        place.rows.say("a rank was killed while the job denoised")
        video = farm.wait_for(job, lambda video: video["status"] == "completed", "completed", PATIENCE_S)
        seconds = time.monotonic() - killed_at
        problems = breaches(probe(farm.download(job, folder / "clip.mp4")), 448, 256)
        facts: dict[str, Any] = {"steps": steps, "problems": problems}
        place.rows.add(
            Row("from the kill to the job's end", seconds, "s", "a valid clip", not problems, facts)
        )
        attempt = video["attempt"]
        place.rows.add(Row("attempts of the job", attempt, "", "2", attempt == 2))
    finally:
        farm.stop()


def is_denoising(video: dict[str, Any]) -> bool:
    """Whether a job is inside its steps."""
    return video["phase"] == "denoise"


def farm_of(place: Place, folder: Path, variables: dict[str, str]) -> tuple[dict[str, str], str]:
    """Migrate the database and make an account; return the roles' environment and the account's key."""
    # Imported here: the farm's libraries.
    from farm.accounts import create_key, ensure_account
    from farm.db import schema
    from farm.db.session import make_engine, unit_of_work
    from farm.embedded.ports import free_ports
    from farm.settings import load_settings

    own = variables | {
        "FARM_API_PORT": str(free_ports(1)[0]),
        "FARM_STATE_DIR": str(folder / "state"),
        "FARM_SECRET_KEY": secrets.token_urlsafe(32),
        "FARM_KEY_PEPPER": secrets.token_urlsafe(32),
        "FARM_RATE__REQUESTS_PER_MINUTE": "100000",
    }
    settings = load_settings(None, overrides=own)
    database = make_engine(settings, application="ticker")
    schema.upgrade(database)
    with unit_of_work(database) as conn:
        key = create_key(conn, ensure_account(conn, "qualify"), settings.key_pepper).text
    database.dispose()
    is_cpu = place.device_type == "cpu"
    devices = "" if is_cpu else ",".join(map(str, range(place.world)))
    of_worker = {"MAGI2_CKPT_ROOT": str(folder / "tiny"), "FARM_WORKER__DEVICES": devices}
    return launch.environment(on_cpu=is_cpu) | own | of_worker, key
