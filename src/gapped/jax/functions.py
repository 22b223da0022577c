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
    r"""Gapped Straight-Through sample: deterministic given the category, so low in variance.

    Draw :math:`D = e_i \sim p = \mathrm{softmax}(\theta)`, then perturb the logits so that :math:`i` leads
    by at least the gap :math:`\gamma`:

    .. math:: t_i = \max\theta, \qquad t_j = \min(\theta_j,\ \max\theta - \gamma) \quad (j \ne i),

    and use the surrogate :math:`h = \mathrm{softmax}(t/\tau)`, in which the perturbation :math:`t - \theta`
    is a constant: the gradient is :math:`J(h)\,g/\tau`.

    - `tau`: a positive number, or an array that broadcasts against the logits' shape without the category
      axis. Not differentiated, except by `gumbel_softmax`.
    - `hard`: exactly one-hot samples of the law :math:`p`, else the surrogate itself.
    - `gap`: a number, an array as `tau` may be, a function of the selected probability such as
      `expected_gap`, or ``"auto"``, which gives each losing category the gap that Gumbel noise gives it.
    - `axis`: the category axis. `where`: a boolean array; categories where it is False do not exist, get no
      mass and no gradient. -inf means the same. A row with nothing allowed is zero; a NaN or +inf makes its
      row NaN.
    - `backend`: ``"triton"`` for the kernels, through jax-triton, which draw other samples for a key than
      ``"xla"`` does, of the same law; ``"auto"`` takes them where they run.

    The sample has the shape and dtype of the logits. It is differentiated once, in reverse mode.

    >>> import jax, jax.numpy as jnp
    >>> gst(jax.random.key(0), jnp.zeros((2, 3)), 0.5, True).sum(-1)
    Array([1., 1.], dtype=float32)

    References: Fan, Chi, Rudnicky, Ramadge (2022).
    """
    return GST(tau, hard, gap, backend=backend).sample(key, logits, axis=axis, where=where)


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
    r"""Gumbel-Softmax sample; with `hard`, straight-through Gumbel-Softmax (STGS).

    With Gumbel noise :math:`G`, the surrogate is :math:`h = \mathrm{softmax}((\theta + G)/\tau)` and the
    hard sample is the one-hot argmax of :math:`\theta + G`; the gradient is that of :math:`h`, also by an
    array `tau`. Other arguments: see `gst`.

    >>> import jax, jax.numpy as jnp
    >>> gumbel_softmax(jax.random.key(0), jnp.zeros(3), hard=True).sum()
    Array(1., dtype=float32)

    References: Jang, Gu, Poole (2017); Maddison, Mnih, Teh (2017).
    """
    return GumbelSoftmax(tau, hard, backend=backend).sample(key, logits, axis=axis, where=where)


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
    r"""Straight-through sample: a draw from :math:`p` with the gradient of the probabilities.

    The surrogate is :math:`\mathrm{softmax}(\theta/\tau)`, whatever was drawn. Other arguments: see `gst`.

    >>> import jax, jax.numpy as jnp
    >>> straight_through(jax.random.key(0), jnp.zeros(2))
    Array([0.5, 0.5], dtype=float32)

    References: Bengio, Léonard, Courville (2013).
    """
    return StraightThrough(tau, hard, backend=backend).sample(key, logits, axis=axis, where=where)


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
    r"""Gumbel-Rao sample: Gumbel-Softmax averaged over the noise that leads to the same category.

    Draw :math:`D \sim p`, then `samples` times :math:`z = \theta + G` given that its argmax is :math:`D`;
    the surrogate is the mean of :math:`\mathrm{softmax}(z/\tau)`. Other arguments: see `gst`.

    >>> import jax, jax.numpy as jnp
    >>> gumbel_rao(jax.random.key(0), jnp.zeros(3), 0.5, True, samples=10).sum()
    Array(1., dtype=float32)

    References: Paulus, Maddison, Krause (2021).
    """
    return GumbelRao(tau, hard, samples, backend=backend).sample(key, logits, axis=axis, where=where)


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
    r"""ReinMax sample: second-order accurate straight-through.

    :math:`D \sim p` with gradient

    .. math:: 2 J\bigl(\tfrac12(\mathrm{softmax}(\theta/\tau) + D)\bigr) g - \tfrac12 J(p)\, g .

    There is no soft sample, so `hard` must be True. Other arguments: see `gst`.

    >>> import jax, jax.numpy as jnp
    >>> reinmax(jax.random.key(0), jnp.zeros(3)).sum()
    Array(1., dtype=float32)

    References: Liu, Dong, Liu, Yu, Gao (2023).
    """
    return ReinMax(tau, hard, backend=backend).sample(key, logits, axis=axis, where=where)


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
    r"""Decoupled straight-through Gumbel-Softmax: one temperature to draw, another for the gradient.

    With one noise :math:`G`, :math:`D` is the one-hot argmax of :math:`\theta/\tau_f + G` and the surrogate
    :math:`\mathrm{softmax}(\theta/\tau + G)`. Other arguments: see `gst`.

    >>> import jax, jax.numpy as jnp
    >>> decoupled_gumbel_softmax(jax.random.key(0), jnp.zeros(3), 2.0, True).sum()
    Array(1., dtype=float32)

    References: Shah, Yan, Mozer, Liu (2024).
    """
    estimator = DecoupledGumbelSoftmax(tau, hard, tau_forward, backend=backend)
    return estimator.sample(key, logits, axis=axis, where=where)
