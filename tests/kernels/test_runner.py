"""A launch on the host: it asks Triton once, and then calls the compiled code directly."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from kernel_cases import triton
from torch import Tensor
from triton.compiler import CompiledKernel

from gapped.kernels.runner import Launch

FLAGS = {"BLOCK": 64, "MODE": 2, "num_warps": 4}


class OnGPU(Tensor):
    """A tensor that claims to be on a GPU."""

    is_cuda = property(lambda self: True)  # type: ignore[assignment]

    def get_device(self) -> int:
        return 0


class Kernel:
    """A kernel that records how it is launched: through Triton, as compiled code, or directly."""

    arg_names = ("p_from", "p_to", "s_rows", "s_tau", "MODE", "BLOCK")
    function, packed_metadata = "function", "metadata"

    def __init__(self) -> None:
        self.launches: list[tuple[Any, ...]] = []

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        """A kernel takes flags and returns its code, which has a grid of three dimensions and no flags."""

        def launch(*arguments: Any, **flags: Any) -> Kernel:
            self.launches.append(("triton" if flags else "compiled", grid, *arguments, *flags.items()))
            return self

        return launch

    def run(self, *arguments: Any) -> None:
        self.launches.append(("direct", *arguments))

    @property
    def ways(self) -> list[str]:
        return [each[0] for each in self.launches]


@pytest.fixture
def kernel(monkeypatch: pytest.MonkeyPatch) -> Kernel:
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(
        torch._C, "_cuda_getCurrentRawStream", lambda device: f"stream {device}", raising=False
    )
    return Kernel()


def tensors(offset: int = 0, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    memory = torch.zeros(32, dtype=dtype)
    return memory[offset:].as_subclass(OnGPU), torch.zeros(8).as_subclass(OnGPU)


def test_other_dtypes_or_alignments_are_other_code(kernel: Kernel) -> None:
    launch = Launch(kernel, 7, (5,), FLAGS)
    for pair in (tensors(), tensors(1), tensors(dtype=torch.bfloat16), tensors(2), tensors(4)):
        launch(pair, (0.5,))
    # All that counts of an address is whether 16 divides it: the last but one is as the second, the last as
    # the first.
    assert kernel.ways == ["triton"] * 3 + ["direct"] * 2


def test_a_direct_launch_is_what_triton_itself_comes_to(kernel: Kernel) -> None:
    """The installed Triton's compiled code, short of the driver. Flags are in the order of the arguments."""
    calls: list[tuple[Any, ...]] = []
    code = object.__new__(CompiledKernel)
    vars(code).update(module="module", function="function", packed_metadata="metadata", name="name", src=None)
    code._module_pid = None  # no module to unload
    code._run = lambda *arguments: calls.append(arguments)
    launch = Launch(kernel, 7, (5,), FLAGS)
    launch(tensors(), (0.25,))
    assert kernel.launches[0][:2] == ("triton", (7,))
    assert kernel.launches[0][4:] == (5, 0.25, *FLAGS.items())
    pair = tensors()
    launch._compiled = {key: (code, constants) for key, (_, constants) in launch._compiled.items()}
    launch(pair, (0.5,))
    code[(7, 1, 1)](*pair, 5, 0.5, 2, 64, stream="stream 0")
    ours, theirs = calls
    # In between are arguments of hooks, and the hooks.
    assert ours[:6] == theirs[:6]
    assert ours[9:11] == tuple(each.data_ptr() for each in theirs[9:11])
    assert ours[11:] == theirs[11:]


@pytest.mark.parametrize("which", ["launch_enter_hook", "launch_exit_hook"])
def test_hooks_are_told_of_every_launch(kernel: Kernel, which: str, monkeypatch: pytest.MonkeyPatch) -> None:
    launch, runtime = Launch(kernel, 7, (5,), FLAGS), triton.knobs.runtime
    pair = tensors()
    launch(pair, (0.5,))
    chain = getattr(runtime, which)
    chain.add(print)
    try:
        launch(pair, (0.5,))
    finally:
        chain.remove(print)
    launch(pair, (0.5,))
    # A hook may also replace the chain, or the chain be taken away.
    for hook in (print, None):
        monkeypatch.setattr(runtime, which, hook)
        launch(pair, (0.5,))
    assert kernel.ways == ["triton", "compiled", "direct", "compiled", "direct"]
    assert kernel.launches[1] == ("compiled", (7, 1, 1), *pair, 5, 0.5, 2, 64)


def test_a_launch_goes_to_the_device_of_its_tensors(kernel: Kernel, monkeypatch: pytest.MonkeyPatch) -> None:
    current = SimpleNamespace(device=1)

    @contextmanager
    def on_device(device: int) -> Iterator[None]:
        before, current.device = current.device, device
        yield
        current.device = before

    monkeypatch.setattr(torch.cuda, "current_device", lambda: current.device)
    monkeypatch.setattr(torch.cuda, "device", on_device)
    launch = Launch(kernel, 7, (5,), FLAGS)
    for _ in range(2):
        launch(tensors(), (0.5,))
    assert kernel.ways == ["triton", "direct"]
    assert kernel.launches[1][4] == "stream 0"
    assert current.device == 1
