"""Time of the Gumbel-Rao kernel's backward pass on a GPU, over block sizes and warps."""

from __future__ import annotations

import torch
from torch import Tensor
from triton.testing import do_bench

from gapped.kernels import launch
from gapped.kernels.fused import MODES, backward_kernel

PROBLEMS = ((6_400, 64, 1000), (120_000, 10, 100))


def milliseconds(logits: Tensor, grad: Tensor, samples: int, elements: int, warps: int) -> float:
    """Median time of one launch."""
    rows, categories = logits.shape
    key = torch.randint(2**62, (1,), device="cuda")
    _, index = launch.forward(logits, key, launch.Fused("gumbel-rao", 0.5, samples=samples))
    out = torch.empty_like(logits)
    grid, blocks = launch._blocks(rows, categories, elements)
    tensors = (logits, index, grad, key, logits, logits, out)
    sizes = (rows, categories, categories, categories, 0.5, 1.0, samples)
    flags = {"MODE": MODES["gumbel-rao"], "TAU_PER_ROW": False, "GAP_PER_ROW": False}
    flags |= {"EXPECTED_GAP": False, "DETACHED": True, "num_warps": warps, **blocks}
    return float(
        do_bench(lambda: backward_kernel[grid](*tensors, *sizes, **flags), return_mode="median", rep=20)
    )


def main() -> None:
    for rows, categories, samples in PROBLEMS:
        logits, grad = torch.randn(2, rows, categories, device="cuda")
        for elements in (256, 512, 1024):
            for warps in (1, 2, 4):
                time = milliseconds(logits, grad, samples, elements, warps)
                shape = f"{rows} x {categories}, {samples} draws, {elements} elements, {warps} warps"
                print(f"{shape}: {time:.3f} ms", flush=True)


if __name__ == "__main__":
    main()
