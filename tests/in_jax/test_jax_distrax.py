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


@pytest.mark.parametrize("use", ["sample", "entropy", "log_prob", "kl_divergence"])
def test_the_gradient_of_a_probability_of_zero_is_zero(use: str) -> None:
    """The logarithm of 0 has an infinite slope. The gradients of the others are those without the zero."""

    def result(p: Any) -> Any:
        q = OneHotCategorical(probs=p)
        corner = jnp.eye(p.size)[0]
        if use == "sample":
            return q.sample(seed=KEY, sample_shape=50)[:, 0].sum()
        uniform = distrax.OneHotCategorical(logits=jnp.zeros(p.size))
        return {"entropy": q.entropy, "log_prob": lambda: q.log_prob(corner),
                "kl_divergence": lambda: q.kl_divergence(uniform)}[use]()  # fmt: skip

    p = jnp.array([0.25, 0.75, 0.0])
    slope = jax.grad(result)(p)
    assert slope[2] == 0
    assert jnp.abs(slope[:2]).min() > 0.1
    if use != "sample":
        np.testing.assert_allclose(slope[:2], jax.grad(result)(p[:2]), rtol=1e-5)


@pytest.mark.parametrize("parameter", ["logits", "probs"])
def test_the_gradient_is_that_of_distraxs_wrapper(parameter: str) -> None:
    """A linear cost has the same straight-through gradient at every draw, so the draws need not agree."""
    values = jax.nn.softmax(LOGITS) if parameter == "probs" else LOGITS
    weights = jnp.arange(values.size, dtype=jnp.float32).reshape(values.shape) ** 2

    def slope(law: Any, **options: Any) -> Any:
        def cost(x: Any) -> Any:
            return (weights * law(**{parameter: x}, **options).sample(seed=KEY, sample_shape=5)).sum()

        return jax.grad(cost)(values)

    theirs = slope(distrax.straight_through_wrapper(distrax.OneHotCategorical))
    ours = slope(OneHotCategorical, estimator="straight-through")
    np.testing.assert_allclose(ours, theirs, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("dtype", [np.int32, np.float32])
def test_a_row_without_a_law_is_marked(dtype: Any) -> None:
    """By -1 where samples are integers, as distrax has it, and by NaN where they are not."""
    p = np.array([[0.1, -0.4, 0.3], [0.1, 0.6, 0.3]], np.float32)
    sample = OneHotCategorical(probs=p, dtype=dtype).sample(seed=KEY, sample_shape=5)
    assert (sample[:, 1].sum(-1) == 1).all()
    if dtype is np.int32:
        theirs = distrax.OneHotCategorical(probs=p).sample(seed=KEY, sample_shape=5)
        np.testing.assert_array_equal(sample[:, 0], theirs[:, 0])
    else:
        assert jnp.isnan(sample[:, 0]).all()


def test_half_precision_has_the_law_of_float32() -> None:
    logits = jnp.asarray(np.random.default_rng(0).normal(size=1000), jnp.bfloat16)
    q = OneHotCategorical(logits)
    np.testing.assert_allclose(q.probs, jax.nn.softmax(logits.astype(jnp.float32)), rtol=1e-5)
    assert q.sample(seed=KEY).dtype == jnp.bfloat16
