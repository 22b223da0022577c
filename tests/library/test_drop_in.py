"""The place of `F.gumbel_softmax`: `eps`, shapes of temperatures, learned ones, and the replacement."""

from __future__ import annotations

import inspect
import math
import warnings
from contextlib import ExitStack, suppress
from typing import Any

import pytest
import torch
from conftest import (
    FUNCTIONS,
    KINDS,
    TAU,
    assert_all_close,
    assert_close,
    every_member,
    normal,
    pull,
    pulled,
    seeded,
)
from torch import Tensor
from torch.nn import functional as F
from variants import make

import gapped
from gapped import GappedError, simplex

K = 5
TORCHS = F.gumbel_softmax


@every_member
def test_eps_is_accepted_and_ignored(name: str) -> None:
    """As torch does: silently at its default, with a warning at any other value."""
    logits = normal(4, K)
    expected = FUNCTIONS[name](logits, TAU, True, generator=seeded())
    assert torch.equal(FUNCTIONS[name](logits, TAU, True, generator=seeded(), eps=1e-10), expected)
    for function in (FUNCTIONS[name], TORCHS):
        with pytest.warns(UserWarning, match=r"`eps` .* has no effect") as caught:
            result = function(logits, TAU, True, eps=1e-20)
        assert caught[0].filename == __file__
        assert result.shape == logits.shape


# A temperature with the category axis kept


LEVELS = [(name, level) for name, kind in KINDS.items() for level in kind.levels]


@pytest.mark.parametrize(("name", "level"), LEVELS)
@pytest.mark.parametrize("dim", [0, 1, 2, -1, -2])
def test_a_level_may_keep_the_category_axis(name: str, level: str, dim: int) -> None:
    logits, weight = normal(3, 4, K), normal(3, 4, K, seed=2)
    shape = logits.amin(dim).shape
    levels = 1 + torch.rand(shape, generator=seeded(3), dtype=torch.float64)
    plain = pull(make(name, **{level: levels}), logits, weight, dim=dim)
    kept = pull(make(name, **{level: levels.unsqueeze(dim)}), logits, weight, dim=dim)
    assert_all_close(kept, plain, 0.0)


@every_member
def test_the_number_of_axes_decides(name: str) -> None:
    """As many axes as the logits: the category axis is among them. Fewer: it is not, as ever."""
    logits, weight = normal(3, 3, K), normal(3, 3, K, seed=2)
    taus = torch.tensor([1.0, 2.0, 4.0], dtype=torch.float64)
    per_first = pull(make(name, tau=taus[:, None]), logits, weight)
    assert_all_close(pull(make(name, tau=taus[:, None, None]), logits, weight), per_first, 0.0)
    per_second = pull(make(name, tau=taus), logits, weight)
    assert_all_close(pull(make(name, tau=taus[None, :, None]), logits, weight), per_second, 0.0)
    assert not torch.equal(per_first[1], per_second[1])
    with pytest.raises(GappedError, match=r"tau: got a tensor of shape \(3, 1\)"):
        make(name, tau=taus[:, None]).sample(normal(2, 3, K))


def test_it_may_keep_it_in_expectations_choices_and_for_one_row() -> None:
    logits, taus = normal(4, K).requires_grad_(), torch.linspace(1, 2, 4)
    for use in (
        lambda e: gapped.expectation(lambda z: (z @ normal(K)) ** 2, logits, e, generator=seeded()),
        lambda e: e.choose(logits, generator=seeded()).select(normal(K)),
    ):
        results = [use(gapped.GST(tau)) for tau in (taus, taus.unsqueeze(-1))]
        gradients = [torch.autograd.grad(result.sum(), logits)[0] for result in results]
        assert torch.equal(*results)
        assert torch.equal(*gradients)
    row = gapped.gst(normal(K), torch.tensor([0.5]), generator=seeded())
    assert torch.equal(row, gapped.gst(normal(K), 0.5, generator=seeded()))


def in_torch(
    logits: Tensor, tau: Tensor, hard: bool, dim: int = -1, generator: torch.Generator | None = None
) -> Tensor:
    """Torch's own expression, with the noise that our sample draws with the categories last."""
    rows = logits.detach().movedim(dim, -1).contiguous()
    soft = ((logits + simplex.gumbel(rows, generator).movedim(-1, dim)) / tau).softmax(dim)
    if not hard:
        return soft
    return torch.zeros_like(soft).scatter(dim, soft.argmax(dim, keepdim=True), 1.0) - soft.detach() + soft


@pytest.mark.parametrize("hard", [True, False])
@pytest.mark.parametrize("shape", [(), (1,), (30,), (30, 1)], ids=str)
def test_a_learned_temperature(hard: bool, shape: tuple[int, ...]) -> None:
    functions = (
        lambda x, tau: gapped.gumbel_softmax(x, tau, hard),
        lambda x, tau: in_torch(x, tau if shape == (30, 1) else tau.unsqueeze(-1), hard),
    )
    inputs = normal(30, K), (0.5 + normal(30).abs())[: math.prod(shape)].view(shape)
    ours, theirs = (pulled(function, *inputs) for function in functions)
    assert_all_close(ours, theirs, 1e-12)
    assert (ours[2] != 0).all()


def test_a_learned_temperature_with_a_mask_without_logits_to_learn_and_in_blocks() -> None:
    mask = torch.tensor([True, False, True, True, True])
    logits, tau = normal(50_000, K), torch.tensor(0.7, dtype=torch.float64, requires_grad=True)
    sample = gapped.gumbel_softmax(logits, tau, mask=mask, generator=seeded())
    (slope,) = torch.autograd.grad(sample, tau, normal(50_000, K, seed=2))
    other = tau.detach().clone().requires_grad_()
    # Blocks draw their noise one after the other, and their shares of the gradient add up.
    soft = gapped.gumbel_softmax(logits, 0.7, mask=mask, generator=seeded())
    scores = (0.7 * soft[:, mask].log() / other).softmax(-1)
    (expected,) = torch.autograd.grad(scores, other, normal(50_000, K, seed=2)[:, mask])
    assert_close(slope, expected, 1e-9)
    assert_close(sample.detach(), soft.detach(), 0.0)


def test_a_learned_temperature_in_half_precision_and_without_gradients() -> None:
    tau = torch.ones((), requires_grad=True)
    sample = gapped.gumbel_softmax(normal(20, K, dtype=torch.bfloat16), tau, True)
    assert sample.dtype == torch.bfloat16
    (sample * torch.arange(K)).sum().backward()
    assert tau.grad.dtype == torch.float32
    assert tau.grad.abs() > 0
    with torch.no_grad():
        assert not gapped.gumbel_softmax(normal(20, K), tau, True).requires_grad
    with pytest.raises(GappedError, match="tau: got a tensor that requires grad, expected one without"):
        gapped.GumbelSoftmax(tau).choose(normal(20, K))
    logits = normal(4, K).requires_grad_()
    cost = gapped.gumbel_softmax(logits, tau, generator=seeded()).square().sum()
    (slope,) = torch.autograd.grad(cost, tau, create_graph=True)
    with pytest.raises(RuntimeError, match="twice"):
        slope.backward()


def test_the_replacement_has_torchs_signature() -> None:
    with gapped.replacing_torch():
        assert F.gumbel_softmax is not TORCHS
        ours, theirs = (inspect.signature(f).parameters for f in (F.gumbel_softmax, TORCHS))
        F.gumbel_softmax(normal(K), hard=True)
    assert [(p.name, p.kind, p.default) for p in ours.values()] == [
        (p.name, p.kind, p.default) for p in theirs.values()
    ]
    assert F.gumbel_softmax is TORCHS


@pytest.mark.parametrize(
    ("estimator", "arguments", "expected"),
    [
        (None, (0.5, True), gapped.GapMax()),
        ("gst", (), gapped.GST(hard=False)),
        ("gst", (0.5, True, 1e-10, 0), gapped.GST()),
        ("gumbel-softmax", (0.5, True), gapped.GumbelSoftmax(0.5)),
        ("gumbel-softmax:tau=0.7", (0.5, True), gapped.GumbelSoftmax(0.7)),
        ("gst:gap=1.2,tau=0.7", (0.5, True), gapped.GST(0.7, gap=1.2)),
        ("gst:hard=True", (0.5,), gapped.GST()),
        (gapped.GST(gap=1.2, hard=False), (0.5, True), gapped.GST(gap=1.2)),
        (gapped.GumbelRao(samples=3), (2, 1), gapped.GumbelRao(samples=3)),
    ],
    ids=str,
)
def test_a_call_decides_what_the_estimator_leaves_open(
    estimator: Any, arguments: tuple[Any, ...], expected: gapped.Pathwise
) -> None:
    """The estimator is the given one at the call's temperature, `hard` and axis; noise is the default one."""
    logits, dim = normal(4, K), arguments[3] if len(arguments) > 3 else -1
    torch.manual_seed(3)
    with gapped.replacing_torch(estimator):
        sample = F.gumbel_softmax(logits, *arguments)
    torch.manual_seed(3)
    assert torch.equal(sample, expected.sample(logits, dim=dim))


def test_the_replacement_is_nested_and_ends_with_an_error_too() -> None:
    with gapped.replacing_torch("gst"):
        outer = F.gumbel_softmax
        with suppress(ZeroDivisionError), gapped.replacing_torch("reinmax"):
            assert F.gumbel_softmax is not outer
            raise ZeroDivisionError
        assert F.gumbel_softmax is outer
        F.gumbel_softmax(normal(K))
    assert F.gumbel_softmax is TORCHS


def test_contexts_that_overlap_leave_torchs_function_behind() -> None:
    """They end in the order in which they began, as those of two threads may."""
    first, second = ExitStack(), ExitStack()
    first.enter_context(gapped.replacing_torch("gst"))
    second.enter_context(gapped.replacing_torch("reinmax"))
    last = F.gumbel_softmax
    last(normal(K), hard=True)
    with pytest.warns(UserWarning, match="was not called"):
        first.close()
    assert F.gumbel_softmax is last, "the one that began last is in force"
    second.close()
    assert F.gumbel_softmax is TORCHS


def test_a_context_that_served_no_call_warns() -> None:
    imported = F.gumbel_softmax
    message = "replacing_torch: F.gumbel_softmax was not called"
    with pytest.warns(UserWarning, match=message) as caught, gapped.replacing_torch("gst"):
        imported(normal(K))
    assert caught[0].filename == __file__
    with warnings.catch_warnings(), suppress(ZeroDivisionError):
        warnings.simplefilter("error")
        with gapped.replacing_torch("gst"), gapped.replacing_torch("reinmax"):
            F.gumbel_softmax(normal(K), hard=True)
        with gapped.replacing_torch("gst"):
            raise ZeroDivisionError


@pytest.mark.parametrize("hard", [True, False])
@pytest.mark.parametrize("dim", [-1, 0, 1])
@pytest.mark.parametrize(
    "shape", [(), (1,), (3, 1), (3, 3, 1), (1, 3, 1), (1, 3), (3, 1, 1), (3, 1, 3)], ids=str
)
def test_a_temperature_broadcasts_as_torchs_does(shape: tuple[int, ...], dim: int, hard: bool) -> None:
    """Against the logits with their category axis, along which it must not vary."""
    tau = (1 + torch.rand(shape, generator=seeded(3), dtype=torch.float64)).expand(shape)
    aligned = (1,) * (3 - len(shape)) + shape
    logits = normal(3, 3, 3)
    if aligned[dim] != 1:
        message = r"tau: got a tensor of shape .*, of size 1 on the category axis"
        with pytest.raises(GappedError, match=message), gapped.replacing_torch("gumbel-softmax"):
            F.gumbel_softmax(logits, tau, hard, dim=dim)
        return
    with gapped.replacing_torch("gumbel-softmax"):
        ours = pulled(lambda x: F.gumbel_softmax(x, tau, hard, dim=dim), logits)
    assert_all_close(ours, pulled(lambda x: in_torch(x, tau, hard, dim), logits), 1e-12)


@pytest.mark.parametrize("estimator", ["rloo", "gts", gapped.RLOO(), 3], ids=str)
def test_nothing_is_replaced_by_a_wrong_estimator(estimator: Any) -> None:
    with pytest.raises(GappedError, match="estimator: got"), gapped.replacing_torch(estimator):
        pass
    assert F.gumbel_softmax is TORCHS
