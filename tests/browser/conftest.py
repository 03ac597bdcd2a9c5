"""The real application on real servers, looked at by Debian's Chromium through Playwright.

One browser serves the whole run; each test gets a farm and a browser profile of its own. Screenshots go to
`build/screenshots/`. Without Chromium the tests fail and say how to get it.
"""

import asyncio
import shutil
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import sqlalchemy
import uvicorn
from playwright.sync_api import Browser, BrowserContext, Page, sync_playwright

from api.app import create_app
from farm.settings import Settings
from farm.storage import ObjectStore
from tests.browser.farm import PASSWORD, LivedFarm
from tests.service.conftest import (
    database,
    database_url,
    farm_environment,
    new_database,
    object_store,
    postgres,
    postgres_admin,
    redis_url,
    s3,
    seaweedfs,
    servers,
    settings,
    template_database,
    valkey,
)

__all__ = [
    "database",
    "database_url",
    "farm_environment",
    "new_database",
    "object_store",
    "postgres",
    "postgres_admin",
    "redis_url",
    "s3",
    "seaweedfs",
    "servers",
    "settings",
    "template_database",
    "valkey",
]

SCREENSHOTS = Path(__file__).parents[2] / "build" / "screenshots"
WIDTHS = {"wide": (1280, 900), "narrow": (360, 780)}
# Generous: the machine may be busy, and nothing is proved by being quick.
PATIENCE_MS = 45_000
Visit = Callable[..., Page]


@pytest.fixture(scope="session")
def browser() -> Iterator[Browser]:
    program = shutil.which("chromium") or shutil.which("chromium-browser")
    if program is None:
        pytest.fail("the browser tier needs Chromium: apt-get install chromium")
    with sync_playwright() as playwright:
        # Containers give no user namespaces to the sandbox; the pages come from this machine alone.
        arguments = [
            "--no-sandbox",
            "--disable-gpu",
            "--disable-dev-shm-usage",
            "--autoplay-policy=no-user-gesture-required",
        ]
        running = playwright.chromium.launch(executable_path=program, args=arguments)
        yield running
        running.close()


@pytest.fixture
def lived(settings: Settings, database: sqlalchemy.Engine, object_store: ObjectStore) -> LivedFarm:
    return LivedFarm(settings, database, object_store)


@pytest.fixture
def address(settings: Settings) -> Iterator[str]:
    """Serve the application and return its address."""
    app = create_app(settings)
    config = uvicorn.Config(app, host="127.0.0.1", port=0, log_config=None, timeout_graceful_shutdown=3)
    server = uvicorn.Server(config)
    app.state.services.is_stopping = lambda: server.should_exit
    thread = threading.Thread(target=lambda: asyncio.run(server.serve()))
    thread.start()
    while not server.started:
        assert thread.is_alive()
        time.sleep(0.02)
    yield f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}"
    server.should_exit = True
    thread.join(60)
    assert not thread.is_alive()


@pytest.fixture
def visit(browser: Browser, address: str) -> Iterator[Visit]:
    """Return a function that opens a browser of some width, logged in unless asked otherwise."""
    opened: list[BrowserContext] = []

    def open_page(
        size: str = "wide", *, name: str | None = "alice", scheme: str = "light", has_script: bool = True
    ) -> Page:
        width, height = WIDTHS[size]
        context = browser.new_context(
            viewport={"width": width, "height": height},
            base_url=address,
            color_scheme=scheme,
            java_script_enabled=has_script,
            reduced_motion="reduce",
        )
        context.set_default_timeout(PATIENCE_MS)
        opened.append(context)
        page = context.new_page()
        if name is not None:
            page.goto("/admin/login")
            page.get_by_label("Name").fill(name)
            page.get_by_label("Password").fill(PASSWORD)
            page.get_by_role("button", name="Log in").click()
            page.wait_for_url("**/admin/")
        return page

    yield open_page
    for context in opened:
        context.close()
