"""Launching kernels: launches that cost the host little."""

from __future__ import annotations

from functools import cache, lru_cache
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor

from gapped.kernels.partition import partition as partition
from gapped.kernels.partition import power as power

_DTYPE = attrgetter("dtype")


class Launch:
    """A kernel with its number of programs, its sizes and its flags; called with tensors and numbers.

    At every launch, Triton finds out what a kernel has to be compiled for, which takes longer than a small
    kernel runs. Here that is done once for each combination of device, dtypes and alignments. Numbers have
    the same types at every call.
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
        entry = self._compiled.get(key)
        if entry is None:
            arguments = (*tensors, *self.sizes, *numbers)
            code = self.kernel[(self.programs,)](*arguments, **self.flags)
            if code is not None:  # None where a hook of Triton's takes over the compilation
                constants = self.kernel.arg_names[len(arguments) :]
                self._compiled[key] = code, tuple(self.flags[name] for name in constants)
            return
        code, constants = entry
        if _has_hooks():
            code[(self.programs, 1, 1)](*tensors, *self.sizes, *numbers, *constants)
            return
        # What Triton does in the line above, without hooks, and with addresses: for a tensor it would ask the
        # driver.
        code.run(
            self.programs, 1, 1, torch._C._cuda_getCurrentRawStream(device), code.function,
            code.packed_metadata, None, None, None, *addresses, *self.sizes, *numbers, *constants,
        )  # fmt: skip


def _has_hooks() -> bool:
    """Whether a launch hook is installed, such as a profiler's."""
    knobs = _runtime_knobs()
    enter, leave = knobs.launch_enter_hook, knobs.launch_exit_hook
    return bool(getattr(enter, "calls", enter) or getattr(leave, "calls", leave))


@cache
def _runtime_knobs() -> Any:
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


# Many entries: some callers have a launch for each of many layers.
@lru_cache(maxsize=8192)
def _launch(kernel: Any, programs: int, sizes: tuple[int, ...], flags: tuple[tuple[str, Any], ...]) -> Launch:
    return Launch(kernel, programs, sizes, dict(flags))
