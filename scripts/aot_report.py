"""Compile every Triton kernel in every shipped configuration, without a GPU, and report what the machine code needs.

    python -m scripts.aot_report [--op OP ...] [--match TEXT] [--arch 90 80] [--json FILE]
    python -m scripts.aot_report --check kernels/aot_report.json

A case fails if it spills registers, needs more shared memory or registers than one program may have, or uses no tensor
core where it should; the exit code is then 1. ``compute_capability`` 90 is H100 and H200, 80 is A100. ``--check``
compiles nothing: it tells whether a file written by ``--json`` is of what is shipped now, with no failures.
"""

import argparse
import importlib
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

from kernels.dispatch import KernelUnavailable
from kernels.launch import AotCase, interpreting

KERNELS = Path(__file__).resolve().parent.parent / "kernels"
# bytes of shared memory that one program may have
SHARED = {90: 232_448, 80: 166_912}
REGISTERS = 65_536
COUNTED = {"hgmma": r"\bHGMMA", "hmma": r"\bHMMA", "ldg128": r"\bLDG(STS)?\.[\w.]*128", "ex2": r"\bMUFU\.EX2"}


@dataclass(frozen=True)
class Row:
    """What one kernel needs in one configuration on one architecture; counts are instructions in its code."""

    op: str
    case: str
    kernel: str
    arch: int
    warps: int
    stages: int
    registers: int
    stack: int
    spills: int
    shared: int
    programs: int  # on one multiprocessor at a time, by registers and shared memory
    hgmma: int
    hmma: int
    ldg128: int
    ex2: int
    failures: tuple[str, ...]


def main(argv: list[str] | None = None) -> int:
    """Compile, print the table, write JSON; 1 if any case failed."""
    arguments = _parse(argv)
    if interpreting():
        print("TRITON_INTERPRET is set: there is nothing to compile; unset it", file=sys.stderr)
        return 2
    try:
        return check(arguments.check) if arguments.check else compile_all(arguments)
    except KernelUnavailable as error:
        print(error, file=sys.stderr)
        return 2


def compile_all(arguments: argparse.Namespace) -> int:
    """Compile what was asked for; 1 if any case failed or there was none."""
    rows = []
    for op, case in cases(arguments.op):
        if arguments.match in case.name:
            for arch in sorted(set(arguments.arch) & set(case.archs), reverse=True):
                rows.append(report(op, case, arch))
                print(line(rows[-1]), flush=True)
    if not rows:
        print(f"no case has {arguments.match!r} in its name", file=sys.stderr)
    failed = sum(bool(row.failures) for row in rows)
    print(f"{len(rows)} compiled, {failed} failed")
    if arguments.json:
        write(arguments.json, rows)
    return 1 if failed or not rows else 0


def cases(ops: list[str] | None = None) -> Iterator[tuple[str, AotCase]]:
    """Every case of every operator that has kernels of its own, or of ``ops`` only."""
    for path in sorted(KERNELS.glob("*/fused.py")):
        op = path.parent.name
        if not ops or op in ops:
            for case in importlib.import_module(f"kernels.{op}.fused").aot_cases():
                yield op, case


def check(path: str) -> int:
    """Compare a report with the cases of today; 1 if it lacks one, has another, or tells of a failure."""
    try:
        rows = json.loads(Path(path).read_text(encoding="utf-8"))["rows"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        print(f"{path} is no report, as --json writes it: {error!r}", file=sys.stderr)
        return 2
    keys = ("op", "case", "kernel", "arch", "warps", "stages")
    reported = {tuple(row[key] for key in keys) for row in rows}
    shipped = {
        (op, case.name, case.kernel.__name__, arch, case.options["num_warps"], case.options.get("num_stages", 0))
        for op, case in cases()
        for arch in case.archs
    }
    wrong = [("not in the report", *found) for found in sorted(shipped - reported)]
    wrong += [("in the report, but not shipped", *found) for found in sorted(reported - shipped)]
    wrong += [("failed", row["op"], row["case"], row["arch"], *row["failures"]) for row in rows if row["failures"]]
    for line in wrong:
        print(*line)
    print(f"{path}: {len(rows)} compiled, {len(wrong)} wrong")
    return 1 if wrong else 0


def report(op: str, case: AotCase, arch: int) -> Row:
    """Compile one case for one architecture and read its machine code."""
    compiled = compile_case(case, arch)
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(compiled.asm["cubin"])
        file.flush()
        resources, code = (_cuobjdump(flag, file.name) for flag in ("-res-usage", "-sass"))
    registers, stack = (int(re.search(rf"\b{name}:(\d+)", resources).group(1)) for name in ("REG", "STACK"))
    counts = {name: len(re.findall(pattern, code)) for name, pattern in COUNTED.items()}
    # local memory is where registers that do not fit go
    spills = len(re.findall(r"\b(STL|LDL)\b", code))
    shared, warps = compiled.metadata.shared, compiled.metadata.num_warps
    failures = []
    if stack or spills:
        failures.append(f"{stack} bytes of stack, {spills} spills")
    if shared > SHARED[arch]:
        failures.append(f"{shared} bytes of shared memory of {SHARED[arch]}")
    if registers * warps * 32 > REGISTERS:
        failures.append(f"{registers * warps * 32} registers")
    if case.tensor_cores and not counts["hgmma"] + counts["hmma"]:
        failures.append("no tensor cores")
    return Row(
        op=op,
        case=case.name,
        kernel=case.kernel.__name__,
        arch=arch,
        warps=warps,
        stages=case.options.get("num_stages", 0),
        registers=registers,
        stack=stack,
        spills=spills,
        shared=shared,
        programs=min(REGISTERS // (registers * warps * 32), (SHARED[arch] + 1024) // (shared + 1024), 64 // warps),
        failures=tuple(failures),
        **counts,
    )


def compile_case(case: AotCase, arch: int):
    """The kernel as Triton compiles it for ``arch``, with pointers and ``aligned`` integers multiples of 16."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    names = case.kernel.arg_names
    signature = {name: case.signature.get(name, "constexpr") for name in names}
    missing = [name for name in names if name not in case.signature and name not in case.constants]
    unknown = [name for name in (*case.signature, *case.constants) if name not in names]
    if missing or unknown:
        raise ValueError(f"{case.name}: the case lacks {missing} and has {unknown} that the kernel does not take")
    aligned = [i for i, name in enumerate(names) if signature[name].startswith("*") or name in case.aligned]
    attributes = {(i,): [["tt.divisibility", 16]] for i in aligned}
    source = ASTSource(case.kernel, signature, dict(case.constants), attributes)
    return triton.compile(source, target=GPUTarget("cuda", arch, 32), options=dict(case.options))


def line(row: Row) -> str:
    """One row of the table."""
    state = "; ".join(row.failures) or "ok"
    return (
        f"{row.op} {row.case:<44} sm_{row.arch} w{row.warps} s{row.stages} regs {row.registers:>3} "
        f"spills {row.spills:>2} shared {row.shared:>6} programs {row.programs} hgmma {row.hgmma:>3} "
        f"hmma {row.hmma:>3} ldg128 {row.ldg128:>3} ex2 {row.ex2:>3} {state}"
    )


def write(path: str, rows: list[Row]) -> None:
    """The rows as JSON, a line each, with the version of the compiler; written whole or not at all."""
    import triton

    target = Path(path)
    lines = ",\n".join(json.dumps(asdict(row)) for row in rows)
    text = f'{{"triton": {json.dumps(triton.__version__)}, "rows": [\n{lines}\n]}}'
    part = target.with_name(target.name + ".part")
    part.write_text(text + "\n", encoding="utf-8")
    os.replace(part, target)


def _cuobjdump(flag: str, file: str) -> str:
    import triton

    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    return subprocess.run([str(tool), flag, file], check=True, capture_output=True, text=True).stdout


def _parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m scripts.aot_report", description=__doc__.splitlines()[0])
    known = sorted(path.parent.name for path in KERNELS.glob("*/fused.py"))
    parser.add_argument("--op", nargs="+", choices=known, help="operators, all by default")
    parser.add_argument("--match", default="", help="only cases whose name contains this")
    parser.add_argument("--arch", nargs="+", type=int, choices=sorted(SHARED), default=[90, 80])
    parser.add_argument("--json", help="file to write the rows to")
    parser.add_argument("--check", metavar="FILE", help="compare a report with the cases of today instead")
    arguments = parser.parse_args(argv)
    if arguments.json and (Path(arguments.json).is_dir() or not Path(arguments.json).absolute().parent.is_dir()):
        parser.error(f"--json {arguments.json}: a file in a folder that exists is wanted")
    return arguments


if __name__ == "__main__":
    sys.exit(main())
