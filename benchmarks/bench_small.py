"""Small batches on one CPU thread, where policies and routers live: microseconds a call, and times torch's.

Usage: python benchmarks/bench_small.py
Calls take turns, a batch of each; the fastest batch counts, so that a busy machine disturbs little.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

import gapped

SAMPLERS: dict[str, Callable[..., Tensor]] = {
    "F.gumbel_softmax": F.gumbel_softmax,
    "gumbel_softmax": gapped.gumbel_softmax,
    "straight_through": gapped.straight_through,
    "gst": gapped.gst,
    "reinmax": gapped.reinmax,
    "decoupled_gumbel_softmax": gapped.decoupled_gumbel_softmax,
}
TURNS, CALLS = 150, 30


def microseconds(
    calls: dict[str, Callable[[], object]], clock: Callable[[], float] = time.perf_counter
) -> dict[str, float]:
    """Microseconds of each call, by its fastest batch."""
    best = dict.fromkeys(calls, float("inf"))
    for _ in range(TURNS):
        for name, call in calls.items():
            began = clock()
            for _ in range(CALLS):
                call()
            best[name] = min(best[name], (clock() - began) / CALLS * 1e6)
    return best


def main() -> None:
    torch.set_num_threads(1)
    for shape in ((1, 2), (32, 10)):
        logits, weight = torch.randn(shape, requires_grad=True), torch.randn(shape)
        fixed = logits.detach()
        kinds: dict[str, Callable[[Callable[..., Tensor]], object]] = {
            "no gradient": lambda sampler, x=fixed: sampler(x, tau=0.5, hard=True),
            "forward and backward": lambda sampler, x=logits, g=weight: torch.autograd.grad(
                sampler(x, tau=0.5, hard=True), x, g
            ),
        }
        for kind, run in kinds.items():
            times = microseconds({name: lambda f=f, run=run: run(f) for name, f in SAMPLERS.items()})
            reference = times["F.gumbel_softmax"]
            print(f"{shape}, {kind}: ", end="")
            print(", ".join(f"{name} {t:.0f} us ({t / reference:.2f})" for name, t in times.items()))


if __name__ == "__main__":
    main()
