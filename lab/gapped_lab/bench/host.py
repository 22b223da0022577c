"""What the host does around kernels, without a GPU: microseconds a call, where launches do nothing.

CPU tensors claim to be on a GPU, and the compiled code of every kernel is a no-op; what torch itself computes
is real but tiny. The results are meaningless numbers; the time is that of Python, autograd and torch's own
operators. torch's `F.gumbel_softmax` beside them is the unit of the host's speed.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

import gapped
from gapped.errors import require

_TURNS, _CALLS = 150, 30


class _Code:
    """Compiled code that does nothing."""

    function = packed_metadata = None

    @staticmethod
    def run(*arguments: Any) -> None:
        pass


def host_lines() -> Iterator[str]:
    """A line for each call. Afterwards this process is of no other use."""
    require("--host", "triton", extra="triton")
    torch.set_num_threads(1)
    calls = _calls()
    _pretend()
    for name, best in _microseconds(calls).items():
        yield f"{name:36} {best:6.1f} us"


def _pretend() -> None:
    """Make every tensor one of a GPU's, and every launch a no-op."""
    from triton.runtime import JITFunction

    Tensor.is_cuda = property(lambda self: True)  # type: ignore[assignment]
    Tensor.is_cpu = property(lambda self: False)  # type: ignore[assignment]
    torch.cuda.current_device = lambda: -1  # the number of the CPU
    torch._C._cuda_getCurrentRawStream = lambda device: 0
    JITFunction.run = lambda *arguments, **options: _Code


def _calls() -> dict[str, Callable[[], object]]:
    """What is timed, by name; each line of the quantizer contains the ones before."""
    from gapped.kernels.runner import LONGEST_BLOCK

    logits, tables = (torch.randn(size, requires_grad=True) for size in ((4, 2, 8), (2, 8, 4)))
    grad, estimator = torch.randn(4, 2, 4), gapped.GapMax()
    hidden, rows, some = torch.randn(2, 4), torch.randn(4, 8, requires_grad=True), torch.randn(4, 8)
    weight, long = torch.randn(8, 4), torch.randn(LONGEST_BLOCK + 1, 1)

    def product() -> Tensor:
        return torch.einsum("ngk,gkd->ngd", F.gumbel_softmax(logits, hard=True), tables)

    def selected() -> Tensor:
        return estimator.choose(logits).select(tables)

    def backward(sample: Callable[[Tensor], Tensor]) -> Callable[[], object]:
        return lambda: torch.autograd.grad(sample(rows), rows, some)

    return {
        "F.gumbel_softmax, einsum, backward": lambda: torch.autograd.grad(product(), (logits, tables), grad),
        "choose": lambda: estimator.choose(logits),
        "choose, select": selected,
        "choose, select, backward": lambda: torch.autograd.grad(selected(), (logits, tables), grad),
        "F.linear": lambda: F.linear(hidden, weight),
        "decoding, 8 categories": lambda: estimator.choose_linear(hidden, weight).index,
        "decoding, long rows": lambda: estimator.choose_linear(hidden[:, :1], long).index,
        "F.gumbel_softmax, backward": backward(lambda rows: F.gumbel_softmax(rows, hard=True)),
        "sample": lambda: estimator.sample(rows),
        "sample, backward": backward(estimator.sample),
    }


def _microseconds(calls: dict[str, Callable[[], object]]) -> dict[str, float]:
    """Processor time of each call, by its fastest batch: others may be running, and some calls warm up."""
    best = dict.fromkeys(calls, float("inf"))
    for _ in range(_TURNS):
        for name, call in calls.items():
            began = time.process_time()
            for _ in range(_CALLS):
                call()
            best[name] = min(best[name], (time.process_time() - began) / _CALLS * 1e6)
    return best
