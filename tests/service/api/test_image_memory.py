"""Whatever is sent as an image, and by however many at once: the api process stays small."""

import base64
import json
import re
import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest

from tests.service.api.conftest import SUBMIT, Farm, image_bytes
from tests.service.api.test_assets import bomb

MIB = 1024 * 1024
# Eight bodies of 20 MiB kept in memory would be 160; one as base64 in JSON is about 100 while it is parsed.
MAX_GROWTH_MIB = 150
NUM_AT_ONCE = 8


def peak_mib(process: subprocess.Popen[bytes]) -> float:
    found = re.search(r"VmHWM:\s+(\d+) kB", Path(f"/proc/{process.pid}/status").read_text())
    assert found
    return int(found[1]) / 1024


@pytest.mark.timeout(600)
@pytest.mark.req("F-22")
def test_large_and_broken_images_leave_the_process_small(
    farm: Farm, farm_environment: dict[str, str], api_process: subprocess.Popen[bytes]
) -> None:
    url = f"http://127.0.0.1:{farm_environment['FARM_API_PORT']}/v1/videos"
    headers = {"Authorization": f"Bearer {farm.key}"}
    rubbish = image_bytes()[:8] + bytes(19 * MIB)
    link = "data:image/png;base64," + base64.b64encode(rubbish).decode()

    def send(data: bytes) -> int:
        files = {"input_reference": ("a.png", data, "image/png")}
        form = {"prompt": "a fox", "size": "448x256"}
        return httpx.post(url, data=form, files=files, headers=headers, timeout=120).status_code

    def send_json() -> int:
        body = json.dumps({**SUBMIT, "input_reference": {"image_url": link}}).encode()
        own = {**headers, "Content-Type": "application/json"}
        return httpx.post(url, content=body, headers=own, timeout=120).status_code

    assert send(image_bytes()) == 200
    before_mib = peak_mib(api_process)
    with ThreadPoolExecutor(NUM_AT_ONCE) as pool:
        codes = list(pool.map(send, [rubbish] * NUM_AT_ONCE))
    assert codes == [400] * NUM_AT_ONCE
    assert [send(bomb(20_000, 20_000)), send(bytes(21 * MIB)), send_json()] == [413, 413, 400]
    assert peak_mib(api_process) - before_mib < MAX_GROWTH_MIB
    assert farm.num_jobs() == 1
