"""The ways in which the kernels of the deformable convolution are compiled ahead of time: every published width."""

import itertools
from typing import Any

from kernels import launch
from kernels.deform_conv import fused_kernels as kernels
from kernels.triton_parts import tl

# of V1 and V2 up to L, and of XL
WIDTHS = (24, 48, 72, 96, 28, 56, 112, 160)
CLAMP = (-3.0, 3.0)
# outputs from 4 pixels before to 4 pixels behind can take from a pixel
REACH = (-4, 4)
TENSORS = {
    "forward": ("x", "offset", "weight", "out"),
    "backward": ("x", "offset", "weight", "dy", "dx", "doffset", "parts"),
    "gather": ("offset", "weight", "dy", "dx"),
}
# float32 offsets, parameters and sums beside images of 16 bits
WIDE = ("offset", "weight", "doffset", "parts")


def cases() -> list[launch.AotCase]:
    """Each kernel, in float32 and bfloat16; the gradient that is gathered in float32."""
    kinds = {"forward": ("fp32", "bf16"), "backward": ("fp32", "bf16"), "gather": ("fp32",)}
    return [_case(name, kind, c) for name, own in kinds.items() for kind, c in itertools.product(own, WIDTHS)]


def _case(name: str, kind: str, c: int) -> launch.AotCase:
    settings = launch.settings("deform_conv", f"{name}/{c}", name)
    options = {k: settings.pop(k) for k in ("num_warps", "num_stages")}
    constants: dict[str, Any] = {"LOW": CLAMP[0], "HIGH": CLAMP[1], "C": c, "ACC": tl.float32, **settings}
    if name == "gather":
        constants |= dict(zip(("FIRST", "LAST"), REACH, strict=True))
    else:
        constants["CLAMP"] = True
    if name == "backward":
        constants |= dict.fromkeys(("BY_X", "BY_OFFSET", "BY_WEIGHT"), True)
    wide = (*WIDE, "dx") if name == "backward" else WIDE
    signature = {f"{t}_ptr": "*fp32" if t in wide else f"*{kind}" for t in TENSORS[name]}
    signature |= dict.fromkeys(("h", "w", "across", "tiles", "ob", "oc", "oy", "ox"), "i32")
    if name == "backward":
        signature |= dict.fromkeys(("db", "dc", "dy", "dz"), "i32")
    return launch.AotCase(
        f"{name} {kind} c{c}",
        getattr(kernels, name),
        signature,
        constants,
        options,
        tensor_cores=name == "gather",
    )
