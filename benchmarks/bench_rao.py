"""Time of the Gumbel-Rao kernel's backward pass on a GPU, over block sizes and warps."""

from __future__ import annotations

import torch
from triton.testing import do_bench

from gapped.kernels import launch
from gapped.kernels.fused import MODES, backward_kernel


def main() -> None:
    for rows, categories, samples in ((6_400, 64, 1000), (6_400, 64, 100), (120_000, 10, 100)):
        logits, grad = torch.randn(2, rows, categories, device="cuda")
        key = torch.randint(2**62, (1,), device="cuda")
        fused = launch.Fused("gumbel-rao", 0.5, samples=samples)
        _, index = launch.forward(logits, key, fused)
        out = torch.empty_like(logits)
        for elements in (128, 256, 512, 1024):
            for warps in (1, 2, 4):
                grid, blocks = launch._blocks(rows, categories, elements)

                def call(
                    grid: tuple[int] = grid, blocks: dict[str, int] = blocks, warps: int = warps
                ) -> None:
                    backward_kernel[grid](
                        logits, index, grad, key, logits, logits, out,
                        rows, categories, categories, categories, 0.5, 1.0, samples,
                        MODE=MODES["gumbel-rao"], TAU_PER_ROW=False, GAP_PER_ROW=False,
                        EXPECTED_GAP=False, DETACHED=True, num_warps=warps, **blocks,
                    )  # fmt: skip

                print(f"{rows} x {categories}, {samples} draws, {elements} elements, {warps} warps: "
                      f"{do_bench(call, return_mode='median', warmup=5, rep=20):.3f} ms", flush=True)  # fmt: skip


if __name__ == "__main__":
    main()
