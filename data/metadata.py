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
from data.headers import Header, HeaderError, read_header, set_tiff_tag, tiff_tags

_EXIF, _ICC = b"Exif\0\0", b"ICC_PROFILE\0"
_APP0, _APP1, _APP2, _APP13, _SCAN = 0xE0, 0xE1, 0xE2, 0xED, 0xDA
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
# entries of EXIF data that point to further ones: the camera's, of the place, and inside the first of the colour space
_DIRECTORIES, _INTEROPERABILITY = (0x8769, 0x8825), 0xA005
# what a picture looks like that says nothing about its colour: the curve and primaries of sRGB
_USUAL = {
    (b"gAMA", struct.pack(">I", 45455)),
    (b"cHRM", struct.pack(">8I", 31270, 32900, 64000, 33000, 30000, 60000, 15000, 6000)),
    (b"cICP", b"\x01\x0d\x00\x01"),
}
# descriptions that are not carried over, by how they begin or which tag of a TIFF they have
_XMP, _IPTC = b"http://ns.adobe.com/xap/1.0/\0", b"Photoshop 3.0\0"
_TIFF_OTHERS = {700: "XMP", 33723: "IPTC"}
_EXIF_DAMAGED = "its EXIF data are damaged and were left out"
_SOME_DAMAGED = "some of its EXIF data or colour profile is damaged and was left out"
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
        others: kinds of descriptions that are not taken along: "XMP", "IPTC", "text".
        damaged: words about what could not be read, or empty.
    """

    exif: bytes | None = None
    icc: bytes | None = None
    chunks: tuple[tuple[bytes, bytes], ...] = ()
    orientation: int = 1
    inks: bool = False
    others: frozenset[str] = frozenset()
    damaged: str = ""


def read_metadata(data: bytes) -> Metadata:
    """What the file with these bytes carries; nothing for other formats than PNG, JPEG, WebP and TIFF.

    A damaged block does not hide the others, save for those behind it in a TIFF, whose orientation is always found;
    ``damaged`` says that there was one.
    """
    reader = _READERS.get(_kind(data))
    found: dict = {"others": frozenset()}
    if reader is not None:
        try:
            reader(data, found)
        except _DAMAGED:
            found["damaged"] = _SOME_DAMAGED
    if found.get("exif"):
        found["exif"] = found["exif"].removeprefix(_EXIF)
        found.setdefault("orientation", exif_data.orientation(found["exif"]))
    return Metadata(**found)


def as_stored(data: bytes) -> bytes:
    """The same file without a TIFF's orientation, which decoders may apply without being asked to."""
    return set_tiff_tag(data, _TIFF_ORIENTATION, 1) if _kind(data) == "tiff" else data


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
    header = read_header(io.BytesIO(data))
    exif, icc, left = _fitting(metadata, header)
    writer, name = _WRITERS.get(header.format), header.format.upper()
    if writer is None:
        held = " and ".join(name for name, value in (("EXIF data", exif), ("colour profile", icc)) if value)
        return data, [*left, f"{name} cannot hold its {held}"] if held else left
    chunks = metadata.chunks if header.format == "png" else ()
    if not (exif or icc or chunks):
        return data, left
    try:
        return writer(data, exif, icc, chunks), left
    except (*_DAMAGED, AttributeError):
        # only TIFF is written value by value, and not every value is what its type says
        return writer(data, None, icc, chunks), [*left, _EXIF_DAMAGED]


def _fitting(metadata: Metadata, header: Header) -> tuple[bytes | None, bytes | None, list[str]]:
    """EXIF data and profile as a picture with this header takes them, and what is left out, in words."""
    exif, icc, name = metadata.exif, metadata.icc, header.format.upper()
    left = [metadata.damaged] if metadata.damaged else []
    left += [f"its {' and '.join(sorted(metadata.others))} data were left out"] if metadata.others else []
    if exif:
        exif = exif_data.adapted(exif, header.height, header.width)
        left += [] if exif else [_EXIF_DAMAGED]
    if header.format == "jpeg" and exif and len(exif) + len(_EXIF) > _SEGMENT:
        left, exif = [*left, f"its {len(exif)} bytes of EXIF data do not fit into a JPEG and were left out"], None
    if header.format == "tiff" and exif and _tiff_tags(exif)[1]:
        left.append("some of its EXIF data are damaged and were left out")
    if icc and icc[16:20] == b"GRAY" and header.channels > 2:
        left, icc = [*left, f"its colour profile is for grey pictures, which {name} does not know"], None
    lost = [] if header.format == "png" else _lost_colour(metadata)
    left += [f"{name} cannot hold its {' and '.join(lost)}, so its colours may look otherwise"] if lost else []
    return exif, icc, left


def _lost_colour(metadata: Metadata) -> list[str]:
    """The blocks of a PNG without which its colours look otherwise; a profile stands for all but the first."""
    kinds = (b"cICP",) if metadata.icc else (b"cICP", b"cHRM", b"gAMA")
    return [kind.decode() for kind, content in metadata.chunks if kind in kinds and (kind, content) not in _USUAL]


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
    parts, count = {}, 0
    for marker, _, content in _segments(data):
        if marker == _APP1 and content.startswith(_EXIF):
            found.setdefault("exif", content)
        elif marker == _APP1 and content.startswith(_XMP):
            found["others"] |= {"XMP"}
        elif marker == _APP13 and content.startswith(_IPTC) and b"8BIM\x04\x04" in content:
            found["others"] |= {"IPTC"}
        elif marker == _APP2 and content.startswith(_ICC):
            parts[content[len(_ICC)]], count = content[len(_ICC) + 2 :], content[len(_ICC) + 1]
        elif marker in _FRAMES:
            found["inks"] = content[5] == 4
    if sorted(parts) == list(range(1, count + 1)):
        found["icc"] = b"".join(parts[number] for number in sorted(parts)) or None
    else:
        found["damaged"] = _SOME_DAMAGED


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
            try:
                packed = content[content.index(b"\0") + 2 :]
                found["icc"] = zlib.decompressobj().decompress(packed, _LARGEST_PROFILE)
            except (ValueError, zlib.error):
                found["damaged"] = _SOME_DAMAGED
        elif kind in _PNG_KEPT:
            chunks.append((kind, content))
        elif kind in (b"tEXt", b"zTXt", b"iTXt"):
            found["others"] |= {"XMP" if content.startswith(b"XML:com.adobe.xmp\0") else "text"}
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
        elif kind == b"XMP ":
            found["others"] |= {"XMP"}


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
    # by itself, as damage elsewhere must not leave a picture lying on its side
    turned = tiff_tags(io.BytesIO(data))[0].get(_TIFF_ORIENTATION, (1,))[0]
    found["orientation"] = turned if turned in range(1, 9) else 1
    tags, damaged = _tiff_tags(data)
    if damaged:
        found["damaged"] = _SOME_DAMAGED
    found["icc"] = bytes(tags[_TIFF_ICC]) if tags.get(_TIFF_ICC) else None
    found["others"] |= {name for tag, name in _TIFF_OTHERS.items() if tag in tags}
    for tag in [tag for tag in tags if tag in _STORED | {_TIFF_ICC}]:
        del tags[tag]
    if tags:
        found["exif"] = tags.tobytes()


def _write_tiff(data: bytes, exif: bytes | None, icc: bytes | None, _: tuple) -> bytes:
    added = TiffImagePlugin.ImageFileDirectory_v2(data[:8])
    if exif:
        tags, _ = _tiff_tags(exif)
        for tag in [tag for tag in tags if tag not in _STORED]:
            added[tag] = dict(tags.get_ifd(tag)) if tag in _DIRECTORIES else tags[tag]
            if tag in _DIRECTORIES and _INTEROPERABILITY in added[tag]:
                added[tag][_INTEROPERABILITY] = tags.get_ifd(_INTEROPERABILITY)
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


def _tiff_tags(data: bytes) -> tuple[Image.Exif, bool]:
    """The tags of a TIFF or of EXIF data, and whether some are damaged and missing from them."""
    tags = Image.Exif()
    with warnings.catch_warnings(record=True) as told:
        # Pillow reads damaged directories as far as they go
        warnings.simplefilter("always")
        tags.load(data)
        for directory in [tag for tag in tags if tag in _DIRECTORIES]:
            tags.get_ifd(directory)
        # values are looked at when they are asked for
        dict(tags)
    return tags, bool(told)


_READERS = {"jpeg": _read_jpeg, "png": _read_png, "webp": _read_webp, "tiff": _read_tiff}
_WRITERS = {"jpeg": _write_jpeg, "png": _write_png, "webp": _write_webp, "tiff": _write_tiff}
