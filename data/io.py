"""Pictures in and out: decode, encode, transparency, colour and bit depth; of this room the only file that knows cv2.

Arrays are RGB, ``(h, w, c)``, in the file's own depth: uint8 or uint16. Pixels come as they are stored: an EXIF
orientation is not applied, so that the two sides of a training pair can never be turned differently;
``upright=True`` applies it for people's photographs.
"""

import errno
import io
import os
import struct
import uuid
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Literal, get_args

import cv2
import numpy as np

from data.headers import EXTRA_SAMPLES, Header, HeaderError, find_damage, read_header, set_tiff_tag
from options.errors import DataError, OptionsError
from options.registry import nearest

EXTENSIONS = (".png", ".jpg", ".jpeg", ".bmp", ".tif", ".tiff", ".webp")
Alpha = Literal["error", "drop", "white", "black"]
Color = Literal["rgb", "gray", "y"]
ALPHA_POLICIES, COLORS = get_args(Alpha), get_args(Color)

_DEEP = (".png", ".tif", ".tiff")
_WITH_ALPHA = (".png", ".tif", ".tiff", ".webp")
# BT.601: full range for grey, 16..235 for y (on a range of 0..1)
_GRAY_WEIGHTS = np.array([0.299, 0.587, 0.114])
_Y_WEIGHTS = np.array([65.481, 128.553, 24.966])


def decode(data: bytes, label: str = "the picture", *, upright: bool = False) -> np.ndarray:
    """Decode the bytes of a PNG, JPEG, BMP, TIFF or WebP file.

    Args:
        data: the whole file.
        label: what to call it in messages, usually its path.
        upright: turn a JPEG by its EXIF orientation.

    Returns:
        ``(h, w, c)``, uint8 or uint16; c is 1 (grey), 2 (grey and alpha), 3 (RGB) or 4 (RGB and alpha).

    Raises:
        DataError: no picture, cut short, a wrong checksum, or a kind that cannot be read faithfully.
    """
    file = io.BytesIO(data)
    try:
        header = read_header(file)
    except HeaderError as error:
        raise DataError(f"cannot read {label}: {error}") from error
    damage = find_damage(file, header, thorough=True)
    if damage:
        raise DataError(f"cannot read {label}: {damage}")
    flags = cv2.IMREAD_UNCHANGED | cv2.IMREAD_IGNORE_ORIENTATION
    if upright and header.format == "jpeg":
        flags = cv2.IMREAD_ANYCOLOR | cv2.IMREAD_ANYDEPTH
    if header.format == "tiff" and header.channels == 4:
        # otherwise libtiff multiplies colours of 8 bits by the alpha channel
        data = set_tiff_tag(data, EXTRA_SAMPLES, 0)
    try:
        image = cv2.imdecode(np.frombuffer(data, np.uint8), flags)
        if image is None:
            raise DataError(f"cannot read {label}: the {header.format} data are damaged")
        image = _to_rgb(image, header, label)
        return _divided(image) if header.multiplied else image
    except (cv2.error, MemoryError) as error:
        size = f"{header.height}x{header.width} pixels"
        full = isinstance(error, MemoryError) or error.code == cv2.Error.StsNoMem
        reason = f"its {size} do not fit into the memory" if full else f"{error.err} ({size})"
        raise DataError(f"cannot read {label}: {reason}") from error


def read_image(path: str | os.PathLike, *, upright: bool = False) -> np.ndarray:
    """Read and :func:`decode` a file; a missing or unreadable one is a DataError that names it."""
    return decode(read_bytes(path), str(path), upright=upright)


def read_bytes(path: str | os.PathLike) -> bytes:
    """The content of a file.

    Raises:
        DataError: the file is missing or cannot be read; the message names it.
    """
    try:
        return Path(path).read_bytes()
    except OSError as error:
        raise DataError(f"cannot read {path}: {error.strerror or error}") from error


def encode(image: np.ndarray, extension: str, *, quality: int | None = None) -> bytes:
    """Encode a picture as the kind of file that ``extension`` names.

    Args:
        image: ``(h, w)`` or ``(h, w, c)`` with 1, 2 (grey and alpha, PNG only), 3 (RGB) or 4 (RGB and alpha)
            channels; uint8, or uint16 for PNG and TIFF.
        extension: with the dot, in any case.
        quality: 1..100 for JPEG (default 95) and WebP (default lossless but for the colour of invisible pixels).

    Raises:
        ValueError: a picture that this kind of file cannot hold without loss of depth or channels.
        DataError: an unknown extension, or a picture that does not fit into the memory.
    """
    extension = extension.lower()
    if extension not in EXTENSIONS:
        raise DataError(f"cannot write a {extension or 'file without extension'}; known: {', '.join(EXTENSIONS)}")
    image = np.asarray(image)
    _check_writable(image, extension)
    image = image[..., 0] if image.ndim == 3 and image.shape[2] == 1 else image
    if image.ndim == 3 and image.shape[2] == 2:
        return _grey_alpha_png(image)
    if image.ndim == 3:
        swap = cv2.COLOR_RGB2BGR if image.shape[2] == 3 else cv2.COLOR_RGBA2BGRA
        image = cv2.cvtColor(np.ascontiguousarray(image), swap)
    settings = []
    if extension in (".jpg", ".jpeg"):
        settings = [cv2.IMWRITE_JPEG_QUALITY, 95 if quality is None else quality]
    elif extension == ".webp":
        settings = [cv2.IMWRITE_WEBP_QUALITY, 101 if quality is None else quality]
    try:
        done, data = cv2.imencode(extension, image, settings)
    except cv2.error as error:
        raise DataError(
            f"cannot encode {image.shape[0]}x{image.shape[1]} pixels as {extension}: {error.err}"
        ) from error
    if not done:
        raise ValueError(f"a picture of {image.shape} {image.dtype} cannot be encoded as {extension}")
    return data.tobytes()


def write_image(path: str | os.PathLike, image: np.ndarray, *, quality: int | None = None) -> None:
    """:func:`encode` by the extension of ``path`` and write the file whole; missing folders are made.

    Raises:
        ValueError, DataError: as :func:`encode`, or the folder cannot be written to.
    """
    path = Path(path)
    data = encode(image, path.suffix, quality=quality)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_whole(path, data)
    except OSError as error:
        raise DataError(f"cannot write {path}: {error.strerror or error}") from error


def write_whole(
    path: Path, data: bytes, *, replace: bool = True, settle: Callable[[os.stat_result], None] | None = None
) -> None:
    """Write a file so that it is there completely or not at all.

    Args:
        replace: take the place of what is there.
        settle: called with the file's facts when it is complete and does not stand in its place yet.

    Raises:
        FileExistsError: something is there, and ``replace`` is off.
    """
    partial = path.with_name(f".{path.name[:64]}.{uuid.uuid4().hex[:12]}")
    try:
        with open(partial, "xb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        if settle is not None:
            settle(partial.stat())
        if not replace and _linked(partial, path):
            return
        os.replace(partial, path)
    finally:
        partial.unlink(missing_ok=True)


def _linked(partial: Path, path: Path) -> bool:
    """Give a file a name that nothing has; False where the file system cannot, and nothing had it just now."""
    try:
        os.link(partial, path)
    except FileExistsError:
        raise
    except OSError as error:
        if os.path.lexists(path):
            raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), str(path)) from error
        return False
    return True


def has_used_alpha(image: np.ndarray) -> bool:
    """True when the picture has an alpha channel that is not opaque everywhere."""
    return image.shape[2] in (2, 4) and bool((image[..., -1] != np.iinfo(image.dtype).max).any())


def remove_alpha(image: np.ndarray, policy: str, label: str) -> np.ndarray:
    """``(h, w, 1..4)`` -> ``(h, w, 1 or 3)``, in the same dtype; an opaque alpha channel always goes.

    Args:
        image: uint8 or uint16.
        policy: ``"error"``, ``"drop"`` (keep the colours as stored), ``"white"`` or ``"black"`` (lay over it).
        label: what to call the picture in the message.

    Raises:
        DataError: some pixels are not opaque and the policy is ``"error"``.
    """
    if image.shape[2] in (1, 3):
        return image
    colors, alpha = image[..., :-1], image[..., -1:]
    if policy == "drop" or not has_used_alpha(image):
        return np.ascontiguousarray(colors)
    if policy == "error":
        raise transparency_error(label)
    top = np.iinfo(image.dtype).max
    opacity = alpha / top
    under = top if policy == "white" else 0
    return np.floor(colors * opacity + under * (1 - opacity) + 0.5).astype(image.dtype)


def transparency_error(label: str) -> DataError:
    """What ``alpha: error`` says of a picture that is not opaque."""
    return DataError(f"{label} has transparent pixels; set alpha: drop, white or black, or remove its transparency")


def to_float(image: np.ndarray) -> np.ndarray:
    """uint8 or uint16 -> float32 in 0..1, by the dtype's own maximum; the shape is kept."""
    if image.dtype not in (np.uint8, np.uint16):
        raise ValueError(f"image must be uint8 or uint16, got {image.dtype}")
    return np.divide(image, np.float32(np.iinfo(image.dtype).max), dtype=np.float32)


def convert_color(image: np.ndarray, color: str) -> np.ndarray:
    """Floating point ``(h, w, 1 or 3)`` in 0..1 to the channels a network wants; the dtype is kept.

    Args:
        image: grey or RGB.
        color: ``"rgb"`` (3 channels, grey repeated), ``"gray"`` (1 channel, BT.601 luma in 0..1) or ``"y"`` (1
            channel, BT.601 luma in 16/255..235/255).
    """
    grey = image.shape[2] == 1
    if color == "rgb":
        return np.repeat(image, 3, axis=2) if grey else image
    if color == "gray":
        return image if grey else (image @ _GRAY_WEIGHTS)[..., None].astype(image.dtype)
    luma = image * _Y_WEIGHTS.sum() if grey else (image @ _Y_WEIGHTS)[..., None]
    return ((luma + 16) / 255).astype(image.dtype)


def check_policies(color: str, alpha: str) -> None:
    """Raise OptionsError when ``color`` or ``alpha`` is not a known policy."""
    for key, value, known in (("color", color, COLORS), ("alpha", alpha, ALPHA_POLICIES)):
        if value not in known:
            raise OptionsError(f"{key}: {value} is not known{nearest(value, known)} ({', '.join(known)})")


def use_one_thread() -> None:
    """Keep cv2 from starting threads of its own; for processes that decode next to others."""
    cv2.setNumThreads(0)


def _to_rgb(image: np.ndarray, header: Header, label: str) -> np.ndarray:
    if image.dtype not in (np.uint8, np.uint16):
        raise DataError(f"cannot read {label}: its samples are {image.dtype}; 8 and 16 bits can be read")
    if sorted(image.shape[:2]) != sorted((header.height, header.width)):
        raise DataError(f"cannot read {label}: {image.shape[:2]} pixels decoded, {header.height}x{header.width} stated")
    image = image[..., None] if image.ndim == 2 else image
    if header.alpha and header.transparent is None and image.shape[2] != 4:
        raise DataError(f"cannot read {label}: the decoder lost its transparency; save it as RGBA PNG")
    if header.transparent is not None:
        # cv2 leaves the transparent grey value of a PNG without alpha channel aside
        opaque = np.where(image[..., :1] == header.transparent, 0, np.iinfo(image.dtype).max).astype(image.dtype)
        return np.concatenate([image[..., :1], opaque], axis=2)
    if header.channels == 2:
        return np.ascontiguousarray(image[..., 2:])
    if image.shape[2] == 1:
        return image
    return cv2.cvtColor(image, cv2.COLOR_BGR2RGB if image.shape[2] == 3 else cv2.COLOR_BGRA2RGBA)


def _divided(image: np.ndarray) -> np.ndarray:
    """RGBA whose colours are multiplied by alpha -> as other files store it."""
    top = np.iinfo(image.dtype).max
    factor = np.float32(top) / np.maximum(image[..., 3:], 1, dtype=np.float32)
    colors = np.floor(image[..., :3] * factor + np.float32(0.5)).clip(max=top).astype(image.dtype)
    return np.concatenate([colors, image[..., 3:]], axis=2)


def _grey_alpha_png(image: np.ndarray) -> bytes:
    """(h, w, 2) as a PNG, which cv2 cannot write."""
    h, w, _ = image.shape
    size = image.dtype.itemsize
    rows = np.ascontiguousarray(image.astype(image.dtype.newbyteorder(">"))).view(np.uint8).reshape(h, -1)
    # filter 1 of the format: each byte less the one a pixel before, which packs better
    rows[:, 2 * size :] -= rows[:, : -2 * size].copy()
    filtered = np.concatenate([np.ones((h, 1), np.uint8), rows], axis=1).tobytes()
    header = struct.pack(">IIBBBBB", w, h, 8 * size, 4, 0, 0, 0)
    blocks = ((b"IHDR", header), (b"IDAT", zlib.compress(filtered)), (b"IEND", b""))
    return b"\x89PNG\r\n\x1a\n" + b"".join(
        struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data)) for kind, data in blocks
    )


def _check_writable(image: np.ndarray, extension: str) -> None:
    if image.dtype not in (np.uint8, np.uint16):
        raise ValueError(f"image must be uint8 or uint16, got {image.dtype}")
    channels = (1, 2, 3, 4) if extension == ".png" else (1, 3, 4)
    if not image.size or image.ndim not in (2, 3) or (image.ndim == 3 and image.shape[2] not in channels):
        raise ValueError(f"image must be (h, w) or (h, w, 1, 3 or 4) and not empty, got {image.shape}")
    if image.dtype == np.uint16 and extension not in _DEEP:
        raise ValueError(f"a 16-bit picture cannot be written as {extension}; use {', '.join(_DEEP)}")
    if image.ndim == 3 and image.shape[2] == 4 and extension not in _WITH_ALPHA:
        raise ValueError(f"a picture with alpha cannot be written as {extension}; use {', '.join(_WITH_ALPHA)}")
