"""Shared by the tests of `gapped.jax`: estimators of both libraries, and noise that both are given."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields
from typing import Any

import numpy as np
import pytest
import torch
from conftest import seeded
from torch import Tensor
from variants import VARIANTS
from variants import make as make_torch

import gapped
from gapped import simplex

jax = pytest.importorskip("jax", reason="needs jax, which the extra jax brings")
import gapped.jax  # noqa: E402


def options_in_jax(estimator: Any) -> dict[str, Any] | None:
    """The options of an estimator of torch's, if JAX has it with these options."""
    kind = gapped.jax.estimators().get(estimator.name)
    options = {field.name: getattr(estimator, field.name) for field in fields(estimator)}
    known = set() if kind is None else {field.name for field in fields(kind)}
    others = [field for field in fields(estimator) if field.name not in known]
    if kind is None or any(options[field.name] != field.default for field in others):
        return None
    return {name: value for name, value in options.items() if name in known}


# Every registered estimator of torch's that JAX has, and those variants that it has.
PATHWISE = [name for name in gapped.estimators("pathwise") if name in gapped.jax.estimators()]
EVERY = [*PATHWISE, *(name for name in VARIANTS if options_in_jax(make_torch(name)) is not None)]
SOFT = [name for name in EVERY if make_torch(name).has_surrogate]
KEY = jax.random.key(3)
DTYPES = {torch.float64: 1e-12, torch.float32: 2e-5, torch.bfloat16: 2e-2}


def _switched(option: str) -> Iterator[None]:
    jax.config.update(option, True)
    yield
    jax.config.update(option, False)


@pytest.fixture(autouse=True)
def _float64() -> Iterator[None]:
    """JAX has float64 in a test, and not after it."""
    yield from _switched("jax_enable_x64")


@pytest.fixture(autouse=True)
def _quick_compilation() -> Iterator[None]:
    """Small programs that run once take far longer to optimise than to run."""
    yield from _switched("jax_disable_most_optimizations")


def to_jax(tensor: Tensor) -> Any:
    """The same numbers as an array of JAX, in the same dtype."""
    if tensor.dtype == torch.bfloat16:
        return jax.numpy.asarray(tensor.float().cpu().numpy()).astype("bfloat16")
    return jax.numpy.asarray(tensor.detach().cpu().numpy())


def to_torch(array: Any) -> Tensor:
    """The same numbers as a tensor, half precision widened."""
    wide = array.astype("float32") if array.dtype == "bfloat16" else array
    return torch.from_numpy(np.array(wide))


def translated(estimator: Any) -> Any:
    """The estimator of `gapped.jax` that has the name and the options of one of torch's."""
    options = options_in_jax(estimator)
    assert options is not None
    if options.get("gap") is gapped.expected_gap:
        options["gap"] = gapped.jax.expected_gap
    values = {name: to_jax(v) if isinstance(v, Tensor) else v for name, v in options.items()}
    return gapped.jax.estimator(estimator.name, **values)


def make(name: str, **options: Any) -> Any:
    """A member or a variant in JAX, at another temperature than 1."""
    return translated(make_torch(name, **options))


def replayed(estimator: Any, **methods: Any) -> Any:
    """A copy of an estimator of JAX, some of whose methods return what is given here."""
    results = {name: lambda self, *_, result=result: result for name, result in methods.items()}
    kind = type("Replayed", (type(estimator),), results)
    return kind(**{field.name: getattr(estimator, field.name) for field in fields(estimator)})


def noise_of(estimator: Any, rows: Tensor, seed: int = 0) -> Any:
    """The noise of torch's estimator for these rows with that seed, in the form that JAX's takes."""
    logits, generator = simplex.computed(rows), seeded(seed)
    if estimator.name in ("gumbel-softmax", "decoupled"):
        return to_jax(simplex.log_exponential(logits, generator))
    u = to_jax(torch.rand(rows.shape[:-1], generator=generator, dtype=torch.float64))[None]
    if estimator.name != "gumbel-rao":
        return u
    own = seeded(int(torch.randint(2**63 - 1, (), generator=generator)))
    return u, to_jax(simplex.log_exponential(logits.expand(estimator.samples, *logits.shape), own))


def pull(draw: Any, logits: Any, weight: Any) -> tuple[Any, Any]:
    """A sample, and the gradient that reaches the logits when `weight` is the gradient at the sample."""

    @jax.jit  # as a whole: one by one, its operations take longer to compile
    def both(logits: Any, weight: Any) -> tuple[Any, Any]:
        sample, back = jax.vjp(draw, logits)
        return sample, back(weight)[0]

    return both(logits, weight)  # type: ignore[no-any-return]


def launched(estimator: Any, logits: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    """The results of torch's launches for the same key."""
    words = np.array(jax.random.bits(KEY, (2,), "uint32"))
    key, description = torch.from_numpy(words.view(np.int64)).to(logits.device), estimator.fused()
    # Not at the top: another file decides whether this process interprets kernels.
    from gapped.kernels.sampling import launch

    sample = launch.forward(logits, key, description)
    return sample.value, launch.backward(logits, sample.indices, sample.stats, key, weight, description)
