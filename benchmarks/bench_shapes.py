"""Time of subsets and masks beside plain torch, forward and backward.

Subsets are compared with a recursion over the elements in log space, which keeps the whole table and
differentiates through it; 2:4 masks with a Gumbel choice among their six options. Usage:
python benchmarks/bench_subsets.py [--rows N] [--groups N] [--device cpu|cuda]
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from itertools import combinations

import torch
import torch.nn.functional as F
from torch import Tensor

import gapped


def recursion(logits: Tensor, k: int) -> Tensor:
    """A subset by a walk back through the table of log-sums, straight through the marginals."""
    with torch.enable_grad():
        leaf = logits if logits.requires_grad else logits.detach().requires_grad_()
        nothing = logits.new_full((len(logits), 1), -1e30)
        table = torch.cat([torch.zeros_like(nothing), nothing.expand(-1, k)], -1)
        tables = [table]
        for score in leaf.unbind(-1):
            table = torch.logaddexp(table, torch.cat([nothing, table[:, :-1] + score.unsqueeze(-1)], -1))
            tables.append(table)
        (marginals,) = torch.autograd.grad(table[:, k].sum(), leaf, create_graph=True)
    left, chosen = torch.full((len(logits), 1), k, device=logits.device), []
    for i in range(logits.shape[-1] - 1, -1, -1):
        # The chance that element i is among those that are left to choose from the first i + 1.
        before = tables[i].detach().gather(-1, (left - 1).clamp(min=0)).squeeze(-1)
        log_p = logits.detach()[:, i] + before - tables[i + 1].detach().gather(-1, left).squeeze(-1)
        takes = (torch.rand_like(log_p) < log_p.exp()) & (left.squeeze(-1) > 0)
        chosen.append(takes)
        left = left - takes.unsqueeze(-1).long()
    sample = torch.stack(chosen[::-1], -1).to(logits.dtype)
    return sample + marginals - marginals.detach()


def six_options(logits: Tensor) -> Tensor:
    """A mask of two of four by a choice among all six."""
    rows = [[float(i in chosen) for i in range(4)] for chosen in combinations(range(4), 2)]
    options = torch.tensor(rows, device=logits.device)
    return F.gumbel_softmax(logits.view(-1, 4) @ options.T, hard=True) @ options


def milliseconds(program: Callable[[Tensor], Tensor], logits: Tensor, repeats: int = 3) -> float:
    """The least of several times, forward and backward."""
    times = []
    for _ in range(repeats):
        leaf = logits.clone().requires_grad_()
        began = time.perf_counter()
        sample = program(leaf)
        sample.backward(torch.ones_like(sample))
        if logits.is_cuda:
            torch.cuda.synchronize()
        times.append(1e3 * (time.perf_counter() - began))
    return min(times)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, default=16, help="rows of 1,024 elements")
    parser.add_argument("--groups", type=int, default=1 << 18, help="groups of four")
    parser.add_argument("--device", default="cpu")
    options = parser.parse_args()
    logits = torch.randn(options.rows, 1024, device=options.device)
    groups = torch.randn(options.groups, 4, device=options.device)
    cases: list[tuple[str, Callable[[Tensor], Tensor], Tensor]] = [
        ("64 of 1,024, recursion in torch", lambda x: recursion(x, 64), logits),
        ("64 of 1,024, gapped.subset", lambda x: gapped.subset(x, 64), logits),
        ("64 of 1,024, gapped.subset by gst", lambda x: gapped.subset(x, 64, estimator="gst"), logits),
        ("2:4, six options in torch", six_options, groups),
        ("2:4, gapped.nm_mask", lambda x: gapped.nm_mask(x, 2, 4), groups),
    ]
    for name, program, inputs in cases:
        print(f"{name:36s} {milliseconds(program, inputs):9.1f} ms")


if __name__ == "__main__":
    main()
