"""What a picture file carries beside its pixels: EXIF data and the colour profile, out of one file and into another.

PNG (ISO/IEC 15948, third edition), JPEG (ITU-T T.81), WebP (RIFF) and TIFF 6.0. Pixels are not touched: blocks of bytes
are taken out of an encoded file and put into another one.
"""

import io
import struct
import warnings
import zlib
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from PIL import Image, TiffImagePlugin

from data import exif as exif_data
from data.headers import HeaderError, read_header

_EXIF, _ICC = b"Exif\0\0", b"ICC_PROFILE\0"
_APP0, _APP1, _APP2, _SCAN = 0xE0, 0xE1, 0xE2, 0xDA
_FRAMES = set(range(0xC0, 0xD0)) - {0xC4, 0xC8, 0xCC}
_SEGMENT = 65533
# colour without a profile, and the pixels' size on paper
_PNG_KEPT = (b"cICP", b"cHRM", b"gAMA", b"sRGB", b"pHYs")
_LARGEST_PROFILE = 1 << 24
# of TIFF: where and how pixels are stored, other pictures, and packets that describe the file as it was
_STORED = {254, 255, 256, 257, 258, 259, 262, 263, 266, 273, 274, 277, 278, 279, 280, 281, 284, 292, 293, 297, 301, 317}
_STORED |= {320, 321, 322, 323, 324, 325, 330, 332, 333, 334, 336, 338, 339, 340, 341, 342, 347, 512, 513, 514, 519}
_STORED |= {520, 521, 529, 530, 531, 532, 700, 33723, 34377, 37724}
_TIFF_ICC, _TIFF_ORIENTATION = 34675, 274
_DAMAGED = (struct.error, LookupError, ValueError, zlib.error, OverflowError, TypeError, SyntaxError, OSError, Warning)


@dataclass(frozen=True)
class Metadata:
    """What was found beside the pixels.

    Attributes:
        exif: EXIF data, beginning with their byte order, or None.
        icc: the colour profile, or None.
        chunks: of a PNG file, (kind, content) of the blocks about colour and the pixels' size on paper.
        orientation: how the stored pixels are to be turned, 1 (not at all) to 8.
        inks: True for a CMYK JPEG.
        damaged: words about what could not be read, or empty.
    """

    exif: bytes | None = None
    icc: bytes | None = None
    chunks: tuple[tuple[bytes, bytes], ...] = ()
    orientation: int = 1
    inks: bool = False
    damaged: str = ""


def read_metadata(data: bytes) -> Metadata:
    """What the file with these bytes carries; nothing for other formats than PNG, JPEG, WebP and TIFF.

    A damaged block does not hide the others; ``damaged`` says that there was one.
    """
    reader = _READERS.get(_kind(data))
    found: dict = {}
    if reader is not None:
        try:
            reader(data, found)
        except _DAMAGED:
            found["damaged"] = "some of its EXIF data or colour profile is damaged and was left out"
    if found.get("exif"):
        found["exif"] = found["exif"].removeprefix(_EXIF)
        found.setdefault("orientation", exif_data.orientation(found["exif"]))
    return Metadata(**found)


def as_stored(data: bytes) -> bytes:
    """The same file without a TIFF's orientation, which decoders may apply without being asked to."""
    if _kind(data) != "tiff" or data[2:4] in (b"+\0", b"\0+"):
        return data
    end = "<" if data[:2] == b"II" else ">"
    try:
        (start,) = struct.unpack_from(f"{end}I", data, 4)
        (count,) = struct.unpack_from(f"{end}H", data, start)
        for place in range(start + 2, start + 2 + 12 * count, 12):
            if struct.unpack_from(f"{end}H", data, place)[0] == _TIFF_ORIENTATION:
                return data[: place + 8] + struct.pack(f"{end}H", 1) + data[place + 10 :]
    except struct.error:
        pass
    return data


def turn_upright(image: np.ndarray, orientation: int) -> np.ndarray:
    """``(h, w, c)`` as stored -> the picture as it is to be seen, by the EXIF orientation (1 to 8); a view."""
    if orientation >= 5:
        image = image.swapaxes(0, 1)
    rows = -1 if orientation in (3, 4, 7, 8) else 1
    columns = -1 if orientation in (2, 3, 6, 7) else 1
    return image[::rows, ::columns]


def put_metadata(data: bytes, metadata: Metadata) -> tuple[bytes, list[str]]:
    """Put EXIF data and the profile into an encoded picture that stands upright and has neither.

    Args:
        data: a whole PNG, JPEG, WebP, TIFF or BMP file.
        metadata: as :func:`read_metadata` found it in the picture that this one was made of.

    Returns:
        The new file, and what it cannot hold, in words.
    """
    header, left = read_header(io.BytesIO(data)), [metadata.damaged] if metadata.damaged else []
    exif = metadata.exif
    if exif:
        exif = exif_data.adapted(exif, header.height, header.width)
        left += [] if exif else ["its EXIF data are damaged and were left out"]
    if header.format == "jpeg" and exif and len(exif) + len(_EXIF) > _SEGMENT:
        left, exif = [*left, f"its {len(exif)} bytes of EXIF data do not fit into a JPEG and were left out"], None
    writer = _WRITERS.get(header.format)
    if writer is None:
        held = " and ".join(name for name, value in (("EXIF data", exif), ("colour profile", metadata.icc)) if value)
        return data, [*left, f"{header.format.upper()} cannot hold its {held}"] if held else left
    chunks = metadata.chunks if header.format == "png" else ()
    return (writer(data, exif, metadata.icc, chunks) if exif or metadata.icc or chunks else data), left


def _kind(data: bytes) -> str:
    try:
        return read_header(io.BytesIO(data)).format
    except HeaderError:
        return ""


def _segments(data: bytes) -> Iterator[tuple[int, int, bytes]]:
    """(marker, where it begins, content) of a JPEG's segments up to the first scan."""
    place = 2
    while True:
        prefix, marker, length = struct.unpack_from(">BBH", data, place)
        if prefix != 0xFF or marker == _SCAN:
            return
        if marker == 0xFF:
            place += 1
            continue
        yield marker, place, data[place + 4 : place + 2 + length]
        place += 2 + length


def _read_jpeg(data: bytes, found: dict) -> None:
    parts = {}
    for marker, _, content in _segments(data):
        if marker == _APP1 and content.startswith(_EXIF):
            found.setdefault("exif", content)
        elif marker == _APP2 and content.startswith(_ICC):
            parts[content[len(_ICC)]] = content[len(_ICC) + 2 :]
        elif marker in _FRAMES:
            found["inks"] = content[5] == 4
    if parts:
        found["icc"] = b"".join(parts[number] for number in sorted(parts))


def _write_jpeg(data: bytes, exif: bytes | None, icc: bytes | None, _: tuple) -> bytes:
    # JFIF wants to be the first
    marker, place, content = next(_segments(data))
    start = place + 4 + len(content) if marker == _APP0 else 2
    blocks = [(_APP1, _EXIF + exif)] if exif else []
    room = _SEGMENT - len(_ICC) - 2
    parts = [icc[i : i + room] for i in range(0, len(icc or b""), room)] if icc else []
    blocks += [(_APP2, _ICC + bytes([i, len(parts)]) + part) for i, part in enumerate(parts, start=1)]
    added = b"".join(struct.pack(">BBH", 0xFF, marker, len(block) + 2) + block for marker, block in blocks)
    return data[:start] + added + data[start:]


def _read_png(data: bytes, found: dict) -> None:
    place, chunks = 8, []
    while place + 12 <= len(data):
        length, kind = struct.unpack_from(">I4s", data, place)
        content = data[place + 8 : place + 8 + length]
        place += 12 + length
        if kind == b"eXIf":
            found["exif"] = content
        elif kind == b"iCCP":
            packed = content[content.index(b"\0") + 2 :]
            found["icc"] = zlib.decompressobj().decompress(packed, _LARGEST_PROFILE)
        elif kind in _PNG_KEPT:
            chunks.append((kind, content))
    found["chunks"] = tuple(chunks)


def _write_png(data: bytes, exif: bytes | None, icc: bytes | None, chunks: tuple) -> bytes:
    blocks = [*chunks, *([(b"iCCP", b"profile\0\0" + zlib.compress(icc))] if icc else [])]
    blocks += [(b"eXIf", exif)] if exif else []
    added = b"".join(
        struct.pack(">I", len(content)) + kind + content + struct.pack(">I", zlib.crc32(kind + content))
        for kind, content in blocks
    )
    return data[:33] + added + data[33:]


def _riff(data: bytes) -> Iterator[tuple[bytes, bytes]]:
    place = 12
    while place + 8 <= len(data):
        kind, length = struct.unpack_from("<4sI", data, place)
        yield kind, data[place + 8 : place + 8 + length]
        place += 8 + length + length % 2


def _read_webp(data: bytes, found: dict) -> None:
    for kind, content in _riff(data):
        if kind in (b"EXIF", b"ICCP"):
            found["exif" if kind == b"EXIF" else "icc"] = content


def _write_webp(data: bytes, exif: bytes | None, icc: bytes | None, _: tuple) -> bytes:
    header = read_header(io.BytesIO(data))
    flags = (0x20 if icc else 0) | (0x10 if header.alpha else 0) | (0x08 if exif else 0)
    sides = b"".join(struct.pack("<I", side - 1)[:3] for side in (header.width, header.height))
    pixels = [(kind, content) for kind, content in _riff(data) if kind in (b"ALPH", b"VP8 ", b"VP8L")]
    chunks = [(b"VP8X", struct.pack("<I", flags) + sides), *([(b"ICCP", icc)] if icc else []), *pixels]
    chunks += [(b"EXIF", exif)] if exif else []
    body = b"WEBP" + b"".join(
        kind + struct.pack("<I", len(content)) + content + b"\0" * (len(content) % 2) for kind, content in chunks
    )
    return b"RIFF" + struct.pack("<I", len(body)) + body


def _read_tiff(data: bytes, found: dict) -> None:
    with warnings.catch_warnings():
        # Pillow reads damaged directories as far as they go
        warnings.simplefilter("error")
        _read_tiff_tags(data, found)


def _read_tiff_tags(data: bytes, found: dict) -> None:
    tags = _tiff_tags(data)
    icc = tags.get(_TIFF_ICC)
    if icc:
        found["icc"] = bytes(icc)
    found["orientation"] = value if (value := tags.get(_TIFF_ORIENTATION, 1)) in range(1, 9) else 1
    for tag in [tag for tag in tags if tag in _STORED | {_TIFF_ICC}]:
        del tags[tag]
    if tags:
        found["exif"] = tags.tobytes()


def _write_tiff(data: bytes, exif: bytes | None, icc: bytes | None, _: tuple) -> bytes:
    added = TiffImagePlugin.ImageFileDirectory_v2(data[:8])
    if exif:
        tags = _tiff_tags(exif)
        for tag in tags:
            if tag not in _STORED:
                added[tag] = tags.get_ifd(tag) if tag in (0x8769, 0x8825) else tags[tag]
    if icc:
        added.tagtype[_TIFF_ICC] = 7
        added[_TIFF_ICC] = icc
    end = "<" if data[:2] == b"II" else ">"
    (first,) = struct.unpack_from(f"{end}I", data, 4)
    data += b"\0" * (len(data) % 2)
    # what the new entries point to, and at the end one directory of old and new ones: nothing old has to move
    block = added.tobytes(len(data))
    entries = sorted(
        [*_entries(data, first, end), *_entries(block, 0, end)], key=lambda e: struct.unpack(f"{end}H", e[:2])
    )
    directory = struct.pack(f"{end}H", len(entries)) + b"".join(entries) + bytes(4)
    block += b"\0" * (len(block) % 2)
    return data[:4] + struct.pack(f"{end}I", len(data) + len(block)) + data[8:] + block + directory


def _entries(data: bytes, start: int, end: str) -> list[bytes]:
    (count,) = struct.unpack_from(f"{end}H", data, start)
    return [data[start + 2 + 12 * i :][:12] for i in range(count)]


def _tiff_tags(data: bytes) -> Image.Exif:
    tags = Image.Exif()
    tags.load(data)
    return tags


_READERS = {"jpeg": _read_jpeg, "png": _read_png, "webp": _read_webp, "tiff": _read_tiff}
_WRITERS = {"jpeg": _write_jpeg, "png": _write_png, "webp": _write_webp, "tiff": _write_tiff}
