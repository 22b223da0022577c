"""`draw="argmax"`: the largest logit forward, and each estimator's own gradient for that category.

Where the gradient is determined by the category, it is what the estimator gives whenever it draws that one.
Where it has noise, the noise is replayed, and its law is that of the estimator's own draws of that category.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from conftest import (
    INVERSE_CDF,
    MEMBERS,
    TAU,
    assert_close,
    assert_one_hot,
    every_member,
    normal,
    pull,
    seeded,
    through_softmax,
)
from statistical import require_law, require_rejected, two_sample
from test_exact import CASES, THETAS, formula_gradients
from torch import Tensor

import gapped
from gapped import GappedError, simplex

K = 6


@every_member
@pytest.mark.parametrize("text", ["{}:draw=argmax", "{}:draw=argmax,tau=2"])
def test_the_sample_is_the_first_of_the_largest_logits(name: str, text: str) -> None:
    estimator = gapped.estimator(text.format(name))
    logits = torch.cat([normal(50, K), torch.tensor([[0.0, 1, 1, 0, 1, 0], [2.0] * K])])
    sample = estimator.sample(logits)
    assert_one_hot(sample)
    assert torch.equal(sample.argmax(-1), logits.max(-1).indices)
    assert sample[-2:].argmax(-1).tolist() == [1, 0]
    assert torch.equal(estimator.choose(logits).index, sample.argmax(-1))
    assert torch.equal(estimator.sample(logits.T, dim=0), sample.T)


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("theta", THETAS.values(), ids=THETAS)
def test_the_gradient_is_the_estimators_for_that_category(case: str, theta: Tensor) -> None:
    """The same formulas that enumerate every category."""
    estimator, formula = CASES[case]
    weight = normal(len(theta), seed=4)
    expected = formula_gradients(formula, theta, lambda z: z @ weight)[int(theta.argmax())]
    _, gradient = pull(replace(estimator, draw="argmax"), theta, weight)
    assert_close(gradient, expected, 1e-10)


def noise_given_winner(log_p: Tensor, samples: int) -> Tensor:
    """Replayed: the seed of the noise's own generator is the first thing drawn."""
    own = seeded(int(torch.randint(2**63 - 1, (), generator=seeded())))
    return simplex.conditional_gumbel(log_p, log_p.argmax(-1), samples, own)


@pytest.mark.parametrize("tau", [0.5, 1.0, 2.0])
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("name", ["gumbel-softmax", "gumbel-rao", "decoupled"])
def test_the_noise_is_drawn_given_that_the_largest_logit_wins(name: str, masked: bool, tau: float) -> None:
    logits, weight = normal(30, K), normal(30, K, seed=2)
    mask = torch.tensor([True, True, False, True, True, True]) if masked else torch.ones(K, dtype=torch.bool)
    allowed = logits.masked_fill(~mask, -torch.inf)
    options: dict[str, Any] = {"gumbel-rao": {"samples": 4}, "decoupled": {"tau_forward": 1.5}}.get(name, {})
    log_p = torch.log_softmax(allowed / options.get("tau_forward", 1.0), -1)
    scores = noise_given_winner(log_p, options.get("samples", 1))[..., mask]
    if name == "decoupled":
        scores = tau * (logits[:, mask] / tau + scores - log_p[:, mask])
    h = torch.softmax(scores / tau, -1)
    expected = through_softmax(h, weight[:, mask].expand_as(h), tau).mean(0)
    for hard in (True, False):
        estimator = gapped.estimator(name, tau=tau, draw="argmax", hard=hard, **options)
        sample, gradient = pull(estimator, logits, weight, mask=mask)
        assert torch.equal(sample.argmax(-1), allowed.argmax(-1)) or name == "decoupled"
        assert_close(gradient[:, mask], expected, 1e-11)
        assert (gradient[:, ~mask] == 0).all()
        if not hard:
            assert_close(sample[:, mask], h.mean(0), 1e-12)


@pytest.mark.parametrize("name", ["gumbel-softmax", "decoupled"])
def test_the_law_of_the_gradient_is_that_of_samples_of_the_largest_logit(name: str) -> None:
    """Among ordinary samples, those that happen to be the largest logit have gradients of the same law."""
    theta, weight = torch.tensor([0.8, 0.1, -0.5], dtype=torch.float64), torch.tensor([1.0, -2.0, 0.5])
    rows, weights = theta.expand(20_000, 3), weight.double().expand(20_000, 3)
    sample, gradient = pull(gapped.estimator(name, tau=0.7), rows, weights, seed=1)
    drawn = gradient[sample.argmax(-1) == 0, 0]
    _, given = pull(gapped.estimator(name, tau=0.7, draw="argmax"), rows, weights, seed=2)
    require_law(two_sample(drawn, given[:, 0]))
    # Wrong on purpose: the gradients of all samples.
    require_rejected(two_sample(gradient[:, 0], given[:, 0]))


@pytest.mark.parametrize("name", INVERSE_CDF)
def test_nothing_is_random_where_the_category_determines_the_gradient(name: str) -> None:
    logits, state = normal(20, K).requires_grad_(), torch.get_rng_state()
    estimator = gapped.estimator(name, tau=TAU, draw="argmax")
    (estimator.sample(logits) * normal(20, K)).sum().backward()
    assert torch.equal(torch.get_rng_state(), state)


def test_other_values_are_refused_and_so_are_kernels_that_do_not_exist() -> None:
    with pytest.raises(GappedError, match="draw: got 'mode', expected 'sample' or 'argmax'"):
        gapped.gst(normal(3), draw="mode")
    with pytest.raises(GappedError, match=r"backend: got 'triton', .*this option of it, has no kernel"):
        gapped.decoupled_gumbel_softmax(normal(3).float(), draw="argmax", backend="triton")
    assert {type(gapped.estimator(f"{name}:draw=argmax")).name for name in MEMBERS} == set(MEMBERS)
