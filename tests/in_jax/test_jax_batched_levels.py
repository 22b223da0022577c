"""Gradients of a vmap over what the backward rule uses: the sum of the single gradients, no more."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from jax_problems import PATHWISE, _float64, _quick_compilation, jax  # noqa: F401
from subprocesses import environment, python

import gapped.jax

jnp = jax.numpy
KEY = jax.random.key(4)
RNG = np.random.default_rng(0)
LOGITS, WEIGHT = RNG.normal(size=(2, 4, 5))
WEIGHTS, TABLE = RNG.normal(size=(3, 4, 5)), RNG.normal(size=(5, 2))
LEVELS = np.array([0.5, 1.0, 2.0])
SCORE = [name for name in gapped.jax.estimators() if name not in PATHWISE]


def _options(option: str, level: Any) -> dict[str, Any]:
    """`option` at this level; a gap of "function" has the level inside of a function."""
    if option == "gap-function":
        return {"gap": lambda p: level * gapped.jax.expected_gap(p)}
    return {option: level}


LEVEL_OPTIONS = [
    *((name, "tau") for name in PATHWISE),
    ("gst", "gap"),
    ("gst", "gap-function"),
    ("decoupled", "tau_forward"),
]
USES = {
    "hard": lambda e, key, x: e.sample(key, x),
    "axis": lambda e, key, x: e.sample(key, x.T, axis=0).T,
    "select": lambda e, key, x: e.choose(key, x).select(TABLE) @ TABLE.T,
    "gate": lambda e, key, x: e.choose(key, x).gate()[:, None] * jnp.ones(5),
    "gates": lambda e, key, x: gapped.jax.gate(key, x, estimator=e),
    "mean": lambda e, key, x: (
        gapped.jax.expectation(key, lambda z: z @ TABLE[:, 0], x, e)[:, None] * jnp.ones(5)
    ),
}


def _check(f: Any, levels: Any, compiled: Any = jax.jit) -> None:
    """`f(logits, weight, level)` summed over levels, with one weight and with one for each."""
    single = compiled(jax.grad(f))
    for weights, axis in ((WEIGHTS, 0), (WEIGHT, None)):

        def summed(x: Any, weights: Any = weights, axis: int | None = axis) -> Any:
            return jax.vmap(f, (None, axis, 0))(x, weights, levels).sum()

        each = weights if axis == 0 else [weights] * 3
        expected = sum(single(LOGITS, w, level) for w, level in zip(each, levels, strict=True))
        np.testing.assert_allclose(compiled(jax.grad(summed))(LOGITS), expected, rtol=0, atol=1e-12)


# Every level, and every use without noise and with some of its own.
CASES = [(*each, "hard") for each in LEVEL_OPTIONS]
CASES += [(name, "tau", use) for name in ("gst", "gumbel-rao") for use in USES if use != "hard"]


@pytest.mark.parametrize(("name", "option", "use"), CASES)
def test_a_batched_level(name: str, option: str, use: str) -> None:
    def f(x: Any, weight: Any, level: Any) -> Any:
        estimator = gapped.jax.estimator(name, **_options(option, level))
        return (USES[use](estimator, KEY, x) * weight).sum()

    _check(f, jnp.asarray(LEVELS))
    if (name, option) == ("gst", "gap"):
        # Operation by operation too, for one of them.
        _check(f, jnp.asarray(LEVELS), compiled=lambda function: function)


@pytest.mark.parametrize("name", PATHWISE)
def test_batched_keys(name: str) -> None:
    """A soft straight-through sample does not depend on the key, but its rule is given it."""
    hard = not gapped.jax.estimators()[name].has_surrogate

    def f(x: Any, weight: Any, key: Any) -> Any:
        return (gapped.jax.estimator(name, hard=hard).sample(key, x) * weight).sum()

    _check(f, jax.random.split(KEY, 3))
    _check(f, jax.random.key_data(jax.random.split(KEY, 3)))


@pytest.mark.parametrize("hard", [True, False])
@pytest.mark.parametrize(("estimator", "option"), [("simple", "tau"), ("gst:gap=1", "tau"), ("gst", "gap")])
def test_a_batched_level_of_a_subset(estimator: str, option: str, hard: bool) -> None:
    def f(x: Any, weight: Any, level: Any) -> Any:
        gap = gapped.jax.GST(gap=level) if option == "gap" else estimator
        tau = level if option == "tau" else 0.7
        return (gapped.jax.subset(KEY, x, 2, tau, hard, estimator=gap) * weight).sum()

    _check(f, jnp.asarray(LEVELS))


@pytest.mark.slow_if(
    lambda name, law, option: (name, law) not in (("gst", "subset"), ("gapmax", "sequential"))
)
@pytest.mark.parametrize(
    ("name", "option", "law"),
    [
        ("straight-through", "tau", "subset"),
        ("gst", "gap", "subset"),
        ("gst", "gap", "sequential"),
        ("gapmax", "tau", "sequential"),
        ("reinmax", "tau", "sequential"),
        ("reinmax", "key", "subset"),
    ],
)
def test_a_batched_level_of_two_categories(name: str, option: str, law: Any) -> None:
    def f(x: Any, weight: Any, level: Any) -> Any:
        key, options = (level, {}) if option == "key" else (KEY, {option: level})
        drawn = gapped.jax.choose(key, x, 2, estimator=gapped.jax.estimator(name, **options), law=law)
        return (drawn.weights() * weight[:, :2] + (drawn.select(TABLE) * weight[:, None, :2]).sum(-1)).sum()

    _check(f, jax.random.split(KEY, 3) if option == "key" else jnp.asarray(LEVELS))


@pytest.mark.slow_if(lambda name: name == "gumbel-rao")
@pytest.mark.parametrize("name", [n for n in PATHWISE if gapped.jax.estimators()[n].has_surrogate])
def test_a_batched_temperature_of_soft_samples(name: str) -> None:
    def f(x: Any, weight: Any, level: Any) -> Any:
        return (gapped.jax.estimator(name, tau=level, hard=False).sample(KEY, x) * weight).sum()

    _check(f, jnp.asarray(LEVELS))


@pytest.mark.parametrize("name", SCORE)
def test_a_batched_constant_of_the_cost(name: str) -> None:
    def f(x: Any, weight: Any, level: Any) -> Any:
        cost = lambda z: (z @ np.arange(5.0) - level) ** 2  # noqa: E731
        return (gapped.jax.expectation(KEY, cost, x, name) * weight[:, 0]).sum()

    _check(f, jnp.asarray(LEVELS))


def test_the_value_keeps_its_bits() -> None:
    """Also where it holds NaN, -0.0 and infinities."""
    from gapped.jax.gradient import attach

    value = jnp.asarray([np.nan, -0.0, np.inf, 0.0, -1.5])
    call = lambda value, level: attach(lambda g, level: g * level, value, value, level)  # noqa: E731
    for result in (call(value, 2.0), jax.jit(call)(value, 2.0)):
        assert result.tobytes() == value.tobytes()
    for row in jax.jit(jax.vmap(call, (None, 0)))(value, LEVELS):
        assert row.tobytes() == value.tobytes()


SHARDED = """
import numpy as np, jax, jax.numpy as jnp
import gapped.jax
from jax.sharding import Mesh, PartitionSpec as P
jax.config.update("jax_enable_x64", True)
mesh = Mesh(np.array(jax.devices()), ("d",))
logits, weight = np.random.default_rng(0).normal(size=(2, 6, 5))
table = np.random.default_rng(1).normal(size=(5, 5))
taus, keys = np.array([0.5, 2.0]), jax.random.split(jax.random.key(1), 2)
cost = lambda t: lambda z: (z * t[0]).sum(-1)
USES = {
    "sample": lambda e, key, x, t: e.sample(key, x),
    "select": lambda e, key, x, t: e.choose(key, x).select(t),
    "gate": lambda e, key, x, t: e.choose(key, x).gate()[:, None] * t[0],
    "gates": lambda e, key, x, t: gapped.jax.gate(key, x, estimator=e),
    "subset": lambda e, key, x, t: gapped.jax.subset(key, x, 2, e.tau),
    "mean": lambda e, key, x, t: gapped.jax.expectation(key, cost(t), x, e)[:, None] * t[0],
    "score": lambda e, key, x, t: gapped.jax.expectation(key, cost(t), x, "rloo")[:, None] * t[0],
}
count = 0
pathwise = [n for n, kind in gapped.jax.estimators().items() if issubclass(kind, gapped.jax.Pathwise)]
for name in pathwise:
    for use, call in USES.items():
        if name != "gst" and use in ("subset", "score"):
            continue
        for shards in ("key", "tau") if use != "score" else ("key",):
            def loss(x, t, key, tau):
                return (call(gapped.jax.estimator(name, tau=tau), key, x, t) * weight).sum()

            slope = jax.grad(loss, (0, 1))

            def local(x, t, keys, taus):
                key = keys[0] if shards == "key" else keys[1]
                tau = taus[0] if shards == "tau" else taus[1]
                return slope(x, t, key, tau)

            specs = (P(), P(), P("d") if shards == "key" else P(), P("d") if shards == "tau" else P())
            mapped = jax.shard_map(local, mesh=mesh, in_specs=specs, out_specs=(P(), P()), check_vma=True)
            got = jax.jit(mapped)(logits, table, keys, taus)
            pairs = [(keys[i] if shards == "key" else keys[1], taus[i] if shards == "tau" else taus[1])
                     for i in (0, 1)]
            expected = [slope(logits, table, key, tau) for key, tau in pairs]
            for part, single in zip(got, zip(*expected)):
                np.testing.assert_allclose(part, sum(single), rtol=0, atol=1e-12)
            count += 1
print(count)
"""


@pytest.mark.slow
def test_replicated_logits_with_sharded_keys_and_temperatures() -> None:
    """Two devices, types checked: the gradient of what both share is the sum of both."""
    flags = {"XLA_FLAGS": "--xla_force_host_platform_device_count=2"}
    assert python("-W", "error", "-c", SHARDED, env={**environment(), **flags}) == "63\n"
