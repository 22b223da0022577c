"""`gapped.expectation` with every registered estimator: value, gradients, shapes, dtypes, masks."""

from __future__ import annotations

import weakref
from typing import Any

import pytest
import torch
from conftest import (
    FUNCTIONS,
    MEMBERS,
    assert_all_close,
    assert_close,
    assert_equal,
    assert_one_hot,
    every_member,
    normal,
    seeded,
)
from score_problems import (
    MAKERS,
    SCORES,
    Model,
    build,
    cost,
    estimate,
    every_score,
    every_setting,
    oracle,
    run,
    square,
    with_noise,
)
from torch import Tensor

import gapped
from gapped import GappedError

# Evaluations of f for a gradient, K = 3 and L = 2, of estimators that do more than evaluate their samples.
CALLS = {"muprop": [1, 1], "arsm": [4], "rebar": [1, 2], "relax": [1, 2], "exact": [1, 9]}


def calls_of(name: str) -> list[int]:
    return CALLS.get(name) or [build(name).evaluations or build(name).samples]


@every_score
def test_value_and_the_ordinary_gradient_inside_the_cost(name: str) -> None:
    """Both are those of the mean cost of the hard samples; extra evaluations add nothing to them."""
    logits, model = normal(5, 2, 3).requires_grad_(), Model()
    value = gapped.expectation(model, logits, build(name), generator=seeded())
    pull = normal(5, seed=3)
    gradients = torch.autograd.grad(value, [model.weight, model.outside], pull)
    assert [len(z) for z in model.seen] == calls_of(name)
    hard = model.seen[1] if name == "exact" else model.seen[0]
    assert_one_hot(hard)
    again = Model()
    if name == "exact":
        weights = (hard * torch.softmax(logits.detach(), -1)).sum(-1).prod(-1)
        expected = (weights * again.cost(hard)).sum(0)
    else:
        expected = again.cost(hard).mean(0)
    assert_close(value.detach(), expected.detach())
    assert_all_close(gradients, torch.autograd.grad(expected, [again.weight, again.outside], pull))


@every_score
def test_logits_inside_the_cost_keep_their_own_gradient(name: str) -> None:
    """An entropy term, say: it is added to the estimator's gradient."""
    logits = normal(5, 2, 3)
    _, alone = run(name, logits, Model())
    leaf, model = logits.clone().requires_grad_(), Model()
    extra = leaf.square().sum((-1, -2))
    value = gapped.expectation(
        lambda z: model(z) + extra - extra.detach(), leaf, build(name), generator=seeded()
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
    assert_close(run(name, logits, Model(), pull=pull)[1], pull.view(5, 1, 1) * gradient)


@pytest.mark.parametrize("name", gapped.estimators())
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_a_cost_may_write_into_its_input(name: str, dtype: torch.dtype) -> None:
    logits, weight = normal(5, 2, 2).to(dtype), normal(2, seed=2).to(dtype)

    def writing(z: Tensor) -> Tensor:
        costs = (z.mul_(weight).sum((-1, -2)) + 1) ** 2
        z.data.fill_(7.0)  # autograd does not see this one
        return costs

    expected = run(name, logits, lambda z: ((z * weight).sum((-1, -2)) + 1) ** 2)
    assert_equal(run(name, logits, writing), expected)


@every_score
def test_value_and_logits_may_be_changed_in_place(name: str) -> None:
    leaf = normal(5, 2, 3, dtype=torch.float32).requires_grad_()
    rows = leaf * 1
    value = gapped.expectation(Model(), rows, build(name), generator=seeded())
    rows.zero_()
    value *= 2
    expected = run(name, leaf.detach(), Model())[1]
    assert_close(torch.autograd.grad(value.sum(), leaf)[0], 2 * expected, 1e-5)


@pytest.mark.parametrize("name", [name for name in gapped.estimators("score") if name != "reinforce"])
def test_a_level_of_the_costs_hides_nothing(name: str) -> None:
    """Costs in float64 for logits in float32: at 1e9 their differences are below float32's resolution."""
    logits, gradients = normal(20, 2, 2, dtype=torch.float32), []
    for level in (0.0, 1e9):
        estimator, model = build(name), Model(2)
        if name == "nvil":
            estimator.mean.fill_(level)
        value, gradient = estimate(lambda z: model.cost(z) + level, logits, estimator)  # noqa: B023
        gradients.append(gradient)
        if name == "nvil":
            assert_close(estimator.mean, value.mean(), 1e-15)
    assert gradients[0].abs().max() > 1e-2
    assert_close(gradients[1], gradients[0], 1e-5)


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
    assert_equal(run(name, infinite, Model()), (value, gradient))


@pytest.mark.parametrize("name", [name for name in SCORES if name != "disarm-tree"])
def test_masking_equals_deleting(name: str) -> None:
    """With the noise of what is left: uniforms by rank for sticks, Gumbels by category, one uniform else."""
    wide, columns = torch.full((50, 5), 50.0).double(), torch.tensor([0, 2, 3])
    wide[:, columns] = normal(50, 3)
    mask = torch.zeros(5, dtype=torch.bool).index_fill(0, columns, True)
    estimator, model = build(name), Model(5)

    def narrow_cost(z: Tensor) -> Tensor:
        return model.cost(torch.zeros(*z.shape[:-1], 5).double().index_copy(-1, columns, z))

    wide_noise = [] if name == "exact" else estimator.draw(wide.masked_fill(~mask, -torch.inf), seeded())
    results = []
    for logits, f, how in ((wide, model.cost, {"mask": mask}), (wide[:, columns], narrow_cost, {})):
        noise = wide_noise if how else _narrow(name, wide_noise, columns)
        results.append(estimate(f, logits, with_noise(estimator, noise), **how))
    (value, gradient), (narrow_value, narrow_gradient) = results
    if name != "arsm":  # the mean over more swaps
        assert_close(value, narrow_value)
    assert_close(gradient[:, columns], narrow_gradient)
    assert (gradient[:, ~mask] == 0).all()


def _narrow(name: str, wide_noise: Any, columns: Tensor) -> Any:
    if name in ("rebar", "relax"):
        return type(wide_noise)(*(noise[..., columns] for noise in wide_noise))
    if name == "disarm-sticks":
        return wide_noise[..., 2:]
    if name == "arsm":
        return wide_noise[..., columns]
    return wide_noise if name == "exact" else torch.searchsorted(columns, wide_noise)


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
    estimator, logits = build(name), torch.zeros(0, 2, 3, requires_grad=True)
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


@every_score
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_dtypes(name: str, dtype: torch.dtype) -> None:
    """The cost sees the logits' dtype; the gradient is computed in float32 and rounded once."""
    logits, model = normal(6, 2, 3).to(dtype), Model()
    value, gradient = run(name, logits, model)
    assert {z.dtype for z in model.seen} == {dtype}
    assert gradient.dtype == dtype
    _, exact = run(name, logits.float(), Model())
    # Relaxed samples are rounded on their way to the cost, slopes on their way back.
    if name not in ("muprop", "rebar", "relax", "double-cv"):
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
    assert_equal(*(run(name, logits, Model(), seed=4) for _ in range(2)))
    assert torch.equal(torch.get_rng_state(), state)
    leaf = logits.clone().requires_grad_()
    values = [gapped.expectation(Model(), leaf, build(name)) for _ in range(8)]
    assert torch.equal(torch.get_rng_state(), state) == (name == "exact")
    assert any(not torch.equal(value, values[0]) for value in values) == (name != "exact")


@every_score
def test_without_a_gradient_only_the_samples_are_evaluated(name: str) -> None:
    logits, model = normal(5, 2, 3), Model()
    estimator = build(name)
    value = gapped.expectation(model, logits, estimator, generator=seeded())
    assert [len(z) for z in model.seen] == calls_of(name)[: None if name == "exact" else 1]
    assert value.requires_grad
    with torch.no_grad():
        quiet = gapped.expectation(Model(), logits.requires_grad_(), estimator, generator=seeded())
    assert not quiet.requires_grad
    assert torch.equal(quiet, value)
    if isinstance(estimator, torch.nn.Module):
        with pytest.raises(GappedError, match="nothing to train on"):
            estimator.variance_loss()


@every_member
@pytest.mark.parametrize("mask", [None, torch.tensor([True, False, True])], ids=["free", "masked"])
def test_pathwise_estimators_are_used_as_they_are(name: str, mask: Tensor | None) -> None:
    logits, pull = normal(5, 2, 3), normal(5, seed=3)
    results = []
    for through in (True, False):
        leaf, model, how = logits.clone().requires_grad_(), Model(), {"mask": mask, "generator": seeded()}
        if through:
            value = gapped.expectation(model, leaf, gapped.estimator(name, tau=1.7), **how)
        else:
            value = model(FUNCTIONS[name](leaf.unsqueeze(0), 1.7, True, **how)).squeeze(0)
        gradients = torch.autograd.grad(value, [leaf, model.weight, model.outside], pull)
        results.append([value.detach(), *gradients])
    assert_equal(*results)


@every_setting
def test_enumeration_equals_the_oracle(theta: Tensor) -> None:
    assert_all_close(estimate(cost, theta, gapped.Exact()), oracle(theta))


def test_a_level_of_the_costs_does_not_hide_the_exact_value() -> None:
    logits, worth = normal(3, dtype=torch.float32), normal(3, seed=2)
    value = gapped.expectation(lambda z: z.double() @ worth + 1e9, logits, gapped.Exact()) - 1e9
    assert_close(value, (torch.softmax(logits.double(), -1) * worth).sum(), 1e-6)


@pytest.mark.parametrize("graph", [False, True])
def test_enumeration_in_several_calls(graph: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """One call and several agree, also for what the cost contains; memory is that of a few samples."""
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
        leaves = [leaf, model.weight, model.outside] if graph else [leaf]
        results.append([value.detach(), *torch.autograd.grad(value, leaves, pull)])
    for ours, theirs in zip(*results, strict=True):
        assert_close(ours, theirs, 1e-6)
        assert ours.abs().max() > 1e-2


def test_one_learning_signal_for_each_row_if_costs_have_no_variables() -> None:
    """Costs per variable make every variable an example of its own."""
    logits = normal(4, 3, 5)
    _, together = run("exact", logits, lambda z: z.square().sum(-1) * z[..., 0])
    _, alone = run("exact", logits.reshape(12, 5), lambda z: z.square().sum(-1) * z[..., 0])
    assert_close(together.reshape(12, 5), alone)


ODDS = normal(4, 3)


def shared_cost(gates: Tensor) -> Tensor:
    """Not additive: all gates of an example share it."""
    return (gates @ torch.arange(1.0, 4.0).double() - 2) ** 2


@pytest.mark.parametrize("name", [*MEMBERS, *gapped.estimators("score")])
def test_a_gate_is_a_pair_to_every_estimator(name: str) -> None:
    """The same noise for the logits (logit, 0), with a cost that reads the first entries."""
    estimator = MAKERS.get(name, lambda _: gapped.estimator(name))
    gates = estimate(shared_cost, ODDS, estimator(1), gates=True)
    pairs = torch.stack([ODDS, torch.zeros_like(ODDS)], -1)
    value, gradient = estimate(lambda z: shared_cost(z[..., 0]), pairs, estimator(1))
    assert_all_close(gates, (value, gradient[..., 0]), 1e-10)


@pytest.mark.parametrize("estimator", ["disarm", "rloo", "exact", "gst", "arsm"])
def test_masks_certain_gates_and_shapes(estimator: str) -> None:
    """A masked gate is 0, one of infinite odds is certain, and both get a gradient of exactly 0."""
    odds = ODDS.clone()
    odds[0, 0], odds[1, 0], odds[2, 0] = torch.inf, -torch.inf, torch.nan
    mask = torch.ones(4, 3, dtype=torch.bool)
    mask[2, 0] = False
    seen = []

    def watched(gates: Tensor) -> Tensor:
        seen.append(gates.detach().clone())
        return shared_cost(gates)

    value, gradient = estimate(watched, odds, estimator, gates=True, mask=mask)
    assert value.shape == (4,)
    for gates in seen:
        assert gates.shape[1:] == (4, 3)
        assert ((gates == 0) | (gates == 1)).all()
        assert (gates[:, 0, 0] == 1).all()
        assert (gates[:, 1:3, 0] == 0).all()
    assert (gradient[:3, 0] == 0).all()
    assert gradient.isfinite().all()
    scalar = torch.zeros((), requires_grad=True)
    gapped.expectation(lambda b: (b - 0.3) ** 2, scalar, estimator, gates=True).backward()
    assert scalar.grad.shape == ()


def test_errors_of_gates() -> None:
    for how, message in (
        ({"gates": 1}, "gates: got 1, expected True or False"),
        ({"gates": True, "mask": torch.ones(4, 2, dtype=torch.bool)}, "mask: got a tensor of shape"),
    ):
        with pytest.raises(GappedError, match=message):
            gapped.expectation(shared_cost, ODDS, "rloo", **how)
    with pytest.raises(GappedError, match=r"f: got costs of shape \(1, 2, 4, 3\)|f: got costs of shape"):
        gapped.expectation(lambda b: b.sum(0), ODDS, "rloo", gates=True)
    with pytest.raises(GappedError, match="got 3 categories for DisARM"):
        gapped.expectation(lambda z: z.sum((-1, -2)), ODDS.unsqueeze(0), "disarm")
