"""The kernels of the score-function estimators against their definitions in torch."""

from __future__ import annotations

import pytest
import torch
from conftest import seeded
from kernel_cases import DEVICE, GPU_MARKS
from statistical import chi_squared, counts_of, require_law, require_rejected
from torch import Tensor

import gapped
from gapped import simplex
from gapped.kernels import backend, runner, scores
from gapped.kernels.sampling import launch
from gapped.score import Cost, Draws, disarm, score_product
from gapped_lab.fleet.estimator_groups import Grouped, Part

SIZES = [1, 2, 3, 10, 63, 64, 65, 300]
every_size = pytest.mark.parametrize("categories", SIZES)
pytestmark = GPU_MARKS
EXACT = {"rtol": 0, "atol": 0, "equal_nan": True}
CLOSE = {"rtol": 1e-5, "atol": 1e-6, "equal_nan": True}


@pytest.fixture
def by_hand(monkeypatch: pytest.MonkeyPatch) -> None:
    """No kernels, also on a GPU, until a test turns them on."""
    monkeypatch.setattr(backend, "takes_scores", lambda logits: False)


def example(*shape: int) -> Tensor:
    """Rows relative to their largest entry: ordinary, empty, of one category, steep, with a NaN."""
    logits = 2 * torch.randn(shape, generator=seeded(7))
    rows = logits.view(-1, shape[-1])
    rows[1] = -torch.inf
    rows[2, 1:] = -torch.inf
    rows[3] *= 100
    rows[5, 0] = torch.nan
    return simplex.shift(logits).to(DEVICE)


def on_device(seed: int) -> torch.Generator:
    return torch.Generator(DEVICE).manual_seed(seed)


def indices(categories: int, *shape: int) -> Tensor:
    """All values that an index can have."""
    return torch.randint(categories + 2, shape, generator=seeded(3)).to(DEVICE)


def gradients(logits: Tensor, index: Tensor, signal: Tensor) -> list[Tensor]:
    """The products with the score of two samples, and of an antithetic pair."""
    product = scores.score(logits, index, signal)
    return [product, scores.tree_gradient(logits, index, signal[0], disarm._depth(logits.shape[-1]))]


@every_size
def test_one_hot_rows(categories: int) -> None:
    index = indices(categories, 2, 37).transpose(0, 1)
    expected = simplex.one_hot(index, categories, torch.float32)
    actual = scores.one_hot(index, categories)
    assert actual.is_contiguous()
    torch.testing.assert_close(actual, expected, **EXACT)


@every_size
@pytest.mark.parametrize("samples", [1, 3])
@pytest.mark.usefixtures("by_hand")
def test_products_with_the_score(categories: int, samples: int) -> None:
    logits = example(4, 3, categories)
    signal = torch.randn(samples, 4, generator=seeded(2)).to(DEVICE)
    index = scores.draw(logits, samples, on_device(4))
    cost = Cost(lambda z: z, logits, logits.dtype)
    expected = score_product(cost, Draws(None, index, signal), signal)
    torch.testing.assert_close(scores.score(logits, index, signal), expected, **CLOSE)


@every_size
@pytest.mark.usefixtures("by_hand")
def test_pairs_on_a_tree(categories: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Equal noise gives equal pairs, and equal costs give equal gradients."""
    estimator, logits = gapped.DisARMTree(), example(40, 3, categories)
    noise = estimator.draw(logits, on_device(4))
    pair = estimator.index(logits, noise)
    costs = torch.randn(2, 40, generator=seeded(2)).to(DEVICE)
    arguments = Cost(lambda z: z, logits, logits.dtype), Draws(noise, pair, costs)
    expected = estimator.gradient(*arguments)
    monkeypatch.setattr(backend, "takes_scores", lambda logits: True)
    assert torch.equal(estimator.index(logits, noise), pair)
    torch.testing.assert_close(estimator.gradient(*arguments), expected, **CLOSE)


def test_the_default_dtype_changes_nothing() -> None:
    logits, signal = example(8, 5), torch.ones(2, 8, device=DEVICE)
    index = indices(5, 2, 8)

    def results() -> list[Tensor]:
        return [scores.one_hot(index, 5), *gradients(logits, index, signal)]

    expected = results()
    torch.set_default_dtype(torch.float64)
    try:
        actual = results()
    finally:
        torch.set_default_dtype(torch.float32)
    torch.testing.assert_close(actual, expected, **EXACT)


def test_strided_rows_and_no_rows() -> None:
    wide = example(40, 14)
    narrow, signal = wide[:, 2:9], torch.ones(2, 40, device=DEVICE)
    noise = torch.rand(40, 7, generator=seeded()).to(DEVICE)
    index = scores.tree_index(narrow.contiguous(), noise, 4)
    assert torch.equal(scores.tree_index(narrow, noise, 4), index)
    expected = gradients(narrow.contiguous(), index, signal)
    torch.testing.assert_close(gradients(narrow, index, signal), expected, **EXACT)
    none = wide[:0]
    assert scores.draw(none, 2, None).shape == (2, 0)
    assert scores.one_hot(index[:, :0], 14).shape == (2, 0, 14)
    assert scores.tree_index(none, none, 4).shape == (2, 0)
    assert all(each.shape == (0, 14) for each in gradients(none, index[:, :0], signal[:, :0]))


def test_draws_follow_the_logits_independently() -> None:
    logits = torch.tensor([0.3, -1.0, 0.0, -torch.inf]) - 0.3
    p = logits.double().softmax(-1)
    generator = on_device(5)
    one, other = scores.draw(logits.to(DEVICE).expand(30_000, 4), 2, generator).cpu()
    joint = torch.outer(p, p).flatten()
    require_law(chi_squared(counts_of(4 * one + other, 16), joint))
    require_rejected(chi_squared(counts_of(4 * one + one, 16), joint))
    marked = scores.draw(example(8, 5), 3, generator)
    assert bool((marked[:, 1] == 5).all())
    assert bool((marked[:, 2] == 0).all())
    assert bool((marked[:, 5] == 6).all())


@pytest.mark.usefixtures("by_hand")
def test_a_fleet_estimates_with_the_kernels_as_without(monkeypatch: pytest.MonkeyPatch) -> None:
    """All kernels together, with torch's draws in place of the kernel's."""
    grouped = Grouped.of([gapped.RLOO(2), gapped.DisARMTree(), gapped.DisARMTree()], 2, DEVICE, torch.float32)
    slope = torch.randn(3, 1, 15, generator=seeded(2)).to(DEVICE)
    logits = torch.randn(3, 4, 3, 5, generator=seeded(1)).to(DEVICE)

    def cost(z: Tensor, part: Part) -> Tensor:
        # At a level where float32 has no differences left.
        return ((z.flatten(-2) * slope[part.runs]).sum(-1) + 1).double() ** 2 + 1e9

    def estimate() -> tuple[Tensor, Tensor]:
        leaf = logits.clone().requires_grad_()
        value = grouped.expectation(cost, leaf, on_device(3))
        return value.detach(), torch.autograd.grad(value.sum(), leaf)[0]

    expected = estimate()

    def draw(x: Tensor, samples: int, generator: torch.Generator) -> Tensor:
        return simplex.inverse_cdf(x.exp().expand(samples, *x.shape), generator)

    monkeypatch.setattr(scores, "draw", draw)
    monkeypatch.setattr(backend, "takes_scores", lambda logits: True)
    assert expected[1].abs().amax((1, 2, 3)).min() > 0.01
    torch.testing.assert_close(estimate(), expected, rtol=1e-5, atol=1e-6)


def test_groups_are_sampled_side_by_side_as_one_by_one() -> None:
    every = [
        gapped.GST(tau=0.5, gap=0.8, backend="triton"),
        gapped.GST(tau=0.7, gap=1.0, backend="triton"),
        gapped.GumbelRao(tau=0.5, samples=5, backend="triton"),
        gapped.ReinMax(backend="triton"),
    ]
    grouped = Grouped.of(every, 2, DEVICE, torch.float32)
    logits = torch.randn(4, 3, 2, 5, generator=seeded(1)).to(DEVICE)
    grad = torch.randn(logits.shape, generator=seeded(2)).to(DEVICE)
    leaf = logits.clone().requires_grad_()
    sample = grouped.sample(leaf, generator=on_device(3))
    (gradient,) = torch.autograd.grad(sample, leaf, grad, create_graph=True)
    with pytest.raises(RuntimeError, match="twice"):
        gradient.sum().backward()
    keys = simplex.draw_key(logits, on_device(3), 3).split(1)
    for (a, b, each), key in zip(grouped.groups, keys, strict=True):
        fused = each.fused()  # type: ignore[union-attr]
        value, index, stats = launch.forward(logits[a:b], key, fused)
        assert torch.equal(sample[a:b], value)
        assert torch.equal(gradient[a:b], launch.backward(logits[a:b], index, stats, key, grad[a:b], fused))


@pytest.mark.skipif(DEVICE.type != "cuda", reason="needs a GPU")
def test_the_kernels_apply_on_a_gpu_where_they_can() -> None:
    rows = torch.zeros(3, 5, device=DEVICE)
    assert backend.takes_scores(rows)
    assert not backend.takes_scores(rows.double())
    assert not backend.takes_scores(rows.expand(3, 5).cpu())
    assert not backend.takes_scores(torch.zeros(1, runner.LONGEST_BLOCK + 1, device=DEVICE))
