"""What the tests of networks share: a small SST, and the golden values, whose weights follow from their names."""

import json
import zlib
from pathlib import Path

import numpy as np
import pytest
import torch

from archs import ARCHS

GOLDEN = Path(__file__).parents[1] / "golden" / "sst"


def generator_of(name):
    return np.random.RandomState(zlib.crc32(name.encode()) & 0x7FFFFFFF)


def named_weight(key, shape):
    """The weight that the golden values give to a state-dict key."""
    values, leaf = generator_of(key).standard_normal(shape), key.rsplit(".", 1)[-1]
    if leaf in ("to_hidden", "to_q", "to_k"):
        values = values * 0.3
    elif leaf in ("hidden_b", "bias"):
        values = values * 0.05
    elif len(shape) == 1:
        values = values * 0.1 + 1
    else:
        values = values / np.sqrt(np.prod(shape[1:]))
    return torch.from_numpy(values.astype(np.float32))


class Golden:
    """The golden records, and what they were computed from."""

    def __init__(self):
        self.records = json.loads((GOLDEN / "reference.json").read_text())
        self.arrays = np.load(GOLDEN / "reference.npz")

    def named(self, module, dtype=torch.float32):
        """``module`` in evaluation mode, with the weights that follow from its own keys."""
        module.load_state_dict({key: named_weight(key, tuple(v.shape)) for key, v in module.state_dict().items()})
        return module.eval().to(dtype)

    def normal(self, name, shape, dtype=torch.float32):
        return torch.from_numpy(generator_of(name).standard_normal(shape).astype(np.float32)).to(dtype)

    def image(self, name, shape, dtype=torch.float32):
        return torch.from_numpy(generator_of(name).uniform(0, 1, shape).astype(np.float32)).to(dtype)

    def check(self, name, found, *, largest=None, mean=None):
        """Compare with a record: its probes, sums and extremes and, where stored, the whole array.

        ``largest`` and ``mean`` are absolute limits; the default is that of the dtype of ``found``.
        """
        largest = largest or {torch.float64: 1e-8, torch.float32: 2e-5}[found.dtype]
        record, values = self.records[name], found.detach().double().flatten().numpy()
        assert list(found.shape) == record["shape"]
        assert np.abs(values[record["idx"]] - record["val"]).max() <= largest
        assert abs(values.sum() - record["sum"]) <= largest * values.size
        assert abs(np.abs(values).sum() - record["abs_sum"]) <= largest * values.size
        assert abs(values.min() - record["min"]) <= largest
        assert abs(values.max() - record["max"]) <= largest
        if name in self.arrays:
            # stored in float32
            error = np.abs(values - self.arrays[name].astype(np.float64).flatten())
            assert error.max() <= max(largest, 1e-6)
            assert error.mean() <= (mean or max(largest, 1e-6))


@pytest.fixture(scope="session")
def golden():
    return Golden()


@pytest.fixture
def build():
    """``build(**changes)``: a small SST whose parameters all act: no norm at 1, no bias at 0, no faint position."""

    def build(**changes):
        small = {"dim": 8, "window_sizes": (2, 4), "num_heads": 2, "ranks": (2, 3), "n_blocks": 1, "rib_n_freqs": 3}
        net = ARCHS.build({"type": "SST", **small, **changes})
        if net.proj.weight.device.type != "meta":
            perturb(net)
        return net.eval()

    return build


def perturb(net):
    with torch.no_grad():
        for name, p in net.named_parameters():
            p.add_(torch.randn_like(p), alpha=0.5 if "attn.to_" in name and p.ndim < 4 else 0.1)
