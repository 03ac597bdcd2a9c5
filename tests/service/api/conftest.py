"""The application on real servers: in process for most tests, behind uvicorn where sockets matter."""

import asyncio
import contextlib
import io
import subprocess
import sys
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import httpx
import pytest
import sqlalchemy
import uvicorn
from PIL import Image

from api.app import create_app
from api.body import BodyRules
from farm.accounts import create_key, ensure_account
from farm.clock import now
from farm.db.session import unit_of_work
from farm.groups import Group, heartbeat, register
from farm.jobs.claim import claim
from farm.jobs.estimates import Estimator
from farm.jobs.job import Claimed, NewAsset
from farm.jobs.lifecycle import Result, mark_running, mark_uploading, succeed
from farm.settings import Settings
from farm.storage import ObjectStore, output_key
from magi2.contract import CONTRACT_VERSION

ROOT = Path(__file__).parents[3]
PROFILE = "tiny-cpu"
SUBMIT = {"prompt": "A red fox walks through fresh snow.", "size": "448x256", "num_inference_steps": 4}
CLIP = bytes(range(256)) * 40
OBJECTS = (
    ("video", "video.mp4", "video/mp4", CLIP),
    ("sprite", "sprite.jpg", "image/jpeg", b"tiles"),
    ("audio", "audio.wav", "audio/wav", b"RIFF"),
    ("meta", "meta.json", "application/json", b'{"seed": 1}'),
)
CONDITIONING = {"reference_grid": [18, 28], "branches": {"conditional": {"video": 14336, "text": 9}}}
EVERY_HOST_IS_PUBLIC = "93.184.216.34"


def resolver(host: str, _port: int) -> list[str]:
    return ["10.0.0.7"] if host.endswith(".internal") else [EVERY_HOST_IS_PUBLIC]


@dataclass
class Farm:
    """A farm with one live group and one account, and what a worker would do to its jobs."""

    settings: Settings
    database: sqlalchemy.Engine
    store: ObjectStore
    account_id: str
    key: str

    def new_key(self, account: str = "acme", **options: Any) -> str:
        with unit_of_work(self.database) as conn:
            account_id = ensure_account(conn, account)
            return create_key(conn, account_id, self.settings.key_pepper, **options).text

    @contextlib.asynccontextmanager
    async def client(self, *, key: str | None = None, **changes: Any) -> AsyncIterator[httpx.AsyncClient]:
        """Give a client of an application with other settings."""
        app = create_app(self.settings.model_copy(update=changes), resolver=resolver)
        # What is remembered for a moment would have to be waited for.
        app.state.services.estimator, app.state.services.keep_live_s = Estimator(keep_s=0), 0.0
        transport = httpx.ASGITransport(app, raise_app_exceptions=True)
        headers = {"Authorization": f"Bearer {key or self.key}"}
        async with (
            app.router.lifespan_context(app),
            httpx.AsyncClient(transport=transport, base_url="http://farm", headers=headers) as made,
        ):
            yield made

    def claim(self) -> Claimed:
        with unit_of_work(self.database) as conn:
            claimed = claim(conn, "g1", PROFILE, "boot-1", [CONTRACT_VERSION])
        assert claimed is not None
        return claimed

    def start(self) -> Claimed:
        claimed = self.claim()
        with unit_of_work(self.database) as conn:
            assert mark_running(conn, claimed.job.id, claimed.epoch)
        return claimed

    def finish(self) -> Claimed:
        """Bring the next job to its end, with a clip and its metadata in the store."""
        claimed = self.start()
        job, epoch = claimed.job, claimed.epoch
        with unit_of_work(self.database) as conn:
            assert mark_uploading(conn, job.id, epoch)
        assets = []
        for kind, name, media_type, data in OBJECTS:
            key = output_key(job.account_id, job.id, epoch, name, now())
            stored = self.store.put(key, data, media_type)
            assets.append(NewAsset(kind, key, stored.bytes, str(stored.sha256), media_type))
        data = {"stage_durations": {"denoise": 1.5}, "peak_memory_mb": 12.5, "conditioning": CONDITIONING}
        data["engine"] = {"engine": "test"}
        with unit_of_work(self.database) as conn:
            assert succeed(conn, job.id, epoch, Result(data, assets, {"denoise": 1.5}, 12))
        return claimed

    def execute(self, statement: str, **values: Any) -> list[Any]:
        with unit_of_work(self.database) as conn:
            result = conn.execute(sqlalchemy.text(statement), values)
            return list(result.all()) if result.returns_rows else []

    def num_jobs(self) -> int:
        return int(self.execute("SELECT count(*) FROM job")[0][0])

    def age(self, job_id: str, by: timedelta) -> None:
        self.execute("UPDATE asset SET expires_at = expires_at - :by WHERE job_id = :id", by=by, id=job_id)


@pytest.fixture
def farm(settings: Settings, database: sqlalchemy.Engine, object_store: ObjectStore) -> Farm:
    with unit_of_work(database) as conn:
        account_id = ensure_account(conn, "acme")
        key = create_key(conn, account_id, settings.key_pepper).text
        register(conn, Group("g1", "host", PROFILE, "", "boot-1"))
        heartbeat(conn, "g1", "boot-1", "ready", {"engine": "test"})
    return Farm(settings, database, object_store, account_id, key)


@pytest.fixture
async def client(farm: Farm) -> AsyncIterator[httpx.AsyncClient]:
    """Return a client of the application in this process; a crash of a route fails the test."""
    async with farm.client() as made:
        yield made


@dataclass(frozen=True)
class Served:
    """An application behind a real server."""

    url: str
    port: int
    server: uvicorn.Server


@pytest.fixture
def serve(farm: Farm) -> Iterator[Callable[..., Served]]:
    """Return a function that serves the application by uvicorn on a free port, in a thread."""
    running: list[tuple[uvicorn.Server, threading.Thread]] = []

    def start(body_rules: BodyRules | None = None) -> Served:
        app = create_app(farm.settings, body_rules=body_rules, resolver=resolver)
        config = uvicorn.Config(app, host="127.0.0.1", port=0, log_config=None, timeout_graceful_shutdown=3)
        server = uvicorn.Server(config)
        app.state.services.is_stopping = lambda: server.should_exit
        thread = threading.Thread(target=lambda: asyncio.run(server.serve()))
        thread.start()
        running.append((server, thread))
        while not server.started:
            assert thread.is_alive()
            time.sleep(0.01)
        port = server.servers[0].sockets[0].getsockname()[1]
        return Served(f"http://127.0.0.1:{port}", port, server)

    yield start
    for server, thread in running:
        server.should_exit = True
        thread.join(60)
        assert not thread.is_alive()


@pytest.fixture
def api_process(
    farm: Farm, farm_environment: dict[str, str], tmp_path: Path
) -> Iterator[subprocess.Popen[bytes]]:
    """Run the api as a process of its own, ready, on the port of `FARM_API_PORT`."""
    del farm
    with (tmp_path / "api.log").open("wb") as log:
        running = subprocess.Popen(
            [sys.executable, "-m", "api"], cwd=ROOT, env=farm_environment, stdout=log, stderr=log
        )
    try:
        url = f"http://127.0.0.1:{farm_environment['FARM_API_PORT']}/readyz"
        with httpx.Client(timeout=60, trust_env=False) as client:
            is_ready = False
            while not is_ready:
                assert running.poll() is None, (tmp_path / "api.log").read_text()
                time.sleep(0.1)
                with contextlib.suppress(httpx.TransportError):
                    is_ready = client.get(url).status_code == 200
        yield running
    finally:
        running.kill()
        running.wait()


def image_bytes(kind: str = "PNG", size: tuple[int, int] = (96, 64)) -> bytes:
    buffer = io.BytesIO()
    with contextlib.closing(Image.linear_gradient("L").resize(size).convert("RGB")) as image:
        image.save(buffer, kind)
    return buffer.getvalue()


@pytest.fixture
def png(tmp_path: Path) -> Path:
    path = tmp_path / "first.png"
    path.write_bytes(image_bytes())
    return path
