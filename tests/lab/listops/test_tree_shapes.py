"""Trees of a fixed shape: the merges, no gradient for the parser, and the same rule at evaluation."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from conftest import seeded
from statistical import chi_squared, counts_of, require_law, require_rejected
from toy_tasks import CPU, LISTOPS_TINY, listops_task, train, tree_inputs

import gapped
from gapped_lab.fleet import Run, Trainer
from gapped_lab.listops.spans import merged_spans
from gapped_lab.listops.tree import latent_tree
from gapped_lab.listops.variants import SHAPES, TreeShape


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
