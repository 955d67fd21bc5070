"""Every option of a run: its type, default, range and meaning.

The vocabulary is BasicSR's, with the further keys of the published option files. Unknown keys are refused. A key
that is known but changes nothing here carries ``inert``: it is accepted, and a notice says why. The arguments of
components (networks, data sets, losses, metrics, optimizers, schedulers) are checked against their constructors by
``options.check``.
"""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, field_validator, model_validator

from options import stages

Count = Annotated[int, Field(ge=1)]


def _expanded(path: Path) -> Path:
    if "\0" in str(path):
        raise ValueError(f"{str(path)!r} is not a path")
    return Path(os.path.expanduser(path))


FilePath = Annotated[Path, AfterValidator(_expanded)]


def _inert(why: str, default: Any = None) -> Any:
    return Field(default, description=f"accepted, without effect: {why}", json_schema_extra={"inert": why})


class Strict(BaseModel):
    """Frozen, and closed to unknown keys."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)


class Component(BaseModel):
    """``type`` and the keyword arguments of the class or function of that name."""

    model_config = ConfigDict(extra="allow", frozen=True, allow_inf_nan=False)
    type: str = Field(description="name in the registry")

    def spec(self) -> dict[str, Any]:
        """``{"type": ..., argument: value}``, a fresh dictionary."""
        return {"type": self.type, **(self.model_extra or {})}

    def arguments(self) -> dict[str, Any]:
        """The component's own keyword arguments."""
        return dict(self.model_extra or {})


class DatasetOptions(Component):
    """One data set: the loader's keys are below, all others go to the data set's constructor."""

    name: str = Field("", description="label in logs, tables and folders; default: the key of the section")
    batch_size_per_gpu: Count = Field(16, description="samples per optimizer step, device and accumulation step")
    num_worker_per_gpu: int = Field(2, ge=0, description="loader processes; 0 loads in the training process")
    dataset_enlarge_ratio: int = Field(1, ge=1, le=10**6, description="how often one epoch repeats the pictures")
    prefetch_mode: Literal["cpu", "cuda"] | None = Field(
        None, description="cuda: copy the next batch to the GPU while one trains; cpu: what the workers do anyway"
    )
    num_prefetch_queue: Count = Field(2, description="batches that each worker prepares ahead")
    pin_memory: bool = Field(False, description="page-locked batches for faster copies to a GPU")
    persistent_workers: bool | None = Field(
        None, description="keep the workers between validations; those of training live as long as the run"
    )
    use_shuffle: bool = Field(True, description="draw the pictures in random order (training)")
    mini_batch_sizes: list[Count] | None = Field(
        None, description="samples of each stage of a progressive schedule, drawn from batch_size_per_gpu"
    )
    iters: list[Count] | None = Field(None, description="iterations of each stage; the last one goes on to the end")
    gt_sizes: list[Count] | None = Field(
        None, description="side of the GT patch of each stage, drawn from the one of gt_size"
    )
    geometric_augs: bool | None = Field(
        None, description="one of the eight flips and turns: stands for use_hflip and use_rot"
    )
    # filled in by the loader, not by the user
    phase: Literal["train", "val", "test"] = Field("train", exclude=True)
    scale: Count = Field(1, exclude=True)
    seed: int = Field(0, exclude=True)

    @field_validator("name")
    @classmethod
    def _is_a_folder_name(cls, name: str) -> str:
        return folder_name(name)

    @property
    def loaded_batch(self) -> int:
        """Samples of one loaded batch: ``batch_size_per_gpu``, or fewer where no stage takes as many."""
        return stages.loaded(self)


class MetricOptions(Component):
    """A metric, computed on pictures rounded to 8 bit as they would be saved, or on the network's own values."""

    quantize: bool = Field(True, description="round the pictures to 8 bit; false: floats, clamped to 0..1")
    better: Literal["higher", "lower"] | None = Field(None, description="the better of two values; default: by metric")


class PathOptions(Strict):
    """Where weights come from and results go."""

    root: FilePath | None = Field(None, description="folder of experiments/, results/ and tb_logger/; default: here")
    pretrain_network_g: FilePath | None = Field(None, description="weights to start from (.pth or .safetensors)")
    param_key_g: str | None = Field("auto", description="params, params_ema or auto (the average where there is one)")
    strict_load_g: bool = Field(True, description="false loads what fits and reports the rest")
    resume_state: FilePath | None = Field(None, description="a .state file to continue from")
    ignore_resume_networks: list[str] | None = Field(None, description="networks that a resumed run does not load")
    experiments_root: FilePath | None = Field(None, description="default: experiments/ under root")
    results_root: FilePath | None = Field(None, description="default: results/ under root")


class MixupOptions(Strict):
    """Mixup as in the published dehazing files."""

    mixup: bool = Field(False, description="mix each sample with another one of its batch, LQ and GT alike")
    mixup_beta: float = Field(1.2, gt=0, description="b of the share, which is drawn from Beta(b, b)")
    use_identity: bool = Field(False, description="leave every second batch, on average, as it is")


class TrainOptions(Strict):
    """How the network is trained; one iteration is one optimizer step."""

    total_iter: Count = Field(description="optimizer steps of the whole run")
    warmup_iter: int = Field(-1, ge=-1, description="steps of linear warm-up; -1: none")
    ema_decay: float = Field(0, ge=0, lt=1, description="decay per step of the moving average of the weights; 0: none")
    optim_g: Component = Field(description="optimizer: type, lr and its further arguments")
    scheduler: Component | None = Field(None, description="learning rate; default: constant after the warm-up")
    pixel_opt: Component | None = Field(None, description="loss between output and ground truth, logged as l_pix")
    fft_loss_opt: Component | None = Field(None, description="loss in the frequency domain, logged as l_fft")
    losses: dict[str, Component] = Field(default_factory=dict, description="further losses: label -> loss")
    use_grad_clip: bool = Field(False, description="limit the gradient norm to grad_clip")
    grad_clip: float = Field(0.01, gt=0, description="largest gradient norm, where use_grad_clip is on")
    accum_iter: Count = Field(1, description="batches whose gradients are averaged in one optimizer step")
    use_amp: bool = Field(False, description="mixed precision (autocast)")
    amp_dtype: Literal["bfloat16", "float16"] = Field("bfloat16", description="number format of mixed precision")
    use_compile: bool | Literal["default", "reduce-overhead", "max-autotune"] = Field(
        False, description="torch.compile, with its mode"
    )
    use_channels_last: bool = Field(True, description="channels-last memory layout")
    use_checkpointing: bool = Field(False, description="recompute activations in the backward pass, to save memory")
    nan_guard: Literal["stop", "skip", "off"] = Field("stop", description="at a loss or gradient that is not finite")
    mixing_augs: MixupOptions | None = Field(None, description="mixtures of samples")
    wave_opt: Component | None = _inert("no published model uses the wavelet loss")
    perceptual_opt: Component | None = _inert("perceptual losses need weights that do not ship with Pellucid")
    use_ema: bool | None = _inert("ema_decay alone decides")
    manual_seed: int | None = _inert("the seed is the top-level manual_seed")

    @field_validator("losses")
    @classmethod
    def _labels_of_losses(cls, losses: dict[str, Component]) -> dict[str, Component]:
        for label in losses:
            if not label.startswith("l_") or label in ("l_pix", "l_fft"):
                raise ValueError(f"the label {label} must start with l_ and not be l_pix or l_fft")
        return losses

    def loss_specs(self) -> dict[str, dict[str, Any]]:
        """Label in the log -> spec of the loss."""
        named = {"l_pix": self.pixel_opt, "l_fft": self.fft_loss_opt, **self.losses}
        return {label: loss.spec() for label, loss in named.items() if loss is not None}


class ValOptions(Strict):
    """How the network is judged."""

    val_freq: Count = Field(5000, description="steps between validations")
    save_img: bool = Field(False, description="write the result pictures")
    report: bool = Field(True, description="write a page, index.html, on the run: scores, pictures where saved, curves")
    suffix: str | None = Field(None, description="ending of the result pictures' names; default: the run's name")
    pbar: bool | None = _inert("a progress bar is shown on a terminal only")
    metrics: dict[str, MetricOptions] = Field(default_factory=dict, description="label -> metric")
    baseline: Literal["bicubic", "input", "stretch"] | None = Field(
        None, description="also score the input: enlarged, untouched, or with its contrast stretched from 1 % to 99 %"
    )
    tile: int | None = Field(None, ge=16, description="side of the tiles in input pixels; default: the whole picture")
    overlap: int | None = Field(None, ge=0, description="overlap of tiles in input pixels; default: from the network")
    self_ensemble: bool = Field(False, description="average over the 8 flips and rotations")
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = Field(
        "float32", description="number format (autocast) of the network; auto: bfloat16 on a GPU that has it"
    )

    @model_validator(mode="before")
    @classmethod
    def _use_image_is_what_quantize_is_by_default(cls, section: Any) -> Any:
        metrics = section.get("metrics") if isinstance(section, Mapping) else None
        if not isinstance(metrics, Mapping) or section.get("use_image") is not False:
            return section
        filled = {k: {"quantize": False, **m} if isinstance(m, Mapping) else m for k, m in metrics.items()}
        return {**section, "metrics": filled}

    @model_validator(mode="after")
    def _overlap_fits_the_tile(self) -> "ValOptions":
        if self.overlap is not None and self.tile is None:
            raise ValueError("overlap has no meaning without tile; set tile too")
        if self.overlap is not None and self.overlap > self.tile // 2:
            raise ValueError(f"overlap {self.overlap} is more than half of tile {self.tile}")
        return self

    window_size: int | None = _inert("padding follows what the network states about itself")
    rgb2bgr: bool | None = _inert("pictures are RGB throughout")
    use_image: bool | None = Field(None, description="false: quantize is false in each metric that does not say")
    max_minibatch: int | None = _inert("val.tile bounds the memory")


class WandbOptions(Strict):
    """Weights & Biases, beside the other logs; needs the wandb package."""

    project: str | None = None
    resume_id: str | None = None


class LoggerOptions(Strict):
    """What is written, and how often."""

    print_freq: Count = Field(100, description="steps between log lines")
    save_checkpoint_freq: Count = Field(5000, description="steps between checkpoints")
    keep_checkpoints: Count | None = Field(
        None, description="newest checkpoints to keep, besides the best; default: all"
    )
    use_tb_logger: bool = Field(True, description="write tensorboard files")
    wandb: WandbOptions | None = Field(None, description="only used where project is set")
    use_pbar: bool | None = _inert("a progress bar is shown on a terminal only")


class DistOptions(Strict):
    """Process group."""

    backend: Literal["nccl", "gloo"] = Field("nccl", description="falls back to gloo where there is no CUDA")
    port: int = Field(29500, ge=1, le=65535)
    timeout: float = Field(600, gt=0, description="seconds until a silent process ends the run")


class Options(Strict):
    """One run, whole."""

    name: str = Field(description="name of the run: the folder under experiments/ or results/")
    model_type: str = Field("RestorationModel", description="how the network is trained and judged")
    scale: Count = Field(1, description="output size over input size; 1 for restoration")
    num_gpu: Annotated[int, Field(ge=0)] | Literal["auto"] = Field(
        "auto", description="0: CPU; auto: one GPU where there is one"
    )
    manual_seed: int = Field(0, ge=0, lt=2**63, description="seed of weights, order and augmentation")
    deterministic: bool = Field(False, description="only deterministic operators, at some cost in speed")
    import_paths: list[Path] = Field(default_factory=list, description="files or folders with your own components")
    basicsr_alias: bool = Field(False, description="let files of import_paths that were written for BasicSR run")
    find_unused_parameters: bool = Field(False, description="for distributed training of networks with idle parameters")
    network_g: Component = Field(description="the network")
    datasets: dict[str, DatasetOptions] = Field(description="train, val, val_1 .., test, test_1 ..")
    path: PathOptions = Field(default_factory=PathOptions)
    train: TrainOptions | None = Field(None, description="needed by train.py")
    val: ValOptions = Field(default_factory=ValOptions)
    logger: LoggerOptions = Field(default_factory=LoggerOptions)
    dist_params: DistOptions = Field(default_factory=DistOptions)
    file: Path | None = Field(None, exclude=True, description="the option file; filled in by the loader")

    @field_validator("name")
    @classmethod
    def _is_a_folder_name(cls, name: str) -> str:
        return folder_name(name)

    @field_validator("manual_seed", mode="before")
    @classmethod
    def _no_seed_is_seed_0(cls, seed: Any) -> Any:
        return 0 if seed is None else seed

    @field_validator("path", "val", "logger", "dist_params", mode="before")
    @classmethod
    def _empty_section(cls, section: Any) -> Any:
        return {} if section is None else section

    @model_validator(mode="after")
    def _only_one_training_set(self) -> "Options":
        if len([key for key in self.datasets if phase_of(key) == "train"]) > 1:
            raise ValueError("datasets: only one training set can be given; merge the folders")
        return self

    @model_validator(mode="after")
    def _names_of_judged_sets_differ(self) -> "Options":
        names = [dataset.name for dataset in self.phase("val", "test").values()]
        twice = sorted({name for name in names if names.count(name) > 1})
        if twice:
            raise ValueError(
                f"datasets: two sets are called {', '.join(twice)}; results of one would replace the other's"
            )
        return self

    def phase(self, *phases: str) -> dict[str, DatasetOptions]:
        """The data sets of these phases, in the order of the file."""
        return {key: dataset for key, dataset in self.datasets.items() if dataset.phase in phases}


def folder_name(name: str) -> str:
    """Return ``name`` if it can be the name of a folder on any system; raise ValueError otherwise."""
    if (
        not 0 < len(name.encode()) <= 150
        or name in (".", "..")
        or any(mark in name for mark in '/\\:*?"<>|\0')
        or name != name.strip()
    ):
        raise ValueError(f"{name!r} cannot be the name of a folder; use at most 150 letters, digits, - and _")
    return name


def phase_of(key: str) -> str:
    """``val_1`` -> ``val``."""
    return key.split("_")[0]
