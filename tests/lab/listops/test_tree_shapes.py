"""Trees of a fixed shape: the merges, no gradient for the parser, and the same rule at evaluation."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from conftest import seeded
from golden import recipes
from statistical import chi_squared, counts_of, require_law, require_rejected
from torch import Tensor
from toy_tasks import CPU, DOUBLE, LISTOPS_TINY, equal, listops_task, train, tree_inputs

import gapped
from gapped.errors import GappedError
from gapped_lab.estimator_text import make, parse
from gapped_lab.fleet import Run, Trainer
from gapped_lab.fleet.estimator_groups import Grouped
from gapped_lab.listops.reference_tree import Greedy, reference_tree
from gapped_lab.listops.spans import left_branching, merged_spans
from gapped_lab.listops.tree import latent_tree
from gapped_lab.listops.variants import SHAPES, TreeShape
from gapped_lab.recipe import find_recipe, load_recipe


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


@pytest.mark.parametrize("shape", SHAPES)
def test_the_reference_has_the_same_trees_and_gradients(shape: str) -> None:
    inputs = tree_inputs(2, 4, 9, 5)
    lengths = torch.tensor([[9, 1, 4, 2], [3, 8, 9, 7]])
    estimator = TreeShape(shape=shape)
    root, _ = latent_tree(*inputs, lengths, estimator, seeded(3))
    expected = reference_tree(*inputs, lengths, estimator, seeded(3))
    torch.testing.assert_close(root, expected, rtol=0, atol=1e-12)
    direction = torch.randn(root.shape, dtype=DOUBLE, generator=seeded(5))
    mine, theirs = (
        torch.autograd.grad((each * direction).sum(), inputs, materialize_grads=True)
        for each in (root, expected)
    )
    for one, other in zip(mine, theirs, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-10, atol=1e-10)
    assert not mine[3].any()
    assert all(each.abs().max() > 1e-4 for each in mine[:3])


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


def test_evaluation_follows_the_rule_of_training() -> None:
    task = listops_task(seeds=(3, 3, 3, 8))
    estimators = [gapped.GST(), TreeShape(shape="left"), TreeShape(shape="random"), gapped.ReinMax()]
    sampler = Grouped.of(estimators, 1, CPU, DOUBLE)
    parsed = task.parse(task.test, sampler)
    greedy = task.parse(task.test, Grouped.of([gapped.GST()] * 4, 1, CPU, DOUBLE))
    assert torch.equal(parsed.merges[[0, 3]], greedy.merges[[0, 3]])
    assert torch.equal(parsed.merges[1], left_branching(task.test.lengths, parsed.merges.shape[-1]))
    assert not any(torch.equal(parsed.merges[2], other) for other in (parsed.merges[1], greedy.merges[2]))
    again = task.parse(task.test, sampler)
    assert equal(parsed, again)


def test_what_a_shape_is_called() -> None:
    estimator = make(*parse("tree:shape=balanced"))
    assert isinstance(estimator, TreeShape)
    assert "tree" not in gapped.estimators()
    (entry, *_) = load_recipe(recipes()["listops-controls"]).entries
    assert entry.spec.tau is None
    with pytest.raises(GappedError, match="tree: shape: got 'tall', expected one of left, right"):
        parse("tree:shape=tall")
    with pytest.raises(GappedError, match="tree: unknown option 'tau'"):
        parse("tree:tau=0.5")


def test_the_controls_have_the_budget_of_the_table() -> None:
    controls, table = load_recipe(recipes()["listops-controls"]).entries, find_recipe("listops").entries
    assert {e.spec.seed for e in controls} == {e.spec.seed for e in table}
    assert {e.spec.shape for e in controls} == {e.spec.shape for e in table}


def test_rows_without_a_pair_merge_nothing() -> None:
    scores = torch.full((2, 3), -torch.inf)
    for shape in SHAPES:
        sample: Tensor = TreeShape(shape=shape).sample(scores, generator=seeded())
        assert not sample.any()
    assert not Greedy().sample(scores).any()
