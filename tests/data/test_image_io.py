"""Reading and writing pictures: what comes back is what was stored, or an error that names the file."""

import io
import struct
import zlib

import cv2
import numpy as np
import pytest
from PIL import Image

from data.headers import read_header
from data.io import convert_color, decode, encode, read_image, remove_alpha, to_float, write_image, write_whole
from options.errors import DataError, OptionsError, UserError

LOSSLESS = [
    (extension, channels, dtype)
    for extension in (".png", ".tif", ".bmp", ".webp")
    for channels in (1, 3, 4)
    for dtype in (np.uint8, np.uint16)
    if not (dtype is np.uint16 and extension in (".bmp", ".webp"))
    and not (channels == 4 and extension == ".bmp")
    and not (channels == 1 and extension == ".webp")
]


def test_a_file_is_complete_before_it_stands_in_its_place_and_takes_nobody_elses(tmp_path):
    path, seen = tmp_path / "a", []
    write_whole(path, b"first", replace=False, settle=lambda found: seen.append((path.exists(), found)))
    ((there, facts),) = seen
    assert (there, facts.st_size, facts.st_mtime_ns) == (False, 5, path.stat().st_mtime_ns)
    with pytest.raises(FileExistsError):
        write_whole(path, b"second", replace=False)
    assert path.read_bytes() == b"first"
    write_whole(path, b"third")
    assert path.read_bytes() == b"third"
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize(("extension", "channels", "dtype"), LOSSLESS)
def test_what_is_written_is_read_back(tmp_path, noise, extension, channels, dtype):
    image = noise((17, 23, channels), dtype)
    if extension == ".webp":
        # where nothing shows, WebP keeps no colour
        image[..., 3:] |= 1
    write_image(tmp_path / f"a{extension}", image)
    back = read_image(tmp_path / f"a{extension}")
    assert back.dtype == dtype
    np.testing.assert_array_equal(back, image)


@pytest.mark.parametrize(("extension", "channels", "dtype"), [*LOSSLESS, (".jpg", 1, np.uint8), (".jpg", 3, np.uint8)])
def test_the_header_says_what_decoding_gives(noise, extension, channels, dtype):
    data = encode(noise((17, 23, channels), dtype), extension)
    header = read_header(io.BytesIO(data))
    assert (header.height, header.width, header.channels, header.depth) == (
        17,
        23,
        channels,
        8 * np.dtype(dtype).itemsize,
    )


def pillow(image, kind, **settings):
    file = io.BytesIO()
    image.save(file, kind, **settings)
    return file.getvalue()


@pytest.fixture
def photo(photos):
    return Image.fromarray(photos["chelsea"][100:140, 100:150])


@pytest.mark.parametrize(
    ("mode", "kind", "channels"),
    [
        ("L", "png", 1),
        ("LA", "png", 2),
        ("P", "png", 3),
        ("RGBA", "png", 4),
        ("1", "png", 1),
        ("I;16", "png", 1),
        ("L", "jpeg", 1),
        ("CMYK", "jpeg", 3),
        ("P", "bmp", 3),
        ("L", "bmp", 1),
        ("P", "tiff", 3),
        ("RGBA", "webp", 4),
    ],
)
def test_files_of_another_writer_are_read_as_it_reads_them(photo, mode, kind, channels):
    image = photo.convert("RGBA" if mode == "RGBA" else "RGB")
    if mode == "RGBA":
        image.putalpha(photo.convert("L"))
    elif mode == "I;16":
        image = Image.fromarray(np.asarray(photo.convert("L")).astype(np.uint16) * 257)
    else:
        image = photo.convert(mode)
    data = pillow(image, kind, **({"lossless": True, "exact": True} if kind == "webp" else {}))
    image = decode(data)
    assert image.shape == (40, 50, channels)
    assert read_header(io.BytesIO(data)).channels == channels
    shown = {1: None, 2: "LA", 3: "RGB", 4: "RGBA"}[channels]
    expected = Image.open(io.BytesIO(data))
    expected = np.asarray(expected.convert(shown) if shown else expected)
    expected = expected * 255 if expected.dtype == bool else expected
    tolerance = 40 if mode == "CMYK" else 4 if kind == "jpeg" else 0
    assert np.abs(image.reshape(expected.shape).astype(int) - expected.astype(int)).max() <= tolerance


def test_a_transparent_grey_value_counts_as_alpha(photo):
    grey = photo.convert("L")
    value = int(np.asarray(grey)[3, 4])
    image = decode(pillow(grey, "png", transparency=value))
    np.testing.assert_array_equal(image[..., 1] == 0, np.asarray(grey) == value)


def test_pixels_come_as_stored_unless_upright_is_asked_for(photo):
    exif = Image.Exif()
    exif[0x112] = 6
    data = pillow(photo, "jpeg", exif=exif)
    assert decode(data).shape == (40, 50, 3)
    assert decode(data, upright=True).shape == (50, 40, 3)


@pytest.mark.parametrize("name", ["Größe ü.png", "two words.png", "写真.jpg", "a.b.c.PNG"])
def test_any_file_name_works(tmp_path, noise, name):
    write_image(tmp_path / "ein Ordner é" / name, noise((9, 8, 3)))
    assert read_image(tmp_path / "ein Ordner é" / name).shape == (9, 8, 3)


@pytest.mark.parametrize("extension", [".png", ".jpg", ".bmp", ".tif", ".webp"])
@pytest.mark.parametrize("kept", [0.0, 0.02, 0.3, 0.6, 0.99])
def test_a_file_that_is_cut_short_is_refused_by_name(tmp_path, photos, extension, kept):
    data = encode(photos["chelsea"][:100, :100], extension)
    path = tmp_path / f"cut{extension}"
    path.write_bytes(data[: int(len(data) * kept)])
    with pytest.raises(DataError, match=f"cut{extension}"):
        read_image(path)


@pytest.mark.parametrize("progressive", [False, True])
def test_a_jpeg_may_carry_a_thumbnail_and_a_trailer_but_not_lack_its_end(photo, progressive):
    data = pillow(photo, "jpeg", progressive=progressive)
    thumbnail = b"\xff\xe2" + struct.pack(">H", len(data) + 2) + data
    framed = data[:2] + thumbnail + data[2:]
    np.testing.assert_array_equal(decode(framed + b"trailer"), decode(data))
    for end in (len(framed) - 20, len(framed) - len(data) + 2):
        # the second one ends with the thumbnail's own end marker
        with pytest.raises(DataError, match="cut short"):
            decode(framed[:end])


def test_a_flipped_bit_in_a_png_is_noticed(noise):
    data = bytearray(encode(noise((30, 30, 3)), ".png"))
    data[len(data) // 2] ^= 1
    with pytest.raises(DataError, match="wrong checksum"):
        decode(bytes(data))


def test_pixels_that_do_not_fit_the_header_are_noticed():
    def chunk(kind, content):
        return struct.pack(">I", len(content)) + kind + content + struct.pack(">I", zlib.crc32(kind + content))

    header = struct.pack(">IIBBBBB", 50, 50, 8, 2, 0, 0, 0)
    rows = zlib.compress(b"\0" * 151 * 20)
    short = b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", rows) + chunk(b"IEND", b"")
    with pytest.raises(DataError, match=r"short\.png"):
        decode(short, "short.png")


@pytest.mark.parametrize("content", [b"", b"hello, this is text", b"GIF89a" + b"\0" * 50, b"\x89PNG\r\n\x1a\n"])
def test_what_is_no_picture_is_refused_by_name(tmp_path, content):
    (tmp_path / "no.png").write_bytes(content)
    with pytest.raises(DataError, match=r"no\.png"):
        read_image(tmp_path / "no.png")


def test_a_missing_file_is_named(tmp_path):
    with pytest.raises(DataError, match=r"gone\.png.*No such file"):
        read_image(tmp_path / "gone.png")


@pytest.mark.parametrize(
    ("mode", "message"),
    [("F", "floating-point"), ("CMYK", "photometric"), ("LA", "photometric"), ("I", "signed|32 bits")],
)
def test_a_tiff_that_would_be_misread_is_refused(photo, mode, message):
    grey = np.asarray(photo.convert("L"))
    image = {"F": Image.fromarray(grey.astype(np.float32)), "I": Image.fromarray(grey.astype(np.int32))}.get(mode)
    data = pillow(image or photo.convert(mode), "tiff")
    with pytest.raises(DataError, match=message):
        decode(data)


@pytest.mark.parametrize(
    ("shape", "dtype", "extension", "message"),
    [
        ((8, 8, 3), np.uint16, ".jpg", "16-bit"),
        ((8, 8, 3), np.uint16, ".bmp", "16-bit"),
        ((8, 8, 4), np.uint8, ".jpg", "alpha"),
        ((8, 8, 2), np.uint8, ".webp", "must be"),
        ((8, 8, 3), np.float32, ".png", "uint8 or uint16"),
        ((0, 8, 3), np.uint8, ".png", "not empty"),
    ],
)
def test_what_a_file_cannot_hold_is_refused(shape, dtype, extension, message):
    with pytest.raises(ValueError, match=message):
        encode(np.zeros(shape, dtype), extension)


@pytest.mark.parametrize("name", ["a.gif", "a", "a.exr"])
def test_an_unknown_extension_is_refused_and_nothing_is_written(tmp_path, name):
    with pytest.raises(DataError, match="cannot write"):
        write_image(tmp_path / name, np.zeros((4, 4, 3), np.uint8))
    assert list(tmp_path.iterdir()) == []


def test_a_failed_write_leaves_the_old_file_and_no_partial_one(tmp_path, noise, monkeypatch):
    path = tmp_path / "a.png"
    write_image(path, noise((8, 8, 3)))
    before = path.read_bytes()

    def full_disk(_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("data.io.os.fsync", full_disk)
    with pytest.raises(DataError, match=r"a\.png: No space left"):
        write_image(path, noise((8, 8, 3), seed=1))
    assert path.read_bytes() == before
    assert [p.name for p in tmp_path.iterdir()] == ["a.png"]


@pytest.mark.parametrize("dtype", [np.uint8, np.uint16])
def test_transparency_follows_the_policy(dtype):
    top = np.iinfo(dtype).max
    image = np.array([[[0, top // 2, top, 0], [0, top // 2, top, top]]], dtype)
    with pytest.raises(DataError, match=r"cat\.png has transparent pixels; set alpha"):
        remove_alpha(image, "error", "cat.png")
    np.testing.assert_array_equal(remove_alpha(image, "drop", "")[0, 0], [0, top // 2, top])
    np.testing.assert_array_equal(remove_alpha(image, "white", "")[0, 0], [top, top, top])
    np.testing.assert_array_equal(remove_alpha(image, "black", "")[0, 0], [0, 0, 0])
    for policy in ("drop", "white", "black"):
        np.testing.assert_array_equal(remove_alpha(image, policy, "")[0, 1], [0, top // 2, top])


def test_an_opaque_alpha_channel_goes_without_a_word(noise):
    image = np.dstack([noise((5, 6, 3)), np.full((5, 6), 255, np.uint8)])
    np.testing.assert_array_equal(remove_alpha(image, "error", "a.png"), image[..., :3])


def test_both_depths_become_zero_to_one():
    assert to_float(np.array([0, 255], np.uint8)).tolist() == [0, 1]
    assert to_float(np.array([0, 65535], np.uint16)).tolist() == [0, 1]
    np.testing.assert_array_equal(to_float(np.arange(256, dtype=np.uint8)), np.arange(256, dtype=np.float32) / 255)


def test_gray_is_the_luma_of_cv2_and_y_the_studio_luma(photos):
    image = to_float(photos["chelsea"])
    np.testing.assert_allclose(convert_color(image, "gray")[..., 0], cv2.cvtColor(image, cv2.COLOR_RGB2GRAY), atol=1e-6)
    primaries = np.array([[[0, 0, 0], [1, 1, 1], [1, 0, 0], [0, 1, 0], [0, 0, 1]]], np.float32)
    expected = [16, 235, 81.481, 144.553, 40.966]
    np.testing.assert_allclose(convert_color(primaries, "y")[0, :, 0] * 255, expected, atol=1e-4)


@pytest.mark.parametrize("color", ["rgb", "gray", "y"])
def test_a_grey_picture_is_treated_as_one_with_equal_channels(noise, color):
    grey = to_float(noise((6, 7, 1)))
    np.testing.assert_allclose(convert_color(grey, color), convert_color(np.repeat(grey, 3, 2), color), atol=1e-6)


@pytest.mark.parametrize("error", [UserError, OptionsError, DataError])
def test_errors_survive_the_way_back_from_a_worker(error):
    assert str(error("a message")) == "a message"
