"""JAX's transformations of the estimators: each gives what the plain call gives; two are refused."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import pytest
from jax_problems import _quick_compilation, jax, make  # noqa: F401
from subprocesses import python

import gapped.jax

jnp = jax.numpy
LOGITS = np.random.default_rng(0).normal(size=(8, 5)).astype(np.float32)
WEIGHT = np.random.default_rng(1).normal(size=(8, 5)).astype(np.float32)
# One of each kind: the backward pass of Gumbel-Rao draws again.
FEW = ["gapmax", "gumbel-rao-1"]
few_names = pytest.mark.parametrize("name", FEW)


def slopes(estimator: Any, key: Any, logits: Any) -> tuple[Any, Any]:
    """Sample and gradient."""
    sample, back = jax.vjp(lambda x: estimator.sample(key, x), logits)
    return sample, back(WEIGHT[: len(logits)])[0]


def assert_same(actual: Any, expected: Any) -> None:
    for ours, theirs in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-5, atol=1e-6)


def test_jit_is_the_plain_call_and_compiles_once() -> None:
    """Temperatures may be traced. All other tests compile."""
    key = jax.random.key(0)
    compiled = jax.jit(lambda tau, x: slopes(gapped.jax.GST(tau), key, x))
    for tau in (2.0, 0.5):
        sample, gradient = compiled(tau, LOGITS)
        assert ((sample == 0) | (sample == 1)).all()
        assert (sample.sum(-1) == 1).all()
        assert_same((sample, gradient), slopes(gapped.jax.GST(tau), key, LOGITS))
    assert compiled._cache_size() == 1


@few_names
def test_vmap_scan_and_checkpoint_inside_of_jit(name: str) -> None:
    """Rows one by one, each with its key: by vmap, by scan, with activations computed again."""
    estimator, keys = make(name), jax.random.split(jax.random.key(1), 8)

    def row(key: Any, x: Any, w: Any) -> tuple[Any, Any]:
        sample, back = jax.vjp(partial(estimator.sample, key), x)
        return sample, back(w)[0]

    @jax.jit
    def every_way(keys: Any, x: Any, w: Any) -> dict[str, Any]:
        def total(x: Any, sampler: Any) -> tuple[Any, Any]:
            _, samples = jax.lax.scan(lambda carry, kx: (carry, sampler(*kx)), 0, (keys, x))
            return (samples * w).sum(), samples

        ways = {"scan": estimator.sample, "checkpoint": jax.checkpoint(estimator.sample)}
        results = {way: jax.grad(total, has_aux=True)(x, sampler)[::-1] for way, sampler in ways.items()}
        return {**results, "vmap": jax.vmap(row)(keys, x, w)}

    results = every_way(keys, LOGITS, WEIGHT)
    single = jax.jit(row)
    expected = [single(key, x, w) for key, x, w in zip(keys, LOGITS, WEIGHT, strict=True)]
    expected = tuple(np.stack(each) for each in zip(*expected, strict=True))
    for way in results.values():
        assert_same(way, expected)


SHARDED = """
import sys, numpy as np, jax
jax.config.update("jax_num_cpu_devices", 2)
import gapped.jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec
mesh, spec = Mesh(np.array(jax.devices()), ("rows",)), PartitionSpec("rows")
logits, weight = np.random.default_rng(0).normal(size=(2, 8, 5))

def slope(key, logits, weight):
    loss = lambda x: (gapped.jax.gst(key, x, 0.5, True) * weight).sum()
    return jax.grad(loss)(logits)

def own(logits, weight):
    return slope(jax.random.fold_in(jax.random.key(0), jax.lax.axis_index("rows")), logits, weight)

mapped = jax.jit(jax.shard_map(own, mesh=mesh, in_specs=(spec, spec), out_specs=spec))(logits, weight)
keys = [jax.random.fold_in(jax.random.key(0), i) for i in (0, 1)]
parts = [slope(key, x, w) for key, x, w in zip(keys, np.split(logits, 2), np.split(weight, 2))]
np.testing.assert_allclose(mapped, np.concatenate(parts), rtol=1e-5, atol=1e-6)
sharded = jax.device_put((logits, weight), NamedSharding(mesh, spec))
whole = jax.jit(slope)(jax.random.key(0), *sharded)
np.testing.assert_allclose(whole, slope(jax.random.key(0), logits, weight), rtol=1e-5, atol=1e-6)
print(len(whole.sharding.device_set), "torch" in sys.modules)
"""


@pytest.mark.slow
def test_shard_map_and_sharded_rows() -> None:
    """Two devices: each draws for its own rows with a key of its own, or the compiler divides the rows."""
    assert python("-W", "error", "-c", SHARDED) == "2 False\n"


@few_names
@pytest.mark.parametrize(
    "cost", [jnp.sum, lambda z: (z @ jnp.arange(5.0) ** 2).sum()], ids=["linear", "curved"]
)
def test_a_second_derivative_is_refused(name: str, cost: Any) -> None:
    """Also where it would be zero for lack of a path, as with a linear cost."""
    slope = jax.grad(lambda x: cost(make(name).sample(jax.random.key(0), x)))
    for again in (jax.grad(lambda x: (slope(x) ** 2).sum()), jax.jacfwd(slope), jax.jit(jax.jacrev(slope))):
        with pytest.raises(
            RuntimeError, match="gapped: an estimated gradient cannot be differentiated twice"
        ):
            again(LOGITS)


def test_what_does_not_depend_on_the_logits_may_be_differentiated_twice() -> None:
    def cost(scale: Any) -> Any:
        def inner(x: Any) -> Any:
            return (gapped.jax.gst(jax.random.key(0), x, hard=True) * WEIGHT).sum()

        return scale**3 * (jax.grad(inner)(LOGITS) ** 2).sum()

    assert np.isfinite(jax.jit(jax.grad(jax.grad(cost)))(1.0))


def test_forward_mode_is_refused() -> None:
    with pytest.raises(TypeError, match="forward-mode"):
        jax.eval_shape(jax.jacfwd(lambda x: gapped.jax.gst(jax.random.key(0), x)), LOGITS)


@pytest.mark.parametrize(
    ("level", "use"),
    [
        ("tau", lambda level: gapped.jax.gst(jax.random.key(0), LOGITS, level)),
        ("gap", lambda level: gapped.jax.gst(jax.random.key(0), LOGITS, gap=level)),
        ("gap", lambda level: gapped.jax.gst(jax.random.key(0), LOGITS, gap=lambda p: level * p)),
    ],
)
def test_a_level_that_has_no_gradient_is_not_learned_in_silence(level: str, use: Any) -> None:
    with pytest.raises(gapped.jax.GappedError, match=f"{level}: got an array that is differentiated"):
        jax.eval_shape(jax.grad(lambda x: use(x)[0, 0]), 1.0)


def test_half_precision_is_float32_rounded_once() -> None:
    sample = jax.jit(partial(gapped.jax.gst, jax.random.key(0)))
    for dtype in (jnp.bfloat16, jnp.float16):
        half = jnp.asarray(LOGITS, dtype)
        assert sample(half).dtype == dtype
        assert (sample(half) == sample(half.astype(jnp.float32)).astype(dtype)).all()
