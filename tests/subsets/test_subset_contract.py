"""The contract of `gapped.subset`: shapes, dtypes, masks, transforms, errors."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from conftest import DTYPES, TOLERANCE, assert_close, assert_equal, normal, seeded
from torch import Tensor

import gapped

ESTIMATORS: dict[str, Any] = {"simple": "simple", "gst": "gst:gap=1", "gst-wide": gapped.GST(gap=2.0)}
every_estimator = pytest.mark.parametrize("estimator", ESTIMATORS.values(), ids=ESTIMATORS)
# Enumerated and by the tree; the others selected directly or through those that are left out.
SIZES = [(5, 2), (12, 4), (12, 9)]
every_size = pytest.mark.parametrize(("n", "k"), SIZES)


def pulled(logits: Tensor, k: int, weight: Tensor, *how: Any, **more: Any) -> tuple[Tensor, Tensor]:
    leaf = logits.detach().requires_grad_()
    sample = gapped.subset(leaf, k, *how, generator=seeded(), **more)
    return sample.detach(), torch.autograd.grad(sample, leaf, weight)[0]


@every_estimator
@every_size
@pytest.mark.parametrize("dtype", DTYPES)
def test_exactly_k_in_every_dtype(estimator: Any, n: int, k: int, dtype: torch.dtype) -> None:
    logits, weight = normal(20, n, dtype=dtype), normal(20, n, seed=2, dtype=dtype)
    sample, gradient = pulled(logits, k, weight, 0.7, estimator=estimator)
    assert sample.dtype == gradient.dtype == dtype
    assert ((sample == 0) | (sample == 1)).all()
    assert ((sample == 1).sum(-1) == k).all()
    exact_sample, exact = pulled(logits.double(), k, weight.double(), 0.7, estimator=estimator)
    same = (exact_sample == sample).all(-1)
    assert same.sum() > 10
    assert_close(gradient[same].double(), exact[same], 10 * TOLERANCE[dtype])
    soft, _ = pulled(logits, k, weight, 0.7, False, estimator=estimator)
    assert_close(soft.double().sum(-1), torch.full((20,), float(k)), 4 * TOLERANCE[dtype])


@every_estimator
@pytest.mark.parametrize(("n", "k"), [(1, 0), (1, 1), (6, 0), (6, 6), (40, 0), (40, 40)])
def test_nothing_or_everything(estimator: Any, n: int, k: int) -> None:
    sample, gradient = pulled(normal(3, n), k, normal(3, n, seed=2), estimator=estimator)
    assert torch.equal(sample, torch.full_like(sample, float(k == n)))
    assert not gradient.any()
    assert_close(gapped.subsets.marginals(normal(3, n), k), sample)
    assert_close(gapped.subsets.entropy(normal(3, n), k), torch.zeros(3), 1e-12)


@every_estimator
@every_size
@pytest.mark.parametrize("dim", [0, 1, -2])
def test_any_axis_equals_transposing(estimator: Any, n: int, k: int, dim: int) -> None:
    logits, weight = normal(3, 4, n), normal(3, 4, n, seed=2)
    expected = pulled(logits, k, weight, 0.7, estimator=estimator)
    moved = (logits.movedim(-1, dim), k, weight.movedim(-1, dim), 0.7)
    for ours, theirs in zip(pulled(*moved, estimator=estimator, dim=dim), expected, strict=True):
        assert_close(ours.movedim(dim, -1), theirs)
    law = gapped.subsets
    assert_close(law.marginals(moved[0], k, dim=dim).movedim(dim, -1), law.marginals(logits, k))
    assert_close(law.entropy(moved[0], k, dim=dim), law.entropy(logits, k))
    sample = expected[0].movedim(-1, dim)
    assert_close(law.log_prob(moved[0], k, sample, dim=dim), law.log_prob(logits, k, expected[0]))


@every_estimator
@pytest.mark.parametrize("k", [1, 2, 4, 6])
@pytest.mark.parametrize("n", [8, 14])
def test_masking_equals_deleting(estimator: Any, k: int, n: int) -> None:
    """In the law and, given the subset, in the gradient."""
    logits, weight = normal(n).expand(300, n), normal(n, seed=2).expand(300, n)
    exists = torch.arange(n) % 4 != 1
    kept = logits[:, exists]
    law, how = gapped.subsets, {"mask": exists}
    assert_close(law.marginals(logits, k, **how)[:, exists], law.marginals(kept, k), 1e-12)
    assert_close(law.entropy(logits, k, **how), law.entropy(kept, k), 1e-12)
    sample, gradient = pulled(logits, k, weight, 0.7, estimator=estimator, mask=exists)
    assert not sample[:, ~exists].any()
    assert not gradient[:, ~exists].any()
    assert (sample.sum(-1) == k).all()
    absent = logits.masked_fill(~exists, -torch.inf)
    for ours, theirs in zip(
        pulled(absent, k, weight, 0.7, estimator=estimator), (sample, gradient), strict=True
    ):
        assert torch.equal(ours, theirs)
    # Other draws: gradients are compared where both drew the same subset.
    other, expected = pulled(kept, k, weight[:, exists], 0.7, estimator=estimator)
    i, j = (sample[:, None, exists] == other).all(-1).nonzero().unbind(-1)
    assert len(i) > 10
    assert_close(gradient[i][:, exists], expected[j], 1e-12)


@every_estimator
@pytest.mark.parametrize("n", [6, 20])
def test_too_few_elements_are_all_selected(estimator: Any, n: int) -> None:
    logits, weight = normal(4, n), normal(4, n, seed=2)
    exists = torch.zeros(4, n, dtype=torch.bool)
    exists[1, :1], exists[2, :2], exists[3, :3] = True, True, True
    sample, gradient = pulled(logits, 3, weight, 0.7, estimator=estimator, mask=exists)
    assert torch.equal(sample, exists.to(sample))
    assert not gradient.any()
    soft, _ = pulled(logits, 3, weight, 0.7, False, estimator=estimator, mask=exists)
    assert_close(soft, exists.to(sample))
    assert_close(gapped.subsets.entropy(logits, 3, mask=exists), torch.zeros(4), 1e-12)
    assert_close(gapped.subsets.log_prob(logits, 3, sample, mask=exists), torch.zeros(4), 1e-12)


@every_size
@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_a_row_without_a_law_is_nan(n: int, k: int, value: float) -> None:
    logits = normal(3, n)
    logits[1, 2] = value
    sample = gapped.subset(logits, k, generator=seeded()).nan_to_num()
    law = gapped.subsets
    for result in (law.marginals(logits, k), law.entropy(logits, k), law.log_prob(logits, k, sample)):
        assert result[1].isnan().all()
        assert result[[0, 2]].isfinite().all()


@every_estimator
@every_size
def test_temperatures_and_gaps_per_row(estimator: Any, n: int, k: int) -> None:
    logits, weight = normal(3, n), normal(3, n, seed=2)
    taus, gap = torch.tensor([0.5, 1.0, 2.0]), torch.tensor([0.1, 1.0, 3.0])
    if isinstance(estimator, gapped.GST):
        estimator = gapped.GST(gap=gap)
    _, gradient = pulled(logits, k, weight, taus, estimator=estimator)
    for row in range(3):
        one = gapped.GST(gap=gap[row].item()) if isinstance(estimator, gapped.GST) else estimator
        _, expected = pulled(logits, k, weight, taus[row].item(), estimator=one)
        assert_close(gradient[row], expected[row], 1e-7)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((5,), "k: got 5, expected an integer from 0 to 4"),
        ((-1,), "k: got -1"),
        ((2.0,), "k: got 2.0"),
        ((True,), "k: got True"),
        ((2, 0.0), "tau: got 0.0"),
        ((2, torch.ones(3)), "tau: got a tensor of shape"),
        ((2, 1.0, 1), "hard: got 1"),
    ],
)
def test_bad_arguments(arguments: tuple[Any, ...], message: str) -> None:
    with pytest.raises(gapped.GappedError, match=message):
        gapped.subset(torch.zeros(2, 4), *arguments)


@pytest.mark.parametrize(
    ("estimator", "message"),
    [
        ("sfess", 'estimator: got .sfess., expected "simple" .or "straight-through"., or a gap'),
        (gapped.StraightThrough(0.5), "tau and hard are arguments here"),
        ("straight-through:draw=argmax", "draw: got 'argmax', expected 'sample'"),
        (gapped.ReinMax(), "estimator: got an object of type ReinMax"),
        (gapped.GST(tau=0.5), "tau and hard are arguments here"),
        (gapped.GST(hard=False), "tau and hard are arguments here"),
        (gapped.GST(gap="auto"), "gap: got 'auto', expected a number or a tensor"),
        (gapped.GST(gap=gapped.expected_gap), "gap: got <function expected_gap"),
        (gapped.GST(gap=1.0, detach=False), "detach: got False, expected True"),
        (gapped.GST(gap=torch.ones(3)), "gap: got a tensor of shape"),
    ],
)
def test_bad_estimators(estimator: Any, message: str) -> None:
    with pytest.raises(gapped.GappedError, match=message):
        gapped.subset(torch.zeros(2, 4), 2, estimator=estimator)


@pytest.mark.parametrize("other", [None, "straight-through", gapped.StraightThrough()], ids=str)
@pytest.mark.parametrize("k", [1, 3])
def test_names_of_simple(k: int, other: Any) -> None:
    for hard in (True, False):
        logits, weight = normal(2, 5), normal(2, 5, seed=2)
        same = (pulled(logits, k, weight, hard=hard, estimator=each) for each in ("simple", other))
        assert_equal(*same)


def test_options_of_an_object_hold(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    logits = torch.tensor([0.0, 3.0, 1.0])
    largest = gapped.subset(logits, 1, estimator=gapped.StraightThrough(draw="argmax"))
    assert largest.tolist() == [0, 1, 0]
    for k in (1, 2):
        with pytest.raises(gapped.GappedError, match="backend: got 'triton'"):
            gapped.subset(logits, k, estimator=gapped.StraightThrough(backend="triton"))


def test_any_gap_of_gst_for_one_winner() -> None:
    for gap in ("auto", gapped.expected_gap):
        assert (gapped.subset(torch.zeros(2, 4), 1, estimator=gapped.GST(gap=gap)).sum(-1) == 1).all()


def test_bad_arguments_of_the_law() -> None:
    logits = torch.zeros(4)
    with pytest.raises(gapped.GappedError, match="sample: got an object of type list"):
        gapped.subsets.log_prob(logits, 2, [1, 1, 0, 0])
    with pytest.raises(gapped.GappedError, match="samples: got 1, expected an integer of at least 2"):
        gapped.subsets.expectation(torch.sum, logits, 2, samples=1)
    with pytest.raises(gapped.GappedError, match="f: got an object of type int"):
        gapped.subsets.expectation(3, logits, 2)
    with pytest.raises(gapped.GappedError, match="f: got costs of shape"):
        gapped.subsets.expectation(lambda z: z.sum(), logits, 2)
    with pytest.raises(gapped.GappedError, match="logits: got an object of type list"):
        gapped.subsets.expectation(torch.sum, [0.0], 2)
