"""The estimators of gapped in JAX: the same definitions, without torch.

>>> import jax, jax.numpy as jnp, gapped.jax
>>> logits = jnp.zeros((4, 10))
>>> z = gapped.jax.sample(jax.random.key(0), logits)
>>> z.sum(-1)
Array([1., 1., 1., 1.], dtype=float32)

Everything works under `jit`, `vmap`, `grad`, `scan`, `checkpoint` and `shard_map`. It is an extra: `pip
install "gapped[jax]"`. `gapped.jax.numpyro` has a distribution for numpyro.
"""

from __future__ import annotations

from gapped.errors import GappedError, require

require("gapped.jax", "jax", extra="jax")

from gapped.jax.choice import Choice, choose, gate, sample  # noqa: E402
from gapped.jax.choices import Choices  # noqa: E402
from gapped.jax.objective import expectation  # noqa: E402
from gapped.jax.pathwise import (  # noqa: E402
    GST,
    DecoupledGumbelSoftmax,
    GapMax,
    GumbelRao,
    GumbelSoftmax,
    Pathwise,
    ReinMax,
    StraightThrough,
    decoupled_gumbel_softmax,
    gapmax,
    gst,
    gumbel_rao,
    gumbel_softmax,
    reinmax,
    straight_through,
)
from gapped.jax.registry import estimator, estimators  # noqa: E402
from gapped.jax.score import RLOO, DisARMTree, DoubleCV, Exact, Score  # noqa: E402
from gapped.jax.simplex import expected_gap, unimix  # noqa: E402
from gapped.jax.subsets import subset  # noqa: E402

__all__ = [
    "GST",
    "RLOO",
    "Choice",
    "Choices",
    "DecoupledGumbelSoftmax",
    "DisARMTree",
    "DoubleCV",
    "Exact",
    "GapMax",
    "GappedError",
    "GumbelRao",
    "GumbelSoftmax",
    "Pathwise",
    "ReinMax",
    "Score",
    "StraightThrough",
    "choose",
    "decoupled_gumbel_softmax",
    "estimator",
    "estimators",
    "expectation",
    "expected_gap",
    "gapmax",
    "gate",
    "gst",
    "gumbel_rao",
    "gumbel_softmax",
    "reinmax",
    "sample",
    "straight_through",
    "subset",
    "unimix",
]


def __dir__() -> list[str]:
    return __all__
