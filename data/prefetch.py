"""Batches on the training device one step ahead: the next one is copied while the current one trains."""

from collections.abc import Iterator, Mapping
from typing import Any

import torch

from options.errors import UserError


def prefetch(batches: Iterator[Mapping[str, Any]], device: torch.device) -> Iterator[dict[str, Any]]:
    """Yield the same batches in the same order, their tensors on ``device``.

    On a GPU the copies run on a stream of their own; they overlap the training where the batches are page-locked. What
    went wrong in fetching a batch is raised when that batch is due, not one step early.

    Args:
        batches: dictionaries with tensors on the CPU; other values are handed on.
        device: where the tensors are wanted; on the CPU they are handed on as they are.

    Raises:
        UserError, RuntimeError: what fetching raised.
    """
    stream = torch.cuda.Stream(device) if device.type == "cuda" else None
    following = _fetch(batches, device, stream)
    while following is not None:
        if isinstance(following, Exception):
            raise following
        batch = _arrived(following, stream, device)
        following = _fetch(batches, device, stream)
        yield batch


def _fetch(
    batches: Iterator[Mapping[str, Any]], device: torch.device, stream: torch.cuda.Stream | None
) -> dict[str, Any] | Exception | None:
    """Begin to copy the next batch; the error that came instead of it; or None at the end."""
    try:
        batch = next(batches, None)
    except (UserError, RuntimeError) as error:
        return error
    if batch is None:
        return None
    with torch.cuda.stream(stream):
        return {
            key: value.to(device, non_blocking=True) if isinstance(value, torch.Tensor) else value
            for key, value in batch.items()
        }


def _arrived(batch: dict[str, Any], stream: torch.cuda.Stream | None, device: torch.device) -> dict[str, Any]:
    """The batch, to be used on the current stream once its copies are done."""
    if stream is not None:
        current = torch.cuda.current_stream(device)
        current.wait_stream(stream)
        for value in batch.values():
            if isinstance(value, torch.Tensor):
                # or its memory could be given to the next copy while the current stream still reads it
                value.record_stream(current)
    return batch
