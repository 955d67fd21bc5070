"""One picture of scripts.restore: read, restored, written."""

import os
from argparse import Namespace
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
import torch
from torch.nn import functional as F

from data.alpha import enlarge_alpha, spread_colors
from data.headers import LONGEST_SIDE, MOST_PIXELS, Header, HeaderError, read_header
from data.io import (
    EXTENSIONS,
    convert_color,
    decode,
    encode,
    has_used_alpha,
    read_bytes,
    remove_alpha,
    to_float,
    write_whole,
)
from data.metadata import Metadata, as_stored, put_metadata, read_metadata, turn_upright
from models import heap
from models.infer import TileMemory, restore, seen_pixels
from models.samples import to_samples
from options.errors import DataError
from scripts import restore_memory
from scripts.restore_inputs import Job
from scripts.restore_layers import Watched
from scripts.restore_memory import GIB, Gauge
from scripts.restore_network import Restorer

_BEGINNING = 1 << 20
_DEEP = (".png", ".tif", ".tiff")
# pixels by which a picture is mirrored on all sides for networks that keep its size: what lies beyond the picture is
# black to them, and fog removed from so small a picture had a frame up to 15 levels darker
FRAME = 16
_OPAQUE = (".jpg", ".jpeg", ".bmp")
# how long a side may be, by extension; libpng takes no more
_LONGEST = {".jpg": 65500, ".jpeg": 65500, ".webp": 16383, ".png": 1_000_000}


@dataclass
class Outcome:
    """What became of a picture.

    Attributes:
        status: ``"restored"``, ``"done before"``, ``"exists"``, ``"failed"``, ``"to do"`` or ``"not reached"``.
        size, result: (h, w) before and after, upright.
        seconds, memory: what it took; memory is the peak in bytes, where the system tells.
        notes: what is worth knowing.
        error: why it failed.
    """

    job: Job
    status: str
    size: tuple[int, int] | None = None
    result: tuple[int, int] | None = None
    seconds: float | None = None
    memory: int | None = None
    notes: list[str] = field(default_factory=list)
    error: str = ""


@dataclass(frozen=True)
class _Picture:
    """A decoded picture, upright."""

    image: np.ndarray
    metadata: Metadata
    colors: int


def shown(size: tuple[int, int] | None, scale: int = 1) -> str:
    """A size (h, w) as people with photographs write it: width x height."""
    return "" if size is None else f"{size[1] * scale} x {size[0] * scale}"


def look(job: Job, scale: int) -> tuple[Header, tuple[int, int]]:
    """The header of a picture and its upright size (h, w).

    Raises:
        DataError: it cannot be read, is of a kind that cannot be restored, or its result would be too large for the
            kind of file.
    """
    if os.path.exists(job.source) and not os.path.isfile(job.source):
        # a pipe would be waited for
        raise DataError(f"cannot read {job.name}: it is no file")
    try:
        with open(job.source, "rb") as file:
            header = read_header(file)
            file.seek(0)
            # what matters here stands at the beginning, but for these
            metadata = read_metadata(file.read() if header.format in ("tiff", "webp") else file.read(_BEGINNING))
    except HeaderError as error:
        raise DataError(f"cannot read {job.name}: {error}{_way_out(error)}") from error
    except OSError as error:
        raise DataError(f"cannot read {job.name}: {error.strerror or error}") from error
    if metadata.inks:
        way = "save it as RGB in an editor that knows its colour profile"
        raise DataError(f"{job.name} is a CMYK JPEG, whose inks would become wrong colours; {way}")
    size = (header.height, header.width) if metadata.orientation < 5 else (header.width, header.height)
    _check_target(job, size, scale)
    return header, size


def _check_target(job: Job, size: tuple[int, int], scale: int) -> None:
    extension, result = job.target.suffix.lower(), f"its result has {shown(size, scale)} pixels"
    if extension not in EXTENSIONS:
        kind = f"{extension} file" if extension else "file without extension"
        raise DataError(f"{job.name}: no {kind} can be written; take --format png, jpg, webp or tiff")
    longest = _LONGEST.get(extension, LONGEST_SIDE)
    if max(size) * scale > longest:
        way = "take --format png or tiff" if longest < 100_000 else "cut the picture"
        raise DataError(f"{job.name}: {result}, and a {extension} file at most {longest} along a side; {way}")
    if size[0] * size[1] * scale**2 > MOST_PIXELS:
        raise DataError(f"{job.name}: {result}, and at most {MOST_PIXELS} can be written; cut the picture")


class Pictures:
    """Restores pictures one after the other.

    Args:
        restorer: the network.
        args: the command line.
    """

    def __init__(self, restorer: Restorer, args: Namespace) -> None:
        self._restorer, self._args = restorer, args
        self._memory = TileMemory()
        self._channels = getattr(restorer.network, "in_channels", None) or 3
        self._gauge = Gauge(restorer, self._channels)
        self.device, self.force = restorer.device, args.force

    def restore(
        self, job: Job, progress: Callable[[float], None], *, settle: Callable[[os.stat_result], None]
    ) -> Outcome:
        """Read, restore and write one picture whole.

        Args:
            progress: called with the share that is done, 0..1.
            settle: see :func:`data.io.write_whole`.

        Raises:
            DataError: the picture cannot be read, restored or written.
            FileExistsError: the result came into being meanwhile, and ``--force`` is not given.
        """
        picture, notes = self._read(job)
        height, width = picture.image.shape[:2]
        tile = self._tile(job, picture)
        progress(0.0)
        if tile is not None:
            notes.append(f"in tiles of {tile}")
        depth = picture.image.dtype.type if job.target.suffix.lower() in _DEEP else np.uint8
        samples = self._run(job, picture, depth, tile, progress)
        notes += self._write(job, samples, picture.metadata, settle)
        return Outcome(job, "restored", (height, width), samples.shape[:2], notes=notes)

    def seconds_for(self, size: tuple[int, int]) -> float | None:
        """An estimate for a picture of this size (h, w), where there is one already."""
        views = 8 if self._args.self_ensemble else 1
        need = self._gauge.need
        return None if need is None else need.seconds * views * size[0] * size[1]

    def tile_for(self, size: tuple[int, int]) -> int | None:
        """The side of the tiles for a picture of this size (h, w); None for the whole picture at once."""
        return self._choose(size, 0) if self._args.tile == "auto" else self._args.tile

    def _read(self, job: Job) -> tuple[_Picture, list[str]]:
        look(job, self._restorer.scale)
        data = read_bytes(job.source)
        metadata, notes = read_metadata(data), []
        image = turn_upright(decode(as_stored(data), job.name), metadata.orientation)
        del data
        extension = job.target.suffix.lower()
        if self._args.alpha != "restore":
            image = remove_alpha(image, self._args.alpha, job.name)
        elif image.shape[2] in (2, 4) and (extension in _OPAQUE or not has_used_alpha(image)):
            if has_used_alpha(image):
                ways = "--alpha white, black or drop, or --format png"
                raise DataError(f"{job.name} has transparent pixels, which {extension} cannot hold; take {ways}")
            image = remove_alpha(image, "drop", job.name)
            notes.append("opaque alpha channel left out")
        if image.dtype == np.uint16 and extension not in _DEEP:
            notes.append(f"8 bits, as {extension} holds no 16")
        colors = 1 if image.shape[2] < 3 else 3
        if colors > self._channels:
            raise DataError(f"{job.name} has colours, and the network takes {self._channels} channel: grey pictures")
        if image.shape[2] == 2 and extension != ".png":
            notes.append("grey with alpha became RGB with alpha")
        return _Picture(image, metadata, colors), notes

    def _tile(self, job: Job, picture: _Picture) -> int | None:
        image = picture.image
        size, deep = image.shape[:2], image.dtype == np.uint16
        free = restore_memory.free_memory(torch.device("cpu"))
        ensemble = self._args.self_ensemble
        fixed = restore_memory.picture_memory(size, self._restorer.scale, self._channels, deep=deep, ensemble=ensemble)
        if free is not None and fixed > free:
            # what the pictures before have left
            heap.release()
            free = restore_memory.free_memory(torch.device("cpu"))
        if free is not None and fixed > free:
            text = f"{shown(size)} pixels and their result take {fixed / GIB:.1f} GiB of memory"
            ways = "close other programs, cut the picture, or choose a smaller --scale"
            raise DataError(f"{job.name}: {text}, and {free / GIB:.1f} GiB can be had; {ways}")
        return self._choose(size, fixed) if self._args.tile == "auto" else self._args.tile

    def _choose(self, size: tuple[int, int], fixed: int) -> int | None:
        tile = self._gauge.tile(size, self._budget(fixed))
        if tile is not None and self._restorer.device.type == "cpu":
            heap.release()
            tile = self._gauge.tile(size, self._budget(fixed))
        return tile

    def _budget(self, fixed: int) -> int | None:
        budget = restore_memory.free_memory(self._restorer.device)
        return budget if budget is None or self._restorer.device.type != "cpu" else max(0, budget - fixed)

    def _run(
        self,
        job: Job,
        picture: _Picture,
        depth: type[np.unsignedinteger],
        tile: int | None,
        progress: Callable[[float], None],
    ) -> np.ndarray:
        """The result as samples, ``(h, w, 1 to 4)``."""
        image, views = picture.image, 8 if self._args.self_ensemble else 1
        alpha = image[..., -1:] if image.shape[2] in (2, 4) else None
        colors = image if alpha is None else spread_colors(image[..., :-1], alpha)
        lq = to_float(np.ascontiguousarray(colors))
        lq = convert_color(lq, "rgb" if self._channels == 3 else "gray")
        settings = {"tile": tile, "overlap": self._args.overlap}
        tensor = torch.from_numpy(lq).permute(2, 0, 1)[None].contiguous()
        del lq
        frame = min(FRAME, *(side - 1 for side in tensor.shape[-2:])) if self._restorer.scale == 1 else 0
        tensor = F.pad(tensor, (frame,) * 4, mode="reflect") if frame else tensor
        try:
            total = views * seen_pixels(self._restorer.network, tensor.shape[-2:], **settings)
            settings |= {"self_ensemble": self._args.self_ensemble, "dtype": self._restorer.dtype}
            with Watched(self._restorer.network, total, shares=self._gauge.shares, progress=progress):
                pred = restore(self._restorer.network, tensor, memory=self._memory, **settings)
        except ValueError as error:
            # an overlap that leaves nothing of the tiles
            raise DataError(f"{job.name}: {error}") from error
        pred = pred[..., frame : pred.shape[-2] - frame, frame : pred.shape[-1] - frame]
        if picture.colors == 1 and pred.shape[1] == 3:
            # BT.601, as everywhere here
            pred = (pred * pred.new_tensor([0.299, 0.587, 0.114])[:, None, None]).sum(1, keepdim=True)
        try:
            samples = to_samples(pred, depth)
        except ValueError as error:
            raise DataError(f"{job.name}: {error}; --dtype float32 may help") from error
        if alpha is None:
            return samples
        larger = enlarge_alpha(alpha, self._restorer.scale)
        return np.concatenate([samples, larger if larger.dtype == depth else _narrowed(larger)], axis=2)

    def _write(
        self, job: Job, samples: np.ndarray, metadata: Metadata, settle: Callable[[os.stat_result], None]
    ) -> list[str]:
        extension = job.target.suffix.lower()
        if samples.shape[2] == 2 and extension != ".png":
            samples = samples[..., [0, 0, 0, 1]]
        data, left_out = put_metadata(encode(samples, extension, quality=self._args.quality), metadata)
        try:
            job.target.parent.mkdir(parents=True, exist_ok=True)
            write_whole(job.target, data, replace=self.force, settle=settle)
        except OSError as error:
            if isinstance(error, FileExistsError) and os.path.lexists(job.target):
                raise
            raise DataError(f"cannot write {job.target}: {error.strerror or error}") from error
        return left_out


def _narrowed(samples: np.ndarray) -> np.ndarray:
    """16 bits -> 8, rounded."""
    return ((samples.astype(np.uint32) + 128) // 257).astype(np.uint8)


def _way_out(error: HeaderError) -> str:
    return "; save the picture that you want as a file of its own" if "animated" in str(error) else ""
