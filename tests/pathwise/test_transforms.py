"""Estimators under compilers, vmap, per-sample gradients and autocast; pickled and copied."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
import torch
from conftest import (
    MEMBERS,
    TAU,
    assert_all_close,
    assert_close,
    assert_one_hot,
    every_member,
    every_soft_member,
    gradient_through,
    gst_surrogate,
    normal,
    pulled,
    reinmax_gradient,
    seeded,
    through_softmax,
)
from torch import Tensor
from variants import SINGLE, K, make_single

import gapped
from gapped import simplex

make = partial(make_single, tau=TAU)


def gst_gradient(theta: Tensor, index: int, g: Tensor, **how: Any) -> Tensor:
    return gradient_through(partial(gst_surrogate, index=index, **how), theta, g)


def row_by_row(formula: Callable[..., Tensor], logits: Tensor, hard: Tensor, weight: Tensor) -> Tensor:
    """The gradients of the categories that were drawn."""
    rows = zip(logits, hard.argmax(-1).tolist(), weight, strict=True)
    return torch.stack([formula(*row) for row in rows])


def compiles(test: Any) -> Any:
    """A test in which torch compiles, or traces, and warns about deprecated calls of its own."""
    for message in (".*should not be instantiated", ".*torch.jit.* is deprecated"):
        test = pytest.mark.filterwarnings(f"ignore:{message}")(test)
    return pytest.mark.usefixtures("dynamo")(test)


@pytest.fixture
def dynamo() -> Iterator[None]:
    """Each test compiles for itself, and leaves nothing."""
    torch.compiler.reset()
    yield
    torch.compiler.reset()


def per_row_gradients(estimator: Any, logits: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    """vmap(grad): the gradient of each row for the gradient `weight` at its sample, and the samples."""

    def cost(row: Tensor, g: Tensor) -> tuple[Tensor, Tensor]:
        sample = estimator.sample(row)
        return (sample * g).sum(), sample.detach()

    transformed = torch.func.vmap(torch.func.grad(cost, has_aux=True), randomness="different")
    gradient, sample = transformed(logits, weight)
    return gradient, sample


def test_a_temperature_is_learned_through_vmap() -> None:
    def sample(row: Tensor, level: Tensor) -> Tensor:
        return gapped.gumbel_softmax(row, level)

    draws = (sample, torch.func.vmap(sample, randomness="different"))
    assert_all_close(*(pulled(draw, normal(20, K), torch.full((20,), TAU).double()) for draw in draws))


def rao_gradient(name: str, logits: Tensor, g: Tensor, tau: Tensor, samples: int) -> Tensor:
    """The closed form for noise out of torch's default generator, which compiled code draws from."""
    index, p = simplex.draw_index(logits), torch.softmax(logits, -1)
    halfway = (p + torch.eye(K, dtype=p.dtype)[index]) / 2
    noisy = simplex.conditional_gumbel((p if name == "gumbel-rao" else halfway).log(), index, samples)
    tau = tau.unsqueeze(-1)
    rao = (through_softmax(torch.softmax(noisy / tau, -1), g.expand_as(noisy)) / tau).mean(0)
    return rao if name == "gumbel-rao" else 2 * rao - through_softmax(p, g) / 2


def eager_and_compiled(program: Callable[[Tensor], Tensor]) -> list[tuple[Tensor, ...]]:
    """Sample and gradient of both, under the same seed."""
    runs = (program, torch.compile(program, backend="aot_eager", fullgraph=True))
    return [pulled(run, normal(20, K)) for run in runs]


@pytest.mark.slow_if(lambda name, masked: not masked)
@compiles
@every_member
@pytest.mark.parametrize("masked", [False, True])
def test_compiles_to_one_graph_forward_and_backward(name: str, masked: bool) -> None:
    """Under the same seed the compiled program gives what the eager one gives.

    Checking the values of a mask or of a temperature per row must not break the graph.
    """
    mask = torch.tensor([True, False, True, True, True]) if masked else None
    taus = torch.linspace(1, 2, 20, dtype=torch.float64) if masked else torch.full((20,), TAU).double()
    options = SINGLE.get(name, {})

    def program(logits: Tensor) -> Tensor:
        return gapped.estimators()[name](tau=taus if masked else TAU, **options).sample(logits, mask=mask)

    (eager, expected), (compiled, gradient) = eager_and_compiled(program)
    assert torch.equal(eager, compiled)
    if name in ("gumbel-rao", "reinmax-rao"):
        torch.manual_seed(0)
        allowed = simplex.masked(normal(20, K), mask)
        expected = rao_gradient(name, allowed, normal(1, 20, K, seed=3)[0], taus, **options)
    assert_close(expected, gradient)


@compiles
def test_a_compiled_sample_may_be_changed_in_place() -> None:
    def program(logits: Tensor) -> Tensor:
        sample = gapped.gst(logits, TAU, True)
        sample *= 2
        return sample

    (_, expected), (_, gradient) = eager_and_compiled(program)
    assert_close(gradient, expected)


@compiles
def test_gst_compiles_to_native_code() -> None:
    """Native code draws other numbers; the gradient must be the closed form for its own draws.

    It ignores what comes in at a masked category.
    """

    @torch.compile(fullgraph=True)
    def program(logits: Tensor) -> Tensor:
        return gapped.gst(logits, 0.5, True, gap=1.2)

    logits, weight = normal(64, K), normal(64, K, seed=2)
    sample = program(leaf := logits.clone().requires_grad_())
    (gradient,) = torch.autograd.grad(sample, leaf, weight)
    assert_one_hot(sample)
    assert len(sample.argmax(-1).unique()) > 1
    expected = row_by_row(partial(gst_gradient, gap=1.2, tau=0.5), logits, sample.detach(), weight)
    assert_close(gradient, expected, 1e-10)
    logits[:, 1] = -torch.inf
    gradients = []
    for filling in (0.0, torch.nan, torch.inf):
        weight[:, 1] = filling
        leaf = logits.clone().requires_grad_()
        torch.manual_seed(0)
        gradients += torch.autograd.grad(program(leaf), leaf, weight)
    assert gradients[0].any()
    assert torch.equal(gradients[1], gradients[0])
    assert torch.equal(gradients[2], gradients[0])


def cost_of(estimator: Any) -> Callable[[Tensor], Tensor]:
    """The expected cost that a score-function estimator differentiates."""
    return partial(gapped.expectation, lambda z: (z @ torch.arange(7.0)) ** 2, estimator=estimator)


PROGRAMS: dict[str, Callable[[Tensor], Tensor]] = {
    # The others go the same way.
    **{name: gapped.estimator(name).sample for name in ("gst", "decoupled", "mve", "reinmax-rao")},
    **{repr(each): cost_of(each) for each in (gapped.RLOO(4), gapped.DisARMTree(), gapped.DisARMSticks())},
}


@pytest.mark.slow_if(lambda name: name.startswith(("mve", "DisARMSticks", "reinmax-rao")))
@compiles
@pytest.mark.parametrize("name", PROGRAMS)
def test_compiled_code_takes_batches_of_any_size(name: str) -> None:
    run = torch.compile(PROGRAMS[name], backend="aot_eager", fullgraph=True)
    for size in (4, 5, 6):
        logits = torch.randn(size, 7, requires_grad=True)
        value = run(logits)
        assert value.shape[0] == size
        (gradient,) = torch.autograd.grad(value, logits, normal(*value.shape, dtype=torch.float32))
        assert (gradient != 0).any()


@compiles
def test_compiled_code_takes_a_falling_temperature() -> None:
    sample = torch.compile(lambda x, tau: gapped.gst(x, tau, hard=False), backend="aot_eager", fullgraph=True)
    logits = torch.tensor([[0.0, 1.0, 2.0]])
    assert all(sample(logits, tau).max() == 1 for tau in (1e-3, 9e-4, 8e-4))
    # At so high a temperature all categories are nearly equal.
    assert sample(logits, 1e6).max() < 0.34


@compiles
@pytest.mark.parametrize(
    "function",
    [
        lambda x: gapped.gst(x, hard=True),
        lambda x: gapped.gst(x, hard=False),
        lambda x: gapped.expectation(lambda z: z[..., 0] ** 2, x, gapped.RLOO(4)).sum(),
    ],
    ids=["hard", "soft", "expectation"],
)
def test_forward_derivatives_are_refused_not_zero(function: Any) -> None:
    with pytest.raises(NotImplementedError, match="jvp"):
        torch.func.jvp(function, (torch.randn(3, 5),), (torch.ones(3, 5),))


@every_soft_member
def test_per_sample_gradients_of_soft_samples(name: str) -> None:
    """Every row's gradient is J(h) g / tau for the h that this row drew."""
    weight = normal(50, K, seed=2)
    gradient, soft = per_row_gradients(make(name, hard=False), normal(50, K), weight)
    assert_close(gradient, through_softmax(soft, weight, TAU), 1e-11)


HARD: dict[str, tuple[gapped.Pathwise, Callable[..., Tensor]]] = {
    "reinmax": (make("reinmax"), partial(reinmax_gradient, tau=TAU)),
    "gst": (make("gst", gap=1.0), partial(gst_gradient, gap=1.0, tau=TAU)),
    # It has a backward of its own.
    "nz-gst": (gapped.GST(1.0, gap=1.0, detach=False), partial(gst_gradient, gap=1.0, tau=1.0, detach=False)),
}


@pytest.mark.parametrize("name", HARD)
def test_per_sample_gradients_of_hard_samples(name: str) -> None:
    """By the closed form, row by row, for the categories that were drawn."""
    estimator, formula = HARD[name]
    logits, weight = normal(50, K), normal(50, K, seed=2)
    gradient, sample = per_row_gradients(estimator, logits, weight)
    assert_close(gradient, row_by_row(formula, logits, sample, weight), 1e-11)


@every_member
def test_differentiating_again_is_possible(name: str) -> None:
    """The ordinary rule of torch: a kept graph may be used again, with the same result."""
    logits = normal(4, K).requires_grad_()
    cost = (make(name).sample(logits, generator=seeded()) * normal(4, K)).sum()
    first = torch.autograd.grad(cost, logits, retain_graph=True)[0]
    assert torch.equal(first, torch.autograd.grad(cost, logits)[0])


GAPS = {"function": gapped.expected_gap, "tensor": torch.linspace(0.5, 1.5, 20)}
ORIGINALS = {name: make(name) for name in MEMBERS} | {key: gapped.GST(gap=gap) for key, gap in GAPS.items()}


@pytest.mark.parametrize("name", ORIGINALS)
@pytest.mark.parametrize("copy_of", [lambda x: pickle.loads(pickle.dumps(x)), copy.deepcopy, copy.copy])
def test_estimators_survive_copying(name: str, copy_of: Any) -> None:
    estimator = ORIGINALS[name]
    twin = copy_of(estimator)
    assert twin == estimator
    assert repr(twin) == repr(estimator)
    logits = normal(20, K)
    assert torch.equal(twin.sample(logits, generator=seeded()), estimator.sample(logits, generator=seeded()))
