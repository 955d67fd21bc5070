"""The plan of a run: what will happen, in numbers, printed before it does."""

import time
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from rich.table import Table

from kernels import dispatch
from models.base import Base
from options.schema import Options


def describe(
    model: Base, options: Options, sets: Mapping[str, int], *, trained_on: str | None = None
) -> list[tuple[str, str]]:
    """Rows (subject, value) of the plan.

    Args:
        sets: name of each data set -> number of pictures.
        trained_on: the training set among them.
    """
    network = model.network
    count = sum(parameter.numel() for parameter in network.parameters())
    rows = [("run", f"{options.name} ({options.file})"), ("network", f"{options.network_g.type}, {count:,} parameters")]
    rows += [("device", _device(next(network.parameters()).device)), ("threads", str(torch.get_num_threads()))]
    rows += [("set", f"{name}: {pictures} pictures") for name, pictures in sets.items()]
    if trained_on is not None:
        rows += _training(options, sets[trained_on])
    rows += [("metric", f"{label}: {m.type} {m.arguments()}") for label, m in options.val.metrics.items()]
    return rows


def _training(options: Options, pictures: int) -> list[tuple[str, str]]:
    train, dataset = options.train, next(iter(options.phase("train").values()))
    batch = dataset.batch_size_per_gpu
    effective = batch * train.accum_iter
    epoch = pictures * dataset.dataset_enlarge_ratio
    parts = f"{batch} samples x {train.accum_iter} accumulated x 1 process = {effective}"
    span = f"{train.total_iter:,} iterations = {train.total_iter * effective / epoch:,.1f} epochs"
    losses = ", ".join(f"{label}: {spec['type']}" for label, spec in train.loss_specs().items())
    schedule = train.scheduler.type if train.scheduler else "constant"
    precision = train.amp_dtype if train.use_amp else "float32"
    return [
        ("batch", f"effective batch {parts}"),
        ("length", f"{span} of {epoch:,} samples ({epoch / effective:,.1f} iterations each)"),
        ("losses", losses),
        ("optimizer", f"{train.optim_g.spec()}, {schedule}, warm-up {max(train.warmup_iter, 0)}"),
        ("precision", f"{precision}, compile {train.use_compile}, checkpointing {train.use_checkpointing}"),
        ("average", f"EMA {train.ema_decay}" if train.ema_decay else "no EMA"),
    ]


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


def table(rows: Iterable[tuple[str, str]]) -> Table:
    """The plan as a table for the terminal."""
    grid = Table(title="Plan", show_header=False)
    for subject, value in rows:
        grid.add_row(subject, value)
    return grid


def _device(device: torch.device) -> str:
    if device.type == "cuda":
        facts = torch.cuda.get_device_properties(device)
        return f"{device} ({facts.name}, {facts.total_memory / 2**30:.0f} GiB)"
    return str(device)
