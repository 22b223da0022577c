"""A vmap over levels beside shared logits, differentiated outside: its gradient is that of a loop."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from conftest import INVERSE_CDF, MEMBERS, SOFT, USES, assert_close, every_member, normal, seeded
from forms import make
from torch import Tensor
from torch.autograd import forward_ad

import gapped

K = 5
LEVELS = torch.tensor([0.5, 1.0, 2.0, 3.0], dtype=torch.float64)
Draw = Callable[[Tensor, Tensor], Tensor]
"""``draw(logits, level)``: the sample, or what is made of it."""


def of_members(use: Callable[[Any, Tensor], Tensor], **options: Any) -> dict[str, Draw]:
    """A way to draw with every member, by its temperature."""

    def at(name: str) -> Draw:
        return lambda logits, tau: use(make(name, tau=tau, **options), logits)

    return {name: at(name) for name in MEMBERS}


def rsample(estimator: Any, logits: Tensor) -> Tensor:
    return gapped.distributions.OneHotCategorical(logits=logits, estimator=estimator).rsample()


def choices(estimator: Any, logits: Tensor) -> Tensor:
    """Two categories in turn, where the estimator needs no noise but theirs, else one."""
    k = 2 if estimator.name in INVERSE_CDF else 1
    return gapped.choose(logits, k, law="sequential", estimator=estimator).weights()


ROUTER = gapped.nn.Router(K, 4, k=2, capacity=2.0, others="zero").double()
ROUTER.projection.weight.data = normal(4, K, seed=8)


def routed(estimator: Any, logits: Tensor) -> Tensor:
    """A layer with experts; the tensor is its tokens."""
    ROUTER.estimator = estimator
    return ROUTER(logits).run(torch.tanh, logits)


TABLE, GROUPED, PRICES = normal(K, 2, seed=5), normal(3, K, 2, seed=6), normal(K, seed=7)


def cost(z: Tensor) -> Tensor:
    """Not linear, and different for each category."""
    return (z @ PRICES).square()


def expected_cost(estimator: Any, logits: Tensor) -> Tensor:
    return gapped.expectation(cost, logits, estimator)


WAYS: dict[str, dict[str, Draw]] = {
    "sample": of_members(lambda each, x: each.sample(x)),
    "gate": of_members(lambda each, x: each.gate(x)),
    "choice-gate": of_members(lambda each, x: each.choose(x).gate()),
    "select": of_members(lambda each, x: each.choose(x).select(TABLE)),
    "grouped-select": of_members(lambda each, x: each.choose(x).select(GROUPED)),
    "mask": of_members(lambda each, x: each.sample(x, mask=TABLE[:, 0] < 0.5)),
    "argmax": of_members(lambda each, x: each.sample(x), draw="argmax"),
    "rsample": of_members(rsample),
    "choices": of_members(choices),
    "expectation": of_members(expected_cost),
}
OTHERS: dict[str, Draw] = {
    "gap": lambda x, gap: gapped.gst(x, 0.7, True, gap=gap),
    "gap-function": lambda x, c: gapped.gst(x, 0.7, True, gap=lambda p: c * (1 - p)),
    "nz-gap": lambda x, gap: gapped.gst(x, 0.7, True, gap=gap, detach=False),
    "smoothing": lambda x, s: gapped.mve(x, 0.7, smoothing=s),
    "tau-forward": lambda x, tau: gapped.estimator("decoupled", tau_forward=tau).sample(x),
    "subset": lambda x, tau: gapped.subset(x, 2, tau),
    "gst-subset": lambda x, gap: gapped.subset(x, 2, estimator=gapped.GST(gap=gap)),
    "nm-mask": lambda x, tau: gapped.nm_mask(x[..., :4], 2, 4, tau),
    "rebar": lambda x, eta: expected_cost(gapped.REBAR(eta=eta).eval(), x),
    "double-cv": lambda x, alpha: expected_cost(gapped.DoubleCV(alpha=alpha).eval(), x),
    "soft-mix": lambda x, tau: gapped.GST(tau).mix(x, TABLE),
    **{f"soft-{n}": lambda x, tau, n=n: make(n, tau=tau, hard=False).sample(x) for n in SOFT},
    "set-weights": lambda x, gap: gapped.choose(x, 2, estimator=gapped.GST(gap=gap)).weights(),
    "set-gate": lambda x, tau: gapped.choose(x, 2, estimator=gapped.StraightThrough(tau)).gate(),
    "set-select": lambda x, tau: gapped.choose(x, 2, estimator=gapped.GST(tau, gap=1.0)).select(TABLE),
    "sequence-select": lambda x, tau: gapped.choose(
        x, 2, law="sequential", estimator=gapped.StraightThrough(tau)
    ).select(TABLE),
    "router": lambda x, tau: routed(gapped.StraightThrough(tau), x),
    "router-gap": lambda x, gap: routed(gapped.GST(gap=gap), x),
}


def check(draw: Draw, shared_weight: bool) -> None:
    """`randomness="same"` uses the noise of a loop that replays the seed, inside of a transform as well."""
    logits = normal(3, K)
    one = torch.func.vmap(draw, (None, 0), randomness="same")
    torch.manual_seed(0)
    values = one(logits, LEVELS)
    shape = values.shape[1:] if shared_weight else values.shape
    weight = normal(*shape, seed=2).expand_as(values)

    def total(leaf: Tensor) -> Tensor:
        return (one(leaf, LEVELS) * weight).sum()

    def single(leaf: Tensor, level: Tensor, own: Tensor) -> Tensor:
        return (torch.func.vmap(draw, (None, 0), randomness="same")(leaf, level[None])[0] * own).sum()

    expected = []
    for level, own in zip(LEVELS, weight, strict=True):
        torch.manual_seed(0)
        expected.append(torch.func.grad(single)(logits, level, own))
    assert sum(expected).any()
    torch.manual_seed(0)
    assert_close(torch.func.grad(total)(logits), sum(expected), 1e-12)
    leaf = logits.clone().requires_grad_()
    torch.manual_seed(0)
    assert_close(torch.autograd.grad(one(leaf, LEVELS), leaf, weight)[0], sum(expected), 1e-12)


@every_member
@pytest.mark.parametrize("shared_weight", [True, False])
@pytest.mark.parametrize("way", WAYS)
def test_a_vmap_over_temperatures_has_the_gradient_of_a_loop(
    name: str, way: str, shared_weight: bool
) -> None:
    check(WAYS[way][name], shared_weight)


@pytest.mark.filterwarnings("ignore:torch.searchsorted")
@pytest.mark.parametrize("shared_weight", [True, False])
@pytest.mark.parametrize("name", OTHERS)
def test_a_vmap_over_other_levels_has_the_gradient_of_a_loop(name: str, shared_weight: bool) -> None:
    check(OTHERS[name], shared_weight)


@pytest.mark.parametrize("name", [n for n in gapped.estimators() if n not in MEMBERS])
def test_a_vmap_over_constants_of_the_cost_has_the_gradient_of_a_loop(name: str) -> None:
    """The gradient of a score-function estimator depends on all that the cost depends on."""
    estimator, gates = gapped.estimator(name), name == "disarm"

    def draw(logits: Tensor, level: Tensor) -> Tensor:
        return gapped.expectation(lambda z: (z @ PRICES - level) ** 2, logits, estimator, gates=gates)

    if isinstance(estimator, torch.nn.Module):
        # Networks get their width from an ordinary call.
        draw(normal(3, K).requires_grad_(), LEVELS[0])
        estimator.eval()
    check(draw, False)


def test_eager_code_agrees_with_the_loop_inside_of_a_transform() -> None:
    """The oracle above is itself right: nothing is random here."""
    logits, weight = normal(3, K), normal(3, K, seed=2)

    def total(leaf: Tensor) -> Tensor:
        draw = torch.func.vmap(lambda tau: gapped.straight_through(leaf, tau, True, draw="argmax"))
        return (draw(LEVELS) * weight).sum()

    p = [torch.softmax(logits / tau, -1) for tau in LEVELS]
    rows = [q * (weight - (q * weight).sum(-1, keepdim=True)) / tau for q, tau in zip(p, LEVELS, strict=True)]
    assert_close(torch.func.grad(total)(logits), sum(rows), 1e-12)


EVERY: dict[str, Draw] = {
    **{f"{way} {name}": draw for way, members in WAYS.items() for name, draw in members.items()},
    **OTHERS,
    "expectation arsm": lambda x, _: expected_cost(gapped.ARSM(), x),
}
# A gate is 1 whatever is drawn, and a softmax is drawn from nothing; these may be either.
STILL = ("set-gate", "soft-straight-through", "choice-gate", "grouped-select", "mask", "argmax", "choices")


# torch's rule for searchsorted expands what it is given.
@pytest.mark.filterwarnings("ignore:torch.searchsorted")
@pytest.mark.parametrize("name", EVERY)
def test_different_randomness_over_levels(name: str) -> None:
    """Logits that are no batch get a draw for each level."""
    logits = normal(3, K)  # made outside: what is drawn inside is a batch
    draw = torch.func.vmap(lambda level: EVERY[name](logits, level), randomness="different")
    values = draw(torch.ones(40, dtype=torch.float64))
    assert values.shape[0] == 40
    assert values.isfinite().all()
    assert name.startswith(STILL) or len(values.flatten(1).unique(dim=0)) > 1


@pytest.mark.filterwarnings("ignore:.*torch.jit.* is deprecated")
@every_member
@pytest.mark.parametrize("inside", [False, True])
def test_forward_derivatives_by_levels_are_refused(name: str, inside: bool) -> None:
    logits, one = normal(3, K), torch.ones((), dtype=torch.float64)
    for level in type(gapped.estimator(name)).levels:

        def draw(value: Tensor, level: str = level) -> Tensor:
            return gapped.estimator(name, **{level: value}).sample(logits)

        function, at = (torch.func.vmap(draw, randomness="same"), LEVELS) if inside else (draw, one)
        with pytest.raises((NotImplementedError, gapped.GappedError), match=r"jvp|requires grad"):
            torch.func.jvp(function, (at,), (at,))
        with forward_ad.dual_level(), pytest.raises((NotImplementedError, gapped.GappedError)):
            draw(forward_ad.make_dual(one, one))


class Subclass(torch.Tensor):
    """As fastai's: all that is made of it is a view."""


@every_member
@pytest.mark.parametrize("use", USES)
def test_tensor_subclasses_train(name: str, use: str) -> None:
    gradients = []
    for kind in (torch.Tensor, Subclass):
        leaf = normal(4, K).as_subclass(kind).requires_grad_()
        output = USES[use](make(name), leaf, generator=seeded())
        (gradient,) = torch.autograd.grad(output.square().sum() + output.sum(), leaf)
        gradients.append(gradient.as_subclass(torch.Tensor))
    assert gradients[0].any()
    assert torch.equal(*gradients)


@pytest.mark.parametrize("use", ["gate", "log_prob", "entropy", "select"])
def test_a_large_vocabulary_takes_tensor_subclasses(use: str) -> None:
    """As hidden states, weight and table."""
    gradients = []
    for kind in (torch.Tensor, Subclass):
        leaves = [normal(n, K, seed=n).as_subclass(kind).requires_grad_() for n in (4, 6)]
        choice = gapped.linear_choice(*leaves, generator=seeded())
        values = {"gate": choice.gate, "select": lambda choice=choice, w=leaves[1]: choice.select(w)}
        output = values[use]() if use in values else getattr(choice, use)
        found = torch.autograd.grad(output.square().sum(), leaves)
        gradients.append([each.as_subclass(torch.Tensor) for each in found])
    assert gradients[0][0].any()
    assert all(map(torch.equal, *gradients))


BATCHES: dict[str, Draw] = {
    **{f"{name}-sample": lambda x, t, name=name: make(name).sample(x) for name in MEMBERS},
    **{f"{name}-gate": lambda x, t, name=name: make(name).gate(x) for name in MEMBERS},
    **{f"{name}-select": lambda x, t, name=name: make(name).choose(x).select(t) for name in MEMBERS},
    "grouped": lambda x, t: make("gst").choose(x).select(t.expand(x.shape[0], *t.shape).contiguous()),
    "mix": lambda x, t: make("gst").mix(x, t),
    "subset": lambda x, t: gapped.subset(x, 2),
    "linear-select": lambda x, t: gapped.linear_choice(x, t.mT @ t @ t.mT, estimator=make("gst")).select(
        t.mT
    ),
    "linear-log-prob": lambda x, t: gapped.linear_choice(x, t.mT).log_prob,
}


@pytest.mark.parametrize("rows", [8, 40_000])
@pytest.mark.parametrize("name", BATCHES)
def test_batches_of_gradients(name: str, rows: int) -> None:
    """`is_grads_batched`, which `jacobian(vectorize=True)` uses, equals one gradient after the other."""
    logits, table = normal(rows, 4).requires_grad_(), normal(4, 3, seed=3).requires_grad_()
    output = BATCHES[name](logits, table)
    weight = normal(2, *output.shape, seed=2)
    inputs = [each for each in (logits, table) if each is logits or "sel" in name or name == "mix"]
    batched = torch.autograd.grad(output, inputs, weight, retain_graph=True, is_grads_batched=True)
    loop = [torch.autograd.grad(output, inputs, own, retain_graph=True) for own in weight]
    for got, expected in zip(batched, zip(*loop, strict=True), strict=True):
        assert expected[0].any()
        assert_close(got, torch.stack(expected), 1e-12)


@pytest.mark.filterwarnings("ignore:.*should not be instantiated")
@pytest.mark.parametrize(
    "draw", [lambda x: gapped.gumbel_softmax(x), lambda x: expected_cost(gapped.ARSM(), x)]
)
def test_two_compiled_draws_differ(draw: Callable[[Tensor], Tensor]) -> None:
    torch.compiler.reset()
    run = torch.compile(lambda x: (draw(x), draw(x)), backend="aot_eager", fullgraph=True)
    one, other = run(normal(6, 3, K).requires_grad_())
    assert not torch.equal(one, other)
    torch.compiler.reset()
