"""The published MB-TaylorFormer networks: sizes, data, schedules and scores.

Settings: the option files of github.com/FVL2020/ICCV-2023-MB-TaylorFormer and github.com/FVL2020/MB-TaylorFormerV2;
papers: https://arxiv.org/abs/2308.14036 and https://arxiv.org/abs/2501.04486. The sizes of
the networks are ``archs.mb_taylorformer.PRESETS``.
"""

from collections.abc import Iterator
from dataclasses import dataclass

PAPERS = {
    1: "Qiu et al., https://arxiv.org/abs/2308.14036",
    2: "Jin et al., https://arxiv.org/abs/2501.04486",
}
TASKS = {
    "dehaze": "dehazing",
    "derain": "deraining",
    "desnow": "desnowing",
    "denoise": "denoising",
    "deblur": "deblurring",
}


@dataclass(frozen=True)
class Pairs:
    """Where one set of pairs lies, below datasets/.

    Attributes:
        lq, gt: its folders.
        naming, split: of ``ResideDataset``; without a naming, pictures of equal stems are a pair.
        memory: small in number and large in size, so that it is kept in memory.
    """

    lq: str
    gt: str
    naming: str = ""
    split: str = ""
    memory: bool = False


@dataclass(frozen=True)
class Corpus:
    """What a network is trained on, and judged on.

    Attributes:
        task: key of ``TASKS``.
        train: the training pairs.
        test: name -> pairs to test on.
        watched: those of ``test`` that training is judged on.
        source: what the data are, for the head of a file.
    """

    task: str
    train: Pairs
    test: dict[str, Pairs]
    watched: str
    source: str


def _halves(name: str, lq: str, gt: str) -> tuple[Pairs, Pairs]:
    """A set of few large pictures whose last five scenes are for testing."""
    folders = (f"{name}/{lq}".rstrip("/"), f"{name}/{gt}".rstrip("/"))
    return (
        Pairs(*folders, naming=name, split="train", memory=True),
        Pairs(*folders, naming=name, split="test"),
    )


def _small(name: str, lq: str, gt: str, source: str) -> Corpus:
    train, test = _halves(name, lq, gt)
    return Corpus("dehaze", train, {name: test}, name, source)


def _rain(name: str) -> Pairs:
    return Pairs(f"Rain13K/test/{name}/input", f"Rain13K/test/{name}/target")


def _snow(name: str, source: str) -> Corpus:
    folders = [Pairs(f"{name}/{part}/Snow", f"{name}/{part}/Gt") for part in ("train2500", "test2000")]
    return Corpus("desnow", folders[0], {name: folders[1]}, name, source)


_SOTS = {
    f"SOTS-{place}": Pairs(f"RESIDE/SOTS/{place}/hazy", f"RESIDE/SOTS/{place}/gt", naming=f"SOTS-{place}")
    for place in ("indoor", "outdoor")
}
CORPORA = {
    "ITS": Corpus(
        "dehaze",
        Pairs("RESIDE/ITS/hazy", "RESIDE/ITS/clear", naming="ITS"),
        {"SOTS-indoor": _SOTS["SOTS-indoor"]},
        "SOTS-indoor",
        "RESIDE's indoor training set, 13,990 hazy pictures of 1,399 clear ones",
    ),
    "OTS": Corpus(
        "dehaze",
        Pairs("RESIDE/OTS/hazy", "RESIDE/OTS/clear", naming="OTS"),
        {"SOTS-outdoor": _SOTS["SOTS-outdoor"]},
        "SOTS-outdoor",
        "RESIDE's outdoor training set; the paper has 313,950 hazy pictures, the short archive 72,135",
    ),
    "Haze4K": Corpus(
        "dehaze",
        Pairs("Haze4K/train/haze", "Haze4K/train/gt", naming="Haze4K"),
        {"Haze4K": Pairs("Haze4K/test/haze", "Haze4K/test/gt", naming="Haze4K")},
        "Haze4K",
        "Haze4K, 3,000 training pairs and 1,000 test pairs",
    ),
    "O-HAZE": _small("O-HAZE", "hazy", "GT", "O-HAZE, 45 pairs, of which 41 to 45 are for testing"),
    "Dense-Haze": _small("Dense-Haze", "hazy", "GT", "Dense-Haze, 55 pairs, of which 51 to 55 are for testing"),
    "NH-HAZE": _small("NH-HAZE", "", "", "NH-HAZE, 55 pairs in one folder, of which 51 to 55 are for testing"),
    "Rain13K": Corpus(
        "derain",
        Pairs("Rain13K/train/input", "Rain13K/train/target"),
        {name: _rain(name) for name in ("Rain100L", "Rain100H", "Test100", "Test1200", "Test2800")},
        "Rain100L",
        "Rain13K, of several rain sets",
    ),
    "Snow100K": _snow("Snow100K", "Snow100K, 2,500 training and 2,000 test pairs of equal names"),
    "SRRS": _snow("SRRS", "SRRS, 2,500 training and 2,000 test pairs, name.tif with name.jpg"),
    "SIDD": Corpus(
        "denoise",
        Pairs("SIDD/train/input", "SIDD/train/target"),
        {"SIDD": Pairs("SIDD/val/input", "SIDD/val/target")},
        "SIDD",
        "SIDD's sRGB pictures, cut into pieces; the 1,280 validation blocks as PNG",
    ),
    "GoPro": Corpus(
        "deblur",
        Pairs("GoPro/train/input_crops", "GoPro/train/target_crops"),
        {
            "GoPro-crops": Pairs("GoPro/val/input_crops", "GoPro/val/target_crops"),
            "GoPro": Pairs("GoPro/test/input", "GoPro/test/target"),
            "HIDE": Pairs("HIDE/test/input", "HIDE/test/target"),
        },
        "GoPro-crops",
        "GoPro, cut into pieces; HIDE is for testing only",
    ),
}
_DEHAZING = ("ITS", "OTS", "O-HAZE", "Dense-Haze", "NH-HAZE", "Haze4K")
TRAINED_ON = {
    (1, "B"): _DEHAZING[:4],
    (1, "L"): _DEHAZING[:4],
    (2, "B"): _DEHAZING,
    (2, "L"): (*_DEHAZING, "Rain13K", "Snow100K", "SRRS", "SIDD"),
    (2, "XL"): ("GoPro",),
}
# the authors' option files; the settings of other sets are theirs too, but no file of them is published
OWN_FILE = {
    (1, "B"): ("ITS",),
    (1, "L"): ("ITS",),
    (2, "B"): ("ITS",),
    (2, "L"): ("ITS", "Rain13K", "Snow100K", "SIDD"),
    (2, "XL"): ("GoPro",),
}

_UDPNET = "from UDPNet's README"
# what is published, with its source
PUBLISHED: dict[tuple[int, str, str], tuple[str, ...]] = {
    (1, "B", "ITS"): (
        "SOTS-indoor 40.71 dB PSNR, by the paper's text;",
        "its SSIM is told differently in different places, so none is given here.",
    ),
    (1, "L", "ITS"): (
        "SOTS-indoor 42.64 dB PSNR, SSIM 0.994, from UDPNet's README;",
        "it agrees with the paper's text, which says 4.12 dB above SGID-PFF.",
    ),
    (1, "L", "OTS"): (
        "SOTS-outdoor 38.09 dB PSNR, SSIM 0.991, from UDPNet's README;",
        "it agrees with the paper's text, which says 2.91 dB above Dehamer.",
    ),
    (1, "B", "Dense-Haze"): (
        "16.66 dB PSNR, SSIM 0.56, from UDPNet's README;",
        "it agrees with the paper's text, which says 0.04 dB above Dehamer.",
    ),
    (2, "L", "ITS"): (f"SOTS-indoor 42.84 dB PSNR, SSIM 0.995, {_UDPNET}.",),
    (2, "L", "OTS"): (
        f"SOTS-outdoor 39.25 dB PSNR, SSIM 0.992, {_UDPNET};",
        "an early OTS file of the authors trains on a folder called SOTS-Test; take the number with care.",
    ),
    (2, "B", "Haze4K"): (f"34.92 dB PSNR, SSIM 0.99, {_UDPNET},", "whose row says B, and may mean L."),
    (2, "L", "Haze4K"): (
        "34.93 dB PSNR, SSIM 0.991: the authors' weights in an independent run,",
        "from a public log.",
    ),
}
# the names of the authors' weights, where they are known
WEIGHTS = {
    (1, "B", "ITS"): "ITS-MB-TaylorFormer-B",
    (1, "L", "ITS"): "ITS-MB-TaylorFormer-L",
    (1, "B", "OTS"): "OTS-MB-TaylorFormer-B",
    (1, "L", "OTS"): "OTS-MB-TaylorFormer-L",
    (1, "B", "Dense-Haze"): "densehaze-MB-TaylorFormer-B",
    (1, "L", "Dense-Haze"): "densehaze-MB-TaylorFormer-L",
    (1, "B", "O-HAZE"): "ohaze-MB-TaylorFormer-B",
    (2, "B", "ITS"): "ITS-B",
    (2, "L", "Haze4K"): "HAZE4K-L",
    (2, "L", "Rain13K"): "DerainV2-L",
    (2, "L", "Snow100K"): "Snow100k-L",
    (2, "L", "SIDD"): "SIDD-L",
    (2, "XL", "GoPro"): "gopro-XL",
}


@dataclass(frozen=True)
class Setting:
    """One published network: version, size, what it was trained on."""

    version: int
    size: str
    corpus: str

    @property
    def key(self) -> tuple[int, str, str]:
        """Its place in the tables."""
        return self.version, self.size, self.corpus

    @property
    def data(self) -> Corpus:
        """What it is trained and judged on."""
        return CORPORA[self.corpus]

    @property
    def network(self) -> str:
        """Its class."""
        return "MBTaylorFormer" if self.version == 1 else "MBTaylorFormerV2"

    @property
    def extra(self) -> dict[str, object]:
        """Options of the network beyond those of its size."""
        return {"qk_norm": 0.5} if self.version == 1 else {"focus_power": 8}

    @property
    def paper(self) -> str:
        """Where the network is from."""
        return PAPERS[self.version]

    @property
    def notes(self) -> tuple[str, ...]:
        """What else there is to say about its settings."""
        return ()

    @property
    def expected(self) -> tuple[str, ...]:
        """What is published, line by line."""
        none = ("none found: no score of this network on these data was found in text.",)
        return (*PUBLISHED.get(self.key, none), "Not measured with Pellucid.")

    @property
    def preset(self) -> str:
        """Its key in ``archs.mb_taylorformer.PRESETS``."""
        return f"MB-TaylorFormer{'V2' if self.version == 2 else ''}-{self.size}"

    @property
    def name(self) -> str:
        """Of the run and its file."""
        return f"{self.network}_{self.size}_{self.corpus}"

    @property
    def title(self) -> str:
        """As the paper calls it."""
        version = " V2" if self.version == 2 else ""
        return f"MB-TaylorFormer{version}-{self.size} for {TASKS[self.data.task]}, trained on {self.corpus}"

    @property
    def batch(self) -> int:
        """Samples of a step per GPU; there are eight."""
        if self.version == 1:
            return 1
        return 2 if self.data.task in ("derain", "desnow") else 4

    @property
    def lr(self) -> str:
        """The learning rate, constant for 200,000 iterations."""
        return "2e-4" if self.version == 1 else "3e-4"

    @property
    def floor(self) -> str:
        """Where a cosine brings it in the 300,000 that follow."""
        low = self.version == 2 and (self.size == "B" or self.data.task in ("derain", "desnow"))
        return "1e-6" if low else "1e-5"

    @property
    def seed(self) -> int:
        """As in the authors' files."""
        return 100 if self.version == 1 else 42

    @property
    def luma(self) -> bool:
        """Whether the authors judge the training on Y."""
        return self.data.task in ("derain", "desnow")


def settings() -> Iterator[Setting]:
    """Every published network."""
    for (version, size), corpora in TRAINED_ON.items():
        for corpus in corpora:
            yield Setting(version, size, corpus)
