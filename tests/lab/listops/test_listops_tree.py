"""The linear-time latent tree against the quadratic reference; fixed shapes; merges as spans of tokens."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from conftest import seeded
from reference_tree import reference_tree
from statistical import chi_squared, counts_of, require_law, require_rejected
from torch import Tensor
from toy_tasks import CPU, DOUBLE, LISTOPS_TINY, listops_task, toy_expressions, train, tree_inputs

import gapped
from gapped.errors import GappedError
from gapped_lab.fleet import Run, Trainer
from gapped_lab.fleet.estimator_groups import Grouped
from gapped_lab.listops.spans import agreement, left_branching, merged_spans
from gapped_lab.listops.tables import Greedy, Sampler
from gapped_lab.listops.tree import latent_tree
from gapped_lab.listops.variants import SHAPES, LateMaskGumbelSoftmax, TreeShape

ESTIMATORS: list[Any] = [
    gapped.GumbelSoftmax(tau=0.5),
    gapped.StraightThrough(),
    gapped.GST(tau=0.7, gap=1.2),
    gapped.GST(gap=gapped.expected_gap),
    gapped.GumbelRao(samples=5),
    gapped.ReinMax(),
    gapped.DecoupledGumbelSoftmax(),
    LateMaskGumbelSoftmax(0.3),
    Grouped.of([LateMaskGumbelSoftmax(0.3), gapped.GST(0.7)], 1, CPU, DOUBLE),
    *(TreeShape(shape=shape) for shape in SHAPES),
]


def problem(runs: int, batch: int, count: int, width: int, seed: int = 0) -> tuple[list[Tensor], Tensor]:
    """The inputs of a tree, and lengths from 1 to `count`."""
    lengths = torch.randint(1, count + 1, (runs, batch), generator=seeded(seed))
    lengths[0, 0] = count
    return tree_inputs(runs, batch, count, width, seed=seed), lengths


def gradients(root: Tensor, inputs: list[Tensor]) -> tuple[Tensor, ...]:
    direction = torch.randn(root.shape, dtype=root.dtype, generator=seeded(5))
    return torch.autograd.grad((root * direction).sum(), inputs, materialize_grads=True)


def assert_equal_trees(inputs: list[Tensor], lengths: Tensor, estimator: Sampler) -> None:
    noise = [seeded(3) for _ in range(2)]
    root, _ = latent_tree(*inputs, lengths, estimator, noise[0])
    expected = reference_tree(*inputs, lengths, estimator, noise[1])
    torch.testing.assert_close(root, expected, rtol=0, atol=1e-12)
    own, others = gradients(root, inputs), gradients(expected, inputs)
    for number, (mine, theirs) in enumerate(zip(own, others, strict=True)):
        torch.testing.assert_close(mine, theirs, rtol=1e-10, atol=1e-10)
        # The query decides nothing where the shape is fixed.
        assert (theirs.abs().max() > 1e-4) is not (number == 3 and isinstance(estimator, TreeShape))


@pytest.mark.parametrize("estimator", ESTIMATORS, ids=lambda e: getattr(e, "shape", type(e).__name__))
@pytest.mark.parametrize("count", [2, 3, 4, 9])
def test_every_estimator_has_the_reference_gradient(estimator: Any, count: int) -> None:
    inputs, lengths = problem(2, 4, count, 5)
    if count == 2:  # one pair, nothing to choose: the query has no gradient
        root, _ = latent_tree(*inputs, lengths, estimator)
        torch.testing.assert_close(root, reference_tree(*inputs, lengths, estimator))
        return
    assert_equal_trees(inputs, lengths, estimator)


@pytest.mark.parametrize("count", [30, 100])
def test_long_expressions(count: int) -> None:
    assert_equal_trees(*problem(2, 3, count, 3, seed=count), gapped.GST(tau=0.5))


class Firm:
    """The pair with the highest score, and the gradient of the softmax: no noise."""

    hard = True

    def sample(self, logits: Tensor, **how: Any) -> Tensor:
        weights = logits.softmax(-1).nan_to_num()
        return Greedy().sample(logits) + weights - weights.detach()


class Loud(Firm):
    """With a gradient also for pairs that are not there, unless it is `masked`."""

    def __init__(self, masked: bool) -> None:
        self.masked = masked

    def sample(self, logits: Tensor, **how: Any) -> Tensor:
        def add(grad: Tensor) -> Tensor:
            return (grad + 1) * logits.isfinite() if self.masked else grad + 1

        scores = logits.clone()
        scores.register_hook(add)
        return super().sample(scores)


def test_what_is_beyond_an_expression_has_no_gradient() -> None:
    """Whatever an estimator says of it, for finished expressions and for shorter ones."""
    inputs, lengths = problem(2, 5, 7, 4)
    both = [gradients(latent_tree(*inputs, lengths, Loud(masked))[0], inputs) for masked in (False, True)]
    torch.testing.assert_close(*both, rtol=0, atol=1e-12)
    firm = gradients(latent_tree(*inputs, lengths, Firm())[0], inputs)
    assert not torch.allclose(both[0][1], firm[1])


def test_a_broken_run_leaves_its_neighbour_alone() -> None:
    inputs, lengths = problem(2, 4, 6, 5)
    for healthy, broken in ((0, 1), (1, 0)):
        both = [each.detach().clone() for each in inputs]
        both[1][broken, 0, 0] = torch.nan
        alone = [each[healthy : healthy + 1].clone().requires_grad_() for each in both]
        both = [each.requires_grad_() for each in both]
        root, merges = latent_tree(*both, lengths, Firm())
        expected, same = latent_tree(*alone, lengths[healthy : healthy + 1], Firm())
        assert root[broken].isnan().any()
        assert torch.equal(merges[healthy], same[0])
        for mine, theirs in zip(
            torch.autograd.grad(root.sum(), both), torch.autograd.grad(expected.sum(), alone), strict=True
        ):
            torch.testing.assert_close(mine[healthy], theirs[0], rtol=1e-12, atol=1e-12)


def test_greedy_takes_the_highest_score() -> None:
    inputs, lengths = problem(2, 6, 9, 4)
    root, merges = latent_tree(*inputs, lengths, Greedy())
    torch.testing.assert_close(root, reference_tree(*inputs, lengths, Greedy()), rtol=0, atol=1e-12)
    # Almost no noise is almost greedy.
    inputs[3].data *= 1e9
    cold, same = latent_tree(*inputs, lengths, gapped.StraightThrough(), seeded(0))
    assert torch.equal(merges, same)
    assert torch.equal(root, cold)


def test_soft_samples_are_refused() -> None:
    inputs, lengths = problem(1, 2, 4, 3)
    soft = gapped.GST(hard=False)
    reference_tree(*inputs, lengths, soft)
    with pytest.raises(GappedError, match=r"^sampler: got one with soft samples, expected hard"):
        latent_tree(*inputs, lengths, soft)


def tree_of(shape: str, count: int) -> list[list[int]]:
    """The spans of the tree over `count` tokens, in order."""
    inputs = [each.detach() for each in tree_inputs(1, 1, count, 3)]
    _, merges = latent_tree(*inputs, torch.tensor([[count]]), TreeShape(shape=shape), seeded(count))
    return merged_spans(merges)[0, 0].tolist()


def leaf_depths(spans: Sequence[Sequence[int]], count: int) -> list[int]:
    return [sum(start <= leaf < end for start, end in spans) for leaf in range(count)]


@pytest.mark.parametrize("count", [2, 3, 4, 5, 7, 8, 9, 31, 33])
def test_shapes(count: int) -> None:
    assert tree_of("left", count) == [[0, end] for end in range(2, count + 1)]
    assert tree_of("right", count) == [[start, count] for start in reversed(range(count - 1))]
    depths = leaf_depths(tree_of("balanced", count), count)
    # A binary tree has the sum of 2^-depth equal to 1; depths next to each other make it balanced.
    assert sum(2.0**-depth for depth in depths) == 1
    assert max(depths) == (count - 1).bit_length()
    assert max(depths) - min(depths) <= 1
    assert len(leaf_depths(tree_of("random", count), count)) == count


def test_random_merges_are_uniform() -> None:
    scores = torch.tensor([3.0, 0.0, -2.0, 1.0, -torch.inf], dtype=torch.float64).expand(4000, -1)
    counts = counts_of(TreeShape(shape="random").sample(scores, generator=seeded(1)).argmax(-1), 5)
    require_law(chi_squared(counts, torch.tensor([0.25] * 4 + [0.0])))
    # Wrong on purpose: by the scores.
    require_rejected(chi_squared(counts, scores[0].softmax(-1)))


def run_of(estimator: object) -> Run:
    return Run(estimator, 0.02)  # type: ignore[arg-type]


def test_a_parser_that_decides_nothing_never_moves() -> None:
    """Beside one that does, in the same fleet."""
    estimators = [gapped.GST(), *(TreeShape(shape=shape) for shape in SHAPES)]
    task = listops_task(seeds=range(5), dtype=torch.float32)
    before = task.model.query.detach().clone()
    trainer = Trainer(task, [run_of(each) for each in estimators], LISTOPS_TINY.epochs, 5, CPU)
    train(trainer)
    assert torch.equal(before[1:], task.model.query[1:])
    assert not torch.equal(before[0], task.model.query[0])
    for norms, zeros in zip(
        *(trainer.history[f"query_gradient_{what}"] for what in ("norm", "zero")), strict=True
    ):
        assert norms[0] > 0
        assert norms[1:] == [0.0] * 4
        assert zeros == [0.0, 1.0, 1.0, 1.0, 1.0]
    metrics = trainer.test()
    left = 1 + list(SHAPES).index("left")
    assert metrics["test_tree_f1"][left] == pytest.approx(metrics["left_branching_f1"][left], abs=1e-6)
    assert metrics["test_tree_f1"][left + 1] < metrics["test_tree_f1"][left]


def slow_spans(merges: Sequence[int], length: int) -> list[tuple[int, int]]:
    nodes = [(i, i + 1) for i in range(length)]
    spans = []
    for at in merges:
        if at >= 0:
            nodes[at : at + 2] = [(nodes[at][0], nodes[at + 1][1])]
            spans.append(nodes[at])
    return spans


def test_merges_become_spans() -> None:
    g = seeded(0)
    for length in range(1, 9):
        merges = [int(torch.randint(length - 1 - step, (1,), generator=g)) for step in range(length - 1)]
        padded = torch.tensor([merges + [-1] * (10 - length)])
        expected = slow_spans(merges, length)
        spans = merged_spans(padded)[0].tolist()
        assert spans[: length - 1] == [list(span) for span in expected]
        assert spans[length - 1 :] == [[0, 0]] * (10 - length)


def test_true_trees_agree_with_themselves_and_others_as_counted() -> None:
    split = toy_expressions().test
    itself = agreement(split.spans.expand(2, -1, -1, -1), split.spans, split.lengths)
    long = split.lengths > 2
    assert (itself[:, long] == 1).all()
    assert itself[:, ~long].isnan().all()
    assert (~long).any()
    plain = merged_spans(left_branching(split.lengths, split.spans.shape[1]))
    scores = agreement(plain, split.spans, split.lengths)
    for row, length in enumerate(split.lengths.tolist()):
        if length > 2:
            mine = {(0, end) for end in range(2, length)}
            true = {tuple(span) for span in split.spans[row, : length - 1].tolist()} - {(0, length)}
            assert scores[row] == pytest.approx(len(mine & true) / (length - 2))
    assert 0 < scores[long].mean() < 1
