"""N:M masks: groups as subsets, the module that learns them, and the ways in which others write them."""

from __future__ import annotations

import copy
import pickle
from itertools import combinations
from typing import Any

import pytest
import torch
from conftest import assert_close, normal, seeded
from torch import Tensor

import gapped
from gapped.nn import Mask

TWO_OF_FOUR = torch.tensor([[float(i in c) for i in range(4)] for c in combinations(range(4), 2)]).double()


def pulled(logits: Tensor, weight: Tensor, *how: Any, **more: Any) -> tuple[Tensor, Tensor]:
    leaf = logits.detach().requires_grad_()
    mask = gapped.nm_mask(leaf, *how, generator=seeded(), **more)
    return mask.detach(), torch.autograd.grad(mask, leaf, weight)[0]


@pytest.mark.parametrize(("n", "m"), [(2, 4), (1, 4), (4, 8), (1, 2), (3, 3), (0, 4), (5, 16)])
@pytest.mark.parametrize("estimator", [None, "simple", "gst:gap=1"])
def test_each_group_is_a_subset(n: int, m: int, estimator: str | None) -> None:
    logits, weight = normal(3, 2 * m), normal(3, 2 * m, seed=2)
    mask, gradient = pulled(logits, weight, n, m, 0.7, estimator=estimator)
    assert ((mask == 0) | (mask == 1)).all()
    assert (mask.unflatten(-1, (-1, m)).sum(-1) == n).all()
    leaf = logits.unflatten(-1, (-1, m)).requires_grad_()
    subset = gapped.subset(leaf, n, 0.7, estimator=estimator or "simple", generator=seeded())
    (expected,) = torch.autograd.grad(subset, leaf, weight.view_as(leaf))
    assert torch.equal(mask, subset.detach().flatten(-2))
    assert torch.equal(gradient, expected.flatten(-2))


def test_soft_masks_are_the_surrogate() -> None:
    logits = normal(3, 8)
    soft = gapped.nm_mask(logits, 2, 4, 0.5, False)
    assert_close(soft, gapped.subsets.marginals(logits.view(3, 2, 4) / 0.5, 2).flatten(-2), 1e-12)


@pytest.mark.parametrize("tau", [1.0, 0.5])
def test_masks_are_choices_whose_logits_are_sums(tau: float) -> None:
    """A logit for each of the six masks of four entries, set to the sum of its entries' logits."""
    logits, weight = normal(5, 4), normal(5, 4, seed=2)
    _, gradient = pulled(logits, weight, 2, 4, tau)
    leaf = logits.clone().requires_grad_()
    options = gapped.straight_through(leaf @ TWO_OF_FOUR.T, tau, hard=True) @ TWO_OF_FOUR
    assert_close(gradient, torch.autograd.grad(options, leaf, weight)[0], 1e-12)
    soft = torch.softmax(leaf.detach() @ TWO_OF_FOUR.T / tau, -1) @ TWO_OF_FOUR
    assert_close(gapped.nm_mask(logits, 2, 4, tau, False), soft, 1e-12)


def test_the_module_learns_which_entries_to_keep() -> None:
    torch.manual_seed(0)
    target = torch.tensor([[1.0, 0.1, 2.0, -0.2], [0.1, 3.0, 0.2, -1.5]])
    mask = Mask((2, 4), n=2, m=4)
    optimizer = torch.optim.Adam(mask.parameters(), 0.1)
    for step in range(80):
        mask.tau = 1.0 - step / 160
        loss = (target * (1 - mask())).square().sum()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    mask.eval()
    assert torch.equal(mask(), torch.tensor([[1.0, 0, 1, 0], [0, 1, 0, 1]]))
    assert not mask().requires_grad
    assert torch.equal(copy.deepcopy(mask)(), mask())
    assert torch.equal(pickle.loads(pickle.dumps(mask))(), mask())
    assert repr(mask) == "Mask((2, 4), n=2, m=4, tau=0.50625, hard=True)"


def test_the_module_draws_while_training() -> None:
    mask = Mask((4, 8), 2, 4, 0.5, False, estimator="gst:gap=1")
    expected = gapped.nm_mask(mask.logits, 2, 4, 0.5, False, estimator="gst:gap=1", generator=seeded())
    assert torch.equal(mask(generator=seeded()), expected)
    assert mask().requires_grad
    assert list(mask.state_dict()) == ["logits"]
    state = torch.get_rng_state()
    assert (mask.eval()().unflatten(-1, (-1, 4)).sum(-1) == 2).all()
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((2, 3), "logits: got a last axis of 8, expected a multiple of m=3"),
        ((5, 4), "n: got 5, expected an integer from 0 to 4"),
        ((2, 0), "m: got 0, expected a positive integer"),
        ((2, 4, -1.0), "tau: got -1.0"),
    ],
)
def test_bad_arguments(arguments: tuple[Any, ...], message: str) -> None:
    with pytest.raises(gapped.GappedError, match=message):
        gapped.nm_mask(torch.zeros(2, 8), *arguments)


def test_bad_arguments_of_the_module() -> None:
    with pytest.raises(gapped.GappedError, match="shape: got a last axis of 6, expected a multiple of m=4"):
        Mask((2, 6), 2, 4)
    with pytest.raises(gapped.GappedError, match=r"shape: got \(\)"):
        Mask((), 2, 4)
    # In the state it would look learned, and stay as it is.
    with pytest.raises(gapped.GappedError, match=r"tau: got .* that requires grad, .* without gradient"):
        Mask((2, 8), 2, 4, torch.nn.Parameter(torch.tensor(1.0)))


def test_the_best_mask_keeps_the_conventions() -> None:
    mask = gapped.nn.Mask((4,), 2, 4).eval()
    for logits, expected in (
        ([-torch.inf] * 3 + [0.0], [0.0, 0.0, 0.0, 1.0]),
        ([torch.nan, 1.0, 2.0, 0.0], [torch.nan] * 4),
        ([3.0, 1.0, 2.0, 0.0], [1.0, 0.0, 1.0, 0.0]),
    ):
        mask.logits.data.copy_(torch.tensor(logits))
        assert torch.equal(mask().isnan(), torch.tensor(expected).isnan())
        assert torch.equal(mask().nan_to_num(), torch.tensor(expected).nan_to_num())


def test_several_elements_are_drawn_and_not_the_largest() -> None:
    for call in (
        lambda e: gapped.subset(torch.zeros(4), 2, estimator=e),
        lambda e: gapped.nm_mask(torch.zeros(4), 2, 4, estimator=e),
    ):
        with pytest.raises(gapped.GappedError, match="draw: got 'argmax', expected 'sample'"):
            call("gst:draw=argmax")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_the_most_probable_mask_is_found_in_half_precision(dtype: torch.dtype) -> None:
    """Relative to a large logit, the other two are equal in half precision."""
    mask = gapped.nn.Mask((4,), 2, 4).eval()
    with torch.no_grad():
        mask.logits.copy_(torch.tensor([1000.0, 0.125, 0.25, -3.0]))
    assert mask.to(dtype)().tolist() == [1.0, 0.0, 1.0, 0.0]
    assert mask().dtype == dtype


def test_a_number_is_the_shape_of_a_vector() -> None:
    assert torch.equal(Mask(8, 2, 4)(seeded()), Mask((8,), 2, 4)(seeded()))
    with pytest.raises(gapped.GappedError, match=r"shape: got a last axis of 6, expected a multiple of m=4"):
        Mask(6, 2, 4)
