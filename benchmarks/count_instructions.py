"""Machine instructions of Gumbel-Rao's backward pass for each element and draw, compiled for an H200.

Needs Triton but no GPU: the kernels are compiled ahead of time, with the sizes of
`gapped.kernels.sampling.rao`, and disassembled. Instructions of a loop are divided by the elements and
draws of one turn; "program" is all that a program of ten draws executes, what is outside of its loop too.

Usage: python benchmarks/count_instructions.py [tau ...]
"""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from gapped.kernels.sampling import rao

DRAWS = 10
TOOLS = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
POINTERS = {"p_index": "*i16", "p_seed": "*i64", "p_stats": "*fp32", "p_tau": "*fp32", "p_draws": "*fp32"}
POINTERS["p_gap"] = "*fp32"
# Transcendentals, integer products, bitwise operations and comparisons have units of their own.
KINDS = {
    "MUFU": ("MUFU",),
    "IMAD": ("IMAD",),
    "FFMA/FADD/FMUL": ("FFMA", "FADD", "FMUL"),
    "SHFL": ("SHFL",),
    "LOP3/LEA/SETP/...": ("LOP3", "LEA", "FSETP", "ISETP", "SHF", "SEL", "FSEL", "FMNMX", "IADD3", "PRMT"),
    "memory": ("LD", "ST"),
}


def compiled(kernel: Any, dtype: str, flags: dict[str, Any]) -> Any:
    """A kernel's code, for pointers and sizes that are multiples of 16."""
    options = {name: flags[name] for name in ("num_warps", "maxnreg") if name in flags}
    constants = {name: flags[name] for name in kernel.arg_names if name in flags}
    types, hints = {}, {}
    for place, name in enumerate(kernel.arg_names):
        kinds = {"p": POINTERS.get(name, dtype), "s": "fp32" if name in ("s_tau", "s_gap") else "i32"}
        types[name] = "constexpr" if name in constants else kinds[name[0]]
        if name.startswith("p_") or name in ("s_categories", "s_stride", "s_grad_stride"):
            hints[(place,)] = [["tt.divisibility", 16]]
    source = ASTSource(kernel, types, constants, hints)
    return triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)


def tool(name: str, option: str, code: Any) -> str:
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(code.asm["cubin"])
        file.flush()
        command = [str(TOOLS / name), option, file.name]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def instructions(code: Any) -> tuple[list[str], list[tuple[int, int]]]:
    """Names of a kernel's instructions, and first and last of each loop."""
    names: list[str] = []
    labels: dict[str, int] = {}
    loops = []
    for line in tool("nvdisasm", "-c", code).splitlines():
        label = re.match(r"\s*(\.L_x_\d+):", line)
        instruction = re.match(r"\s*/\*[0-9a-f]+\*/\s+(?:@!?U?P\d+ )?\s*([\w.]+)(.*);", line)
        if label:
            labels[label[1]] = len(names)
        elif instruction and instruction[1] != "NOP":
            target = re.search(r"`\((\.L_x_\d+)\)", instruction[2])
            if target and instruction[1].startswith("BRA") and target[1] in labels:
                loops.append((labels[target[1]], len(names)))
            names.append(instruction[1])
    return names, loops


def described(names: list[str], times: float) -> str:
    """How many instructions of each kind there are, divided by `times`."""
    counts: Counter[str] = Counter()
    for name in names:
        counts[next((kind for kind, starts in KINDS.items() if name.startswith(starts)), "other")] += 1
    each = ", ".join(f"{kind} {counts[kind] / times:.2f}" for kind in [*KINDS, "other"])
    return f"{len(names) / times:.1f} ({each})"


def report(what: str, code: Any, turns: dict[str, tuple[int, int]]) -> None:
    """Print loops: `turns` says which of the long ones, and how many elements times draws a turn has."""
    names, loops = instructions(code)
    used = dict(re.findall(r"(REG|STACK):(\d+)", tool("cuobjdump", "-res-usage", code)))
    print(f"{what}: {used['REG']} registers, {used['STACK']} bytes of stack")
    loops = [(first, last + 1) for first, last in loops if last - first > 100]
    for name, (number, times) in turns.items():
        print(f"  {name}: {described(names[slice(*loops[number])], times)}")
    if len(loops) == 1:
        (first, last), times = loops[0], turns["four draws"][1] // 4 * DRAWS
        print(f"  program: {described(names + names[first:last] * (DRAWS // 4 - 1), times)}")


def main() -> None:
    shapes = (("1,048,576 x 64 float32", "*fp32", 4), ("1,048,576 x 64 bfloat16", "*bf16", 2))
    for tau in [float(word) for word in sys.argv[1:]] or [0.5, 0.7]:
        flags = {
            "TAU_PER_ROW": False,
            "POWER": rao.power_of(tau),
            "SOFT": False,
            "AT_INDEX": False,
            "FAST": True,
        }
        for what, dtype, size in shapes:
            _, sizes = rao.block_of(1_048_576, 64, size)
            own = {"REINMAX": False, "LEFT": DRAWS % 4}
            code = compiled(rao.rao_kernel, dtype, flags | own | sizes)
            held = sizes["PIECES"] * sizes["BLOCK_ROWS"] * sizes["WIDTH"] // (32 * sizes["num_warps"])
            report(f"tau {tau}, {what}", code, {"four draws": (0, 4 * held)})
        for what, dtype in (("8,192 x 32,000 float32", "*fp32"), ("4,096 x 128,256 bfloat16", "*bf16")):
            _, sizes = rao.batches_of(DRAWS)
            code = compiled(rao.streamed_rao_kernel, dtype, flags | sizes | {"IN_PLACE": False})
            times = DRAWS * sizes["VECTOR"]
            # Those of a chunk: within that over batches for the sums, around it for the gradient.
            report(f"tau {tau}, {what}", code, {"sums": (0, times), "gradient": (3, times)})


if __name__ == "__main__":
    main()
