"""Score-function estimators as they draw: expected value and gradient against enumeration.

One comparison is of a whole vector, the value and the gradient of one example, by its own covariance over
many independent examples; its p-value is that of chi-squared in the large-sample limit. Each has a twin with
a known mistake that must be rejected. Values that test_score_exact.py enumerates are drawn here.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from conftest import normal, seeded
from scipy import stats
from score_problems import BINARY, SETTINGS, cost, estimate, free_network, oracle
from statistical import require_law, require_rejected
from torch import Tensor

import gapped
from gapped.score import rebar
from gapped.score.disarm import stick_probabilities

EXAMPLES = 200_000


def estimates(estimator: Any, theta: Tensor, examples: int = EXAMPLES) -> Tensor:
    """Independent estimates ``(examples, 1 + L K)``: value and gradient."""
    value, gradient = estimate(cost, theta.expand(examples, *theta.shape), estimator)
    return torch.cat([value.unsqueeze(-1), gradient.flatten(1)], -1)


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
    "relax": lambda theta: gapped.RELAX(free_network(theta), tau=0.6).eval(),
}
CASES = [(name, setting) for name in MAKERS for setting in ("2x4", "2x4-steep", "1x8-masked")]
CASES += [(name, setting) for name in ("arsm", "rebar", "relax") for setting in ("2x4-masked", "1x8-steep")]
CASES += [("disarm", setting) for setting in BINARY]


@pytest.mark.slow_if(lambda name, setting: "steep" in setting or "masked" in setting)
@pytest.mark.parametrize(("name", "setting"), CASES)
def test_expected_value_and_gradient(name: str, setting: str) -> None:
    theta = {**SETTINGS, **BINARY}[setting]
    examples = EXAMPLES // 5 if name == "arsm" and theta.shape[-1] == 8 else EXAMPLES
    estimator = gapped.DisARM() if name == "disarm" else MAKERS[name](theta)
    sample = estimates(estimator, theta, examples)
    require_law(mean_vector_is(sample, target(theta)))
    longer = torch.cat([sample[:, :1], 1.1 * sample[:, 1:]], -1)
    require_rejected(mean_vector_is(longer, target(theta)))
    assert (sample[:, 1:].reshape(-1, *theta.shape)[:, theta == -torch.inf] == 0).all()


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
