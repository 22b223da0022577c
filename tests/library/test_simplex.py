"""The building blocks: masking, normalising, drawing, Gumbel noise, the expected gap."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from conftest import DTYPES, assert_close, normal, seeded
from torch.utils._python_dispatch import TorchDispatchMode

import gapped
from gapped import simplex

INF = math.inf


@pytest.mark.parametrize("shift", [0.0, 1e4, -1e4])
def test_softmax_and_log_softmax_equal_their_definitions_at_any_shift(shift: float) -> None:
    logits = normal(4, 5)
    weight = logits.exp()
    expected = weight / weight.sum(-1, keepdim=True)
    assert_close(simplex.softmax(logits + shift), expected, 1e-11)
    assert_close(simplex.log_softmax(logits + shift), expected.log(), 1e-11)


def test_a_row_with_nothing_allowed_normalises_to_nothing() -> None:
    logits = torch.tensor([[0.5, 1.0, -INF], [-INF, -INF, -INF]], dtype=torch.float64)
    columns = torch.softmax(logits[0, :2], -1)
    assert_close(simplex.softmax(logits)[0, :2], columns)
    assert simplex.softmax(logits)[0, 2] == 0
    assert simplex.softmax(logits)[1].tolist() == [0.0, 0.0, 0.0]
    assert simplex.log_softmax(logits)[1].tolist() == [-INF, -INF, -INF]


@pytest.mark.parametrize("dtype", DTYPES)
def test_drawing_follows_a_certain_row(dtype: torch.dtype) -> None:
    """One allowed category is drawn whatever its position, its logit and the dtype."""
    for position in range(5):
        for value in (-1e4, 0.0, 1e4):
            logits = torch.full((64, 5), -INF, dtype=dtype)
            logits[:, position] = value
            assert (simplex.draw_index(logits, generator=seeded()) == position).all()


def test_drawing_never_returns_a_category_of_zero_mass() -> None:
    """Zero-mass categories at the start, in the middle and at the end, where an inverse CDF may slip."""
    logits = normal(50_000, 9, dtype=torch.float32)
    logits[:, [0, 1, 4, 7, 8]] = -INF
    index = simplex.draw_index(logits, generator=seeded())
    assert index.dtype == torch.int64
    assert index.unique().tolist() == [2, 3, 5, 6]


def test_many_draws_are_those_of_many_rows_at_the_price_of_one() -> None:
    weights = normal(7, 50).exp()
    weights[1], weights[2, 0] = 0.0, torch.nan
    expected = simplex.inverse_cdf(weights.expand(30, 7, 50), seeded())

    class Sizes(TorchDispatchMode):
        largest = 0

        def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            result = op(*args, **(kwargs or {}))
            self.largest = max(self.largest, result.numel())
            return result

    with Sizes() as sizes:
        index = simplex.inverse_cdf(weights, seeded(), 30)
    assert torch.equal(index, expected)
    assert sizes.largest == weights.numel(), "no tensor has samples and categories"


def test_gumbel_noise_has_the_shape_of_its_model_and_is_finite() -> None:
    """Ten million float32 draws: -log(-log(u)) would be infinite at u = 0 and at u rounded to 1."""
    noise = simplex.gumbel(torch.empty(1_000, 10_000), generator=seeded())
    assert noise.shape == (1_000, 10_000)
    assert noise.dtype == torch.float32
    assert torch.isfinite(noise).all()


def test_conditional_gumbel_lets_the_given_category_win() -> None:
    """Impossible categories stay impossible; one of probability exp(-1e4) has a well-defined law."""
    log_p = torch.log_softmax(3 * normal(200, 6, dtype=torch.float32), -1)
    log_p[:, 5], log_p[-1] = -INF, torch.tensor([0.0, -1e4, *[-INF] * 4])
    index = torch.arange(200) % 5
    index[-1] = 1
    perturbed = simplex.conditional_gumbel(log_p, index, 50, generator=seeded())
    assert perturbed.shape == (50, 200, 6)
    assert (perturbed.argmax(-1) == index).all()
    assert torch.equal(torch.isfinite(perturbed), torch.isfinite(log_p).expand(50, 200, 6))


def test_the_limits_of_lemma_1() -> None:
    """By the lead l - s of the winner's logit: (a) increasing, (b) 1 far below, (c) l - s far above."""
    lead = torch.linspace(-40, 40, 8001, dtype=torch.float64)
    exact = torch.nn.functional.softplus(lead) * (1 + (-lead).exp())
    assert (exact.diff() > -1e-12).all()
    assert (exact[lead > -30].diff() > 0).all()
    assert_close(exact[0], torch.tensor(1.0, dtype=torch.float64), 1e-9)
    assert_close(exact[-1], lead[-1], 1e-9)
    gap = gapped.expected_gap(torch.sigmoid(lead))
    # The guard at p = 1 keeps the gap below (c), by less than a thousandth where l - s is at most 4.5.
    assert_close(gap[lead <= 4.5], exact[lead <= 4.5], 1e-3)
    assert (gap.diff() >= 0).all()
    assert (gap[lead > 15] < 11.52).all()
    # The other side of (c), wrong on purpose: the logit itself, not its lead, would not do.
    assert float((exact - lead.clamp(min=1)).abs().max()) > 0.3


@pytest.mark.parametrize("dtype", DTYPES)
def test_expected_gap_of_rare_and_certain_categories(dtype: torch.dtype) -> None:
    """-log(1 - p)/p = 1 + p/2 + ..., where the formula as it stands gives 0/0 or 0; guarded at p = 1."""
    p = torch.tensor([0.0, 1e-38, 1e-20, 1e-12, 1e-8, 1e-6, 2.9e-5, 3.1e-5, 1e-3, 0.5, 1 - 1e-6, 1.0])
    gap = gapped.expected_gap(p.to(dtype))
    assert gap.dtype == dtype
    guarded = p.to(dtype).double() * (1 - 1e-5)
    expected = torch.where(guarded > 0, -torch.log1p(-guarded) / guarded.clamp(min=1e-300), 1.0)
    tolerance = {torch.float64: 1e-15, torch.float32: 1e-3}.get(dtype, 2 * torch.finfo(dtype).eps)
    assert_close(gap.double(), expected, tolerance)
    if dtype is torch.float32:
        assert_close(gap[:-2], expected[:-2], 1e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_expected_odds_keep_their_digits_from_the_rarest_to_a_certain_category(dtype: torch.dtype) -> None:
    """Against the series at 1 and the limit at 0, where the quotient is of no use."""
    assert simplex.log_expected_odds(torch.tensor([-torch.inf, 0.0], dtype=dtype)).exp().tolist() == [0, 0.5]
    loss = torch.logspace(-6, -0.7, 300, dtype=torch.float64)
    n = torch.arange(200, dtype=torch.float64)
    series = (1 - loss).log() + (loss.unsqueeze(-1) ** n / (n + 2)).sum(-1).log()
    tolerance = 2e-5 if dtype == torch.float32 else 1e-11
    assert_close(simplex.log_expected_odds(torch.log1p(-loss).to(dtype)).double(), series, tolerance)
    rare = torch.tensor([-1e2, -1e4, -1e8], dtype=dtype)
    assert_close(simplex.log_expected_odds(rare), rare + (-rare - 1).log(), tolerance)
