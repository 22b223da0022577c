"""One expectation for both families of estimators."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from gapped.errors import reject
from gapped.jax.arguments import check_key, check_logits, check_where, described, is_array
from gapped.jax.attached import attach, example_product
from gapped.jax.categories import masked, one_hot, rows_of
from gapped.jax.named import Estimator, resolve
from gapped.jax.samplers import Pathwise
from gapped.jax.scores import Costs


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
        raise reject("f", described(f), "a function from samples to costs")
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
    scores = rows_of(rows).marked_logits
    one = jax.ShapeDtypeStruct((1, *rows.shape), rows.dtype)  # type: ignore[no-untyped-call]
    shape = jax.eval_shape(f, one)
    check_costs(shape, one)
    noise = estimator.noise(key, scores, shape.ndim - 1)
    index = estimator.index(scores, noise)
    points = one_hot(index, rows.shape[-1], rows.dtype)
    slopes = None
    if estimator.needs_slopes:
        costs, pull = jax.vjp(f, points)
        (slopes,) = pull(jnp.ones_like(costs))
        # At a category that does not exist the cost may have any slope.
        slopes = jnp.where(scores == -jnp.inf, 0.0, jax.lax.stop_gradient(slopes))
    else:
        costs = f(points)
    accumulated = jax.lax.stop_gradient(costs).astype(jnp.result_type(float))
    gradient = estimator.gradient(scores, noise, Costs(index, accumulated, slopes))
    gradient = jnp.where(jax.lax.stop_gradient(rows) == -jnp.inf, 0.0, gradient)
    return attach(example_product, estimator.value(scores, costs, noise), rows, gradient)


def check_costs(costs: Any, points: Any) -> None:
    """Check what `f` returned for `points` `(n, *batch, *variables, K)`: costs `(n, *batch)`."""
    n, rows = points.shape[0], points.shape[1:-1]
    accepted = f"costs of shape (n, *batch): n = {n}, then some or all of the leading axes of {rows}"
    if not (is_array(costs) or isinstance(costs, jax.ShapeDtypeStruct)):
        raise reject("f", f"a result of type {type(costs).__name__}", accepted)
    if not jnp.issubdtype(costs.dtype, jnp.floating):
        raise reject("f", f"costs of dtype {costs.dtype}", "floating-point costs")
    if not costs.shape or costs.shape[0] != n or costs.shape[1:] != rows[: len(costs.shape) - 1]:
        raise reject("f", f"costs of shape {costs.shape}", accepted)
