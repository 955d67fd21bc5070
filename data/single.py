"""Low-quality pictures without ground truth."""

from typing import Any

from data.backends import ImageReader, IoBackend
from data.dataset import ImageDataset, Phase, split_key
from data.io import Alpha, Color
from data.pairs import list_names, unique_stems
from data.verify import Verify, verify_pictures
from options.errors import OptionsError
from options.registry import DATASETS


@DATASETS.register()
class SingleImageDataset(ImageDataset):
    """Whole pictures of a folder and its subfolders, for testing; items carry no ``gt``.

    Args:
        dataroot_lq: folder, or LMDB.
        scale, phase, seed, name, io_backend, color, alpha, mean, std, verify: see :class:`data.dataset.ImageDataset`.
        meta_info_file: lists the pictures to use, one per line.

    Raises:
        OptionsError: a wrong option; phase ``"train"`` is one, since there is nothing to learn from.
        DataError: everything that is wrong with the pictures, at once.
    """

    def __init__(
        self,
        *,
        dataroot_lq: str,
        scale: int = 1,
        phase: Phase = "test",
        seed: int = 0,
        name: str = "",
        io_backend: IoBackend | None = None,
        meta_info_file: str | None = None,
        color: Color = "rgb",
        alpha: Alpha = "error",
        mean: list[float] | None = None,
        std: list[float] | None = None,
        verify: Verify = "headers",
    ) -> None:
        super().__init__(
            phase=phase,
            scale=scale,
            seed=seed,
            name=name,
            io_backend=io_backend,
            color=color,
            alpha=alpha,
            mean=mean,
            std=std,
            verify=verify,
        )
        if phase == "train":
            raise OptionsError(
                f"{self.name}: SingleImageDataset has no ground truth to train on; use it for val or test"
            )
        self.lq = self._reader(dataroot_lq)
        self.files = list_names(self.lq.source, meta_info_file, self.problems)
        self.names = unique_stems(self.files)
        verify_pictures(self.lq, self.files, verify, self.problems)
        self.problems.raise_if_any()

    def __len__(self) -> int:
        return len(self.files)

    def __getitem__(self, key: int | tuple[int, int]) -> dict[str, Any]:
        _, index = split_key(key)
        file = self.files[index]
        return {"lq": self._tensor(self.lq(file)), "name": self.names[index], "lq_path": self.lq.path(file)}

    def readings(self) -> list[tuple[ImageReader, str]]:
        """Every picture of the set, with the reader it comes from."""
        return [(self.lq, file) for file in self.files]
