"""Running a kernel at little cost to the host: what Triton does at every launch is done once and kept."""

from __future__ import annotations

from functools import cache, lru_cache
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor

_DTYPE = attrgetter("dtype")


class Launch:
    """A kernel with its programs, its sizes and its flags: what is left are tensors and numbers.

    Triton finds out at every launch what a kernel has to be compiled for, which takes longer than a small
    kernel runs. Here that is done once for each combination of what it still depends on. Numbers are of the
    same types at every call.
    """

    def __init__(self, kernel: Any, programs: int, sizes: tuple[int, ...], flags: dict[str, Any]) -> None:
        self.kernel, self.programs, self.sizes, self.flags = kernel, programs, sizes, flags
        self._compiled: dict[tuple[object, ...], tuple[Any, tuple[Any, ...]]] = {}

    def __call__(self, tensors: tuple[Tensor, ...], numbers: tuple[float, ...]) -> None:
        """Launch it on the device of the tensors."""
        if not tensors[0].is_cuda:
            self.kernel[(self.programs,)](*tensors, *self.sizes, *numbers, **self.flags)
            return
        device = tensors[0].get_device()
        if device != torch.cuda.current_device():
            with torch.cuda.device(device):
                self(tensors, numbers)
            return
        addresses = [*map(Tensor.data_ptr, tensors)]
        key = (device, *map(_DTYPE, tensors), *[address % 16 == 0 for address in addresses])
        known = self._compiled.get(key)
        if known is None:
            arguments = (*tensors, *self.sizes, *numbers)
            made = self.kernel[(self.programs,)](*arguments, **self.flags)
            if made is not None:  # as it is where a hook of Triton's takes the compiling over
                constants = self.kernel.arg_names[len(arguments) :]
                self._compiled[key] = made, tuple(self.flags[name] for name in constants)
            return
        made, constants = known
        if _watched():
            made[(self.programs, 1, 1)](*tensors, *self.sizes, *numbers, *constants)
            return
        # What Triton comes to in the line above, but nobody is told, and there are addresses: about a tensor
        # it would ask the driver.
        made.run(
            self.programs, 1, 1, torch._C._cuda_getCurrentRawStream(device), made.function,
            made.packed_metadata, None, None, None, *addresses, *self.sizes, *numbers, *constants,
        )  # fmt: skip


def _watched() -> bool:
    """Whether someone, such as a profiler, wants to know of every launch."""
    hooks = _hooks()
    enter, leave = hooks.launch_enter_hook, hooks.launch_exit_hook
    return bool(getattr(enter, "calls", enter) or getattr(leave, "calls", leave))


@cache
def _hooks() -> Any:
    from triton import knobs

    return knobs.runtime


def run(
    kernel: Any,
    programs: int,
    pointers: tuple[Tensor, ...],
    sizes: tuple[int, ...],
    numbers: tuple[float, ...],
    flags: dict[str, Any],
) -> None:
    """Launch a kernel on the device of its tensors."""
    _launch(kernel, programs, sizes, tuple(flags.items()))(pointers, numbers)


# Many: some callers have a launch for each of many layers.
@lru_cache(maxsize=8192)
def _launch(kernel: Any, programs: int, sizes: tuple[int, ...], flags: tuple[tuple[str, Any], ...]) -> Launch:
    return Launch(kernel, programs, sizes, dict(flags))
