"""The host keeps some things between calls: launches and estimators, but no tensors or temperatures."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest
import torch
from kernel_cases import DEVICE, backward, key

import gapped
from gapped.kernels.sampling import launch
from gapped.kernels.sampling.fused import Fused
from gapped.pathwise import cached_estimator


def test_an_annealed_temperature_needs_no_new_launch() -> None:
    logits = torch.randn(6, 5, device=DEVICE, requires_grad=True)
    before = None
    for tau in (1, 0.75, 0.5):
        gapped.gst(logits, tau, True, gap=tau, backend="triton").square().sum().backward()
        sizes = [each.cache_info().currsize for each in (launch._forward, launch._backward)]
        assert before in (None, sizes)
        before = sizes


def test_a_whole_temperature_leaves_the_next_its_own() -> None:
    """Triton would compile a 1 into the code, which then has no use for the next temperature."""
    assert all(type(number) is float for number in Fused("decoupled", 1, gap=2, tau_forward=1).numbers)
    assert Fused("gst", torch.tensor(3.0)).numbers == (0.0, 0.0, 1.0)
    logits, grad = torch.randn(2, 7, 11, device=DEVICE)
    sample = launch.forward(logits, key(), Fused("gst", 1))
    whole, half, real = (backward(logits, sample, grad, Fused("gst", tau, gap=1.0)) for tau in (1, 0.5, 1.0))
    assert torch.equal(whole, real)
    assert not torch.allclose(whole, half)


def test_tensors_are_not_kept() -> None:
    tau = torch.full((6,), 0.5, device=DEVICE)
    reference = weakref.ref(tau)
    logits = torch.randn(6, 5, device=DEVICE, requires_grad=True)
    gapped.gst(logits, tau, True, gap=tau, backend="triton").sum().backward()
    del tau
    gc.collect()
    assert reference() is None


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
