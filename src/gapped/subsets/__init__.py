"""Exactly `k` of `n` elements: samples that carry a gradient, and the law that they have.

A set S of `k` elements has a probability in proportion to Π_{i ∈ S} exp(θ_i), the conditional Bernoulli
distribution. In all functions here the elements lie on axis `dim` of the logits, and those where the boolean
`mask` is False, or whose logit is -inf, do not exist. A row with no more than `k` elements has all of them
selected. A row with a NaN or +inf gives NaN.

- `subset`: a sample that carries the gradient of a straight-through estimator, public as `gapped.subset`.
- `marginals`, `log_prob` and `entropy`: differentiable as often as wanted, in time and memory of about n
  min(k, n - k) for each row.
- `expectation`: the expected cost of a subset, with an unbiased gradient.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress

import torch
from torch import Tensor

from gapped import simplex
from gapped.checks import check_count, check_generator, check_logits, check_mask, check_tensor
from gapped.docstrings import ARGUMENTS, describing
from gapped.errors import reject
from gapped.gradient import is_differentiated, with_gradient
from gapped.score import Cost
from gapped.score.reinforce import leave_one_out
from gapped.subsets import conditional_bernoulli as law
from gapped.subsets.subset_sampling import check_size
from gapped.subsets.subset_sampling import subset as subset

_documented = describing(
    {
        "logits": "Logits θ, the `n` elements on the axis `dim`.",
        "k": "How many elements are selected, from 0 to `n`.",
        "dim": "The axis of the elements.",
        "mask": "Booleans that broadcast against the logits; elements where it is False do not exist.",
        "generator": ARGUMENTS["generator"],
    }
)

__all__ = ["entropy", "expectation", "log_prob", "marginals", "subset"]


def __dir__() -> list[str]:
    return __all__


@_documented
def marginals(logits: Tensor, k: int, *, dim: int = -1, mask: Tensor | None = None) -> Tensor:
    """The probability that each element is among the k that are selected.

    Returns:
        Probabilities μ in the shape and dtype of `logits`. They sum to `k`.

    With Z_k(θ) = Σ_S Π_{i ∈ S} exp(θ_i), the sum over all sets of k elements, μ is the gradient of log Z_k.
    For k = 1 it is the softmax. Its Jacobian is the covariance matrix of the selections.

    >>> marginals(torch.tensor([2.0, 0.0, 0.0, 0.0]), 2)
    tensor([0.8808, 0.3731, 0.3731, 0.3731])
    """
    scores, k = _scores(logits, k, dim, mask)
    return law.marginals_of(scores, k).to(logits.dtype).movedim(-1, dim)


@_documented
def log_prob(logits: Tensor, k: int, sample: Tensor, *, dim: int = -1, mask: Tensor | None = None) -> Tensor:
    """The log-probability of a subset of k elements, as `gapped.subset` draws it.

    Arguments:
        sample: Zeros and ones, of a shape that broadcasts with that of the logits.

    Returns:
        A tensor without the axis `dim`. A set that the law excludes, such as one of another size, has -inf.

    The set S has the probability Π_{i ∈ S} exp(θ_i) / Z_k(θ), where Z_k sums the numerator over all sets.

    >>> log_prob(torch.zeros(4), 2, torch.tensor([1.0, 0.0, 1.0, 0.0])).exp()
    tensor(0.1667)
    """
    scores, k = _scores(logits, k, dim, mask)
    scores = simplex.accumulated(scores)
    sample = check_tensor("sample", sample, "a tensor of zeros and ones")
    # `dim` counts the axes of the logits: the sample may have more in front.
    axis = dim if dim < 0 else dim - logits.dim()
    sample = _broadcast(sample, logits, axis).movedim(axis, -1)
    chosen = sample == 1
    size = (scores != -torch.inf).sum(-1).clamp(max=k)
    is_subset = ((sample == 0) | chosen).all(-1) & (chosen.sum(-1) == size)
    value = torch.where(chosen, scores, 0.0).sum(-1) - law.log_normaliser_of(scores, k)
    return torch.where(is_subset | value.isnan(), value, -torch.inf).to(logits.dtype)


@_documented
def entropy(logits: Tensor, k: int, *, dim: int = -1, mask: Tensor | None = None) -> Tensor:
    """The entropy of a random subset of k elements, in nats.

    Returns:
        A tensor without the axis `dim`.

    It is log Z_k(θ) - ⟨μ, θ⟩, with the marginals μ and Z_k(θ) = Σ_S Π_{i ∈ S} exp(θ_i).

    >>> entropy(torch.zeros(4), 2).exp()
    tensor(6.)
    """
    scores, k = _scores(logits, k, dim, mask)
    scores = simplex.accumulated(scores)
    energy = law.marginals_of(scores, k) * torch.where(scores == -torch.inf, 0.0, scores)
    return (law.log_normaliser_of(scores, k) - energy.sum(-1)).to(logits.dtype)


@_documented
def expectation(
    f: Callable[[Tensor], Tensor],
    logits: Tensor,
    k: int,
    samples: int = 2,
    *,
    mask: Tensor | None = None,
    generator: torch.Generator | None = None,
) -> Tensor:
    """Estimate the expected cost of a subset, with an unbiased gradient.

    Arguments:
        f: The cost: a function that maps zeros and ones `(m, *batch, *variables, n)` to costs `(m, *batch)`,
            as in `gapped.expectation`. It need not be differentiable.
        logits: Logits θ, `(*batch, *variables, n)`; the elements lie on the last axis.
        samples: The number m of subsets, at least two.

    Returns:
        Costs of the shape of the batch, which carry the gradient.

    The score of the law is S - μ, with the marginals μ. So the gradient is that of REINFORCE with a
    leave-one-out baseline, as in `gapped.RLOO`::

        1/m Σ_i (f(S_i) - mean_{j≠i} f(S_j)) (S_i - μ)

    >>> logits = torch.zeros(5, requires_grad=True)
    >>> expectation(lambda s: s.sum(-1), logits, 3)
    tensor(3., grad_fn=<_WithGradientBackward>)

    References: Kool, van Hoof, Welling (2019); Wijk, Vinuesa, Azizpour (2025) for subsets.
    """
    scores, k = _scores(logits.detach() if isinstance(logits, Tensor) else logits, k, -1, mask)
    check_count("samples", samples, 2)
    check_generator(generator, logits)
    if not callable(f):
        raise reject("f", f"an object of type {type(f).__name__}", "a function from subsets to costs")
    chosen = law.draw(scores.expand(samples, *scores.shape), k, generator)
    cost = Cost(f, scores, logits.dtype)
    costs = cost(torch.where(scores.isnan(), torch.nan, chosen.to(scores.dtype)))
    value = costs.mean(0)
    if not is_differentiated(logits):
        return value
    signal = cost.spread(leave_one_out(simplex.accumulated(costs.detach())))
    gradient = (signal * (chosen.to(scores.dtype) - law.marginals(scores, k))).mean(0)
    return with_gradient(value, simplex.masked(logits, mask), gradient.to(logits.dtype))


def _broadcast(sample: Tensor, logits: Tensor, axis: int) -> Tensor:
    """The sample in the shape that it and the logits have together, with their number of elements."""
    with suppress(RuntimeError):
        shape = torch.broadcast_shapes(sample.shape, logits.shape)  # type: ignore[no-untyped-call]
        if shape[axis] == logits.shape[axis]:
            return sample.expand(shape)
    accepted = f"a shape that broadcasts with {tuple(logits.shape)}, that of the logits"
    raise reject("sample", f"a tensor of shape {tuple(sample.shape)}", accepted)


def _scores(logits: Tensor, k: int, dim: int, mask: Tensor | None) -> tuple[Tensor, int]:
    """Logits and `k` as `conditional_bernoulli` takes them, in the graph, once all arguments are checked."""
    check_logits(logits, dim)
    k = check_size("k", k, logits.shape[dim])
    check_mask(mask, logits, dim)
    return simplex.shift(simplex.computed(simplex.masked(logits, mask)).movedim(dim, -1)), k
