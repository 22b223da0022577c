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
from gapped.kernels.sampling import long_rows, rao_chunks, rao_rows, short_rows, split_rows
from gapped.kernels.sampling.surrogates import MODES
from gapped.kernels.scores import score_kernels

POINTERS = {"p_seed": "*i64", "p_index": "*i16", "p_stats": "*fp32", "p_tau": "*fp32", "p_gap": "*fp32"}
POINTERS |= {"p_tau_forward": "*fp32", "p_words": "*i64", "p_draws": "*fp32"}
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

SCORES = """
POINTERS["p_index"] = "*i64"
for name, kernel in list(vars(score_kernels).items()):
    if name.endswith("_kernel"):
        code = compiles(kernel, "*fp32", 4, {"DEPTH": 4, "BLOCK_ROWS": 16, "BLOCK_COLUMNS": 16})
        # Rows times samples may need more bits.
        assert not re.search(r"arith\\.muli .*: i32", code.asm["ttir"]), code.asm["ttir"]
"""


def run(program: str, *arguments: str) -> None:
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    command = [sys.executable, "-c", PRELUDE + program, *arguments]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]


@pytest.mark.parametrize("name", ["gst", "gst-auto", "reinmax", "decoupled"])
def test_every_kernel_compiles_for_a_gpu(name: str) -> None:
    run(SAMPLING, name)


@pytest.mark.parametrize(("power", "soft", "per_row"), [("0", "0", "1"), ("1", "1", "0"), ("2", "0", "0")])
def test_the_kernels_of_gumbel_rao_compile_for_a_gpu(power: str, soft: str, per_row: str) -> None:
    run(RAO, power, soft, per_row)


def test_the_score_kernels_compile_and_count_rows_in_64_bits() -> None:
    run(SCORES)
