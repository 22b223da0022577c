"""The order of the programs that share strips of rows, by enumeration."""

from __future__ import annotations

import pytest
import torch

# Triton from there, where it is imported once it is known whether it interprets kernels.
from kernel_cases import DEVICE, GPU_MARKS, tl, triton

from gapped.kernels.sampling.tile_order import task_of

pytestmark = GPU_MARKS


@triton.jit
def _order_kernel(p_out, s_strips, s_lag, SEGMENTS: tl.constexpr):
    s_program = tl.program_id(0)
    s_tile, s_writes = task_of(s_program, s_strips * SEGMENTS, s_lag)
    tl.store(p_out + 3 * s_program, s_writes.to(tl.int32))
    tl.store(p_out + 3 * s_program + 1, s_tile // SEGMENTS)
    tl.store(p_out + 3 * s_program + 2, s_tile % SEGMENTS)


@pytest.mark.parametrize(
    ("strips", "segments", "ahead"), [(1, 2, 0), (5, 3, 0), (5, 3, 1), (6, 4, 3), (7, 2, 100), (3, 5, 2)]
)
def test_a_program_waits_for_lower_numbers_only(strips: int, segments: int, ahead: int) -> None:
    """Every tile is summed once and written once, after all tiles of its strip were summed."""
    tiles = strips * segments
    lag = min(segments + ahead, tiles)
    out = torch.empty(2 * tiles, 3, dtype=torch.int32, device=DEVICE)
    _order_kernel[(2 * tiles,)](out, strips, lag, SEGMENTS=segments)
    tasks = [tuple(task) for task in out.tolist()]
    wanted = [
        (writes, strip, segment)
        for writes in (0, 1)
        for strip in range(strips)
        for segment in range(segments)
    ]
    assert sorted(tasks) == wanted
    number = {task: program for program, task in enumerate(tasks)}
    for (writes, strip, segment), program in number.items():
        if writes:
            assert all(number[0, strip, other] < program for other in range(segments))
            # Not much later than it was summed: the cache would have lost it.
            assert program - number[0, strip, segment] <= 2 * lag + 1
