"""What our kernels are held against on a GPU: PyTorch's own ways to compute the same, and other packages' kernels.

Each maker takes the arguments of an operator and returns a call without arguments that computes the output, copies that
it needs included, or raises: what is missing is said by the exception.
"""

import importlib
import importlib.util
import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from kernels.coreset_attention import wildcat_attention
from kernels.window_attention import torch_impl, window_attention
from scripts.gpu_ops import Inputs

Call = Callable[[], Any]
# names in the table -> members of torch.nn.attention.SDPBackend
SDPA = {"sdpa-flash": "FLASH_ATTENTION", "sdpa-cudnn": "CUDNN_ATTENTION", "sdpa-eff": "EFFICIENT_ATTENTION"}


class Missing(RuntimeError):
    """A peer that is not there, in words."""


def window_sdpa(arguments: Inputs, name: str) -> Call:
    """Partition, concatenation with the factors, padded values where they are needed, and one kernel of SDPA."""
    return _forced(lambda: window_attention(**arguments, backend="sdpa"), name)


def window_flex(arguments: Inputs) -> Call:
    """FlexAttention, compiled, on the same longer vectors; it takes values that are shorter."""
    flex_module = importlib.import_module("torch.nn.attention.flex_attention")
    qkv, heads, window = arguments["qkv"], arguments["heads"], arguments["window"]
    scale = 1 / math.sqrt(qkv.shape[-1] // (3 * heads))
    flex = torch.compile(flex_module.flex_attention, fullgraph=True, dynamic=False)

    def run() -> Tensor:
        q, k, v = torch_impl.lengthened(
            qkv, arguments["q_pos"], arguments["k_pos"], heads=heads, window=window, scale=scale, equal=False
        )
        return torch_impl.merge(flex(q, k, v, scale=scale), qkv.shape, window)

    return run


def window_flash(arguments: Inputs) -> Call:
    """The flash-attn package, version 3 or 2, by our backend of that name, or the wheel fa3_fwd."""
    if torch_impl.flash_package() is not None:
        return lambda: window_attention(**arguments, backend="flash")
    if importlib.util.find_spec("fa3_fwd") is None:
        raise Missing("neither flash-attn nor fa3_fwd is installed")
    found = importlib.import_module("fa3_fwd")
    function = getattr(found, "flash_attn_func", None)
    if function is None:
        function = importlib.import_module("fa3_fwd.flash_attn_interface").flash_attn_func
    return lambda: _fa3(function, arguments)


def _fa3(function: Callable[..., Any], arguments: Inputs) -> Tensor:
    qkv, heads, window = arguments["qkv"], arguments["heads"], arguments["window"]
    d = qkv.shape[-1] // (3 * heads)
    q, k, v = torch_impl.lengthened(
        qkv, arguments["q_pos"], arguments["k_pos"], heads=heads, window=window, scale=d**-0.5, equal=True
    )
    out = function(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), softmax_scale=d**-0.5, causal=False)
    out = out[0] if isinstance(out, tuple) else out
    return torch_impl.merge(out.transpose(1, 2)[..., :d], qkv.shape, window)


def deform_torchvision(arguments: Inputs) -> Call:
    """``torchvision.ops.deform_conv2d``, after a clamp of its own."""
    if importlib.util.find_spec("torchvision") is None:
        raise Missing("torchvision is not installed")
    function = importlib.import_module("torchvision.ops").deform_conv2d
    x, offset, weight, clamp = (arguments[key] for key in ("x", "offset", "weight", "clamp"))

    def run() -> Tensor:
        moved = offset if clamp is None else offset.clamp(*clamp)
        return function(x, moved.to(x.dtype), weight, padding=1)

    return run


def taylor_eager(arguments: Inputs) -> Call:
    """T-MSA as it is written most readily: tokens first, expanded denominators, a tensor for each step."""
    _only_v1(arguments)
    return lambda: tokens_first(**arguments)


def taylor_compiled(arguments: Inputs) -> Call:
    """The same through ``torch.compile``."""
    _only_v1(arguments)
    compiled = torch.compile(tokens_first, fullgraph=True, dynamic=False)
    return lambda: compiled(**arguments)


def tokens_first(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    norm: float,
    eps: float,
    temperature: Tensor | None = None,
    gate: Tensor | None = None,
    **_: Any,
) -> Tensor:
    """First-order Taylor attention of V1 on (b, heads, d, n), computed on (b, heads, n, d).

    out = (sum of v + q~ (sum of k~ v^T)) / (n + q~ . sum of k~ + eps), times temperature and gate.
    """
    q, k, v = (x.transpose(-2, -1).contiguous() for x in (q, k, v))
    q, k = (x / (x.norm(dim=-1, keepdim=True) / norm + eps) for x in (q, k))
    numerator = v.sum(dim=-2, keepdim=True).expand_as(v) + q @ (k.transpose(-2, -1) @ v)
    along = q @ k.sum(dim=-2, keepdim=True).transpose(-2, -1)
    denominator = (v.shape[-2] + along).repeat(1, 1, 1, v.shape[-1])
    out = (numerator / (denominator + eps)).transpose(-2, -1)
    if temperature is not None:
        out = out * temperature[:, None, None]
    return out if gate is None else out * gate[:, :, None]


def exact_sdpa(arguments: Inputs, name: str) -> Call:
    """Attention to all keys by one kernel of SDPA."""
    q, k, v = (arguments[key] for key in "qkv")
    return _forced(lambda: F.scaled_dot_product_attention(q, k, v), name)


def coreset_torch(arguments: Inputs) -> Call:
    """Our own path by PyTorch."""
    return lambda: wildcat_attention(**arguments, backend="torch")


def norm_torch(arguments: Inputs) -> Call:
    """``F.layer_norm`` over the last axis of the permuted image, which is not copied where it is channels-last."""
    x, weight, bias = (arguments[key] for key in ("x", "weight", "bias"))

    def run() -> Tensor:
        return F.layer_norm(x.permute(0, 2, 3, 1), weight.shape, weight, bias, 1e-6).permute(0, 3, 1, 2)

    return run


def _only_v1(arguments: Inputs) -> None:
    if arguments["focus_power"] is not None or arguments["gate_mode"] != "multiply":
        raise Missing("it has no focused term")


def _forced(call: Call, name: str) -> Call:
    attention = importlib.import_module("torch.nn.attention")
    kernel = getattr(attention.SDPBackend, SDPA[name], None)
    if kernel is None:
        raise Missing(f"this PyTorch has no {SDPA[name]}")

    def run() -> Any:
        with attention.sdpa_kernel(kernel):
            return call()

    return run
