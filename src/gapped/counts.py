"""Counts that carry a gradient: Poisson, binomial and negative binomial samples.

A sample Z goes forward exactly as it was drawn, and one weight w(Z) comes back: a gradient g at the sample
becomes w(Z) g at the parameter. With the mean μ, the variance V(μ) = μ + v μ² and d = Z - μ, the weight for
the natural parameter is::

    w = V + ½ V' d - (d² - V' d - V) / (12 (1 + v) V)

without the last term for `order=2`. Of all weights whose gradient is exact for costs that are polynomials of
degree 2, or 3 with the last term, it is the one of least mean square. For other costs it is biased. It is
computed in powers of Z, where no digits are lost for small rates::

    w = ½ (μ + V' Z) - Z (Z - 1) / (12 (1 + v) V) + (2 Z - μ) / (12 (1 + v μ))

References: He and Wu (2026), whose Fini-2 and Fini-3 these are; docs/field_estimators.md has the proof.
"""

from __future__ import annotations

import torch
from torch import Tensor

from gapped import simplex
from gapped.checks import broadcasts, check_generator, check_level, holds, is_integer, requires_grad
from gapped.errors import reject
from gapped.gradient import is_differentiated, with_gradient

# The largest rate that counts are drawn with.
_MOST = 2.0**40


def poisson(log_rate: Tensor, *, order: int = 3, generator: torch.Generator | None = None) -> Tensor:
    """Draw Poisson counts that carry a gradient.

    Arguments:
        log_rate: The logarithm of the rate λ, of any shape. A rate that is not finite gives NaN.
        order: 2 or 3, the degree of the polynomial costs for which the gradient is exact in the mean.
        generator: Where random numbers come from; None is torch's default generator.

    Returns:
        Counts Z in the shape and dtype of `log_rate`.

    A gradient g at the sample becomes w g at `log_rate`, with the weight of the order::

        w_2 = ½ (Z + λ)
        w_3 = 5/12 λ + 2/3 Z - Z (Z - 1) / (12 λ)

    >>> log_rate = torch.zeros(1000, requires_grad=True)
    >>> (poisson(log_rate) ** 2).mean().backward()
    >>> bool(log_rate.grad.sum() > 2)  # it estimates 3, the slope of the expectation
    True
    """
    _check(log_rate, "log_rate", order, generator)
    eta = simplex.computed(log_rate)
    rate = eta.detach().exp()
    legal = rate.isfinite()
    value = _poisson(rate, legal, generator)
    weight = _weight(value, rate, torch.ones_like(rate), torch.zeros_like(rate), order)
    return _joined(value, eta, weight, log_rate, "log_rate")


def binomial(
    total: int | Tensor, logits: Tensor, *, order: int = 3, generator: torch.Generator | None = None
) -> Tensor:
    """Draw binomial counts that carry a gradient.

    Arguments:
        total: The number of trials n, a whole number or a tensor of them that broadcasts against `logits`.
        logits: Log-odds log p/(1 - p) of a success, of any shape. NaN gives NaN.
        order: 2 or 3, the degree of the polynomial costs for which the gradient is exact in the mean; with n
            = 1 both are 2.
        generator: Where random numbers come from; None is torch's default generator.

    Returns:
        Counts Z in the shape and dtype of `logits`.

    A gradient g at the sample becomes w g at `logits`. With d = Z - n p and V = n p (1 - p) the weights are::

        w_2 = ½ n p + ½ (1 - 2p) Z
        w_3 = w_2 - (d² - (1 - 2p) d - V) / (12 (1 - 1/n) V)

    >>> z = binomial(8, torch.zeros(1000))
    >>> bool(((z >= 0) & (z <= 8) & (z == z.round())).all())
    True
    """
    _check(logits, "logits", order, generator)
    accepted = "a whole number of at least 0, or a tensor of them that broadcasts against the logits"
    if isinstance(total, Tensor):
        if not broadcasts(tuple(total.shape), tuple(logits.shape)) or requires_grad(total):
            raise reject("total", f"a tensor of shape {tuple(total.shape)}", accepted)
        if total.dtype == torch.bool or total.is_complex():
            raise reject("total", f"a tensor of dtype {total.dtype}", accepted)
        if holds(~((total >= 0) & (total <= _MOST)) | (total != total.round())):
            raise reject("total", "a tensor with other values", f"{accepted}, at most 2^40")
    elif not is_integer(total) or not 0 <= total <= _MOST:
        raise reject("total", total, f"{accepted}, at most 2^40")
    eta = simplex.computed(logits)
    p, q = torch.sigmoid(eta.detach()), torch.sigmoid(-eta.detach())
    n = total.to(p).expand_as(p) if isinstance(total, Tensor) else torch.full_like(p, float(total))
    legal = ~p.isnan()
    # The rarer of both outcomes is counted: next to 1 a probability has too few digits. Its weight is the
    # same, since the signs of the cost's derivative and of the parameter both change.
    rare, common = p.minimum(q), p.maximum(q)
    # In float64: torch's float32 has the wrong law for totals beyond 2^24.
    rarer = torch.binomial(n.double(), torch.where(legal, rare, 0.0).double(), generator=generator).to(p)
    value = torch.where(legal, torch.where(p > q, n - rarer, rarer), torch.nan)
    weight = torch.where(legal, _weight(rarer, n * rare, common, -1 / n, order), torch.nan)
    return _joined(value, eta, weight, logits, "logits")


def negative_binomial(
    total: float | Tensor, logits: Tensor, *, order: int = 3, generator: torch.Generator | None = None
) -> Tensor:
    """Draw negative binomial counts that carry a gradient.

    Arguments:
        total: The number of failures r, a positive number or a tensor that broadcasts against `logits`.
        logits: Log-odds log p/(1 - p) of a success, of any shape. A mean beyond the range of
            float32, or of float64 for such logits, gives NaN; so does a count, where the mean is close to it.
        order: 2 or 3, the degree of the polynomial costs for which the gradient is exact in the mean.
        generator: Where random numbers come from; None is torch's default generator.

    Returns:
        Counts Z in the shape and dtype of `logits`: the successes of probability p before the r-th failure,
        as in `torch.distributions.NegativeBinomial`. Their mean is μ = r p/(1 - p).

    A gradient g at the sample becomes w g at `logits`. With d = Z - μ, the variance V = r p/(1 - p)² and its
    slope V' = (1 + p)/(1 - p) the weights are::

        w_2 = ½ r p + ½ (1 + p) Z
        w_3 = w_2 - (1 - p) (d² - V' d - V) / (12 (1 + 1/r) V)

    >>> z = negative_binomial(0.5, torch.zeros(1000))
    >>> bool(((z >= 0) & (z == z.round())).all())
    True
    """
    _check(logits, "logits", order, generator)
    check_level("total", total, positive=True)
    if isinstance(total, Tensor) and not broadcasts(tuple(total.shape), tuple(logits.shape)):
        accepted = f"one that broadcasts against the logits' shape {tuple(logits.shape)}"
        raise reject("total", f"a tensor of shape {tuple(total.shape)}", accepted)
    eta = simplex.computed(logits)
    odds, p, q = eta.detach().exp(), torch.sigmoid(eta.detach()), torch.sigmoid(-eta.detach())
    r = total.to(p).expand_as(p) if isinstance(total, Tensor) else torch.full_like(p, float(total))
    # A Poisson sample whose rate has a gamma law. Below the smallest float32 torch has that number instead,
    # which is a rate of its own where the odds are large.
    rate = (torch._standard_gamma(r.double(), generator=generator) * odds.double()).to(p)
    value = _poisson(rate, rate.isfinite() & (r * odds).isfinite(), generator)
    # The weight in terms of p: the variance itself may overflow where the mean does not.
    weight = r * p / 2 + (1 + p) / 2 * value
    if order == 3:
        scaled = q * value
        pairs = scaled / torch.where(odds > 0, (r + 1) * odds, 1.0) * (scaled - q)
        weight = weight - (pairs - q * (2 * scaled - r * p)) / 12
    return _joined(value, eta, weight, logits, "logits")


def _poisson(rate: Tensor, legal: Tensor, generator: torch.Generator | None) -> Tensor:
    """Poisson counts, NaN where the rate is not `legal`."""
    # torch counts in int64, and loses digits before. The law is normal by then: a smaller rate's is scaled.
    small = torch.where(legal, rate, 0.0).clamp(max=_MOST)
    value = torch.poisson(small, generator=generator)
    value = torch.where(rate > _MOST, (rate + (value - small) * (rate / _MOST).sqrt()).round(), value)
    return torch.where(legal, value, torch.nan)


def _weight(value: Tensor, mean: Tensor, dispersion: Tensor, curvature: Tensor, order: int) -> Tensor:
    """The weight for the natural parameter; the variance is `mean` times `dispersion`, 1 + v μ."""
    # Halved before they are added, and below not doubled: counts next to the largest float would overflow.
    weight = mean / 2 + (dispersion - 0.5) * value
    if order == 2:
        return weight
    scale = (1 + curvature) * mean * dispersion
    # Where nothing varies, or only between two values, there is no third degree.
    usable = scale > 0
    pairs = value / torch.where(usable, scale, 1.0) * (value - 1)
    return weight - torch.where(usable, pairs - (value + (value - mean)) / dispersion, 0.0) / 12


def _joined(value: Tensor, eta: Tensor, weight: Tensor, like: Tensor, name: str) -> Tensor:
    value = value.to(like.dtype)
    # What float32 and float64 cannot hold is NaN by now.
    if like.dtype == torch.float16 and holds(value.isinf()):
        raise reject(name, "a count beyond 65504, the largest float16", "smaller counts, or another dtype")
    return with_gradient(value, eta, weight) if is_differentiated(eta) else value


def _check(parameter: object, name: str, order: object, generator: object) -> None:
    if not isinstance(parameter, Tensor) or not parameter.is_floating_point():
        kind = parameter.dtype if isinstance(parameter, Tensor) else type(parameter).__name__
        raise reject(name, f"an object of type {kind}", "a floating-point tensor")
    if not is_integer(order) or order not in (2, 3):
        raise reject("order", order, "2 or 3")
    check_generator(generator, parameter)
