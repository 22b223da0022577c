"""The distribution for numpyro: numbers, gradients through a sample site, and inference."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from jax_problems import _quick_compilation, jax  # noqa: F401

import gapped.jax

numpyro = pytest.importorskip("numpyro", reason="needs numpyro, which the extra numpyro brings")
from gapped.jax.numpyro import OneHotCategorical  # noqa: E402

jnp = jax.numpy
LOGITS = np.array([[0.3, -1.0, 0.7], [2.0, 0.1, -0.5]], np.float32)
WHERE = np.array([[True, True, False], [True, True, True]])


def test_moments_are_those_of_the_law() -> None:
    q = OneHotCategorical(LOGITS, where=WHERE)
    p = np.exp(LOGITS) * WHERE
    p = p / p.sum(-1, keepdims=True)
    log_p = np.log(np.where(p > 0, p, 1.0))
    np.testing.assert_allclose(q.probs, p, rtol=1e-5)
    np.testing.assert_allclose(q.variance, p * (1 - p), rtol=1e-5)
    np.testing.assert_allclose(q.entropy(), -(p * log_p).sum(-1), rtol=1e-5)
    np.testing.assert_array_equal(q.mode, np.eye(3)[[0, 0]])
    np.testing.assert_allclose(q.log_prob(np.eye(3)[[1, 2]]), [log_p[0, 1], log_p[1, 2]], rtol=1e-5)
    uniform = OneHotCategorical(jnp.zeros((2, 3)))
    expected = (p * (log_p + np.log(3))).sum(-1)
    np.testing.assert_allclose(numpyro.distributions.kl_divergence(q, uniform), expected, rtol=1e-5)
    slope = jax.grad(
        lambda x: numpyro.distributions.kl_divergence(OneHotCategorical(x, where=WHERE), uniform).sum()
    )
    assert np.isfinite(slope(LOGITS)).all()


def test_samples_are_the_estimators() -> None:
    q = OneHotCategorical(LOGITS, estimator="gst:tau=0.5", where=WHERE)
    assert q.has_rsample
    key = jax.random.key(1)
    z = q.rsample(key, (4,))
    assert z.shape == (4, 2, 3)
    assert (z.sum(-1) == 1).all()
    assert (z[:, 0, 2] == 0).all()
    weight = jnp.arange(3.0)

    def cost(x: Any) -> Any:
        return (OneHotCategorical(x, estimator="gst:tau=0.5").sample(key) @ weight).sum()

    expected = jax.grad(lambda x: (gapped.jax.gst(key, x, 0.5, True) @ weight).sum())(LOGITS)
    np.testing.assert_allclose(jax.grad(cost)(LOGITS), expected, atol=1e-6)
    assert q.expand((5, 2)).sample(key).shape == (5, 2, 3)
    assert q.to_event(1).event_shape == (2, 3)
    assert jax.jit(lambda d: d.sample(key))(q).shape == (2, 3)


def test_inference_finds_the_posterior_of_a_linear_likelihood() -> None:
    """The evidence lower bound is highest at the posterior, which is proportional to exp(score)."""
    score = jnp.asarray([0.0, 1.0, 2.0])

    def model() -> None:
        z = numpyro.sample("z", OneHotCategorical(jnp.zeros(3)))
        numpyro.factor("likelihood", z @ score)

    def guide() -> None:
        logits = numpyro.param("logits", jnp.zeros(3))
        numpyro.sample("z", OneHotCategorical(logits, estimator="straight-through"))

    elbo = numpyro.infer.TraceMeanField_ELBO(num_particles=8)
    svi = numpyro.infer.SVI(model, guide, numpyro.optim.Adam(0.05), elbo)
    result = svi.run(jax.random.key(0), 300, progress_bar=False)
    posterior = jax.nn.softmax(result.params["logits"])
    np.testing.assert_allclose(posterior, jax.nn.softmax(score), atol=0.05)


def test_no_category_is_the_mode_where_there_is_none() -> None:
    mode = OneHotCategorical(jnp.asarray([[jnp.nan, 0.0], [-jnp.inf, -jnp.inf], [0.0, 1.0]])).mode
    np.testing.assert_array_equal(mode, [[jnp.nan, jnp.nan], [0.0, 0.0], [0.0, 1.0]])


def test_values_outside_of_the_support_are_refused_as_numpyro_does() -> None:
    ours = OneHotCategorical(jnp.zeros(3), validate_args=True)
    theirs = numpyro.distributions.Multinomial(1, logits=jnp.zeros(3), validate_args=True)
    for q in (ours, theirs):
        with pytest.warns(UserWarning, match="Out-of-support"):
            assert q.log_prob(jnp.array([2.0, 0.0, 0.0])) == -jnp.inf
        assert np.isfinite(q.log_prob(jnp.array([1.0, 0.0, 0.0])))


def test_half_precision_has_the_law_of_float32() -> None:
    logits = jnp.asarray(np.random.default_rng(0).normal(size=1000), jnp.bfloat16)
    q = OneHotCategorical(logits)
    np.testing.assert_allclose(q.probs, jax.nn.softmax(logits.astype(jnp.float32)), rtol=1e-5)
    sample = jax.jit(lambda q: q.sample(jax.random.key(0)))(q)
    assert sample.dtype == q.mode.dtype == jnp.bfloat16
    assert sample.sum() == 1
