"""How trees are chosen at evaluation: greedily, or by the fixed shape that a run was trained with."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from gapped_lab.fleet.estimator_groups import Grouped
from gapped_lab.tasks.listops.reference_tree import Greedy, Sampler
from gapped_lab.tasks.listops.tree_variants import TreeShape


def evaluated(sampler: Grouped) -> Sampler:
    """The sampler of evaluation that belongs to one of training, over the same runs."""
    shapes = [(a, b, each) for a, b, each in sampler.groups if isinstance(each, TreeShape)]
    return Shaped(shapes) if shapes else Greedy()


class Shaped(Greedy):
    """`Greedy`, but for some runs: from a first to a last one, exclusive, a shape each."""

    def __init__(self, shapes: Sequence[tuple[int, int, TreeShape]]) -> None:
        self.shapes = shapes

    def sample(
        self, logits: Tensor, *, mask: Tensor | None = None, generator: torch.Generator | None = None
    ) -> Tensor:
        sample = super().sample(logits, mask=mask)
        for start, stop, each in self.shapes:
            own = None if mask is None else mask[start:stop]
            sample[start:stop] = each.sample(logits[start:stop].detach(), mask=own, generator=generator)
        return sample
