"""Files of unusual kinds, damaged ones and hostile ones: read as they are, or refused by name."""

import io
import os
import struct
import subprocess
import sys
import zlib

import numpy as np
import pytest
from PIL import Image

from data.clean import DownsampleImageDataset
from data.headers import EXTRA_SAMPLES, HeaderError, find_damage, read_header, set_tiff_tag
from data.io import decode, encode
from data.paired import PairedImageDataset
from data.single import SingleImageDataset
from options.errors import DataError


def pillow(image, kind, **settings):
    file = io.BytesIO()
    image.save(file, kind, **settings)
    return file.getvalue()


def chunk(kind, content):
    return struct.pack(">I", len(content)) + kind + content + struct.pack(">I", zlib.crc32(kind + content))


def png(size, depth, colour, rows, *, between=b"", interlaced=0):
    """A PNG written by hand: ``rows`` are the filtered rows, ``between`` further chunks."""
    header = chunk(b"IHDR", struct.pack(">IIBBBBB", size[1], size[0], depth, colour, 0, 0, interlaced))
    end = chunk(b"IDAT", zlib.compress(rows)) + chunk(b"IEND", b"")
    return b"\x89PNG\r\n\x1a\n" + header + between + end


def rows(image):
    big_endian = image.astype(image.dtype.newbyteorder(">"))
    return b"".join(b"\0" + row.tobytes() for row in big_endian)


def interlaced(image):
    places = [(0, 0, 8, 8), (0, 4, 8, 8), (4, 0, 8, 4), (0, 2, 4, 4), (2, 0, 4, 2), (0, 1, 2, 2), (1, 0, 2, 1)]
    return b"".join(rows(image[top::down, left::right]) for top, left, down, right in places)


@pytest.fixture
def photo(photos):
    return photos["chelsea"][100:141, 100:151]


@pytest.fixture
def grey(photo):
    return np.asarray(Image.fromarray(photo).convert("L"))


def three_ways(folder, **options):
    """The one picture of a folder, as each dataset shows it."""
    root = str(folder)
    yield lambda: SingleImageDataset(dataroot_lq=root, **options)[0]["lq"]
    yield lambda: DownsampleImageDataset(dataroot_gt=root, phase="val", scale=1, **options)[0]["gt"]
    yield lambda: PairedImageDataset(dataroot_gt=root, dataroot_lq=root, phase="val", **options)[0]["gt"]


def odd_kinds(photo, grey):
    opaque = np.full_like(grey, 255)
    deep = photo.astype(np.uint16) * 257
    palette = Image.fromarray(photo).quantize(200)
    shown = np.asarray(palette.convert("RGB")) / 255
    jpeg = pillow(Image.fromarray(photo), "jpeg", progressive=True)
    deep_grey = np.dstack([grey.astype(np.uint16) * 200, np.full(grey.shape, 65535, np.uint16)])
    return {
        "grey and opaque alpha.png": (pillow(Image.fromarray(np.dstack([grey, opaque])), "png"), grey / 255),
        "deep grey and opaque alpha.png": (png(grey.shape, 16, 4, rows(deep_grey)), grey * 200.0 / 65535),
        "one bit.png": (pillow(Image.fromarray(grey > 99), "png"), grey > 99),
        "palette.png": (pillow(palette, "png"), shown),
        "palette with opaque alpha.png": (pillow(palette, "png", transparency=b"\xff" * 200), shown),
        "interlaced.png": (png(grey.shape, 8, 2, interlaced(photo), interlaced=1), photo / 255),
        "interlaced and deep.png": (png(grey.shape, 16, 2, interlaced(deep), interlaced=1), photo / 255),
        "progressive.jpg": (jpeg, np.asarray(Image.open(io.BytesIO(jpeg))) / 255),
        "a jpeg in truth.png": (jpeg, np.asarray(Image.open(io.BytesIO(jpeg))) / 255),
        "a png in truth.JPG": (encode(photo, ".png"), photo / 255),
        "UPPER.PNG": (encode(photo, ".png"), photo / 255),
    }


def test_odd_kinds_of_pictures_are_read_as_they_are(tmp_path, photo, grey):
    for name, (content, expected) in odd_kinds(photo, grey).items():
        (tmp_path / name).mkdir()
        (tmp_path / name / name).write_bytes(content)
        expected = expected if expected.ndim == 3 else np.repeat(expected[..., None], 3, axis=2)
        for show in three_ways(tmp_path / name):
            np.testing.assert_allclose(show().numpy().transpose(1, 2, 0), expected, atol=1e-6, err_msg=name)


def transparent_kinds(photo, grey):
    palette = Image.fromarray(photo).quantize(200)
    deep = np.dstack([grey.astype(np.uint16), np.full(grey.shape, 65534, np.uint16)])
    return {
        "grey and alpha.png": pillow(Image.fromarray(np.dstack([grey, grey])), "png"),
        "deep grey and alpha.png": png(grey.shape, 16, 4, rows(deep)),
        "palette and alpha.png": pillow(palette, "png", transparency=int(np.asarray(palette)[0, 0])),
        "one transparent colour.png": png(
            grey.shape, 8, 2, rows(photo), between=chunk(b"tRNS", struct.pack(">HHH", *photo[0, 0].tolist()))
        ),
        "one transparent grey.png": png(
            grey.shape, 8, 0, rows(grey), between=chunk(b"tRNS", struct.pack(">H", int(grey[0, 0])))
        ),
    }


def test_transparency_of_any_kind_is_noticed_before_training(tmp_path, photo, grey):
    for name, content in transparent_kinds(photo, grey).items():
        (tmp_path / name).mkdir()
        (tmp_path / name / name).write_bytes(content)
        for show in three_ways(tmp_path / name):
            with pytest.raises(DataError, match=f"{name} has transparent pixels"):
                show()


def test_a_cmyk_jpeg_is_read_where_it_says_how_its_inks_are_stored(photo):
    data = pillow(Image.fromarray(photo).convert("CMYK"), "jpeg", quality=100)
    assert np.abs(decode(data).astype(int) - photo).max() <= 3
    marker = data.index(b"\xff\xee")
    length = struct.unpack_from(">H", data, marker + 2)[0]
    with pytest.raises(DataError, match=r"ink\.jpg: a CMYK JPEG without"):
        decode(data[:marker] + data[marker + 2 + length :], "ink.jpg")


def test_an_animation_is_refused_instead_of_showing_its_first_picture(photo):
    pictures = [Image.fromarray(photo), Image.fromarray(photo[::-1])]
    for kind in ("png", "webp"):
        with pytest.raises(DataError, match="an animated"):
            decode(pillow(pictures[0], kind, save_all=True, append_images=pictures[1:]))


HUGE = [(60000, 60000), (2**31 - 1, 2**31 - 1), (5, 2**20 + 1)]


# a JPEG cannot state more than 65535 along a side, and a WebP nothing that cannot be decoded
@pytest.mark.parametrize(
    ("kind", "size"), [("jpeg", HUGE[0]), *((kind, size) for kind in ("png", "bmp", "tiff") for size in HUGE)], ids=str
)
def test_a_size_that_cannot_be_decoded_is_refused_from_the_header(tmp_path, photo, kind, size):
    height, width = size
    data = bytearray(pillow(Image.fromarray(photo), kind))
    if kind == "png":
        data = png(size, 8, 2, b"\0" * 1000)
    elif kind == "bmp":
        data[18:26] = struct.pack("<ii", width, height)
    elif kind == "tiff":
        data = data.replace(struct.pack("<HHII", 256, 4, 1, 51), struct.pack("<HHII", 256, 4, 1, width))
        data = data.replace(struct.pack("<HHII", 257, 4, 1, 41), struct.pack("<HHII", 257, 4, 1, height))
    else:
        frame = data.index(b"\xff\xc0")
        data[frame + 5 : frame + 9] = struct.pack(">HH", height, width)
    path = tmp_path / f"bomb.{kind}"
    path.write_bytes(data)
    for show in three_ways(tmp_path):
        with pytest.raises(DataError, match=rf"(?s)[12] problem.*bomb\.{kind}: {height}x{width} pixels"):
            show()


def test_more_pixels_than_the_bytes_can_hold_are_refused_from_the_header(tmp_path):
    (tmp_path / "bomb.png").write_bytes(png((30000, 30000), 8, 2, b"\0" * 1000))
    for show in three_ways(tmp_path):
        with pytest.raises(DataError, match=r"(?s)[12] problem.*bomb\.png: .*too few bytes for 30000x30000 pixels"):
            show()


BIG = """
import resource, sys, zlib
from data.io import decode
from options.errors import DataError
data = open(sys.argv[1], "rb").read()
resource.setrlimit(resource.RLIMIT_AS, (1 << 30,) * 2)
try:
    decode(data, "big.png")
except DataError as error:
    print(error)
"""


def test_a_picture_larger_than_the_memory_is_named(tmp_path):
    size = 16000, 20000
    # enough bytes to be believed; room for the pixels is asked for before they are decoded
    (tmp_path / "big.png").write_bytes(png(size, 8, 2, np.random.default_rng(0).bytes(1 << 16)))
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "PYTHONPATH": os.getcwd()}
    command = [sys.executable, "-c", BIG, str(tmp_path / "big.png")]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert "cannot read big.png: its 16000x20000 pixels do not fit into the memory" in done.stdout, done.stderr


def test_a_file_whose_name_is_not_utf8_is_refused_before_it_reaches_a_table(tmp_path, photo):
    name = os.fsencode(tmp_path) + b"/caf\xe9.png"
    with open(name, "wb") as file:
        file.write(encode(photo, ".png"))
    for show in three_ways(tmp_path, verify="off"):
        with pytest.raises(DataError, match=r"caf\\xe9\.png is not UTF-8.*rename") as caught:
            show()
        str(caught.value).encode("utf-8")


def test_folders_and_broken_links_that_look_like_pictures(tmp_path, photo):
    (tmp_path / "folder.png").mkdir()
    (tmp_path / "folder.png" / "a.png").write_bytes(encode(photo, ".png"))
    for show in three_ways(tmp_path):
        assert show().shape == (3, 41, 51)
    os.symlink(tmp_path / "nowhere", tmp_path / "folder.png" / "link.png")
    for show in three_ways(tmp_path):
        with pytest.raises(DataError, match=r"(?s)[12] problem.*link\.png: No such file"):
            show()


def test_a_pipe_that_looks_like_a_picture_does_not_stop_everything(tmp_path):
    os.mkfifo(tmp_path / "pipe.png")
    for verify in ("headers", "off"):
        for show in three_ways(tmp_path, verify=verify):
            with pytest.raises(DataError, match=r"pipe\.png: not a regular file"):
                show()


SEEDS = [(".png", "RGB"), (".jpeg", "RGB"), (".bmp", "P"), (".tiff", "RGB"), (".tiff", "P"), (".webp", "RGB")]


@pytest.mark.parametrize(("kind", "mode"), [*SEEDS, (".tiff", "big")], ids=str)
def test_no_damage_whatever_leads_to_another_error(photo, kind, mode):
    image = Image.fromarray(photo[:9, :11])
    settings = {"big_tiff": True} if mode == "big" else {}
    good = pillow(image if mode == "big" else image.convert(mode), kind[1:], **settings)
    rng = np.random.default_rng(0)
    for _ in range(1500):
        data = bytearray(good)
        for _ in range(rng.integers(1, 4)):
            # headers are at the beginning, those of TIFF may be at the end
            place = int(rng.choice([rng.integers(64), rng.integers(len(good)), len(good) - rng.integers(1, 200)]))
            length = min(int(rng.integers(1, 9)), len(good) - place)
            data[place : place + length] = bytes([rng.choice([0, 1, 127, 128, 255])]) * length
        file = io.BytesIO(data)
        try:
            find_damage(file, read_header(file))
        except HeaderError:
            continue


def test_a_tiff_of_several_pages_is_refused_and_one_with_a_thumbnail_is_read(tmp_path, photo):
    pages = [Image.fromarray(photo), Image.fromarray(photo[::-1].copy())]
    file = io.BytesIO()
    pages[0].save(file, "tiff", save_all=True, append_images=pages[1:])
    (tmp_path / "pages.tif").write_bytes(file.getvalue())
    for show in three_ways(tmp_path):
        with pytest.raises(DataError, match=r"(?s)pages\.tif: a TIFF of several pages; save the page you want"):
            show()
    file = io.BytesIO()
    # the tag NewSubfileType of the second one says "reduced"
    pages[1].encoderinfo = {"tiffinfo": {254: 1}}
    pages[0].save(file, "tiff", save_all=True, append_images=pages[1:])
    np.testing.assert_array_equal(decode(file.getvalue()), photo)


@pytest.mark.parametrize("meaning", [1, 2], ids=["multiplied", "plain"])
@pytest.mark.parametrize("big", [False, True], ids=["classic", "big"])
def test_the_colours_of_a_tiff_are_those_that_its_alpha_channel_means(noise, meaning, big):
    image = noise((21, 30, 4))
    data = set_tiff_tag(pillow(Image.fromarray(image), "tiff", big_tiff=big), EXTRA_SAMPLES, meaning)
    opened = Image.open(io.BytesIO(data))
    assert opened.tag_v2[EXTRA_SAMPLES] == (meaning,)
    if meaning == 2:
        np.testing.assert_array_equal(decode(data), image)
        return
    difference = np.abs(decode(data).astype(int) - np.asarray(opened.convert("RGBA")))
    # Pillow cuts where this rounds
    assert difference[image[..., 3] > 0].max() <= 1


def test_a_tiff_of_16_bits_in_planes_is_refused(noise):
    data = encode(noise((21, 30, 3), np.uint16), ".tif")
    decode(data)
    with pytest.raises(DataError, match="a plane for each colour; save it with interleaved colours"):
        decode(set_tiff_tag(data, 284, 2))
