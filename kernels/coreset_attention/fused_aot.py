"""In which ways the Triton kernels of coreset attention are compiled, for ``scripts/aot_report.py``."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

from kernels import launch
from kernels.coreset_attention import fused, fused_attend, fused_choose
from kernels.coreset_attention import fused_layout as layout
from kernels.coreset_attention.torch_impl import CANCELLED, LARGEST_EXPONENT
from kernels.triton_parts import triton

ADDRESSES = {torch.bfloat16: "*bf16", torch.float16: "*fp16", torch.float32: "*fp32"}
PASSES = {
    "attend": fused_attend.forward,
    "attend_queries": fused_attend.backward_queries,
    "attend_keys": fused_attend.backward_keys,
}
# whose type is that of the network, and pointers to something else than sums
IMAGE = ("q", "k", "v", "out", "grad", "dq", "dk", "dv")
OTHERS = {"pivots": "*i64", "mask": "*u8", "count": "*i64"}
SCALARS = (
    *("m_all", "r", "n", "lines", "splits", "bins", "noise_h"),
    *("grid_h", "grid_w", "down", "across", "wide", "width", "mb", "mh", "mn"),
    *(f"{tensor}{axis}" for tensor in "kv" for axis in "bhnc"),
    *(f"{tensor}{axis}" for tensor in "qogd" for axis in "bhmc"),
)
ALIGNED = tuple(name for name in SCALARS if name[-1] in "bhn" and name not in ("n", "mn"))


@dataclass(frozen=True)
class Layer:
    """Attention of a published network: ``width`` places of a bin, ``slots`` keys of it, ``bins``; tokens or channels
    side by side."""

    name: str
    heads: int
    d: int
    dv: int
    width: int
    slots: int
    bins: int
    tokens_last: bool = False


LAYERS = (
    Layer("SST w48", 6, 48, 30, 256, 29, 9),
    Layer("SST w64", 6, 64, 30, 256, 16, 16),
    Layer("SST-L w96", 6, 64, 32, 576, 32, 16),
    Layer("MB-B level 1", 1, 24, 24, 4096, 8, 16, True),
    Layer("MB-B level 3", 4, 18, 18, 1024, 16, 4, True),
    Layer("MB-B level 4", 8, 12, 12, 256, 16, 4, True),
)


def aot_cases() -> Iterator[launch.AotCase]:
    """The kernels of each published layer, with the settings of each architecture."""
    for layer in LAYERS:
        dtype = torch.float32 if layer.tokens_last else torch.bfloat16
        for arch in (90, 80):
            yield _choose_case(layer, dtype, arch)
        if layer.name in ("SST w64", "MB-B level 1"):
            for arch in (90, 80):
                yield _finish_case(layer, dtype, arch)
                yield _spread_case(layer, dtype, arch)
    wide, narrow, small = LAYERS[2], LAYERS[3], LAYERS[5]
    for layer, dtype, precision in (
        *((wide, dtype, "ieee") for dtype in (torch.bfloat16, torch.float16)),
        *((layer, torch.float32, precision) for layer in (wide, narrow, small) for precision in ("tf32", "tf32x3")),
    ):
        for name in PASSES:
            for arch in (90, 80):
                yield _attend_case(name, layer, dtype, precision, arch)


def _choose_case(layer: Layer, dtype: torch.dtype, arch: int) -> launch.AotCase:
    held = layout.is_held(layer.width, layer.slots, layer.d)
    name = "choose_held" if held else "choose_streamed"
    block = {"BLOCK": triton.next_power_of_2(layer.width)} if held else {}
    eps = torch.finfo(torch.float32).eps
    constants = block | _chosen_constants(layer)
    constants |= {"BETA": 1.0, "ROOT_BETA": 1.0, "TAU_MULT": 1.0, "EPS": eps, "LOW": 1e-38, "HIGH": 1 - eps / 2}
    constants |= {"UNIFORM": False, "HAS_NOISE": True, "HAS_MASK": False, "KEEP": True}
    return _case(name, getattr(fused_choose, name), layer, dtype, constants, arch, "", tensor_cores=not held)


def _finish_case(layer: Layer, dtype: torch.dtype, arch: int) -> launch.AotCase:
    constants = {key: value for key, value in _chosen_constants(layer).items() if key not in ("R", "PRECISION")}
    r = layer.bins * layer.slots
    constants |= {"BETA": 1.0, "LARGEST": LARGEST_EXPONENT, "HAS_MASK": False, "BLOCK_R": 32, "num_warps": 4}
    constants |= {"BLOCK_ALL": triton.next_power_of_2(r), "BLOCK_BINS": triton.next_power_of_2(layer.bins)}
    return _case("finish", fused_choose.finish, layer, dtype, constants, arch, "", tensor_cores=False)


def _spread_case(layer: Layer, dtype: torch.dtype, arch: int) -> launch.AotCase:
    return _case("spread", fused_choose.spread, layer, dtype, _chosen_constants(layer), arch, "")


def _chosen_constants(layer: Layer) -> dict[str, Any]:
    return layout.choose_constants(layer.heads, layer.d, layer.dv, layer.slots, torch.float32)


def _attend_case(name: str, layer: Layer, dtype: torch.dtype, precision: str, arch: int) -> launch.AotCase:
    constants = layout.attend_constants(layer.heads, 1, layer.d, layer.dv, dtype, torch.float32, 1.0, precision)
    if name == "attend":
        constants |= {"LOST": CANCELLED * torch.finfo(dtype).eps, "KEEP": True}
    else:
        constants |= {"BETA": 1.0}
    return _case(name, PASSES[name], layer, dtype, constants, arch, precision if dtype == torch.float32 else "")


def _case(
    name: str,
    kernel: Any,
    layer: Layer,
    dtype: torch.dtype,
    constants: dict[str, Any],
    arch: int,
    precision: str,
    *,
    tensor_cores: bool = True,
) -> launch.AotCase:
    """``kernel`` as a launch for ``layer`` compiles it."""
    if "num_warps" not in constants:
        keys = (layout.attend_keys if name in PASSES else layout.choose_keys)(name, constants)
        constants = launch.settings(fused.OP, *keys, arch=arch) | constants
    options = {key: constants.pop(key) for key in ("num_warps", "num_stages") if key in constants}
    # a launch compiles a number that is 1 into the code
    ones = [f"{tensor}{'nm'[tensor in 'qod'] if layer.tokens_last else 'c'}" for tensor in "kvqod"]
    constants = constants | {key: 1 for key in (*ones, "gc") if key in kernel.arg_names}
    signature = {key: _type_of(key, dtype) for key in kernel.arg_names if key not in constants}
    kind = str(dtype).removeprefix("torch.")
    return launch.AotCase(
        name=f"{name} {layer.name} {kind}{'/' + precision if precision else ''}",
        kernel=kernel,
        signature=signature,
        constants=constants,
        options=options,
        aligned=tuple(key for key in ALIGNED if key in signature),
        tensor_cores=tensor_cores,
        archs=(arch,),
    )


def _type_of(argument: str, dtype: torch.dtype) -> str:
    if argument in SCALARS:
        return "i32"
    return OTHERS.get(argument, ADDRESSES[dtype if argument in IMAGE else torch.float32])
