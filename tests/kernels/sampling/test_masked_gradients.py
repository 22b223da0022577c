"""Kernels of the backward pass do not look at the incoming gradient of categories that do not exist."""

from __future__ import annotations

import pytest
import torch
from conftest import seeded
from kernel_cases import (
    ESTIMATORS,
    FUSED,
    GPU_MARKS,
    LONG,
    backward,
    example,
    incoming,
    key,
    make_strips_small,
)
from torch import Tensor

from gapped.kernels.sampling import launch, long_rows, split_rows

# The interpreter warns of what is not finite, and of what a row without a law makes of itself.
pytestmark = [*GPU_MARKS, pytest.mark.filterwarnings("ignore::RuntimeWarning")]

CASES = [
    *(("one block", name, torch.float32) for name in ESTIMATORS),
    *(("in segments", name, torch.float32) for name in LONG),
    ("in segments", "gst", torch.bfloat16),
    ("in segments", "reinmax", torch.float16),
    *(("read twice", name, torch.float32) for name in LONG if name != "gumbel-rao"),
    *(("side by side", name, torch.float32) for name in LONG if name != "gumbel-rao"),
]


def rows_of(layout: str, dtype: torch.dtype, patch: pytest.MonkeyPatch) -> Tensor:
    """Logits that the kernels of this layout read, a third of them -inf."""
    if layout == "side by side":
        make_strips_small(patch)
    elif layout != "one block":
        patch.setattr(launch, "LONGEST_BLOCK", 8)
        patch.setattr(long_rows, "CHUNK", 16)
        patch.setattr(split_rows, "SEGMENT_BYTES", 16 * dtype.itemsize)
        if layout == "read twice":
            patch.setattr(split_rows, "most_segments", lambda device: 0)
    logits = example(6, 7 if layout == "one block" else 53).to(dtype)
    holes = torch.rand(logits.shape, generator=seeded(3)).to(logits) < 0.3
    holes[:, 0] = False
    logits = logits.masked_fill(holes, -torch.inf)
    return logits.T.contiguous().T if layout == "side by side" else logits


@pytest.mark.parametrize(("layout", "name", "dtype"), CASES)
def test_the_gradient_at_a_masked_category_may_be_anything(
    layout: str, name: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One that is not finite at a category that exists is not hidden."""
    logits, fused = rows_of(layout, dtype, monkeypatch), FUSED[name]
    masked = logits == -torch.inf
    grad = torch.empty_like(logits).copy_(incoming(*logits.shape))
    sample = launch.forward(logits, key(), fused)
    expected = backward(logits, sample, grad, fused)
    assert expected.isfinite().all()
    assert expected[0].any()
    for filling in (torch.nan, torch.inf, -torch.inf):
        wild = grad.masked_fill(masked, filling)
        assert torch.equal(backward(logits, sample, wild, fused), expected)
        # The first category of each row exists, but for the second row, which has none.
        wild[:, 0] = filling
        found = backward(logits, sample, wild, fused)
        assert not found[0].isfinite().all()
        assert not found[1].any()
