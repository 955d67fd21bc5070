"""EXIF data of a picture that has been restored: turned upright, of another size, the rest to the last byte.

EXIF data are a small TIFF file (CIPA DC-008). What must change is written in place, so that offsets inside the notes of
camera makers stay right.
"""

import struct

_ORIENTATION, _EXIF_DIRECTORY = 274, 34665
_WIDTHS, _HEIGHTS = (256, 40962), (257, 40963)
_SHORT, _LONG = 3, 4
_ENTRY = 12
_DAMAGED = (struct.error, ValueError, KeyError)


def orientation(exif: bytes) -> int:
    """How the picture is to be turned, 1 (as it is) to 8; 1 where the data do not say, or not sensibly."""
    try:
        end = _byte_order(exif)
        entries, _ = _directory(exif, end, None)
        (value,) = struct.unpack_from(f"{end}H", exif, entries[_ORIENTATION] + 8)
    except _DAMAGED:
        return 1
    return value if 1 <= value <= 8 else 1


def adapted(exif: bytes, height: int, width: int) -> bytes | None:
    """The data for the restored picture, or None when they are damaged.

    Args:
        exif: without the ``Exif\\0\\0`` that files put before it.
        height, width: of the restored picture, which stands upright.

    Returns:
        The same data with the orientation 1, the sizes that they state changed, and without the small preview picture,
        which would show the picture as it was.
    """
    changed = bytearray(exif)
    try:
        end = _byte_order(exif)
        entries, link = _directory(exif, end, None)
        # the preview is what the second directory describes
        struct.pack_into(f"{end}I", changed, link, 0)
        if _EXIF_DIRECTORY in entries:
            (start,) = struct.unpack_from(f"{end}I", exif, entries[_EXIF_DIRECTORY] + 8)
            entries |= _directory(exif, end, start)[0]
        sizes = dict.fromkeys(_WIDTHS, width) | dict.fromkeys(_HEIGHTS, height)
        for tag, value in {_ORIENTATION: 1, **sizes}.items():
            if tag in entries:
                _set(changed, end, entries[tag], value)
    except _DAMAGED:
        return None
    return bytes(changed)


def _byte_order(exif: bytes) -> str:
    end = {b"II": "<", b"MM": ">"}[bytes(exif[:2])]
    if struct.unpack_from(f"{end}H", exif, 2) != (42,):
        raise ValueError("no TIFF structure")
    return end


def _directory(exif: bytes, end: str, start: int | None) -> tuple[dict[int, int], int]:
    """Tag -> where its entry is, of the directory at ``start`` (None: the first); and where the link to the next is."""
    if start is None:
        (start,) = struct.unpack_from(f"{end}I", exif, 4)
    (count,) = struct.unpack_from(f"{end}H", exif, start)
    places = [start + 2 + _ENTRY * i for i in range(count)]
    link = start + 2 + _ENTRY * count
    if link > len(exif):
        raise ValueError("cut short")
    return {struct.unpack_from(f"{end}H", exif, place)[0]: place for place in places}, link


def _set(exif: bytearray, end: str, place: int, value: int) -> None:
    (kind,) = struct.unpack_from(f"{end}H", exif, place + 2)
    if kind == _SHORT and value <= 0xFFFF:
        struct.pack_into(f"{end}HIHH", exif, place + 2, _SHORT, 1, value, 0)
    else:
        struct.pack_into(f"{end}HII", exif, place + 2, _LONG, 1, value)
