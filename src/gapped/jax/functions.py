"""The estimators as functions of a key and logits, as `jax.random` and `jax.nn` have theirs."""

from __future__ import annotations

from jax import Array

from gapped.jax.members import (
    GST,
    DecoupledGumbelSoftmax,
    Gap,
    GumbelRao,
    GumbelSoftmax,
    ReinMax,
    StraightThrough,
)
from gapped.jax.samplers import Level
from gapped.jax.shared_arguments import documented


@documented
def gst(
    key: Array,
    logits: Array,
    tau: Level = 1.0,
    hard: bool = False,
    *,
    gap: Gap = 1.0,
    axis: int = -1,
    where: Array | None = None,
    backend: str = "auto",
) -> Array:
    """Gapped Straight-Through sample: a category, and a gradient of low variance.

    Soft by default: pass `hard=True` for one-hot vectors. The class `gapped.jax.GST` is hard by default.

    Arguments:
        (key, logits, tau, hard)
        gap: Least lead γ of the drawn category over the others: a number, an array that broadcasts as `tau`
            does, a function of the drawn probability such as `gapped.jax.expected_gap`, or "auto", which
            gives each category the gap that Gumbel noise would.
        (axis, where, backend)

    Returns:
        An array of the shape and dtype of `logits`. It is differentiated once, in reverse mode.

    The category i is drawn from p = softmax(θ). Then the logits are perturbed so that i leads by γ::

        t_i = max θ,    t_j = min(θ_j, max θ - γ)  for j ≠ i

    The surrogate is h = softmax(t/τ), in which the perturbation t - θ is a constant: a gradient g at the
    sample becomes J(h) g / τ at the logits, with J(h) = diag(h) - h hᵀ.

    >>> import jax, jax.numpy as jnp
    >>> gst(jax.random.key(0), jnp.zeros((2, 3)), 0.5, True).sum(-1)
    Array([1., 1.], dtype=float32)

    References: Fan, Chi, Rudnicky, Ramadge (2022).
    """
    return GST(tau, hard, gap, backend=backend).sample(key, logits, axis=axis, where=where)


@documented
def gumbel_softmax(
    key: Array,
    logits: Array,
    tau: Level = 1.0,
    hard: bool = False,
    *,
    axis: int = -1,
    where: Array | None = None,
    backend: str = "auto",
) -> Array:
    """Gumbel-softmax sample; with `hard`, straight-through Gumbel-softmax (STGS).

    Soft by default: pass `hard=True` for one-hot vectors. The class `gapped.jax.GumbelSoftmax` is hard by
    default.

    Arguments:
        (key, logits)
        tau: Temperature τ, a positive number or an array that broadcasts against the logits' shape without
            the category axis. An array gets a gradient, so the temperature can be learned.
        (hard, axis, where, backend)

    Returns:
        An array of the shape and dtype of `logits`. It is differentiated once, in reverse mode.

    With Gumbel noise G, the surrogate is h = softmax((θ + G)/τ) and the hard sample is the one-hot argmax of
    θ + G. The gradient is that of h.

    >>> import jax, jax.numpy as jnp
    >>> gumbel_softmax(jax.random.key(0), jnp.zeros(3), hard=True).sum()
    Array(1., dtype=float32)

    References: Jang, Gu, Poole (2017); Maddison, Mnih, Teh (2017).
    """
    return GumbelSoftmax(tau, hard, backend=backend).sample(key, logits, axis=axis, where=where)


@documented
def straight_through(
    key: Array,
    logits: Array,
    tau: Level = 1.0,
    hard: bool = False,
    *,
    axis: int = -1,
    where: Array | None = None,
    backend: str = "auto",
) -> Array:
    """Straight-through sample: a category, with the gradient of the probabilities.

    Soft by default: pass `hard=True` for one-hot vectors. The class `gapped.jax.StraightThrough` is hard by
    default.

    Arguments:
        (key, logits, tau, hard, axis, where, backend)

    Returns:
        An array of the shape and dtype of `logits`. It is differentiated once, in reverse mode.

    The category is drawn from softmax(θ); the surrogate is softmax(θ/τ), whatever was drawn.

    >>> import jax, jax.numpy as jnp
    >>> straight_through(jax.random.key(0), jnp.zeros(2))
    Array([0.5, 0.5], dtype=float32)

    References: Bengio, Léonard, Courville (2013).
    """
    return StraightThrough(tau, hard, backend=backend).sample(key, logits, axis=axis, where=where)


@documented
def gumbel_rao(
    key: Array,
    logits: Array,
    tau: Level = 1.0,
    hard: bool = False,
    *,
    samples: int = 100,
    axis: int = -1,
    where: Array | None = None,
    backend: str = "auto",
) -> Array:
    """Gumbel-Rao sample: Gumbel-softmax, averaged given the category.

    Soft by default: pass `hard=True` for one-hot vectors. The class `gapped.jax.GumbelRao` is hard by
    default.

    Arguments:
        (key, logits, tau, hard)
        samples: How many surrogates are averaged.
        (axis, where, backend)

    Returns:
        An array of the shape and dtype of `logits`. It is differentiated once, in reverse mode.

    The category i is drawn from softmax(θ), then `samples` times z = θ + G, with Gumbel noise G, given that
    its argmax is i. The surrogate is the mean of softmax(z/τ).

    >>> import jax, jax.numpy as jnp
    >>> gumbel_rao(jax.random.key(0), jnp.zeros(3), 0.5, True, samples=10).sum()
    Array(1., dtype=float32)

    References: Paulus, Maddison, Krause (2021).
    """
    return GumbelRao(tau, hard, samples, backend=backend).sample(key, logits, axis=axis, where=where)


@documented
def reinmax(
    key: Array,
    logits: Array,
    tau: Level = 1.0,
    hard: bool = True,
    *,
    axis: int = -1,
    where: Array | None = None,
    backend: str = "auto",
) -> Array:
    """ReinMax sample: straight-through, second-order accurate.

    Arguments:
        (key, logits, tau)
        hard: True; there is no soft sample.
        (axis, where, backend)

    Returns:
        An array of the shape and dtype of `logits`. It is differentiated once, in reverse mode.

    The one-hot D is drawn from p = softmax(θ). A gradient g at the sample becomes::

        2 J((softmax(θ/τ) + D)/2) g - J(p) g / 2,    J(q) = diag(q) - q qᵀ

    >>> import jax, jax.numpy as jnp
    >>> reinmax(jax.random.key(0), jnp.zeros(3)).sum()
    Array(1., dtype=float32)

    References: Liu, Dong, Liu, Yu, Gao (2023).
    """
    return ReinMax(tau, hard, backend=backend).sample(key, logits, axis=axis, where=where)


@documented
def decoupled_gumbel_softmax(
    key: Array,
    logits: Array,
    tau: Level = 1.0,
    hard: bool = False,
    *,
    tau_forward: Level = 1.0,
    axis: int = -1,
    where: Array | None = None,
    backend: str = "auto",
) -> Array:
    """Gumbel-softmax sample with one temperature to draw, another for gradients.

    Soft by default: pass `hard=True` for one-hot vectors. The class `gapped.jax.DecoupledGumbelSoftmax` is
    hard by default.

    Arguments:
        (key, logits, tau, hard)
        tau_forward: Temperature τ_f of the draw, a number or an array as `tau`; 1 keeps the logits' own law.
        (axis, where, backend)

    Returns:
        An array of the shape and dtype of `logits`. It is differentiated once, in reverse mode.

    With one Gumbel noise G, the hard sample is the one-hot argmax of θ/τ_f + G, and the surrogate is
    softmax(θ/τ + G).

    >>> import jax, jax.numpy as jnp
    >>> decoupled_gumbel_softmax(jax.random.key(0), jnp.zeros(3), 2.0, True).sum()
    Array(1., dtype=float32)

    References: Shah, Yan, Mozer, Liu (2024).
    """
    estimator = DecoupledGumbelSoftmax(tau, hard, tau_forward, backend=backend)
    return estimator.sample(key, logits, axis=axis, where=where)
