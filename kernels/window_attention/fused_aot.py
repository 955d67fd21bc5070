"""In which ways the Triton kernels of window attention are compiled, for ``scripts/aot_report.py``."""

from collections.abc import Iterator
from typing import Any

import torch

from kernels import launch
from kernels.window_attention import cases, fused
from kernels.window_attention import fused_kernels as kernels

# (type of the image, type of the products, precision of float32)
BFLOAT16 = (torch.bfloat16, torch.bfloat16, "ieee")
FLOAT16 = (torch.float16, torch.float16, "ieee")
MIXED = (torch.float32, torch.bfloat16, "ieee")
TF32 = (torch.float32, torch.float32, "tf32")
TF32X3 = (torch.float32, torch.float32, "tf32x3")
# of each published width of heads and factors the smallest and largest windows, in the types in which they differ:
# MIXED is what the networks use on CUDA by themselves. The last one is what no published network has.
COMPILED = (
    (cases.Case("SST-light w8", 1, 360, 640, 3, 16, 8, 16), (MIXED,)),
    (cases.Case("SST-light w64", 1, 360, 640, 3, 16, 64, 24), (MIXED, TF32X3)),
    (cases.Case("SST w16", 1, 360, 640, 6, 30, 16, 18), (MIXED, TF32)),
    (cases.Case("SST w64", 1, 360, 640, 6, 30, 64, 34), (MIXED, TF32X3)),
    (cases.Case("SST-L w16", 1, 360, 640, 6, 32, 16, 16), (MIXED, FLOAT16)),
    (cases.Case("SST-L w32", 1, 360, 640, 6, 32, 32, 32), (MIXED, TF32)),
    (cases.Case("SST-L w64", 1, 360, 640, 6, 32, 64, 32), (MIXED, BFLOAT16, TF32X3)),
    (cases.Case("SST-XL+ w96", 1, 360, 640, 7, 32, 96, 32), (MIXED,)),
    (cases.Case("wide heads, small image", 1, 20, 30, 2, 64, 64, 64), (BFLOAT16,)),
)
KERNELS = {
    "forward": kernels.forward,
    "backward": fused.backward,
    "backward_q": kernels.backward_q,
    "backward_kv": kernels.backward_kv,
}
ADDRESSES = {torch.bfloat16: "*bf16", torch.float16: "*fp16", torch.float32: "*fp32"}
# arguments in the type of the image, of the products and of the sums; the others are numbers
IMAGE = ("qkv", "out", "grad", "d_qkv")
TABLES = ("q_pos", "k_pos")
SUMS = ("lse", "delta", "d_q", "d_q_pos", "d_k_pos", "d_edge")


def aot_cases() -> Iterator[launch.AotCase]:
    """The kernels that each of ``COMPILED`` launches on each architecture, with the settings it has there."""
    for case, kinds in COMPILED:
        for kind in kinds:
            for arch in (90, 80):
                for name in _launched(case, kind, arch):
                    yield aot_case(name, case, *kind, arch)


def _launched(case: cases.Case, kind: tuple[torch.dtype, torch.dtype, str], arch: int) -> tuple[str, ...]:
    """Names of the kernels that forward and backward pass take."""
    names = fused.keys("backward", _constants(case, *kind[1:]))
    whole = fused.first_settings(names, arch=arch) is not None
    return ("forward", "backward") if whole else ("forward", "backward_q", "backward_kv")


def _constants(case: cases.Case, dtype: torch.dtype, precision: str) -> dict[str, Any]:
    down, across = (-(-side // case.window) for side in (case.height, case.width))
    folds = fused.folds(case.height, down * case.window, case.width, across * case.window)
    return fused.constants(dtype, case.d, case.rank, case.heads, case.window, case.d**-0.5, folds, precision)


def aot_case(
    name: str, case: cases.Case, image: torch.dtype, dtype: torch.dtype, precision: str, arch: int
) -> launch.AotCase:
    """The kernel ``name`` for one layer."""
    kernel = KERNELS[name]
    channels = 3 * case.heads * case.d
    constants = _constants(case, dtype, precision)
    settings = launch.settings(fused.OP, *fused.keys(name, constants), arch=arch)
    options = {key: settings.pop(key) for key in ("num_warps", "num_stages")}
    strides = {"stride_b": case.height * case.width, "stride_y": case.width, "stride_x": 1}
    constants = constants | settings | ({} if name == "forward" else {"SCALE": case.d**-0.5})
    signature = {key: _type_of(key, image, dtype) for key in kernel.arg_names if key not in constants}
    return launch.AotCase(
        name=f"{name} {case.name} {_kind(image, dtype, precision)}",
        kernel=kernel,
        signature=signature,
        constants=constants,
        options=options,
        aligned=tuple(key for key, pixels in strides.items() if pixels * channels % 16 == 0),
        tensor_cores=dtype != torch.float32 or constants["PRECISION"] != "ieee",
        archs=(arch,),
    )


def _kind(image: torch.dtype, dtype: torch.dtype, precision: str) -> str:
    """Type of the image, and how it is multiplied where that is not in the same type."""
    names = [str(kind).removeprefix("torch.") for kind in (image, dtype)]
    if image != dtype:
        return "/".join(names)
    return f"{names[0]}/{precision}" if dtype == torch.float32 else names[0]


def _type_of(argument: str, image: torch.dtype, dtype: torch.dtype) -> str:
    if argument in IMAGE:
        return ADDRESSES[image]
    if argument in TABLES:
        return ADDRESSES[dtype]
    return ADDRESSES[torch.float32] if argument in SUMS else "i32"
