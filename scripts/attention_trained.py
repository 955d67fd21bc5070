"""Windows as a trained SST sees them: its own queries, keys, values and positional factors, layer by layer."""

import math
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path

import torch
from torch import Tensor, nn

import archs  # noqa: F401  networks register themselves, so that the options can be checked
import data  # noqa: F401
import models  # noqa: F401
from archs.sst import RIBAttention
from kernels.coreset_attention import cases
from models.checkpoint import load_weights
from models.restoration import build_network
from options import load
from options.errors import OptionsError
from scripts.attention_inputs import Case, Inputs


def read_network(opt: str, weights: str) -> nn.Module:
    """The network of an option file with these weights, ready for inference in float32.

    Raises:
        OptionsError: the options or the weights do not fit.
    """
    network = build_network(load.load(Path(opt), training=False))
    load_weights(network, weights)
    return network.eval()


def trained_cases(
    network: nn.Module, photos: Mapping[str, Tensor], windows: Sequence[int], places: Sequence[str]
) -> list[Case]:
    """One case for each layer with RIB whose window is asked for, drawn from all photographs, heads side by side.

    Args:
        network: an SST. photos: ``(3, h, w)`` in 0..1 by name, at least as large as the windows.

    Raises:
        OptionsError: the network has no such layer.
    """
    layers = {name: layer for name, layer in network.named_modules() if isinstance(layer, RIBAttention)}
    found = []
    for name, layer in layers.items():
        side = layer.window
        for place in places if side in windows else ():
            draws = tuple(partial(window_of, network, layer, photo, place=place) for photo in photos.values())
            label = f"trained {name}, {place} {side} x {side}, {layer.heads} heads"
            found.append(Case("window", label, side * side, 1.0, (side, side), draws))
    if not found:
        has = ", ".join(map(str, sorted({layer.window for layer in layers.values()}))) or "none"
        asked = ", ".join(map(str, windows))
        raise OptionsError(f"the network has no layer with RIB and a window of {asked} (--windows); it has {has}")
    return found


@torch.no_grad()
def window_of(network: nn.Module, layer: RIBAttention, photo: Tensor, *, place: str) -> Inputs:
    """Inputs of one layer for a crop of one window, positions beside the content, so that the logits are ``q.k``.

    Args:
        network: whose layer it is. photo: ``(3, h, w)`` in 0..1. place: as in :func:`cases.photo_inputs`.

    Returns:
        q, k: ``(1, heads, window * window, d + rank)``; v: ``(1, heads, window * window, d)``; float64.
    """
    seen: list[Tensor] = []
    handle = layer.register_forward_pre_hook(lambda _, given: seen.append(given[0]))
    try:
        network(cases.crop(photo, layer.window, place).float())
    finally:
        handle.remove()
    qkv = layer.to_qkv(seen[0])  # (1, 3 * heads * d, window, window)
    q, k, v = qkv.reshape(1, 3, layer.heads, -1, layer.window**2).transpose(-2, -1).double().unbind(1)
    q_pos, k_pos, _ = (
        x if x is None else x.double()[None] for x in layer.positions(torch.float32, (layer.window, layer.window))
    )
    q = torch.cat([q / math.sqrt(q.shape[-1]), q_pos / math.sqrt(q_pos.shape[-1])], dim=-1)
    return q, torch.cat([k, k_pos], dim=-1), v
