"""Expectations in JAX without float64, as it is by default: costs far from zero, and flat ones."""

from __future__ import annotations

from typing import Any

import pytest
from conftest import assert_close, normal
from jax_problems import PATHWISE, _quick_compilation, jax, to_jax, to_torch  # noqa: F401

import gapped.jax
from gapped.jax import GappedError

jnp = jax.numpy
KEY = jax.random.key(0)


@pytest.mark.parametrize("samples", [3, 7])
@pytest.mark.parametrize("kind", [gapped.jax.RLOO, gapped.jax.DoubleCV])
def test_a_constant_cost_has_no_gradient(kind: Any, samples: int) -> None:
    def value(logits: Any) -> Any:
        cost = lambda z: 0 * z.sum((-1, -2)) + 1234567.1  # noqa: E731
        return gapped.jax.expectation(KEY, cost, logits, kind(samples)).sum()

    assert (jax.grad(value)(jnp.zeros((50, 2, 3))) == 0).all()


@pytest.mark.parametrize("level", [0.0, 1e5, 1e6])
def test_a_level_of_the_cost_takes_no_digits_from_the_slopes(level: float) -> None:
    """All costs are float32 numbers, and a linear one has no variance with the factor 1."""
    theta, slope = normal(5, 4), (16 * normal(5, 4, seed=1)).round() / 16
    p = theta.softmax(-1)
    exact = p * (slope - (p * slope).sum(-1, keepdim=True))
    weights = to_jax(slope.float())

    def value(logits: Any) -> Any:
        cost = lambda z: (z * weights).sum((-1, -2)) + level  # noqa: E731
        return gapped.jax.expectation(KEY, cost, logits, gapped.jax.DoubleCV(3, 1)).sum()

    gradient = to_torch(jax.grad(value)(to_jax(theta.float().expand(20, 5, 4))))
    assert_close(gradient.double(), exact.expand(20, 5, 4), 1e-5)


def flat_costs(weight: Any) -> dict[str, Any]:
    """Costs with a parameter, without a slope in the sample."""
    stop = jax.lax.stop_gradient
    return {
        "ignores the sample": lambda z: weight * jnp.ones(z.shape[:-1]),
        "stops its gradient": lambda z: weight * (stop(z) ** 2).sum(-1),
        "compares": lambda z: (weight * (z > 0.5)).sum(-1),
        "compiled": jax.jit(lambda z: weight * z.argmax(-1).astype(z.dtype)),
        "in a loop": lambda z: jax.lax.scan(
            lambda sum, n: (sum + weight * stop(z)[..., n], None), stop(z)[..., 0], jnp.arange(3)
        )[0],
    }


def slopes(costs: Any, case: str, way: str, estimator: str) -> tuple[Any, Any]:
    """The gradients of the logits and of the parameter of a cost."""

    def loss(logits: Any, weight: Any) -> Any:
        return gapped.jax.expectation(KEY, costs(weight)[case], logits, estimator).sum()

    gradients: dict[str, Any] = {
        "grad": jax.grad(loss, (0, 1)),
        "jit of grad": jax.jit(jax.grad(loss, (0, 1))),
        "grad of jit": jax.grad(jax.jit(loss), (0, 1)),
        "grad of vmap": jax.grad(lambda x, w: jax.vmap(loss, (0, None))(x[None], w).sum(), (0, 1)),
    }
    return gradients[way](jnp.zeros((4, 3)), jnp.asarray(2.0))  # type: ignore[no-any-return]


WAYS = ["grad", "jit of grad", "grad of jit", "grad of vmap"]


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("case", list(flat_costs(1.0)))
def test_a_pathwise_estimator_says_where_a_cost_is_flat(case: str, way: str) -> None:
    with pytest.raises(GappedError, match=r"f: got costs without a derivative.*gapped\.jax\.RLOO"):
        slopes(flat_costs, case, way, "gst")


@pytest.mark.parametrize("name", PATHWISE)
def test_each_pathwise_estimator_says_where_a_cost_is_flat(name: str) -> None:
    with pytest.raises(GappedError, match="f: got costs without a derivative"):
        slopes(flat_costs, "stops its gradient", "grad", name)


@pytest.mark.parametrize("case", list(flat_costs(1.0)))
def test_a_flat_cost_has_a_value_a_parameter_and_gradients_from_scores(case: str) -> None:
    def value(weight: Any, estimator: str = "gst") -> Any:
        return gapped.jax.expectation(KEY, flat_costs(weight)[case], jnp.zeros((4, 3)), estimator).sum()

    assert jnp.isfinite(jax.value_and_grad(value)(2.0)[1])
    for slope in slopes(flat_costs, case, "grad", "rloo"):
        assert jnp.isfinite(slope).all()


@pytest.mark.slow_if(lambda way: way == "grad of vmap")
@pytest.mark.parametrize("way", WAYS)
def test_a_cost_that_uses_its_sample_is_differentiated(way: str) -> None:
    """Also where a part of it is stopped, or draws by an estimator again."""

    def costs(weight: Any) -> dict[str, Any]:
        return {
            "partly": lambda z: (jax.lax.stop_gradient(z) * weight + z**2 * jnp.arange(3)).sum(-1),
            "again": lambda z: weight * gapped.jax.gst(KEY, z, hard=True)[..., 0],
        }

    for case in costs(1.0):
        assert slopes(costs, case, way, "gst")[0].any()
