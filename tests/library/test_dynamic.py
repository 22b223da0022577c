"""What varies from call to call: shapes and temperatures of compiled code; derivatives that nobody has."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from conftest import every_member

import gapped

# torch warns about itself: of its tracer's and its own deprecated calls.
pytestmark = [
    pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:.*torch.jit.* is deprecated"),
]
SIZES = (4, 5, 6)


@pytest.fixture(autouse=True)
def _fresh() -> Iterator[None]:
    """Each test compiles for itself, and leaves nothing."""
    torch.compiler.reset()
    yield
    torch.compiler.reset()


@every_member
def test_compiled_code_takes_batches_of_any_size(name: str) -> None:
    sample = torch.compile(gapped.estimator(name).sample, backend="aot_eager", fullgraph=True)
    for size in SIZES:
        logits = torch.randn(size, 7, requires_grad=True)
        value = sample(logits)
        (value * torch.arange(7.0)).sum().backward()
        assert value.shape == (size, 7)
        assert logits.grad is not None
        assert (logits.grad != 0).any()


@pytest.mark.parametrize("estimator", [gapped.RLOO(4), gapped.DisARMTree(), gapped.DisARMSticks()], ids=repr)
def test_compiled_costs_take_batches_of_any_size(estimator: Any) -> None:
    @torch.compile(backend="aot_eager")
    def loss(logits: torch.Tensor) -> torch.Tensor:
        return gapped.expectation(lambda z: (z @ torch.arange(7.0)) ** 2, logits, estimator).sum()

    for size in SIZES:
        logits = torch.randn(size, 7, requires_grad=True)
        loss(logits).backward()
        assert logits.grad is not None
        assert (logits.grad != 0).any()


def test_compiled_code_takes_a_falling_temperature() -> None:
    sample = torch.compile(lambda x, tau: gapped.gst(x, tau, hard=False), backend="aot_eager", fullgraph=True)
    logits = torch.tensor([[0.0, 1.0, 2.0]])
    assert all(sample(logits, tau).max() == 1 for tau in (1e-3, 9e-4, 8e-4))
    # At so high a temperature all categories are alike.
    assert sample(logits, 1e6).max() < 0.34


@pytest.mark.parametrize("hard", [True, False])
def test_forward_derivatives_are_refused_not_zero(hard: bool) -> None:
    logits = torch.randn(5)
    with pytest.raises(NotImplementedError, match="jvp"):
        torch.func.jvp(lambda x: gapped.gst(x, hard=hard), (logits,), (torch.ones(5),))


def test_forward_derivatives_of_expectations_are_refused_not_zero() -> None:
    def loss(logits: torch.Tensor) -> torch.Tensor:
        return gapped.expectation(lambda z: z[..., 0] ** 2, logits, gapped.RLOO(4)).sum()

    with pytest.raises(NotImplementedError, match="jvp"):
        torch.func.jvp(loss, (torch.randn(3, 5),), (torch.ones(3, 5),))
