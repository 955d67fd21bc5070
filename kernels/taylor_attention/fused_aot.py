"""The ways in which the kernels of T-MSA are compiled ahead of time: every shipped configuration, published heads."""

import dataclasses
import itertools
import math
from typing import Any

from kernels import launch
from kernels.taylor_attention.fused_layout import rows_of
from kernels.triton_parts import tl

ARCHS = (90, 80)
# (heads, d) of the published networks; 20 and 28 channels lie as 24 do, and 56 as 48
HEADS = ((8, 12), (4, 18), (1, 24), (1, 48))
# the type of the images, whether their vectors lie side by side, and the heads that this adds something for
FORMS = (("fp32", True, HEADS), ("bf16", True, HEADS[2:]), ("fp32", False, HEADS[1:2]))
TENSORS = {
    "sums": ("k", "v", "*parts"),
    "apply": ("q", "*w", "temperature", "gate", "weight", "out"),
    "backward_queries": (
        "q",
        "*w",
        "temperature",
        "gate",
        "weight",
        "grad",
        "dq",
        "dgate",
        "*factors",
        "*warm",
        "*parts",
    ),
    "backward_keys": ("k", "v", "*dw", "weight", "dk", "dv"),
}
STRIDES = {"sums": "kv", "apply": "qgo", "backward_queries": "qgod", "backward_keys": "kvd"}


def cases(kernels: dict[str, Any]) -> list[launch.AotCase]:
    """Every shipped configuration of the kernels, by the name in their settings, as each architecture has it."""
    found = []
    for key, arch in itertools.product(launch.configuration("default")["taylor_attention"], ARCHS):
        name, *form, rows = key.split("/")
        settings = launch.settings("taylor_attention", key, arch=arch)
        powers = (8,) if "focused" in form else (0,) if "plain" in form else (0, 8)
        for (heads, d), (kind, last, wanted), power in itertools.product(HEADS, FORMS, powers):
            if rows_of(d) == int(rows) and (heads, d) in wanted:
                case = _case(name, kernels[name], settings, heads, d, kind, last, power)
                found.append(dataclasses.replace(case, archs=(arch,)))
    return found


def _case(
    name: str, kernel: Any, settings: dict[str, Any], heads: int, d: int, kind: str, last: bool, power: int
) -> launch.AotCase:
    constants = {k: v for k, v in settings.items() if k not in ("programs", "num_warps", "num_stages")}
    constants |= {"NORM": 1.0 if power else 0.5, "EPS": 1e-8 if power else 1e-6, "POWER": power, "D": d}
    # packed projections in the networks, (b, n, 3, heads, d); apart in the other order
    constants |= {"ROWS": rows_of(d), "LAST": last, "ACC": tl.float32, "UNIT": math.gcd(16, d) if last else 16}
    if "temperature" in TENSORS[name]:
        constants |= {"WARM": True, "GATE": 2 if power else 1}
    signature = {f"{t.lstrip('*')}_ptr": "*fp32" if t.startswith("*") else f"*{kind}" for t in TENSORS[name]}
    if "weight_ptr" in signature and not power:
        # None where there is no second term
        del signature["weight_ptr"]
        constants["weight_ptr"] = None
    signature |= dict.fromkeys(("n", "heads", "programs", "each"), "i32")
    for letter in STRIDES[name]:
        signature |= dict.fromkeys((f"{letter}b", f"{letter}h", f"{letter}n" if letter == "g" else f"{letter}s"), "i32")
    options = {k: v for k, v in settings.items() if k in ("num_warps", "num_stages")}
    text = f"{name} {kind} {'focused' if power else 'plain'} {heads}x{d} {'channels-last' if last else 'nchw'}"
    return launch.AotCase(text, kernel, signature, constants, options, aligned=("n",))
