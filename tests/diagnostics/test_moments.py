"""Streaming moments against two passes in float64, and intervals against their declared rate."""

from __future__ import annotations

import math

import pytest
import torch
from conftest import assert_close, normal, seeded
from statistical import LEVEL, binomial, mean_is, require_law, require_rejected
from torch import Tensor

import gapped
from gapped.cli.diagnose import find_problem
from gapped.diagnostics.gradients import CostGradients, Reference
from gapped.diagnostics.moments import GradientStream, Interval, Moments, norm_interval


def one_by_one(samples: Tensor) -> Moments:
    moments = Moments(samples[0])
    for sample in samples:
        moments.add(sample)
    return moments


def in_groups(samples: Tensor) -> Moments:
    moments = Moments(samples[0])
    for group in samples.tensor_split([1, 8]):
        if len(group):
            moments.merge(group)
    return moments


def two_pass(samples: Tensor) -> tuple[Tensor, Tensor]:
    values = samples.double().numpy()
    mean = values.mean(0)
    variance = ((values - mean) ** 2).sum(0) / (len(values) - 1)
    return torch.from_numpy(mean), torch.from_numpy(variance)


def naive_variance(samples: Tensor) -> Tensor:
    """The wrong twin: E[x^2] - E[x]^2, in float64."""
    values, n = samples.double(), len(samples)
    return ((values**2).mean(0) - values.mean(0) ** 2) * n / (n - 1)


both_ways = pytest.mark.parametrize("streamed", [one_by_one, in_groups])


@both_ways
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("count", [2, 3, 100])
def test_equal_to_two_passes(count, dtype, streamed):
    samples = normal(count, 4, 3, dtype=dtype)
    moments, (mean, variance) = streamed(samples), two_pass(samples)
    assert moments.count == count
    assert moments.mean.dtype == moments.variance.dtype == torch.float64
    assert_close(moments.mean, mean, 1e-13)
    assert_close(moments.variance, variance, 1e-12)


@both_ways
@pytest.mark.parametrize("offset", [1e6, 1e8])
def test_a_large_offset_costs_no_digits(offset, streamed):
    samples = normal(200, 5) + offset
    mean, variance = two_pass(samples)
    moments = streamed(samples)
    assert_close(moments.mean, mean, 1e-14)
    assert_close(moments.variance, variance, 1e-6)
    wrong = (naive_variance(samples) / variance - 1).abs()
    assert wrong.min() > 1e-6, "the textbook formula passes as well: the test has no power"


def test_reset_starts_over():
    moments = one_by_one(normal(50, 3) + 7)
    addresses = [tensor.data_ptr() for tensor in moments.tensors()]
    moments.reset()
    samples = normal(20, 3, seed=2)
    for sample in samples:
        moments.add(sample)
    assert_close(moments.variance, two_pass(samples)[1], 1e-12)
    assert [tensor.data_ptr() for tensor in moments.tensors()] == addresses, (
        "a captured graph would miss these"
    )


def test_one_sample_has_no_variance_and_no_graph_is_kept():
    moments = one_by_one(normal(1, 6).requires_grad_())
    assert moments.variance.isnan().all()
    assert not moments.mean.requires_grad
    assert not moments.variance.requires_grad


# Intervals


def streamed_in_halves(gradients, target=None) -> GradientStream:
    stream = GradientStream(gradients.shape[1], gradients.device, target)
    for group in gradients.chunk(2):
        stream.add(group)
    return stream


@pytest.mark.parametrize("kind", ["exact", "estimated"])
def test_zero_bias_is_covered_at_the_declared_rate(kind):
    """200 repetitions at 90%, each with a reference of its own where that is estimated."""
    unbiased, biased = gapped.RLOO(2), gapped.GST(1.0, gap=1.0)
    source = CostGradients(*find_problem("quadratic", shape=(2, 3)), generator=seeded(5))
    exact = source.draw(gapped.Exact(), 1)[0]
    draws = {e: source.draw(e, 200 * 100).view(200, 100, -1) for e in (unbiased, biased)}
    averaged = source.draw(gapped.RLOO(16), 200 * 50).view(200, 50, -1)
    hits = dict.fromkeys(draws, 0)
    for estimator, repetitions in draws.items():
        for gradients, others in zip(repetitions, averaged, strict=True):
            reference = Reference("exact", exact)
            if kind == "estimated":
                reference = Reference.of("rloo", streamed_in_halves(others))
            errors = reference.errors_of(streamed_in_halves(gradients, reference.gradient), 0.9, 1e-16)
            hits[estimator] += errors["bias"].low == 0
    require_law(binomial(hits[unbiased], 200, 0.9))
    require_rejected(binomial(hits[biased], 200, 0.9))


@pytest.mark.slow
def test_zero_bias_is_covered_by_every_unbiased_member():
    names = ("Reinforce", "RLOO", "MuProp", "DisARMTree", "DisARMSticks", "ARSM", "REBAR", "ReinMax")
    members, hits = {name: getattr(gapped, name)() for name in names}, dict.fromkeys(names, 0)
    source = seeded(5)
    for _ in range(200):
        diagnosis = gapped.diagnose(*find_problem("quadratic", shape=(2, 3)), members, 1000, generator=source)
        for row in diagnosis.rows:
            hits[row.label] += row.bias.low == 0
    for label, count in hits.items():
        assert binomial(count, 200, 0.95) >= LEVEL, (label, count)


@pytest.mark.parametrize("length", [0.0, 0.2, 3.0])
def test_a_norm_is_covered_at_the_declared_rate(length):
    """Normal errors with a known covariance; the plain length, not debiased, is the wrong twin."""
    scale = torch.tensor([1.0, 0.5, 0.5, 0.2], dtype=torch.float64)
    delta = torch.zeros(4, dtype=torch.float64)
    delta[0] = length
    draws = delta + scale * normal(400, 4, seed=11)
    squares = draws.square().sum(1).tolist()
    noise, overlap = float(scale.square().sum()), float((scale**4).sum())
    hits = naive = 0
    for square in squares:
        interval = norm_interval(square, noise, overlap, float(scale[0]) ** 2, 0.9)
        hits += interval.low <= length <= interval.high
        naive += abs(math.sqrt(square) - length) <= 0.1
    assert hits >= 400 * 0.9 or binomial(hits, 400, 0.9) >= LEVEL
    if length == 0:
        require_law(binomial(hits, 400, 0.9))
        require_rejected(binomial(naive, 400, 0.9))


def test_the_overlap_is_estimated_without_bias():
    factor = normal(5, 5, seed=2)
    square = float((factor.T @ factor).square().sum())
    values, wrong = [], []
    for group in (normal(1000, 8, 5, seed=6) @ factor).unbind():
        stream = GradientStream(5, torch.device("cpu"))
        stream.add(group)
        values.append(float(stream.overlap.mean))
        wrong.append(float(torch.cov(group.T).square().sum()))
    require_law(mean_is(torch.tensor(values), square))
    require_rejected(mean_is(torch.tensor(wrong), square))


def test_the_variance_along_the_error():
    scale, delta = torch.tensor([3.0, 1.0, 0.1]).double(), torch.tensor([0.0, 50.0, 0.0]).double()
    stream = GradientStream(3, torch.device("cpu"), torch.zeros(3, dtype=torch.float64))
    for group in (delta + scale * normal(40, 100, 3)).unbind():
        stream.add(group)
    assert stream.along == pytest.approx(1.0, rel=0.1)


def test_intervals_overlap_if_they_share_a_point():
    assert Interval(1, 0, 2).overlaps(Interval(3, 2, 4))
    assert not Interval(1, 0, 2).overlaps(Interval(3, 2.1, 4))
