"""Masking after the softmax, and characters: the protocol of the paper's script."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from conftest import assert_close, seeded
from torch import Tensor
from toy_tasks import CPU, DOUBLE, LISTOPS_TINY, toy_expressions, train, tree_inputs

import gapped
from gapped import simplex
from gapped_lab.fleet import Run, Trainer
from gapped_lab.listops import task as task_module
from gapped_lab.listops.examples import CHARACTERS
from gapped_lab.listops.tables import Greedy
from gapped_lab.listops.task import ListOpsTask
from gapped_lab.listops.tree import latent_tree
from gapped_lab.listops.variants import LateMaskGumbelSoftmax

THETA = torch.tensor([0.2, -0.1, 0.4, 0.3, 0.0], dtype=DOUBLE)
WEIGHT = torch.tensor([1.0, -2.0, 0.5, 3.0, 7.0], dtype=DOUBLE)
MASK = torch.tensor([True, True, True, False, False])


def by_formula(noise: Tensor, tau: float) -> tuple[Tensor, Tensor]:
    """y and the gradient of WEIGHT . y in the allowed scores, category by category."""
    weights = [float(torch.exp((t + g) / tau)) for t, g in zip(THETA, noise, strict=True)]
    p = [w / sum(weights) for w in weights]
    kept = [(p[j] if MASK[j] else 0.0) + 1e-20 for j in range(5)]
    total = sum(kept)
    y = [k / total for k in kept]
    mean = sum(float(WEIGHT[j]) * y[j] for j in range(5))
    gradient = [0.0] * 5
    for j in range(3):
        for k in range(3):
            slope = p[j] * ((j == k) - p[k]) / tau
            gradient[k] += slope * (float(WEIGHT[j]) - mean) / total
    return torch.tensor(y, dtype=DOUBLE), torch.tensor(gradient, dtype=DOUBLE)


@pytest.mark.parametrize("tau", [1.0, 0.1, 0.02])
@pytest.mark.parametrize("seed", range(6))
def test_the_formula_on_the_same_noise(tau: float, seed: int) -> None:
    theta = THETA.clone().requires_grad_()
    sample = LateMaskGumbelSoftmax(tau).sample(theta, mask=MASK, generator=seeded(seed))
    y, expected = by_formula(simplex.gumbel(THETA, seeded(seed)), tau)
    assert sample.detach().tolist() == [float(j == int(y.argmax())) for j in range(5)]
    (gradient,) = torch.autograd.grad(sample @ WEIGHT, theta)
    assert_close(gradient, expected, 1e-10)


def test_a_sampler_that_masks_late_is_shown_the_padding() -> None:
    """As far as the run's own batch goes: that of the second run ends at six."""

    class Looking(Greedy):
        masks_late = True

        def sample(self, logits: Tensor, **how: object) -> Tensor:
            seen.append(logits.detach().clone())
            return super().sample(logits, **how)  # type: ignore[arg-type]

    seen: list[Tensor] = []
    lengths = torch.tensor([[9, 1, 4, 2], [3, 5, 2, 6]])
    latent_tree(*tree_inputs(2, 4, 9, 5), lengths, Looking())
    for layer, scores in enumerate(seen):
        ends = torch.arange(8 - layer) < lengths.amax(1).view(-1, 1, 1) - 1 - layer
        assert torch.equal(scores.isfinite(), ends.expand_as(scores))


def test_a_task_of_characters_trains_in_batches_of_all_lengths() -> None:
    protocol = replace(LISTOPS_TINY, characters=True, waste=1.0)
    task = ListOpsTask(protocol, toy_expressions(), [0, 1], CPU)
    (bucket,) = task.buckets
    assert len(bucket.labels) == len(toy_expressions().train)
    assert task.model.embedding.shape[1] == len(CHARACTERS)
    runs = [Run(LateMaskGumbelSoftmax(0.1), 0.02), Run(gapped.GST(), 0.02)]
    trainer = Trainer(task, runs, 1, 3, CPU)
    train(trainer)
    metrics = trainer.test()
    assert "test_tree_f1" not in metrics
    assert not any("length" in name for name in metrics)
    assert {"test_accuracy", "test_accuracy_depth_1"} <= metrics.keys()
    assert list(trainer.show([0, 1])) == []
    assert trainer.history["query_gradient_norm"][0][0] > 0


def test_a_batch_of_all_lengths_is_padded_to_its_own_longest_and_loses_no_token(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(task_module, "_WIDTHS", 4)
    protocol = replace(LISTOPS_TINY, characters=True, waste=1.0)
    task = ListOpsTask(protocol, toy_expressions(), [0, 1], CPU)
    (bucket,) = task.buckets
    task.start_epoch(0)
    widths = []
    for step in range(task.steps):
        task.load_batch(step)
        number, width = task.program(step)
        longest = int(bucket.lengths[task.batch].max())
        assert number == 0
        assert longest <= width <= min(longest + 3, bucket.tokens.shape[1])
        widths.append(width)
    assert len(set(widths)) > 1
