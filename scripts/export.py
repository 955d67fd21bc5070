"""Export a trained network to ONNX or to a PyTorch program: python -m scripts.export WEIGHTS -o FILE.onnx|FILE.pt2

The exported file is run at two sizes beside the network, by onnxruntime or by PyTorch, before it gets its name. It
takes RGB pictures in 0..1 and says of itself, in its metadata, what it takes and gives.
"""

import argparse
import contextlib
import importlib.util
import io
import json
import math
import os
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

from archs.wildcat_attention import TokenCore, WindowCore
from kernels import dispatch
from models import logbook, runtime
from models.files import write_whole
from models.from_file import network_from_file
from options.errors import OptionsError, UserError

FORMATS = {".onnx": "onnx", ".pt2": "torch"}
# names of input and output
INPUT, OUTPUT = "image", "restored"
OPSETS = (18, 20)
TOLERANCE = 1e-4


def main(argv: list[str]) -> None:
    """Parse, load, export, check, and give the file its name."""
    args = _parse(argv)
    logbook.start_logging()
    kind = args.format or FORMATS.get(args.output.suffix)
    _check_output(args, kind)
    network, loaded = network_from_file(args.weights, opt=args.opt, network=args.network)
    _refuse_coresets(network)
    size = _size(network, args.size)
    facts = facts_of(network, size, args.static, loaded.metadata)
    if kind == "torch" and not args.static:
        # a program with open sides has guards against sides of one pixel, or of one step
        facts["minimum"] = str(max(int(facts["minimum"]), 2 * int(facts["multiple_of"])))
    # asks for nothing that a network without gradients does not have
    network.requires_grad_(False)

    def write(path: Path) -> None:
        began = time.perf_counter()
        settings = {"size": size, "static": args.static, "facts": facts}
        if kind == "onnx":
            export_onnx(network, path, opset=args.opset, **settings)
        else:
            export_torch(network, path, **settings)
        print(f"exported in {time.perf_counter() - began:.1f} s, {path.stat().st_size / 2**20:.1f} MiB")
        if args.check:
            run = onnx_runner(path) if kind == "onnx" else torch.export.load(io.BytesIO(path.read_bytes())).module()
            check(network, run, [size] if args.static else _sizes(network, size))

    write_whole(args.output, write)
    print(f"{args.output}: {', '.join(f'{key} {value}' for key, value in facts.items())}")


def facts_of(network: nn.Module, size: tuple[int, int], static: bool, metadata: dict[str, str]) -> dict[str, str]:
    """What whoever runs the file has to know of it."""
    facts = {
        "scale": network.scale,
        "multiple_of": getattr(network, "multiple_of", 1),
        "minimum": getattr(network, "minimum", 1),
        "size": "x".join(map(str, size)) if static else "any",
        "layout": "NCHW",
        "colour": {1: "grey", 3: "RGB"}.get(_channels(network), f"{_channels(network)} channels"),
        "range": "0..1",
    }
    return {key: str(value) for key, value in facts.items()} | {
        key: metadata[key] for key in ("name", "task", "license", "network_g") if key in metadata
    }


def export_torch(network: nn.Module, path: Path, *, size: tuple[int, int], static: bool, facts: dict[str, str]) -> None:
    """Write a program for ``torch.export.load``; pictures one at a time, the facts in its extra file ``facts.json``."""
    image = torch.rand(1, _channels(network), *size)
    step = getattr(network, "multiple_of", 1)
    height, width = torch.export.Dim("height"), torch.export.Dim("width")
    shapes = None if static else ({2: height, 3: width} if step == 1 else {2: step * height, 3: step * width},)
    try:
        with dispatch.use_backend("sdpa"), torch.no_grad(), _quiet(), _quick():
            program = torch.export.export(network, (image,), dynamic_shapes=shapes, strict=False)
    except (torch._dynamo.exc.UserError, torch.fx.experimental.symbolic_shapes.GuardOnDataDependentSymNode) as error:
        way = "an export of one size may work: --static --size H W"
        raise UserError(f"{type(network).__name__} cannot be exported like this; {way} ({error})") from error
    with path.open("wb") as file:
        torch.export.save(program, file, extra_files={"facts.json": json.dumps(facts)})


def export_onnx(
    network: nn.Module, path: Path, *, size: tuple[int, int], static: bool, facts: dict[str, str], opset: int
) -> None:
    """Write an ONNX file, the facts in its ``metadata_props``.

    Traced, though PyTorch advises ``dynamo=True``: that reasons about open sizes at each of thousands of operators, for
    minutes, where a trace of MB-TaylorFormer takes 8 s.
    """
    import onnx

    image = torch.rand(1 if static else 2, _channels(network), *size)
    names = {"input_names": [INPUT], "output_names": [OUTPUT]}
    if not static:
        axes = {0: "batch", 2: "height", 3: "width"}
        # sides of the result have names of their own: they are other numbers
        names["dynamic_axes"] = {INPUT: axes, OUTPUT: {0: "batch", 2: "restored_height", 3: "restored_width"}}
    try:
        with dispatch.use_backend("torch"), torch.no_grad(), _quiet():
            torch.onnx.export(network, (image,), os.fspath(path), opset_version=opset, dynamo=False, **names)
    # a network that does in Python what depends on the picture fails as it likes
    except (RuntimeError, TypeError, ValueError) as error:
        told = str(error).strip().partition("\n")[0]
        raise UserError(f"{type(network).__name__} cannot be written as ONNX (opset {opset}): {told}") from error
    model = onnx.load(path)
    onnx.helper.set_model_props(model, facts)
    onnx.save(model, path)


def onnx_runner(path: Path) -> Callable[[Tensor], Tensor]:
    """The file as a function of ``(b, c, h, w)``, run by onnxruntime on PyTorch's number of threads."""
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = torch.get_num_threads()
    session = onnxruntime.InferenceSession(os.fspath(path), options, providers=["CPUExecutionProvider"])
    return lambda image: torch.from_numpy(session.run(None, {INPUT: np.asarray(image)})[0])


def check(network: nn.Module, run: Callable[[Tensor], Tensor], sizes: list[tuple[int, int]]) -> None:
    """Compare the exported file with the network on random pictures of these sizes, and print the differences.

    Raises:
        UserError: they differ by more than 1e-4, or the file does not run.
    """
    for size in sizes:
        image = torch.rand(1, _channels(network), *size, generator=torch.Generator().manual_seed(0))
        with torch.no_grad():
            expected = network(image)
        try:
            found = run(image)
        # what runs the file has errors of its own
        except Exception as error:
            raise UserError(f"the exported file does not run at {size[0]}x{size[1]}: {error}") from error
        same = found.shape == expected.shape
        difference = float((found - expected).abs().max()) if same else float("inf")
        print(f"at {size[0]}x{size[1]}: largest difference from PyTorch {difference:.1e}")
        # NaN is not within the tolerance either
        if not difference <= TOLERANCE:
            shapes = "" if same else f": {tuple(found.shape)} instead of {tuple(expected.shape)}"
            raise UserError(
                f"the exported file gives other pictures at {size[0]}x{size[1]} (difference {difference:.1e}, at most "
                f"{TOLERANCE:.0e} is accepted){shapes}; it was not kept"
            )


def _sizes(network: nn.Module, size: tuple[int, int]) -> list[tuple[int, int]]:
    """Two sizes other than the traced one, as uneven as the network takes them; the first holds several windows."""
    step, least = _step_and_least(network)
    span = math.lcm(step, getattr(network, "tile_multiple", None) or 1)
    return [(size[0] + span, size[1] + 3 * span), (size[0] + 5 * step, max(size[1] - 5 * step, least))]


def _size(network: nn.Module, size: list[int] | None) -> tuple[int, int]:
    step, least = _step_and_least(network)
    if size is None:
        return max(8 * step, least), max(12 * step, least)
    if any(side % step or side < max(least, 2) for side in size):
        raise OptionsError(
            f"--size {size[0]} {size[1]}: {type(network).__name__} takes sides that are multiples of {step} from "
            f"{max(least, 2)} on"
        )
    return size[0], size[1]


def _step_and_least(network: nn.Module) -> tuple[int, int]:
    """What sides must be multiples of, and the smallest of those that the network takes."""
    step = getattr(network, "multiple_of", 1)
    return step, math.ceil(getattr(network, "minimum", 1) / step) * step


def _channels(network: nn.Module) -> int:
    return getattr(network, "in_channels", None) or 3


def _refuse_coresets(network: nn.Module) -> None:
    cores = [part for part in network.modules() if isinstance(part, WindowCore | TokenCore)]
    by_size = any(isinstance(core, WindowCore) and core.attention == "mean" and core.window == 0 for core in cores)
    if by_size or any(core.attention == "coreset" for core in cores):
        name, way = type(network).__name__, "by the size of the picture" if by_size else "by what is in the picture"
        raise OptionsError(
            f"{name} chooses its keys {way}, in steps that no fixed graph holds; export it with exact attention: "
            "--network '{type: " + name + ", attention: exact, ...}'"
        )


def _check_output(args: argparse.Namespace, kind: str | None) -> None:
    if kind is None:
        raise OptionsError(f"-o {args.output}: the name must end in .onnx or .pt2, or --format say onnx or torch")
    if args.output.is_dir() or (os.path.lexists(args.output) and not args.force):
        raise OptionsError(f"{args.output} exists and is left as it is; --force writes over a file")
    if kind == "torch" and args.opset is not None:
        raise OptionsError("--opset is for ONNX")
    args.opset = 20 if args.opset is None else args.opset
    if not OPSETS[0] <= args.opset <= OPSETS[1]:
        raise OptionsError(f"--opset must be from {OPSETS[0]} to {OPSETS[1]}, got {args.opset}")
    needed = ("onnx", *(["onnxruntime"] if args.check else []))
    missing = [name for name in needed if kind == "onnx" and importlib.util.find_spec(name) is None]
    if missing:
        raise OptionsError(f"ONNX needs {', '.join(missing)}: pip install -e '.[export]'")


@contextlib.contextmanager
def _quick() -> Iterator[None]:
    """Less reasoning about open sizes: each operator asks a dozen questions of them, and an export takes minutes."""
    import torch._dynamo.config
    import torch.fx.experimental._config as shapes

    with shapes.patch(backed_size_oblivious=True), torch._dynamo.config.patch(fake_tensor_cache_enabled=False):
        yield


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Without PyTorch's notices to those who write exporters, and the graphs it prints where it fails."""
    with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()):
        warnings.simplefilter("ignore")
        yield


def _parse(argv: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m scripts.export", description=__doc__.split("\n\n")[1])
    parser.add_argument("weights", type=Path, help="file of weights, .safetensors or .pth")
    parser.add_argument("-o", "--output", required=True, type=Path, metavar="FILE", help="FILE.onnx or FILE.pt2")
    parser.add_argument("--format", choices=("onnx", "torch"), help="default: by the name of the file")
    which = parser.add_mutually_exclusive_group()
    which.add_argument("--opt", type=Path, metavar="FILE.yml", help="option file that says what the network is")
    which.add_argument("--network", metavar="'{type: ...}'", help="the same in words, where the weights do not say it")
    parser.add_argument("--size", nargs=2, type=int, metavar=("H", "W"), help="size of the picture that is traced")
    parser.add_argument("--static", action="store_true", help="for this size only; quicker where there are many layers")
    parser.add_argument("--opset", type=int, help=f"ONNX operator set, {OPSETS[0]} to {OPSETS[1]}; default: 20")
    parser.add_argument("--no_check", dest="check", action="store_false", help="do not run the exported file")
    parser.add_argument("--force", action="store_true", help="write over a file")
    return parser.parse_args(argv)


if __name__ == "__main__":
    sys.exit(runtime.run(main, sys.argv[1:]))
