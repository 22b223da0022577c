"""Counts: every weight by its own formula, and the exactness of these formulas by enumeration in float64."""

from __future__ import annotations

import math
from collections.abc import Callable
from fractions import Fraction
from typing import Any, NamedTuple

import pytest
import torch
from conftest import assert_close, normal, seeded
from statistical import chi_squared, counts_of, require_law, require_rejected
from torch import Tensor

import gapped
from gapped import GappedError, counts

EXACT = 1e-10
SUPPORT = torch.arange(600, dtype=torch.float64)


class Family(NamedTuple):
    """A law of counts with the parameter eta, and its weights by their definition."""

    draw: Callable[..., Tensor]
    log_p: Callable[[Tensor, Tensor], Tensor]
    weight: Callable[[Tensor, Tensor, int], Tensor]
    """Of counts and parameters, by the order."""


def definition(law: str, total: Any, odds: Any, count: Any, order: int) -> Any:
    """The weight in terms of Z - μ, in the arithmetic of its arguments; `odds` are exp(eta)."""
    mean, v, factor = {
        "poisson": lambda: (odds, 0, 1),
        "binomial": lambda: (total * odds / (1 + odds), -1 / total, 1),
        "negative_binomial": lambda: (total * odds, 1 / total, 1 / (1 + odds)),
    }[law]()
    variance, slope, apart = mean + v * mean**2, 1 + 2 * v * mean, count - mean
    weight = variance + slope * apart / 2
    if order == 3 and v != -1:
        weight -= (apart**2 - slope * apart - variance) / (12 * (1 + v) * variance)
    return factor * weight


def family(law: str, *total: float) -> Family:
    def log_p(z: Tensor, eta: Tensor) -> Tensor:
        if law == "poisson":
            return z * eta - eta.exp() - torch.lgamma(z + 1)
        if law == "negative_binomial":
            r = torch.tensor(*total, dtype=torch.float64)
            return torch.distributions.NegativeBinomial(r, logits=eta).log_prob(z)
        n, inside = torch.tensor(*total, dtype=torch.float64), torch.where(z <= total[0], z, 0.0)
        ways = torch.lgamma(n + 1) - torch.lgamma(inside + 1) - torch.lgamma(n - inside + 1)
        value = ways + inside * eta - n * torch.nn.functional.softplus(eta)
        return torch.where(z <= n, value, -torch.inf)

    return Family(
        lambda eta, **how: getattr(counts, law)(*total, eta, **how),
        log_p,
        lambda z, eta, order: definition(law, *(total or (1,)), eta.exp(), z, order),
    )


FAMILIES = {
    "poisson": family("poisson"),
    "binomial-2": family("binomial", 2),
    "binomial-8": family("binomial", 8),
    "negative-binomial-0.7": family("negative_binomial", 0.7),
    "negative-binomial-8": family("negative_binomial", 8.0),
}
every_family = pytest.mark.parametrize("name", FAMILIES)
every_order = pytest.mark.parametrize("order", [2, 3])
every_eta = pytest.mark.parametrize("eta", [-2.0, 0.3, 1.4])


def pulled(family: Family, eta: Tensor, **how: Any) -> tuple[Tensor, Tensor]:
    """Samples, and the weights that come back for a gradient of one."""
    leaf = eta.clone().requires_grad_()
    sample = family.draw(leaf, generator=seeded(), **how)
    return sample.detach(), torch.autograd.grad(sample.sum(), leaf)[0]


def bias(name: str, order: int, eta: float, degree: int) -> float:
    """How far E[w f'] is from d/d eta E f for the power f of `degree`, relative to the latter."""
    family, leaf = FAMILIES[name], torch.tensor(eta, dtype=torch.float64, requires_grad=True)
    p = family.log_p(SUPPORT, leaf).exp()
    assert p.sum().item() == pytest.approx(1, abs=1e-12)
    (exact,) = torch.autograd.grad((p * SUPPORT**degree).sum(), leaf)
    weight = family.weight(SUPPORT, leaf.detach(), order)
    mean = (p.detach() * weight * degree * SUPPORT ** (degree - 1)).sum()
    return float((mean - exact).abs() / exact)


@every_family
@every_order
@every_eta
def test_polynomials_up_to_the_order_are_exact_and_the_next_is_not(name: str, order: int, eta: float) -> None:
    assert all(bias(name, order, eta, degree) < EXACT for degree in range(1, order + 1))
    assert bias(name, order, eta, order + 1) > 1e-5


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16], ids=str)
@every_family
def test_samples_are_whole_numbers_in_every_dtype(name: str, dtype: torch.dtype) -> None:
    eta = normal(4, 50).to(dtype)
    sample, weight = pulled(FAMILIES[name], eta)
    assert sample.dtype == weight.dtype == dtype
    assert sample.shape == eta.shape
    assert (sample == sample.round()).all()
    assert (sample >= 0).all()
    assert weight.isfinite().all()
    full, exact = pulled(FAMILIES[name], eta.float() if dtype != torch.float64 else eta)
    assert torch.equal(sample, full.to(dtype))
    assert torch.equal(weight, exact.to(dtype))
    assert torch.equal(FAMILIES[name].draw(eta, generator=seeded()), sample)


@every_family
def test_laws(name: str) -> None:
    family, eta = FAMILIES[name], torch.tensor(0.4, dtype=torch.float64)
    index = family.draw(eta.expand(40_000), generator=seeded(3)).long()
    assert index.max() < len(SUPPORT)
    observed = counts_of(index, len(SUPPORT))
    require_law(chi_squared(observed, family.log_p(SUPPORT, eta).exp()))
    require_rejected(chi_squared(observed, family.log_p(SUPPORT, eta + 0.1).exp()))


@every_family
def test_extreme_parameters(name: str) -> None:
    """No rate is a zero; a rate without bound is NaN, but n trials are n."""
    eta = torch.tensor([-torch.inf, -200.0, -90.0, 200.0, torch.nan], dtype=torch.float32)
    sample, weight = pulled(FAMILIES[name], eta)
    assert (sample[:3] == 0).all()
    assert (weight[:2] == 0).all()
    assert sample[4].isnan()
    assert weight[4].isnan()
    if name.startswith("binomial"):
        assert sample[3] == int(name.partition("-")[2])
        assert weight[3].abs() < 1e-6
    else:
        assert sample[3].isnan()


def test_parameters_per_entry() -> None:
    """With one trial there is no third degree."""
    eta = normal(3, 4)
    cases = [("binomial", (1, 2, 5), (3, 1)), ("negative_binomial", (0.5, 1.0, 2.0, 4.0), (4,))]
    for law, totals, shape in cases:
        total, leaf = torch.tensor(totals).view(shape), eta.clone().requires_grad_()
        sample = getattr(counts, law)(total, leaf, generator=seeded())
        (weight,) = torch.autograd.grad(sample.sum(), leaf)
        assert law != "binomial" or (sample <= total).all()
        for n, each in enumerate(totals):
            own = (n,) if law == "binomial" else (slice(None), n)
            expected = family(law, each).weight(sample[own].detach(), eta[own], 3)
            assert_close(weight[own], expected, EXACT)


def test_randomness_is_an_argument_and_one_derivative_is_all() -> None:
    eta, state = normal(50).requires_grad_(), torch.get_rng_state()
    for family in FAMILIES.values():
        samples = [family.draw(eta, generator=seeded(5)) for _ in range(2)]
        assert torch.equal(*samples)
        (gradient,) = torch.autograd.grad(samples[0].square().sum(), eta, create_graph=True)
        with pytest.raises(RuntimeError, match="twice"):
            gradient.sum().backward()
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: counts.poisson([0.0]), "log_rate: got an object of type list"),
        (
            lambda: counts.poisson(torch.zeros(2, dtype=torch.int64)),
            "log_rate: got an object of type torch.int64",
        ),
        (lambda: counts.poisson(torch.zeros(2), order=4), "order: got 4, expected 2 or 3"),
        (lambda: counts.poisson(torch.zeros(2), generator=3), "generator: got 3"),
        (lambda: counts.binomial(-1, torch.zeros(2)), "total: got -1"),
        (lambda: counts.binomial(2.0, torch.zeros(2)), "total: got 2.0"),
        (
            lambda: counts.binomial(torch.tensor([1.5]), torch.zeros(2)),
            "total: got a tensor with other values",
        ),
        (lambda: counts.binomial(torch.tensor(1e30), torch.zeros(2)), "other values, expected .* at most 2"),
        (lambda: counts.binomial(torch.ones(3), torch.zeros(2)), r"total: got a tensor of shape \(3,\)"),
        (lambda: counts.negative_binomial(0, torch.zeros(2)), "total: got 0"),
        (
            lambda: counts.negative_binomial(torch.ones(3), torch.zeros(2)),
            r"total: got a tensor of shape \(3,\)",
        ),
        (lambda: counts.binomial(torch.tensor([True]), torch.zeros(1)), "total: .* of dtype torch.bool"),
        (lambda: counts.binomial(torch.tensor([1j]), torch.zeros(1)), "total: .* of dtype torch.complex64"),
        (lambda: counts.binomial(10**400, torch.zeros(1)), "expected a whole number .*, at most 2\\^40"),
        (lambda: counts.poisson(torch.zeros(1), order=torch.tensor([2, 3])), "order: got tensor"),
    ],
)
def test_errors(call: Any, message: str) -> None:
    with pytest.raises(GappedError, match=message):
        call()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_rates_beyond_what_integers_hold(dtype: torch.dtype) -> None:
    rates = torch.tensor([43.0, 44.0, 60.0, 80.0], dtype=dtype, requires_grad=True)
    value = counts.poisson(rates, generator=seeded(0))
    value.sum().backward()
    assert_close(value / rates.detach().exp(), torch.ones(4, dtype=dtype), 1e-6)
    assert_close(rates.grad / rates.detach().exp(), torch.ones(4, dtype=dtype), 1e-6)
    many = counts.poisson(torch.full((20_000,), 44.0, dtype=torch.float64), generator=seeded(1))
    apart = (many - many.mean()) / torch.tensor(44.0).double().exp().sqrt()
    # The variance of 20,000 normal numbers: five standard errors, a false failure in a million.
    assert abs(float(apart.var()) - 1) < 5 * (2 / 20_000) ** 0.5
    assert (
        counts.negative_binomial(2.0, torch.full((50,), 44.0, dtype=dtype), generator=seeded(2)) > 0
    ).all()


@pytest.mark.parametrize("order", [2, 3])
@pytest.mark.parametrize("total", [0.5, 3.0, 100.0])
def test_negative_binomial_counts_whose_variance_is_beyond_float32(total: float, order: int) -> None:
    """The counts are the rates, so large are they, and the weights those of rational numbers."""
    eta = torch.tensor([40.0, 44.0, 44.4, 45.0, 60.0, 80.0]).repeat(20).requires_grad_()
    sample = counts.negative_binomial(total, eta, order=order, generator=seeded())
    (weights,) = torch.autograd.grad(sample.sum(), eta)
    rate = torch._standard_gamma(torch.full_like(eta, total), generator=seeded()) * eta.detach().exp()
    assert_close(sample / rate, torch.ones_like(rate), 1e-5)
    for each, z, weight in zip(eta.tolist(), sample.tolist(), weights.tolist(), strict=True):
        expected = exact_weight("negative_binomial", total, each, z, order)
        assert abs(Fraction(weight) - expected) <= 3e-6 * abs(expected)


@pytest.mark.parametrize("order", [2, 3])
def test_counts_next_to_the_largest_float(order: int) -> None:
    """Finite where the rate is, and NaN where it is not; values and weights alike."""
    eta = torch.full((50,), 88.7, requires_grad=True)
    rate = torch._standard_gamma(torch.ones(50), generator=seeded()) * eta.detach().exp()
    assert len(rate.isfinite().unique()) == 2
    sample = counts.negative_binomial(1.0, eta, order=order, generator=seeded())
    assert torch.equal(sample.isfinite(), rate.isfinite())
    assert torch.equal(sample.isnan(), ~rate.isfinite())
    (weights,) = torch.autograd.grad(sample.sum(), eta)
    assert torch.equal(weights.isnan(), sample.isnan())
    assert not weights.isinf().any()
    sample = counts.poisson(eta, order=order)
    assert sample.isfinite().all()
    assert torch.autograd.grad(sample.sum(), eta)[0].isfinite().all()


@pytest.mark.parametrize("total", [10**9, torch.tensor(1e9)])
def test_many_trials_have_the_law_of_their_rate(total: int | Tensor) -> None:
    """A billion trials of probability 4.5e-7: next to a Poisson law, whose probabilities are known."""
    logits = torch.full((200_000,), math.log(4.5e-7))
    drawn = counts.binomial(total, logits, generator=seeded()).long()
    values = torch.arange(700, dtype=torch.float64)
    rate = torch.tensor(450.0, dtype=torch.float64)
    law = torch.distributions.Poisson(rate).log_prob(values).exp()
    require_law(chi_squared(counts_of(drawn, 700), law))
    wider = torch.distributions.Normal(rate, (1.1 * rate).sqrt()).log_prob(values).exp()
    require_rejected(chi_squared(counts_of(drawn, 700), wider / wider.sum()))


@pytest.mark.parametrize(("total", "eta"), [(1e-3, 88.0), (1e-2, 86.0), (1e-3, 80.0)])
def test_few_failures_and_large_odds_leave_many_counts_zero(total: float, eta: float) -> None:
    """P(Z = 0) = (1 - p)^r; gamma noise below the smallest float32 must not become that float."""
    drawn = counts.negative_binomial(total, torch.full((100_000,), eta), generator=seeded())
    share = math.exp(-total * math.log1p(math.exp(eta)))
    for zero, require in ((share, require_law), (0.9 * share, require_rejected)):
        require(chi_squared(counts_of((drawn > 0).long(), 2), torch.tensor([zero, 1 - zero])))


def test_failures_next_to_certain_success_are_as_frequent_as_successes_next_to_none() -> None:
    trials, count = 10_000_000, 100_000
    often = trials - counts.binomial(trials, torch.full((count,), 17.0), generator=seeded(0)).double()
    mean = trials * float(torch.sigmoid(torch.tensor(-17.0, dtype=torch.float64)))
    # The mean of Poisson numbers: five standard errors, a false failure in a million.
    assert abs(float(often.mean()) - mean) < 5 * (mean / count) ** 0.5


def exact_weight(law: str, total: float, eta: float, z: float, order: int) -> Fraction:
    """The weight in rational numbers; exp(eta) is that of float64."""
    return Fraction(definition(law, Fraction(total), Fraction(math.exp(eta)), Fraction(z), order))


@pytest.mark.parametrize(
    ("law", "total"),
    [
        ("poisson", 1),
        *(("binomial", n) for n in (1, 2, 5, 1000)),
        *(("negative_binomial", r) for r in (0.5, 3)),
    ],
)
def test_weights_keep_their_digits_at_extreme_parameters(law: str, total: float) -> None:
    """Small rates, and binomial counts next to certainty, where differences from the mean have none left."""
    for dtype, tolerance in ((torch.float32, 3e-6), (torch.float64, 1e-14)):
        for eta in (-40.0, -20.0, -12.0, -8.0, 0.0, 4.0, 8.0, 12.0, 20.0, 40.0):
            if eta > 12 and law != "binomial" and dtype == torch.float32:
                continue  # counts of more digits than float32 has
            leaf = torch.full((16,), eta, dtype=dtype, requires_grad=True)
            arguments = () if law == "poisson" else (total,)
            for order in (2, 3):
                drawn = getattr(counts, law)(*arguments, leaf, order=order, generator=seeded())
                (weights,) = torch.autograd.grad(drawn.sum(), leaf)
                for z, weight in zip(drawn.tolist(), weights.tolist(), strict=True):
                    expected = exact_weight(law, total, eta, z, order)
                    error = abs(Fraction(weight) - expected)
                    assert error <= tolerance * abs(expected), (dtype, eta, order, z, weight, float(expected))


def test_counts_that_float16_cannot_hold_are_refused() -> None:
    big = torch.tensor([12.0], dtype=torch.float16)
    for draw in (
        lambda: gapped.counts.poisson(big),
        lambda: gapped.counts.binomial(100_000, big),
        lambda: gapped.counts.negative_binomial(5.0, big),
    ):
        with pytest.raises(gapped.GappedError, match="got a count beyond 65504, the largest float16"):
            draw()
    assert gapped.counts.poisson(torch.tensor([10.0], dtype=torch.float16)).isfinite()
    assert gapped.counts.poisson(big.bfloat16()).isfinite()
