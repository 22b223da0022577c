"""A step that runs as a CUDA graph on a GPU and as a plain call on a CPU."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from functools import cache

import torch
from torch import Tensor

_WARM_UP = 3


class Captured:
    """A function without arguments or result, recorded at its first call on a GPU and replayed from then on.

    The function works on tensors that keep their addresses. `state` returns those it changes: recording runs
    the function a few times to warm up, and then restores them and the generator. A function that does one
    of several things, depending on what the caller has set up, is recorded once for each `program`. The
    graphs share one memory pool: apart from the state, one may overwrite what another has written.
    """

    def __init__(
        self, function: Callable[[], None], generator: torch.Generator, state: Callable[[], Sequence[Tensor]]
    ) -> None:
        self._function = function
        self._generator = generator
        self._state = state
        self._graphs: dict[Hashable, torch.cuda.CUDAGraph] = {}

    def __call__(self, program: Hashable = None) -> None:
        if self._generator.device.type != "cuda":
            self._function()
            return
        if program not in self._graphs:
            self._graphs[program] = self._record()
        self._graphs[program].replay()

    def _record(self) -> torch.cuda.CUDAGraph:
        before = [tensor.detach().clone() for tensor in self._state()]
        noise = self._generator.get_state()
        side = _side_stream(self._generator.device)
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(_WARM_UP):
                self._function()
        torch.cuda.current_stream().wait_stream(side)
        with torch.no_grad():
            for tensor, value in zip(self._state(), before, strict=True):
                tensor.copy_(value)
        del before
        self._generator.set_state(noise)
        # Memory that the warm-up allocated belongs to its stream: the graph cannot use it.
        torch.cuda.empty_cache()
        graph = torch.cuda.CUDAGraph()
        graph.register_generator_state(self._generator)
        shared = next((each.pool() for each in self._graphs.values()), None)
        with torch.cuda.graph(graph, pool=shared):
            self._function()
        return graph


@cache
def _side_stream(device: torch.device) -> torch.cuda.Stream:
    """One stream for every warm-up: cuBLAS keeps a workspace for each stream that it has run on."""
    return torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
