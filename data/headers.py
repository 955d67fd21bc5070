"""Sizes, channels and completeness of picture files, read from their headers without decoding.

PNG (ISO/IEC 15948), JPEG (ITU-T T.81), BMP, WebP (RIFF) and TIFF (revision 6.0 and BigTIFF). Decoders pad or guess
where a file is cut short; :func:`find_damage` says so instead. All functions take an open binary file, or ``BytesIO``.
"""

import os
import re
import struct
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import BinaryIO

_PNG_SIGNATURE = b"\x89PNG\r\n\x1a\n"
_PNG_CHANNELS = {0: 1, 2: 3, 3: 3, 4: 2, 6: 4}
# in coded data 0xff is followed by 00 or by a restart marker; anything else begins the next segment
_JPEG_MARKER = re.compile(rb"\xff[\x01-\xcf\xd8-\xfe]")
_JPEG_STANDALONE = {0x01, *range(0xD0, 0xD9)}
_JPEG_FRAMES = set(range(0xC0, 0xD0)) - {0xC4, 0xC8, 0xCC}
# tag of a TIFF: what its fourth sample means, 1 for colours multiplied by it, 2 for such that are not
EXTRA_SAMPLES = 338
_TIFF_TYPES = {1: "B", 3: "H", 4: "I", 16: "Q"}
# what cv2 decodes
LONGEST_SIDE, MOST_PIXELS = 1 << 20, 1 << 30
# of deflate, by its format; a pixel takes one bit at least
_PNG_PIXELS_PER_BYTE = 1032 * 8
# what reading numbers out of damaged bytes runs into
_NONSENSE = (struct.error, LookupError, ValueError, OverflowError)


class HeaderError(ValueError):
    """Not a picture of a known format, or one of a kind that cannot be read faithfully; the message has no path."""


@dataclass(frozen=True)
class Header:
    """What a file says about its picture.

    Attributes:
        format: ``"png"``, ``"jpeg"``, ``"bmp"``, ``"webp"`` or ``"tiff"``.
        height, width: in pixels as stored, before any EXIF orientation.
        channels: 1 grey, 2 grey and alpha, 3 RGB, 4 RGB and alpha.
        depth: bits per sample after decoding, 8 or 16.
        transparent: the grey value that stands for "transparent" in a PNG without an alpha channel, as decoded.
        multiplied: True for a TIFF whose colours are stored multiplied by its alpha channel.
    """

    format: str
    height: int
    width: int
    channels: int
    depth: int
    transparent: int | None = None
    multiplied: bool = False

    @property
    def alpha(self) -> bool:
        """True when the picture carries transparency."""
        return self.channels in (2, 4)


def read_header(file: BinaryIO) -> Header:
    """Read the header of the picture that starts at position 0 of ``file``.

    Raises:
        HeaderError: no known format, a damaged header, a size beyond what can be decoded, or a kind of picture that
            cannot be read faithfully (floating point or 32-bit samples, CMYK TIFF, animations ...).
    """
    file.seek(0)
    start = file.read(12)
    try:
        header = _reader_for(start)(file)
    except HeaderError:
        raise
    except _NONSENSE as error:
        raise HeaderError("the header is damaged or cut short") from error
    if header.height < 1 or header.width < 1:
        raise HeaderError(f"the header gives a size of {header.height}x{header.width}")
    if max(header.height, header.width) > LONGEST_SIDE or header.height * header.width > MOST_PIXELS:
        limits = f"{LONGEST_SIDE} along a side, {MOST_PIXELS} in all"
        raise HeaderError(f"{header.height}x{header.width} pixels by its header; at most {limits} can be read")
    if header.depth not in (8, 16):
        raise HeaderError(f"{header.depth} bits per sample; 8 and 16 can be read")
    return header


def find_damage(file: BinaryIO, header: Header, thorough: bool = False) -> str | None:
    """What is missing from the file, or None.

    Args:
        file: the same file that ``header`` was read from.
        header: what :func:`read_header` returned.
        thorough: read every byte (checksums of a PNG, all segments of a JPEG), not only the ends.
    """
    size = file.seek(0, os.SEEK_END)
    if not size:
        return "the file is empty"
    if header.format == "png" and header.height * header.width > size * _PNG_PIXELS_PER_BYTE:
        return f"{size} bytes are too few bytes for {header.height}x{header.width} pixels"
    try:
        return {
            "png": _png_damage,
            "jpeg": _jpeg_damage,
            "bmp": _bmp_damage,
            "webp": _webp_damage,
            "tiff": _tiff_damage,
        }[header.format](file, size, thorough)
    except _NONSENSE:
        return "the file is cut short"


def _reader_for(start: bytes) -> Callable[[BinaryIO], Header]:
    if not start:
        raise HeaderError("the file is empty")
    if start.startswith(_PNG_SIGNATURE):
        return _read_png
    if start.startswith(b"\xff\xd8\xff"):
        return _read_jpeg
    if start.startswith(b"BM"):
        return _read_bmp
    if start[:4] == b"RIFF" and start[8:12] == b"WEBP":
        return _read_webp
    if start[:4] in (b"II*\0", b"MM\0*", b"II+\0", b"MM\0+"):
        return _read_tiff
    raise HeaderError("not a PNG, JPEG, BMP, WebP or TIFF picture")


def _unpack(file: BinaryIO, pattern: str) -> tuple[int, ...]:
    return struct.unpack(pattern, file.read(struct.calcsize(pattern)))


def _read_png(file: BinaryIO) -> Header:
    file.seek(12)
    kind, width, height, depth, colour = struct.unpack(">4sIIBB", file.read(14))
    if kind != b"IHDR" or colour not in _PNG_CHANNELS:
        raise HeaderError("the header is damaged or cut short")
    channels, transparent = _PNG_CHANNELS[colour], None
    file.seek(33)
    while True:
        length, kind = _unpack(file, ">I4s")
        if kind in (b"IDAT", b"IEND"):
            break
        if kind == b"acTL":
            raise HeaderError("an animated PNG")
        if kind == b"tRNS" and colour in (2, 3):
            channels = 4
        elif kind == b"tRNS":
            (value,) = _unpack(file, ">H")
            channels, transparent = 2, value * (255 // (2**depth - 1)) if depth <= 8 else value
            length -= 2
        file.seek(length + 4, os.SEEK_CUR)
    return Header("png", height, width, channels, 16 if depth == 16 else 8, transparent)


def _png_damage(file: BinaryIO, size: int, thorough: bool) -> str | None:
    file.seek(-12, os.SEEK_END)
    if not thorough and file.read(12) == b"\0\0\0\0IEND\xaeB`\x82":
        return None
    file.seek(8)
    data = memoryview(file.read())
    position = 0
    while position + 12 <= len(data):
        length, kind = struct.unpack_from(">I4s", data, position)
        end = position + 8 + length
        if end + 4 > len(data):
            break
        if zlib.crc32(data[position + 4 : end]) != struct.unpack_from(">I", data, end)[0]:
            return f"wrong checksum at byte {position + 8}"
        if kind == b"IEND":
            return None
        position = end + 4
    return "the file is cut short"


def _read_jpeg(file: BinaryIO) -> Header:
    file.seek(2)
    adobe = False
    while True:
        prefix, marker = _unpack(file, ">BB")
        while prefix == 0xFF and marker == 0xFF:
            (marker,) = _unpack(file, ">B")
        if prefix != 0xFF or marker == 0xD9:
            raise HeaderError("the header is damaged or cut short")
        if marker in _JPEG_STANDALONE:
            continue
        (length,) = _unpack(file, ">H")
        if marker in _JPEG_FRAMES:
            depth, height, width, channels = _unpack(file, ">BHHB")
            if channels == 4 and not adobe:
                raise HeaderError("a CMYK JPEG without Adobe's marker, which says how inks are stored; save it as RGB")
            # four channels are CMYK, which the decoder turns into RGB
            return Header("jpeg", height, width, 1 if channels == 1 else 3, depth)
        segment = file.read(max(0, min(length - 2, 5))) if marker == 0xEE else b""
        adobe = adobe or segment == b"Adobe"
        file.seek(length - 2 - len(segment), os.SEEK_CUR)


def _jpeg_damage(file: BinaryIO, size: int, thorough: bool) -> str | None:
    file.seek(-2, os.SEEK_END)
    if not thorough and file.read(2) == b"\xff\xd9":
        return None
    file.seek(0)
    data = file.read()
    position = 2
    while position + 2 <= len(data):
        if data[position] != 0xFF:
            return f"no segment at byte {position}"
        marker = data[position + 1]
        if marker == 0xD9:
            return None
        if marker == 0xFF:
            position += 1
        elif marker in _JPEG_STANDALONE:
            position += 2
        else:
            position += 2 + struct.unpack_from(">H", data, position + 2)[0]
            found = _JPEG_MARKER.search(data, position) if marker == 0xDA else None
            position = found.start() if found else position if marker != 0xDA else len(data)
    return "the file is cut short (no end marker)"


def _read_bmp(file: BinaryIO) -> Header:
    file.seek(14)
    size, width, height, _, bits, compression = _unpack(file, "<IiiHHI")
    if size < 40:
        raise HeaderError("a BMP of the OS/2 kind, which cannot be read")
    file.seek(46)
    (colours,) = _unpack(file, "<I")
    channels = 3
    if bits <= 8:
        file.seek(14 + size)
        palette = file.read(4 * min(colours or 256, 2**bits))
        channels = 1 if palette[0::4] == palette[1::4] == palette[2::4] else 3
    elif bits == 32 and size >= 56 and compression in (3, 6):
        file.seek(66)
        channels = 4 if _unpack(file, "<I")[0] else 3
    return Header("bmp", abs(height), width, channels, 8)


def _bmp_damage(file: BinaryIO, size: int, thorough: bool) -> str | None:
    file.seek(10)
    (offset,) = _unpack(file, "<I")
    file.seek(18)
    width, height, _, bits, compression = _unpack(file, "<iiHHI")
    # run-length coded pictures (1, 2) have no size that follows from the header
    needed = 0 if compression in (1, 2) else (width * bits + 31) // 32 * 4 * abs(height)
    return "the file is cut short" if size < offset + max(needed, 1) else None


def _read_webp(file: BinaryIO) -> Header:
    file.seek(12)
    (kind,) = struct.unpack("4s", file.read(4))
    file.seek(20)
    if kind == b"VP8X":
        flags, low_w, high_w, low_h, high_h = _unpack(file, "<B3xHBHB")
        if flags & 2:
            raise HeaderError("an animated WebP")
        size = (high_h << 16 | low_h) + 1, (high_w << 16 | low_w) + 1
        return Header("webp", *size, 4 if flags & 16 else 3, 8)
    if kind == b"VP8L":
        _, bits = _unpack(file, "<BI")
        return Header("webp", (bits >> 14 & 0x3FFF) + 1, (bits & 0x3FFF) + 1, 4 if bits >> 28 & 1 else 3, 8)
    if kind != b"VP8 ":
        raise HeaderError("the header is damaged or cut short")
    file.seek(26)
    width, height = _unpack(file, "<HH")
    return Header("webp", height & 0x3FFF, width & 0x3FFF, 3, 8)


def _webp_damage(file: BinaryIO, size: int, thorough: bool) -> str | None:
    file.seek(4)
    return "the file is cut short" if size < _unpack(file, "<I")[0] + 8 else None


def _read_tiff(file: BinaryIO) -> Header:
    tags, following = tiff_tags(file)
    seen = set()
    while following and following not in seen:
        seen.add(following)
        further, following = tiff_tags(file, following)
        # a small copy of the picture (bit 0) or a mask of it (bit 2) may follow
        if not further.get(254, (0,))[0] & 5:
            raise HeaderError("a TIFF of several pages; save the page you want as a file of its own")
    depth, samples, photometric = max(tags.get(258, (1,))), tags.get(277, (1,))[0], tags.get(262, (1,))[0]
    if max(tags.get(339, (1,))) != 1:
        raise HeaderError("a TIFF with floating-point or signed samples")
    if photometric not in (1, 2, 3, 6) or samples == 2 or samples > 4:
        raise HeaderError(
            f"a TIFF with {samples} samples of photometric kind {photometric}; grey, RGB and RGBA are read"
        )
    if depth == 16 and samples > 1 and tags.get(284, (1,))[0] != 1:
        # cv2 takes the values of one colour for those of all
        raise HeaderError("a TIFF of 16 bits with a plane for each colour; save it with interleaved colours")
    channels = 3 if photometric == 3 else samples
    multiplied = channels == 4 and tags.get(EXTRA_SAMPLES, (0,))[0] == 1
    return Header("tiff", tags[257][0], tags[256][0], channels, 8 if depth == 1 else depth, multiplied=multiplied)


def tiff_tags(file: BinaryIO, start: int | None = None) -> tuple[dict[int, tuple[int, ...]], int]:
    """The integer tags of the picture that ``start`` points to (None: the first), and where the next one is, or 0."""
    size = file.seek(0, os.SEEK_END)
    file.seek(0)
    order, version = struct.unpack("2s2s", file.read(4))
    end = "<" if order == b"II" else ">"
    big = b"+" in version
    word, count_code, inline = ("Q", "Q", 8) if big else ("I", "H", 4)
    file.seek(8 if big else 4)
    file.seek(_unpack(file, end + word)[0] if start is None else start)
    (entries,) = _unpack(file, end + count_code)
    tags = {}
    for _ in range(entries):
        tag, kind, count = _unpack(file, f"{end}HH{word}")
        raw = file.read(inline)
        if kind not in _TIFF_TYPES:
            continue
        pattern = f"{end}{count}{_TIFF_TYPES[kind]}"
        length = struct.calcsize(pattern)
        if length > size:
            raise HeaderError("the header is damaged or cut short")
        if length > inline:
            back = file.tell()
            file.seek(struct.unpack(end + word, raw)[0])
            raw = file.read(length)
            file.seek(back)
        tags[tag] = struct.unpack(pattern, raw[:length])
    return tags, _unpack(file, end + word)[0]


def set_tiff_tag(data: bytes, tag: int, value: int) -> bytes:
    """The same TIFF with another number, up to 65535, in an integer tag of its first picture; unchanged without it."""
    end, big = ("<" if data[:2] == b"II" else ">"), b"+" in data[2:4]
    word, size = ("Q", 20) if big else ("I", 12)
    try:
        (start,) = struct.unpack_from(end + word, data, 8 if big else 4)
        (count,) = struct.unpack_from(end + ("Q" if big else "H"), data, start)
        start += 8 if big else 2
        for place in range(start, start + size * count, size):
            found, kind = struct.unpack_from(f"{end}HH", data, place)
            if found == tag and kind in (3, 4):
                number = struct.pack(end + _TIFF_TYPES[kind], value)
                place += size - (8 if big else 4)
                return data[:place] + number + data[place + len(number) :]
    except struct.error:
        pass
    return data


def _tiff_damage(file: BinaryIO, size: int, thorough: bool) -> str | None:
    tags, _ = tiff_tags(file)
    offsets, counts = (273, 279) if 273 in tags else (324, 325)
    ends = [offset + count for offset, count in zip(tags[offsets], tags[counts], strict=True)]
    return "the file is cut short" if max(ends) > size else None
