"""Image intake: what is normalised, what is refused, and the limits of the child."""

import hashlib
import io
import json
import struct
import subprocess
import sys
import tempfile
import zlib
from collections.abc import Iterator

import pytest
from PIL import Image

from farm import images
from farm.images import ImageRefusedError, NormalisedImage, normalise_upload

pytestmark = pytest.mark.req("F-22")

PNG_MAGIC = b"\x89PNG\r\n\x1a\n"


@pytest.fixture(autouse=True)
def private_temporary_folder(tmp_path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Whatever intake writes must be gone after a refusal."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    yield
    assert list(tmp_path.iterdir()) == []


def spooled(data: bytes) -> tempfile.SpooledTemporaryFile[bytes]:
    file = tempfile.SpooledTemporaryFile(max_size=1024)  # noqa: SIM115 -- closed with the test
    file.write(data)
    return file


def encoded(image: Image.Image, kind: str, **options: object) -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, kind, **options)
    return buffer.getvalue()


def gradient(mode: str = "RGB", size: tuple[int, int] = (96, 64)) -> Image.Image:
    image = Image.linear_gradient("L").resize(size)
    return image if mode == "L" else image.convert(mode)


def normalised(data: bytes) -> tuple[NormalisedImage, Image.Image, bytes]:
    with spooled(data) as file:
        result = normalise_upload(file)
    png = result.path.read_bytes()
    result.discard()
    return result, Image.open(io.BytesIO(png)), png


def refusal(data: bytes) -> ImageRefusedError:
    with spooled(data) as file, pytest.raises(ImageRefusedError) as caught:
        normalise_upload(file)
    return caught.value


def png_of(width: int, height: int, *, bits: int = 8, colour: int = 2, extra: bytes = b"") -> bytes:
    """Build a PNG that claims a size without holding its pixels."""
    header = struct.pack(">IIBBBBB", width, height, bits, colour, 0, 0, 0)
    return (
        PNG_MAGIC + chunk(b"IHDR", header) + extra + chunk(b"IDAT", zlib.compress(b"")) + chunk(b"IEND", b"")
    )


def chunk(kind: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))


def chunks_of(png: bytes) -> set[bytes]:
    kinds, at = set(), len(PNG_MAGIC)
    while at < len(png):
        (length,) = struct.unpack(">I", png[at : at + 4])
        kinds.add(png[at + 4 : at + 8])
        at += 12 + length
    return kinds


@pytest.mark.parametrize("kind", ["PNG", "JPEG", "WEBP"])
def test_each_accepted_format_becomes_an_rgb_png(kind: str) -> None:
    result, image, png = normalised(encoded(gradient(), kind))
    assert (image.format, image.mode, image.size) == ("PNG", "RGB", (96, 64))
    assert (result.width, result.height) == image.size
    assert result.sha256 == hashlib.sha256(png).hexdigest()


def test_same_pixels_give_the_same_digest() -> None:
    first, _, _ = normalised(encoded(gradient(), "PNG", compress_level=9))
    second, _, _ = normalised(encoded(gradient(), "PNG", compress_level=1, dpi=(72, 72)))
    assert first.sha256 == second.sha256


@pytest.mark.parametrize("mode", ["1", "L", "P", "LA", "RGBA"])
def test_other_colour_modes_become_8_bit_rgb(mode: str) -> None:
    _, image, _ = normalised(encoded(gradient("RGB").convert(mode), "PNG"))
    assert image.mode == "RGB"


def test_alpha_is_dropped_without_compositing() -> None:
    _, image, _ = normalised(encoded(Image.new("RGBA", (40, 40), (200, 100, 50, 0)), "PNG"))
    assert image.getpixel((0, 0)) == (200, 100, 50)


def test_16_bit_grey_is_scaled_not_clipped() -> None:
    source = Image.new("I;16", (40, 40), 32768)
    _, image, _ = normalised(encoded(source, "PNG"))
    assert image.getpixel((20, 20)) == (128, 128, 128)


def test_16_bit_colour_keeps_its_colour() -> None:
    row = b"\0" + struct.pack(">HHH", 0x8080, 0x4040, 0xFFFF) * 40
    data = chunk(b"IDAT", zlib.compress(row * 40))
    header = chunk(b"IHDR", struct.pack(">IIBBBBB", 40, 40, 16, 2, 0, 0, 0))
    _, image, _ = normalised(PNG_MAGIC + header + data + chunk(b"IEND", b""))
    assert image.getpixel((0, 0)) == (0x80, 0x40, 0xFF)


def test_cmyk_jpeg_becomes_rgb() -> None:
    _, image, _ = normalised(encoded(Image.new("CMYK", (40, 40), (0, 255, 255, 0)), "JPEG", quality=95))
    red, green, blue = image.getpixel((20, 20))
    assert red > 240
    assert max(green, blue) < 15


@pytest.mark.parametrize("kind", ["JPEG", "PNG", "WEBP"])
@pytest.mark.parametrize(
    ("orientation", "size"), [(1, (96, 64)), (3, (96, 64)), (6, (64, 96)), (8, (64, 96))]
)
def test_exif_orientation_is_applied(kind: str, orientation: int, size: tuple[int, int]) -> None:
    exif = Image.Exif()
    exif[0x0112] = orientation
    result, _, _ = normalised(encoded(gradient(), kind, exif=exif))
    assert (result.width, result.height) == size


def test_metadata_is_stripped() -> None:
    exif = Image.Exif()
    exif[0x010E] = "taken at home"
    from PIL.ImageCms import ImageCmsProfile, createProfile

    profile = ImageCmsProfile(createProfile("sRGB")).tobytes()
    _, _, png = normalised(encoded(gradient(), "JPEG", exif=exif, icc_profile=profile, dpi=(300, 300)))
    assert chunks_of(png) == {b"IHDR", b"IDAT", b"IEND"}


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"GIF89a" + bytes(64),
        b"II*\0" + bytes(64),
        b"%PDF-1.7",
        b"RIFF\x10\0\0\0WAVE" + bytes(16),
        b"<svg xmlns='http://www.w3.org/2000/svg'/>",
        b"\0\0\0\x20ftypavif" + bytes(32),
    ],
)
def test_other_formats_are_refused_by_their_first_bytes(data: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(images, "_run_child", None)
    error = refusal(data)
    assert (error.http_status, error.code, error.problem.code) == (400, "invalid_image", "image_undecodable")


@pytest.mark.parametrize(
    ("data", "said"),
    [
        (b"", "the file is empty"),
        (b"GIF89a" + bytes(64), "it is a GIF; convert it"),
        (b"BM" + bytes(64), "it is a BMP; convert it"),
        (png_of(8_000, 7_000), "the image is 8000x7000; at most 50 megapixels"),
    ],
)
def test_refusal_says_what_was_found(data: bytes, said: str) -> None:
    assert said in refusal(data).message


@pytest.mark.parametrize("magic", [PNG_MAGIC, b"\xff\xd8\xff\xe0", b"RIFF\x10\0\0\0WEBPVP8 "])
def test_right_magic_over_rubbish_is_refused(magic: bytes) -> None:
    assert refusal(magic + bytes(range(256))).http_status == 400


@pytest.mark.parametrize("kind", ["PNG", "JPEG", "WEBP"])
def test_truncated_file_is_refused(kind: str) -> None:
    data = encoded(Image.effect_noise((256, 256), 90).convert("RGB"), kind)
    error = refusal(data[: len(data) * 2 // 3])
    assert (error.http_status, error.problem.code) == (400, "image_undecodable")


@pytest.mark.parametrize("kind", ["PNG", "WEBP"])
def test_animation_is_refused(kind: str) -> None:
    frames = [Image.new("RGB", (40, 40), colour) for colour in ("red", "green")]
    error = refusal(encoded(frames[0], kind, save_all=True, append_images=frames[1:]))
    assert (error.http_status, error.code) == (400, "invalid_image")
    assert "2 frames" in error.message


def test_multi_picture_jpeg_is_refused() -> None:
    error = refusal(encoded(gradient(), "MPO", save_all=True, append_images=[gradient()]))
    assert (error.http_status, error.code) == (400, "invalid_image")


def test_file_over_20_mib_is_refused_unread() -> None:
    error = refusal(PNG_MAGIC + bytes(20 * 1024 * 1024))
    assert (error.http_status, error.code) == (413, "image_too_large")


@pytest.mark.parametrize(
    ("width", "height"), [(16_385, 100), (100, 16_385), (7_072, 7_072), (2**31 - 1, 2**31 - 1)]
)
def test_bomb_is_refused_by_its_header(width: int, height: int) -> None:
    """The file holds no pixels at all, so reaching the decoder would answer 400, not 413."""
    error = refusal(png_of(width, height))
    assert (error.http_status, error.code, error.problem.code) == (
        413,
        "image_too_large",
        "image_undecodable",
    )


@pytest.mark.parametrize(("width", "height"), [(31, 64), (64, 31), (1, 1)])
def test_tiny_image_is_refused_by_its_header(width: int, height: int) -> None:
    error = refusal(png_of(width, height))
    assert (error.http_status, error.code, error.problem.code) == (400, "invalid_image", "image_too_small")


def test_text_chunk_bomb_is_refused() -> None:
    text = chunk(b"zTXt", b"Comment\0\0" + zlib.compress(bytes(80_000_000)))
    whole = encoded(gradient(), "PNG")
    cut = len(PNG_MAGIC) + 25
    assert refusal(whole[:cut] + text + whole[cut:]).http_status == 400


def test_decoder_that_needs_too_much_memory_is_stopped() -> None:
    """A 48-megapixel image decodes under 1 GiB; with far less room the child gives up instead of the host."""
    target = f"{tempfile.gettempdir()}/out.png"
    program = f"import farm.images as i; i.CHILD_MEMORY_BYTES = 150 << 20; i._child_main('PNG', {target!r})"
    done = subprocess.run(
        [sys.executable, "-c", program],
        input=encoded(Image.new("RGB", (8000, 6000)), "PNG"),
        capture_output=True,
        cwd=images._ROOT,
        timeout=60,
        check=True,
    )
    assert json.loads(done.stdout)["refused"] == "too_large"


def test_decoder_that_computes_too_long_is_stopped(monkeypatch: pytest.MonkeyPatch) -> None:
    program = "import signal, os; os.kill(os.getpid(), signal.SIGXCPU)"
    real_run = subprocess.run
    monkeypatch.setattr(subprocess, "run", lambda _, **kw: real_run([sys.executable, "-c", program], **kw))
    error = refusal(encoded(gradient(), "PNG"))
    assert (error.http_status, error.code) == (413, "image_too_large")


def test_child_lowers_its_own_limits() -> None:
    program = (
        "import resource, farm.images as i; i._limit_this_process();"
        "names = (resource.RLIMIT_AS, resource.RLIMIT_CPU, resource.RLIMIT_CORE);"
        "print([resource.getrlimit(name)[0] for name in names])"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, cwd=images._ROOT, check=True)
    assert json.loads(done.stdout) == [1024**3, 10, 0]


def test_child_gets_no_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = {}
    real_run = subprocess.run

    def spy(command: list[str], **options: object) -> object:
        seen.update(options)
        return real_run(command, **options)

    monkeypatch.setattr(subprocess, "run", spy)
    normalised(encoded(gradient(), "PNG"))
    assert seen["env"] == {}


def test_largest_allowed_image_passes_within_the_limits() -> None:
    result, _, _ = normalised(encoded(gradient("RGB", (8000, 6250)), "JPEG", exif=_turned()))
    assert (result.width, result.height) == (6250, 8000)


def _turned() -> Image.Exif:
    exif = Image.Exif()
    exif[0x0112] = 6
    return exif
