"""Parts of a program that do not need each other, side by side on one GPU."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cache

import torch
from torch import Tensor


class Lanes:
    """Streams that begin where they are made and end where they `join`; elsewhere than on a GPU, nothing.

    Small kernels of one lane run while another's occupy only a part of the GPU. Lane 0 is the current
    stream, and every stream has lanes of its own; those that are open at the same time need a `purpose` each.
    Backward passes run in the lanes of their forward passes: `shared` are the tensors from before that the
    lanes will look at again then, when their memory must not have been given away. What a lane itself has
    allocated needs no such care: a lane goes on only after the current stream has come to the place where
    the lanes are made again, past all uses of what was made before.
    """

    def __init__(self, purpose: str, device: torch.device, shared: Sequence[Tensor] = ()) -> None:
        self._purpose, self._device, self._shared = purpose, device, shared
        self._used: list[torch.cuda.Stream] = []
        if device.type == "cuda":
            self._main = torch.cuda.current_stream(device)
            self._start = self._main.record_event()

    @contextmanager
    def lane(self, number: int) -> Iterator[None]:
        """What happens here is in lane `number`."""
        if number == 0 or self._device.type != "cuda":
            yield
            return
        stream = _stream(self._device, self._main.cuda_stream, self._purpose, number)
        stream.wait_event(self._start)
        for tensor in self._shared:
            tensor.record_stream(stream)
        self._used.append(stream)
        with torch.cuda.stream(stream):
            yield

    def join(self, results: Sequence[Tensor] = ()) -> None:
        """From here on the current stream may use what the lanes made.

        `results` are those tensors that have a backward pass of their own.
        """
        for stream in self._used:
            self._main.wait_stream(stream)
        for tensor in results if self._used else ():
            tensor.record_stream(self._main)


@cache
def _stream(device: torch.device, beside: int, purpose: str, number: int) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
