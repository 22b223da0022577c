"""The kernels as a compiler for a GPU sees them. That needs no GPU, and no interpreter would object.

A process of its own: where the kernels are interpreted, they cannot be compiled.
"""

from __future__ import annotations

import os
import subprocess
import sys
from importlib.util import find_spec

import pytest

# Not imported here: another test decides first whether this process interprets kernels.
pytestmark = pytest.mark.skipif(find_spec("triton") is None, reason="the kernels need Triton")

PROGRAM = """
import sys
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from gapped.kernels import fused, split, streamed
from gapped.kernels.parts import MODES

POINTERS = {"p_seed": "*i64", "p_index": "*i16", "p_stats": "*fp32", "p_tau": "*fp32", "p_gap": "*fp32"}
POINTERS |= {"p_tau_forward": "*fp32", "p_words": "*i64"}
NUMBERS = ("s_tau", "s_gap", "s_tau_forward")


def kind(name, dtype, flags):
    if name in flags:
        return "constexpr"
    if name.startswith("p_"):
        return POINTERS.get(name, dtype)
    return "fp32" if name in NUMBERS else "i32"


def compiles(kernel, dtype, warps, flags):
    flags = {name: value for name, value in flags.items() if name in kernel.arg_names}
    source = ASTSource(kernel, {name: kind(name, dtype, flags) for name in kernel.arg_names}, flags)
    triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": warps})


name = sys.argv[1]
flags = {"MODE": MODES[name], "EXPECTED_GAP": name == "gst", "FAST": True, "DENSE": True, "DETACHED": False}
flags |= {"TAU_PER_ROW": True, "GAP_PER_ROW": True, "TAU_FORWARD_PER_ROW": True, "PIECES": 2, "BLOCK": 1024}
flags |= {"PARTS": 3, "LANES": 4, "WAITS": True, "SPREAD": False}
flags |= {"BLOCK_ROWS": 16, "BLOCK_COLUMNS": 16, "AT_INDEX": False, "SOFT": name != "reinmax"}
# Long rows of Gumbel-Rao are added up in float32.
half = "*fp32" if name == "gumbel-rao" else "*bf16"
compiles(fused.forward_kernel, "*bf16", 4, flags)
compiles(fused.backward_kernel, "*bf16", 4, flags)
if name == "gumbel-rao":
    spread = flags | {"SPREAD": True, "BLOCK_ROWS": 8, "BLOCK_COLUMNS": 64}
    compiles(fused.backward_kernel, "*fp32", 1, spread)
compiles(streamed.streamed_forward_kernel, half, 4, flags)
compiles(streamed.streamed_backward_kernel, half, 4, flags)
compiles(streamed.streamed_forward_kernel, "*fp32", 4, flags | {"SOFT": False})
if name != "gumbel-rao":
    compiles(split.split_backward_kernel, half, 4, flags)
"""


SCORES = """
import re
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from gapped.kernels import scores

POINTERS = {"p_seed": "*i64", "p_index": "*i64"}
FLAGS = {"DEPTH": 4, "BLOCK_ROWS": 16, "BLOCK_COLUMNS": 16}
for name, kernel in list(vars(scores).items()):
    if not name.endswith("_kernel"):
        continue
    flags = {name: value for name, value in FLAGS.items() if name in kernel.arg_names}
    types = {name: POINTERS.get(name, "*fp32") if name[0] == "p" else "i32" for name in kernel.arg_names}
    source = ASTSource(kernel, types | dict.fromkeys(flags, "constexpr"), flags)
    text = triton.compile(source, target=GPUTarget("cuda", 90, 32)).asm["ttir"]
    # Rows times samples may need more bits.
    assert not re.search(r"arith\\.muli .*: i32", text), text
"""


def compiled(*command: str) -> None:
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    run = subprocess.run(
        [sys.executable, "-c", *command], env=environment, capture_output=True, text=True, check=False
    )
    assert run.returncode == 0, run.stderr[-2000:]


@pytest.mark.parametrize("name", ["gst", "reinmax", "decoupled", "gumbel-rao"])
def test_every_kernel_compiles_for_a_gpu(name: str) -> None:
    compiled(PROGRAM, name)


def test_the_scores_kernels_compile_and_count_rows_in_64_bits() -> None:
    compiled(SCORES)
