"""What the Bernoulli distribution has of its own: certain gates, numbers, broadcasting, half precision."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from conftest import assert_all_close, assert_close, normal, seeded
from torch import distributions as td

import gapped
from gapped.distributions import Bernoulli

ODDS = normal(3, 2)
INF = math.inf


def test_the_mode_of_a_fair_coin_is_torchs() -> None:
    probs = torch.tensor([0.2, 0.5, 0.8])
    ours, theirs = (kind(probs).mode for kind in (Bernoulli, td.Bernoulli))
    torch.testing.assert_close(ours, theirs, equal_nan=True)


def test_the_derivative_of_log_prob_by_the_sample() -> None:
    value = torch.tensor([0.0, 1.0, 1.0], dtype=torch.float64, requires_grad=True)
    odds = torch.tensor([0.3, -1.2, INF], dtype=torch.float64)
    (slope,) = torch.autograd.grad(Bernoulli(logits=odds).log_prob(value).sum(), value)
    assert_close(slope[:2], odds[:2])
    assert slope[2].isfinite()


# Certain gates and masks

CERTAIN = torch.tensor([INF, -INF, 0.7], dtype=torch.float64)


@pytest.mark.parametrize("given", ["logits", "probs", "mask"])
def test_certain_gates_are_exact(given: str) -> None:
    """0 log 0 = 0: neither their entropy nor any gradient is NaN."""
    if given == "mask":
        leaf = torch.tensor([0.3, torch.nan, 0.7], dtype=torch.float64, requires_grad=True)
        d = Bernoulli(logits=leaf, mask=torch.tensor([False, False, True]))
        expected = [0.0, 0.0, 1 / (1 + math.exp(-0.7))]
    else:
        leaf = (CERTAIN if given == "logits" else torch.sigmoid(CERTAIN)).clone().requires_grad_()
        d = Bernoulli(**{given: leaf})
        expected = [1.0, 0.0, 1 / (1 + math.exp(-0.7))]
    assert_close(d.probs.detach(), torch.tensor(expected, dtype=torch.float64))
    value = d.sample()
    results = d.entropy(), d.log_prob(value), d.rsample(generator=seeded()), td.kl_divergence(d, d)
    for result in results[:2]:
        assert (result[:2] == 0).all()
    (gradient,) = torch.autograd.grad(sum(each.sum() for each in results), leaf)
    assert (gradient[:2] == 0).all()
    assert gradient[2].isfinite()
    impossible = d.log_prob(1 - value)
    assert (impossible[:2] == -INF).all()


@pytest.mark.parametrize("batch", [(), (2,), (8, 4), (1, 3)])
@pytest.mark.parametrize("sample", [(), (1,), (2,), (5,), (2, 3)])
def test_values_broadcast_against_the_law_as_torchs_do(
    batch: tuple[int, ...], sample: tuple[int, ...]
) -> None:
    odds = normal(*batch) if batch else torch.tensor(0.3, dtype=torch.float64)
    ours, theirs = Bernoulli(logits=odds), td.Bernoulli(logits=odds)
    value = ours.sample(sample)
    assert ours.log_prob(value).shape == (*sample, *batch)
    assert_close(ours.log_prob(value), theirs.log_prob(value))
    one = torch.ones((), dtype=odds.dtype)
    assert_close(ours.log_prob(one), theirs.log_prob(one))


# Divergences


@pytest.mark.parametrize(("first", "second"), [((3,), (2, 3)), ((2, 1), (3,)), ((3,), (4, 3)), ((2,), ())])
def test_divergences_broadcast(first: tuple[int, ...], second: tuple[int, ...]) -> None:
    p, q = normal(*first), normal(*second, seed=2) if second else torch.tensor(0.3, dtype=torch.float64)
    expected = td.kl_divergence(*(td.Bernoulli(logits=each) for each in torch.broadcast_tensors(p, q)))
    assert_close(td.kl_divergence(Bernoulli(logits=p), Bernoulli(logits=q)), expected)


def test_divergences_of_certain_gates() -> None:
    fair, certain = Bernoulli(torch.tensor(0.5)), Bernoulli(torch.tensor(1.0))
    assert_close(td.kl_divergence(certain, fair), torch.tensor(math.log(2)), 1e-6)
    assert td.kl_divergence(fair, certain) == INF


# Expand, dtypes, validation


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_is_rounded_once(dtype: torch.dtype) -> None:
    odds = normal(500).to(dtype)
    d, exact = Bernoulli(logits=odds), td.Bernoulli(logits=odds.double())
    eps = torch.finfo(dtype).eps
    for quantity in ("probs", "variance"):
        assert getattr(d, quantity).dtype == dtype
        torch.testing.assert_close(getattr(d, quantity).double(), getattr(exact, quantity), rtol=eps, atol=0)
    value = exact.sample()
    assert d.rsample().dtype == d.entropy().dtype == d.log_prob(value.to(dtype)).dtype == dtype
    torch.testing.assert_close(
        d.log_prob(value.to(dtype)).double(), exact.log_prob(value), rtol=eps, atol=1e-6
    )


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({}, "Bernoulli: give either probs or logits"),
        ({"probs": ODDS.sigmoid(), "logits": ODDS}, "Bernoulli: give either probs or logits"),
        ({"probs": [0.5]}, "probs: got an object of type list"),
        ({"probs": torch.tensor([1])}, "probs: got a tensor of dtype torch.int64"),
        ({"logits": torch.tensor([1])}, "logits: got a tensor of dtype torch.int64"),
        ({"probs": torch.tensor([0.5, 1.5])}, "probs: got values out of range, expected numbers from 0 to 1"),
        ({"probs": torch.tensor([-0.5])}, "probs: got values out of range"),
        ({"logits": torch.tensor([torch.nan])}, "logits: got values out of range"),
        ({"logits": ODDS, "mask": torch.ones(3)}, "mask: got"),
        ({"logits": ODDS, "estimator": "rloo"}, "estimator: got 'rloo', expected a pathwise"),
    ],
    ids=str,
)
def test_bad_arguments(given: dict[str, Any], message: str) -> None:
    with pytest.raises(gapped.GappedError, match=message):
        # Compiling, in an earlier test, switches torch's default of validation off.
        Bernoulli(**given, validate_args=True)


def test_half_precision_probabilities_are_rounded_once() -> None:
    probs = torch.linspace(0.001, 0.999, 500).bfloat16()
    own, exact = (gapped.distributions.Bernoulli(probs=p) for p in (probs, probs.float()))
    assert torch.equal(own.log_prob(torch.zeros_like(probs)), exact.log_prob(torch.zeros(500)).bfloat16())
    assert torch.equal(own.entropy(), exact.entropy().bfloat16())


# In the place of torch's class


@pytest.mark.parametrize("given", ["logits", "probs"])
@pytest.mark.parametrize("number", [0.3, 1, True, 0, np.float32(0.25), np.int64(1)], ids=repr)
def test_numbers_are_taken_as_torch_takes_them(given: str, number: Any) -> None:
    # Torch takes no numbers of numpy's but its float64.
    ours, theirs = Bernoulli(**{given: number}), td.Bernoulli(**{given: float(number)})
    assert ours.batch_shape == theirs.batch_shape == ()
    assert ours.logits.dtype == torch.get_default_dtype()
    for quantity in ("probs", "mean", "variance"):
        assert_close(getattr(ours, quantity), getattr(theirs, quantity), 1e-6)
    assert ours.sample((8,)).shape == theirs.sample((8,)).shape
    assert ours.expand((2, 3)).sample().shape == (2, 3)
    value = torch.tensor(float(ours.probs > 0.5))
    assert_close(ours.log_prob(value), theirs.log_prob(value), 1e-6)
    assert_close(ours.enumerate_support(), theirs.enumerate_support())


def test_a_value_may_be_a_number_where_it_is_not_validated() -> None:
    ours, theirs = (kind(0.3, validate_args=False).log_prob(1.0) for kind in (Bernoulli, td.Bernoulli))
    assert_close(ours, theirs, 1e-6)
    for kind in (Bernoulli, td.Bernoulli):
        with pytest.raises(ValueError, match="value"):
            kind(0.3, validate_args=True).log_prob(1.0)


def test_it_is_one_of_torchs_and_has_its_further_divergences() -> None:
    d, theirs, rate = Bernoulli(logits=ODDS), td.Bernoulli(logits=ODDS), td.Poisson(ODDS.exp())
    assert isinstance(d, td.Bernoulli)
    assert_close(td.kl_divergence(d, rate), td.kl_divergence(theirs, rate))
    assert_close(d._natural_params[0], theirs._natural_params[0])
    assert_close(d._param, ODDS)


def test_pyro_enumerates_with_probabilities_and_samples_with_a_gradient() -> None:
    """By `has_rsample` alone, Pyro would leave the weights of enumerated values out."""
    pyro = pytest.importorskip("pyro", reason="needs pyro")
    mixin = pyro.distributions.torch_distribution.TorchDistributionMixin
    losses = []
    for kind in (Bernoulli, td.Bernoulli):
        site = type("Site", (kind, mixin), {})
        odds = torch.tensor(0.7, dtype=torch.float64, requires_grad=True)

        def model() -> None:
            b = pyro.sample("b", pyro.distributions.Bernoulli(torch.tensor(0.2, dtype=torch.float64)))
            pyro.sample("x", pyro.distributions.Normal(b, 1.0), obs=torch.tensor(0.5, dtype=torch.float64))

        def guide() -> None:
            pyro.sample("b", site(logits=odds), infer={"enumerate": "parallel"})  # noqa: B023

        elbo = pyro.infer.TraceEnum_ELBO(max_plate_nesting=0, strict_enumeration_warning=False)
        loss = elbo.differentiable_loss(model, guide)
        losses.append((loss.detach(), torch.autograd.grad(loss, odds)[0]))
    assert_all_close(*losses, 1e-12)
    d = type("Site", (Bernoulli, mixin), {})(logits=ODDS.clone().requires_grad_())
    sample = d()
    assert sample.requires_grad
    assert d.score_parts(sample).score_function == 0
    assert_close(d.score_parts(sample.detach()).score_function, d.log_prob(sample.detach()))
