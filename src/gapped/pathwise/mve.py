"""MVE: among the estimators that are exact for quadratic costs, the one of least norm."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from gapped import simplex
from gapped.checks import check_level, ignore_eps, in_eager_mode, without_autocast
from gapped.docstrings import documented
from gapped.gradient import Points, Weights
from gapped.pathwise import Draw, Pathwise, Source, cached_estimator
from gapped.simplex import divide, per_row

# Steps of conjugate gradients. The eigenvalues of the preconditioned system are of order one, so each step
# gains about a digit, until rounding is left.
_STEPS = {torch.float32: 10, torch.float64: 24}
# Numbers in the matrices of the rows that are solved together.
_ON_CPU, _ON_GPU = 2**20, 2**26


@documented
@dataclass(frozen=True, eq=False)
class MVE(Pathwise):
    """MVE: exact for quadratic costs, with the least norm.

    Its method `sample` draws what `gapped.mve` draws, whose help has the mathematics.

    Arguments:
        (tau)
        hard: True; there is no soft sample.
        (smoothing, draw, backend)
    """

    name = "mve"
    levels = ("tau", "smoothing")
    has_surrogate = False

    smoothing: float | Tensor = 0.0

    def __post_init__(self) -> None:
        super().__post_init__()
        check_level("smoothing", self.smoothing, positive=False)

    def points(self, logits: Tensor, draw: Draw) -> Points:
        p = torch.softmax(divide(logits, per_row(self.tau, logits)), -1)
        sample = simplex.one_hot(draw.category, logits.shape[-1], logits.dtype)
        return Points(torch.stack([p, sample]), per_row(self.smoothing, logits), _product)


@documented
def mve(
    logits: Tensor,
    tau: float | Tensor = 1.0,
    hard: bool = True,
    *,
    smoothing: float | Tensor = 0.0,
    draw: Source = "sample",
    dim: int = -1,
    mask: Tensor | None = None,
    generator: torch.Generator | None = None,
    eps: float = 1e-10,
    backend: str = "auto",
) -> Tensor:
    """MVE sample: exact for quadratic costs, with the least norm.

    Arguments:
        tau: Temperature of the softmax p in the gradient, as in `gapped.reinmax`; the authors have 1.
        hard: True; there is no soft sample.

    The category x is drawn from p = softmax(θ). A gradient g at the sample becomes::

        J(p) R A⁻¹ y + p_x / (s + 2 p_x) · g_x (e_x - p)
        R   = diag((s + p_i) / (s + 2 p_i))
        y_i = (s + p_i) / (s + p_i + p_x) · g_i - [i = x] Σ_j p_j / (s + p_j + p_x) · g_j

    where A is the graph Laplacian of the weights p_i p_j / (s + p_i + p_j) plus the diagonal matrix of
    s Σ_j p_j / (s + p_i + p_j). One system is solved for each row, in at most 24 steps in float64
    and 10 in float32. It has no kernel: on a GPU, torch solves it.

    - Law of hard samples: exactly softmax(θ).
    - Bias: none for costs up to quadratic at τ = 1, s = 0; none for linear ones at any s.
    - Cost: one evaluation of what follows, one uniform per row; the backward pass takes K² steps per row.

    >>> g = torch.Generator().manual_seed(0)
    >>> mve(torch.zeros(2, 3), generator=g).sum(-1)
    tensor([1., 1.])

    References: Hooper and Shekhovtsov (2026).
    """
    ignore_eps(eps)
    estimator = cached_estimator(MVE, tau=tau, hard=hard, smoothing=smoothing, draw=draw, backend=backend)
    return estimator.sample(logits, dim=dim, mask=mask, generator=generator)


def _product(grad: Tensor, points: Tensor, weights: Weights) -> Tensor:
    """The gradient of the logits for one of the sample; `points` are probabilities and sample."""
    assert not isinstance(weights, tuple)
    categories = points.shape[-1]
    rows = grad.numel() // categories
    step = max((_ON_CPU if grad.device.type == "cpu" else _ON_GPU) // categories**2, 1)
    if rows <= step or not in_eager_mode():
        return _solved(grad, points[0], points[1], weights)
    result = torch.empty_like(grad, memory_format=torch.contiguous_format)
    grads, out = grad.reshape(-1, categories), result.view(-1, categories)
    p, sample = points.reshape(2, -1, categories)
    if isinstance(weights, Tensor):
        weights = weights.expand(*grad.shape[:-1], 1).reshape(-1, 1)
    for start in range(0, rows, step):
        these = slice(start, start + step)
        s = weights[these] if isinstance(weights, Tensor) else weights
        out[these] = _solved(grads[these], p[these], sample[these], s)
    return result


def _solved(g: Tensor, p: Tensor, sample: Tensor, s: float | Tensor) -> Tensor:
    # The drawn category has a share however small its probability is at a temperature below 1.
    p = torch.where(sample > 0, p.clamp(min=torch.finfo(p.dtype).tiny ** 0.8), p)
    # Any other whose reciprocal may be infinite is as good as none.
    exists = p > 8 * torch.finfo(p.dtype).tiny
    p = torch.where(exists, p, 0.0)
    # What stands at a category that does not exist may be anything.
    g = torch.where(exists, g, 0.0)
    # The squares in the steps must not underflow: the solution is linear in g.
    largest = g.detach().abs().amax(-1, keepdim=True)
    g = _ratio(g, largest)
    drawn = (p * sample).sum(-1, keepdim=True)
    scale = _ratio(exists.to(p.dtype), s + p + drawn)
    # Without the drawn category's own product, which cancels: all others may be smaller than its last digit.
    others = p * (1 - sample)
    y = g * others * scale
    y = y - sample * y.sum(-1, keepdim=True) + s * g * scale
    mean = (g * scale).sum(-1, keepdim=True)
    v, c = _potential(p, s, y, mean, exists)
    # J(p) annihilates constants: of c (s + p)/(s + 2 p), that is c/2.
    v = _ratio(s + p, s + 2 * p) * v + c * _ratio(s + 0 * p, 2 * s + 4 * p)
    own = _ratio(drawn, s + 2 * drawn) * (g * sample).sum(-1, keepdim=True)
    # Next to a probability of 1 the differences keep their digits: v is relative to the likeliest category's,
    # and 1 - p is the sum of the others.
    v = v - v.gather(-1, p.argmax(-1, keepdim=True))
    rest = sample * others.sum(-1, keepdim=True) - others
    return largest * (p * (v - (p * v).sum(-1, keepdim=True)) + own * rest)


def _potential(
    p: Tensor, s: float | Tensor, y: Tensor, mean: Tensor, exists: Tensor
) -> tuple[Tensor, Tensor]:
    r"""The solution :math:`v + c` of :math:`A u = y` in two parts, where the sum of `y` is `s` times `mean`.

    With :math:`A \mathbf 1 = s q` the constant :math:`c = (\mathrm{mean} - \langle q, v\rangle)/\sum_i q_i`
    is known. Where :math:`s = 0` and :math:`A` is singular, it is one of many. For :math:`v` remains a matrix
    with zero row sums, to which :math:`d d^\top/\sum_i d_i`, with :math:`d` the diagonal, is added to fix the
    constant part of :math:`v`.
    """
    own, others = p.unsqueeze(-1), p.unsqueeze(-2)
    sums = own + others + (s.unsqueeze(-1) if isinstance(s, Tensor) else s)
    share = others / sums.clamp(min=torch.finfo(p.dtype).tiny)
    q = torch.where(exists, share.sum(-1), 0.0)
    weights = own * share
    weights.diagonal(dim1=-2, dim2=-1).zero_()
    degree = weights.sum(-1)
    total = q.sum(-1, keepdim=True)
    rho = _ratio(q, total)
    d = degree + s * q * (1 - rho)
    mass = _ratio(d, d.sum(-1, keepdim=True))

    def matrix(v: Tensor) -> Tensor:
        laplacian = degree * v - (weights @ v.unsqueeze(-1)).squeeze(-1)
        diagonal = s * q * (v - (rho * v).sum(-1, keepdim=True))
        return laplacian + diagonal + d * (mass * v).sum(-1, keepdim=True)

    r = y - rho * (s * mean)
    # What is left of its sum is rounding, and belongs where the matrix is large.
    r = r - mass * r.sum(-1, keepdim=True)
    with without_autocast(p.device):  # matrix products in half precision are no solution
        v = _conjugate_gradients(matrix, d * (1 + mass), r)
    return v, _ratio(mean - (q * v).sum(-1, keepdim=True), total)


def _conjugate_gradients(matrix: Callable[[Tensor], Tensor], diagonal: Tensor, r: Tensor) -> Tensor:
    """The solution of `matrix(v) = r`, preconditioned by the diagonal; zero where that is zero."""
    inverse = _ratio(torch.ones_like(diagonal), diagonal)
    v, direction = torch.zeros_like(r), inverse * r
    size = (r * direction).sum(-1, keepdim=True)
    for _ in range(_STEPS[r.dtype]):
        image = matrix(direction)
        length = _ratio(size, (direction * image).sum(-1, keepdim=True))
        v, r = v + length * direction, r - length * image
        before, size = size, (r * inverse * r).sum(-1, keepdim=True)
        direction = inverse * r + _ratio(size, before) * direction
    return v


def _ratio(a: Tensor, b: Tensor) -> Tensor:
    """`a / b`, and 0 where `b` is not positive."""
    positive = b > 0
    return torch.where(positive, a / torch.where(positive, b, 1.0), 0.0)
