r"""k distinct categories of each row, stored by index: what a router that sends a token to k experts draws.

A set :math:`S` of `k` categories is drawn under one of two laws. "subset" is that of `gapped.subsets`, with a
probability in proportion to :math:`\prod_{i \in S} e^{\theta_i}`. "sequential" draws one category after the
other without putting it back, each from the softmax of those that are left. For one category both are the
softmax.

Logits and indices are all that is kept for the backward pass, where gradients are computed anew.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal, cast

import torch
from torch import Tensor

from gapped import simplex
from gapped.checks import check_table, in_eager_mode, is_integer, note_backend
from gapped.choice import NoTensor, _gate_of, _look_up, _only_sampled, _Select, _TransformedSelect, attach
from gapped.errors import reject
from gapped.gradient import is_differentiated, jacobian_product, versions
from gapped.kernels.backend import takes_choices
from gapped.pathwise import Pathwise, Source, resolve_pathwise
from gapped.pathwise.gst import GST
from gapped.pathwise.reinmax import ReinMax
from gapped.pathwise.straight_through import StraightThrough
from gapped.simplex import Draw, divide, per_row
from gapped.subsets import conditional_bernoulli as law
from gapped.subsets.subset_sampling import perturbed

Law = Literal["subset", "sequential"]
"""The law of the k categories."""
Pull = Callable[..., Tensor]
"""``pull(logits, index, grad, at_index, *tensors)``: the gradient of the logits, by that of the entries
``(*rows, k)`` at the drawn categories, or, without `at_index`, by those of k one-hot vectors
``(*rows, k, K)``."""


@dataclass(frozen=True, eq=False)
class Choices(NoTensor):
    """k distinct categories per row, by their indices, with a gradient.

    `gapped.choose(logits, k=...)` returns it. It stands for the zeros and ones of the drawn set, which are
    never written.
    """

    _drawn: Tensor
    """The indices, ``(*rows, k)``."""
    _rows: Tensor
    """The masked logits, ``(*rows, K)``, in the graph."""
    _logits: Tensor
    """What the gradient goes to: the rows, or a `handle` of them."""
    _law: Law
    _pull: Pull | None = None
    """None without a gradient."""
    _pull_weights: Pull | None = None
    """The gradient by that of weights, whose tensors are the weights themselves and those of `_pull`."""
    _tensors: tuple[Tensor | None, ...] = ()
    _versions: tuple[int, ...] = ()
    _values: tuple[Tensor, Tensor] | None = None
    """Gates and weights, where a kernel wrote them; the latter in float32."""

    def __repr__(self) -> str:
        return f"Choices(index={self.index})"

    @property
    def index(self) -> Tensor:
        """The drawn categories, int64, `(*rows, k)`: ascending, or in the order in which they were drawn.

        A row with fewer than k categories has index `K` in the places that are left, one with a NaN or +inf
        `K + 1` in all of them.
        """
        # A copy: what the caller writes into it must not change what was drawn.
        return self._drawn.to(torch.int64, copy=True)

    def gate(self) -> Tensor:
        """Ones, `(*rows, k)`, in the dtype of the logits; zero in places without a category.

        They are to be multiplied with the results of the branches that were picked. Those of the other
        branches count as zero.

        >>> import gapped
        >>> logits = torch.zeros(2, 6, requires_grad=True)
        >>> gapped.choose(logits, k=2).gate()
        tensor([[1., 1.],
                [1., 1.]], grad_fn=<_WithPullBackward>)
        """
        self._check_versions()
        if self._values:
            value = self._values[0].to(self._rows.dtype, copy=True)
        else:
            value = _gate_of(self._rows, self._drawn)
        if self._pull is None:
            return value
        return attach(value, self._logits, self._drawn, self._pull, *self._tensors)

    def weights(self) -> Tensor:
        """The probabilities of the drawn categories, normalised, `(*rows, k)`; zero in places without one.

        They are the softmax over the logits of the drawn categories, with its own gradient, times `gate()`
        with that of the estimator.

        >>> import gapped
        >>> gapped.choose(torch.tensor([0.0, 0.0, -torch.inf]), k=2).weights()
        tensor([0.5000, 0.5000])
        """
        self._check_versions()
        weights = self._values[1] if self._values else _weights_of(self._rows.detach(), self._drawn)
        # A copy: the weights are kept for the backward pass.
        value = weights.to(self._rows.dtype, copy=True)
        if self._pull_weights is None:
            return value
        return attach(value, self._logits, self._drawn, self._pull_weights, weights, *self._tensors)

    def select(self, table: Tensor) -> Tensor:
        """The rows of a table that the categories select: `table[index]`, for a table `(K, *rest)`.

        Returns:
            A tensor `(*rows, k, *rest)`, zero in places without a category. It carries the estimator's
            gradient: that of a category that was not drawn is the mean over the k places in which it could
            stand, or under the law "sequential" over those in which it could still be drawn, the sum.

        >>> import gapped
        >>> gapped.choose(torch.tensor([0.0, -torch.inf, 0.0]), k=2).select(torch.tensor([1.0, 2.0, 3.0]))
        tensor([1., 3.])
        """
        check_table(table, self._rows.shape[-1:])
        self._check_versions()
        if self._pull is None:
            return _look_up(table, self._drawn, self._rows.shape[-1], False)
        function = _Select if in_eager_mode() else _TransformedSelect
        return function.apply(self._logits, table, self._drawn, False, self._pull, *self._tensors)  # type: ignore[no-any-return, no-untyped-call]

    @property
    def log_prob(self) -> Tensor:
        """The log-probability of what was drawn, `(*rows)`, in float32 or float64, with its exact gradient.

        It is that of the set, or under the law "sequential" that of the sequence. It is 0 in a row that has
        nothing to choose.

        >>> import gapped
        >>> gapped.choose(torch.zeros(4), k=2).log_prob.exp()
        tensor(0.1667)
        """
        self._check_versions()
        scores = simplex.shift(simplex.computed(self._rows))
        if self._law == "sequential":
            return _log_prob_of_sequence(scores, self._drawn)
        wide = simplex.accumulated(scores)
        total = torch.where(self._drawn < scores.shape[-1], _at(wide, self._drawn), 0.0).sum(-1)
        return (total - law.log_normaliser_of(wide, self._drawn.shape[-1])).to(scores.dtype)

    def _check_versions(self) -> None:
        # Autograd checks these tensors from the first use of the choices on, but not before it.
        if self._versions and self._versions != versions((self._rows, *self._tensors)):
            raise RuntimeError("gapped: the logits or options of choices were changed after they were drawn")


def choose(
    estimator: Pathwise | str | None,
    logits: Tensor,
    k: int,
    law: Law,
    draw: Source | None,
    dim: int,
    mask: Tensor | None,
    generator: torch.Generator | None,
) -> Choices:
    """Draw k categories per row: see `gapped.choose`."""
    if law not in ("subset", "sequential"):
        raise reject("law", law, "'subset' or 'sequential'")
    is_set = law == "subset" and not (is_integer(k) and k == 1)
    resolved: Pathwise = ReinMax() if estimator is None and is_set else resolve_pathwise(estimator)
    resolved = resolved if draw is None else replace(resolved, draw=draw)
    rows, fitted = resolved.prepare(logits, dim, mask, generator)
    if not is_integer(k) or not 1 <= k <= rows.shape[-1]:
        raise reject("k", k, f"an integer from 1 to {rows.shape[-1]}, the number of categories")
    k = int(k)
    check_estimator(fitted, k, law)
    if k == 1:
        return _choose_one(fitted, rows, law, generator)
    wants_gradient = is_differentiated(rows)
    rows = rows if wants_gradient else rows.detach()
    wants_kernel = fitted.backend == "triton" or (fitted.backend == "auto" and rows.is_cuda)
    if is_set and wants_kernel and takes_choices(rows, k):
        return _choose_by_kernel(rows, k, fitted, wants_gradient, generator)
    with torch.no_grad():
        scores = simplex.shift(simplex.computed(rows))
        if fitted.draw == "argmax":
            index = _largest(scores, k)
        else:
            index = (_draw_set if is_set else _draw_sequence)(scores, k, fitted, generator)
        index = torch.where(scores[..., :1].isnan(), scores.shape[-1] + 1, index)
    if not wants_gradient:
        return Choices(index, rows, rows, law)
    pull, tensors = partial(_pull_set if is_set else _pull_sequence, fitted), fitted.tensors
    seen = _seen((rows, *tensors))
    return Choices(index, rows, rows, law, pull, partial(_pull_weights, pull), tensors, seen)


def _choose_one(estimator: Pathwise, rows: Tensor, law: Law, generator: torch.Generator | None) -> Choices:
    """A choice of one category, with an axis for it."""
    choice = estimator.choose(rows, generator=generator)
    index, tensors = choice._drawn.unsqueeze(-1), choice._tensors
    if not tensors:
        return Choices(index, rows.detach(), rows.detach(), law)
    pull = partial(_pull_one, choice._pull)
    seen = _seen((rows, *tensors))
    return Choices(index, rows, choice._logits, law, pull, partial(_pull_weights, pull), tensors, seen)


def _choose_by_kernel(
    rows: Tensor, k: int, estimator: Pathwise, wants_gradient: bool, generator: torch.Generator | None
) -> Choices:
    from gapped.kernels import choices as kernel

    note_backend("triton")
    drawn = kernel.draw(rows.detach(), k, generator, estimator.draw == "argmax")
    values = (drawn.gates, drawn.weights)
    if not wants_gradient:
        return Choices(drawn.index, rows, rows, "subset", _values=values)
    pull: Pull = partial(_pull_set, estimator)
    pull_weights: Pull = partial(_pull_weights, pull)
    tensors = estimator.tensors
    if isinstance(estimator, ReinMax | StraightThrough) and _is_one(estimator.tau):
        pull = pull_weights = partial(_pull_kernel, estimator)
        tensors = (drawn.place, drawn.sums)
    return Choices(
        drawn.index, rows, rows, "subset", pull, pull_weights, tensors, _seen((rows, *tensors)), values
    )


def _is_one(tau: float | Tensor) -> bool:
    return not isinstance(tau, Tensor) and tau == 1


def _seen(tensors: tuple[Tensor | None, ...]) -> tuple[int, ...]:
    """Versions of these tensors, where they may be changed before the backward pass."""
    return versions(tensors) if in_eager_mode() else ()


def check_estimator(estimator: Pathwise, k: int, law: Law) -> None:
    """Raise an error unless the estimator has a gradient for k categories under this law."""
    estimator.check_choice()
    if k != 1:
        (_check_set if law == "subset" else _check_sequence)(estimator)


def _check_set(estimator: Pathwise) -> None:
    """Raise an error unless there is a gradient of this kind for sets."""
    accepted = "'reinmax', 'straight-through' or a gap as in 'gst:gap=1' for k > 1, or law='sequential'"
    if not isinstance(estimator, ReinMax | StraightThrough | GST):
        raise reject("estimator", estimator, accepted)
    if isinstance(estimator, ReinMax) and not _is_one(estimator.tau):
        raise reject("tau", estimator.tau, "1: ReinMax has no other temperature for k > 1")
    if isinstance(estimator, GST):
        if callable(estimator.gap) or isinstance(estimator.gap, str):
            raise reject("gap", estimator.gap, "a number or a tensor, as in 'gst:gap=1', or law='sequential'")
        if not estimator.detach:
            raise reject("detach", False, "True if more than one category is drawn")


def _check_sequence(estimator: Pathwise) -> None:
    """Raise an error unless the estimator's gradient follows from the drawn category."""
    kind = type(estimator)
    if (
        not kind.draws_category_alone()
        or kind.law is not Pathwise.law
        or not getattr(estimator, "detach", True)
    ):
        accepted = "one whose gradient needs no noise, such as 'gapmax', 'reinmax' or 'gst', for k > 1"
        raise reject("estimator", estimator, accepted)


def _draw_set(scores: Tensor, k: int, estimator: Pathwise, generator: torch.Generator | None) -> Tensor:
    """The indices of a subset, ascending."""
    n = scores.shape[-1]
    if law.is_few(scores, k, estimator.backend):
        note_backend("torch")
        return law.draw_few(scores, k, generator)
    backend = "triton" if law.runs_on_kernels(scores, k, backend=estimator.backend) else "torch"
    note_backend(backend)
    chosen = law.draw(scores, k, generator, backend=backend)
    # The largest of n, n - 1, ... are those of the chosen categories, in order; what is left is 0.
    order = torch.arange(n, 0, -1, device=scores.device)
    return n - torch.where(chosen, order, 0).topk(k).values


def _draw_sequence(scores: Tensor, k: int, estimator: Pathwise, generator: torch.Generator | None) -> Tensor:
    """The indices of k draws without replacement, in their order: those of the largest noisy logits."""
    return _largest(scores + simplex.gumbel(scores, generator), k)


def _largest(scores: Tensor, k: int) -> Tensor:
    top, index = scores.topk(k)
    return torch.where(top == -torch.inf, scores.shape[-1], index)


def _at(values: Tensor, index: Tensor) -> Tensor:
    """The entries of ``(*rows, K)`` at the indices ``(*rows, k)``; any where there is no category."""
    return values.gather(-1, index.long().clamp(max=values.shape[-1] - 1))


def _put(index: Tensor, values: Tensor, categories: int) -> Tensor:
    """``(*rows, K)``, zero but for `values` at the indices; what stands in places without one is dropped."""
    values = torch.where(index < categories, values, 0.0)
    zeros = values.new_zeros((*values.shape[:-1], categories))
    # Added: places without a category point at the last one.
    return zeros.scatter_add(-1, index.long().clamp(max=categories - 1), values)


def _weights_of(logits: Tensor, index: Tensor) -> Tensor:
    """The softmax over the logits at the indices, in float32 or float64."""
    categories = logits.shape[-1]
    chosen = torch.where(index < categories, _at(simplex.computed(logits), index), -torch.inf)
    return _only_sampled(simplex.softmax(chosen), index, categories)


def _pull_weights(
    pull: Pull, logits: Tensor, index: Tensor, grad: Tensor, at_index: bool, weights: Tensor, *tensors: Tensor
) -> Tensor:
    """The gradient by that of the weights: of the gates, and of the softmax over the drawn categories."""
    scaled = torch.where(index == logits.shape[-1], 0.0, grad.to(weights.dtype) * weights)
    estimate = pull(logits, index, scaled.to(logits.dtype), at_index, *tensors)
    own = scaled - weights * scaled.sum(-1, keepdim=True)
    return estimate + _put(index, own, logits.shape[-1]).to(logits.dtype)


def _pull_kernel(
    estimator: Pathwise, logits: Tensor, index: Tensor, grad: Tensor, at_index: bool, *tensors: Tensor
) -> Tensor:
    """The gradient by that of gates, or of weights, which then are the first of the `tensors`."""
    if not at_index:
        return _pull_set(estimator, logits, index, grad, at_index)
    from gapped.kernels import choices as kernel

    *weights, place, sums = tensors
    only = weights[0] if weights else None
    return kernel.gradient(logits, place, grad, only, sums, isinstance(estimator, ReinMax))


def _pull_one(
    pull: Pull, logits: Tensor, index: Tensor, grad: Tensor, at_index: bool, *tensors: Tensor
) -> Tensor:
    grad = grad.squeeze(-1) if at_index else grad.squeeze(-2)
    return pull(logits, index.squeeze(-1), grad, at_index, *tensors)


def _at_set(index: Tensor, grad: Tensor, categories: int, at_index: bool) -> Tensor:
    """The gradient at the zeros and ones of a set, ``(*rows, K)``."""
    if at_index:
        return _put(index, grad, categories)
    # Places without a category have no gradient, whatever comes there.
    grad = torch.where((index == categories).unsqueeze(-1), 0.0, grad)
    where = index.long().clamp(max=categories - 1)
    own = grad.gather(-1, where.unsqueeze(-1)).squeeze(-1)
    # In any of the k places each category that was not drawn could stand.
    mean = grad.mean(-2)
    return mean + _put(index, own - _at(mean, index), categories)


def _with_levels(estimator: Pathwise, levels: tuple[Tensor, ...]) -> Pathwise:
    """The estimator with its levels that are tensors as the backward pass has them."""
    if not levels:
        return estimator
    names = (name for name in estimator.levels if isinstance(getattr(estimator, name), Tensor))
    changed: dict[str, Any] = dict(zip(names, levels, strict=True))
    return replace(estimator, **changed)


def _pull_set(
    estimator: Pathwise, logits: Tensor, index: Tensor, grad: Tensor, at_index: bool, *levels: Tensor
) -> Tensor:
    """The gradient of the logits of a subset: see `gapped.choose`."""
    estimator = _with_levels(estimator, levels)
    k, categories = index.shape[-1], logits.shape[-1]
    scores = simplex.shift(simplex.computed(logits))
    grad = _at_set(index, grad.to(scores.dtype), categories, at_index)
    grad = torch.where(scores == -torch.inf, 0.0, grad)
    chosen = _put(index, torch.ones_like(index, dtype=scores.dtype), categories)
    tau: float | Tensor = 1.0
    if not isinstance(estimator, ReinMax):
        tau = per_row(estimator.tau, scores)
        if isinstance(estimator, GST):
            scores = perturbed(scores, chosen > 0, k, per_row(cast(Any, estimator.gap), scores))
        scores = divide(scores, tau)
    if in_eager_mode() and law.is_few(scores, k, estimator.backend):
        product, marginals = law.moments_of_few(grad, scores, k)
    else:
        backend = "triton" if law.runs_on_kernels(scores, k, grad, backend=estimator.backend) else "torch"
        product = law.covariance_product(grad, scores, k, backend=backend)
        marginals = law.marginals(scores, k, backend=backend) if isinstance(estimator, ReinMax) else product
    if isinstance(estimator, ReinMax):
        centred = chosen - marginals
        product = (product + centred * (centred * grad).sum(-1, keepdim=True)) / 2
    return divide(product, tau).to(logits.dtype)


def _pull_sequence(
    estimator: Pathwise, logits: Tensor, index: Tensor, grad: Tensor, at_index: bool, *levels: Tensor
) -> Tensor:
    """The sum of the estimator's gradients of all draws, each given those before it."""
    estimator = _with_levels(estimator, levels)
    categories, scores = logits.shape[-1], simplex.computed(logits)
    total = torch.zeros_like(scores)
    for place in range(index.shape[-1]):
        at = index[..., place : place + 1]
        own = grad[..., place : place + 1] if at_index else grad[..., place, :]
        own = _put(at, own.to(scores.dtype), categories) if at_index else own.to(scores.dtype)
        total = total + _step(estimator, scores, at, own)
        drawn = torch.arange(categories, device=scores.device) == at
        scores = torch.where(drawn, -torch.inf, scores)
    return total.to(logits.dtype)


def _step(estimator: Pathwise, scores: Tensor, index: Tensor, grad: Tensor) -> Tensor:
    """The estimator's gradient for a category ``(*rows, 1)`` that was drawn from the softmax of `scores`."""
    top = scores.amax(-1, keepdim=True)
    lawful = top.isfinite()
    draw = Draw(torch.where(lawful & (index < scores.shape[-1]), index, 0).squeeze(-1))
    points, weights, product = estimator.points(torch.where(lawful, scores - top, 0.0), draw)
    points = torch.where(lawful, points, torch.where(top == -torch.inf, 0.0, torch.nan))
    points = torch.where(scores.isneginf(), -points, points)
    return jacobian_product(grad, points, weights, scores, product)


def _log_prob_of_sequence(scores: Tensor, index: Tensor) -> Tensor:
    categories, total = scores.shape[-1], scores.new_zeros(scores.shape[:-1])
    for at in torch.split(index.long(), 1, -1):
        step = _at(simplex.log_softmax(scores), at).squeeze(-1)
        total = total + torch.where(at.squeeze(-1) == categories, 0.0, step)
        scores = torch.where(torch.arange(categories, device=scores.device) == at, -torch.inf, scores)
    return total
