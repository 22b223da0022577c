"""A one-hot categorical distribution for distrax whose samples carry a gradient."""

from __future__ import annotations

from typing import Any

from gapped.errors import reject, require

require("gapped.jax.distrax", "distrax", extra="distrax")

import distrax  # noqa: E402
import jax.numpy as jnp  # noqa: E402
from jax import Array  # noqa: E402

from gapped.jax.pathwise import Pathwise  # noqa: E402
from gapped.jax.registry import resolve_pathwise  # noqa: E402
from gapped.jax.simplex import computed, log_softmax, masked  # noqa: E402


class OneHotCategorical(distrax.OneHotCategorical):  # type: ignore[misc]
    """One-hot categorical distribution for distrax whose samples carry a gradient.

    Moments, divergences and log-probabilities are distrax's own. The law of half-precision logits is computed
    in float32. `distrax.straight_through_wrapper` would add its gradient to the estimator's.

    Arguments:
        logits: Unnormalised log-probabilities, `(*batch, K)`.
        probs: Probabilities, in place of logits; rows need not sum to 1.
        dtype: The dtype of samples; None is that of the logits or probabilities. Gradients need a floating
            one, where distrax's own default is int.
        estimator: The pathwise estimator behind the samples, an object or its text; None is the recommended
            default.
        where: Booleans that broadcast against the logits; categories where it is False do not exist.
    """

    def __init__(
        self,
        logits: Array | None = None,
        probs: Array | None = None,
        dtype: Any = None,
        *,
        estimator: Pathwise | str | None = None,
        where: Array | None = None,
    ) -> None:
        if (logits is None) == (probs is None):
            raise reject("logits", f"{'neither' if logits is None else 'both'} of logits and probs", "one")
        given = jnp.asarray(probs if logits is None else logits)
        scores = computed(given)
        if logits is None:
            # The slope of a logarithm at 0 is infinite: it would make NaN of a gradient that is 0.
            empty = scores == 0
            scores = jnp.where(empty, -jnp.inf, jnp.log(jnp.where(empty, 1, scores)))
        log_p = log_softmax(masked(scores, where))
        super().__init__(logits=log_p, dtype=given.dtype if dtype is None else dtype)
        # Not normalised once more, which would make NaN of a row without categories.
        self._logits = log_p
        self._estimator = resolve_pathwise(estimator)

    def _sample_n(self, key: Array, n: int) -> Array:
        logits = jnp.broadcast_to(self.logits, (n, *self.logits.shape))
        sample = self._estimator.sample(key, logits)
        if jnp.issubdtype(self._dtype, jnp.integer):
            # As distrax marks a row without a law where there is no NaN, which would become a number.
            sample = jnp.where(jnp.isnan(sample), -1, sample)
        return sample.astype(self._dtype)

    def __getitem__(self, index: Any) -> OneHotCategorical:
        # The categories are no axis of the batch: indices count from its end.
        index = index if isinstance(index, tuple) else (index,)
        if all(each is not Ellipsis for each in index):
            index = (*index, Ellipsis)
        logits = self.logits[(*index, slice(None))]
        return OneHotCategorical(logits, dtype=self._dtype, estimator=self._estimator)
