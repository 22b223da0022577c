"""Norms of gradients along training: sums on the device, exact zeros told from tiny numbers."""

from __future__ import annotations

import math

import pytest
import torch

from gapped_lab.fleet.optimizer import GradientNorms


def test_a_tiny_gradient_is_not_zero() -> None:
    norms = GradientNorms({"query": torch.zeros(3, 1, 2)})
    tiny = 1.4e-45  # the least float32
    for step in ([[3.0, 4.0], [0.0, 0.0], [tiny, 0.0]], [[0.0, 0.0], [0.0, -0.0], [0.0, -tiny]]):
        norms.add("query", torch.tensor(step).unsqueeze(1))
    means = norms.means(2)
    least = float(torch.tensor(tiny))
    assert means["query_gradient_norm"].tolist() == pytest.approx([2.5, 0.0, least], rel=1e-12)
    assert means["query_gradient_zero"].tolist() == [0.5, 1.0, 0.0]
    assert math.isclose(least, tiny, rel_tol=0.1)
    norms.clear()
    assert not any(total.any() for total in norms.state())
