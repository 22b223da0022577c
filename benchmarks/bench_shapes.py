"""Time and memory of gates, masks, subsets and grouped codebooks beside plain torch, forward and backward.

In plain torch, gates are categorical choices of pairs, 2:4 masks a Gumbel choice among six options, and
subsets a recursion over the elements in log space, which keeps the whole table and differentiates through it.
The quantizer is wav2vec 2.0's for 8 utterances of 20 s. Prints the median time of a call and the most memory
beyond its inputs. With --variants also for other sizes of blocks on a GPU, which is how the constants in
`gapped.kernels` are chosen; setting them takes the host some time, which only the quantizer shows. Usage:
python benchmarks/bench_shapes.py [gates] [masks] [subsets] [quantizer] [--variants] [--device cpu|cuda]
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any
from unittest.mock import patch

import torch
import torch.nn.functional as F
from torch import Tensor

import gapped
from gapped.kernels import gates as gate_kernels
from gapped.kernels import masks as mask_kernels
from gapped.kernels import runner
from gapped.kernels import subsets as subset_kernels
from gapped.kernels import tables as table_kernels
from gapped.subsets import conditional_bernoulli
from gapped_lab.bench.timing import CLOCKS, interleaved, peak_memory
from gapped_lab.bench.torch_ways import first_of_pairs, product_and_sum, recursion, six_options

Program = Callable[..., Tensor]
Variant = tuple[tuple[Any, str, Any], ...]
"""Constants of modules: module, name, value."""


def measured(names: dict[str, Callable[[], object]], device: torch.device, seconds: float) -> Iterator[str]:
    """A line for each call, which is forward and backward."""
    times = interleaved(names, CLOCKS[device.type], seconds)
    for name, call in names.items():
        megabytes = peak_memory(call, device) / 1e6
        yield f"{name:56s} {times[name].median:9.3f} ms {megabytes:9.1f} MB"


def step(program: Program, inputs: tuple[Tensor, ...], variant: Variant = ()) -> Callable[[], object]:
    """A call of `program` and of its backward pass, with these constants."""
    leaves = [each.detach().requires_grad_() for each in inputs]
    grad = torch.randn_like(program(*inputs))

    def call() -> object:
        with ExitStack() as stack:
            for constant in variant:
                stack.enter_context(patch.object(*constant))
            return torch.autograd.grad(program(*leaves), leaves, grad)

    return call


def variants(
    program: Program, inputs: tuple[Tensor, ...], names: tuple[tuple[Any, str], ...], values: list[Any]
) -> dict[str, Callable[[], object]]:
    """Steps with other constants, by what they are."""
    steps = {}
    for each in values:
        constants = tuple((*name, value) for name, value in zip(names, each, strict=True))
        text = ", ".join(f"{name} {value}" for _, name, value in constants)
        steps[f"  {text}"] = step(program, inputs, constants)
    return steps


def gates(device: torch.device, more: bool) -> dict[str, Callable[[], object]]:
    logits = (torch.randn(10**8 if device.type == "cuda" else 10**5, device=device),)
    names = ((gate_kernels, "BLOCK"), (gate_kernels, "WARPS"))
    sizes = [(512, 1), (1024, 4), (4096, 4)]

    def ours(logits: Tensor) -> Tensor:
        return gapped.gate(logits, hard=True)

    return {
        "gates, pairs in torch": step(first_of_pairs, logits),
        "gates, gapped.gate": step(ours, logits),
        "gates, straight-through": step(
            lambda x: gapped.gate(x, hard=True, estimator="straight-through"), logits
        ),
        **variants(ours, logits, names, sizes if more else []),
    }


def masks(device: torch.device, more: bool) -> dict[str, Callable[[], object]]:
    logits = (torch.randn(25 * 10**6 if device.type == "cuda" else 1 << 16, 4, device=device),)
    names = ((mask_kernels, "BLOCK"),)
    sizes = [((512, 2),), ((1024, 2),), ((2048, 4),)]

    def ours(logits: Tensor) -> Tensor:
        return gapped.nm_mask(logits, 2, 4)

    return {
        "2:4 masks, six options in torch": step(six_options, logits),
        "2:4 masks, gapped.nm_mask": step(ours, logits),
        "2:4 masks, by gst": step(lambda x: gapped.nm_mask(x, 2, 4, estimator="gst:gap=1"), logits),
        **variants(ours, logits, names, sizes if more else []),
    }


def subsets(device: torch.device, more: bool) -> dict[str, Callable[[], object]]:
    logits = (torch.randn(4096 if device.type == "cuda" else 16, 1024, device=device),)
    names = ((subset_kernels, "WARPS"), (subset_kernels, "TILE"), (runner, "BLOCK"))
    blocks = (1024, 1), (1024, 2)
    sizes = [(4, 1024, block) for block in blocks]
    sizes += [(warps, tile, runner.BLOCK) for warps, tile in ((1, 256), (2, 512), (4, 2048))]

    def ours(logits: Tensor) -> Tensor:
        return gapped.subset(logits, 64)

    def half(logits: Tensor) -> Tensor:
        return gapped.subset(logits, 512)

    in_torch: Variant = ((conditional_bernoulli, "runs_on_kernels", lambda *_, **__: False),)
    return {
        "64 of 1,024, recursion in torch": step(lambda x: recursion(x, 64), logits),
        "64 of 1,024, gapped.subset without kernels": step(ours, logits, in_torch),
        "64 of 1,024, gapped.subset": step(ours, logits),
        "64 of 1,024, by gst": step(lambda x: gapped.subset(x, 64, estimator="gst:gap=1"), logits),
        "512 of 1,024, gapped.subset without kernels": step(half, logits, in_torch),
        "512 of 1,024, gapped.subset": step(half, logits),
        **variants(ours, logits, names, sizes if more else []),
    }


def quantizer(device: torch.device, more: bool) -> dict[str, Callable[[], object]]:
    frames = 999 if device.type == "cuda" else 50
    inputs = torch.randn(8 * frames, 2, 320, device=device), torch.rand(2, 320, 128, device=device)
    names = ((table_kernels, "BLOCK"), (table_kernels, "WIDEST"), (table_kernels, "WARPS"))
    sizes = [(1024, 128, 4), (512, 64, 2), (4096, 128, 8)]
    estimator = gapped.GST(0.85, gap="auto")

    def ours(logits: Tensor, table: Tensor) -> Tensor:
        return estimator.choose(logits).select(table)

    def einsum(logits: Tensor, table: Tensor) -> Tensor:
        return torch.einsum("...gk,gkd->...gd", F.gumbel_softmax(logits, hard=True), table)

    def plain(logits: Tensor, table: Tensor) -> Tensor:
        return estimator.choose(logits).select(table[0])

    return {
        "quantizer, product and sum in torch": step(product_and_sum, inputs),
        "quantizer, einsum in torch": step(einsum, inputs),
        "quantizer, choose and select": step(ours, inputs),
        "quantizer, one table for both groups": step(plain, inputs),
        **variants(ours, inputs, names, sizes if more else []),
    }


CASES = {"gates": gates, "masks": masks, "subsets": subsets, "quantizer": quantizer}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("cases", nargs="*", help=f"of {', '.join(CASES)}; all by default")
    parser.add_argument("--variants", action="store_true", help="other sizes of blocks, too")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--seconds", type=float, default=0.2, help="for each line")
    options = parser.parse_args()
    device = torch.device(options.device)
    for name in options.cases or CASES:
        for line in measured(CASES[name](device, options.variants), device, options.seconds):
            print(line, flush=True)


if __name__ == "__main__":
    main()
