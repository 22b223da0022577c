"""Low-overhead launches: how rows are divided among programs, and compiled kernels kept for each shape.

Importing this file needs no torch, as `gapped.jax` divides rows by it, too.
"""

from __future__ import annotations

from functools import cache, lru_cache
from operator import attrgetter
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor

# Elements of a block and warps that share it: the fastest on an H200 (`gapped bench --constant`).
BLOCK = (1024, 4)
# The same for samples of rows of some lengths: a warp sums up a row by itself, or fewer warps have a long one.
ROW_BLOCKS = {256: (512, 1), 512: (512, 1), 4096: (1024, 1)}
# This many programs fill the GPU. With fewer rows, blocks are smaller.
PROGRAMS = 256
LONGEST_BLOCK = 4096
"""Rows up to this length are held by one program at once; longer ones are read in chunks."""

_DTYPE = attrgetter("dtype")


def power(count: int) -> int:
    """The next power of two, at least 2."""
    return max(1 << (count - 1).bit_length(), 2)


def partition(rows: int, categories: int, block: tuple[int, int] | None = None) -> tuple[int, dict[str, int]]:
    """The number of programs, and the size of their blocks; `block` stands in for `BLOCK`."""
    elements, warps = block or BLOCK
    columns = power(categories)
    height = max(min(elements // columns, 1 << (-(-rows // PROGRAMS) - 1).bit_length()), 1)
    # A row that is longer than a block has more threads instead.
    warps = min(max(height * columns * warps // elements, 1), 16)
    return -(-rows // height), {"BLOCK_ROWS": height, "BLOCK_COLUMNS": columns, "num_warps": warps}


class Launch:
    """A kernel with its number of programs, its sizes and its flags; called with tensors and numbers.

    At every launch, Triton finds out how a kernel has to be specialised, which takes longer than a small
    kernel runs. `Launch` does it once for each combination of device, dtypes and alignments. Numbers have
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
        import torch

        device = tensors[0].get_device()
        if device != torch.cuda.current_device():
            with torch.cuda.device(device):
                self(tensors, numbers)
            return
        addresses = [*map(torch.Tensor.data_ptr, tensors)]
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
        # Triton does this in the line above, besides hooks, and asks the driver for the address of a tensor.
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
