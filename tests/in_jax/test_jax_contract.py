"""Laws, errors, gates, mixtures and importing of `gapped.jax`, without float64, as JAX is by default."""

from __future__ import annotations

import math
import re
import sys
from dataclasses import fields
from typing import Any

import numpy as np
import pytest
import torch
from conftest import assert_close, normal
from docstring_rules import faults
from jax_problems import PATHWISE, _quick_compilation, jax, make, to_jax, to_torch  # noqa: F401
from statistical import chi_squared, counts_of, require_law, require_rejected
from subprocesses import python

import gapped
import gapped.jax
from gapped.jax import GappedError

jnp = jax.numpy
KEY = jax.random.key(0)
INF, NAN = math.inf, math.nan

# Laws


def counts(estimator: Any, logits: torch.Tensor, rows: int, **how: Any) -> np.ndarray:
    """How often each category is drawn."""
    spread = jnp.broadcast_to(to_jax(logits), (rows, len(logits)))
    index = jax.jit(lambda x: estimator.choose(jax.random.key(7), x, **how).index)(spread)
    return counts_of(to_torch(index).long(), len(logits))


@pytest.mark.parametrize("name", PATHWISE)
def test_hard_samples_follow_the_softmax_at_temperature_one(name: str) -> None:
    """With a category masked; the softmax at the surrogate's temperature is the twin."""
    logits, where = torch.linspace(-1.5, 1.5, 10)[torch.randperm(10)], torch.arange(10) != 3
    options = {"samples": 1} if name == "gumbel-rao" else {}
    drawn = counts(make(name, **options), logits, 50_000, where=to_jax(where))
    masked = logits.double().masked_fill(~where, -INF)
    require_law(chi_squared(drawn, torch.softmax(masked, -1)))
    require_rejected(chi_squared(drawn, torch.softmax(masked / 2, -1)))


def test_long_rows_are_drawn_in_two_steps() -> None:
    """1,000 categories in float32: a block first, then a category inside of it."""
    logits = torch.linspace(-1.5, 1.5, 1_000)[torch.randperm(1_000)]
    drawn = counts(gapped.jax.GST(), logits, 60_000)
    require_law(chi_squared(drawn, torch.softmax(logits.double(), -1)))
    require_rejected(chi_squared(np.roll(drawn, 1), torch.softmax(logits.double(), -1)))


@pytest.mark.parametrize("name", PATHWISE)
@pytest.mark.parametrize("categories", [5, 5000])
def test_gradients_and_tables_behind_a_mask_may_hold_anything(name: str, categories: int) -> None:
    """In a block and in several; what is not finite at a category that exists is not hidden."""
    estimator = make(name, **({"samples": 2} if name == "gumbel-rao" else {}))
    where = jnp.arange(categories) % 3 != 1
    logits, weight = (to_jax(normal(4, categories, seed=n, dtype=torch.float32)) for n in (1, 2))

    @jax.jit
    def gradients(filling: Any, at: Any) -> tuple[Any, Any]:
        filled = jnp.where(at, filling, weight)
        _, back = jax.vjp(lambda x: estimator.sample(KEY, x, where=where), logits)
        _, looked_up = jax.vjp(lambda x: estimator.choose(KEY, x, where=where).select(filled.T), logits)
        return back(filled)[0], looked_up(jnp.ones((4, 4)))[0]

    expected = gradients(0.0, ~where)
    for filling in (NAN, INF):
        for ours, theirs in zip(gradients(filling, ~where), expected, strict=True):
            assert theirs.any()
            np.testing.assert_array_equal(ours, theirs)
        for found in gradients(filling, jnp.arange(categories) == 2):
            assert not jnp.isfinite(found).all(-1).any()


def test_a_learned_temperature_ignores_gradients_behind_a_mask() -> None:
    logits, weight = jnp.asarray([[0.5, -1.0, 0.0]]), jnp.asarray([[1.0, 2.0, 3.0]])
    where = jnp.asarray([True, True, False])
    _, back = jax.vjp(lambda tau: gapped.jax.gumbel_softmax(KEY, logits, tau, where=where), jnp.asarray(0.7))
    assert back(weight)[0] != 0
    assert back(weight.at[0, 2].set(NAN))[0] == back(weight)[0]


def test_a_gate_is_a_bernoulli_sample_with_the_gradient_of_a_pair() -> None:
    logits = jnp.tile(jnp.asarray([0.7, -1.2, -INF, 0.0]), (20_000, 1))
    where = jnp.asarray([True, True, True, False])
    gates, back = jax.vjp(lambda x: gapped.jax.gate(KEY, x, 0.5, True, estimator="gst", where=where), logits)
    (slope,) = back(jnp.ones_like(gates))
    ones = to_torch(gates)
    assert ((ones == 0) | (ones == 1)).all()
    for column, p in enumerate(torch.sigmoid(torch.tensor([0.7, -1.2]))):
        law = torch.stack([1 - p, p])
        require_law(chi_squared(counts_of(ones[:, column].long(), 2), law))
        require_rejected(chi_squared(counts_of(ones[:, column].long(), 2), law.flip(0)))
    assert (ones[:, 2:] == 0).all()
    assert (to_torch(slope)[:, 2:] == 0).all()
    # The pair (0.7, 0) has the gap 1 whichever entry was drawn: (0, -1) or (-1, 0), at temperature 1/2.
    h = torch.sigmoid(torch.tensor([2.0, -2.0]))
    expected = torch.where(ones[:, 0] == 1, h[0] * (1 - h[0]) / 0.5, h[1] * (1 - h[1]) / 0.5)
    assert_close(to_torch(slope)[:, 0], expected, 1e-6)


# Costs far from zero


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


# Errors, as shapes and dtypes tell


LOGITS = np.zeros((4, 3), np.float32)
BAD: list[tuple[str, Any]] = [
    ("key: got a float32 array", lambda: gapped.jax.gst(LOGITS, KEY)),
    ("key: got an object of type int", lambda: gapped.jax.gst(0, LOGITS)),
    ("logits: got a int32 array", lambda: gapped.jax.gst(KEY, LOGITS.astype(np.int32))),
    ("logits: got an object of type list", lambda: gapped.jax.gst(KEY, [0.0, 1.0])),
    ("logits: got a float32 array of shape ()", lambda: gapped.jax.gst(KEY, np.zeros((), np.float32))),
    ("logits: got a float32 array of shape (4, 0)", lambda: gapped.jax.gst(KEY, LOGITS[:, :0])),
    ("axis: got 2", lambda: gapped.jax.gst(KEY, LOGITS, axis=2)),
    ("where: got a float32 array", lambda: gapped.jax.gst(KEY, LOGITS, where=LOGITS)),
    ("where: got a bool array of shape (4,)", lambda: gapped.jax.gst(KEY, LOGITS, where=LOGITS[:, 0] == 0)),
    ("where: got a bool array", lambda: gapped.jax.gst(KEY, LOGITS, axis=0, where=LOGITS[0] == 0)),
    ("tau: got a float32 array of shape (3,)", lambda: gapped.jax.gst(KEY, LOGITS, LOGITS[0])),
    ("tau: got a bool array", lambda: gapped.jax.gst(KEY, LOGITS, LOGITS[:, 0] == 0)),
    *((f"tau: got {tau!r}", lambda tau=tau: gapped.jax.gst(KEY, LOGITS, tau)) for tau in (0, -1.0, NAN, "x")),
    *((f"gap: got {gap!r}", lambda gap=gap: gapped.jax.gst(KEY, LOGITS, gap=gap)) for gap in (-1, INF, "x")),
    ("gap: got a function whose result", lambda: gapped.jax.gst(KEY, LOGITS, gap=lambda p: p[:2])),
    ("hard: got False", lambda: gapped.jax.reinmax(KEY, LOGITS, 1.0, False)),
    ("hard: got 1", lambda: gapped.jax.gst(KEY, LOGITS, 1.0, 1)),
    ("samples: got 0", lambda: gapped.jax.gumbel_rao(KEY, LOGITS, samples=0)),
    ("tau_forward: got 0", lambda: gapped.jax.decoupled_gumbel_softmax(KEY, LOGITS, tau_forward=0)),
    ("samples: got 1", lambda: gapped.jax.RLOO(1)),
    ("alpha: got 'x', expected a finite number", lambda: gapped.jax.DoubleCV(alpha="x")),
    ("alpha: got nan, expected a finite number", lambda: gapped.jax.DoubleCV(2, NAN)),
    ("alpha: got -inf, expected a finite number", lambda: gapped.jax.DoubleCV(2, -INF)),
    ("alpha: got 1e+39, expected a finite number", lambda: gapped.jax.DoubleCV(2, 1e39)),
    ("tau: got 10000", lambda: gapped.jax.GST(10**400)),
    ("alpha: got 10000", lambda: gapped.jax.DoubleCV(2, 10**400)),
    ("alpha: got True, expected a finite number", lambda: gapped.jax.DoubleCV(2, True)),
    ("estimator: got 'gts'; did you mean gst? Expected one of", lambda: gapped.jax.estimator("gts")),
    ("gst: unknown option 'gab'", lambda: gapped.jax.estimator("gst:gab=1")),
    ("tau: got 0.5, but the estimator", lambda: gapped.jax.choose(KEY, LOGITS, 0.5, estimator="gst:tau=0.7")),
    ("estimator: got RLOO", lambda: gapped.jax.gate(KEY, LOGITS, estimator=gapped.jax.RLOO())),
    ("table: got a float32 array", lambda: gapped.jax.choose(KEY, LOGITS).select(LOGITS)),
    ("amount: got 2", lambda: gapped.jax.unimix(LOGITS, 2)),
    ("f: got costs of shape (2,)", lambda: gapped.jax.expectation(KEY, lambda z: z[0, :2, 0], LOGITS, "gst")),
    ("f: got costs of shape ()", lambda: gapped.jax.expectation(KEY, jnp.sum, LOGITS, "rloo")),
    ("f: got an object of type int", lambda: gapped.jax.expectation(KEY, 3, LOGITS, "rloo")),
    (
        "Exact: got 12 variables of 3 categories",
        lambda: gapped.jax.expectation(KEY, lambda z: z.sum((-1, -2)), jnp.zeros((12, 3)), "exact"),
    ),
    ("RLOO.sample: a score-function estimator", lambda: gapped.jax.RLOO().sample(KEY, LOGITS)),
]


@pytest.mark.parametrize(("message", "call"), BAD, ids=[message for message, _ in BAD])
def test_bad_input_is_one_line(message: str, call: Any) -> None:
    with pytest.raises(GappedError, match=re.escape(message)) as caught:
        jax.eval_shape(call) if "array" in message else call()
    assert "\n" not in str(caught.value)


# Mixtures with the uniform distribution


def test_unimix_is_the_mixture_and_has_its_gradient() -> None:
    logits = normal(3, 4, dtype=torch.float32) * 30
    where = torch.tensor([[True, True, False, True]] * 2 + [[False] * 4])
    ours = gapped.jax.unimix(to_jax(logits), 0.1, where=to_jax(where))
    p = torch.softmax(logits.double().masked_fill(~where, -INF)[:2], -1)
    assert_close(to_torch(ours)[:2].exp().double(), torch.where(where[:2], 0.9 * p + 0.1 / 3, 0.0), 1e-6)
    assert (to_torch(ours)[2] == -INF).all()
    free = logits[:2].double().requires_grad_()
    mixture = 0.9 * torch.softmax(free.masked_fill(~where[:2], -INF), -1) + 0.1 / 3
    mixture.log()[where[:2]].sum().backward()

    def total(x: Any) -> Any:
        mixed = gapped.jax.unimix(x, 0.1, where=to_jax(where[:2]))
        return jnp.where(to_jax(where[:2]), mixed, 0.0).sum()

    assert_close(to_torch(jax.grad(total)(to_jax(logits[:2]))), free.grad, 1e-5)
    across = gapped.jax.unimix(to_jax(logits.T), 0.1, axis=0, where=to_jax(where.T))
    np.testing.assert_array_equal(across, ours.T)


# Names, text, importing


def test_the_surface() -> None:
    """The estimators have torch's names, options and defaults."""
    assert len(PATHWISE) == 6
    for name in PATHWISE:
        theirs, ours = gapped.estimators()[name], gapped.jax.estimators()[name]
        assert ours.__name__ == theirs.__name__
        options = {field.name: field.default for field in fields(theirs)}
        own = {field.name: field.default for field in fields(ours)}
        assert own.items() <= options.items()
    assert gapped.jax.estimator("gst:gap=expected").gap is gapped.jax.expected_gap
    assert hash(gapped.jax.GST(0.5)) == hash(gapped.jax.estimator("gst", tau=0.5))


@pytest.mark.parametrize("name", gapped.jax.__all__)
def test_help_stands_alone(name: str) -> None:
    assert faults(getattr(gapped.jax, name)) == []


def test_importing_brings_jax_and_not_torch() -> None:
    program = (
        "import sys, gapped.jax, jax\n"
        "gapped.jax.gst(jax.random.key(0), jax.numpy.zeros((2, 3)))\n"
        "print({'torch', 'triton', 'jax_triton'} & set(sys.modules), gapped.jax.__name__, jax.__name__)"
    )
    assert python("-W", "error", "-c", program) == "set() gapped.jax jax\n"


@pytest.mark.parametrize(
    ("module", "hidden", "extra"),
    [("jax", "jax", "jax"), ("jax.numpyro", "numpyro", "numpyro"), ("jax.distrax", "distrax", "distrax")],
)
def test_without_its_package_it_says_what_to_install(module: str, hidden: str, extra: str) -> None:
    program = (
        f"import sys; sys.modules['{hidden}'] = None\n"
        f"try:\n    import gapped.{module}\n"
        "except ImportError as problem:\n    print(problem)"
    )
    line = f'gapped.{module} needs {hidden}: pip install "gapped[{extra}]"\n'
    assert python("-c", program) == line
    assert "torch" in sys.modules  # of this process, which the others do not share
