"""Expectations under compilers, function transforms, autocast and activation checkpointing."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from conftest import assert_all_close, assert_close, assert_equal, normal
from score_problems import (
    SCORES,
    Model,
    Sum,
    build,
    build_trainable,
    every_score,
    run,
    square,
    square_of_first,
    through_argmax,
)
from torch import Tensor
from torch.utils.checkpoint import checkpoint

import gapped
from gapped import GappedError


def evaluated(name: str) -> Any:
    """The estimator without a state that changes."""
    estimator = build(name)
    return estimator.eval() if isinstance(estimator, torch.nn.Module) else estimator


@every_score
def test_function_transforms_give_the_same_gradient(name: str) -> None:
    """A map over runs, differentiated inside and outside: each has its own noise, and the plain gradient."""
    logits, estimator = normal(6, 40, 2, 3), evaluated(name)
    value = partial(gapped.expectation, square_of_first, estimator=estimator)
    slope = torch.func.grad(lambda leaf: value(leaf).sum())
    torch.manual_seed(0)
    inside = torch.func.vmap(slope, randomness="different")(logits)
    assert inside.shape == logits.shape
    assert inside.abs().amax((1, 2, 3)).min() > 0
    torch.manual_seed(0)
    leaf = logits.clone().requires_grad_()
    torch.func.vmap(value, randomness="different")(leaf).sum().backward()
    assert_close(leaf.grad, inside)
    torch.manual_seed(0)
    single = slope(logits[0])
    torch.manual_seed(0)
    leaf = logits[0].clone().requires_grad_()
    assert_close(single, torch.autograd.grad(value(leaf).sum(), leaf)[0])
    if name == "exact":
        assert_close(inside[0], single)


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
    frozen = gapped.REBAR().eval()
    with pytest.raises(GappedError, match="f: got costs without a derivative"):
        torch.func.grad(lambda x: gapped.expectation(through_argmax, x, frozen).sum())(normal(5, 2, 3))


@pytest.mark.slow_if(lambda name: name in ("nvil", "rodeo", "relax", "disarm-sticks", "exact"))
@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
@pytest.mark.filterwarnings("ignore:.*torch.jit.* is deprecated")
@every_score
def test_compiled_equals_eager(name: str) -> None:
    """In one graph; also what is left for training, the memory, and a cost that writes into its samples."""
    torch._dynamo.reset()

    def cost(z: Tensor) -> Tensor:
        return square_of_first(z.mul_(2.0) if name in ("rloo", "double-cv", "muprop") else z)

    def results(is_compiled: bool) -> list[Tensor]:
        torch.manual_seed(0)
        estimator, context = build_trainable(name)
        objective = partial(gapped.expectation, cost, estimator=estimator, **context)
        if is_compiled:
            objective = torch.compile(objective, backend="aot_eager", fullgraph=True)
        leaf = normal(5, 2, 3).requires_grad_()
        value = objective(leaf)
        return [value.detach(), torch.autograd.grad(value.sum(), leaf)[0], *state_of(estimator)]

    assert_all_close(results(True), results(False))


def state_of(estimator: Any) -> list[Tensor]:
    """The state of an estimator: its memory, and the loss that it left behind with its slopes."""
    if not isinstance(estimator, torch.nn.Module):
        return []
    loss, parameters = estimator.variance_loss(), list(estimator.parameters())
    slopes = torch.autograd.grad(loss, parameters)
    return [loss.detach(), *slopes, *(buffer.clone() for buffer in estimator.buffers())]


@every_score
@pytest.mark.parametrize("reentrant", [False, True])
def test_activation_checkpointing_counts_a_call_once(name: str, reentrant: bool) -> None:
    """Two steps. Without reentry two calls share the estimator before the backward pass of both."""

    def results(checkpointed: bool) -> list[Tensor]:
        torch.manual_seed(0)
        estimator, context = build_trainable(name)
        leaf, weight = normal(5, 2, 3).requires_grad_(), normal(3, seed=2).requires_grad_()

        def call(x: Tensor) -> Tensor:
            cost = lambda z: ((z * weight).sum((-1, -2)) + 1) ** 2  # noqa: E731
            return gapped.expectation(cost, 1.0 * x, estimator, **context)

        layer = partial(checkpoint, call, use_reentrant=reentrant) if checkpointed else call
        for _ in range(2):
            torch.stack([layer(leaf) for _ in range(1 if reentrant else 2)]).sum().backward()
        return [leaf.grad, weight.grad, *state_of(estimator)]

    assert_all_close(results(True), results(False))


@every_score
def test_autocast_does_not_round_the_estimate(name: str) -> None:
    logits = normal(5, 2, 3, dtype=torch.float32)
    plain = run(name, logits, Model())
    with torch.autocast("cpu", torch.bfloat16):
        assert_equal(run(name, logits, Model()), plain)


def linear(hidden: Tensor, generator: torch.Generator | None) -> Any:
    return gapped.linear_choice(hidden, torch.eye(8).double(), generator=generator)


def routed(router: gapped.nn.Router, hidden: Tensor, generator: torch.Generator | None) -> Tensor:
    """A layer whose experts do nothing; the logits are its tokens."""
    router.projection.weight.data = normal(4, 8, seed=3)
    return router.double()(hidden, generator=generator).run([torch.nn.Identity()] * 4, hidden)


# Every way to draw, from logits ``(5, 8)``.
DRAWS: dict[str, Callable[[Tensor, torch.Generator | None], Tensor]] = {
    "sample": lambda x, g: gapped.GST().sample(x, generator=g),
    "choose": lambda x, g: gapped.GST().choose(x, generator=g).gate(),
    "mix": lambda x, g: gapped.GST().mix(x, torch.ones(8), generator=g),
    "gate": lambda x, g: gapped.gate(x, generator=g),
    "choices": lambda x, g: gapped.choose(x, k=2, generator=g).weights(),
    "sequence": lambda x, g: gapped.choose(x, k=2, law="sequential", generator=g).select(torch.eye(8).to(x)),
    "router": lambda x, g: routed(gapped.nn.Router(8, 4, k=2, others="zero"), x, g),
    "mixer": lambda x, g: routed(gapped.nn.Router(8, 4, k=2, estimator=gapped.nn.SparseMixer()), x, g),
    "subset": lambda x, g: gapped.subset(x, 2, generator=g),
    "nm_mask": lambda x, g: gapped.nm_mask(x, 2, 4, generator=g),
    "linear log_prob": lambda x, g: linear(x, g).log_prob,
    "linear entropy": lambda x, g: linear(x, g).entropy,
    "linear gate": lambda x, g: linear(x, g).gate(),
    "linear select": lambda x, g: linear(x, g).select(torch.eye(8).double()),
    "counts": lambda x, g: gapped.counts.poisson(x, generator=g),
    "pathwise": lambda x, g: gapped.expectation(square, x.unflatten(-1, (2, 4)), "gst", generator=g),
    "score": lambda x, g: gapped.expectation(square, x.unflatten(-1, (2, 4)), "rloo", generator=g),
    "subsets.expectation": lambda x, g: gapped.subsets.expectation(lambda s: s[..., 0], x, 2, generator=g),
}


@pytest.mark.parametrize("use", DRAWS)
@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointing_refuses_a_generator_that_it_does_not_wind_back(use: str, reentrant: bool) -> None:
    """Without one the repeated forward pass draws the same, and so does what follows."""

    def layer(logits: Tensor, generator: torch.Generator | None) -> Tensor:
        value = DRAWS[use](logits, generator)
        return value * torch.nn.functional.dropout(torch.ones_like(value))

    logits = normal(5, 8).requires_grad_()
    value = checkpoint(layer, logits, torch.Generator(), use_reentrant=reentrant)
    with pytest.raises(GappedError, match=r"generator: got a torch.Generator under torch.utils.checkpoint"):
        value.sum().backward()
    results = []
    for call in (layer, partial(checkpoint, layer, use_reentrant=reentrant)):
        torch.manual_seed(0)
        leaf = normal(5, 8).requires_grad_()
        value = call(leaf, None)
        value.sum().backward()
        results.append((value.detach(), leaf.grad))
    assert_equal(*results)


@pytest.mark.parametrize("linear_cost", [True, False])
@pytest.mark.parametrize("use", [*DRAWS, *SCORES])
def test_no_draw_is_differentiated_twice(use: str, linear_cost: bool) -> None:
    leaf = normal(5, 8).requires_grad_()
    if use in SCORES:
        value = gapped.expectation(square, leaf[:, :6].unflatten(-1, (2, 3)), build(use))
    else:
        value = DRAWS[use](leaf, None)
    cost = value.sum() if linear_cost else value.square().sum()
    (gradient,) = torch.autograd.grad(cost, leaf, create_graph=True)
    with pytest.raises(RuntimeError, match="cannot be differentiated twice"):
        (gradient.square().sum() + leaf.sum()).backward()
