"""`gapped.expectation`: value, gradients, shapes, dtypes, masks, state and errors, for every estimator."""

from __future__ import annotations

import copy
import dataclasses
import io
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from conftest import FUNCTIONS, SOFT, assert_close, assert_one_hot, every_member, normal, seeded
from torch import Tensor
from torch.utils.checkpoint import checkpoint

import gapped
from gapped import GappedError


class Sum(torch.nn.Module):
    """A free control variate that takes any shape: a weighted sum of squares over the example."""

    def __init__(self, batch_axes: int) -> None:
        super().__init__()
        self.batch_axes = batch_axes
        self.weight = torch.nn.Parameter(torch.tensor(0.3))

    def forward(self, z: Tensor) -> Tensor:
        return self.weight * z.flatten(1 + self.batch_axes).square().sum(-1)


# Every registered estimator that needs the cost, as it is by default or as said here: a new one is tested by
# being registered. DisARM has two categories only, and a test of its own.
SCORES = tuple(name for name in gapped.estimators("score") if name != "disarm")
# Given the number of batch axes.
MAKERS: dict[str, Callable[[int], Any]] = {
    "reinforce": lambda axes: gapped.Reinforce(samples=2),
    "rloo": lambda axes: gapped.RLOO(3),
    "relax": lambda axes: gapped.RELAX(Sum(axes)),
}
# Evaluations of f for a gradient, K = 3 and L = 2; what is not here evaluates one sample.
EVALUATIONS = {
    "reinforce": [2],
    "rloo": [3],
    "muprop": [1, 1],
    "disarm-tree": [2],
    "disarm-sticks": [2],
    "arsm": [4],
    "rebar": [1, 2],
    "relax": [1, 2],
    "exact": [1, 9],
}
every_score = pytest.mark.parametrize("name", SCORES)


def made(name: str, batch_axes: int = 1) -> Any:
    return MAKERS[name](batch_axes) if name in MAKERS else gapped.estimator(name)


class Model:
    """A cost with a parameter inside and one behind a graph that was built before; it notes its calls."""

    def __init__(self, categories: int = 3, batch_axes: int = 1) -> None:
        self.weight = normal(categories, seed=21).requires_grad_()
        self.outside = normal(categories, seed=22).requires_grad_()
        self.built = self.outside.sin()
        self.batch_axes = batch_axes
        self.seen: list[Tensor] = []

    def cost(self, z: Tensor) -> Tensor:
        picked = z.to(torch.float64) * self.weight * self.built
        return (1 + picked.flatten(1 + self.batch_axes).sum(-1)) ** 2

    def __call__(self, z: Tensor) -> Tensor:
        self.seen.append(z.detach().clone())
        return self.cost(z)


def run(name: str, logits: Tensor, f: Any, batch_axes: int = 1, seed: int = 0, **how: Any) -> Any:
    leaf = logits.clone().requires_grad_()
    value = gapped.expectation(f, leaf, made(name, batch_axes), generator=seeded(seed), **how)
    (gradient,) = torch.autograd.grad(value.sum(), leaf)
    return value.detach(), gradient


@every_score
def test_value_and_the_ordinary_gradient_inside_the_cost(name: str) -> None:
    """Both are those of the mean cost of the hard samples; extra evaluations add nothing to them."""
    logits, model = normal(5, 2, 3).requires_grad_(), Model()
    value = gapped.expectation(model, logits, made(name), generator=seeded())
    pull = normal(5, seed=3)
    gradients = torch.autograd.grad(value, [model.weight, model.outside], pull)
    assert [len(z) for z in model.seen] == EVALUATIONS.get(name, [1])
    hard = model.seen[1] if name == "exact" else model.seen[0]
    assert_one_hot(hard)
    again = Model()
    if name == "exact":
        chosen = (hard * torch.softmax(logits.detach(), -1)).sum(-1).prod(-1)
        expected = (chosen * again.cost(hard)).sum(0)
    else:
        expected = again.cost(hard).mean(0)
    assert_close(value.detach(), expected.detach())
    for ours, theirs in zip(
        gradients, torch.autograd.grad(expected, [again.weight, again.outside], pull), strict=True
    ):
        assert_close(ours, theirs)


@every_score
def test_logits_inside_the_cost_keep_their_own_gradient(name: str) -> None:
    """An entropy term, say: it is added to the estimator's gradient."""
    logits = normal(5, 2, 3)
    _, alone = run(name, logits, Model())
    leaf, model = logits.clone().requires_grad_(), Model()
    extra = leaf.square().sum((-1, -2))
    value = gapped.expectation(
        lambda z: model(z) + extra - extra.detach(), leaf, made(name), generator=seeded()
    )
    assert_close(torch.autograd.grad(value.sum(), leaf)[0], alone + 2 * logits, 1e-10)


@every_score
@pytest.mark.parametrize(
    ("batch", "variables"), [((), ()), ((), (4,)), ((3,), ()), ((3,), (2,)), ((3, 2), (2, 2))]
)
def test_batch_and_variables(name: str, batch: tuple[int, ...], variables: tuple[int, ...]) -> None:
    """Shapes; batch axes can be flattened; with all but one cost put to zero, only its gradient is left."""
    logits, model = normal(*batch, *variables, 3), Model(batch_axes=len(batch))
    value, gradient = run(name, logits, model, len(batch))
    assert value.shape == batch
    assert gradient.shape == logits.shape
    assert gradient.isfinite().all()
    assert_close(gradient.sum(-1), torch.zeros((*batch, *variables)), 1e-10)
    if batch and name != "relax":  # its network adds a control variate that no cost switches off
        keep = torch.zeros(batch).double()
        keep.view(-1)[1] = 1.0
        _, single = run(name, logits, lambda z: keep * model.cost(z), len(batch))
        assert gradient.abs().max() > 0
        flat = logits.reshape(-1, *variables, 3)
        assert_close(run(name, flat, Model())[1].reshape(logits.shape), gradient)
        others = keep == 0
        assert_close(single[others], torch.zeros_like(single[others]))
        assert_close(single[~others], gradient[~others])


@every_score
def test_the_incoming_gradient_is_per_example(name: str) -> None:
    logits, pull = normal(5, 2, 3), normal(5, seed=3)
    _, gradient = run(name, logits, Model())
    leaf = logits.clone().requires_grad_()
    value = gapped.expectation(Model(), leaf, made(name), generator=seeded())
    assert_close(torch.autograd.grad(value, leaf, pull)[0], pull.view(5, 1, 1) * gradient)


@pytest.mark.parametrize("name", gapped.estimators())
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_a_cost_may_write_into_its_input(name: str, dtype: torch.dtype) -> None:
    logits, weight = normal(5, 2, 2).to(dtype), normal(2, seed=2).to(dtype)

    def writing(z: Tensor) -> Tensor:
        costs = (z.mul_(weight).sum((-1, -2)) + 1) ** 2
        z.data.fill_(7.0)  # autograd does not see this one
        return costs

    expected = run(name, logits, lambda z: ((z * weight).sum((-1, -2)) + 1) ** 2)
    for ours, theirs in zip(run(name, logits, writing), expected, strict=True):
        assert torch.equal(ours, theirs)


@every_score
def test_value_and_logits_may_be_changed_in_place(name: str) -> None:
    leaf = normal(5, 2, 3, dtype=torch.float32).requires_grad_()
    rows = leaf * 1
    value = gapped.expectation(Model(), rows, made(name), generator=seeded())
    rows.zero_()
    value *= 2
    expected = run(name, leaf.detach(), Model())[1]
    assert_close(torch.autograd.grad(value.sum(), leaf)[0], 2 * expected, 1e-5)


def test_a_level_of_the_costs_does_not_hide_the_exact_value() -> None:
    logits, worth = normal(3, dtype=torch.float32), normal(3, seed=2)
    value = gapped.expectation(lambda z: z.double() @ worth + 1e9, logits, gapped.Exact()) - 1e9
    assert_close(value, (torch.softmax(logits.double(), -1) * worth).sum(), 1e-6)


@pytest.mark.parametrize("name", [name for name in (*SCORES, "disarm") if name != "reinforce"])
def test_a_level_of_the_costs_hides_nothing(name: str) -> None:
    """Costs in float64 for logits in float32: at 1e9 their differences are below float32's resolution."""
    logits, gradients = normal(20, 2, 2, dtype=torch.float32), []
    for level in (0.0, 1e9):
        leaf, estimator, model = logits.clone().requires_grad_(), made(name), Model(2)
        if name == "nvil":
            estimator.mean.fill_(level)
        value = gapped.expectation(lambda z: model.cost(z) + level, leaf, estimator, generator=seeded())  # noqa: B023
        gradients.append(torch.autograd.grad(value.sum(), leaf)[0])
        if name == "nvil":
            assert_close(estimator.mean, value.mean().detach(), 1e-15)
    assert gradients[0].abs().max() > 1e-2
    assert_close(gradients[1], gradients[0], 1e-5)


def test_a_network_may_write_into_its_input() -> None:
    logits, results = normal(5, 2, 3), []
    for inplace in (False, True):
        torch.manual_seed(0)
        layers = [torch.nn.Hardtanh(0.1, 0.5, inplace), torch.nn.Flatten(-2), torch.nn.Linear(6, 1)]
        network = torch.nn.Sequential(*layers, torch.nn.Flatten(-2)).double()
        leaf = logits.clone().requires_grad_()
        value = gapped.expectation(square, leaf, gapped.RELAX(network), generator=seeded())
        results.append(torch.autograd.grad(value.sum(), leaf)[0])
    assert torch.equal(*results)


@pytest.mark.parametrize("graph", [False, True])
def test_enumeration_in_several_calls(graph: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """As in one call, for the logits and for what the cost contains; memory is that of a few samples."""
    logits, pull = normal(3, 4, 3), normal(3, seed=3)
    mask = torch.rand(3, 4, 3, generator=seeded(4)) < 0.8
    results = []
    for call in (2**22, 20 * logits.numel()):
        monkeypatch.setattr("gapped.score.exact.CALL", call)
        leaf, model = logits.clone().requires_grad_(), Model()
        model.weight.requires_grad_(graph)
        alive: list[Any] = []

        def cost(z: Tensor, model: Model = model, alive: list[Any] = alive, call: int = call) -> Tensor:
            assert z.numel() <= call
            assert sum(other() is not None for other in alive) <= 2
            alive.append(weakref.ref(z))
            return model.cost(z) + 1e9

        value = gapped.expectation(cost, leaf, gapped.Exact(), mask=mask)
        assert len(alive) == (2 if call == 2**22 else 1 + -(-81 // 20))
        wanted = [leaf, model.weight, model.outside] if graph else [leaf]
        results.append([value.detach(), *torch.autograd.grad(value, wanted, pull)])
    for ours, theirs in zip(*results, strict=True):
        assert_close(ours, theirs, 1e-6)
        assert ours.abs().max() > 1e-2


def test_enumeration_of_a_batch_needs_little_memory() -> None:
    """65,536 combinations of 8 examples: 16 KB of logits. At once their one-hot rows would take 1 GB."""
    logits, table = normal(8, 2, 256, dtype=torch.float32), normal(256, seed=2, dtype=torch.float32)
    sizes: list[int] = []

    def cost(z: Tensor) -> Tensor:
        sizes.append(z.numel())
        return (z @ table).square().sum(-1)

    value, gradient = run("exact", logits, cost)
    leaf = logits.clone().requires_grad_()
    expected = (torch.softmax(leaf, -1) @ table.square()).sum(-1)
    assert max(sizes) <= 2**22
    assert_close(value, expected.detach(), 1e-5)
    assert_close(gradient, torch.autograd.grad(expected.sum(), leaf)[0], 1e-5)


@every_score
def test_masked_categories_are_not_there(name: str) -> None:
    logits = normal(200, 2, 3)
    logits[..., 1] = 50.0
    mask = torch.tensor([[True, False, True], [True, True, True]])
    model = Model()
    value, gradient = run(name, logits, model, mask=mask)
    assert (gradient[:, 0, 1] == 0).all()
    assert gradient.isfinite().all()
    assert all((z[..., 0, 1] == 0).all() for z in model.seen)
    infinite = logits.masked_fill(~mask, -torch.inf)
    for ours, theirs in zip(run(name, infinite, Model()), (value, gradient), strict=True):
        assert torch.equal(ours, theirs)


@pytest.mark.parametrize("name", [name for name in SCORES if name != "disarm-tree"])
def test_masking_equals_deleting(name: str) -> None:
    """With the noise of what is left: uniforms by rank for sticks, Gumbels by category, one uniform else."""
    wide, kept = torch.full((50, 5), 50.0).double(), torch.tensor([0, 2, 3])
    wide[:, kept] = normal(50, 3)
    mask = torch.zeros(5, dtype=torch.bool).index_fill(0, kept, True)
    estimator, model = made(name), Model(5)

    def narrow_cost(z: Tensor) -> Tensor:
        return model.cost(torch.zeros(*z.shape[:-1], 5).double().index_copy(-1, kept, z))

    drawn = [] if name == "exact" else estimator.draw(wide.masked_fill(~mask, -torch.inf), seeded())
    results = []
    for logits, f, how in ((wide, model.cost, {"mask": mask}), (wide[:, kept], narrow_cost, {})):
        leaf = logits.clone().requires_grad_()
        other = copy.deepcopy(estimator)
        noise = drawn if how else _narrow(name, drawn, kept)
        kind = type("Replayed", (type(other),), {"draw": lambda self, *_, noise=noise: noise})
        object.__setattr__(other, "__class__", kind)
        value = gapped.expectation(f, leaf, other, **how)
        results.append((value.detach(), torch.autograd.grad(value.sum(), leaf)[0]))
    (value, gradient), (narrow_value, narrow_gradient) = results
    if name != "arsm":  # the mean over more swaps
        assert_close(value, narrow_value)
    assert_close(gradient[:, kept], narrow_gradient)
    assert (gradient[:, ~mask] == 0).all()


def _narrow(name: str, drawn: Any, kept: Tensor) -> Any:
    if name in ("rebar", "relax"):
        return type(drawn)(*(noise[..., kept] for noise in drawn))
    if name == "disarm-sticks":
        return drawn[..., 2:]
    if name == "arsm":
        return drawn[..., kept]
    return drawn if name == "exact" else torch.searchsorted(kept, drawn)


@every_score
def test_a_row_without_categories_is_zero(name: str) -> None:
    logits = normal(4, 2, 3)
    logits[1, 0] = -torch.inf
    model = Model()
    value, gradient = run(name, logits, model)
    assert all((z[:, 1, 0] == 0).all() for z in model.seen)
    assert (gradient[1, 0] == 0).all()
    assert gradient.isfinite().all()
    assert value.isfinite().all()


@every_score
def test_no_examples(name: str) -> None:
    estimator, logits = made(name), torch.zeros(0, 2, 3, requires_grad=True)
    value = gapped.expectation(square, logits, estimator)
    assert value.shape == (0,)
    assert torch.autograd.grad(value.sum(), logits)[0].shape == (0, 2, 3)
    if isinstance(estimator, torch.nn.Module):
        assert all(entry.isfinite().all() for entry in estimator.state_dict().values())
        with pytest.raises(GappedError, match="nothing to train on"):
            estimator.variance_loss()


@every_score
def test_one_category_has_no_gradient(name: str) -> None:
    value, gradient = run(name, normal(4, 2, 1), Model(1))
    assert_close(value, Model(1).cost(torch.ones(1, 4, 2, 1)).squeeze(0).detach())
    assert_close(gradient, torch.zeros(4, 2, 1))


def test_a_baseline_of_whole_numbers_is_not_rounded() -> None:
    """Tokens as a context: the perceptron's answer is no token."""
    logits, results = normal(4, 2, 3).requires_grad_(), []
    for dtype in (torch.int64, torch.float32):
        estimator = gapped.NVIL(8)
        context = torch.arange(12).view(4, 3).to(dtype)
        torch.manual_seed(0)
        estimator.network(context, torch.Size([4]))
        torch.nn.init.constant_(estimator.network.outer.bias, 0.7)
        value = gapped.expectation(Model(), logits, estimator, generator=seeded(), context=context)
        results.append(torch.autograd.grad(value.sum(), logits)[0])
    assert torch.equal(*results)


@every_score
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_dtypes(name: str, dtype: torch.dtype) -> None:
    """The cost sees the logits' dtype; the gradient is computed in float32 and rounded once."""
    logits, model = normal(6, 2, 3).to(dtype), Model()
    value, gradient = run(name, logits, model)
    assert {z.dtype for z in model.seen} == {dtype}
    assert gradient.dtype == dtype
    _, exact = run(name, logits.float(), Model())
    # Relaxed samples are rounded on their way to the cost.
    if name not in ("muprop", "rebar", "relax"):
        assert torch.equal(gradient, exact.to(dtype))
    assert value.isfinite().all()


@every_score
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_extreme_logits_give_finite_gradients(name: str, dtype: torch.dtype) -> None:
    logits = torch.tensor([[1e4, -1e4, 0.0], [300.0, 299.0, -2e4]], dtype=dtype).expand(50, 2, 3)
    value, gradient = run(name, logits, Model())
    assert value.isfinite().all()
    assert gradient.isfinite().all()


@every_score
def test_randomness_is_an_argument(name: str) -> None:
    logits, state = normal(5, 2, 3), torch.get_rng_state()
    first, second = run(name, logits, Model(), seed=4), run(name, logits, Model(), seed=4)
    assert torch.equal(torch.get_rng_state(), state)
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
    leaf = logits.clone().requires_grad_()
    values = [gapped.expectation(Model(), leaf, made(name)) for _ in range(8)]
    assert torch.equal(torch.get_rng_state(), state) == (name == "exact")
    assert any(not torch.equal(value, values[0]) for value in values) == (name != "exact")


@every_score
def test_without_a_gradient_only_the_samples_are_evaluated(name: str) -> None:
    logits, model = normal(5, 2, 3), Model()
    estimator = made(name)
    value = gapped.expectation(model, logits, estimator, generator=seeded())
    assert [len(z) for z in model.seen] == (
        EVALUATIONS.get(name, [1]) if name == "exact" else EVALUATIONS.get(name, [1])[:1]
    )
    assert value.requires_grad
    with torch.no_grad():
        quiet = gapped.expectation(Model(), logits.requires_grad_(), estimator, generator=seeded())
    assert not quiet.requires_grad
    assert torch.equal(quiet, value)
    if isinstance(estimator, torch.nn.Module):
        with pytest.raises(GappedError, match="nothing to train on"):
            estimator.variance_loss()


@every_score
def test_differentiating_twice_is_an_error(name: str) -> None:
    leaf = normal(5, 2, 3).requires_grad_()
    value = gapped.expectation(Model(), leaf, made(name))
    (gradient,) = torch.autograd.grad(value.sum(), leaf, create_graph=True)
    with pytest.raises(RuntimeError, match="cannot be differentiated twice"):
        torch.autograd.grad(gradient.sum(), leaf)


def evaluated(name: str) -> Any:
    """The estimator without a state that changes."""
    estimator = made(name)
    return estimator.eval() if isinstance(estimator, torch.nn.Module) else estimator


@every_score
def test_vmap_of_the_gradient(name: str) -> None:
    """A map over runs: each has its own noise, and by enumeration the gradient it has alone."""
    logits, estimator = normal(6, 40, 2, 3), evaluated(name)
    torch.manual_seed(0)

    def total(leaf: Tensor) -> Tensor:
        return gapped.expectation(square_of_first, leaf, estimator).sum()

    gradients = torch.func.vmap(torch.func.grad(total), randomness="different")(logits)
    assert gradients.shape == logits.shape
    assert gradients.abs().amax((1, 2, 3)).min() > 0
    if name == "exact":
        for row, gradient in zip(logits, gradients, strict=True):
            assert_close(gradient, run(name, row, square_of_first)[1])


@every_score
def test_function_transforms_give_the_same_gradient(name: str) -> None:
    logits, estimator, model = normal(5, 2, 3), evaluated(name), Model()
    torch.manual_seed(0)
    found = torch.func.grad(lambda leaf: gapped.expectation(model, leaf, estimator).sum())(logits)
    torch.manual_seed(0)
    leaf = logits.clone().requires_grad_()
    (expected,) = torch.autograd.grad(gapped.expectation(model, leaf, estimator).sum(), leaf)
    assert_close(found, expected)


@pytest.mark.parametrize(
    ("estimator", "message"),
    [
        (gapped.NVIL(), "estimator: got NVIL in training mode, .* expected one in evaluation mode"),
        (gapped.REBAR(), "estimator: got REBAR in training mode"),
        (gapped.RELAX(Sum(1)), "estimator: got RELAX in training mode"),
        (gapped.RELAX(4).eval(), "network: got a number of hidden units, inside of a transform"),
    ],
)
def test_what_function_transforms_cannot_do(estimator: Any, message: str) -> None:
    with pytest.raises(GappedError, match=message):
        torch.func.grad(lambda x: gapped.expectation(square, x, estimator).sum())(normal(5, 2, 3))
    assert gapped.expectation(square, normal(5, 2, 3).requires_grad_(), estimator).requires_grad
    with pytest.raises(GappedError, match="f: got costs without a derivative"):
        torch.func.grad(lambda x: gapped.expectation(through_argmax, x, gapped.REBAR().eval()).sum())(
            normal(5, 2, 3)
        )


@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
@pytest.mark.filterwarnings("ignore:.*torch.jit.* is deprecated")
@every_score
def test_compiled_equals_eager(name: str) -> None:
    """In one graph; also what is left for training, and the memory."""
    torch._dynamo.reset()
    context = {"context": normal(5, 3, dtype=torch.float32)} if name == "nvil" else {}
    results = []
    for compiled in (False, True):
        torch.manual_seed(0)
        estimator = STATEFUL[name]() if name in STATEFUL else made(name)

        def objective(leaf: Tensor, estimator: Any = estimator) -> Tensor:
            return gapped.expectation(square_of_first, leaf, estimator, **context)

        leaf = normal(5, 2, 3).requires_grad_()
        call = torch.compile(objective, backend="aot_eager", fullgraph=True) if compiled else objective
        value = call(leaf)
        results.append([value.detach(), torch.autograd.grad(value.sum(), leaf)[0], *state_of(estimator)])
    for eager, compiled in zip(*results, strict=True):
        assert_close(compiled, eager)


def state_of(estimator: Any) -> list[Tensor]:
    """What an estimator keeps: its memory, and the loss that it left behind with its slopes."""
    if not isinstance(estimator, torch.nn.Module):
        return []
    loss, parameters = estimator.variance_loss(), list(estimator.parameters())
    slopes = torch.autograd.grad(loss, parameters)
    return [loss.detach(), *slopes, *(buffer.clone() for buffer in estimator.buffers())]


@every_score
@pytest.mark.parametrize("reentrant", [False, True])
def test_activation_checkpointing_counts_a_call_once(name: str, reentrant: bool) -> None:
    """Two steps. Without reentry two calls share the estimator before the backward pass of both."""
    context = {"context": normal(5, 3, dtype=torch.float32)} if name == "nvil" else {}
    results = []
    for how in (None, {"use_reentrant": reentrant}):
        torch.manual_seed(0)
        estimator = STATEFUL[name]() if name in STATEFUL else made(name)
        leaf, weight = normal(5, 2, 3).requires_grad_(), normal(3, seed=2).requires_grad_()

        def call(x: Tensor, estimator: Any = estimator, weight: Tensor = weight) -> Tensor:
            cost = lambda z: ((z * weight).sum((-1, -2)) + 1) ** 2  # noqa: E731
            return gapped.expectation(cost, 1.0 * x, estimator, **context)

        for _ in range(2):
            torch.stack(
                [
                    call(leaf) if how is None else checkpoint(call, leaf, **how)
                    for _ in range(1 if reentrant else 2)
                ]
            ).sum().backward()
        results.append([leaf.grad, weight.grad, *state_of(estimator)])
    for plain, checkpointed in zip(*results, strict=True):
        assert_close(checkpointed, plain)


def square_of_first(z: Tensor) -> Tensor:
    return (z[..., 0].sum(-1) - 1.3) ** 2


@every_score
def test_autocast_does_not_round_the_estimate(name: str) -> None:
    logits = normal(5, 2, 3, dtype=torch.float32)
    plain = run(name, logits, Model())
    with torch.autocast("cpu", torch.bfloat16):
        for ours, theirs in zip(run(name, logits, Model()), plain, strict=True):
            assert torch.equal(ours, theirs)


@every_member
def test_pathwise_estimators_are_used_as_they_are(name: str) -> None:
    logits, pull = normal(5, 2, 3), normal(5, seed=3)
    options = {} if name == "reinmax" else {"tau": 0.7}
    results = []
    for through in (True, False):
        leaf, model = logits.clone().requires_grad_(), Model()
        if through:
            estimator = gapped.estimator(name, **options)
            value = gapped.expectation(model, leaf, estimator, generator=seeded())
        else:
            z = FUNCTIONS[name](leaf.unsqueeze(0), hard=True, generator=seeded(), **options)
            value = model(z).squeeze(0)
        gradients = torch.autograd.grad(value, [leaf, model.weight, model.outside], pull)
        results.append([value.detach(), *gradients])
    for ours, theirs in zip(*results, strict=True):
        assert torch.equal(ours, theirs)


@pytest.mark.parametrize("name", SOFT)
def test_soft_samples_have_no_expected_cost(name: str) -> None:
    message = r"estimator: got \w+ with hard=False, expected hard=True"
    with pytest.raises(GappedError, match=message):
        gapped.expectation(square, normal(5, 2, 3), gapped.estimator(name, hard=False))


def test_pathwise_masks() -> None:
    logits, mask = normal(50, 2, 3).requires_grad_(), torch.tensor([True, False, True])
    value = gapped.expectation(Model(), logits, gapped.GST(), mask=mask)
    assert (torch.autograd.grad(value.sum(), logits)[0][..., 1] == 0).all()


def test_every_estimator_lowers_the_cost() -> None:
    """The user changes the estimator, nothing else; the best joint choice costs 0."""
    goal = torch.tensor([2, 0])

    def distance(z: Tensor) -> Tensor:
        return (z.gather(-1, goal.view(2, 1).expand(*z.shape[:-1], 1)).squeeze(-1) - 1).square().sum(-1)

    estimators = [made(name) for name in SCORES]
    for estimator in [*estimators, gapped.GST(), gapped.GumbelSoftmax()]:
        torch.manual_seed(0)
        logits = torch.zeros(16, 2, 3, requires_grad=True)
        optimiser = torch.optim.SGD([logits], lr=2.0)
        for _ in range(60):
            optimiser.zero_grad()
            gapped.expectation(distance, logits, estimator).sum().backward()
            optimiser.step()
        with torch.no_grad():
            assert gapped.expectation(distance, logits, gapped.Exact()).mean() < 0.4, estimator


def test_one_learning_signal_for_each_row_if_costs_have_no_variables() -> None:
    """Costs per variable make every variable an example of its own."""
    logits = normal(4, 3, 5)
    _, together = run("exact", logits, lambda z: z.square().sum(-1) * z[..., 0])
    _, alone = run("exact", logits.reshape(12, 5), lambda z: z.square().sum(-1) * z[..., 0])
    assert_close(together.reshape(12, 5), alone)


def square(z: Tensor) -> Tensor:
    return z.square().sum((-1, -2))


def through_argmax(z: Tensor) -> Tensor:
    return z.argmax(-1).double().sum(-1)


def only_a_parameter(z: Tensor) -> Tensor:
    return torch.zeros(z.shape[:2]).double() + torch.ones((), dtype=torch.float64, requires_grad=True)


ERRORS: dict[str, tuple[Any, Any, str]] = {
    "variables not summed away": (lambda z: z.sum(-2), gapped.RLOO(), r"f: got costs of shape \(2, 5, 3\)"),
    "no sample axis": (
        lambda z: square(z).mean(0),
        gapped.RLOO(),
        r"f: got costs of shape \(5,\), expected .*n = 2",
    ),
    "no axis": (lambda z: square(z).sum(), gapped.RLOO(), r"f: got costs of shape \(\)"),
    "pathwise shape": (
        lambda z: square(z).sum(0),
        gapped.GST(),
        r"f: got costs of shape \(5,\), expected .*n = 1",
    ),
    "a number": (lambda z: 1.0, gapped.Reinforce(), "f: got a result of type float"),
    "integers": (lambda z: square(z).long(), gapped.Reinforce(), "f: got costs of dtype torch.int64"),
    "elsewhere": (
        lambda z: square(z).to("meta"),
        gapped.Reinforce(),
        "f: got costs on meta, expected .*cpu",
    ),
    "nan": (lambda z: square(z) * torch.nan, gapped.Reinforce(), "f: got costs that are not all finite"),
    "inf": (lambda z: square(z) / 0.0, gapped.DisARMTree(), "f: got costs that are not all finite"),
    "pathwise nan": (lambda z: square(z) * torch.nan, gapped.GST(), "f: got costs that are not all finite"),
    "muprop": (through_argmax, gapped.MuProp(), "f: got costs without a derivative"),
    "muprop, parameter": (only_a_parameter, gapped.MuProp(), "f: got costs without a derivative"),
    "rebar": (through_argmax, gapped.REBAR(), "f: got costs without a derivative"),
    "rebar, parameter": (only_a_parameter, gapped.REBAR(), "f: got costs without a derivative"),
    "relax": (through_argmax, gapped.RELAX(Sum(1)), "f: got costs without a derivative"),
    "pathwise": (through_argmax, gapped.GST(), "f: got costs without a derivative.*gapped.RLOO"),
    "not a function": (3.0, gapped.RLOO(), "f: got an object of type float"),
    "disarm": (square, gapped.DisARM(), "logits: got 3 categories for DisARM, expected two"),
    "a name": (square, "rloo", "estimator: got an object of type str, expected an estimator such as"),
    "a class": (square, gapped.RLOO, "estimator: got an object of type ABCMeta"),
    "relax network": (square, gapped.RELAX(torch.nn.Identity()), "network: got a result of shape"),
    "rebar eta": (square, gapped.REBAR(eta=torch.ones(4)), r"eta: got a tensor of shape \(4,\)"),
    "nvil without context": (
        square,
        gapped.NVIL(torch.nn.Identity()),
        "context: got None, expected the tensor",
    ),
}


@pytest.mark.parametrize("case", ERRORS)
def test_errors_are_one_line(case: str) -> None:
    f, estimator, message = ERRORS[case]
    with pytest.raises(GappedError, match=message) as caught:
        gapped.expectation(f, normal(5, 2, 3).requires_grad_(), estimator)
    assert "\n" not in str(caught.value)


def test_errors_of_arguments() -> None:
    logits = normal(5, 2, 3)
    for how in (
        {"mask": torch.ones(4, dtype=torch.bool)},
        {"generator": 3},
        {"context": torch.ones(5)},
    ):
        for estimator in (gapped.RLOO(), gapped.GST()):
            with pytest.raises(GappedError, match=next(iter(how))):
                gapped.expectation(square, logits, estimator, **how)
    with pytest.raises(GappedError, match="logits"):
        gapped.expectation(square, [0.0], gapped.RLOO())  # type: ignore[arg-type]
    with pytest.raises(GappedError, match=r"Exact: got 9 variables of 4 categories, 262,144 combinations"):
        gapped.expectation(square, normal(1, 9, 4), gapped.Exact())


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: gapped.RLOO(1), "samples: got 1, expected an integer of at least 2"),
        (lambda: gapped.RLOO(2.0), "samples"),
        (lambda: gapped.Reinforce("leave-one-out"), "samples: got 1"),
        (
            lambda: gapped.Reinforce("running-mean"),
            r"baseline: got 'running-mean', .*gapped.NVIL\(scale=False\)",
        ),
        (lambda: gapped.Reinforce(samples=True), "samples: got True"),
        (lambda: gapped.DisARMSticks("sorted"), "order: got 'sorted'"),
        (lambda: gapped.NVIL(0), "network: got 0"),
        (lambda: gapped.NVIL(decay=1.0), "decay: got 1.0"),
        (lambda: gapped.NVIL(scale=1), "scale: got 1"),
        (lambda: gapped.REBAR(tau=0.0), "tau: got 0.0"),
        (lambda: gapped.REBAR(eta=float("inf")), "eta: got inf"),
        (lambda: gapped.REBAR(eta="1"), "eta: got '1'"),
        (lambda: gapped.REBAR(eta=torch.tensor([1.0, torch.nan])), "eta: got tensor"),
        (lambda: gapped.REBAR(eta=torch.ones((), requires_grad=True)), "eta: got tensor"),
        (lambda: gapped.RELAX(square), "network"),
    ],
)
def test_options_are_checked(make: Callable[[], Any], message: str) -> None:
    with pytest.raises(GappedError, match=message):
        make()


@pytest.mark.parametrize("eta", [-1, 3, np.float32(-0.5), torch.tensor(2), torch.tensor([0.5, -2.0])])
def test_any_finite_factor_of_the_control_variate(eta: Any) -> None:
    estimator = gapped.REBAR(eta=eta)
    assert estimator.eta.dtype == torch.float32
    assert estimator.eta.tolist() == torch.as_tensor(eta).tolist()


def test_stateless_estimators_are_frozen_values() -> None:
    assert gapped.RLOO(3) == gapped.RLOO(3) != gapped.RLOO(2)
    assert len({gapped.DisARMTree(), gapped.DisARMTree(), gapped.ARSM()}) == 2
    with pytest.raises(dataclasses.FrozenInstanceError):
        gapped.RLOO(3).samples = 2  # type: ignore[misc]


def test_the_memory_of_nvil() -> None:
    """Used before it is updated, a plain mean at first, then decaying; still in eval mode."""
    logits, estimator = torch.zeros(4, 3, requires_grad=True), gapped.NVIL(decay=0.5, scale=False)
    levels = []
    for level in (1.0, 2.0, 6.0, 0.0):
        levels.append(estimator.mean.item())
        gapped.expectation(lambda z, level=level: z.sum(-1) * level, logits, estimator)
    assert levels == [0.0, 1.0, 1.5, 3.75]
    assert estimator.mean.item() == 1.875
    estimator.eval()
    value = gapped.expectation(lambda z: z.sum(-1) * 1.875, logits, estimator)
    assert estimator.mean.item() == 1.875
    assert torch.autograd.grad(value.sum(), logits)[0].abs().max() == 0
    other = gapped.NVIL()
    other.load_state_dict(estimator.state_dict())
    assert other.mean.item() == 1.875
    assert other.steps == 4


def test_nvil_scales_by_the_running_deviation() -> None:
    logits, estimator = torch.zeros(4, 3, requires_grad=True), gapped.NVIL()
    f = lambda z: z[..., 0] + torch.tensor([0.0, 0.0, 8.0, 8.0])  # noqa: E731
    gapped.expectation(f, logits, estimator, generator=seeded(1))
    assert 3.0 < estimator.variance.sqrt() < 5.0
    plain = gapped.NVIL(scale=False)
    plain.load_state_dict(estimator.state_dict())
    gradients = [
        torch.autograd.grad(gapped.expectation(f, logits, e.eval(), generator=seeded(2)).sum(), logits)[0]
        for e in (estimator, plain)
    ]
    assert_close(gradients[0] * estimator.variance.sqrt(), gradients[1], 1e-6)


STATEFUL: dict[str, Callable[[], Any]] = {
    "nvil": lambda: gapped.NVIL(torch.nn.Linear(3, 1)),
    "rebar": lambda: gapped.REBAR(eta=0.5, tau=0.7),
    "relax": lambda: gapped.RELAX(Sum(1)),
}


@pytest.mark.parametrize("name", STATEFUL)
def test_the_variance_loss_trains_the_estimator_alone(name: str) -> None:
    torch.manual_seed(0)
    estimator = STATEFUL[name]()
    how = {"context": torch.randn(5, 3, requires_grad=True)} if name == "nvil" else {}
    logits, model = normal(5, 2, 3).requires_grad_(), Model()
    cost = gapped.expectation(model, logits, estimator, **how)
    estimator.variance_loss().backward()
    leaves = [logits, model.weight, model.outside, *how.values()]
    assert all(leaf.grad is None for leaf in leaves)
    trained = [parameter.grad for parameter in estimator.parameters()]
    assert all(grad is not None and grad.abs().sum() > 0 for grad in trained)
    with pytest.raises(GappedError, match="nothing to train on"):
        estimator.variance_loss()
    cost.sum().backward()
    assert all(leaf.grad is not None for leaf in leaves[:3])
    for parameter, grad in zip(estimator.parameters(), trained, strict=True):
        assert torch.equal(parameter.grad, grad), "the cost itself must not reach the estimator's parameters"


@pytest.mark.parametrize("name", STATEFUL)
def test_layers_that_share_an_estimator_lose_no_loss(name: str) -> None:
    context = {"context": normal(5, 3, dtype=torch.float32)} if name == "nvil" else {}
    totals = []
    for at_once in (False, True):
        torch.manual_seed(0)
        estimator, losses = STATEFUL[name](), []
        for layer in (0, 1):
            logits = normal(5, 2, 3, seed=layer).requires_grad_()
            gapped.expectation(square, logits, estimator, generator=seeded(layer), **context)
            if layer == 1 or not at_once:
                losses.append(estimator.variance_loss())
        total = torch.stack(losses).sum()
        totals.append([total.detach(), *torch.autograd.grad(total, list(estimator.parameters()))])
    for one_by_one, together in zip(*totals, strict=True):
        assert_close(together, one_by_one)


@pytest.mark.parametrize("name", STATEFUL)
def test_stateful_estimators_are_modules(name: str) -> None:
    """Saved, loaded and copied, in the middle of the work too."""
    estimator, logits = STATEFUL[name](), normal(5, 2, 3).requires_grad_()
    how = {"context": torch.randn(5, 3)} if name == "nvil" else {}
    gapped.expectation(square, logits, estimator, **how)
    file = io.BytesIO()
    torch.save(estimator.state_dict(), file)
    file.seek(0)
    fresh = STATEFUL[name]()
    fresh.load_state_dict(torch.load(file))
    clones = [estimator, copy.deepcopy(estimator), fresh]
    values = [
        torch.autograd.grad(
            gapped.expectation(square, logits, clone.eval(), generator=seeded(), **how).sum(), logits
        )[0]
        for clone in clones
    ]
    assert torch.equal(values[0], values[1])
    assert torch.equal(values[0], values[2])


def test_frozen_parameters_are_not_trained() -> None:
    estimator = gapped.REBAR().requires_grad_(False)
    gapped.expectation(square, normal(5, 2, 3).requires_grad_(), estimator)
    with pytest.raises(GappedError, match="nothing to train on"):
        estimator.variance_loss()


def test_rebar_takes_parameters_per_run() -> None:
    """A fleet: eta and tau for each run of the leading axis, equal to runs by themselves."""
    logits, model = normal(3, 4, 2, 3), Model(batch_axes=2)
    fleet = gapped.REBAR(
        torch.tensor([[0.2], [0.5], [1.0]]), torch.tensor([0.3, 0.5, 1.0]).view(3, 1, 1)
    ).double()
    noise = fleet.draw(logits, seeded())
    results = []
    for run_of in (slice(None), 0, 1, 2):
        leaf = logits[run_of].clone().requires_grad_()
        if run_of == slice(None):
            estimator, f = fleet, model.cost
        else:
            estimator = gapped.REBAR(fleet.eta[run_of].item(), fleet.tau[run_of].item()).double()
            f = Model().cost
        part = type(noise)(*(n[run_of] for n in noise))
        kind = type("Replayed", (gapped.REBAR,), {"draw": lambda self, *_, part=part: part})
        estimator.__class__ = kind
        value = gapped.expectation(f, leaf, estimator)
        results.append(torch.autograd.grad(value.sum(), leaf)[0])
    for run_of in range(3):
        assert_close(results[0][run_of], results[1 + run_of], 1e-6)


def test_disarm_has_two_categories() -> None:
    estimator = gapped.estimator("disarm")
    logits = normal(5, 3, 2).requires_grad_()
    value = gapped.expectation(lambda z: z[..., 1].sum(-1) ** 2, logits, estimator, generator=seeded())
    value.sum().backward()
    assert value.shape == (5,)
    assert_close(logits.grad.sum(-1), torch.zeros(5, 3, dtype=torch.float64))
    assert (logits.grad != 0).any()
    with pytest.raises(GappedError, match="3 categories for DisARM, expected two"):
        gapped.expectation(lambda z: z.sum((-2, -1)), normal(5, 3), estimator)


@pytest.mark.parametrize("name", ["nvil", "relax"])
def test_a_number_stands_for_a_network_of_that_width(name: str) -> None:
    """It learns its width at the first call, and starts at zero: the estimator as it is without it."""
    estimator = gapped.estimator(name, network=7)
    logits, x = normal(4, 2, 3).requires_grad_(), normal(4, 6)
    context = {"context": x} if name == "nvil" else {}
    value = gapped.expectation(
        lambda z: z.square().sum((-2, -1)), logits, estimator, generator=seeded(), **context
    )
    (value.mean() + estimator.variance_loss()).backward()
    assert estimator.network.inner.weight.shape == (7, 6)
    assert (estimator.network.outer.weight == 0).all()
    assert (estimator.network.outer.weight.grad != 0).any()


def test_sizes_that_an_estimator_is_not_made_for() -> None:
    gapped.Exact().check_size(2, 256)
    gapped.ARSM().check_size(100, 16)
    gapped.RLOO().check_size(100, 1000)
    with pytest.raises(GappedError, match="17 categories for ARSM, expected at most 16"):
        gapped.ARSM().check_size(1, 17)
    with pytest.raises(GappedError, match="30 variables of 10 categories, 1e\\+30 combinations"):
        gapped.Exact().check_size(30, 10)


@pytest.mark.parametrize("estimator", [gapped.RLOO(2), gapped.GST(), gapped.Exact()], ids=repr)
def test_broken_logits_are_not_called_broken_costs(estimator: Any) -> None:
    logits = torch.tensor([[0.0, torch.nan], [0.0, 1.0]])
    with pytest.raises(GappedError, match="logits: got rows with NaN"):
        gapped.expectation(lambda z: z[..., 0] ** 2, logits, estimator, generator=seeded())
