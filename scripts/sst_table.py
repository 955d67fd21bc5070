"""The published SST networks: sizes, data, schedules and scores.

Settings: the option files of github.com/dslisleedh/SST; paper: https://arxiv.org/abs/2603.06738. The windows and sizes
of the networks are ``archs.sst.PRESETS``.
"""

from collections.abc import Iterator
from dataclasses import dataclass

PAPER = "Lee et al., https://arxiv.org/abs/2603.06738"
TITLES = {
    "SSTlight": "SST-light",
    "SSTlight_Plus": "SST-light+",
    "SST": "SST",
    "SST_Plus": "SST+",
    "SSTLarge": "SST-L",
    "SSTLarge_Plus": "SST-L+",
    "SSTXL_Plus": "SST-XL+",
}
TRAINED_ON = {
    "SSTlight": ("DIV2K", "DFLIP"),
    "SSTlight_Plus": ("DIV2K", "DFLIP"),
    "SST": ("DF2K",),
    "SST_Plus": ("DF2K",),
    "SSTLarge": ("DF2K", "DFLIP"),
    "SSTLarge_Plus": ("DF2K", "DFLIP"),
    "SSTXL_Plus": ("DFLIP",),
}
SCALES = (2, 3, 4)
JUDGED_IN_TRAINING = ("Set5", "Set14", "B100", "Urban100", "Manga109")
SETS = {name: (f"{name}/HR", f"{name}/LR_bicubic") for name in JUDGED_IN_TRAINING} | {
    "DIV2K-val": ("DIV2K/DIV2K_valid_HR", "DIV2K/DIV2K_valid_LR_bicubic"),
    "LSDIR-val": ("LSDIR/Valid/HR", "LSDIR/Valid/LR"),
}

_FIGURE_1 = "fig. 1 of the paper"
_XL_FIGURE = "the authors' figure of SST-XL+"
_XL_SETS = ("Set5", "Set14", "B100", "Urban100", "Manga109", "DIV2K-val", "LSDIR-val")
_XL = {
    2: "38.77/.9636 35.40/.9289 32.75/.9063 35.83/.9540 41.01/.9825 37.40/.9539 33.24/.9347",
    3: "35.39/.9350 31.62/.8584 29.69/.8204 31.82/.9077 36.30/.9589 33.64/.9047 29.46/.8631",
    4: "33.24/.9078 29.66/.8025 28.12/.7555 29.38/.8636 33.40/.9360 31.59/.8608 27.50/.8024",
}
# what is published, with its source; "derived" is arithmetic on sentences of the paper, good to 0.01 dB
PUBLISHED: dict[tuple[str, str, int], tuple[str, ...]] = {
    ("SST", "DF2K", 2): ("Urban100 34.61 dB PSNR-Y", "derived: the paper's 0.16 dB above HAT, whose figure is 34.45"),
    ("SST_Plus", "DF2K", 2): (
        "Urban100 34.91 dB PSNR-Y",
        "derived: the paper's 0.18 dB above ATD at 34.73; 34.88 if its table takes ATD's 34.70",
    ),
    ("SSTLarge", "DF2K", 2): (
        "Urban100 34.78 dB PSNR-Y",
        "derived: the paper's 0.12 dB below PFT, whose figure is 34.90",
    ),
    ("SSTLarge", "DFLIP", 2): (
        "Urban100 35.35 dB PSNR-Y",
        "derived: the paper's 0.11 dB above PFT on DFLIP, whose figure is 35.24",
    ),
    ("SSTLarge_Plus", "DFLIP", 2): (
        "Urban100 35.63 dB PSNR-Y",
        _FIGURE_1,
        "its costs on an H200: 0.672 s and 67.7 GB a step at batch 10; 644.9 ms and 2,989 MB for 1280x720",
    ),
    ("SSTLarge_Plus", "DFLIP", 3): ("Urban100 31.53 dB PSNR-Y", _FIGURE_1),
    ("SSTLarge_Plus", "DFLIP", 4): ("Urban100 29.06 dB PSNR-Y", _FIGURE_1),
    **{
        ("SSTXL_Plus", "DFLIP", scale): (
            *(", ".join(f"{name} {score}" for name, score in pairs) for pairs in (scores[:4], scores[4:])),
            f"PSNR-Y in dB/SSIM-Y, {_XL_FIGURE}",
        )
        for scale, text in _XL.items()
        for scores in [list(zip(_XL_SETS, text.split(), strict=True))]
    },
}


@dataclass(frozen=True)
class Setting:
    """One published network: its size, what it was trained on, its scale."""

    variant: str
    corpus: str
    scale: int

    @property
    def name(self) -> str:
        """As the authors call it."""
        return f"{self.variant}_{self.corpus}_X{self.scale}"

    @property
    def network(self) -> str:
        """Its class."""
        return "SST"

    @property
    def extra(self) -> dict[str, int | list[int]]:
        """Options of the network beyond those of its size."""
        return {}

    @property
    def weights(self) -> str:
        """Name of the authors' weights."""
        return self.name

    @property
    def expected(self) -> tuple[str, ...]:
        """What is published, line by line."""
        none = ("no score of this network is published in text",)
        return (*PUBLISHED.get((self.variant, self.corpus, self.scale), none), "Not measured with Pellucid.")

    @property
    def paper(self) -> str:
        """Where the network is from."""
        return PAPER

    @property
    def title(self) -> str:
        """As the paper calls it."""
        return f"{TITLES[self.variant]} for x{self.scale} super-resolution, trained on {self.corpus}"

    @property
    def batch(self) -> int:
        """Samples per GPU; there are four."""
        return 16 if "light" in self.variant else 8

    @property
    def gt_size(self) -> int:
        """Side of the GT patch."""
        return (96 if self.variant.endswith("Plus") else 64) * self.scale

    @property
    def warm_start(self) -> str | None:
        """The network of the next smaller scale, which the weights come from."""
        return None if self.scale == 2 else f"{self.variant}_{self.corpus}_X{self.scale - 1}"

    @property
    def halvings(self) -> tuple[int, ...]:
        """Iterations after which the learning rate is halved."""
        return tuple(int(share * self.total_iter) for share in (0.5, 0.8, 0.9, 0.95, 0.98))

    @property
    def total_iter(self) -> int:
        """Length of the run."""
        return 500_000 if self.scale == 2 else 250_000


def settings() -> Iterator[Setting]:
    """Every published network."""
    for variant, corpora in TRAINED_ON.items():
        for corpus in corpora:
            for scale in SCALES:
                yield Setting(variant, corpus, scale)
