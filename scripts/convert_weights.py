"""Convert a file of weights: python -m scripts.convert_weights IN -o OUT.safetensors|OUT.pth.

IN is a .pth of Pellucid, BasicSR or the papers' authors, a .safetensors, or the folder of a training run
(experiments/NAME: its newest weights, with the network and scale from its options). A .safetensors carries what is
needed to use it alone: the network's type and arguments, scale and task.
"""

import argparse
import sys
from pathlib import Path
from typing import Any

from models import checkpoint, logbook
from models.from_file import describe, network_as_described
from models.runtime import run
from options.errors import OptionsError

TASKS = ("sr", "dehaze", "derain", "desnow", "denoise", "deblur")


def main(argv: list[str]) -> None:
    """Parse and convert."""
    parser = argparse.ArgumentParser(
        prog="python -m scripts.convert_weights", description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("source", type=Path, metavar="IN", help="a file of weights, or the folder of a training run")
    parser.add_argument("-o", "--out", type=Path, required=True, metavar="OUT", help=".safetensors or .pth")
    parser.add_argument("--opt", type=Path, metavar="FILE.yml", help="the option file that describes the network")
    parser.add_argument("--param_key", choices=checkpoint.SECTIONS, help="which weights; default: the average")
    parser.add_argument("--task", choices=TASKS, help="what the network is for; default: sr where scale is above 1")
    parser.add_argument("--fact", action="append", default=[], metavar="KEY=TEXT", help="to be written into the file")
    parser.add_argument("--force", action="store_true", help="replace OUT if it exists")
    args = parser.parse_args(argv)
    logbook.start_logging()
    facts = dict(_fact(text) for text in args.fact)
    convert(args.source, args.out, opt=args.opt, key=args.param_key, task=args.task, facts=facts, force=args.force)
    print(f"wrote {args.out} ({args.out.stat().st_size:,} bytes)")


def convert(
    source: Path,
    out: Path,
    *,
    opt: Path | None = None,
    key: str | None = None,
    task: str | None = None,
    facts: dict[str, Any] | None = None,
    force: bool = False,
) -> None:
    """Write the weights of ``source`` as ``out``, after building their network and loading them strictly.

    Args:
        source: a file of weights, or the folder of a training run.
        out: ``.safetensors`` or ``.pth``; the second carries no facts.
        opt: option file with ``network_g``; needed where neither file nor folder says them.
        key: ``params_ema`` or ``params``; None takes the average where there is one.
        task: what the network is for; None takes "sr" where the scale is above 1, else it is left out.
        facts: more to be written into a ``.safetensors``.
        force: replace ``out``.

    Raises:
        OptionsError: nothing says what the network is, the weights do not fit it, or ``out`` exists or is of another
            kind.
    """
    if out.suffix not in (".safetensors", ".pth"):
        raise OptionsError(f"{out}: write .safetensors or .pth")
    if out.exists() and not force:
        raise OptionsError(f"{out} exists; --force replaces it")
    weights, opt = _of_run(source, opt) if source.is_dir() else (source, opt)
    described = describe(weights, opt=opt)
    network, loaded = network_as_described(weights, described, key=key)
    state = network.state_dict()
    if out.suffix == ".pth":
        checkpoint.save_pth(out, {"params": state})
        return
    scale = network.scale
    known = {name: text for name, text in described.facts.items() if name != "format"}
    known |= {"network_g": described.spec, "scale": scale}
    known["weights"] = "params_ema" if loaded.key == "params_ema" else "params"
    task = task or known.get("task") or ("sr" if scale > 1 else None)
    known |= {"task": task} if task else {}
    checkpoint.save_safetensors(out, state, {**known, **(facts or {})})


def _of_run(folder: Path, opt: Path | None) -> tuple[Path, Path]:
    """The newest weights of a training run, and its options."""
    weights = folder / "models" / "net_g_latest.pth"
    if not weights.exists():
        raise OptionsError(f"{folder} is no finished training run: there is no {weights}; name a file of weights")
    found = sorted(folder.glob("*.effective.yml"))
    if opt is None and not found:
        raise OptionsError(f"{folder} holds no .effective.yml; give the option file with --opt")
    return weights, opt or found[-1]


def _fact(text: str) -> tuple[str, str]:
    key, sign, value = text.partition("=")
    if not key or not sign:
        raise OptionsError(f"--fact {text}: write KEY=TEXT")
    return key, value


if __name__ == "__main__":
    sys.exit(run(main, sys.argv[1:]))
