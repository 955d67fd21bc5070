"""The plan of a run: what will happen, in numbers, printed before it does."""

import contextlib
import itertools
import logging
import time
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from rich.table import Table
from rich.text import Text
from torch import Tensor

from kernels import dispatch
from models.base import Base
from models.distributed import ALONE, Processes
from models.loop import PictureTools, evaluate
from models.report import protocols
from options import stages
from options.errors import OptionsError
from options.schema import DatasetOptions, MixupOptions, Options

logger = logging.getLogger("pellucid")


def describe(
    model: Base, options: Options, sets: Mapping[str, int], *, training: int | None = None, world: int = 1
) -> list[tuple[str, str]]:
    """Rows (subject, value) of the plan.

    Args:
        sets: name of each set to be judged on -> number of pictures.
        training: number of pictures to train on; None for a test.
        world: number of processes.
    """
    network = model.network
    count = sum(parameter.numel() for parameter in network.parameters())
    rows = [("run", f"{options.name} ({options.file})"), ("network", f"{options.network_g.type}, {count:,} parameters")]
    each = f" in each of {world} processes" if world > 1 else ""
    rows += [("device", _device(model.device) + each), ("threads", str(torch.get_num_threads()) + each)]
    if training is not None:
        rows += [("training set", f"{training} pictures"), *_training(options, training, world)]
    rows += [("set", f"{name}: {pictures} pictures") for name, pictures in sets.items()]
    val = options.val
    ways = {"tiles": val.tile, "overlap": val.overlap, "dtype": val.dtype, "self-ensemble": val.self_ensemble}
    chosen = [f"{way} {value}" for way, value in ways.items() if value not in (None, False, "float32")]
    rows += [("restored", f"by {', '.join(chosen)}")] if chosen and sets else []
    told = protocols(val.metrics)
    rows += [("metric", f"{label}: {m.type} {m.arguments()}, {told[label]}") for label, m in val.metrics.items()]
    return rows


def _training(options: Options, pictures: int, world: int) -> list[tuple[str, str]]:
    train, dataset = options.train, next(iter(options.phase("train").values()))
    batch, progressive = dataset.loaded_batch, stages.stages(dataset)
    effective = batch * train.accum_iter * world
    epoch = pictures * dataset.dataset_enlarge_ratio
    parts = f"{batch} samples x {train.accum_iter} accumulated x {world} process{'es' * (world > 1)} = {effective}"
    span = f"{train.total_iter:,} iterations = {train.total_iter * effective / epoch:,.1f} epochs"
    losses = ", ".join(f"{label}: {spec['type']}" for label, spec in train.loss_specs().items())
    schedule = train.scheduler.type if train.scheduler else "constant"
    precision = train.amp_dtype if train.use_amp else "float32"
    return [
        ("batch", f"effective batch {parts}{', in stages' if len(progressive) > 1 else ''}"),
        *(("stage", str(stage)) for stage in progressive),
        ("length", f"{span} of {epoch:,} samples ({epoch / effective:,.1f} iterations each)"),
        ("losses", losses),
        ("optimizer", f"{train.optim_g.spec()}, {schedule}, warm-up {max(train.warmup_iter, 0)}"),
        ("precision", f"{precision}, compile {train.use_compile}, checkpointing {train.use_checkpointing}"),
        ("average", f"EMA {train.ema_decay}" if train.ema_decay else "no EMA"),
        *_mixing(train.mixing_augs),
    ]


def _mixing(mixing: MixupOptions | None) -> list[tuple[str, str]]:
    if mixing is None or not mixing.mixup:
        return []
    b, share = mixing.mixup_beta, "half" if mixing.use_identity else "all"
    return [("mixup", f"Beta({b}, {b}) in {share} of the batches")]


def try_step(model: Base, batch: Mapping[str, Any]) -> list[tuple[str, str]]:
    """One optimizer step on the first sample of ``batch``, as rows for the plan; the model's weights change."""
    single = {key: value[:1] for key, value in batch.items() if key in ("lq", "gt", "name")}
    if model.device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(model.device)
    began = time.perf_counter()
    logs = model.train_step([single])
    values = ", ".join(f"{label} {value.item():.4g}" for label, value in logs.items())
    row = f"{time.perf_counter() - began:.2f} s at batch 1, {tuple(single['lq'].shape)} -> {tuple(single['gt'].shape)}"
    rows = [("trial step", f"{row}: {values}")]
    rows += [("kernel", sentence) for sentence in dispatch.decisions()]
    if model.device.type == "cuda":
        rows.append(("memory", f"{torch.cuda.max_memory_allocated(model.device) / 2**20:,.0f} MiB at batch 1"))
    return rows


def check_sample(model: Base, sample: Mapping[str, Any], dataset: DatasetOptions) -> None:
    """Send one training sample through the network, in the patch of each stage, before anything is created.

    Raises:
        OptionsError: the network refuses it, or returns another size than the ground truth has.
    """
    lq, gt = (sample[key][None] for key in ("lq", "gt"))
    _check_pair(model, lq, gt)
    for side in sorted({stage.gt_size for stage in stages.stages(dataset)}):
        if side > min(gt.shape[2:]):
            text = f"datasets.train.gt_sizes: {side} is larger than what the data set yields, {tuple(gt.shape[2:])}"
            raise OptionsError(f"{text}; lower it, or raise gt_size")
        own = side * lq.shape[2] // gt.shape[2]
        _check_pair(model, lq[:, :, :own, :own], gt[:, :, :side, :side])


def _check_pair(model: Base, lq: Tensor, gt: Tensor) -> None:
    try:
        with torch.no_grad():
            pred = model.network.eval()(lq.to(model.device))
    except dispatch.KernelUnavailable as error:
        raise OptionsError(str(error)) from error
    except (ValueError, RuntimeError) as error:
        text = str(error).splitlines()[0]
        raise OptionsError(
            f"the network does not take the data, {tuple(lq.shape)} (color? gt_size?): {text}"
        ) from error
    if pred.shape != gt.shape:
        shapes = f"{tuple(lq.shape)} to {tuple(pred.shape)}, but the ground truth is {tuple(gt.shape)}"
        raise OptionsError(f"the network turns {shapes}; check scale, color and the network's own options")


def try_validation(
    model: Base,
    loaders: Mapping[str, Iterable[Mapping[str, Any]]],
    options: Options,
    tools: PictureTools,
    processes: Processes = ALONE,
) -> list[tuple[str, str]]:
    """Judge the first picture of each set on each process, as rows for the plan."""
    rows = []
    for name, loader in loaders.items():
        began = time.perf_counter()
        with contextlib.closing(iter(loader)) as stream:
            # a process may have none of a small set
            first = list(itertools.islice(stream, 1))
            (scores,) = evaluate(model, {name: first}, options, tools, processes=processes)
        values = ", ".join(f"{label} {value:.4g}" for label, value in scores.means().items())
        took = f"{time.perf_counter() - began:.2f} s for one picture{' each' if processes.world > 1 else ''}"
        rows.append(("trial validation", f"{name}: {took}: {values}"))
    return rows


def tell(rows: Iterable[tuple[str, str]]) -> None:
    """Write the plan to the log."""
    for subject, value in rows:
        logger.info(f"{subject}: {value}")


def table(rows: Iterable[tuple[str, str]]) -> Table:
    """The plan as a table for the terminal."""
    grid = Table(title="Plan", show_header=False)
    for subject, value in rows:
        # plain: a list in brackets is no style
        grid.add_row(subject, Text(value))
    return grid


def _device(device: torch.device) -> str:
    if device.type == "cuda":
        facts = torch.cuda.get_device_properties(device)
        return f"{device} ({facts.name}, {facts.total_memory / 2**30:.0f} GiB)"
    return str(device)
