"""A vocabulary whose categories are split over the ranks of a process group, for linear heads.

A rank holds the logits of its own categories alone. Maxima, sums and selected entries of rows are reduced
over the group, and each estimator's surrogate is written in terms of them. `Pathwise.points` cannot serve
here: between its softmax and its result it gathers from and scatters to the category of each row, which is on
one rank alone.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, distributed

from gapped import simplex
from gapped.checks import check_linear
from gapped.errors import listing, reject
from gapped.gradient import Points
from gapped.kernels import backend
from gapped.pathwise import Pathwise
from gapped.pathwise.decoupled import DecoupledGumbelSoftmax
from gapped.pathwise.gapmax import GapMax
from gapped.pathwise.gst import GST
from gapped.pathwise.gumbel_rao import GumbelRao
from gapped.pathwise.gumbel_softmax import GumbelSoftmax
from gapped.pathwise.reinmax import ReinMax
from gapped.pathwise.straight_through import StraightThrough
from gapped.simplex import divide, per_row
from gapped.vocabulary import LinearChoice, choose
from gapped.vocabulary.head import Vocabulary, seeded


def choose_sharded(
    estimator: Pathwise,
    group: distributed.ProcessGroup,
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    mask: Tensor | None,
    generator: torch.Generator | None,
) -> LinearChoice:
    """`gapped.linear_choice` where `weight` is this rank's part of the vocabulary."""
    check_linear(hidden, weight, bias)
    estimator.check_choice()
    _check(estimator, group)
    return choose(estimator, hidden, weight, bias, mask, generator, Shard(len(weight), group))


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
        backend.note("torch")

    def index(self, estimator: Pathwise, logits: Tensor, key: Tensor) -> Tensor:
        shifted, top = self._shifted(logits)
        if isinstance(estimator, GumbelSoftmax | DecoupledGumbelSoftmax):
            law, _ = estimator.law(shifted)
            index = self._argmax(law - _log_exponential(self, shifted, key))
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
        row = Row(self, torch.where(lawful, shifted, 0.0), index, key)
        points, weights, _ = SURROGATES[type(estimator)](estimator, row)
        filling = torch.where(index == self.categories, 0.0, torch.nan).unsqueeze(-1)
        points = torch.where(lawful, points, filling)
        if isinstance(weights, tuple):
            weights = points.new_tensor(weights).view(-1, 1, 1)
        # What stands at a category that does not exist may be anything.
        grad = torch.where(logits == -torch.inf, 0.0, grad.to(points.dtype))
        slopes = grad - self.total((points * grad).sum(-1, keepdim=True))
        return (weights * points * slopes).sum(0).to(logits.dtype)

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


@dataclass(frozen=True)
class Row:
    """Rows of which a rank sees its own entries, `(n, here)`, and reductions over all of them."""

    shard: Shard
    logits: Tensor
    """Relative to the largest of the row."""
    index: Tensor
    key: Tensor

    def log_softmax(self, scores: Tensor) -> Tensor:
        """`torch.log_softmax` over all categories, of `(..., n, here)` scores."""
        return scores - self.shard.log_partition(scores).unsqueeze(-1)

    def softmax(self, scores: Tensor) -> Tensor:
        return self.log_softmax(scores).exp_()

    @cached_property
    def is_selected(self) -> Tensor:
        numbers = torch.arange(self.shard.here, device=self.index.device) + self.shard.first
        return numbers == self.index.unsqueeze(-1)

    def selected(self, values: Tensor) -> Tensor:
        """The entries of the selected categories, the axis kept."""
        return self.shard.total(torch.where(self.is_selected, values, 0.0).sum(-1, keepdim=True))

    def replaced(self, values: Tensor, by: float | Tensor) -> Tensor:
        """`values` with others at the selected categories."""
        return torch.where(self.is_selected, by, values)


def _log_exponential(shard: Shard, like: Tensor, key: Tensor) -> Tensor:
    """Noise of this rank's own."""
    return simplex.log_exponential(like, seeded(key + 1 + shard.rank))


def _straight_through(estimator: StraightThrough, row: Row) -> Points:
    tau = per_row(estimator.tau, row.logits)
    return Points(row.softmax(divide(row.logits, tau)).unsqueeze(0), 1 / tau)


def _gst(estimator: GST, row: Row) -> Points:
    tau, gap = per_row(estimator.tau, row.logits), estimator.gap
    if isinstance(gap, str):
        lowered = simplex.log_expected_odds(row.log_softmax(row.logits))
    else:
        if callable(gap):
            gap = simplex.expected_gap(row.selected(row.softmax(row.logits)).squeeze(-1))
        lowered = torch.minimum(row.logits, -row.logits.new_ones(()) * per_row(gap, row.logits))
    return Points(row.softmax(divide(row.replaced(lowered, 0.0), tau)).unsqueeze(0), 1 / tau)


def _reinmax(estimator: ReinMax, row: Row) -> Points:
    tau = per_row(estimator.tau, row.logits)
    halfway = row.softmax(divide(row.logits, tau)) / 2
    halfway = row.replaced(halfway, halfway + 0.5)
    return Points(torch.stack([halfway, row.softmax(row.logits)]), (2.0, -0.5))


def _gapmax(estimator: GapMax, row: Row) -> Points:
    tau = per_row(estimator.tau, row.logits)
    weights = row.logits.exp()
    total = row.shard.total(weights.sum(-1, keepdim=True))
    odds = row.replaced(simplex.halfway_odds(row.logits, total) ** (1 / tau), 1.0)
    weight = (2 / tau) * torch.ones_like(total)
    points = torch.stack([odds / row.shard.total(odds.sum(-1, keepdim=True)), weights / total])
    return Points(points, torch.stack([weight, torch.full_like(weight, -0.5)]))


def _gumbel_softmax(estimator: GumbelSoftmax, row: Row) -> Points:
    tau = per_row(estimator.tau, row.logits)
    scores = row.logits - _log_exponential(row.shard, row.logits, row.key)
    return Points(row.softmax(divide(scores, tau)).unsqueeze(0), 1 / tau)


def _decoupled(estimator: DecoupledGumbelSoftmax, row: Row) -> Points:
    tau = per_row(estimator.tau, row.logits)
    scores = divide(row.logits, tau) - _log_exponential(row.shard, row.logits, row.key)
    return Points(row.softmax(scores).unsqueeze(0), 1 / tau)


def _gumbel_rao(estimator: GumbelRao, row: Row) -> Points:
    """`simplex.conditional_gumbel` relative to the winner, whose noise all ranks learn."""
    tau, log_p = per_row(estimator.tau, row.logits), row.log_softmax(row.logits)
    log_e = _log_exponential(row.shard, log_p.expand(estimator.samples, *log_p.shape), row.key)
    winner = row.selected(log_e)
    scores = row.replaced(winner - torch.logaddexp(log_e - log_p, winner), 0.0)
    return Points(row.softmax(divide(scores, tau)), 1 / (tau * estimator.samples))


SURROGATES: Mapping[type[Pathwise], Callable[[Any, Row], Points]] = MappingProxyType(
    {
        StraightThrough: _straight_through,
        GapMax: _gapmax,
        GST: _gst,
        ReinMax: _reinmax,
        GumbelSoftmax: _gumbel_softmax,
        DecoupledGumbelSoftmax: _decoupled,
        GumbelRao: _gumbel_rao,
    }
)
"""The points of each estimator, of this rank's categories; `gapped.Pathwise.points` is its reference."""


def _check(estimator: Pathwise, group: object) -> None:
    if not distributed.is_available() or not isinstance(group, distributed.ProcessGroup):
        accepted = "a torch.distributed.ProcessGroup, such as torch.distributed.group.WORLD"
        raise reject("group", f"an object of type {type(group).__name__}", accepted)
    gap = getattr(estimator, "gap", None)
    if type(estimator) not in SURROGATES:
        names = listing(sorted(kind.name for kind in SURROGATES))
        raise reject("estimator", estimator, f"one of {names} where the vocabulary is split over ranks")
    if estimator.draw != "sample":
        raise reject("draw", estimator.draw, "'sample' where the vocabulary is split over ranks")
    if callable(gap) and gap is not simplex.expected_gap:
        accepted = (
            "a number, a tensor, gapped.expected_gap or 'auto' where the vocabulary is split over ranks"
        )
        raise reject("gap", "a function", accepted)
