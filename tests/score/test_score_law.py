"""Score-function estimators as they draw: expected value and gradient against enumeration.

One comparison is of a whole vector, the value and the gradient of one example, by its own covariance over
many independent examples; its p-value is that of chi-squared in the large-sample limit. Each has a twin with
a known mistake that must be rejected. What is enumerated exactly in test_score_exact.py is drawn here.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from conftest import assert_close, normal, seeded
from scipy import stats
from statistical import require_law, require_rejected
from test_score_exact import BINARY, SETTINGS, cost, oracle
from torch import Tensor

import gapped
from gapped.score import rebar
from gapped.score.disarm_sticks import stick_probabilities

EXAMPLES = 200_000


def estimates(estimator: Any, theta: Tensor, examples: int = EXAMPLES, seed: int = 0) -> Tensor:
    """Independent estimates ``(examples, 1 + L K)``: value and gradient."""
    leaf = theta.expand(examples, *theta.shape).clone().requires_grad_()
    value = gapped.expectation(cost, leaf, estimator, generator=seeded(seed))
    (gradient,) = torch.autograd.grad(value.sum(), leaf)
    return torch.cat([value.detach().unsqueeze(-1), gradient.flatten(1)], -1)


def target(theta: Tensor) -> Tensor:
    value, gradient = oracle(theta)
    return torch.cat([value.reshape(1), gradient.flatten()])


def mean_vector_is(sample: Tensor, expected: Tensor) -> float:
    """P-value of the mean of independent vectors; directions without variance must agree by themselves."""
    error = sample.mean(0) - expected
    scales, axes = torch.linalg.eigh(torch.cov(sample.T))
    varies = scales > 1e-9 * scales[-1]
    along = axes.T @ error
    if (along[~varies].abs() > 1e-6).any():
        return 0.0
    statistic = float(len(sample) * (along[varies] ** 2 / scales[varies]).sum())
    return float(stats.chi2.sf(statistic, int(varies.sum())))


def flexible(theta: Tensor) -> torch.nn.Module:
    """A network for RELAX, from relaxed samples to one number each, with weights that are far from zero."""
    torch.manual_seed(0)
    return torch.nn.Sequential(
        torch.nn.Flatten(-2),
        torch.nn.Linear(theta.numel(), 16),
        torch.nn.Tanh(),
        torch.nn.Linear(16, 1),
        torch.nn.Flatten(-2),
    ).double()


MAKERS: dict[str, Any] = {
    "reinforce": lambda theta: gapped.Reinforce(),
    "rloo": lambda theta: gapped.RLOO(3),
    "muprop": lambda theta: gapped.MuProp(),
    "tree": lambda theta: gapped.DisARMTree(),
    "sticks": lambda theta: gapped.DisARMSticks(),
    "sticks-given": lambda theta: gapped.DisARMSticks("given"),
    "arsm": lambda theta: gapped.ARSM(),
    "rebar": lambda theta: gapped.REBAR(eta=0.7, tau=0.6).eval(),
    "rebar-negative": lambda theta: gapped.REBAR(eta=-1, tau=0.6).eval(),
    "relax": lambda theta: gapped.RELAX(flexible(theta), tau=0.6).eval(),
}
DRAWN = [(name, setting) for name in MAKERS for setting in ("2x4", "2x4-steep", "1x8-masked")]
DRAWN += [(name, setting) for name in ("arsm", "rebar", "relax") for setting in ("2x4-masked", "1x8-steep")]


@pytest.mark.parametrize(("name", "setting"), DRAWN)
def test_expected_value_and_gradient(name: str, setting: str) -> None:
    theta = SETTINGS[setting]
    examples = EXAMPLES // 5 if name == "arsm" and theta.shape[-1] == 8 else EXAMPLES
    sample = estimates(MAKERS[name](theta), theta, examples)
    require_law(mean_vector_is(sample, target(theta)))
    longer = torch.cat([sample[:, :1], 1.1 * sample[:, 1:]], -1)
    require_rejected(mean_vector_is(longer, target(theta)))
    assert (sample[:, 1:].reshape(-1, *theta.shape)[:, theta == -torch.inf] == 0).all()


@pytest.mark.parametrize("setting", BINARY)
def test_expected_value_and_gradient_of_binary_variables(setting: str) -> None:
    theta = BINARY[setting]
    sample = estimates(gapped.DisARM(), theta)
    require_law(mean_vector_is(sample, target(theta)))
    longer = torch.cat([sample[:, :1], 1.1 * sample[:, 1:]], -1)
    require_rejected(mean_vector_is(longer, target(theta)))


COUPLED = {"disarm": gapped.DisARM(), "tree": gapped.DisARMTree(), "sticks": gapped.DisARMSticks()}


@pytest.mark.parametrize("name", COUPLED)
def test_rare_categories_of_float32_logits_have_their_law(name: str) -> None:
    """Too rare to be counted: noise has the bits for a category of 2e-9, and each sample takes it there."""
    estimator = COUPLED[name]
    logits = torch.tensor([0.0, -20.0])
    p = float(torch.softmax(logits.double(), -1)[1])
    noise = estimator.draw(logits.expand(1000, 2), seeded())
    assert len((noise % 2**-24).unique()) == noise.numel()
    # Shares of the rare category's probability, from either end.
    share = torch.tensor([0.01, 0.99, 1.01, 5.0]).double() * p
    for u in (share, 1 - share):
        pair = estimator.index(logits.expand(4, 2), u if name == "disarm" else u.unsqueeze(-1))
        assert sorted(pair.tolist()) == [[0, 0, 0, 0], [1, 1, 0, 0]]


def test_a_million_sticks_have_the_law_of_their_softmax() -> None:
    logits = normal(1_000_000, dtype=torch.float32)
    p = stick_probabilities(logits - logits.max())
    passed = torch.nn.functional.pad((-p).log1p().cumsum(-1), (1, 0)).exp()
    law = torch.nn.functional.pad(p, (0, 1), value=1.0) * passed
    torch.testing.assert_close(law, torch.softmax(logits.double(), -1), rtol=1e-6, atol=0)


def test_a_baseline_with_the_own_sample_is_rejected(monkeypatch: pytest.MonkeyPatch) -> None:
    theta = SETTINGS["2x4"]
    monkeypatch.setattr("gapped.score.reinforce.leave_one_out", lambda costs: costs - costs.mean(0))
    require_rejected(mean_vector_is(estimates(gapped.RLOO(3), theta), target(theta)))


def test_importance_weighted_sticks_are_rejected_unless_ascending() -> None:
    """Pairs of the chain weighted by p_k p_l / P(k, l), with the pair's law in closed form."""

    def sample(order: Any) -> Tensor:
        theta = SETTINGS["1x8-steep"]
        logits = (theta - theta.max()).expand(EXAMPLES, 1, 8)
        chain = gapped.DisARMSticks(order)
        pair = chain.index(logits, chain.draw(logits, seeded())).squeeze(-1)
        p = torch.softmax(theta[0], -1)
        steps = p.argsort() if order == "ascending" else torch.arange(8)
        sticks = p[steps] / p[steps].flip(0).cumsum(0).flip(0)
        late = torch.cat([torch.ones(1).double(), (1 - 2 * sticks).clamp(min=0).cumprod(0)[:-1]])
        # Both pass up to the earlier one, which is taken by one of them alone; the other goes on by itself.
        at = steps.argsort()[pair]
        first, second = at.amin(0), at.amax(0)
        part = late[first] * torch.minimum(sticks, 1 - sticks)[first]
        after = p[steps][second] / p[steps].flip(0).cumsum(0).flip(0)[(first + 1).clamp(max=7)]
        ratio = torch.where(first < second, p[pair[0]] * p[pair[1]] / (part * after), 0.0).unsqueeze(-1)
        points = torch.nn.functional.one_hot(pair, 8).double()
        costs = cost(points.unsqueeze(-2))
        return 0.5 * (costs[0] - costs[1]).unsqueeze(-1) * ratio * (points[0] - points[1])

    require_law(mean_vector_is(sample("ascending"), target(SETTINGS["1x8-steep"])[1:]))
    require_rejected(mean_vector_is(sample("given"), target(SETTINGS["1x8-steep"])[1:]))


def test_arsm_without_normalised_noise_is_rejected(monkeypatch: pytest.MonkeyPatch) -> None:
    """The twin weighs by exponentials instead of their shares."""
    theta = SETTINGS["2x4"]
    monkeypatch.setattr("gapped.score.arsm.simplex.softmax", lambda scores: scores.exp())
    require_rejected(mean_vector_is(estimates(gapped.ARSM(), theta), target(theta)))


def test_rebar_with_constant_conditional_noise_is_rejected(monkeypatch: pytest.MonkeyPatch) -> None:
    """The twin forgets that the scores given the sample depend on the logits."""
    right = rebar.conditional_scores
    monkeypatch.setattr(
        rebar, "conditional_scores", lambda log_p, noise, index: right(log_p.detach(), noise, index)
    )
    theta = SETTINGS["2x4"]
    require_rejected(mean_vector_is(estimates(gapped.REBAR().eval(), theta), target(theta)))


def test_conditional_scores_have_the_law_of_rejected_ones() -> None:
    """Plain scores with the same winner, sorted by rejection; first and second moments of all entries."""
    log_p = torch.log_softmax(SETTINGS["1x8"][0], -1).expand(200_000, 8)
    plain = log_p + gapped.simplex.gumbel(log_p, seeded(1))
    kept = plain[plain.argmax(-1) == 2]
    index = torch.full((len(kept),), 2)
    ours = rebar.conditional_scores(log_p[: len(kept)], gapped.simplex.gumbel(kept, seeded(2)), index)
    assert (ours.argmax(-1) == 2).all()
    # A difference of two independent samples: its mean is zero and its covariance the sum of theirs.
    both = torch.cat([kept, kept**2], -1) - torch.cat([ours, ours**2], -1)
    require_law(mean_vector_is(both, torch.zeros(16).double()))
    unconditional = plain[: len(kept)]
    wrong = torch.cat([kept, kept**2], -1) - torch.cat([unconditional, unconditional**2], -1)
    require_rejected(mean_vector_is(wrong, torch.zeros(16).double()))


def wiggly(z: Tensor) -> Tensor:
    """A cost whose continuation between the corners says little about the corners."""
    return 3.0 + z @ normal(4, seed=6) + 2 * torch.cos(9 * (z @ normal(4, seed=7)))


def train(estimator: Any, theta: Tensor, steps: int = 250) -> Any:
    """Trained by its own variance loss alone."""
    optimiser = torch.optim.Adam(estimator.parameters(), lr=0.03)
    leaf = theta.expand(256, *theta.shape).clone().requires_grad_()
    for step in range(steps):
        gapped.expectation(wiggly, leaf, estimator, generator=seeded(step))
        optimiser.zero_grad()
        estimator.variance_loss().backward()
        optimiser.step()
    assert leaf.grad is None
    return estimator.eval()


def spread_of(estimator: Any, theta: Tensor) -> float:
    leaf = theta.expand(20_000, *theta.shape).clone().requires_grad_()
    gapped.expectation(wiggly, leaf, estimator, generator=seeded(99)).sum().backward()
    assert leaf.grad is not None
    return float(leaf.grad.var(0).sum())


def test_training_lowers_the_variance_and_relax_ends_below_rebar() -> None:
    theta = normal(4, seed=8)
    makers = {
        "rebar": lambda: gapped.REBAR(eta=1.0, tau=0.3).double(),
        "relax": lambda: gapped.RELAX(
            torch.nn.Sequential(
                torch.nn.Linear(4, 16), torch.nn.Tanh(), torch.nn.Linear(16, 1), torch.nn.Flatten(-2)
            )
        ).double(),
    }
    torch.manual_seed(3)
    start = {name: spread_of(make(), theta) for name, make in makers.items()}
    end = {name: spread_of(train(make(), theta), theta) for name, make in makers.items()}
    assert end["rebar"] < 0.8 * start["rebar"]
    assert end["relax"] < 0.8 * start["relax"]
    assert end["relax"] < end["rebar"] < spread_of(gapped.Reinforce(), theta)


def test_a_learned_baseline_lowers_the_variance() -> None:
    """Costs whose level depends on the input: only NVIL's network can know it."""
    x = normal(4_000, 3, seed=9)
    theta = normal(4, seed=8)

    def leveled(z: Tensor) -> Tensor:
        return z @ normal(4, seed=6) + 5 * (x @ normal(3, seed=10))

    def variance(estimator: Any, **how: Any) -> float:
        leaf = theta.expand(len(x), 4).clone().requires_grad_()
        gapped.expectation(leveled, leaf, estimator, generator=seeded(5), **how).sum().backward()
        assert leaf.grad is not None
        return float(leaf.grad.var(0).sum())

    torch.manual_seed(0)
    estimator = gapped.NVIL(torch.nn.Linear(3, 1).double(), scale=False).double()
    before = variance(estimator, context=x)
    optimiser = torch.optim.Adam(estimator.parameters(), lr=0.1)
    for _ in range(150):
        variance(estimator, context=x)
        optimiser.zero_grad()
        estimator.variance_loss().backward()
        optimiser.step()
    assert variance(estimator, context=x) < 0.1 * before
    assert variance(gapped.NVIL(scale=False)) > 0.5 * before


@pytest.mark.parametrize("kind", ["rebar", "relax"])
def test_the_variance_loss_has_the_slope_of_the_squared_gradient(kind: str) -> None:
    """By finite differences with the same noise, for every number among the parameters."""
    theta = SETTINGS["2x4-masked"]
    estimator = MAKERS[kind](theta).double().train()
    leaf = theta.expand(50, *theta.shape).clone().requires_grad_()

    def squared() -> Tensor:
        value = gapped.expectation(cost, leaf, estimator, generator=seeded(4))
        (gradient,) = torch.autograd.grad(value.sum(), leaf)
        return gradient.flatten(1).square().sum(-1).mean()

    expected = squared()
    loss = estimator.variance_loss()
    assert_close(loss.detach(), expected)
    loss.backward()
    for parameter in estimator.parameters():
        assert parameter.grad is not None
        for place in range(min(parameter.numel(), 5)):
            entry, step = parameter.data.view(-1)[place : place + 1], 1e-5
            entry += step
            above = squared()
            entry -= 2 * step
            below = squared()
            entry += step
            assert_close(parameter.grad.view(-1)[place], (above - below) / (2 * step), 1e-5)
