"""Streaming moments against two passes in float64, where the textbook formula fails."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from conftest import assert_close, normal
from torch import Tensor

from gapped.diagnostics.moments import Moments


def streamed(samples: Tensor) -> Moments:
    moments = Moments(samples[0])
    for sample in samples:
        moments.add(sample)
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


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("count", [2, 3, 100])
def test_equal_to_two_passes(count, dtype):
    samples = normal(count, 4, 3, dtype=dtype)
    moments, (mean, variance) = streamed(samples), two_pass(samples)
    assert moments.mean.dtype == moments.variance.dtype == torch.float64
    assert_close(moments.mean, mean, 1e-13)
    assert_close(moments.variance, variance, 1e-12)


@pytest.mark.parametrize("offset", [1e6, 1e8])
def test_a_large_offset_costs_no_digits(offset):
    samples = normal(200, 5) + offset
    mean, variance = two_pass(samples)
    moments = streamed(samples)
    assert_close(moments.mean, mean, 1e-14)
    assert_close(moments.variance, variance, 1e-6)
    wrong = (naive_variance(samples) / variance - 1).abs()
    assert wrong.min() > 1e-6, "the textbook formula passes as well: the test has no power"


def test_reset_starts_over():
    moments = streamed(normal(50, 3) + 7)
    kept = [tensor.data_ptr() for tensor in moments.tensors()]
    moments.reset()
    samples = normal(20, 3, seed=2)
    for sample in samples:
        moments.add(sample)
    assert_close(moments.variance, two_pass(samples)[1], 1e-12)
    assert [tensor.data_ptr() for tensor in moments.tensors()] == kept, "a captured graph would miss these"


def test_unbiased_and_of_single_samples_undefined():
    samples = normal(2, 6)
    # Of two numbers the unbiased variance is half their squared distance.
    assert_close(streamed(samples).variance, (samples[0] - samples[1]) ** 2 / 2, 1e-13)
    assert streamed(samples[:1]).variance.isnan().all()


def test_no_graph_is_kept():
    weight = normal(3).requires_grad_()
    moments = Moments(weight)
    for factor in np.arange(1.0, 4.0):
        moments.add(weight * factor)
    assert not moments.mean.requires_grad
    assert not moments.variance.requires_grad
    assert_close(moments.mean, weight.detach() * 2, 1e-13)
