"""MVE's solver against dense matrices: many categories, extreme probabilities, single precision."""

from __future__ import annotations

import math

import pytest
import torch
from conftest import assert_close, jacobian_of_softmax, normal, pull, through_softmax
from torch import Tensor

import gapped
from gapped.pathwise.mve import _product


def dense(theta: Tensor, sample: Tensor, g: Tensor, s: float) -> Tensor:
    """One row by its formula, with the matrix inverted: a pseudo-inverse where it is singular."""
    p = torch.softmax(theta.double(), -1)
    x, identity = int(sample.argmax()), torch.eye(len(p), dtype=torch.float64)
    sums = s + p.unsqueeze(-1) + p
    weights = p.unsqueeze(-1) * p / sums
    matrix = torch.diag(weights.sum(-1)) - weights + s * torch.diag((p / sums).sum(-1))
    y = g.double() * (s + p) / (s + p + p[x])
    y[x] -= (g.double() * p / (s + p + p[x])).sum()
    u = (torch.linalg.pinv(matrix, rtol=1e-13, hermitian=True) if s == 0 else matrix.inverse()) @ y
    rest = g[x].double() * p[x] / (s + 2 * p[x]) * (identity[x] - p)
    return jacobian_of_softmax(p) @ ((s + p) / (s + 2 * p) * u) + rest


def error(theta: Tensor, s: float) -> float:
    """The largest error of a gradient, relative to the largest entry of its row, or to a tenth."""
    g = normal(*theta.shape, seed=2, dtype=theta.dtype)
    sample, gradient = pull(gapped.MVE(smoothing=s), theta, g)
    expected = torch.stack([dense(*row, s) for row in zip(theta, sample, g, strict=True)])
    return float(((gradient - expected).abs().amax(-1) / expected.abs().amax(-1).clamp(min=0.1)).max())


@pytest.mark.parametrize("s", [0.0, 1e-6, 0.1, 1.0])
@pytest.mark.parametrize("categories", [2, 3, 7, 64, 200])
@pytest.mark.parametrize("scale", [0.3, 1.0, 3.0])
def test_the_solution_is_that_of_dense_matrices(scale: float, categories: int, s: float) -> None:
    theta = scale * normal(20, categories)
    assert error(theta, s) < 1e-8
    assert error(theta.float(), s) < 1e-4


@pytest.mark.parametrize("size", [1e-34, 1e-20, 1e20, 1e36])
def test_gradients_of_any_size(size: float) -> None:
    theta, g = (normal(20, 10, seed=seed, dtype=torch.float32) for seed in (1, 2))
    plain, scaled = (pull(gapped.MVE(), theta, each)[1] for each in (g, size * g))
    torch.testing.assert_close(scaled / size, plain, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("scale", [0.3, 1.0, 3.0, 10.0])
def test_the_scaled_matrix_has_eigenvalues_of_order_one(scale: float) -> None:
    """Which is why so few steps suffice. Its entries as they stand, without smoothing."""
    p = torch.softmax(scale * normal(50, 40), -1)
    weights = p.unsqueeze(-1) * p.unsqueeze(-2) / (p.unsqueeze(-1) + p.unsqueeze(-2))
    weights = weights - torch.diag_embed(torch.diagonal(weights, dim1=-2, dim2=-1))
    d = weights.sum(-1)
    matrix = torch.diag_embed(d) - weights + d.unsqueeze(-1) * d.unsqueeze(-2) / d.sum(-1).view(-1, 1, 1)
    scaled = matrix / (d.unsqueeze(-1) * d.unsqueeze(-2)).sqrt()
    eigenvalues = torch.linalg.eigvalsh(scaled)
    assert 0.3 < eigenvalues.min() < eigenvalues.max() < 2 + 1e-9


def test_too_few_steps_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """The twin: four steps give four digits, not eight."""
    monkeypatch.setattr("gapped.pathwise.mve._STEPS", {torch.float64: 4})
    assert 1e-8 < error(normal(20, 64), 0.0) < 1e-3


def test_smoothing_leads_to_straight_through() -> None:
    theta, g = normal(50, 6), normal(50, 6, seed=2)
    _, gradient = pull(gapped.MVE(smoothing=1e9), theta, g)
    assert_close(gradient, through_softmax(torch.softmax(theta, -1), g), 1e-7)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_rare_draws_have_finite_gradients(dtype: torch.dtype) -> None:
    """Probabilities down to the smallest numbers, and a category that is drawn nevertheless."""
    theta = torch.tensor([0.0, -5.0, -20.0, -80.0, -200.0, -math.inf], dtype=dtype)
    p = torch.softmax(theta, -1)
    corners = torch.eye(6, dtype=dtype)[:5]
    points = torch.stack([p.expand(5, 6), corners])
    for s in (0.0, 1e-6, 1.0):
        gradient = _product(normal(5, 6, dtype=dtype), points, s)
        assert gradient.abs().max() < 10
        assert (gradient[:, 5] == 0).all()


@pytest.mark.parametrize("s", [0.0, 0.01])
def test_a_category_too_rare_for_its_reciprocal_is_as_good_as_none(s: float) -> None:
    rare = torch.tensor([-50.0, -80.0, -87.0, -88.0, -90.0, -95.0, -103.0, -110.0]).unsqueeze(-1)
    rest = normal(8, 3, dtype=torch.float32)
    g = normal(8, 4, seed=2, dtype=torch.float32)
    _, gradient = pull(gapped.MVE(smoothing=s), torch.cat([rest, rare], -1), g)
    _, expected = pull(gapped.MVE(smoothing=s), rest, g[:, :3])
    assert_close(gradient[:, :3], expected, 1e-6)
    assert gradient[:, 3].abs().max() < 1e-6


def at(categories: Tensor, theta: Tensor, g: Tensor, tau: float, s: float) -> Tensor:
    """The gradient of each row, given the drawn categories."""
    p = torch.softmax(theta / tau, -1)
    return _product(g, torch.stack([p, torch.eye(theta.shape[-1], dtype=theta.dtype)[categories]]), s)


@pytest.mark.parametrize("s", [0.0, 0.1])
def test_a_drawn_category_has_its_share_however_low_the_temperature(s: float) -> None:
    """At 0.1 its probability in the formula is 8e-40, which float32 does not hold and float64 does."""
    theta, g = torch.tensor([[0.0, -1.0, -0.5, -9.0]]), torch.tensor([[1.0, -2.0, 0.5, 3.0]])
    for tau in (0.2, 0.1, 0.05):
        single, double = (
            at(torch.tensor([3]), theta.to(dtype), g.to(dtype), tau, s)
            for dtype in (torch.float32, torch.float64)
        )
        assert double.abs().max() > 1e-4
        torch.testing.assert_close(single.double(), double, rtol=2e-6, atol=1e-7)


@pytest.mark.parametrize(("dtype", "gap"), [(torch.float32, 20.0), (torch.float64, 40.0)])
def test_next_to_certainty_the_small_gradients_keep_their_digits(dtype: torch.dtype, gap: float) -> None:
    """The likely category of three was drawn; to first order in p = exp(-gap) the gradient has a closed form.

    The weight between the rare ones is p/2, that from each to the likely one p. With the likely one's u at 0,
    3 u_0 - u_1 = 2 g_0 and 3 u_1 - u_0 = 2 g_1; the gradient of a rare one is p (u - g_2)/2.
    """
    rare = math.exp(-gap)
    theta = torch.tensor([[-gap, -gap, 0.0]], dtype=dtype)
    g = torch.tensor([[1.0, -2.0, 0.4]], dtype=dtype)
    single = at(torch.tensor([2]), theta, g, 1.0, 0.0)
    u = torch.tensor([(3 * 1.0 - 2.0) / 4, (3 * -2.0 + 1.0) / 4], dtype=dtype)
    low = rare * (u - 0.4) / 2
    torch.testing.assert_close(
        single, torch.cat([low, -low.sum(0, keepdim=True)]).unsqueeze(0), rtol=1e-6, atol=0
    )


def test_rows_in_blocks_are_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    theta, g = normal(4, 5, 7), normal(4, 5, 7, seed=2)
    estimator = gapped.MVE(smoothing=torch.linspace(0, 1, 5))
    expected = pull(estimator, theta, g)[1]
    monkeypatch.setattr("gapped.pathwise.mve._ON_CPU", 3 * 49)
    assert_close(pull(estimator, theta, g)[1], expected)


def test_it_has_no_kernel() -> None:
    estimator, message = gapped.MVE(backend="triton"), r"backend: got 'triton', .* has no kernel"
    for draw in (estimator.sample, estimator.choose, estimator.gate):
        with pytest.raises(gapped.GappedError, match=message):
            draw(torch.zeros(3))
