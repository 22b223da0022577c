"""The kernels compile for a GPU, which needs no GPU: errors that the interpreter does not notice.

They compile in a process of their own: a process that interprets kernels cannot compile them.
"""

from __future__ import annotations

import os
import subprocess
import sys
from importlib.util import find_spec
from typing import Any

import pytest

# Not imported here: another test file decides whether this process interprets kernels.
pytestmark = pytest.mark.skipif(find_spec("triton") is None, reason="the kernels need Triton")

PRELUDE = """
import re
import sys
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from gapped.kernels import choices, gates, masks, scores, subsets, tables
from gapped.kernels.sampling import long, rao, short, strips
from gapped.kernels.sampling.surrogates import MODES, SECOND_ORDER

POINTERS = {"p_seed": "*i64", "p_index": "*i16", "p_stats": "*fp32", "p_tau": "*fp32", "p_gap": "*fp32"}
POINTERS |= {"p_tau_forward": "*fp32", "p_words": "*i64", "p_draws": "*fp32", "p_law": "*fp32"}
POINTERS |= {"p_sums": "*fp32", "p_done": "*i32"}
NUMBERS = ("s_tau", "s_gap", "s_tau_forward")
MULTIPLES = ("s_rows", "s_inner", "s_stride", "s_step", "s_grad_stride", "s_grad_step")


def kind(name, dtype, flags):
    if name in flags:
        return "constexpr"
    if name.startswith("p_"):
        return POINTERS.get(name, dtype)
    return "fp32" if name in NUMBERS else "i32"


def compiles(kernel, dtype, warps, flags, aligned=False):
    flags = {name: value for name, value in flags.items() if name in kernel.arg_names}
    kinds = {name: kind(name, dtype, flags) for name in kernel.arg_names}
    known = [name for name in MULTIPLES if name not in (kernel.do_not_specialize or ())]
    whole = [name for name in kernel.arg_names if name.startswith("p_") or name in known]
    pointers = [(kernel.arg_names.index(name),) for name in whole if aligned]
    source = ASTSource(kernel, kinds, flags, {pointer: [["tt.divisibility", 16]] for pointer in pointers})
    return triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": warps})
"""

SAMPLING = """
name = sys.argv[1]
flags = {"MODE": MODES[name], "EXPECTED_GAP": name == "gst", "FAST": True, "DENSE": True, "DETACHED": False}
flags |= {"TAU_PER_ROW": True, "GAP_PER_ROW": True, "TAU_FORWARD_PER_ROW": True, "CHUNKS": 2, "BLOCK": 1024}
flags |= {"SEGMENTS": 3, "SLOTS": 4, "WAITS": True, "LAW": True, "IN_PLACE": True, "ARGMAX": False}
flags |= {"BLOCK_ROWS": 16, "BLOCK_COLUMNS": 16, "AT_INDEX": False, "SOFT": name not in SECOND_ORDER}
compiles(short.forward_kernel, "*bf16", 4, flags)
compiles(short.backward_kernel, "*bf16", 4, flags)
compiles(long.streamed_forward_kernel, "*bf16", 4, flags)
compiles(long.streamed_backward_kernel, "*bf16", 4, flags)
POINTERS["p_index"] = "*i64"
compiles(long.streamed_forward_kernel, "*fp32", 4, flags | {"SOFT": False})
compiles(long.split_backward_kernel, "*bf16", 4, flags)
compiles(long.log_prob_backward_kernel, "*bf16", 4, flags)
compiles(long.streamed_forward_kernel, "*fp32", 4, flags | {"SOFT": False, "ARGMAX": True})
"""

STRIPS = r"""
name, dtype = sys.argv[1:]
size = 4 if dtype == "*fp32" else 2
flags = {"MODE": MODES[name], "EXPECTED_GAP": False, "FAST": True, "DENSE": True, "DETACHED": True}
flags |= {"TAU_PER_ROW": False, "GAP_PER_ROW": False, "TAU_FORWARD_PER_ROW": False, "AT_INDEX": False}
flags |= {"SOFT": False, "ARGMAX": False, "WAITS": True}
_, forward = strips.forward_sizes(65_536, 8192, size)
_, _, tiles = strips.backward_sizes(65_536, 8192, size, name)
_, _, held = strips.backward_sizes(65_536, 100, size, name)
assert (tiles["SEGMENTS"] > 1, held["SEGMENTS"]) == (True, 1)
block = {"BLOCK_ROWS": 16, "BLOCK_COLUMNS": 64, "num_warps": 4}
backward = strips.tile_backward_kernel
cases = (strips.strip_forward_kernel, forward), (backward, tiles), (backward, held)
cases += (short.forward_kernel, block), (short.backward_kernel, block)
for kernel, sizes in cases:
    code = compiles(kernel, dtype, sizes["num_warps"], flags | sizes, True)
    # Neighbouring rows are read and written 16 bytes at a time.
    for instruction in ("ld", "st"):
        assert re.search(instruction + r"\.global[\w.:]*\.v4\.b32", code.asm["ptx"]), (kernel, instruction)
    # Those that are read ahead, too: this kind of copy has 16 bytes only.
    assert "cp.async.ca" not in code.asm["ptx"], kernel
compiles(strips.strip_forward_kernel, dtype, 16, flags | forward | {"SOFT": name not in SECOND_ORDER}, True)
compiles(backward, dtype, 4, flags | tiles | {"AT_INDEX": True, "TAU_PER_ROW": True, "GAP_PER_ROW": True})
"""

RAO = """
power, soft, per_row = (int(word) for word in sys.argv[1:])
flags = {"POWER": power, "SOFT": bool(soft), "TAU_PER_ROW": bool(per_row), "AT_INDEX": False, "FAST": True}
flags |= {"IN_PLACE": True, "REINMAX": False}
short = flags | {"LEFT": 2, "SPREAD": False, "PIECES": 2, "BLOCK_ROWS": 4, "WIDTH": 32}
code = compiles(rao.rao_kernel, "*fp32", 1, short)
# Noise is drawn by the threads that use it: a block of it would take a kilobyte to exchange.
assert code.metadata.shared < 256, code.metadata
compiles(rao.rao_kernel, "*bf16", 1, short | {"SPREAD": True, "BLOCK_ROWS": 8})
if not soft:
    code = compiles(rao.rao_kernel, "*fp32", 1, short | {"REINMAX": True})
    assert code.metadata.shared < 256, code.metadata
    compiles(rao.rao_kernel, "*bf16", 1, short | {"REINMAX": True, "SPREAD": True, "AT_INDEX": True})
compiles(rao.streamed_rao_kernel, "*bf16", 4, flags | {"BATCH": 10, "VECTOR": 4, "BLOCK": 512})
"""

GATES = """
name = sys.argv[1]
flags = {"MODE": MODES[name], "EXPECTED_GAP": name == "gst", "FAST": True, "BLOCK": 1024}
flags |= {"TAU_PER_ROW": True, "GAP_PER_ROW": True, "TAU_FORWARD_PER_ROW": True}
flags |= {"SOFT": name not in SECOND_ORDER}
for kernel in (gates.gate_forward_kernel, gates.gate_backward_kernel):
    code = compiles(kernel, "*bf16", 4, flags)
    # The number of a gate may need more bits; Philox multiplies numbers of draws as 32 bits.
    assert name == "gumbel-rao" or not re.search(r"arith\\.muli .*: i32", code.asm["ttir"]), code.asm["ttir"]
    # Noise is drawn by the threads that use it.
    assert name == "gumbel-rao" or compiles(kernel, "*fp32", 4, flags, True).metadata.shared == 0
"""

SCORES = """
POINTERS["p_index"] = "*i64"
for name, kernel in list(vars(scores).items()):
    if name.endswith("_kernel"):
        code = compiles(kernel, "*fp32", 4, {"DEPTH": 4, "BLOCK_ROWS": 16, "BLOCK_COLUMNS": 16})
        # Rows times samples may need more bits.
        assert not re.search(r"arith\\.muli .*: i32", code.asm["ttir"]), code.asm["ttir"]
"""

MASKS = """
POINTERS["p_chosen"] = "*u8"
for n, m in ((2, 4), (4, 8)):
    for soft in (False, True):
        flags = {"N": n, "M": m, "GAPPED": True, "SOFT": soft, "FAST": True}
        flags |= {"BLOCK_ROWS": 1024 // m, "BLOCK_COLUMNS": m}
        forward = compiles(masks.mask_forward_kernel, "*fp32", 4, flags, True)
    backward = compiles(masks.mask_backward_kernel, "*bf16", 4, flags, True)
    if m == 4:
        # A group lies within a thread, so that sums over it need no other thread.
        for code in (forward, backward):
            assert "shfl" not in code.asm["ptx"]
"""

SUBSETS = """
POINTERS |= {"p_chosen": "*u8", "p_base": "*fp64", "p_rare": "*fp32", "p_out": "*fp32"}
for rows, columns in ((32, 32), (1, 1024)):
    size = {"BLOCK_ROWS": rows, "BLOCK_COLUMNS": columns}
    draw = compiles(subsets.subset_draw_kernel, "*fp32", 4, size)
    rare = compiles(subsets.subset_rare_kernel, "*fp32", 4, size)
    # Loops are not unrolled, so that kernels stay in the cache of instructions.
    assert all(code.asm["ptx"].count("\\n") < 6000 for code in (draw, rare))
for what in range(3):
    flags = {"WHAT": what, "FREQUENCIES": 32, "PART": 32, "FAST": True, "BLOCK": 1024}
    compiles(subsets.subset_sums_kernel, "*bf16", 4, flags)
"""

CHOICES = """
n, k = (int(word) for word in sys.argv[1:])
POINTERS |= {"p_index": "*i64", "p_place": "*i32", "p_weights": "*fp32"}
POINTERS["p_sums"] = "*fp32" if k <= 8 else "*fp64"
flags = {"ARGMAX": False, "WEIGHTED": True, "SECOND_ORDER": True} | choices.sizes_of(n, k)
for kernel in (choices.choices_draw_kernel, choices.choices_gradient_kernel):
    # Triton 3.6 fails on scans of fewer entries than threads: those over places are sums.
    compiles(kernel, "*bf16", flags["num_warps"], flags)
"""

TABLES = """
for kernel in (tables.table_select_kernel, tables.table_sum_kernel):
    code = compiles(kernel, "*bf16", 4, {"ROWS": 16, "WIDTH": 128}, True)
    # Rows times their width, and groups times their tables, may need more bits.
    assert not re.search(r"arith\\.muli .*tensor<.*i32>", code.asm["ttir"]), code.asm["ttir"]
"""


def slow(*cases: Any) -> list[Any]:
    """Parameters of further variants, which the suite has no time to compile."""
    return [
        pytest.param(*(case if isinstance(case, tuple) else (case,)), marks=pytest.mark.slow)
        for case in cases
    ]


def run(program: str, *arguments: str) -> None:
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    command = [sys.executable, "-c", PRELUDE + program, *arguments]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]


@pytest.mark.parametrize(
    "name", ["gst", "gapmax", *slow("gapmax-tempered", "gst-auto", "reinmax", "decoupled")]
)
def test_every_kernel_compiles_for_a_gpu(name: str) -> None:
    run(SAMPLING, name)


@pytest.mark.parametrize(
    ("name", "dtype"),
    [("gapmax", "*bf16"), *slow(("gapmax", "*fp32"), ("gst", "*bf16"), ("reinmax", "*fp32"))],
)
def test_rows_side_by_side_are_read_16_bytes_at_a_time(name: str, dtype: str) -> None:
    run(STRIPS, name, dtype)


@pytest.mark.parametrize("name", ["gapmax", *slow("gst", "decoupled", "gumbel-rao")])
def test_the_kernels_of_gates_compile_and_count_gates_in_64_bits(name: str) -> None:
    run(GATES, name)


@pytest.mark.parametrize(
    ("power", "soft", "per_row"), [("2", "0", "0"), *slow(("0", "0", "1"), ("1", "1", "0"))]
)
def test_the_kernels_of_gumbel_rao_compile_for_a_gpu(power: str, soft: str, per_row: str) -> None:
    run(RAO, power, soft, per_row)


def test_the_kernels_of_scores_masks_subsets_and_tables_compile_for_a_gpu() -> None:
    """A group of four entries lies within a thread; rows and numbers are counted in 64 bits."""
    run(SCORES + MASKS + SUBSETS + TABLES)


@pytest.mark.parametrize(
    ("n", "k"), [("64", "2"), *slow(("4", "2"), ("8", "2"), ("128", "8"), ("32", "16"), ("1024", "4"))]
)
def test_the_kernels_of_choices_compile_for_a_gpu(n: str, k: str) -> None:
    run(CHOICES, n, k)
