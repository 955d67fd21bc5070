"""Window attention, defined in plain PyTorch: short, without tricks, in the precision of its input.

    logits[n, m] = scale * q[n].k[m] + q_pos[n].k_pos[m] / sqrt(rank) + bias[n, m]      out = softmax(logits) v

for every window of the image and every head; n and m run over the pixels of one window, row by row.
"""

import math

import torch
from torch import Tensor


def window_attention(
    qkv: Tensor,
    q_pos: Tensor | None,
    k_pos: Tensor | None,
    bias: Tensor | None,
    *,
    heads: int,
    window: int,
    scale: float,
) -> Tensor:
    """(b, h, w, 3 * heads * d) -> (b, h, w, heads * d); see the public function for the arguments."""
    b, h, w, channels = qkv.shape
    d = channels // (3 * heads)
    rows = reflected(h, -(-h // window) * window, qkv.device)
    columns = reflected(w, -(-w // window) * window, qkv.device)
    image = qkv[:, rows][:, :, columns]

    # windows row by row, pixels of a window row by row: (q|k|v, b, windows, heads, pixels, d)
    down, across = len(rows) // window, len(columns) // window
    tiles = image.reshape(b, down, window, across, window, 3, heads, d)
    q, k, v = tiles.permute(5, 0, 1, 3, 6, 2, 4, 7).reshape(3, b, down * across, heads, window * window, d)

    logits = q @ k.transpose(-1, -2) * scale
    if q_pos is not None:
        logits = logits + (q_pos @ k_pos.transpose(-1, -2) / math.sqrt(q_pos.shape[-1])).to(logits.dtype)
    if bias is not None:
        logits = logits + bias.to(logits.dtype)
    out = torch.softmax(logits, dim=-1) @ v

    out = out.reshape(b, down, across, heads, window, window, d)
    return out.permute(0, 1, 4, 2, 5, 3, 6).reshape(b, len(rows), len(columns), heads * d)[:, :h, :w]


def reflected(size: int, length: int, device: torch.device | None = None) -> Tensor:
    """Indices that continue 0 ... size-1 to ``length`` by reflection, the edge pixel not repeated: 0 1 2 1 0 1 2 ..."""
    period = max(2 * (size - 1), 1)
    position = torch.arange(length, device=device) % period
    return torch.minimum(position, period - position) if size > 1 else torch.zeros_like(position)
