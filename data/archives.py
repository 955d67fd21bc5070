"""The archives that the published networks are trained and tested on: folders, names, counts, and where they belong.

Places are those of the shipped option files, below ``datasets/``. Counts and names of DIV2K, ITS, SOTS, O-HAZE and
Dense-Haze follow their pages and papers; LSDIR 84,991 + DF2K 3,450 + DiverSeg-IP 526,503 = DFLIP 614,944.
"""

import dataclasses
from dataclasses import dataclass

from options.errors import OptionsError
from options.registry import nearest

SCALES = (2, 3, 4)
_ANY = r".+"
_HAZY, _CLEAR = ("hazy", "haze"), ("clear", "gt")
_DECIMAL = r"[0-9]*\.?[0-9]+"


@dataclass(frozen=True)
class Part:
    """One folder of an archive.

    Attributes:
        place: where it belongs below ``datasets/``, and what messages call it.
        folders: how it may lie in the download: ends of paths, or paths from its root where they begin with ``./``;
            ``*`` stands for anything, case does not count.
        stem: what the names without ending look like.
        counts: numbers of pictures that are right; empty: any.
        numbered: format, first and last number where the names count up.
        each: hazy pictures of each scene, the first group of ``stem``.
        size: (h, w) of every picture, where all have one.
        optional: the archive is of use without it.
    """

    place: str
    folders: tuple[str, ...]
    stem: str = _ANY
    counts: tuple[int, ...] = ()
    numbered: tuple[str, int, int] | None = None
    each: int = 0
    size: tuple[int, int] | None = None
    optional: bool = False


@dataclass(frozen=True)
class Pair:
    """Two parts whose pictures belong together by a rule of ``data.naming``; both may be one folder."""

    gt: str
    lq: str
    naming: str


@dataclass(frozen=True)
class Reduced:
    """Good pictures and their bicubic reductions: places of the parts, ``{}`` standing for the scale."""

    hr: str
    lr: str


@dataclass(frozen=True)
class Archive:
    """One archive, or several merged.

    Attributes:
        name: as it is usually spelt.
        parts: its folders.
        pairs: which of them belong together.
        train, valid: for super-resolution, the sets to reduce; sub-images are cut of ``train``.
        members: archives whose training pictures it is made of, by links.
        whole: an LMDB of whole training pictures, which the option files read.
        steps: what is made unless the user says otherwise.
        example: a training option file to start from where no shipped one names this data.
        settings: what has to be changed in it; ``{}`` stands for the data folder, in both ``{scale}`` for the scale.
    """

    name: str
    parts: tuple[Part, ...] = ()
    pairs: tuple[Pair, ...] = ()
    train: Reduced | None = None
    valid: Reduced | None = None
    members: tuple[str, ...] = ()
    whole: str = ""
    steps: tuple[str, ...] = ()
    example: str = ""
    settings: tuple[str, ...] = ()

    def part(self, place: str) -> Part:
        """The part that belongs there."""
        return next(part for part in self.parts if part.place == place)


def find_archive(name: str) -> Archive:
    """The archive called so, whatever its case, dashes and underscores.

    Raises:
        OptionsError: no such archive.
    """
    plain = {_plain(key): archive for key, archive in ARCHIVES.items()}
    if _plain(name) not in plain:
        raise OptionsError(f"archive {name} is not known{nearest(name, ARCHIVES)} ({', '.join(ARCHIVES)})")
    return plain[_plain(name)]


def _plain(name: str) -> str:
    return name.replace("-", "").replace("_", "").lower()


def _numbered(form: str, first: int, last: int, ending: str = "") -> dict[str, object]:
    digits = len(form.format(0))
    stem = rf"[0-9]{{{digits}}}{ending}"
    return {"stem": stem, "counts": (last - first + 1,), "numbered": (form + ending, first, last)}


def _reductions(place: str, folders: tuple[str, ...], form: str, first: int, last: int) -> tuple[Part, ...]:
    """The LR folders of all scales; ``{}`` in places and folders is the scale."""
    return tuple(
        Part(
            place.format(scale),
            tuple(folder.format(scale) for folder in folders),
            **_numbered(form, first, last, f"x{scale}"),
            optional=True,
        )
        for scale in SCALES
    )


def _div2k() -> Archive:
    parts = []
    for part, first, last in (("train", 1, 800), ("valid", 801, 900)):
        name, numbers = f"DIV2K_{part}", ("{:04d}", first, last)
        hr = Part(f"DIV2K/{name}_HR", (f"{name}_HR",), **_numbered(*numbers), optional=part == "valid")
        lr = f"{name}_LR_bicubic/X{{}}"
        parts += [hr, *_reductions(f"DIV2K/{lr}", (lr, f"{name}_LR_bicubic_X{{}}"), *numbers)]
    train, valid = (Reduced(f"DIV2K/DIV2K_{p}_HR", f"DIV2K/DIV2K_{p}_LR_bicubic/X{{}}") for p in ("train", "valid"))
    return Archive("DIV2K", tuple(parts), train=train, valid=valid, steps=("lr", "subimages", "lmdb"))


def _flickr2k() -> Archive:
    numbers, lr = ("{:06d}", 1, 2650), "Flickr2K/Flickr2K_LR_bicubic/X{}"
    hr = Part("Flickr2K/Flickr2K_HR", ("Flickr2K_HR", "Flickr2K/HR"), **_numbered(*numbers))
    parts = (hr, *_reductions(lr, ("Flickr2K_LR_bicubic/X{}", "Flickr2K/LR_bicubic/X{}"), *numbers))
    return Archive(
        "Flickr2K",
        parts,
        train=Reduced("Flickr2K/Flickr2K_HR", lr),
        steps=("lr", "subimages", "lmdb"),
        example="options/train/sr/SST_DF2K_X{scale}.yml",
        settings=(
            "datasets.train.dataroot_gt={}/Flickr2K/Flickr2K_HR_sub.lmdb",
            "datasets.train.dataroot_lq={}/Flickr2K/Flickr2K_LR_bicubic/X{scale}_sub.lmdb",
        ),
    )


def _lsdir() -> Archive:
    # the training pictures lie in folders of a thousand; those for validation below val1/HR/val and val1/X2/val
    train = ("LSDIR/train", "LSDIR/HR/train", "LSDIR/HR", "LSDIR*train*", "./train", "./HR")
    valid = ("LSDIR/val*/HR/val", "LSDIR/val*/HR", "val1/HR/val", "val1/HR", "LSDIR/Valid/HR")
    lower = ("val1/X{}/val", "val1/X{}", "LSDIR/val*/X{}/val", "LSDIR/val*/X{}", "LSDIR/Valid/LR/X{}")
    numbers = ("{:07d}", 1, 84991)
    parts = (
        Part("LSDIR/HR", train, **_numbered(*numbers)),
        Part("LSDIR/Valid/HR", valid, **_numbered("{:07d}", 1, 250), optional=True),
        *_reductions("LSDIR/Valid/LR/X{}", lower, "{:07d}", 1, 250),
    )
    return Archive(
        "LSDIR",
        parts,
        train=Reduced("LSDIR/HR", "LSDIR/LR_bicubic/X{}"),
        valid=Reduced("LSDIR/Valid/HR", "LSDIR/Valid/LR/X{}"),
        steps=("meta",),
        example="options/train/sr/SSTLarge_DFLIP_X{scale}.yml",
        settings=("datasets.train.dataroot_gt={}/LSDIR/HR", "datasets.train.io_backend.type=disk"),
    )


def _diverseg() -> Archive:
    folders = ("DiverSeg-IP/HR", "DiverSeg-IP", "DiverSeg_IP", "DiverSegIP", "DiverSeg/IP")
    return Archive(
        "DiverSeg-IP",
        (Part("DiverSeg-IP/HR", folders, counts=(526_503,)),),
        train=Reduced("DiverSeg-IP/HR", "DiverSeg-IP/LR_bicubic/X{}"),
        steps=("meta",),
        example="options/train/sr/SSTLarge_DFLIP_X{scale}.yml",
        settings=("datasets.train.dataroot_gt={}/DiverSeg-IP/HR", "datasets.train.io_backend.type=disk"),
    )


def _under(parents: tuple[str, ...], names: tuple[str, ...]) -> tuple[str, ...]:
    return tuple(f"{parent}/{name}" for parent in parents for name in names)


def _pairs(name: str, parts: tuple[Part, Part]) -> Archive:
    return Archive(name, parts, pairs=(Pair(parts[0].place, parts[1].place, name),))


def _reside(name: str, clear: dict[str, object], hazy: dict[str, object]) -> Archive:
    parents = (f"{name}*", f"{name}*/train", ".")
    folders = [
        (*_under(parents, (*words, *more)), *_under(("*",), more))
        for words, more in (((*_CLEAR, "clear_images"), (f"{name}_clear",)), (_HAZY, (f"{name}_haz[ey]",)))
    ]
    parts = Part(f"RESIDE/{name}/clear", folders[0], **clear), Part(f"RESIDE/{name}/hazy", folders[1], **hazy)
    return _pairs(name, parts)


def _sots() -> Archive:
    parts, pairs = [], []
    # outdoors some of the 500 hazy pictures share a clear one
    for place, old, gt, hazy in (
        ("indoor", "nyuhaze500", {"counts": (50,), "stem": "[0-9]+", "size": (480, 640)}, {"size": (460, 620)}),
        ("outdoor", "outdoor500", {"counts": (492, 500), "stem": "[0-9]+"}, {}),
    ):
        parents = (f"SOTS*/{place}", f"SOTS*/{place}/{old}", f"*/{old}", f"./{place}")
        stem = "([0-9]+)_[0-9]+" if place == "indoor" else rf"([0-9]+)_{_DECIMAL}_{_DECIMAL}"
        hazy = {"stem": stem, "counts": (500,), "each": 10 if place == "indoor" else 0, **hazy}
        home = f"RESIDE/SOTS/{place}"
        parts.append(Part(f"{home}/gt", _under(parents, ("gt", "clear")), **gt))
        parts.append(Part(f"{home}/hazy", _under(parents, _HAZY), **hazy))
        pairs.append(Pair(f"{home}/gt", f"{home}/hazy", f"SOTS-{place}"))
    return Archive("SOTS", tuple(parts), pairs=tuple(pairs))


def _scenes(name: str, parents: tuple[str, ...], middle: str, counts: tuple[int, ...], **more: object) -> Archive:
    """A set of a few scenes in two folders, ``01<middle>_hazy`` and ``01<middle>_GT``."""
    parents = (*parents, ".")
    sides = (("GT", ("gt", "clear"), "GT"), ("hazy", _HAZY, "haz[ey]"))
    parts = tuple(
        Part(f"{name}/{place}", _under(parents, words), rf"[0-9]+{middle}_{end}", counts, **more)
        for place, words, end in sides
    )
    return _pairs(name, parts)


def _nh_haze() -> Archive:
    both = Part("NH-HAZE", ("NH*HAZ*", "."), r"[0-9]+_(?:haz[ey]|GT)", (110,), size=(1200, 1600))
    return Archive("NH-HAZE", (both,), pairs=(Pair("NH-HAZE", "NH-HAZE", "NH-HAZE"),))


def _haze4k() -> Archive:
    parts, pairs = [], []
    for phase, count in (("train", 3000), ("test", 1000)):
        parents = (f"Haze4K*/{phase}", f"./{phase}")
        home = f"Haze4K/{phase}"
        hazy = rf"([0-9]+)_{_DECIMAL}_{_DECIMAL}"
        parts.append(Part(f"{home}/gt", _under(parents, ("gt", "clear")), "[0-9]+", (count,)))
        parts.append(Part(f"{home}/haze", _under(parents, _HAZY), hazy, (count,)))
        pairs.append(Pair(f"{home}/gt", f"{home}/haze", "Haze4K"))
    return Archive("Haze4K", tuple(parts), pairs=tuple(pairs))


def _merged(name: str, members: tuple[str, ...], **more: object) -> Archive:
    return Archive(name, members=members, **more)


_DF2K = Reduced("DF2K/DF2K_train_HR", "DF2K/DF2K_train_LR_bicubic/X{}")
_I_HAZE = dataclasses.replace(
    _scenes("I-HAZE", ("*I-HAZ*", "*I_HAZ*"), "_indoor", (30, 35)),
    example="options/train/dehaze/MBTaylorFormer_B_O-HAZE.yml",
    settings=(
        "datasets.train.dataroot_gt={}/I-HAZE/GT",
        "datasets.train.dataroot_lq={}/I-HAZE/hazy",
        "datasets.train.naming=I-HAZE",
        "datasets.train.split=all",
    ),
)
ARCHIVES = {
    archive.name: archive
    for archive in (
        _div2k(),
        _flickr2k(),
        _merged("DF2K", ("DIV2K", "Flickr2K"), train=_DF2K, steps=("lr", "subimages", "lmdb")),
        _lsdir(),
        _diverseg(),
        _merged(
            "DFLIP",
            ("DIV2K", "Flickr2K", "LSDIR", "DiverSeg-IP"),
            train=Reduced("DFLIP", "DFLIP_LR_bicubic/X{}"),
            whole="DFLIP.lmdb",
            steps=("lmdb",),
        ),
        _reside(
            "ITS",
            _numbered("{:d}", 1, 1399) | {"stem": "[0-9]+"},
            {"stem": rf"([0-9]+)_[0-9]+_{_DECIMAL}", "counts": (13_990,), "each": 10},
        ),
        _reside(
            "OTS",
            {"stem": "[0-9]+", "counts": (2061,)},
            {"stem": rf"([0-9]+)_{_DECIMAL}_{_DECIMAL}", "counts": (72_135,), "each": 35},
        ),
        _sots(),
        _scenes("O-HAZE", ("*O-HAZ*", "*O_HAZ*"), "_outdoor", (45,)),
        _I_HAZE,
        _scenes("Dense-Haze", ("Dense*Haz*",), "", (55,), size=(1200, 1600)),
        _nh_haze(),
        _haze4k(),
    )
}
