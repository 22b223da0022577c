"""The kernels compile for a GPU, which needs no GPU: errors that the interpreter does not notice.

They compile in a process of their own: a process that interprets kernels cannot compile them.
"""

from __future__ import annotations

import os
import subprocess
import sys
from importlib.util import find_spec

import pytest

# Not imported here: another test file decides whether this process interprets kernels.
pytestmark = pytest.mark.skipif(find_spec("triton") is None, reason="the kernels need Triton")

PRELUDE = """
import re
import sys
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from gapped.kernels.flows import flow_kernels
from gapped.kernels.gating import gate_kernels
from gapped.kernels.sampling import long_rows, rao_chunks, rao_rows, short_rows, split_rows
from gapped.kernels.sampling.surrogates import MODES
from gapped.kernels.masks import mask_kernels
from gapped.kernels.scores import score_kernels

POINTERS = {"p_seed": "*i64", "p_index": "*i16", "p_stats": "*fp32", "p_tau": "*fp32", "p_gap": "*fp32"}
POINTERS |= {"p_smoothing": "*fp32", "p_tau_forward": "*fp32", "p_words": "*i64", "p_draws": "*fp32"}
NUMBERS = ("s_tau", "s_gap", "s_tau_forward", "s_smoothing")


def kind(name, dtype, flags):
    if name in flags:
        return "constexpr"
    if name.startswith("p_"):
        return POINTERS.get(name, dtype)
    return "fp32" if name in NUMBERS else "i32"


def compiles(kernel, dtype, warps, flags, aligned=False):
    flags = {name: value for name, value in flags.items() if name in kernel.arg_names}
    kinds = {name: kind(name, dtype, flags) for name in kernel.arg_names}
    pointers = [(i,) for i, name in enumerate(kernel.arg_names) if aligned and name.startswith("p_")]
    source = ASTSource(kernel, kinds, flags, {pointer: [["tt.divisibility", 16]] for pointer in pointers})
    return triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": warps})
"""

SAMPLING = """
name = sys.argv[1]
flags = {"MODE": MODES[name], "EXPECTED_GAP": name == "gst", "FAST": True, "DENSE": True, "DETACHED": False}
flags |= {"TAU_PER_ROW": True, "GAP_PER_ROW": True, "TAU_FORWARD_PER_ROW": True, "CHUNKS": 2, "BLOCK": 1024}
flags |= {"SEGMENTS": 3, "SLOTS": 4, "WAITS": True}
flags |= {"BLOCK_ROWS": 16, "BLOCK_COLUMNS": 16, "AT_INDEX": False, "SOFT": name != "reinmax"}
compiles(short_rows.forward_kernel, "*bf16", 4, flags)
compiles(short_rows.backward_kernel, "*bf16", 4, flags)
compiles(long_rows.streamed_forward_kernel, "*bf16", 4, flags)
compiles(long_rows.streamed_backward_kernel, "*bf16", 4, flags)
compiles(long_rows.streamed_forward_kernel, "*fp32", 4, flags | {"SOFT": False})
compiles(split_rows.split_backward_kernel, "*bf16", 4, flags)
"""

RAO = """
power, soft, per_row = (int(word) for word in sys.argv[1:])
flags = {"POWER": power, "SOFT": bool(soft), "TAU_PER_ROW": bool(per_row), "AT_INDEX": False, "FAST": True}
short = flags | {"LEFT": 2, "SPREAD": False, "PIECES": 2, "BLOCK_ROWS": 4, "WIDTH": 32}
code = compiles(rao_rows.rao_kernel, "*fp32", 1, short)
# Noise is drawn by the threads that use it: a block of it would take a kilobyte to exchange.
assert code.metadata.shared < 256, code.metadata
compiles(rao_rows.rao_kernel, "*bf16", 1, short | {"SPREAD": True, "BLOCK_ROWS": 8})
compiles(rao_chunks.streamed_rao_kernel, "*bf16", 4, flags | {"BATCH": 10, "VECTOR": 4, "BLOCK": 512})
"""

GATES = """
name = sys.argv[1]
flags = {"MODE": MODES[name], "EXPECTED_GAP": name == "gst", "FAST": True, "BLOCK": 1024}
flags |= {"TAU_PER_ROW": True, "GAP_PER_ROW": True, "TAU_FORWARD_PER_ROW": True, "SOFT": name != "reinmax"}
for kernel in (gate_kernels.gate_forward_kernel, gate_kernels.gate_backward_kernel):
    code = compiles(kernel, "*bf16", 4, flags)
    # The number of a gate may need more bits; Philox multiplies numbers of draws as 32 bits.
    assert name == "gumbel-rao" or not re.search(r"arith\\.muli .*: i32", code.asm["ttir"]), code.asm["ttir"]
"""

SCORES = """
POINTERS["p_index"] = "*i64"
for name, kernel in list(vars(score_kernels).items()):
    if name.endswith("_kernel"):
        code = compiles(kernel, "*fp32", 4, {"DEPTH": 4, "BLOCK_ROWS": 16, "BLOCK_COLUMNS": 16})
        # Rows times samples may need more bits.
        assert not re.search(r"arith\\.muli .*: i32", code.asm["ttir"]), code.asm["ttir"]
"""

MASKS = """
POINTERS["p_chosen"] = "*u8"
for n, m in ((2, 4), (4, 8)):
    for soft in (False, True):
        flags = {"N": n, "M": m, "GAPPED": True, "SOFT": soft, "BLOCK_ROWS": 1024 // m, "BLOCK_COLUMNS": m}
        forward = compiles(mask_kernels.mask_forward_kernel, "*fp32", 4, flags, True)
    backward = compiles(mask_kernels.mask_backward_kernel, "*bf16", 4, flags, True)
    if m == 4:
        # A group lies within a thread, so that sums over it need no other thread.
        for code in (forward, backward):
            assert "shfl" not in code.asm["ptx"]
"""


FLOWS = """
flags = {"TAU_PER_ROW": True, "SMOOTHING_PER_ROW": True, "STEPS": 8, "LEFT": 1e-13, "FAST": True}
for rows, columns, warps in ((32, 4, 1), (2, 16, 1), (1, 64, 1), (1, 128, 4)):
    flags |= {"BLOCK_ROWS": rows, "BLOCK_COLUMNS": columns}
    compiles(flow_kernels.flow_kernel, "*bf16", warps, flags)
"""


def run(program: str, *arguments: str) -> None:
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    command = [sys.executable, "-c", PRELUDE + program, *arguments]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]


@pytest.mark.parametrize("name", ["gst", "gst-auto", "reinmax", "decoupled"])
def test_every_kernel_compiles_for_a_gpu(name: str) -> None:
    run(SAMPLING, name)


def test_the_kernel_of_flows_compiles_for_a_gpu() -> None:
    run(FLOWS)


@pytest.mark.parametrize("name", ["gst", "decoupled", "gumbel-rao"])
def test_the_kernels_of_gates_compile_and_count_gates_in_64_bits(name: str) -> None:
    run(GATES, name)


@pytest.mark.parametrize(("power", "soft", "per_row"), [("0", "0", "1"), ("1", "1", "0"), ("2", "0", "0")])
def test_the_kernels_of_gumbel_rao_compile_for_a_gpu(power: str, soft: str, per_row: str) -> None:
    run(RAO, power, soft, per_row)


def test_the_score_kernels_compile_and_count_rows_in_64_bits() -> None:
    run(SCORES)


def test_the_mask_kernels_compile_and_keep_a_group_of_four_within_a_thread() -> None:
    run(MASKS)
