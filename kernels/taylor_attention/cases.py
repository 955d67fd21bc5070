"""Shapes, inputs, costs and tolerances of T-MSA, for tests, benchmarks and the check on a GPU."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

# largest relative error (Frobenius norm) of outputs and gradients against float64
TOLERANCES = {torch.float64: 1e-11, torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1.5e-2}

V1 = {"norm": 0.5, "eps": 1e-6, "gate_mode": "multiply", "focus_power": None}
V2 = {"norm": 1.0, "eps": 1e-8, "gate_mode": "add", "focus_power": 8}


@dataclass(frozen=True)
class Case:
    """``(batch, heads, d, pixels)`` and the published form, with or without temperature and gate."""

    name: str
    batch: int
    heads: int
    d: int
    pixels: int
    form: str = "v1"
    factors: bool = True

    @property
    def settings(self) -> dict[str, Any]:
        return V1 if self.form == "v1" else V2 if self.form == "v2" else {**V2, "focus_power": 4}


SMALL = (
    Case("v1", 2, 2, 6, 35),
    Case("v2", 2, 2, 6, 35, "v2"),
    Case("v2 as first released", 1, 3, 5, 20, "v2-pre"),
    Case("v1 without factors", 2, 2, 3, 17, "v1", False),
    Case("v2 without factors", 1, 2, 3, 17, "v2", False),
    Case("one pixel", 1, 2, 4, 1),
    Case("one channel", 1, 3, 1, 9, "v2"),
    Case("empty batch", 0, 2, 4, 5),
)

# encoder 1, decoder 1 and the latent of the published networks at 256 x 256
PUBLISHED = (
    Case("V1-B encoder 1", 1, 1, 24, 65_536),
    Case("V1-B decoder 1", 1, 1, 48, 65_536),
    Case("V1-B latent", 1, 8, 12, 1_024),
    Case("V2-B decoder 1", 1, 2, 48, 65_536, "v2"),
)


def make_inputs(
    case: Case, *, dtype: torch.dtype = torch.float32, device: str | torch.device = "cpu", seed: int = 0
) -> dict[str, Any]:
    """Arguments of ``taylor_attention``: normal q, k, v, drawn in float32 by a seeded generator."""
    generator = torch.Generator().manual_seed(seed)

    def draw(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator).to(device=device, dtype=dtype)

    q, k, v = (draw(case.batch, case.heads, case.d, case.pixels) for _ in range(3))
    arguments = {"q": q, "k": k, "v": v, **case.settings}
    if case.factors:
        arguments |= {"temperature": 1 + draw(case.heads) / 4, "gate": draw(case.batch, case.heads, case.pixels)}
    if case.settings["focus_power"] is not None:
        arguments["focus_weight"] = draw(case.heads).sigmoid()
    return arguments


def flops(case: Case) -> int:
    """Multiplications and additions of the forward pass: two products of d x d with every pixel, for each term."""
    terms = 1 if case.settings["focus_power"] is None else 2
    return 2 * terms * case.batch * case.heads * case.pixels * case.d * (2 * case.d + 2)


def bytes_moved(case: Case, *, itemsize: int) -> int:
    """Least traffic of the forward pass: k and v, then q, read once, and the output written once."""
    return 4 * case.batch * case.heads * case.d * case.pixels * itemsize
