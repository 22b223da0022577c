"""A one-hot categorical distribution for distrax whose samples carry a gradient."""

from __future__ import annotations

from typing import Any

from gapped.errors import require

require("gapped.jax.distrax", "distrax", extra="distrax")

import distrax  # noqa: E402
import jax.numpy as jnp  # noqa: E402
from jax import Array  # noqa: E402

from gapped.jax.categories import log_softmax, masked  # noqa: E402
from gapped.jax.named import resolve_pathwise  # noqa: E402
from gapped.jax.samplers import Pathwise  # noqa: E402


class OneHotCategorical(distrax.OneHotCategorical):  # type: ignore[misc]
    """One-hot categorical distribution for distrax whose samples carry a gradient.

    Samples have the dtype of the logits. Moments, divergences and log-probabilities are distrax's own.

    Arguments:
        logits: Unnormalised log-probabilities, `(*batch, K)`.
        estimator: The pathwise estimator behind the samples, an object or its text; None is the recommended
            default.
        where: Booleans that broadcast against the logits; categories where it is False do not exist.
    """

    def __init__(
        self, logits: Array, *, estimator: Pathwise | str | None = None, where: Array | None = None
    ) -> None:
        logits = log_softmax(masked(jnp.asarray(logits), where))
        super().__init__(logits=logits, dtype=logits.dtype)
        # Not normalised once more, which would make NaN of a row without categories.
        self._logits = logits
        self._estimator = resolve_pathwise(estimator)

    def _sample_n(self, key: Array, n: int) -> Array:
        return self._estimator.sample(key, jnp.broadcast_to(self.logits, (n, *self.logits.shape)))

    def __getitem__(self, index: Any) -> OneHotCategorical:
        return OneHotCategorical(self.logits[index], estimator=self._estimator)
