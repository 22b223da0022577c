"""One expectation for both families of estimators."""

from __future__ import annotations

from collections.abc import Callable

import jax.numpy as jnp
from jax import Array

from gapped.errors import reject
from gapped.jax.checks import check_key, check_logits, check_where, describe
from gapped.jax.gradient import with_gradient
from gapped.jax.pathwise import Pathwise
from gapped.jax.registry import Estimator, resolve
from gapped.jax.score import check_costs
from gapped.jax.simplex import masked


def expectation(
    key: Array,
    f: Callable[[Array], Array],
    logits: Array,
    estimator: Estimator | str | None = None,
    *,
    where: Array | None = None,
) -> Array:
    """Estimate an expected cost E f(D), D ~ softmax(θ), and its gradient.

    Arguments:
        key: A random key, such as `jax.random.key(0)`.
        f: The cost: a function that JAX can trace, which maps one-hot arrays `(n, *batch, *variables, K)` to
            costs `(n, *batch)`; the estimator chooses `n`. Which of the logits' axes are the batch is read
            off the costs' shape. All variables of an example share its cost; examples are independent of each
            other.
        logits: Unnormalised log-probabilities θ, `(*batch, *variables, K)`.
        estimator: One of either family, such as `gapped.jax.GST()` or `gapped.jax.RLOO(4)`, or its text such
            as "rloo:samples=4"; with hard samples. None is the recommended default.
        where: Booleans that broadcast against the logits. Categories where it is False, or whose logit is
            -inf, do not exist and get exactly zero gradient.

    Returns:
        Costs of the shape of the batch. Each is the mean cost of the samples that the estimator draws. Its
        gradient with respect to the logits is the estimator's; with respect to anything else that `f` depends
        on, the ordinary one.

    >>> import jax
    >>> target = jnp.asarray([1.0, 0.0, 0.0])
    >>> cost = lambda z: ((z.mean(-2) - target) ** 2).sum(-1)
    >>> slope = jax.grad(lambda x: expectation(jax.random.key(0), cost, x, "exact"))(jnp.zeros((2, 3)))
    >>> [f"{entry:.4f}" for entry in slope[0]]
    ['-0.2222', '0.1111', '0.1111']
    """
    check_key(key)
    check_logits(logits)
    check_where(where, logits)
    if not callable(f):
        raise reject("f", describe(f), "a function from samples to costs")
    estimator = resolve(estimator)
    logits = jnp.asarray(logits)
    if isinstance(estimator, Pathwise):
        if not estimator.hard:
            accepted = "hard=True: the mean cost of soft samples is not the expected cost of hard ones"
            raise reject("estimator", f"{type(estimator).__name__} with hard=False", accepted)
        sample = estimator.sample(key, logits, where=where)[None]
        costs = f(sample)
        check_costs(costs, sample)
        return costs.mean(0)
    rows = masked(logits, where)
    value, gradient = estimator.estimate(key, f, rows)
    return with_gradient(value, rows, gradient)
