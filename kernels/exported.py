"""Whether a network is written down as a graph that others run, instead of run here.

What makes operators fast here (tiles, views as windows, pieces that fit the cache) would tie such a graph to one size
of image, or make it of thousands of operators. They have another form for it, of few operators and of any size.
"""

import torch
from torch import Tensor


def is_exported(*tensors: Tensor | None) -> bool:
    """True while ``torch.export`` or ``torch.jit.trace`` follows, on which ``torch.onnx`` stands; not for compilers.

    An export through Dynamo (``strict=True``) takes the form that compilers see. Of ``tensors`` in 16 bits, or of
    different dtypes, it is not true: their other form widens what has to be wide.
    """
    # Dynamo of earlier versions says true of is_exporting for torch.compile as well
    if torch.compiler.is_dynamo_compiling() or not (torch.compiler.is_exporting() or torch.jit.is_tracing()):
        return False
    dtypes = {x.dtype for x in tensors if x is not None}
    return len(dtypes) <= 1 and dtypes <= {torch.float32, torch.float64}
