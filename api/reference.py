"""Takes the one reference image out of a submit, whichever way it came, and has it normalised.

Decoding happens in child processes started from a small pool of threads of its own, so neither the event loop
nor other blocking calls wait for it, and no more children run at once than the pool has threads.
"""

import asyncio
import base64
import binascii
import re
import tempfile
from concurrent.futures import Executor
from dataclasses import dataclass, field, fields
from typing import IO

from api.body import Body
from api.multipart import given_twice
from farm.images import MAX_IMAGE_BYTES, ImageRefusedError, NormalisedImage, normalise_upload, too_many_bytes
from farm.jobs.job import Asset, NewAsset
from magi2.contract import IMAGE_FIELD, ImageFacts, Problem, undecodable_image

_UPLOAD_NAMES = {IMAGE_FIELD, f"{IMAGE_FIELD}[]"}
_DATA_URL = re.compile(r"data:[\w.+/;=-]{0,200};base64,", re.IGNORECASE | re.ASCII)


@dataclass
class Reference:
    """What came as images: one entry of facts per image, and the first one normalised if it could be."""

    facts: list[ImageFacts] = field(default_factory=list)
    image: NormalisedImage | None = None
    asset: NewAsset | None = None  # in the store already
    problems: list[Problem] = field(default_factory=list)
    is_too_large: bool = False

    def discard(self) -> None:
        """Remove the temporary file."""
        if self.image:
            self.image.discard()


def asset_reference(image: Asset, body: Body) -> Reference:
    """Take an image that was uploaded before; a file beside it is one too many."""
    uploads = [upload for upload in body.uploads if upload.field in _UPLOAD_NAMES]
    kept = {name.name: getattr(image, name.name) for name in fields(NewAsset)}
    facts = ImageFacts(image.width or 0, image.height or 0)
    return Reference([facts] * (1 + len(uploads)), asset=NewAsset(**kept))


async def take_reference(body: Body, image_url: str | None, pool: Executor) -> Reference:
    """Find, decode and normalise the image of a request; every problem is kept in the result."""
    taken = Reference()
    uploads = [upload for upload in body.uploads if upload.field in _UPLOAD_NAMES]
    for upload in body.uploads:
        if upload.field not in _UPLOAD_NAMES:
            text = f"no file can be given in {upload.field[:64]!a}; the image goes in {IMAGE_FIELD}"
            taken.problems.append(Problem(IMAGE_FIELD, "field_unsupported", text))
        elif upload.media_type.startswith(("video/", "audio/")):
            text = "only text and one still image can be given; video and audio conditions are not supported"
            taken.problems.append(Problem(IMAGE_FIELD, "media_unsupported", text))
    if uploads and image_url is not None:
        taken.problems.append(given_twice(IMAGE_FIELD))
    if taken.problems or not (uploads or image_url):
        return taken
    loop = asyncio.get_running_loop()
    try:
        if image_url is not None:
            taken.image = await loop.run_in_executor(pool, _normalise_data_url, image_url)
        else:
            taken.image = await loop.run_in_executor(pool, normalise_upload, uploads[0].file)
    except ImageRefusedError as refused:
        taken.problems.append(refused.problem)
        taken.is_too_large = refused.is_too_large
        return taken
    # The contract counts images; only the first is worth decoding, since two are one too many.
    facts = ImageFacts(taken.image.width, taken.image.height)
    taken.facts = [facts] * max(1, len(uploads))
    return taken


def _normalise_data_url(url: str) -> NormalisedImage:
    with tempfile.SpooledTemporaryFile() as file:
        _write_data_url(url, file)
        return normalise_upload(file)


def _write_data_url(url: str, file: IO[bytes]) -> None:
    head = _DATA_URL.match(url)
    if head is None:
        raise ImageRefusedError(undecodable_image("its data: URL must hold base64"))
    if (len(url) - head.end()) * 3 // 4 > MAX_IMAGE_BYTES + 2:
        raise too_many_bytes()
    try:
        file.write(base64.b64decode(url[head.end() :], validate=True))
    except (binascii.Error, ValueError) as exc:
        raise ImageRefusedError(undecodable_image("its data: URL is not valid base64")) from exc
