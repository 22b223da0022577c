"""A step that runs as a CUDA graph on a GPU and as plain calls elsewhere."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from functools import cache

import torch
from torch import Tensor

_WARM_UP = 3


class Captured:
    """A function without arguments or result, recorded at its first call on a GPU and replayed from then on.

    The function works on tensors that stay where they are. `state` names those it changes: recording runs
    the function a few times to warm up, and puts them, and the generator, back as they were. A function
    that does one of several things, by the caller's arrangement, is recorded once for each `program`. The
    graphs share their memory: what one leaves behind, beside its state, another may overwrite.
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
        # What the warm-up took is bound to its stream, and of no use to the graph.
        torch.cuda.empty_cache()
        graph = torch.cuda.CUDAGraph()
        graph.register_generator_state(self._generator)
        shared = next((each.pool() for each in self._graphs.values()), None)
        with torch.cuda.graph(graph, pool=shared):
            self._function()
        return graph


@cache
def _side_stream(device: torch.device) -> torch.cuda.Stream:
    """The one stream for all warming up: cuBLAS keeps a workspace for every stream it has seen."""
    return torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
