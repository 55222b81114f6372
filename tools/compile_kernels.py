"""Compiles every Triton kernel of the objectives ahead of time for GPUs that need not be there, and counts registers.

    python tools/compile_kernels.py                     sm_80 (A100), sm_90 (H100), sm_100 (B200)
    python tools/compile_kernels.py --arch 90 --json kernels.json

Triton and its assembler come from PyPI. A kernel that spills registers to memory, or does not compile, is an error.
"""

import argparse
import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from blockdraft.losses import kernels

ARCHITECTURES = (80, 90, 100)
DTYPES = ("bf16", "fp32")
PER_ROW = {"valid": "*i1", "labels": "*i64", "argmax": "*i64", "target_index": "*i64"}
LOGITS = {"logits", "draft", "target"}
NUMBERS = {"inverse_temperature": "fp32", "log_vocab_size": "fp32", "num_rows": "i32"}
ALIGNED = {"stride", "draft_stride", "target_stride", "vocab_size"}
"""Whole numbers that 16 divides, as those of every real vocabulary."""

SUMS = {
    "S(a)": {"NUM_SCALES": 1},
    "S(1), S(a)": {"NUM_SCALES": 2},
    "KL": {"HAS_KL": True},
    "KL, S(1)": {"HAS_KL": True, "NUM_SCALES": 1},
    "KL, two S": {"HAS_KL": True, "NUM_SCALES": 2},
    "reverse KL": {"HAS_REVERSE_KL": True},
}
"""Which sums one sweep takes, for the objectives BV, KL and so on, with statistics or without."""
NO_SUMS = {"NUM_SCALES": 0, "HAS_KL": False, "HAS_REVERSE_KL": False}

TERMS = {
    "label": {"HAS_LABEL": True},
    "label, S(a)": {"HAS_LABEL": True, "NUM_SCALES": 1},
    "S(1)": {"NUM_SCALES": 1},
    "S(1), S(a)": {"HAS_LABEL": True, "NUM_SCALES": 2},
    "KL": {"HAS_KL": True},
    "KL, S(1)": {"HAS_KL": True, "NUM_SCALES": 1},
    "label, KL, S(a)": {"HAS_LABEL": True, "HAS_KL": True, "NUM_SCALES": 1},
    "reverse KL": {"HAS_REVERSE_KL": True},
    "all": {"HAS_LABEL": True, "NUM_SCALES": 2, "HAS_KL": True, "HAS_REVERSE_KL": True},
}
"""Which terms of the gradient there are, for the objectives CE, BV, TV and so on."""
NO_TERMS = {"HAS_LABEL": False, "NUM_SCALES": 0, "HAS_KL": False, "HAS_REVERSE_KL": False}


@dataclass(frozen=True)
class Compiled:
    """Compiled is what one kernel takes on one architecture."""

    kernel: str
    variant: str
    dtype: str
    arch: int
    registers: int
    spilled_bytes: int
    shared_bytes: int


def variants() -> Iterator[tuple[Any, str, dict[str, Any]]]:
    """Yield each kernel with the name of a variant and its compile-time constants."""
    yield kernels.normaliser_kernel, "", {}
    for variant, sums in SUMS.items():
        yield kernels.sums_kernel, variant, NO_SUMS | sums
    for variant, terms in TERMS.items():
        yield kernels.gradient_kernel, variant, NO_TERMS | terms


def compile_kernel(kernel: Any, constants: dict[str, Any], dtype: str, arch: int) -> tuple[str, int]:
    """Return the PTX of a kernel and the shared memory it takes."""
    constants = constants | {"TILE": kernels.TILE}
    if "INDEXED" in kernel.arg_names:
        constants |= {"INDEXED": True}  # as in training
    signature, aligned = {}, {}
    for index, name in enumerate(kernel.arg_names):
        if name in constants:
            signature[name] = "constexpr"
            continue
        if name in LOGITS:
            signature[name] = f"*{dtype}"
        elif name in PER_ROW:
            signature[name] = PER_ROW[name]
        elif name in NUMBERS:
            signature[name] = NUMBERS[name]
        else:
            signature[name] = "i32" if name in ALIGNED else "*fp32"
        if signature[name].startswith("*") or name in ALIGNED:
            aligned[(index,)] = [["tt.divisibility", 16]]
    source = ASTSource(kernel, signature, constants, aligned)
    made = triton.compile(source, target=GPUTarget("cuda", arch, 32), options={"num_warps": kernels.NUM_WARPS})
    return made.asm["ptx"], made.metadata.shared


def assemble(ptx: str, arch: int) -> tuple[int, int]:
    """Return the registers per thread and the bytes that spill, as the assembler reports them."""
    assembler = "ptxas-blackwell" if arch >= 100 else "ptxas"
    path = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / assembler
    name = re.search(r"^\.target (\S+)", ptx, re.MULTILINE)
    assert name is not None
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder) / "kernel.ptx"
        source.write_text(ptx)
        command = [path, "-v", f"--gpu-name={name[1].split(',')[0]}", "-o", Path(folder) / "kernel.cubin", source]
        report = subprocess.run(command, check=True, capture_output=True, text=True).stderr
    registers = [int(n) for n in re.findall(r"Used (\d+) registers", report)]
    spills = [int(n) for n in re.findall(r"(\d+) bytes spill", report)]
    if not registers or not spills:
        raise SystemExit(f"{assembler} reported no registers:\n{report}")
    return max(registers), sum(spills)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--arch", type=int, nargs="+", default=ARCHITECTURES, help="compute capabilities, 90 for 9.0")
    parser.add_argument("--json", type=Path, help="write the figures to this file, too")
    options = parser.parse_args()
    print(f"triton {triton.__version__}, tiles of {kernels.TILE} tokens, {kernels.NUM_WARPS} warps")
    print(f"{'kernel':18} {'variant':12} {'dtype':5} {'arch':>6} {'registers':>9} {'spilled':>8} {'shared':>7}")
    results = []
    for kernel, variant, constants in variants():
        for dtype in DTYPES:
            for arch in options.arch:
                ptx, shared = compile_kernel(kernel, constants, dtype, arch)
                registers, spilled = assemble(ptx, arch)
                result = Compiled(kernel.fn.__name__, variant, dtype, arch, registers, spilled, shared)
                results.append(result)
                print(
                    f"{result.kernel:18} {variant:12} {dtype:5} {'sm_' + str(arch):>6} "
                    f"{registers:9} {spilled:8} {shared:7}"
                )
    if options.json:
        options.json.write_text(json.dumps([asdict(result) for result in results], indent=1) + "\n")
    spilling = sum(result.spilled_bytes > 0 for result in results)
    print(f"{len(results)} kernels, {spilling} of them spill")
    sys.exit(1 if spilling else 0)


if __name__ == "__main__":
    main()
