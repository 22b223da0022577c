r"""The law of `k` of `n` elements: its samples, marginals, covariances and normalising constant.

A set :math:`S` of `k` elements has a probability in proportion to :math:`\prod_{i \in S} e^{\theta_i}`. It is
the law of independent choices with probabilities :math:`p_i = \sigma(\theta_i - \lambda)`, given that `k` are
made, whatever :math:`\lambda` is: what it takes are laws of how many are made (`size_tree`), or, where there
are few subsets, a sum over all of them (`enumeration`). Here :math:`\lambda` is the one for which about `k`
are made on average. Then no number of the tree is too small or too large to be held, for any logits: `k` is
about the most probable of the :math:`n + 1` sizes, and what underflows beside it has no weight. Only sums and
products of positive numbers follow, in float64. If `k` is more than half of `n`, the elements that are left
out are chosen instead, with negated logits.

A few elements of a CPU's tensors are drawn by running sums instead. With the weights
:math:`w_i = e^{\theta_i}`, the sums :math:`F_m[i]` over the sets of `m` elements before `i` are running sums
of :math:`w_i F_{m-1}[i]`. So the last of `m` elements before `i` is drawn by one search in :math:`F_m`.

All functions take `scores` `(*rows, n)`: logits as `gapped.simplex.shift` returns them, -inf for an element
that does not exist, NaN in a row without a law. A row with fewer than `k` elements has all of them selected.
They take a `backend`, too: "torch", "triton", or "auto", which is Triton on CUDA where it has a kernel.
At the end are those in the graph, whose derivatives are again functions of the law.
"""

from __future__ import annotations

from collections.abc import Callable
from math import comb, log
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from gapped import simplex
from gapped.checks import batched_with, holds, in_eager_mode
from gapped.errors import reject
from gapped.gradient import transformable
from gapped.kernels.backend import without_subsets
from gapped.subsets import enumeration, size_tree

# Up to this many subsets are enumerated.
MOST_OPTIONS = 70
# Halvings of the interval of lambda: its error must be small beside the inverse of the size's deviation.
_HALVINGS = 12
# So many numbers are computed at a time: on a CPU intermediate results stay near the cache.
_BLOCK = {"cpu": 1 << 20}
_LARGE_BLOCK = 1 << 28


# Up to so many are few. The largest exponent of a product of their weights, short of float64's 709.
_FEW, _LARGEST = 8, 700.0


def runs_on_kernels(scores: Tensor, k: int, *others: Tensor, backend: str = "auto") -> bool:
    """Whether Triton computes functions of these scores and other tensors, once the backend is checked."""
    if backend == "torch" or k in (0, scores.shape[-1]):
        return False
    if backend == "auto" and (not scores.is_cuda or _is_enumerated(scores, k)):
        return False
    why_not = without_subsets(scores, *others)
    if why_not is not None and backend == "triton":
        raise reject("backend", "triton", f"torch or auto here: {why_not}")
    return why_not is None


def draw(
    scores: Tensor, k: int, generator: torch.Generator | None = None, *, backend: str = "auto"
) -> Tensor:
    """Draw a subset: a boolean tensor of the shape of `scores`."""
    if runs_on_kernels(scores, k, backend=backend):
        from gapped.kernels import subsets

        return subsets.draw(scores, k, generator)

    def block(scores: Tensor) -> Tensor:
        exists = scores != -torch.inf
        if k in (0, scores.shape[-1]):
            return exists & (k > 0)
        if _is_enumerated(scores, k):
            return torch.where(
                _is_certain(scores, k), exists, enumeration.draw(_lift_certain(scores, k), k, generator)
            )
        trials = trials_of(scores, k)
        levels = size_tree.ascend(trials.p, trials.q, trials.degree)
        chosen = size_tree.draw(levels, trials.size, generator)[..., : scores.shape[-1]] > 0
        return exists & ~chosen if trials.is_complement else chosen

    return _by_blocks(block, k, scores)


def marginals(scores: Tensor, k: int, *, backend: str = "auto") -> Tensor:
    """The probability that each element is selected, in the shape and dtype of `scores`."""
    if runs_on_kernels(scores, k, backend=backend):
        from gapped.kernels import subsets

        return subsets.marginals(scores, k)

    def block(scores: Tensor) -> Tensor:
        exists = torch.where(scores.isnan(), torch.nan, (scores != -torch.inf).to(scores.dtype))
        if k in (0, scores.shape[-1]):
            return exists * (k > 0)
        if _is_enumerated(scores, k):
            return torch.where(
                _is_certain(scores, k), exists, enumeration.marginals(_lift_certain(scores, k), k)
            )
        trials = trials_of(scores, k)
        levels = size_tree.ascend(trials.p, trials.q, trials.degree)
        law = levels[-1]
        by_law = size_tree.descend(levels, _at(trials.size, law) / _take_size(law, trials.size))
        without, chosen = by_law[..., : scores.shape[-1], :].unbind(-1)
        if trials.is_complement:
            return torch.where(scores == -torch.inf, 0.0, trials.q * without).to(scores.dtype)
        return (trials.p * chosen).to(scores.dtype)

    return _by_blocks(block, k, scores)


def covariance_product(grad: Tensor, scores: Tensor, k: int, *, backend: str = "auto") -> Tensor:
    r"""The covariances of the selections times a vector, :math:`\mathrm{Cov}(S, \langle g, S\rangle)`.

    That is the Hessian of the log-normaliser and the Jacobian of the marginals, which are symmetric: the
    product is the gradient of :math:`\mathbb{E}\langle g, S\rangle`. `grad` has the shape of `scores`.
    """
    if runs_on_kernels(scores, k, grad, backend=backend):
        from gapped.kernels import subsets

        return subsets.covariance_product(grad, scores, k)

    def block(grad: Tensor, scores: Tensor) -> Tensor:
        if k in (0, scores.shape[-1]):
            return torch.where(scores.isnan(), torch.nan, torch.zeros_like(scores))
        grad = torch.where(scores == -torch.inf, 0.0, grad)
        if _is_enumerated(scores, k):
            product = enumeration.covariance_product(grad, _lift_certain(scores, k), k)
            return torch.where(_is_certain(scores, k), 0.0, product)
        trials = trials_of(scores, k)
        p, q, grad = trials.p, trials.q, grad.to(trials.p.dtype)
        # A constant added to g changes nothing, as the size is fixed: digits are kept by removing the mean.
        grad = grad - (p * grad).sum(-1, keepdim=True) / p.sum(-1, keepdim=True).clamp(min=0.5)
        levels = size_tree.ascend(p, q, trials.degree)
        sums = size_tree.ascend_moments(levels, p * grad)
        # The expected sum is a quotient at the root, whose derivatives go down to the leaves.
        by_sum = _at(trials.size, levels[-1]) / _take_size(levels[-1], trials.size)
        mean = (by_sum * sums[-1]).sum(-1, keepdim=True)
        by_law, by_sum = size_tree.descend_moments(levels, sums, -mean * by_sum, by_sum)
        by_law, by_sum = by_law[..., : p.shape[-1], :], by_sum[..., : p.shape[-1], 1]
        return (p * q * (by_law[..., 1] - by_law[..., 0] + grad * by_sum)).to(scores.dtype)

    return _by_blocks(block, k, grad, scores)


def log_normaliser(scores: Tensor, k: int, *, backend: str = "auto") -> Tensor:
    r"""The logarithm of :math:`\sum_S \prod_{i \in S} e^{\theta_i}`, `(*rows)`.

    With :math:`P_\lambda(k)` for the probability that `k` of the independent choices are made, it is
    :math:`k \lambda + \sum_i \log(1 + e^{\theta_i - \lambda}) + \log P_\lambda(k)`.
    """
    if runs_on_kernels(scores, k, backend=backend):
        from gapped.kernels import subsets

        return subsets.log_normaliser(scores, k)

    def block(scores: Tensor) -> Tensor:
        total = torch.where(scores == -torch.inf, 0.0, scores).sum(-1)
        if k in (0, scores.shape[-1]):
            return total * (k > 0)
        trials = trials_of(scores, k)
        law = size_tree.ascend(trials.p, trials.q, trials.degree)[-1]
        factors = F.logsigmoid(trials.tilt - trials.scores).sum(-1)
        value = (
            trials.size * trials.tilt.squeeze(-1) - factors + _take_size(law, trials.size)[..., 0, 0].log()
        )
        value = value + total if trials.is_complement else value
        return torch.where(_is_certain(scores, k).squeeze(-1), total, value).to(scores.dtype)

    return _by_blocks(block, k, scores)


class Trials(NamedTuple):
    """Independent choices whose law, given their number, is that of a subset or of its complement."""

    scores: Tensor
    """The scores, negated for a complement, `(*rows, n)`; -inf for an element that does not exist."""
    tilt: Tensor
    """The score that has even odds, `(*rows, 1)`."""
    p: Tensor
    """The probability that an element is chosen, float64, `(*rows, n)`."""
    q: Tensor
    """The probability that it is not."""
    size: Tensor
    """How many are chosen, `(*rows)`."""
    degree: int
    """The largest size that a row may have."""
    is_complement: bool
    """Whether the chosen elements are those that do not belong to the subset."""


def trials_of(scores: Tensor, k: int) -> Trials:
    """Trials for `k` elements, or for the others if those are fewer."""
    n, exists = scores.shape[-1], scores != -torch.inf
    count = exists.sum(-1)
    size, degree = count.clamp(max=k), k
    if is_complement := 2 * k > n:
        size, degree = count - size, n - k
        scores = torch.where(exists, -scores, -torch.inf)
    is_open = ((size > 0) & (size < count)).unsqueeze(-1)
    tilt = simplex.accumulated(torch.where(is_open, _tilt(scores, size, degree), 0.0))
    scores = simplex.accumulated(scores)
    sure = (exists & (size > 0).unsqueeze(-1)).to(scores.dtype)
    p = torch.where(is_open, torch.sigmoid(scores - tilt), sure)
    q = torch.where(is_open, torch.sigmoid(tilt - scores), 1 - sure)
    return Trials(scores, tilt, p, q, size, degree, is_complement)


@torch.no_grad()
def _tilt(scores: Tensor, size: Tensor, degree: int) -> Tensor:
    r"""The :math:`\lambda` at which the probabilities :math:`\sigma(\theta_i - \lambda)` add up to `size`.

    It lies between the next score after the `size` largest ones, less the logarithm of `size`, and the last
    of these, plus the logarithm of how many others there are: an interval that is short, or else has all
    scores far outside of it. It need not be exact, since the law does not depend on it.
    """
    n, size = scores.shape[-1], size.unsqueeze(-1)
    largest = scores.topk(degree + 1).values
    low = largest.gather(-1, size) - log(degree)
    high = largest.gather(-1, (size - 1).clamp(min=0)) + log(n)
    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        is_low = torch.sigmoid(scores - middle).sum(-1, keepdim=True) > size
        low, high = torch.where(is_low, middle, low), torch.where(is_low, high, middle)
    return (low + high) / 2


def is_few(scores: Tensor, k: int, backend: str) -> bool:
    """Whether `draw_few` stands in for `draw`, and in eager code `moments_of_few` for what gradients need."""
    return k <= _FEW and backend != "triton" and scores.device.type == "cpu" and not _is_enumerated(scores, k)


def draw_few(scores: Tensor, k: int, generator: torch.Generator | None = None) -> Tensor:
    """Draw a subset by its indices, `(*rows, k)`: ascending, and `n` in places that are left."""

    def block(scores: Tensor) -> Tensor:
        weights = _weights(scores, k)
        sums = [F.pad(torch.ones_like(weights), (1, 0), value=1.0)]
        for _ in range(k):
            sums.append(F.pad((weights * sums[-1][..., :-1]).cumsum(-1), (1, 0)))
        total, index = sums[k][..., -1:], []
        for m in range(k, 0, -1):
            threshold = simplex.uniform(total.shape, total, generator) * total
            # The first sum that exceeds it; none does where there are too few elements, or no law.
            place = torch.searchsorted(batched_with(sums[m], threshold), threshold, right=True).clamp(min=1)
            index.append(place - 1)
            total = sums[m - 1].gather(-1, index[-1])
        return torch.cat(index[::-1], -1)

    return _by_blocks(block, k, scores, tensors=4)


def moments_of_few(grad: Tensor, scores: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """`covariance_product` and `marginals`: derivatives of the logarithm of the sum over all sets."""

    def block(grad: Tensor, scores: Tensor) -> Tensor:
        with torch.enable_grad():
            weights = total = _weights(scores.detach(), k).requires_grad_()
            for _ in range(k - 1):
                total = weights * F.pad(total.cumsum(-1)[..., :-1], (1, 0))
            (slope,) = torch.autograd.grad(total.sum(-1).log().sum(), weights, create_graph=True)
            chance = weights * slope
            # As in `covariance_product`.
            grad = grad.double() - (chance.detach() * grad).sum(-1, keepdim=True) / k
            (slope,) = torch.autograd.grad((chance * grad).sum(), weights)
        result = torch.stack([weights * slope, chance], -2).detach().to(scores.dtype)
        is_certain = _is_certain(scores, k) & (scores == scores)
        if not holds(is_certain):
            return result
        certain = torch.stack([torch.zeros_like(scores), (scores != -torch.inf).to(scores.dtype)], -2)
        return torch.where(is_certain.unsqueeze(-2), certain, result)

    product, chance = _by_blocks(block, k, grad, scores, tensors=4).unbind(-2)
    return product, chance


def _weights(scores: Tensor, k: int) -> Tensor:
    """Weights relative to the least of the `k` largest, of which the set of the largest has at least 1."""
    top = scores.topk(k).values
    least = torch.where(top == -torch.inf, torch.inf, top).amin(-1, keepdim=True)
    # What is so far above the others is selected for certain, with all digits that float64 has.
    return (scores.double() - least).clamp(max=_LARGEST / k - log(scores.shape[-1])).exp()


def _is_certain(scores: Tensor, k: int) -> Tensor:
    """Rows in which all elements are selected, as there are no more than `k`."""
    return (scores != -torch.inf).sum(-1, keepdim=True) <= k


def _lift_certain(scores: Tensor, k: int) -> Tensor:
    """Scores with ordinary rows in the place of those in which nothing is left to choose."""
    return torch.where(_is_certain(scores, k), 0.0, scores)


def _is_enumerated(scores: Tensor, k: int) -> bool:
    return comb(scores.shape[-1], k) <= MOST_OPTIONS


def _take_size(law: Tensor, size: Tensor) -> Tensor:
    """The root's entry for the size of each row, with all axes of the root."""
    return law.gather(-1, size[..., None, None])


def _at(size: Tensor, law: Tensor) -> Tensor:
    """1 at the size of each row, 0 elsewhere, in the shape of the root."""
    return (torch.arange(law.shape[-1], device=law.device) == size[..., None, None]).to(law.dtype)


def _by_blocks(function: Callable[..., Tensor], k: int, *inputs: Tensor, tensors: int = 1) -> Tensor:
    """`function` of tensors `(*rows, n)`, computed for some rows at a time where all need much memory.

    It has so many `tensors` of sums at a time.
    """
    rows, n = inputs[0].shape[:-1], inputs[0].shape[-1]
    numbers = 8 * comb(n, k) if _is_enumerated(inputs[0], k) else n * min(k, n - k) + n
    most = max(_BLOCK.get(inputs[0].device.type, _LARGE_BLOCK) // (tensors * numbers), 1)
    if rows.numel() <= most or not in_eager_mode():
        return function(*inputs)
    parts = zip(*(torch.split(tensor.reshape(-1, n), most) for tensor in inputs), strict=True)
    result = torch.cat([function(*part) for part in parts])
    return result.reshape(*rows, *result.shape[1:])


def marginals_of(scores: Tensor, k: int) -> Tensor:
    """`marginals`, differentiable as often as wanted."""
    function = _Marginals if torch.compiler.is_compiling() else _DualMarginals
    return function.apply(scores, k)  # type: ignore[no-any-return, no-untyped-call]


def log_normaliser_of(scores: Tensor, k: int) -> Tensor:
    """`log_normaliser`, differentiable as often as wanted."""
    # Compilers do not take functions with a forward-mode derivative.
    function = _LogNormaliser if torch.compiler.is_compiling() else _DualLogNormaliser
    return function.apply(scores, k)  # type: ignore[no-any-return, no-untyped-call]


class _OfScores(torch.autograd.Function):
    """A function of scores and a size that keeps the scores for its derivatives."""

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, int], output: Tensor) -> None:
        scores, ctx.k = inputs
        ctx.save_for_backward(scores)
        if not torch.compiler.is_compiling():
            ctx.save_for_forward(scores)


@transformable
class _Marginals(_OfScores):
    @staticmethod
    def forward(scores: Tensor, k: int) -> Tensor:
        return marginals(scores, k)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        (scores,) = ctx.saved_tensors
        return covariance_product(grad, scores, ctx.k), None


class _DualMarginals(_Marginals):
    @staticmethod
    def jvp(ctx: Any, tangent: Tensor, *rest: Any) -> Tensor:
        (scores,) = ctx.saved_tensors
        return covariance_product(tangent, scores, ctx.k)


@transformable
class _LogNormaliser(_OfScores):
    @staticmethod
    def forward(scores: Tensor, k: int) -> Tensor:
        return log_normaliser(scores, k)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        (scores,) = ctx.saved_tensors
        return grad.unsqueeze(-1) * marginals_of(scores, ctx.k), None


class _DualLogNormaliser(_LogNormaliser):
    @staticmethod
    def jvp(ctx: Any, tangent: Tensor, *rest: Any) -> Tensor:
        (scores,) = ctx.saved_tensors
        # The tangent of an element that does not exist may be anything.
        return (marginals_of(scores, ctx.k) * torch.where(scores == -torch.inf, 0.0, tangent)).sum(-1)
