"""What docs/api.md prints is run as it stands: the curl lines by bash, the Python by the OpenAI SDK."""

import contextlib
import re
import subprocess
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import openai
import pytest

from farm.embedded.state import Access, StateDirectory
from tests.service.api.conftest import CLIP, Farm, Served, image_bytes

ROOT = Path(__file__).parents[3]
DOCUMENT = (ROOT / "docs" / "api.md").read_text()


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", DOCUMENT, re.MULTILINE | re.DOTALL)


@pytest.fixture
def worker(farm: Farm) -> Iterator[None]:
    """Finish whatever is queued, as a worker would."""
    stop = threading.Event()

    def work() -> None:
        while not stop.wait(0.05):
            if farm.execute("SELECT 1 FROM job WHERE state = 'queued' LIMIT 1"):
                with contextlib.suppress(AssertionError):  # canceled before it could be claimed
                    farm.finish()

    thread = threading.Thread(target=work)
    thread.start()
    yield
    stop.set()
    thread.join(30)
    assert not thread.is_alive()


@pytest.mark.usefixtures("worker")
def test_curl_lines_of_the_documentation_work(
    farm: Farm, serve: Callable[[], Served], png: Path, tmp_path: Path
) -> None:
    script = "set -euo pipefail\n" + "\n".join(blocks("bash"))
    # What `magi2-farm up` leaves: the shell itself is empty, and the document says how to read this.
    StateDirectory(tmp_path / ".state").keep_access(Access(serve().url, farm.key))
    done = subprocess.run(
        ["bash", "-c", script],
        cwd=png.parent,
        env={"PATH": "/usr/bin:/bin"},
        capture_output=True,
        text=True,
        timeout=90,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert (tmp_path / "out.mp4").read_bytes() == CLIP
    assert (tmp_path / "head.bin").read_bytes() == CLIP[:100]
    assert farm.execute("SELECT count(*) FROM job WHERE input_asset_id IS NOT NULL") == [(3,)]
    assert farm.execute("SELECT count(DISTINCT input_asset_id) FROM job") == [(1,)]
    assert farm.execute("SELECT count(*) FROM job WHERE prompt = 'A red fox sleeps.'") == [(1,)]


@pytest.mark.usefixtures("worker")
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_python_of_the_documentation_works(
    farm: Farm, serve: Callable[[], Served], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(ROOT / "clients" / "python")
    (tmp_path / "first.png").write_bytes(image_bytes())
    monkeypatch.setenv("URL", serve().url)
    monkeypatch.setenv("KEY", farm.key)
    programs = blocks("python")
    assert len(programs) == 2
    for program in programs:
        exec(program, {})
        assert (tmp_path / "out.mp4").read_bytes() == CLIP
        (tmp_path / "out.mp4").unlink()
    assert (tmp_path / "sound.wav").read_bytes() == b"RIFF"


@pytest.mark.req("F-14")
@pytest.mark.usefixtures("worker")
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_openai_sdk_submits_images_lists_and_deletes(
    farm: Farm, serve: Callable[[], Served], png: Path
) -> None:
    with openai.OpenAI(base_url=f"{serve().url}/v1", api_key=farm.key) as client:
        extra = {"num_inference_steps": 4, "extra_params": {"resolution": "272p", "deterministic": False}}
        video = client.videos.create(prompt="a fox", input_reference=png, extra_body=extra)
        done = client.videos.poll(video.id)
        listed = [entry.id for entry in client.videos.list(limit=1)]
        deleted = client.videos.delete(video.id)
    assert (done.status, done.progress) == ("completed", 100)
    assert done.model_extra["has_input_reference"] is True
    assert listed == [video.id]
    assert deleted.deleted


@pytest.mark.req("F-16")
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_openai_sdk_returns_a_failed_video_from_poll(farm: Farm, serve: Callable[[], Served]) -> None:
    with openai.OpenAI(base_url=f"{serve().url}/v1", api_key=farm.key) as client:
        video = client.videos.create(prompt="a fox", size="448x256")  # type: ignore[arg-type] # the farm's own size
        client.post(f"/videos/{video.id}/cancel", cast_to=object)
        ended = client.videos.poll(video.id)
    assert ended.status == "failed"
    assert ended.error is not None
    assert ended.error.code == "canceled"


@pytest.mark.req("F-10")
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_openai_sdk_raises_its_own_errors_with_our_codes(farm: Farm, serve: Callable[[], Served]) -> None:
    url = f"{serve().url}/v1"
    with openai.OpenAI(base_url=url, api_key=farm.key, max_retries=0) as client:
        with pytest.raises(openai.UnprocessableEntityError) as refused:
            client.videos.create(prompt="a fox", seconds="4")
        with pytest.raises(openai.NotFoundError):
            client.videos.retrieve("video_1")
    stranger = openai.OpenAI(base_url=url, api_key="x", max_retries=0)
    with stranger, pytest.raises(openai.AuthenticationError):
        stranger.videos.list()
    assert (refused.value.code, refused.value.param) == ("unsupported_duration", "seconds")
