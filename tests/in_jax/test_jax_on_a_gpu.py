"""On a GPU the kernels give in JAX programs what they give in torch, for the same key."""

from __future__ import annotations

import os
from dataclasses import replace
from functools import partial
from importlib.util import find_spec

# Before jax is used: it would take most of the memory, which torch needs here too.
os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")

import pytest
import torch
from jax_problems import KEY, jax, launched, pull, to_jax, to_torch, translated
from kernel_cases import ESTIMATORS, LONG, TOLERANCE, example, incoming


def _lacking() -> str | None:
    if not torch.cuda.is_available() or jax.default_backend() != "gpu":
        return "needs a GPU that both torch and jax see"
    return None if find_spec("jax_triton") else "needs jax-triton"


pytestmark = [pytest.mark.gpu, pytest.mark.skipif(_lacking() is not None, reason=str(_lacking()))]
CASES = [(name, True) for name in LONG] + [(name, False) for name in LONG if ESTIMATORS[name].has_surrogate]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("categories", [7, 64, 5000])
@pytest.mark.parametrize(("name", "hard"), CASES)
def test_samples_and_gradients_are_torchs(name: str, hard: bool, categories: int, dtype: torch.dtype) -> None:
    estimator = replace(ESTIMATORS[name], hard=hard)
    logits, weight = example(300, categories).to(dtype), incoming(300, categories).to(dtype)
    ours = replace(translated(estimator), backend="triton")
    results = pull(partial(ours.sample, KEY), to_jax(logits), to_jax(weight))
    value, gradient = (to_torch(array) for array in results)
    expected = [each.to(value.dtype).cpu() for each in launched(estimator, logits, weight)]
    # In JAX all sizes are constants of the compiled kernel, so that it may round otherwise.
    rounding = TOLERANCE if dtype == torch.float32 else {"rtol": 2 * torch.finfo(dtype).eps, "atol": 1e-3}
    if hard:
        assert torch.equal(value, expected[0])
    torch.testing.assert_close(value, expected[0], **rounding, equal_nan=True)
    torch.testing.assert_close(gradient, expected[1], **rounding, equal_nan=True)


@pytest.mark.parametrize("name", ["gst-auto", "straight-through", "reinmax", "gapmax"])
def test_a_mask_and_another_axis(name: str) -> None:
    """Masked categories are never drawn and get no gradient; a row sums to one."""
    estimator = replace(translated(ESTIMATORS[name]), backend="triton")
    logits = to_jax(example(300, 33).T.contiguous())
    where = jax.random.uniform(KEY, logits.shape) < 0.7
    sample, back = jax.vjp(lambda x: estimator.sample(KEY, x, axis=0, where=where), logits)
    gradient = back(to_jax(incoming(33, 300)))[0]
    allowed = (where & (logits > -jax.numpy.inf)).any(0)
    assert bool((sample.sum(0) == allowed).all())
    assert not bool(jax.numpy.where(where, 0, sample).any())
    assert not bool(jax.numpy.where(where, 0, gradient).any())
    assert bool((abs(gradient.sum(0)) < 1e-4 * abs(gradient).max()).all())
