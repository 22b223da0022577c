"""A vocabulary whose categories are split over the ranks of a process group, for linear heads.

A rank holds the logits of its own categories alone. Maxima, sums and selected entries of rows are reduced
over the group. `Pathwise.points` takes them from its draw: here from a `ShardDraw`.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property

import torch
from torch import Tensor, distributed

from gapped import simplex
from gapped.checks import note_backend
from gapped.errors import listing, reject
from gapped.gradient import less_half_of_last
from gapped.pathwise import Draw, Pathwise
from gapped.pathwise.decoupled import DecoupledGumbelSoftmax
from gapped.pathwise.gapmax import GapMax
from gapped.pathwise.gst import GST
from gapped.pathwise.gumbel_rao import GumbelRao
from gapped.pathwise.gumbel_softmax import GumbelSoftmax
from gapped.pathwise.reinmax import ReinMax
from gapped.pathwise.straight_through import StraightThrough
from gapped.vocabulary.head import Vocabulary, seeded


def shard_of(group: distributed.ProcessGroup, here: int, estimator: Pathwise) -> Shard:
    """This rank's part of a vocabulary, of which it has `here` categories."""
    if not distributed.is_available() or not isinstance(group, distributed.ProcessGroup):
        accepted = "a torch.distributed.ProcessGroup, such as torch.distributed.group.WORLD"
        raise reject("group", f"an object of type {type(group).__name__}", accepted)
    gap = getattr(estimator, "gap", None)
    if type(estimator) not in KINDS:
        names = listing(sorted(kind.name for kind in KINDS))
        raise reject("estimator", estimator, f"one of {names} where the vocabulary is split over ranks")
    if estimator.draw != "sample":
        raise reject("draw", estimator.draw, "'sample' where the vocabulary is split over ranks")
    if callable(gap) and gap is not simplex.expected_gap:
        accepted = (
            "a number, a tensor, gapped.expected_gap or 'auto' where the vocabulary is split over ranks"
        )
        raise reject("gap", "a function", accepted)
    return Shard(here, group)


class Shard(Vocabulary):
    """The categories of this rank; those of lower ranks come first."""

    def __init__(self, here: int, group: distributed.ProcessGroup) -> None:
        super().__init__(here)
        self.group, self.rank = group, distributed.get_rank(group)
        sizes: list[int] = [0] * distributed.get_world_size(group)
        distributed.all_gather_object(sizes, here, group=group)
        self.first, self.categories, self.largest = sum(sizes[: self.rank]), sum(sizes), max(sizes)

    def total(self, values: Tensor) -> Tensor:
        sums = simplex.computed(values).contiguous()
        distributed.all_reduce(sums, group=self.group)
        return sums.to(values.dtype)

    def highest(self, values: Tensor) -> Tensor:
        values = values.contiguous()
        distributed.all_reduce(values, distributed.ReduceOp.MAX, group=self.group)
        return values

    def share(self, keys: Tensor) -> Tensor:
        distributed.broadcast(keys, distributed.get_global_rank(self.group, 0), group=self.group)
        return keys

    def kernel(self, estimator: Pathwise, logits: Tensor) -> None:
        note_backend("torch")

    def index(self, estimator: Pathwise, logits: Tensor, key: Tensor) -> Tensor:
        shifted, top = self._shifted(logits)
        if isinstance(estimator, GumbelSoftmax | DecoupledGumbelSoftmax):
            law, _ = estimator.law(shifted)
            index = self._argmax(law - self._log_exponential(shifted, key))
        else:
            index = self._inverse_cdf(shifted.exp(), key)
        index = torch.where(top == -torch.inf, self.categories, index)
        # A maximum over ranks may lose a NaN, a sum does not.
        return torch.where(self.total(shifted.sum(-1)).isnan(), self.categories + 1, index)

    def gradient(
        self, estimator: Pathwise, logits: Tensor, key: Tensor, index: Tensor, grad: Tensor
    ) -> Tensor:
        shifted, _ = self._shifted(logits)
        lawful = (index < self.categories).unsqueeze(-1)
        shifted = torch.where(lawful, shifted, 0.0)
        points, weights, product = estimator.points(shifted, self._redraw(estimator, shifted, key, index))
        filling = torch.where(index == self.categories, 0.0, torch.nan).unsqueeze(-1)
        points = torch.where(lawful, points, filling)
        # What stands at a category that does not exist may be anything.
        grad = torch.where(logits == -torch.inf, 0.0, grad.to(points.dtype))
        if product is less_half_of_last:
            weights = torch.ones_like(points[..., :1]).mul(weights)  # type: ignore[arg-type]
            weights[-1] = -0.5
        elif isinstance(weights, tuple):
            weights = points.new_tensor(weights).view(-1, 1, 1)
        slopes = grad - self.total((points * grad).sum(-1, keepdim=True))
        return (weights * points * slopes).sum(0).to(logits.dtype)

    def _redraw(self, estimator: Pathwise, logits: Tensor, key: Tensor, index: Tensor) -> ShardDraw:
        """The draw of the categories `index`, with the noise of `key`."""
        draw = ShardDraw(index, shard=self)
        if isinstance(estimator, DecoupledGumbelSoftmax):
            draw.noise = self._log_exponential(logits, key)
        elif isinstance(estimator, GumbelSoftmax):
            draw.noise = logits - self._log_exponential(logits, key)
        elif isinstance(estimator, GumbelRao):
            # `simplex.conditional_gumbel` relative to the winner, whose noise all ranks learn.
            log_p = estimator.centre(logits, draw)
            log_e = self._log_exponential(log_p.expand(estimator.samples, *log_p.shape), key)
            winner = draw.selected(log_e)
            draw.noise = draw.put(winner - torch.logaddexp(log_e - log_p, winner), 0.0)
        return draw

    def _log_exponential(self, like: Tensor, key: Tensor) -> Tensor:
        """Noise of this rank's own."""
        return simplex.log_exponential(like, seeded(key + 1 + self.rank))

    def _shifted(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        """Logits relative to the largest of their row, which is the second result."""
        logits = simplex.computed(logits)
        top = self.highest(logits.amax(-1))
        return logits - torch.where(top == -torch.inf, 0.0, top).unsqueeze(-1), top

    def _argmax(self, scores: Tensor) -> Tensor:
        best, where = scores.max(-1)
        is_best = best == self.highest(best.clone())
        # The smallest number among equals.
        return -self.highest(-torch.where(is_best, self.first + where, self.categories))

    def _inverse_cdf(self, weights: Tensor, key: Tensor) -> Tensor:
        """`simplex.inverse_cdf` with the running sum split over ranks; all of them draw the same uniform."""
        cumulative = weights.cumsum(-1, dtype=simplex.accumulated(weights[:0]).dtype)
        sums = cumulative.new_zeros(distributed.get_world_size(self.group), len(weights))
        sums[self.rank] = cumulative[:, -1]
        ends = self.total(sums).cumsum(0)
        threshold = simplex.uniform((len(weights), 1), cumulative, seeded(key)).squeeze(-1) * ends[-1]
        # The first rank whose running sum exceeds the threshold, and the first category there.
        owner = (ends <= threshold).sum(0)
        before = ends[self.rank - 1] if self.rank else torch.zeros_like(threshold)
        local = torch.searchsorted(cumulative, (threshold - before).unsqueeze(-1), right=True).squeeze(-1)
        # Rounding may push the threshold past the last category that exists.
        last = (cumulative < cumulative[:, -1:]).sum(-1)
        found = torch.where(owner == self.rank, self.first + torch.minimum(local, last), 0)
        return self.highest(found)


@dataclass(eq=False)
class ShardDraw(Draw):
    """A draw whose rows have their other entries on other ranks."""

    shard: Shard = field(kw_only=True)

    def log_softmax(self, scores: Tensor) -> Tensor:
        return scores - self.shard.log_partition(scores).unsqueeze(-1)

    def softmax(self, scores: Tensor) -> Tensor:
        return self.log_softmax(scores).exp_()

    def total(self, values: Tensor) -> Tensor:
        return self.shard.total(values.sum(-1, keepdim=True))

    def selected(self, values: Tensor) -> Tensor:
        return self.total(torch.where(self._is_drawn, values, 0.0))

    def put(self, values: Tensor, number: float) -> Tensor:
        return torch.where(self._is_drawn, number, values)

    def add(self, values: Tensor, number: float) -> Tensor:
        return torch.where(self._is_drawn, values + number, values)

    @cached_property
    def _is_drawn(self) -> Tensor:
        numbers = torch.arange(self.shard.here, device=self.category.device) + self.shard.first
        return numbers == self.category.unsqueeze(-1)


KINDS = (StraightThrough, GapMax, GST, ReinMax, GumbelSoftmax, DecoupledGumbelSoftmax, GumbelRao)
"""The estimators whose rows may be split."""
