"""Tensors that take turns as inputs of the calls to be timed, and what becomes of a call that cannot run."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor

from gapped.errors import GappedError, one_line
from gapped_lab.bench.timing import Call, peak_memory

# Inputs take turns: as many sets as fill these bytes, more than any cache, and at most so many.
ROTATED, SETS = 2**27, 16

# How much of an unexpected error a record keeps.
LONGEST = 200

T = TypeVar("T")


def turns(entries: int, dtype: torch.dtype) -> int:
    """How many sets of inputs, each of so many entries, take turns."""
    return min(SETS, max(1, ROTATED // (entries * dtype.itemsize)))


class Inputs:
    """Normal tensors of these shapes and this `scale`; incoming gradients of the shape `result`, if any."""

    def __init__(
        self,
        shapes: Sequence[tuple[int, ...]],
        result: tuple[int, ...] | None,
        dtype: torch.dtype,
        device: torch.device,
        scale: float = 1.0,
    ) -> None:
        generator = torch.Generator(device).manual_seed(0)

        def normal(shape: tuple[int, ...], scale: float = 1.0) -> Tensor:
            return torch.randn(shape, dtype=dtype, device=device, generator=generator).mul_(scale)

        sets = turns(sum(map(math.prod, [*shapes, *([result] if result else [])])), dtype)
        self.device = device
        self.leaves = [tuple(normal(shape, scale).requires_grad_() for shape in shapes) for _ in range(sets)]
        self.gradients = [normal(result) if result else None for _ in range(sets)]

    def prepare(self, forward: Callable[..., Any], alone: bool = False) -> tuple[Call, int]:
        """The call to time, warmed up, and the most bytes that it holds beyond its inputs."""
        call = self.call(forward, alone)
        # The first call compiles, the second finds memory as the next ones will.
        for _ in range(2):
            call()
        return call, peak_memory(call, self.device)

    def call(self, forward: Callable[..., Any], alone: bool = False) -> Call:
        """Forward and backward pass, or the first `alone`; each call uses the next inputs."""
        sets = itertools.cycle(list(zip(self.leaves, self.gradients, strict=True)))

        def forward_backward() -> object:
            leaves, gradient = next(sets)
            if alone or gradient is None:
                with torch.no_grad():
                    return forward(*leaves)
            return torch.autograd.grad(forward(*leaves), leaves, gradient)

        return forward_backward

    def copy(self) -> Call:
        """A copy of one tensor of the first shape: two passes over memory, the unit of the floor."""
        target = torch.empty_like(self.leaves[0][0])
        sources = itertools.cycle([first.detach() for first, *_ in self.leaves])
        return lambda: target.copy_(next(sources))


def attempt(make: Callable[[], T], optional: bool = False) -> tuple[T | None, str]:
    """What `make` returns, and ``ok``; or None, and why: one that cannot run must not lose the others.

    Errors that are not the package's own are failures, unless what runs is `optional`, such as a compiler.
    """
    try:
        return make(), "ok"
    except torch.OutOfMemoryError:
        return None, "too large"
    except (GappedError, NotImplementedError) as problem:
        return None, f"not available: {problem}"
    except Exception as problem:
        if "RESOURCE_EXHAUSTED" in str(problem):  # JAX's word for the same
            return None, "too large"
        if optional:
            return None, f"not available: {type(problem).__name__}"
        return None, f"failed: {one_line(problem)[:LONGEST]}"
