"""Which uploads are decoded, and the sizes that a reference image leads to."""

import io
import zlib

import pytest
import torch
from PIL import Image

from magi2.contract import TIERS
from magi2.errors import InvalidInput
from magi2.media import image
from magi2.media.image import latent_grid, letterbox, open_image, prepare_reference

RED, BLUE = (255, 0, 0), (0, 0, 255)


def encoded(picture: Image.Image, kind: str = "PNG", **options: object) -> bytes:
    buffer = io.BytesIO()
    picture.save(buffer, kind, **options)
    return buffer.getvalue()


def two_halves(width: int = 64, height: int = 40) -> Image.Image:
    """Red on the left, blue on the right."""
    picture = Image.new("RGB", (width, height), RED)
    picture.paste(BLUE, (width // 2, 0, width, height))
    return picture


def problem_of(data: bytes) -> str:
    with pytest.raises(InvalidInput) as caught:
        open_image(data)
    [problem] = caught.value.problems
    assert (problem.field, problem.code) == ("input_reference", "image_undecodable")
    return problem.message


@pytest.mark.parametrize(
    ("kind", "options"), [("PNG", {}), ("JPEG", {"quality": 95}), ("WEBP", {"lossless": True})]
)
def test_three_kinds_of_still_images_are_decoded(kind: str, options: dict[str, object]) -> None:
    picture = open_image(encoded(two_halves(), kind, **options))
    assert (picture.mode, picture.size) == ("RGB", (64, 40))
    left, right = picture.getpixel((4, 20)), picture.getpixel((60, 20))
    assert max(abs(a - b) for a, b in zip(left + right, RED + BLUE, strict=True)) <= 2


def test_orientation_of_a_camera_is_applied() -> None:
    exif = Image.Exif()
    exif[0x0112] = 6  # the camera was turned: the stored left edge is the upper edge
    picture = open_image(encoded(two_halves(), "JPEG", exif=exif, quality=95))
    assert picture.size == (40, 64)
    assert picture.getpixel((20, 4))[0] > 200
    assert picture.getpixel((20, 60))[2] > 200


def test_alpha_is_dropped_and_not_composited() -> None:
    picture = open_image(encoded(Image.new("RGBA", (40, 40), (10, 20, 30, 0))))
    assert picture.getpixel((5, 5)) == (10, 20, 30)


def test_palette_with_transparency_is_decoded() -> None:
    palette = two_halves().quantize(2)
    picture = open_image(encoded(palette, transparency=bytes([0, 128])))
    assert picture.mode == "RGB"
    assert picture.getpixel((4, 20)) == RED


@pytest.mark.parametrize("mode", ["L", "LA", "1", "CMYK"])
def test_other_pixel_forms_become_rgb(mode: str) -> None:
    kind = "JPEG" if mode == "CMYK" else "PNG"
    assert open_image(encoded(Image.new(mode, (40, 40)), kind)).mode == "RGB"


def test_sixteen_bit_grey_keeps_its_brightness() -> None:
    picture = open_image(encoded(Image.new("I;16", (40, 40), 0x8000)))
    assert picture.getpixel((5, 5)) == (128, 128, 128)


def test_other_kinds_are_refused() -> None:
    for kind in ("GIF", "BMP", "TIFF"):
        assert "still PNG, JPEG or WebP" in problem_of(encoded(two_halves(), kind))


@pytest.mark.parametrize(
    "data", [b"", b"\x89PNG\r\n\x1a\n", b"<svg xmlns='http://www.w3.org/2000/svg'/>", bytes(100)]
)
def test_bytes_that_are_no_image_are_refused(data: bytes) -> None:
    assert "still PNG, JPEG or WebP" in problem_of(data)


@pytest.mark.parametrize("kind", ["PNG", "JPEG", "WEBP"])
def test_truncated_image_is_refused(kind: str) -> None:
    noise = Image.frombytes("RGB", (64, 64), bytes(range(256)) * 48)
    data = encoded(noise, kind)
    assert "damaged" in problem_of(data[: len(data) // 2])


@pytest.mark.parametrize("kind", ["PNG", "WEBP"])
def test_animation_is_refused(kind: str) -> None:
    data = encoded(two_halves(), kind, save_all=True, append_images=[Image.new("RGB", (64, 40), BLUE)])
    assert "2 frames or pages; send one still image" in problem_of(data)


def test_too_many_bytes_are_refused_before_decoding(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(image, "MAX_IMAGE_BYTES", 50)
    assert "the image is too large: the file has" in problem_of(encoded(two_halves()))


def png_header(width: int, height: int) -> bytes:
    """Make a PNG that claims a size and holds next to nothing."""
    parts = [(b"IHDR", width.to_bytes(4, "big") + height.to_bytes(4, "big") + b"\x08\x02\x00\x00\x00")]
    parts += [(b"IDAT", zlib.compress(bytes(10))), (b"IEND", b"")]
    chunks = [len(d).to_bytes(4, "big") + n + d + zlib.crc32(n + d).to_bytes(4, "big") for n, d in parts]
    return b"\x89PNG\r\n\x1a\n" + b"".join(chunks)


@pytest.mark.parametrize(("width", "height"), [(9000, 6000), (20_000, 100), (30_000, 30_000), (10**6, 10**6)])
def test_decompression_bomb_is_refused_by_its_header(width: int, height: int) -> None:
    assert "the image is too large" in problem_of(png_header(width, height))


@pytest.mark.parametrize(
    ("size", "tier", "grid"),
    [
        ((1920, 1080), "540p", (30, 56)),
        ((640, 480), "540p", (42, 56)),
        ((1000, 1000), "540p", (56, 56)),
        ((1080, 1920), "540p", (56, 30)),
        ((1920, 1080), "272p", (14, 28)),
        ((640, 480), "272p", (20, 28)),
        ((1000, 1000), "272p", (28, 28)),
        ((1080, 1920), "272p", (28, 14)),
        ((2800, 100), "540p", (2, 56)),
    ],
)
def test_grid_of_common_shapes(size: tuple[int, int], tier: str, grid: tuple[int, int]) -> None:
    assert latent_grid(*size, TIERS[tier]) == grid


@pytest.mark.parametrize(
    ("size", "tier"), [((2900, 100), "540p"), ((100, 2900), "540p"), ((1500, 100), "272p")]
)
def test_strip_is_refused_with_the_limit(size: tuple[int, int], tier: str) -> None:
    limit = TIERS[tier].max_aspect
    with pytest.raises(
        InvalidInput, match=rf"the image is {size[0]}x{size[1]}, too elongated .* at most {limit}:1"
    ):
        latent_grid(*size, TIERS[tier])
    with pytest.raises(InvalidInput, match="too elongated"):
        prepare_reference(Image.new("RGB", size), TIERS[tier].width, TIERS[tier].height)


def test_pixels_are_aligned_rounded_to_bf16_and_in_range() -> None:
    pixels = prepare_reference(two_halves(300, 200), 448, 256)
    assert pixels.shape == (1, 3, 1, 288, 448)
    assert pixels.dtype == torch.float32
    assert torch.equal(pixels, pixels.bfloat16().float())
    assert pixels[0, :, 0, 100, 20].tolist() == [1.0, -1.0, -1.0]
    assert pixels[0, :, 0, 100, 420].tolist() == [-1.0, -1.0, 1.0]


def test_square_image_fills_the_long_side() -> None:
    square = Image.new("RGB", (50, 50), RED)
    assert letterbox(square, 448, 256).size == (448, 448)
    assert prepare_reference(square, 448, 256).shape == (1, 3, 1, 448, 448)
