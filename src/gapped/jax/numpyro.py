"""A one-hot categorical distribution for numpyro whose samples carry a gradient."""

from __future__ import annotations

from typing import Any, ClassVar

from gapped.errors import require

require("gapped.jax.numpyro", "numpyro", extra="numpyro")

import jax.numpy as jnp  # noqa: E402
from jax import Array  # noqa: E402
from numpyro.distributions import Distribution, constraints, kl_divergence  # noqa: E402
from numpyro.distributions.util import validate_sample  # noqa: E402

from gapped.jax.pathwise import Pathwise  # noqa: E402
from gapped.jax.registry import resolve_pathwise  # noqa: E402
from gapped.jax.simplex import computed, log_softmax, masked, one_hot, rows_of  # noqa: E402


class OneHotCategorical(Distribution):  # type: ignore[misc]
    """One-hot categorical distribution for numpyro whose samples carry a gradient.

    It has `rsample`, so `Trace_ELBO` sends gradients through the samples instead of stopping them.

    Arguments:
        logits: Unnormalised log-probabilities, `(*batch, K)`.
        estimator: The pathwise estimator behind the samples, an object or its text; None is the recommended
            default.
        where: Booleans that broadcast against the logits; categories where it is False do not exist.
        validate_args: As in numpyro: whether to check arguments and samples; None is numpyro's default.

    `log_prob` is ⟨z, log p⟩ with 0 log 0 = 0, differentiable in the sample z. The law of half-precision
    logits is computed in float32; samples have the dtype of the logits.

    >>> import jax
    >>> q = OneHotCategorical(jnp.zeros((2, 4)), estimator="gst:tau=0.5")
    >>> q.sample(jax.random.key(0)).sum(-1), q.event_shape
    (Array([1., 1.], dtype=float32), (4,))
    """

    # Not `real_vector`: -inf logits are categories that do not exist.
    arg_constraints: ClassVar = {"logits": constraints.dependent(is_discrete=False, event_dim=1)}
    reparametrized_params: ClassVar = ["logits"]
    support = constraints.simplex
    pytree_aux_fields = ("estimator", "_dtype")

    def __init__(
        self,
        logits: Array,
        *,
        estimator: Pathwise | str | None = None,
        where: Array | None = None,
        validate_args: bool | None = None,
    ) -> None:
        self.estimator = resolve_pathwise(estimator)
        logits = jnp.asarray(logits)
        self._dtype = logits.dtype
        self.logits = log_softmax(computed(masked(logits, where)))
        super().__init__(self.logits.shape[:-1], self.logits.shape[-1:], validate_args=validate_args)

    def sample(self, key: Array, sample_shape: tuple[int, ...] = ()) -> Array:
        logits = jnp.broadcast_to(self.logits, self.shape(sample_shape))
        return self.estimator.sample(key, logits).astype(self._dtype)

    @validate_sample  # type: ignore[untyped-decorator]
    def log_prob(self, value: Array, intermediates: Any = None) -> Array:
        # 0 * -inf would be NaN: such a logit is replaced. All others stay, for the derivative by the sample.
        return (value * jnp.where((value == 0) & (self.logits == -jnp.inf), 0.0, self.logits)).sum(-1)

    def entropy(self) -> Array:
        return -self._expected(self.logits)

    def _expected(self, values: Array) -> Array:
        p = jnp.exp(self.logits)
        return (p * jnp.where(p > 0, values, 0.0)).sum(-1)

    @property
    def probs(self) -> Array:
        return jnp.exp(self.logits)

    @property
    def mean(self) -> Array:
        return self.probs

    @property
    def variance(self) -> Array:
        return self.probs * (1 - self.probs)

    @property
    def mode(self) -> Array:
        index = rows_of(self.logits).mark(self.logits.argmax(-1))
        return one_hot(index, self.event_shape[0], self._dtype)


@kl_divergence.register(OneHotCategorical, OneHotCategorical)  # type: ignore[untyped-decorator]
def _divergence(p: OneHotCategorical, q: OneHotCategorical) -> Array:
    # Selected before subtracting: a category without mass must not bring inf - inf into the gradient.
    mass = p.probs > 0
    return p._expected(jnp.where(mass, p.logits, 0.0) - jnp.where(mass, q.logits, 0.0))
