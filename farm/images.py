"""Image intake: untrusted bytes in, one normalised PNG out.

`normalise_upload` looks at size and first bytes, then lets a short-lived child process (`python -m
farm.images`) read the header, refuse what is too large, too small or animated before decoding, decode under
memory and CPU limits, turn the image upright, drop all metadata and write RGB 8-bit PNG. The api and worker
never decode a user's bytes themselves. It opens only the file object it is given, keeps no original, and does
not know tiers or aspect rules (`magi2.contract`). It blocks: call it in a thread.
"""

import hashlib
import json
import os
import resource
import subprocess
import sys
import tempfile
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from farm.errors import ErrorDetail, FarmError
from magi2.contract import IMAGE_FIELD, MIN_IMAGE_SIDE, Problem, undecodable_image

MAX_IMAGE_BYTES = 20 * 1024 * 1024
MAX_PIXELS = 50_000_000
MAX_SIDE = 16_384
CHILD_MEMORY_BYTES = 1024 * 1024 * 1024
CHILD_CPU_S = 10
# Backstop for a child that waits instead of computing; generous, since a busy host must not refuse good
# images.
CHILD_WALL_S = 60
CHILD_FILE_BYTES = 256 * 1024 * 1024
# zlib level: 1 encodes a 50 MP photo in the CPU budget with room to spare; files are about a tenth larger
# than at 6.
PNG_LEVEL = 1

_ROOT = Path(__file__).resolve().parents[1]
_MAGIC = (("PNG", 0, b"\x89PNG\r\n\x1a\n"), ("JPEG", 0, b"\xff\xd8\xff"), ("WEBP", 8, b"WEBP"))


# Told apart only to say what was found.
_OTHERS = (
    ("a GIF", 0, b"GIF8"),
    ("a BMP", 0, b"BM"),
    ("a TIFF", 0, b"II*\0"),
    ("a TIFF", 0, b"MM\0*"),
    ("a PDF", 0, b"%PDF"),
    ("an AVIF", 4, b"ftypavif"),
    ("a HEIC", 4, b"ftypheic"),
)


class ImageRefusedError(FarmError):
    """The image cannot be used; `problem` is the same refusal in the words of the request contract."""

    def __init__(self, problem: Problem, *, is_too_large: bool = False) -> None:
        """Take the problem; one of size answers 413."""
        code, status = ("image_too_large", 413) if is_too_large else ("invalid_image", 400)
        details = [ErrorDetail(loc=problem.field, msg=problem.message, type=problem.code)]
        super().__init__(code, status, problem.message, details)
        self.problem = problem
        self.is_too_large = is_too_large


@dataclass(frozen=True)
class NormalisedImage:
    """An upright RGB PNG in a temporary file, which the caller discards."""

    path: Path
    width: int
    height: int
    sha256: str

    def discard(self) -> None:
        """Remove the file."""
        self.path.unlink(missing_ok=True)


def normalise_upload(upload: IO[bytes]) -> NormalisedImage:
    """Turn an uploaded file into a normalised PNG.

    Args:
        upload: A seekable file with a descriptor (a spooled file rolls over to disk here); stays open.
    Raises:
        ImageRefusedError: It is no still PNG, JPEG or WebP, or too large, too small, broken.
    """
    size = upload.seek(0, os.SEEK_END)
    if size > MAX_IMAGE_BYTES:
        raise too_many_bytes()
    if size == 0:
        raise ImageRefusedError(undecodable_image("the file is empty"))
    kind = _sniff(upload)
    if kind is None:
        raise ImageRefusedError(undecodable_image(f"{_other_kind(upload)}; convert it"))
    handle, name = tempfile.mkstemp(prefix="magi2-image-", suffix=".png")
    os.close(handle)
    path = Path(name)
    try:
        width, height = _run_child(upload, kind, path)
        with path.open("rb") as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()
    except BaseException:
        path.unlink()
        raise
    return NormalisedImage(path, width, height, digest)


def too_many_bytes() -> ImageRefusedError:
    """Make the refusal of a file over the limit, for whoever counts while the bytes arrive."""
    limit = MAX_IMAGE_BYTES // (1024 * 1024)
    return _too_large(f"the image file is too large: at most {limit} MiB are accepted")


def _too_large(message: str) -> ImageRefusedError:
    return ImageRefusedError(Problem(IMAGE_FIELD, "image_undecodable", message), is_too_large=True)


def _sniff(upload: IO[bytes]) -> str | None:
    upload.seek(0)
    head = upload.read(16)
    for kind, offset, magic in _MAGIC:
        if head[offset : offset + len(magic)] == magic and (kind != "WEBP" or head[:4] == b"RIFF"):
            return kind
    return None


def _other_kind(upload: IO[bytes]) -> str:
    upload.seek(0)
    head = upload.read(16)
    found = next((name for name, offset, magic in _OTHERS if head[offset:].startswith(magic)), None)
    return f"it is {found}" if found else "its first bytes are none of these formats"


def _run_child(upload: IO[bytes], kind: str, path: Path) -> tuple[int, int]:
    descriptor = upload.fileno()
    upload.flush()
    os.lseek(descriptor, 0, os.SEEK_SET)
    command = [sys.executable, "-m", "farm.images", kind, str(path)]
    try:
        # The empty environment keeps the farm's secrets away from whatever the bytes may do to a decoder.
        done = subprocess.run(
            command,
            stdin=descriptor,
            capture_output=True,
            timeout=CHILD_WALL_S,
            cwd=_ROOT,
            env={},
            check=False,
        )
    except subprocess.TimeoutExpired as exc:
        raise _too_large("the image takes too long to decode; send it smaller") from exc
    if done.returncode in {-9, -24}:  # SIGKILL or SIGXCPU: the CPU limit
        raise _too_large("the image takes too long to decode; send it smaller")
    if done.returncode != 0:
        raise ImageRefusedError(undecodable_image("it is damaged or truncated"))
    answer = json.loads(done.stdout)
    if "refused" in answer:
        raise _refusal_of(answer)
    return int(answer["width"]), int(answer["height"])


def _refusal_of(answer: dict[str, str]) -> ImageRefusedError:
    if answer["refused"] == "too_large":
        return _too_large(answer["why"])
    if answer["refused"] == "too_small":
        return ImageRefusedError(Problem(IMAGE_FIELD, "image_too_small", answer["why"]))
    return ImageRefusedError(undecodable_image(answer["why"]))


class _RefusedError(Exception):
    def __init__(self, kind: str, why: str) -> None:
        super().__init__(why)
        self.kind = kind
        self.why = why


def _decode(kind: str, target: str) -> tuple[int, int]:
    """Decode standard input in the child and write the PNG; returns its size."""
    from PIL import Image, ImageOps  # the child alone pays for it, under its limits

    Image.MAX_IMAGE_PIXELS = None  # the check of the header stands for Pillow's, and names the size
    warnings.simplefilter("error", Image.DecompressionBombWarning)
    try:
        with Image.open(sys.stdin.buffer, formats=[kind]) as image:
            _check_header(image.width, image.height, getattr(image, "n_frames", 1))
            Image.MAX_IMAGE_PIXELS = MAX_PIXELS
            upright = ImageOps.exif_transpose(image)
    except (Image.DecompressionBombWarning, Image.DecompressionBombError) as exc:
        raise _RefusedError("too_large", f"the image exceeds {MAX_PIXELS // 1_000_000} megapixels") from exc
    if upright.mode.startswith("I"):
        # 16-bit grey: Pillow's own conversion clips everything above 255 to white.
        upright = upright.convert("I").point(lambda value: value * (1 / 256)).convert("L")
    rgb = upright.convert("RGB")  # drops alpha without compositing, as the model's own intake does
    rgb.info.clear()
    rgb.save(target, format="PNG", compress_level=PNG_LEVEL)
    return rgb.size


def _check_header(width: int, height: int, num_frames: int) -> None:
    if width * height > MAX_PIXELS or max(width, height) > MAX_SIDE:
        most = f"at most {MAX_PIXELS // 1_000_000} megapixels and {MAX_SIDE} pixels a side are accepted"
        raise _RefusedError("too_large", f"the image is {width}x{height}; {most}")
    if min(width, height) < MIN_IMAGE_SIDE:
        least = f"the image must be at least {MIN_IMAGE_SIDE}x{MIN_IMAGE_SIDE}"
        raise _RefusedError("too_small", f"{least} (got {width}x{height})")
    if num_frames > 1:
        raise _RefusedError("undecodable", f"it holds {num_frames} frames or pages; send one still image")


def _limit_this_process() -> None:
    for what, soft, hard in (
        (resource.RLIMIT_AS, CHILD_MEMORY_BYTES, CHILD_MEMORY_BYTES),
        (resource.RLIMIT_CPU, CHILD_CPU_S, CHILD_CPU_S + 1),
        (resource.RLIMIT_FSIZE, CHILD_FILE_BYTES, CHILD_FILE_BYTES),
        (resource.RLIMIT_CORE, 0, 0),
    ):
        resource.setrlimit(what, (soft, hard))


def _child_main(kind: str, target: str) -> int:
    _limit_this_process()
    try:
        width, height = _decode(kind, target)
        answer: dict[str, object] = {"width": width, "height": height}
    except _RefusedError as refused:
        answer = {"refused": refused.kind, "why": refused.why}
    except MemoryError:
        answer = {"refused": "too_large", "why": "the image takes too much memory to decode; send it smaller"}
    sys.stdout.write(json.dumps(answer))
    return 0


if __name__ == "__main__":
    sys.exit(_child_main(*sys.argv[1:]))
