"""What the host does around kernels, without a GPU: microseconds a call, where launches do nothing.

Usage: python benchmarks/bench_host.py [--profile CALL]
CPU tensors claim to be on a GPU, and the compiled code of every kernel is a no-op; what torch itself computes
is real but tiny. The results are meaningless numbers; the time is that of Python, autograd and torch's own
operators. torch's `F.gumbel_softmax` beside them is the unit of the host's speed. With `--profile`, the
functions that one of the calls spends its time in.
"""

from __future__ import annotations

import argparse
import cProfile
import pstats
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from bench_small import microseconds
from torch import Tensor
from triton.runtime import JITFunction

import gapped
from gapped.kernels import runner


class Code:
    """Compiled code that does nothing."""

    function = packed_metadata = None

    @staticmethod
    def run(*arguments: Any) -> None:
        pass


def pretend() -> None:
    """Make every tensor one of a GPU's, and every launch a no-op."""
    Tensor.is_cuda = property(lambda self: True)  # type: ignore[assignment, method-assign]
    torch.cuda.current_device = lambda: -1  # the number of the CPU
    torch._C._cuda_getCurrentRawStream = lambda device: 0
    JITFunction.run = lambda *arguments, **options: Code


def calls() -> dict[str, Callable[[], object]]:
    """What is timed, by name; each line of the quantizer contains the ones before."""
    logits, tables = (torch.randn(size, requires_grad=True) for size in ((4, 2, 8), (2, 8, 4)))
    grad, estimator = torch.randn(4, 2, 4), gapped.GST(0.85, gap="auto")
    hidden, rows, some = torch.randn(2, 4), torch.randn(4, 8, requires_grad=True), torch.randn(4, 8)
    weight, long = (torch.randn(size, requires_grad=True) for size in ((8, 4), (runner.LONGEST_BLOCK + 1, 1)))

    def soft() -> Tensor:
        return torch.einsum("ngk,gkd->ngd", F.gumbel_softmax(logits, hard=True), tables)

    def decode(weight: Tensor) -> Tensor:
        with torch.no_grad():
            return gapped.linear_choice(hidden[:, : weight.shape[1]], weight).index

    return {
        "F.gumbel_softmax, einsum, backward": lambda: torch.autograd.grad(soft(), (logits, tables), grad),
        "choose": lambda: estimator.choose(logits),
        "choose, select": lambda: estimator.choose(logits).select(tables),
        "choose, select, backward": lambda: torch.autograd.grad(
            estimator.choose(logits).select(tables), (logits, tables), grad
        ),
        "F.linear": lambda: F.linear(hidden, weight),
        "decoding, 8 categories": lambda: decode(weight),
        "decoding, long rows": lambda: decode(long),
        "F.gumbel_softmax, backward": lambda: torch.autograd.grad(
            F.gumbel_softmax(rows, hard=True), rows, some
        ),
        "gst": lambda: gapped.gst(rows, hard=True),
        "gst, backward": lambda: torch.autograd.grad(gapped.gst(rows, hard=True), rows, some),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--profile", metavar="CALL", help="the name of a line")
    name = parser.parse_args().profile
    torch.set_num_threads(1)
    every = calls()
    pretend()
    for call in every.values():
        call()
    if name is None:
        # The time of this process: others may be running.
        for line, each in microseconds(every, time.process_time).items():
            print(f"{line:36} {each:6.1f} us")
        return
    with cProfile.Profile() as profile:
        for _ in range(2000):
            every[name]()
    pstats.Stats(profile).sort_stats("tottime").print_stats(40)


if __name__ == "__main__":
    main()
