"""The distribution for distrax: distrax's own numbers, and samples that are the estimator's."""

from __future__ import annotations

import warnings
from typing import Any

import numpy as np
import pytest
from jax_problems import _quick_compilation, jax  # noqa: F401

import gapped.jax

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # its dependencies use what JAX has deprecated
    distrax = pytest.importorskip("distrax", reason="needs distrax, which the extra distrax brings")
    from gapped.jax.distrax import OneHotCategorical

jnp = jax.numpy
KEY = jax.random.key(1)
LOGITS = np.array([[0.3, -1.0, 0.7], [2.0, 0.1, -0.5]], np.float32)
WHERE = np.array([[True, True, False], [True, True, True]])
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")


def test_numbers_are_distraxs() -> None:
    """With a category that does not exist: a probability of zero for distrax."""
    ours = OneHotCategorical(LOGITS, where=WHERE)
    p = np.exp(LOGITS) * WHERE
    theirs = distrax.OneHotCategorical(probs=p / p.sum(-1, keepdims=True))
    corners = np.eye(3, dtype=np.float32)[[1, 2]]
    uniform = distrax.OneHotCategorical(logits=jnp.zeros((2, 3)))
    for number in (
        lambda d: d.probs,
        lambda d: d.entropy(),
        lambda d: d.mode(),
        lambda d: d.log_prob(corners),
        lambda d: d.kl_divergence(uniform),
    ):
        np.testing.assert_allclose(number(ours), number(theirs), rtol=1e-5)
    assert (ours.batch_shape, ours.event_shape, ours.dtype) == ((2,), (3,), np.dtype("float32"))


def test_samples_of_distrax_are_the_estimators() -> None:
    q = OneHotCategorical(LOGITS, estimator="gst:tau=0.5", where=WHERE)
    z = q.sample(seed=KEY, sample_shape=(4, 5))
    assert z.shape == (4, 5, 2, 3)
    assert (z.sum(-1) == 1).all()
    assert (z[..., 0, 2] == 0).all()
    weight = jnp.arange(3.0)

    def cost(x: Any) -> Any:
        sample, log_prob = OneHotCategorical(x, estimator="gst:tau=0.5").sample_and_log_prob(seed=KEY)
        assert log_prob.shape == (2,)
        return (sample @ weight).sum()

    expected = jax.grad(lambda x: (gapped.jax.gst(KEY, x[None], 0.5, True) @ weight).sum())(LOGITS)
    np.testing.assert_allclose(jax.grad(cost)(LOGITS), expected, atol=1e-6)
    assert jax.jit(lambda d: d.sample(seed=KEY))(q).shape == (2, 3)
    row = q[1]
    assert isinstance(row, OneHotCategorical)
    np.testing.assert_allclose(row.probs, q.probs[1])


@pytest.mark.parametrize("index", [1, -1, (..., -1), (0, ...), (slice(1), 2), (None, 1), np.array([0, 2])])
def test_indices_select_in_the_batch(index: Any) -> None:
    logits = np.random.default_rng(0).normal(size=(3, 4, 5)).astype(np.float32)
    ours, theirs = OneHotCategorical(logits)[index], distrax.OneHotCategorical(logits)[index]
    assert (ours.batch_shape, ours.event_shape) == (theirs.batch_shape, theirs.event_shape)
    np.testing.assert_allclose(ours.probs, theirs.probs, rtol=1e-6)


def test_arguments_are_distraxs() -> None:
    p = np.array([[0.2, 0.3, 0.5], [0.0, 1.0, 0.0]], np.float32)
    ours, theirs = (kind(probs=p, dtype=np.int32) for kind in (OneHotCategorical, distrax.OneHotCategorical))
    np.testing.assert_allclose(ours.probs, theirs.probs, rtol=1e-6)
    sample = ours.sample(seed=KEY, sample_shape=(7,))
    assert sample.dtype == ours.dtype == theirs.dtype == np.int32
    assert (sample[:, 1] == np.array([0, 1, 0])).all()
    for arguments in ({}, {"logits": LOGITS, "probs": p}):
        with pytest.raises(gapped.errors.GappedError, match="of logits and probs"):
            OneHotCategorical(**arguments)


def test_half_precision_has_the_law_of_float32() -> None:
    logits = jnp.asarray(np.random.default_rng(0).normal(size=1000), jnp.bfloat16)
    q = OneHotCategorical(logits)
    np.testing.assert_allclose(q.probs, jax.nn.softmax(logits.astype(jnp.float32)), rtol=1e-5)
    assert q.sample(seed=KEY).dtype == jnp.bfloat16
