"""Memory that tells what a kernel did to it: NaN before and behind every tensor, and in every output until written."""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

# numbers before and behind a tensor that nobody may touch
GUARD = 256


class Guards:
    """Tensors in the middle of memory that holds NaN; ``broken`` says which of them lost it."""

    def __init__(self) -> None:
        self._inputs: list[tuple[str, Tensor, Tensor]] = []
        self._outputs: list[tuple[Tensor, int]] = []

    def around(self, x: Tensor, name: str = "an input") -> Tensor:
        """A copy of ``x`` with its strides, in guarded memory; a leaf that wants a gradient if ``x`` does."""
        length = 1 + sum((n - 1) * s for n, s in zip(x.shape, x.stride(), strict=True)) if x.numel() else 0
        fill = torch.nan if x.is_floating_point() else 77
        memory = torch.full((length + 2 * GUARD,), fill, dtype=x.dtype, device=x.device)
        view = memory.as_strided(x.shape, x.stride(), GUARD)
        view.copy_(x.detach())
        self._inputs.append((name, memory, memory.clone()))
        return view.detach().requires_grad_(x.requires_grad)

    @contextlib.contextmanager
    def poisoned(self) -> Iterator[None]:
        """Within the block, new memory holds NaN, and what ``torch.empty`` makes is guarded as well."""
        makers = {name: getattr(torch, name) for name in ("empty", "empty_like", "empty_strided")}
        torch.empty = self._guarded(makers["empty"])
        torch.empty_like, torch.empty_strided = (_filled(makers[name]) for name in ("empty_like", "empty_strided"))
        try:
            yield
        finally:
            for name, make in makers.items():
                setattr(torch, name, make)

    def broken(self) -> list[str]:
        """What was written beyond its end or its beginning, in words; inputs must be as they were altogether."""
        found = [
            f"{name} or the memory around it was written to"
            for name, memory, before in self._inputs
            if not torch.equal(memory.nan_to_num(12345), before.nan_to_num(12345))
        ]
        for memory, numel in self._outputs:
            if not bool(torch.cat([memory[:GUARD], memory[GUARD + numel :]]).isnan().all()):
                found.append(f"a kernel wrote outside a tensor of {numel} numbers")
        return found

    def _guarded(self, make: Callable[..., Tensor]) -> Callable[..., Tensor]:
        def empty(*args: Any, **kwargs: Any) -> Tensor:
            x = make(*args, **kwargs)
            if not _has_data(x):
                return x
            memory = torch.full((x.numel() + 2 * GUARD,), torch.nan, dtype=x.dtype, device=x.device)
            self._outputs.append((memory, x.numel()))
            # not a view: it owns this part of the memory
            return x.set_(memory.untyped_storage(), GUARD, x.shape, x.stride())

        return empty


def _filled(make: Callable[..., Tensor]) -> Callable[..., Tensor]:
    def empty(*args: Any, **kwargs: Any) -> Tensor:
        x = make(*args, **kwargs)
        if _has_data(x):
            with torch.no_grad():
                x.fill_(torch.nan)
        return x

    return empty


def _has_data(x: Tensor) -> bool:
    """Neither meta nor fake, and something that NaN can be written into."""
    return type(x) is Tensor and x.is_floating_point() and x.device.type != "meta"
