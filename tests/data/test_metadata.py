"""EXIF data and colour profiles, out of one file and into another; Pillow writes them and reads what came of them."""

import io
import struct
import zlib

import numpy as np
import pytest
from PIL import Image, ImageCms

from data.exif import adapted, orientation
from data.io import decode, encode
from data.metadata import Metadata, as_stored, put_metadata, read_metadata, turn_upright

PROFILE = ImageCms.ImageCmsProfile(ImageCms.createProfile("sRGB")).tobytes()
KINDS = {"jpeg": ".jpg", "png": ".png", "webp": ".webp", "tiff": ".tif"}
MAKER, ORIENTATION, WIDTH, HEIGHT, EXIF, GPS, NOTE = 271, 274, 40962, 40963, 0x8769, 0x8825, 37500


def camera_exif(turned=1):
    exif = Image.Exif()
    exif[MAKER], exif[ORIENTATION], exif[306] = "Maker of cameras", turned, "2020:02:02 20:20:20"
    exif.get_ifd(EXIF).update(
        {WIDTH: 50, HEIGHT: 40, 33434: 1 / 250, NOTE: b"\x00private\xff" * 9, 36867: "2020:02:02"}
    )
    exif.get_ifd(GPS).update({1: "N", 2: (48.0, 12.0, 30.5)})
    # Pillow writes inner directories into a TIFF only when it has read them
    read = Image.Exif()
    read.load(exif.tobytes())
    return read


@pytest.fixture(scope="module")
def photo(photos):
    return Image.fromarray(photos["chelsea"][100:140, 100:150])


@pytest.fixture(scope="module")
def photos():
    import skimage.data

    return {"chelsea": skimage.data.chelsea()}


@pytest.fixture
def written(photo):
    """written(kind, **settings): the bytes of the photograph as Pillow writes them, its EXIF data and profile too."""

    def write(kind, turned=1, profile=PROFILE, exif=None):
        file = io.BytesIO()
        lossless = {"lossless": True} if kind == "webp" else {}
        photo.save(file, kind, exif=exif or camera_exif(turned), icc_profile=profile, **lossless)
        return file.getvalue()

    return write


@pytest.mark.parametrize("target", KINDS)
@pytest.mark.parametrize("source", KINDS)
def test_exif_data_and_profile_go_from_every_format_into_every_other(written, source, target):
    metadata = read_metadata(written(source, turned=6))
    assert (metadata.orientation, metadata.icc, metadata.damaged) == (6, PROFILE, "")
    pixels = np.arange(60 * 70 * 3, dtype=np.uint8).reshape(60, 70, 3)
    data, left_out = put_metadata(encode(pixels, KINDS[target]), metadata)
    back = Image.open(io.BytesIO(data))
    exif = back.getexif()
    assert not left_out
    assert back.size == (70, 60)
    assert back.info["icc_profile"] == PROFILE
    assert (exif[MAKER], exif.get(ORIENTATION, 1)) == ("Maker of cameras", 1)
    inner = exif.get_ifd(EXIF)
    assert (inner[WIDTH], inner[HEIGHT], inner[NOTE]) == (70, 60, b"\x00private\xff" * 9)
    assert float(inner[33434]) == pytest.approx(1 / 250)
    assert exif.get_ifd(GPS)[2] == (48.0, 12.0, 30.5)


@pytest.mark.parametrize("kind", ["png", "webp", "tiff"])
def test_pixels_are_not_touched(written, kind):
    pixels = np.random.default_rng(0).integers(0, 256, (31, 47, 4), np.uint8) | 1
    data, _ = put_metadata(encode(pixels, KINDS[kind]), read_metadata(written("jpeg")))
    np.testing.assert_array_equal(decode(data), pixels)
    np.testing.assert_array_equal(np.asarray(Image.open(io.BytesIO(data))), pixels)


@pytest.mark.parametrize("extension", [".png", ".tif"])
def test_sixteen_bits_stay_beside_a_profile(written, extension):
    pixels = np.random.default_rng(0).integers(0, 1 << 16, (31, 47, 3), np.uint16)
    data, _ = put_metadata(encode(pixels, extension), read_metadata(written("jpeg")))
    np.testing.assert_array_equal(decode(data), pixels)
    assert read_metadata(data).icc == PROFILE


@pytest.mark.parametrize("turned", range(1, 9))
@pytest.mark.parametrize("kind", KINDS)
def test_pictures_are_turned_as_pillow_turns_them(written, photo, kind, turned):
    from PIL import ImageOps

    data = written(kind, turned)
    upright = turn_upright(decode(as_stored(data)), read_metadata(data).orientation)
    expected = np.asarray(ImageOps.exif_transpose(Image.open(io.BytesIO(data))))
    # decoders of JPEG round differently
    assert np.abs(upright.astype(int) - expected).max() <= (12 if kind == "jpeg" else 0)
    assert upright.shape == expected.shape


def test_the_preview_of_the_picture_as_it_was_is_left_out(written):
    preview = camera_exif()
    blob = bytearray(preview.tobytes()[6:])
    # a second directory without entries, as the one that describes a preview would follow
    start = struct.unpack_from(">I" if blob[:2] == b"MM" else "<I", blob, 4)[0]
    end = ">" if blob[:2] == b"MM" else "<"
    count = struct.unpack_from(f"{end}H", blob, start)[0]
    struct.pack_into(f"{end}I", blob, start + 2 + 12 * count, len(blob))
    blob += struct.pack(f"{end}HHHII", 1, 259, 3, 1, 6) + b"\0" * 4
    changed = adapted(bytes(blob), 10, 20)
    assert struct.unpack_from(f"{end}I", changed, start + 2 + 12 * count)[0] == 0


def test_only_what_must_change_changes(written):
    exif = camera_exif(turned=8).tobytes()[6:]
    changed = adapted(exif, 80, 100)
    different = [place for place, (a, b) in enumerate(zip(exif, changed, strict=True)) if a != b]
    assert len(different) <= 12
    assert orientation(exif) == 8
    assert orientation(changed) == 1


def test_a_side_beyond_16_bits_is_stated_in_32(written):
    exif = bytearray(camera_exif().tobytes()[6:])
    changed = Image.Exif()
    changed.load(b"Exif\0\0" + adapted(bytes(exif), 40, 70000))
    assert changed.get_ifd(EXIF)[WIDTH] == 70000


def test_a_profile_larger_than_a_segment_of_jpeg_is_cut_into_several(written, photo):
    profile = PROFILE + bytes(range(256)) * 700
    data, _ = put_metadata(encode(np.asarray(photo), ".jpg"), Metadata(icc=profile))
    assert Image.open(io.BytesIO(data)).info["icc_profile"] == profile
    assert read_metadata(data).icc == profile


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("cut", [9, 30, 60, 200, 400])
def test_damaged_files_are_read_as_far_as_they_go(written, kind, cut):
    read_metadata(written(kind)[:cut])


def test_damaged_exif_data_are_left_out_with_words(photo):
    data, told = put_metadata(encode(np.asarray(photo), ".png"), Metadata(exif=b"MM\0*\0\0\0\x08\0\x09"))
    assert Image.open(io.BytesIO(data)).size == photo.size
    assert told == ["its EXIF data are damaged and were left out"]


def test_what_a_format_cannot_hold_is_told(written, photo):
    metadata = read_metadata(written("jpeg"))
    bmp = encode(np.asarray(photo), ".bmp")
    assert put_metadata(bmp, metadata) == (bmp, ["BMP cannot hold its EXIF data and colour profile"])
    large = Metadata(exif=metadata.exif + b"\0" * 70000)
    data, told = put_metadata(encode(np.asarray(photo), ".jpg"), large)
    assert "do not fit into a JPEG" in told[0]
    assert Image.open(io.BytesIO(data)).size == photo.size


def test_colour_of_a_png_without_a_profile_is_kept(photo):
    file = io.BytesIO()
    photo.save(file, "png", dpi=(300, 300))
    gamma = Metadata(chunks=(*read_metadata(file.getvalue()).chunks, (b"gAMA", struct.pack(">I", 100000))))
    data, _ = put_metadata(encode(np.asarray(photo), ".png"), gamma)
    assert Image.open(io.BytesIO(data)).info["gamma"] == 1.0
    assert Image.open(io.BytesIO(data)).info["dpi"][0] == pytest.approx(300, abs=0.1)


def test_a_cmyk_jpeg_is_known(photo):
    file = io.BytesIO()
    photo.convert("CMYK").save(file, "jpeg")
    assert read_metadata(file.getvalue()).inks


def chunk(kind, content):
    return struct.pack(">I", len(content)) + kind + content + struct.pack(">I", zlib.crc32(kind + content))


def test_a_damaged_profile_leaves_a_png_its_orientation_and_its_gamma(written):
    data = written("png", turned=6, profile=None)
    blocks = chunk(b"iCCP", b"p\0\0no zlib") + chunk(b"gAMA", struct.pack(">I", 100000))
    metadata = read_metadata(data[:33] + blocks + data[33:])
    assert (metadata.orientation, metadata.icc, [kind for kind, _ in metadata.chunks]) == (6, None, [b"gAMA"])
    assert "damaged" in metadata.damaged


@pytest.mark.parametrize("big", [False, True], ids=["damaged", "big"])
def test_a_tiff_is_turned_upright_whatever_else_cannot_be_read(photo, big):
    file = io.BytesIO()
    photo.save(file, "tiff", big_tiff=big, tiffinfo={ORIENTATION: 6, MAKER: "Maker of cameras"})
    data = file.getvalue()
    if not big:
        # the maker's name lies beyond the end of the file
        place = data.index(struct.pack("<HH", MAKER, 2))
        data = data[: place + 8] + struct.pack("<I", 10**8) + data[place + 12 :]
    metadata = read_metadata(data)
    assert "damaged" in metadata.damaged
    upright = turn_upright(decode(as_stored(data)), metadata.orientation)
    np.testing.assert_array_equal(upright, np.rot90(np.asarray(photo), -1))


@pytest.mark.parametrize("kind", KINDS)
def test_damaged_exif_data_never_keep_a_picture_from_being_written(photo, kind):
    exif, pixels = camera_exif().tobytes()[6:], np.asarray(photo)
    encoded, random = encode(pixels, KINDS[kind]), np.random.default_rng(0)
    told = set()
    for _ in range(150):
        broken = bytearray(exif)
        for place in random.integers(0, len(exif), 3):
            broken[place] = random.integers(256)
        data, left_out = put_metadata(encoded, Metadata(exif=bytes(broken), icc=PROFILE))
        assert read_metadata(data).icc == PROFILE
        told.update(left_out)
    assert any("damaged" in words for words in told)


def test_an_unfinished_profile_of_a_jpeg_is_left_out_with_words(photo):
    data, _ = put_metadata(encode(np.asarray(photo), ".jpg"), Metadata(icc=PROFILE + bytes(140000)))
    place = data.rindex(b"ICC_PROFILE\0")
    metadata = read_metadata(data[:place] + b"?" + data[place + 1 :])
    assert metadata.icc is None
    assert "damaged" in metadata.damaged


def test_a_profile_of_grey_pictures_does_not_come_into_one_of_three_colours(photo):
    grey = Metadata(icc=PROFILE[:16] + b"GRAY" + PROFILE[20:])
    data, told = put_metadata(encode(np.asarray(photo.convert("L")), ".webp"), grey)
    assert "icc_profile" not in Image.open(io.BytesIO(data)).info
    assert told == ["its colour profile is for grey pictures, which WEBP does not know"]
    data, told = put_metadata(encode(np.asarray(photo.convert("L")), ".jpg"), grey)
    assert (Image.open(io.BytesIO(data)).info["icc_profile"], told) == (grey.icc, [])


def test_colour_that_only_a_png_can_state_is_told_when_it_is_lost(photo):
    usual, wide = (b"cICP", bytes([1, 13, 0, 1])), (b"cICP", bytes([12, 13, 0, 1]))
    jpeg = encode(np.asarray(photo), ".jpg")
    assert put_metadata(jpeg, Metadata(chunks=(usual,))) == (jpeg, [])
    assert "JPEG cannot hold its cICP" in put_metadata(jpeg, Metadata(chunks=(wide,)))[1][0]


@pytest.mark.parametrize("kind", ["jpeg", "png", "webp"])
def test_descriptions_that_are_not_taken_along_are_told(photo, kind):
    from PIL import PngImagePlugin

    file, text = io.BytesIO(), PngImagePlugin.PngInfo()
    text.add_itxt("XML:com.adobe.xmp", "<x:xmpmeta/>")
    photo.save(file, kind, **({"pnginfo": text} if kind == "png" else {"xmp": b"<x:xmpmeta/>"}))
    assert put_metadata(encode(np.asarray(photo), ".jpg"), read_metadata(file.getvalue()))[1] == [
        "its XMP data were left out"
    ]
