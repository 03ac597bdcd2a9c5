"""The reference image: from uploaded bytes to the pixels that the image encoder takes.

Promises: only still PNG, JPEG and WebP within fixed limits are decoded; the two resizes and the rounding are
the reference's, bit for bit with the pinned Pillow. It opens no path and no address.
"""

import io
import struct
import warnings
import zlib

import numpy as np
import torch
from PIL import Image, ImageOps
from torch import Tensor

from magi2.contract import IMAGE_FIELD, Problem, Tier, undecodable_image
from magi2.errors import InvalidInput

MAX_IMAGE_BYTES = 20 * 1024 * 1024
MAX_PIXELS = 50_000_000
MAX_SIDE = 16_384

_FORMATS = ("PNG", "JPEG", "WEBP")
# Sides of the pixels are multiples of this, so that the sides of the latent grid are even.
_ALIGNMENT = 32
_PIXELS_PER_LATENT = 16
_WHITE = (255, 255, 255)
# What Pillow's decoders raise for damaged files; MemoryError is left out, it is no fault of the file.
_BROKEN = (OSError, SyntaxError, ValueError, EOFError, LookupError, struct.error, zlib.error, OverflowError)


def open_image(data: bytes) -> Image.Image:
    """Decode an uploaded still image, upright and in RGB; alpha is dropped, not composited.

    Raises:
        InvalidInput: It is no still PNG, JPEG or WebP, is damaged, or exceeds the limits.
    """
    if len(data) > MAX_IMAGE_BYTES:
        raise _too_large(f"the file has {len(data)} bytes; at most {MAX_IMAGE_BYTES} are accepted")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            warnings.simplefilter("error", Image.DecompressionBombWarning)
            with Image.open(io.BytesIO(data), formats=_FORMATS) as image:
                _check_header(image)
                return _to_rgb(ImageOps.exif_transpose(image))
    except (Image.DecompressionBombWarning, Image.DecompressionBombError):
        raise _too_large(f"it exceeds {MAX_PIXELS} pixels") from None
    except _BROKEN:
        raise InvalidInput([undecodable_image("it is damaged, truncated or of another format")]) from None


def canvas_size(image_width: int, image_height: int, width: int, height: int) -> tuple[int, int]:
    """Return the size to which an image is first fitted: its long side becomes the clip's long side."""
    longest = max(width, height)
    if image_width > image_height:
        return longest, int(image_height * longest / image_width)
    return int(image_width * longest / image_height), longest


def pixel_size(image_width: int, image_height: int, width: int, height: int) -> tuple[int, int]:
    """Return the width and height that the encoder sees, for a generation size.

    Raises:
        InvalidInput: The image is so elongated that nothing would be left of its short side.
    """
    canvas = canvas_size(image_width, image_height, width, height)
    fitted = (canvas[0] - canvas[0] % _ALIGNMENT, canvas[1] - canvas[1] % _ALIGNMENT)
    if 0 in fitted:
        limit = max(width, height) // _ALIGNMENT
        given = f"{image_width}x{image_height}"
        text = f"the image is {given}, too elongated for {width}x{height}: at most {limit}:1"
        raise InvalidInput([Problem(IMAGE_FIELD, "image_aspect", text)])
    return fitted


def latent_grid(image_width: int, image_height: int, tier: Tier) -> tuple[int, int]:
    """Return the rows and columns of an image's latent, both even; it need not fit into a video frame's.

    Raises:
        InvalidInput: The image is too elongated for the tier.
    """
    wide, high = pixel_size(image_width, image_height, tier.width, tier.height)
    return high // _PIXELS_PER_LATENT, wide // _PIXELS_PER_LATENT


def letterbox(image: Image.Image, width: int, height: int) -> Image.Image:
    """Fit an RGB image onto a white canvas of its own aspect; at most one row or column stays white."""
    canvas_width, canvas_height = canvas_size(image.width, image.height, width, height)
    scale = min(canvas_width / image.width, canvas_height / image.height)
    fitted = (max(1, round(image.width * scale)), max(1, round(image.height * scale)))
    canvas = Image.new("RGB", (canvas_width, canvas_height), _WHITE)
    corner = ((canvas_width - fitted[0]) // 2, (canvas_height - fitted[1]) // 2)
    canvas.paste(image.resize(fitted, Image.Resampling.LANCZOS), corner)
    return canvas


def prepare_reference(image: Image.Image, width: int, height: int) -> Tensor:
    """Turn an RGB image into the encoder's pixels for a generation size.

    Returns:
        fp32 [1, 3, 1, Y, X] in [-1, 1], rounded to bf16; X and Y are `pixel_size`.

    Raises:
        InvalidInput: The image is too elongated.
    Source: the reference, with Pillow alone. Differs: nothing, the rounding through bf16 is its own.
    """
    size = pixel_size(image.width, image.height, width, height)
    resized = letterbox(image, width, height).resize(size, Image.Resampling.LANCZOS)
    pixels_YXC = torch.from_numpy(np.array(resized, dtype=np.uint8)).to(torch.float32) / 255.0
    pixels_CYX = (2.0 * pixels_YXC - 1.0).to(torch.bfloat16).to(torch.float32).permute(2, 0, 1)
    return pixels_CYX[None, :, None].contiguous()


def _check_header(image: Image.Image) -> None:
    wide, high = image.size
    if wide * high > MAX_PIXELS or max(wide, high) > MAX_SIDE:
        raise _too_large(
            f"it is {wide}x{high}; at most {MAX_PIXELS} pixels and {MAX_SIDE} a side are accepted"
        )
    num_frames = getattr(image, "n_frames", 1)
    if num_frames > 1:
        raise InvalidInput(
            [undecodable_image(f"it holds {num_frames} frames or pages; send one still image")]
        )


def _to_rgb(upright: Image.Image) -> Image.Image:
    if upright.mode.startswith("I"):
        # 16-bit grey: Pillow's own conversion clips everything above 255 to white.
        upright = upright.convert("I").point(lambda value: value * (1 / 256)).convert("L")
    return upright.convert("RGB")


def _too_large(reason: str) -> InvalidInput:
    return InvalidInput([Problem(IMAGE_FIELD, "image_undecodable", f"the image is too large: {reason}")])
