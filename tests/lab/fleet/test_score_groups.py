"""Score-function estimators in fleets: beside pathwise ones, and with a state for each run."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from conftest import assert_all_close, assert_close, normal, seeded
from toy_tasks import (
    CPU,
    DOUBLE,
    EPOCHS,
    VAE_TINY,
    checkpoint,
    equal,
    resumed_twins,
    toy_images,
    train,
    weights,
)
from toy_tasks import vae_trainer as fleet

import gapped
from gapped.errors import GappedError
from gapped_lab.fleet import Run, Trainer
from gapped_lab.fleet.estimator_groups import Grouped, Part, Widths
from gapped_lab.tasks.vae import VAETask

PATHWISE = [gapped.GST(tau=0.5, gap=0.8), gapped.GST(tau=1.0), gapped.ReinMax()]
SCORE = [gapped.RLOO(2), gapped.RLOO(2), gapped.DisARMTree(), gapped.MuProp()]
STATEFUL: dict[str, dict[str, Any]] = {
    "nvil": {},
    "nvil-network": {"network": 6},
    "rebar": {"eta": 0.5},
    "double-cv": {},
    "rodeo": {"hidden": 5, "alpha": 0.2, "beta": 0.1},
    "relax": {"network": 6, "tau": 0.7},
}


def stateful(name: str) -> Any:
    return gapped.estimator(name.removesuffix("-network"), **STATEFUL[name])


def test_pathwise_runs_start_as_they_would_alone():
    """They come first, so that their first step sees the noise that it would see without the others."""
    both = fleet([Run(e, 3e-3) for e in PATHWISE + SCORE], [5] * 7)
    alone = fleet([Run(e, 3e-3) for e in PATHWISE], [5] * 3)
    for trainer in (both, alone):
        trainer.train_steps(1)
    assert_close(both.loss_sum[:3], alone.loss_sum, 1e-13)
    for run in range(3):
        assert_all_close(weights(both.task.model, run), weights(alone.task.model, run), 1e-12)


@pytest.mark.parametrize("name", STATEFUL)
def test_a_run_s_state_does_not_depend_on_its_neighbours(name):
    """The neighbour's learning rate changes everything about it, and nothing about the first run."""

    def fresh(rate: float) -> Trainer:
        return fleet([Run(stateful(name), 3e-3), Run(stateful(name), rate)], [5, 6])

    one, other = fresh(1e-3), fresh(5e-2)
    for trainer in (one, other):
        train(trainer)
    (part, first, _), (_, second, _) = one.tuned[0], other.tuned[0]
    assert part == Part(0, 2)
    states = {k: (v, second.state_dict()[k]) for k, v in first.state_dict().items() if v.dim()}
    assert states
    for key, (mine, theirs) in states.items():
        assert torch.equal(mine[0], theirs[0]), key
    assert any(not torch.equal(mine[1], theirs[1]) for mine, theirs in states.values())
    assert equal(weights(one.task.model, 0), weights(other.task.model, 0))
    start = fresh(3e-3).tuned[0][1].state_dict()
    assert any(not torch.equal(start[key][0], mine[0]) for key, (mine, _) in states.items())


def test_memories_are_kept_run_by_run():
    grouped = Grouped.of([gapped.NVIL(), gapped.NVIL()], 2, CPU, DOUBLE)
    level = torch.tensor([[1.0], [100.0]], dtype=DOUBLE)
    plain = [gapped.NVIL(), gapped.NVIL()]
    logits = normal(2, 6, 3, 5).requires_grad_()
    for step in range(3):
        costs = level * (1 + step + normal(2, 6, seed=step))
        grouped.expectation(lambda z, part, costs=costs: costs + 0 * z.sum((-2, -1)), logits, seeded())
        for run, estimator in enumerate(plain):
            own = costs[run : run + 1]
            gapped.expectation(lambda z, own=own: own + 0 * z.sum((-2, -1)), logits[run : run + 1], estimator)
    stack = grouped.groups[0][2]
    for run, estimator in enumerate(plain):
        assert stack.mean[run].item() == pytest.approx(estimator.mean.item(), rel=1e-5)
        assert stack.variance[run].item() == pytest.approx(estimator.variance.item(), rel=1e-5)


@pytest.mark.parametrize("name", STATEFUL)
def test_estimators_with_a_state_resume_from_a_checkpoint(name):
    def fresh() -> Trainer:
        runs = [Run(gapped.GST(tau=0.5), 3e-3), *(Run(stateful(name), r) for r in (3e-3, 1e-2))]
        return fleet(runs, [5, 5, 6])

    whole, second = resumed_twins(fresh, 2)
    assert second.history == whole.history
    mine, theirs = whole.tuned[0][1].state_dict(), second.tuned[0][1].state_dict()
    assert all(torch.equal(mine[key], theirs[key]) for key in mine)
    # The wrong twin: the model goes on, its estimator starts over.
    first, forgetful = fresh(), fresh()
    for _ in range(2):
        first.train_epoch()
    start = forgetful.state_dict()
    state = {**checkpoint(first)(), "estimators": start["estimators"], "tuners": start["tuners"]}
    forgetful.load_state_dict(state)
    forgetful.train_epoch()
    assert forgetful.history["train_negative_elbo"][2] != whole.history["train_negative_elbo"][2]


@pytest.mark.parametrize(
    ("estimator", "widths", "message"),
    [
        (gapped.RELAX(torch.nn.Identity()), Widths(4, 4), "network: got a network for RELAX, expected a"),
        (gapped.RELAX(5), None, "RELAX: this task does not say how wide"),
        (gapped.REBAR(eta=torch.ones(3)), None, "eta: got a tensor, expected a number for each run of REBAR"),
    ],
)
def test_what_cannot_be_stacked(estimator, widths, message):
    with pytest.raises(GappedError, match=message):
        Grouped.of([estimator], 2, CPU, DOUBLE, widths)


def test_runs_with_equally_many_samples_are_one_part_whether_they_need_slopes_or_not():
    """Each run's gradient is what it is without the other, from the same noise."""
    logits, table = normal(2, 4, 3, 5), normal(3, 5, seed=1)

    def cost(z: torch.Tensor, part: Part) -> torch.Tensor:
        return (z * table).sum((-2, -1)).exp()

    def slopes(groups: list[list[Any]]) -> tuple[torch.Tensor, list[Grouped]]:
        leaf, generator = logits.clone().requires_grad_(), seeded(3)
        samplers = [Grouped.of(group, 2, CPU, DOUBLE) for group in groups]
        shares = torch.split(leaf, [len(group) for group in groups])
        costs = [
            sampler.expectation(cost, own, generator) for sampler, own in zip(samplers, shares, strict=True)
        ]
        return torch.autograd.grad(torch.cat(costs).sum(), leaf)[0], samplers

    together, (sampler,) = slopes([[gapped.DoubleCV(2), gapped.RLOO(2)]])
    apart, _ = slopes([[gapped.DoubleCV(2)], [gapped.RLOO(2)]])
    assert sampler.parts() == (Part(0, 2, derivatives=1),)
    assert_close(together, apart, 1e-12)
    assert Grouped.of([gapped.DoubleCV(2), gapped.RLOO(3)], 2, CPU, DOUBLE).parts() == (
        Part(0, 1, derivatives=1),
        Part(1, 2),
    )


@pytest.mark.slow
@pytest.mark.filterwarnings(
    "ignore:.*deprecated:DeprecationWarning", "ignore:.*not a leaf Tensor:UserWarning"
)
def test_compiled_steps_equal_plain_ones():
    """Costs whose slopes an estimator takes first, the gradients made of these, and the estimators' Adam."""
    estimators = [gapped.GST(gap="auto"), gapped.DoubleCV(2), gapped.RLOO(2)]
    estimators += [gapped.RODEO(2, hidden=5), gapped.MuProp()]

    def trained(compiled: bool) -> Trainer:
        torch.compiler.reset()
        task = VAETask(VAE_TINY, toy_images(), [5, 6, 7, 8, 9], CPU, dtype=DOUBLE, compiled=compiled)
        trainer = Trainer(task, [Run(each, 3e-3) for each in estimators], EPOCHS, 77, CPU, compiled=compiled)
        trainer.train_steps(4)
        return trainer

    plain, compiled = trained(False), trained(True)
    assert_all_close(plain.parameters, compiled.parameters, 1e-9)
    for (_, mine, _), (_, theirs, _) in zip(plain.tuned, compiled.tuned, strict=True):
        for name, parameter in mine.named_parameters():
            assert_close(parameter, theirs.get_parameter(name), 1e-9)
