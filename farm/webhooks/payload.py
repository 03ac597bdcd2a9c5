"""The bytes of one attempt: the stored body of its message, with links made now.

Presigned links end after an hour, so every attempt carries fresh ones; everything else is the same in each.
Compact JSON in UTF-8. Nothing is sent or read from here; presigning is arithmetic, not a request.
"""

import json
from collections.abc import Callable
from typing import Any

from farm.jobs.states import State
from farm.jobs.video_object import video_urls
from farm.webhooks.deliveries import Delivery

DOWNLOAD_TTL_S = 3_600
Presign = Callable[[str, int, str, str], str]  # (key, ttl_s, filename, media type) -> URL


def body_bytes(delivery: Delivery, base_url: str, presign: Presign) -> bytes:
    """Return the exact bytes to sign and send."""
    body = delivery.body
    if body["data"].get("object") == "video":
        body = {**body, "data": {**body["data"], "urls": _urls(delivery, base_url, presign)}}
    return json.dumps(body, ensure_ascii=False, separators=(",", ":")).encode()


def _urls(delivery: Delivery, base_url: str, presign: Presign) -> dict[str, Any]:
    """Return where to go next; all null for a video that is gone, and for one that never was (a sample)."""
    job_id = delivery.job_id
    if job_id is None or not delivery.has_job:
        return dict.fromkeys(("self", "content", "thumbnail", "events", "cancel", "download"))
    download = None
    if delivery.object_key is not None and delivery.media_type is not None:
        download = presign(delivery.object_key, DOWNLOAD_TTL_S, f"{job_id}.mp4", delivery.media_type)
    urls = video_urls(job_id, State(delivery.body["data"]["state"]), base_url)
    return {"self": f"{base_url}/v1/videos/{job_id}", **urls, "download": download}
