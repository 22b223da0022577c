"""One expectation for both families of estimators."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array
from jax.extend.core import Jaxpr

from gapped.docstrings import documented_in_jax as documented
from gapped.errors import reject
from gapped.jax.checks import check_key, check_logits, check_where, describe
from gapped.jax.gradient import with_gradient
from gapped.jax.pathwise import Pathwise
from gapped.jax.registry import Estimator, resolve
from gapped.jax.score import check_costs
from gapped.jax.simplex import masked


@documented
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
        f: The cost: a function that JAX can trace, which maps one-hot arrays `(n, *batch, *variables, K)` to
            costs `(n, *batch)`; the estimator chooses `n`. Which of the logits' axes are the batch is read
            off the costs' shape. All variables of an example share its cost; examples are independent of each
            other.
        logits: Unnormalised log-probabilities θ, `(*batch, *variables, K)`.
        estimator: One of either family, such as `gapped.jax.GapMax()` or `gapped.jax.RLOO(4)`, or its text
            such as "rloo:samples=4"; with hard samples. None is the recommended default.
        where: Booleans that broadcast against the logits. Categories where it is False, or whose logit is
            -inf, do not exist and get exactly zero gradient.

    Returns:
        Costs of the shape of the batch. Each is the mean cost of the samples that the estimator draws. Its
        gradient with respect to the logits is the estimator's; with respect to anything else that `f` depends
        on, the ordinary one. A pathwise estimator refuses to differentiate a cost that is flat in its sample.

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
        one = jax.ShapeDtypeStruct((1, *logits.shape), logits.dtype)  # type: ignore[no-untyped-call]
        program, shape = jax.make_jaxpr(f, return_shape=True)(one)
        check_costs(shape, one)
        sample = estimator.sample(key, _through(program.jaxpr, logits), where=where)
        return f(sample[None]).mean(0)
    rows = masked(logits, where)
    value, gradient = estimator.estimate(key, f, rows)
    return with_gradient(value, rows, gradient)


@partial(jax.custom_jvp, nondiff_argnums=(0,))
def _through(cost: Jaxpr, logits: Array) -> Array:
    """`logits`, whose gradient is refused where the cost has no derivative by its samples.

    Else the parameters of such a cost would be trained, and the logits left as they are without a word.
    """
    return logits


@_through.defjvp
def _check_slope(cost: Jaxpr, primals: Any, tangents: Any) -> tuple[Array, Array]:
    if not _has_slope(cost):
        accepted = (
            "a differentiable function of it, or an estimator that needs none such as gapped.jax.RLOO(2)"
        )
        raise reject("f", "costs without a derivative with respect to f's input", accepted)
    (logits,), (slope,) = primals, tangents
    return logits, slope


def _has_slope(cost: Jaxpr) -> bool:
    """Whether the gradient at the input of `cost` depends on the gradient at its result."""

    def pull(grad: Array, *inputs: Array) -> Any:
        *constants, points = inputs
        return jax.vjp(lambda z: jax.core.eval_jaxpr(cost, constants, z)[0], points)[1](grad)

    shapes = [each.aval for each in (*cost.outvars, *cost.constvars, *cost.invars)]
    steps = jax.make_jaxpr(pull)(*shapes).jaxpr
    reached = {id(steps.invars[0])}
    for step in steps.eqns:
        if any(id(each) in reached for each in step.invars):
            reached |= {id(each) for each in step.outvars}
    return id(steps.outvars[0]) in reached
