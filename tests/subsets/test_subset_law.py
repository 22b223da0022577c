"""The law of k of n elements against all subsets written out, and the sampler's own probabilities."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from conftest import assert_close, normal, seeded
from statistical import chi_squared, counts_of, require_law, require_rejected
from subset_enumeration import covariances, enumerate_law, marginals, plackett_luce
from torch import Tensor

import gapped
from gapped import simplex
from gapped.subsets import conditional_bernoulli, enumeration

EVERY_SIZE = [(n, k) for n in range(1, 11) for k in range(n + 1)]


@pytest.fixture(params=["tree", "options"])
def method(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Both ways to compute: by the tree of sizes alone, and by enumeration wherever that is possible."""
    monkeypatch.setattr(conditional_bernoulli, "MOST_OPTIONS", 0 if request.param == "tree" else 10**9)
    return request.param


@pytest.mark.parametrize("n", range(1, 11))
def test_the_law_is_exact_for_every_size(n: int, method: str) -> None:
    theta, g = 2 * normal(n, seed=n), normal(n, seed=3)
    for k in range(n + 1):
        law = enumerate_law(theta, k)
        assert_close(gapped.subsets.marginals(theta, k), marginals(theta, k), 1e-10)
        assert_close(gapped.subsets.log_prob(theta, k, law.subsets), law.p.log(), 1e-10)
        assert_close(gapped.subsets.entropy(theta, k), -(law.p * law.p.log()).sum(), 1e-10)
        product = conditional_bernoulli.covariance_product(g, simplex.shift(theta), k)
        assert_close(product, covariances(theta, k) @ g, 1e-10)


def test_the_functions_of_the_law_are_differentiable_twice(method: str) -> None:
    theta = normal(2, 6).requires_grad_()
    theta_with_absent = torch.cat([theta[0], theta.new_full((2,), -torch.inf)])
    sample = torch.tensor([0.0, 1, 1, 0, 0, 1])

    def functions(theta: Tensor) -> tuple[Tensor, ...]:
        law = gapped.subsets
        return law.marginals(theta, 3), law.entropy(theta, 2), law.log_prob(theta, 3, sample)

    assert torch.autograd.gradcheck(functions, theta)
    assert torch.autograd.gradgradcheck(functions, theta)
    (slope,) = torch.autograd.grad(
        gapped.subsets.entropy(theta_with_absent, 7).sum(), theta, create_graph=True
    )
    assert not slope.any()
    assert torch.autograd.grad(slope.sum(), theta)[0].isfinite().all()


def test_a_sample_with_one_entry_for_all_elements_broadcasts() -> None:
    """Its entry stands for every element: all of them are selected, or none."""
    theta = normal(2, 4)
    for k in range(5):
        for value in (0.0, 1.0):
            whole = torch.full((3, 2, 4), value)
            expected = gapped.subsets.log_prob(theta, k, whole)
            assert expected.isfinite().all() == (k == 4 * value)
            assert torch.equal(gapped.subsets.log_prob(theta, k, whole[..., :1]), expected)
            assert torch.equal(gapped.subsets.log_prob(theta, k, whole[0, 0, 0]), expected[0])
            across = gapped.subsets.log_prob(theta.mT, k, whole.mT[:, :1], dim=0)
            assert torch.equal(across, expected)


@pytest.mark.parametrize("shape", [(3,), (5, 3, 4), (2, 5), (3, 4)])
def test_a_sample_of_another_shape_is_refused(shape: tuple[int, ...]) -> None:
    with pytest.raises(gapped.GappedError, match=r"sample: got a tensor of shape .*, expected a shape that"):
        gapped.subsets.log_prob(normal(2, 4), 2, torch.zeros(shape))


def test_what_the_law_cannot_give_has_no_probability() -> None:
    samples = torch.tensor([[1.0, 1, 0, 0], [1, 0, 0, 0], [0, 1, 1, 0], [0.5, 0.5, 1, 0]])
    mask = torch.tensor([True, True, False, True])
    values = gapped.subsets.log_prob(torch.zeros(4), 2, samples, mask=mask).exp()
    assert_close(values, torch.tensor([1 / 3, 0, 0, 0]), 1e-6)


def forced_probabilities(
    monkeypatch: pytest.MonkeyPatch, theta: Tensor, k: int, subsets: Tensor
) -> tuple[Tensor, Tensor]:
    """The probability that the sampler's own decisions lead to each of the subsets, and what it returns.

    Each call of `inverse_cdf` gets the weights of a level's decisions, from the root down: how many of the
    elements to draw from the left half of each node. It is told the number that leads to the subset, and the
    probability that the weights give that number is multiplied on.
    """
    n = len(theta)
    is_complement = 2 * k > n
    targets = (1 - subsets if is_complement else subsets).long()
    depth = (n - 1).bit_length()
    total = torch.ones(len(subsets), dtype=torch.float64)
    calls = 0

    def forced(weights: Tensor, generator: Any = None) -> Tensor:
        nonlocal total, calls
        calls += 1
        width = 2 ** (depth - calls)
        padded = torch.nn.functional.pad(targets, (0, 2**depth - n))
        left = padded.unflatten(-1, (-1, 2, width)).sum(-1)[..., 0][..., : weights.shape[-2]]
        p = weights.gather(-1, left.unsqueeze(-1)).squeeze(-1) / weights.sum(-1)
        total = total * p.prod(-1)
        return left

    monkeypatch.setattr(simplex, "inverse_cdf", forced)
    drawn = conditional_bernoulli.draw(theta.expand(len(subsets), n), k)
    assert calls == depth
    return total, drawn


@pytest.mark.parametrize(("n", "k"), [(n, k) for n, k in EVERY_SIZE if 0 < k < n])
def test_the_sampler_has_exactly_this_law(n: int, k: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(conditional_bernoulli, "MOST_OPTIONS", 0)
    theta = 2 * normal(n, seed=n)
    law = enumerate_law(theta, k)
    p, drawn = forced_probabilities(monkeypatch, theta, k, law.subsets)
    assert_close(p, law.p, 1e-12)
    assert torch.equal(drawn.double(), law.subsets)


@pytest.mark.parametrize(("n", "k"), [(4, 2), (5, 2), (8, 4), (8, 7)])
def test_enumerated_subsets_change_where_the_running_probability_does(
    n: int, k: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    theta = 2 * normal(n, seed=n)
    subsets = enumeration._table(n, k, theta) > 0
    p = torch.stack([theta[row].sum() for row in subsets]).softmax(0)
    edges = torch.cat([p.new_zeros(1), p.cumsum(0)])
    inside = torch.stack([edges[:-1] + 1e-9, edges[1:] - 1e-9], -1)
    monkeypatch.setattr(simplex, "uniform", lambda *_: inside)
    drawn = conditional_bernoulli.draw(theta.expand(len(p), 2, n), k)
    assert torch.equal(drawn, subsets.unsqueeze(1).expand_as(drawn))
    assert len(subsets) == len(p) == len(subsets.unique(dim=0))


def test_samples_follow_the_law_and_the_largest_noisy_logits_do_not(method: str) -> None:
    theta, draws = torch.tensor([2.0, 0.0, -1.0, 1.0, 0.5, -0.5]).double(), 40_000
    law = enumerate_law(theta, 3)

    def p_value(samples: Tensor) -> float:
        bits = 2 ** torch.arange(6)
        place = torch.full((64,), -1)
        place[(law.subsets.long() @ bits)] = torch.arange(20)
        return chi_squared(counts_of(place[samples.long() @ bits], 20), law.p)

    require_law(p_value(gapped.subset(theta.expand(draws, 6), 3, generator=seeded())))
    noisy = theta + simplex.gumbel(theta.expand(draws, 6), seeded())
    wrong = torch.zeros(draws, 6).scatter(-1, noisy.topk(3).indices, 1.0)
    require_rejected(p_value(wrong))
    assert (plackett_luce(theta, 3) - law.p).abs().max() > 0.01


def log_space_scan(theta: Tensor, k: int) -> Tensor:
    """log e_0, ..., log e_k by the recursion over elements, in float64."""
    # Not -inf, of which torch cannot differentiate the sum.
    nothing = torch.full((1,), -1e30, dtype=torch.float64)
    table = torch.cat([torch.zeros(1), nothing.expand(k)])
    for value in theta:
        table = torch.logaddexp(table, torch.cat([nothing, table[:-1] + value]))
    return table


@pytest.mark.parametrize(("n", "k"), [(300, 7), (300, 150), (300, 293), (257, 64)])
@pytest.mark.parametrize("scale", [0.0, 1.0, 30.0])
def test_many_elements_agree_with_a_recursion_in_log_space(n: int, k: int, scale: float) -> None:
    theta = (scale * normal(n)).requires_grad_()
    expected = log_space_scan(theta, k)[k]
    (slope,) = torch.autograd.grad(expected, theta)
    scores = theta.detach()
    assert_close(conditional_bernoulli.log_normaliser(scores, k), expected.detach(), 1e-10)
    assert_close(gapped.subsets.marginals(scores, k), slope, 1e-10)


@pytest.mark.parametrize("scale", [1e4, 1e30])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_logits_of_any_size_are_stable(scale: float, dtype: torch.dtype) -> None:
    """Far apart, the largest ones are selected; ties among them are broken by chance."""
    theta = torch.arange(200.0, dtype=dtype).mul(scale)[torch.randperm(200, generator=seeded())]
    top = torch.zeros(200, dtype=dtype).scatter(0, theta.topk(50).indices, 1.0)
    assert torch.equal(gapped.subset(theta, 50), top)
    assert torch.equal(gapped.subsets.marginals(theta, 50), top)
    tied = torch.full((200,), -scale, dtype=dtype)
    tied[:10], tied[10:20] = scale, 0.0
    chosen = gapped.subset(tied.expand(50, 200), 15, generator=seeded())
    assert (chosen[:, :10] == 1).all()
    assert (chosen.sum(-1) == 15).all()
    assert (chosen[:, 20:] == 0).all()
    assert_close(gapped.subsets.marginals(tied, 15)[10:20], torch.full((10,), 0.5), 1e-6)
    weight = torch.linspace(-1, 1, 200, dtype=dtype)
    product = conditional_bernoulli.covariance_product(weight, simplex.shift(tied), 15)
    assert product.isfinite().all()
    assert product[10:20].abs().min() > 0
    assert not product[20:].any()


@pytest.mark.parametrize(("n", "k", "seconds"), [(1024, 64, 2.0), (4096, 256, 5.0)])
def test_thousands_of_elements_take_a_moment(n: int, k: int, seconds: float) -> None:
    """In processor time, and with a wide margin."""
    logits = normal(2, n, dtype=torch.float32).requires_grad_()
    start = time.process_time()
    sample = gapped.subset(logits, k, 0.5, estimator="gst:gap=1")
    sample.backward(normal(2, n, seed=2, dtype=torch.float32))
    assert time.process_time() - start < seconds
    assert (sample.sum(-1) == k).all()
    assert logits.grad.isfinite().all()
    assert_close(gapped.subsets.marginals(logits.detach(), k).sum(-1), torch.full((2,), float(k)), 1e-4)


def test_blocks_of_rows_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    logits, weight = normal(5, 3, 12), normal(5, 3, 12, seed=2)
    functions: list[Callable[[], Tensor]] = [
        lambda: conditional_bernoulli.marginals(logits, 5),
        lambda: conditional_bernoulli.covariance_product(weight, logits, 5),
        lambda: conditional_bernoulli.log_normaliser(logits, 5),
        lambda: conditional_bernoulli.draw(logits, 5, seeded()),
    ]
    whole = [function() for function in functions]
    monkeypatch.setitem(conditional_bernoulli._BLOCK, "cpu", 200)
    for function, expected in zip(functions[:3], whole, strict=False):
        assert_close(function(), expected)
    assert functions[3]().shape == logits.shape
    assert (functions[3]().sum(-1) == 5).all()


def test_the_axis_is_that_of_the_logits_where_samples_have_more() -> None:
    logits = torch.tensor([2.0, 0.0, 0.0, -1.0])
    sets = torch.tensor([[1.0, 1, 0, 0], [1, 0, 1, 0], [0, 1, 1, 0], [0, 0, 1, 1]])
    expected = gapped.subsets.log_prob(logits, 2, sets)
    assert torch.equal(gapped.subsets.log_prob(logits, 2, sets, dim=0), expected)
    table = normal(3, 3).float()
    drawn = torch.stack([gapped.subset(table, 2, dim=1, generator=seeded(seed)) for seed in range(5)])
    single = torch.stack([gapped.subsets.log_prob(table, 2, each, dim=1) for each in drawn])
    assert torch.equal(gapped.subsets.log_prob(table, 2, drawn, dim=1), single)


def test_large_terms_do_not_cancel_in_single_precision() -> None:
    logits = torch.tensor([0.0] * 6 + [-1e9] * 6)
    chosen = torch.tensor([1.0] * 7 + [0.0] * 5)
    assert_close(gapped.subsets.entropy(logits, 7), torch.tensor(6.0).log(), 1e-6)
    assert_close(gapped.subsets.log_prob(logits, 7, chosen), -torch.tensor(6.0).log(), 1e-6)
    wide = 1000 * normal(50, 500, seed=3).float()
    assert (gapped.subsets.entropy(wide, 250) >= 0).all()


@pytest.mark.filterwarnings("ignore:.torch.jit.script:DeprecationWarning")  # torch's own, in forward mode
@pytest.mark.parametrize("n", [6, 16])
def test_hessians_and_forward_derivatives_of_the_law(n: int) -> None:
    """Forward over reverse equals reverse over reverse; with an element that does not exist, too."""
    theta, sample = normal(n), (torch.arange(n) < 3).double()
    theta[-1] = -torch.inf

    def entropy(theta: Tensor) -> Tensor:
        return gapped.subsets.entropy(theta, 3)

    def log_prob(theta: Tensor) -> Tensor:
        return gapped.subsets.log_prob(theta, 3, sample)

    for f in (entropy, log_prob):
        expected = torch.autograd.functional.hessian(f, theta)
        assert expected.isfinite().all()
        assert_close(torch.func.hessian(f)(theta), expected, 1e-10)
    forward = torch.func.jacfwd(lambda theta: gapped.subsets.marginals(theta, 3))(theta)
    assert_close(forward[:-1, :-1], covariances(theta[:-1], 3), 1e-10)
    assert not forward[-1].any()


@pytest.mark.parametrize(("n", "k"), [(9, 1), (9, 4), (16, 8), (64, 2), (200, 5)])
@pytest.mark.parametrize("scale", [1.0, 30.0, 300.0])
def test_running_sums_give_what_the_tree_gives(n: int, k: int, scale: float) -> None:
    theta, g = scale * normal(8, n, seed=n), normal(8, n, seed=3)
    theta[1], theta[2, ::2], theta[3], theta[4, 1:] = 0.0, -torch.inf, -torch.inf, -torch.inf
    theta[5, 2] = torch.nan
    scores = simplex.shift(theta)
    g = torch.where(scores == -torch.inf, 0.0, g)
    product, chance = conditional_bernoulli.moments_of_few(g, scores, k)
    expected = conditional_bernoulli.covariance_product(g, scores, k)
    assert_close(product.nan_to_num(7.0), expected.nan_to_num(7.0), 1e-12)
    expected = conditional_bernoulli.marginals(scores, k)
    assert_close(chance.nan_to_num(7.0), expected.nan_to_num(7.0), 1e-12)
