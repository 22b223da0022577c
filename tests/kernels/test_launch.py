"""What the host does at a call: it launches what it kept, and keeps nothing that changes or is someone's."""

from __future__ import annotations

import gc
import os
import weakref
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"

import gapped
from gapped.kernels import launch
from gapped.kernels.launch import Fused
from gapped.kernels.runner import Launch
from gapped.pathwise import cached_estimator

triton = pytest.importorskip("triton", reason="the kernels need Triton")
knobs = pytest.importorskip("triton.knobs", reason="needs Triton")

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


class Elsewhere(Tensor):
    """A tensor that says it is on a GPU."""

    is_cuda = property(lambda self: True)  # type: ignore[assignment]

    def get_device(self) -> int:
        return 0


class Kernel:
    """A kernel that notes how it is launched: through Triton, as compiled code, or directly."""

    arg_names = ("p_from", "p_to", "s_rows", "s_tau", "MODE", "BLOCK")

    def __init__(self) -> None:
        self.launches: list[tuple[Any, ...]] = []

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        def compiled(grid: tuple[int, ...]) -> Any:
            return lambda *arguments: self.launches.append(("compiled", grid, *arguments))

        def triton(*arguments: Any, **flags: Any) -> Any:
            self.launches.append(("triton", grid, *arguments, flags))
            return Made(self.launches, compiled)

        return triton


class Made:
    """What a kernel is compiled to."""

    function, packed_metadata = "function", "metadata"

    def __init__(self, launches: list[tuple[Any, ...]], compiled: Any) -> None:
        self._launches, self._compiled = launches, compiled

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        return self._compiled(grid)

    def run(self, *arguments: Any) -> None:
        self._launches.append(("direct", *arguments))


@pytest.fixture
def kernel(monkeypatch: pytest.MonkeyPatch) -> Kernel:
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(
        torch._C, "_cuda_getCurrentRawStream", lambda device: f"stream {device}", raising=False
    )
    return Kernel()


def tensors(offset: int = 0, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    memory = torch.zeros(32, dtype=dtype)
    return memory[offset:].as_subclass(Elsewhere), torch.zeros(8).as_subclass(Elsewhere)


def test_a_launch_asks_triton_once(kernel: Kernel) -> None:
    kept = Launch(kernel, 7, (5,), {"BLOCK": 64, "MODE": 2, "num_warps": 4})
    one, other = tensors(), tensors()
    kept(one, (0.5,))
    kept(other, (0.25,))
    first, second = kernel.launches
    assert first[:2] == ("triton", (7,))
    assert first[4:] == (5, 0.5, {"BLOCK": 64, "MODE": 2, "num_warps": 4})
    # Exactly what Triton hands on, with flags in the order of the kernel's arguments; no hook is called.
    handed_on = (7, 1, 1, "stream 0", "function", "metadata", None, None, None)
    assert second == ("direct", *handed_on, *(each.data_ptr() for each in other), 5, 0.25, 2, 64)


def test_other_dtypes_or_alignments_are_other_code(kernel: Kernel) -> None:
    kept = Launch(kernel, 7, (5,), {"BLOCK": 64, "MODE": 2})
    for each in (tensors(), tensors(1), tensors(dtype=torch.bfloat16), tensors(2), tensors(4)):
        kept(each, (0.5,))
    # All that counts of an address is whether 16 divides it: the last but one is as the second, the last as
    # the first.
    assert [each[0] for each in kernel.launches] == ["triton"] * 3 + ["direct"] * 2


def test_a_direct_launch_is_what_triton_itself_comes_to(kernel: Kernel) -> None:
    """The installed Triton's compiled code, short of the driver."""
    from triton.compiler import CompiledKernel

    seen: list[tuple[Any, ...]] = []
    code = object.__new__(CompiledKernel)
    vars(code).update(module="module", function="function", packed_metadata="metadata", name="name", src=None)
    code._module_pid = None  # no module to unload
    code._run = lambda *arguments: seen.append(arguments)
    kept = Launch(kernel, 7, (5,), {"BLOCK": 64, "MODE": 2})
    pair = tensors()
    kept(pair, (0.5,))
    kept._compiled = {key: (code, constants) for key, (_, constants) in kept._compiled.items()}
    kept(pair, (0.5,))
    code[(7, 1, 1)](*pair, 5, 0.5, 2, 64, stream="stream 0")
    ours, theirs = seen
    # Between are what hooks are told, and the hooks.
    assert ours[:6] == theirs[:6]
    assert ours[9:11] == tuple(each.data_ptr() for each in theirs[9:11])
    assert ours[11:] == theirs[11:]


@pytest.mark.parametrize("which", ["launch_enter_hook", "launch_exit_hook"])
def test_who_wants_to_know_of_launches_is_told(
    kernel: Kernel, which: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept = Launch(kernel, 7, (5,), {"BLOCK": 64, "MODE": 2})
    pair = tensors()
    kept(pair, (0.5,))
    chain = getattr(knobs.runtime, which)
    chain.add(print)
    try:
        kept(pair, (0.5,))
    finally:
        chain.remove(print)
    kept(pair, (0.5,))
    # A hook may also be set in the place of the chain, or the chain be taken away.
    monkeypatch.setattr(knobs.runtime, which, print)
    kept(pair, (0.5,))
    monkeypatch.setattr(knobs.runtime, which, None)
    kept(pair, (0.5,))
    assert [each[0] for each in kernel.launches] == ["triton", "compiled", "direct", "compiled", "direct"]
    assert kernel.launches[1] == ("compiled", (7, 1, 1), *pair, 5, 0.5, 2, 64)


def test_a_launch_goes_to_the_device_of_its_tensors(kernel: Kernel, monkeypatch: pytest.MonkeyPatch) -> None:
    current = SimpleNamespace(device=1)

    class Device:
        def __init__(self, device: int) -> None:
            self.device = device

        def __enter__(self) -> None:
            self.before, current.device = current.device, self.device

        def __exit__(self, *problem: object) -> None:
            current.device = self.before

    monkeypatch.setattr(torch.cuda, "current_device", lambda: current.device)
    monkeypatch.setattr(torch.cuda, "device", Device)
    kept = Launch(kernel, 7, (5,), {"BLOCK": 64, "MODE": 2})
    for _ in range(2):
        kept(tensors(), (0.5,))
    assert [each[0] for each in kernel.launches] == ["triton", "direct"]
    assert kernel.launches[1][4] == "stream 0"
    assert current.device == 1


def test_an_annealed_temperature_needs_no_new_launch() -> None:
    logits = torch.randn(6, 5, device=DEVICE, requires_grad=True)
    before = None
    for tau in (1, 0.75, 0.5):
        gapped.gst(logits, tau, True, gap=tau, backend="triton").square().sum().backward()
        made = [kept.cache_info().currsize for kept in (launch._forward, launch._backward)]
        assert before in (None, made)
        before = made


def test_a_whole_temperature_leaves_the_next_its_own() -> None:
    """On a GPU the first decides what is compiled."""
    logits, grad = torch.randn(2, 7, 11, device=DEVICE)
    key = torch.tensor([3], device=DEVICE)
    index = launch.forward(logits, key, Fused("gst", 1)).chosen
    whole, half, real = (
        launch.backward(logits, index, None, key, grad, Fused("gst", tau, gap=1.0)) for tau in (1, 0.5, 1.0)
    )
    assert torch.equal(whole, real)
    assert not torch.allclose(whole, half)


def test_whole_numbers_are_handed_on_as_real_ones() -> None:
    """Triton would compile a 1 into the code, which then has no use for the next temperature."""
    assert all(type(number) is float for number in Fused("decoupled", 1, gap=2, tau_forward=1).numbers)
    assert Fused("gst", torch.tensor(3.0)).numbers == (0.0, 0.0, 1.0)


def test_tensors_are_not_kept() -> None:
    tau = torch.full((6,), 0.5, device=DEVICE)
    seen = weakref.ref(tau)
    logits = torch.randn(6, 5, device=DEVICE, requires_grad=True)
    gapped.gst(logits, tau, True, gap=tau, backend="triton").sum().backward()
    del tau
    gc.collect()
    assert seen() is None


def test_functions_make_the_same_estimator_once() -> None:
    one = cached_estimator(gapped.GST, tau=0.5, hard=True)
    assert cached_estimator(gapped.GST, tau=0.5, hard=True) is one
    assert cached_estimator(gapped.GST, tau=0.5, hard=False) is not one
    assert cached_estimator(gapped.ReinMax, tau=0.5, hard=True) is not one
    assert type(cached_estimator(gapped.GST, tau=1, hard=True).tau) is int
    assert type(cached_estimator(gapped.GST, tau=1.0, hard=True).tau) is float
    tau = torch.tensor(0.5)
    assert cached_estimator(gapped.GST, tau=tau) is not cached_estimator(gapped.GST, tau=tau)


@pytest.mark.parametrize("wrong", [{"hard": 1}, {"gap": [1.0]}, {"gap": True}, {"tau": True}, {"detach": 1}])
def test_what_was_accepted_once_does_not_let_its_like_pass(wrong: dict[str, Any]) -> None:
    gapped.gst(torch.zeros(3), 1, True)
    with pytest.raises(gapped.GappedError, match=next(iter(wrong))):
        gapped.gst(torch.zeros(3), **{"tau": 1, "hard": True, **wrong})
