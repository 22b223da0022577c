"""Expressions in which public code uses Gumbel-softmax today, beside what takes their place.

Rows are those of a survey of 23 repositories. The expression on the left is written anew in the form found
there; ours is on the right. Both are given the same noise, or the same category where the gradient depends on
no more, and must then agree in value and in every gradient. So they agree in law as well: noise is Gumbel's
and categories are drawn from the softmax on both sides, ours by `simplex.gumbel` and `simplex.draw_index`,
whose laws have tests of their own.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import pytest
import torch
from conftest import assert_all_close, assert_close, normal, pulled, seeded
from torch import Tensor
from torch.nn import functional as F

import gapped
from gapped import simplex

TAU, N, G, K, D = 0.7, 6, 2, 5, 3


def hot(scores: Tensor, dim: int = -1) -> Tensor:
    return torch.zeros_like(scores).scatter_(dim, scores.argmax(dim, keepdim=True), 1.0)


def gumbel_softmax(x: Tensor, noise: Tensor, tau: float, hard: bool = False, dim: int = -1) -> Tensor:
    """`F.gumbel_softmax`, given its noise."""
    soft = ((x + noise) / tau).softmax(dim)
    return hot(soft, dim) - soft.detach() + soft if hard else soft


@pytest.mark.parametrize("hard", [True, False])
@pytest.mark.parametrize("dim", [-1, 1])
def test_the_expression_is_torchs(hard: bool, dim: int) -> None:
    x = normal(4, 3, K, dtype=torch.float32)
    torch.manual_seed(0)
    theirs = F.gumbel_softmax(x, TAU, hard, dim=dim)
    assert_close(gumbel_softmax(x, simplex.gumbel(x, seeded()), TAU, hard, dim), theirs, 1e-6)


class Site(NamedTuple):
    """An expression of logits, noise and a table, and ours of logits and the table."""

    theirs: Callable[[Tensor, Tensor, Tensor], Tensor]
    ours: Callable[[Tensor, Tensor], Tensor]
    logits: tuple[int, ...] = (N, K)
    table: tuple[int, ...] = (K, D)
    dim: int = -1
    drawn: Callable[[Tensor], Tensor] = lambda x: x
    """The logits of the draw, where they are not the logits themselves."""
    noise: Callable[..., Tensor] = simplex.gumbel
    """For rows with categories on the last axis."""
    dtype: torch.dtype = torch.float64


def category(rows: Tensor, generator: torch.Generator) -> Tensor:
    """The one-hot category in the place of noise."""
    return F.one_hot(simplex.draw_index(rows, generator), rows.shape[-1]).to(rows.dtype)


def straight_through_reinmax(x: Tensor, drawn: Tensor) -> Tensor:
    """ReinMax as it stands inline in code with categories on axis 1."""
    mixed = (drawn + (x / TAU).softmax(1)) / 2
    first = ((mixed.log() - x).detach() + x).softmax(1)
    both = 2 * first - x.softmax(1) / 2
    return both - both.detach() + drawn


def logistic(rows: Tensor, generator: torch.Generator) -> Tensor:
    """The noise of gates: the difference of a pair of Gumbel variables."""
    noise = simplex.gumbel(rows.new_empty(*rows.shape, 2), generator)
    return noise[..., 0] - noise[..., 1]


def through(hard: Tensor, soft: Tensor) -> Tensor:
    """The straight-through form: one value, the other's gradient."""
    return hard - soft.detach() + soft


def relaxed_bernoulli(x: Tensor, noise: Tensor) -> Tensor:
    """As torch's class has it, which takes logistic noise as log u - log(1 - u)."""
    u = torch.sigmoid(noise)
    return ((u.log() - (-u).log1p() + x) / TAU).sigmoid()


def with_uniform(x: Tensor) -> Tensor:
    """World models give each category one percent of the uniform law."""
    return 0.99 * x.softmax(-1) + 0.01 / K


def noise_of_a_key(rows: Tensor, generator: torch.Generator) -> Tensor:
    """The noise of a call that draws a key first, and then all rows in one block."""
    key = torch.randint(2**62, (1,), generator=generator)
    return simplex.gumbel(rows, seeded(int(key)))


def gumbel(hard: bool = True) -> gapped.GumbelSoftmax:
    return gapped.GumbelSoftmax(TAU, hard=hard)


# A product of every code with its probability, summed: groups of codes, each with a table of its own.
WAV2VEC2 = Site(
    lambda x, g, t: (
        (gumbel_softmax(x.reshape(-1, K), g.view(-1, K), TAU, True).view(N, -1, 1) * t.reshape(1, G * K, D))
        .view(N, G, K, D)
        .sum(-2)
        .flatten(1)
    ),
    lambda x, t: gumbel().choose(x, generator=seeded()).select(t).flatten(1),
    logits=(N, G, K),
    table=(G, K, D),
)
# All groups share one table.
FAIRSEQ = Site(
    lambda x, g, t: (
        (gumbel_softmax(x.view(-1, K), g.view(-1, K), TAU, True).view(N, -1, 1) * t.repeat(G, 1).unsqueeze(0))
        .view(N, G, K, D)
        .sum(-2)
        .flatten(1)
    ),
    lambda x, t: gumbel().choose(x, generator=seeded()).select(t).flatten(1),
    logits=(N, G, K),
)
HALF = Site(
    lambda x, g, t: gumbel_softmax(x.float(), g, TAU, True).type_as(x) @ t,
    lambda x, t: gapped.gumbel_softmax(x, TAU, True, generator=seeded()) @ t,
    drawn=lambda x: x.float(),
    dtype=torch.bfloat16,
)
IMAGE = Site(
    lambda x, g, t: torch.einsum("bnhw,nd->bdhw", gumbel_softmax(x, g, TAU, True, dim=1), t),
    lambda x, t: gumbel().choose(x, dim=1, generator=seeded()).select(t).movedim(-1, 1),
    logits=(2, K, 3, 2),
    dim=1,
)
SOFT_IMAGE = IMAGE._replace(
    theirs=lambda x, g, t: torch.einsum("bnhw,nd->bdhw", gumbel_softmax(x, g, TAU, dim=1), t),
    ours=lambda x, t: torch.einsum(
        "bnhw,nd->bdhw", gapped.gumbel_softmax(x, TAU, dim=1, generator=seeded()), t
    ),
)
PLAIN = Site(
    lambda x, g, t: gumbel_softmax(x, g, TAU, True) @ t,
    lambda x, t: gumbel().choose(x, generator=seeded()).select(t),
)
SOFT = Site(
    lambda x, g, t: gumbel_softmax(x, g, TAU) @ t,
    lambda x, t: gapped.gumbel_softmax(x, TAU, generator=seeded()) @ t,
)
KEPT = Site(
    lambda x, g, t: gumbel_softmax(x, g, 1.0, True)[:, :, 0:1] * t,
    lambda x, t: gapped.gumbel_softmax(x, hard=True, generator=seeded())[:, :, 0:1] * t,
    logits=(2, N, 2),
    table=(2, N, 1),
)
MIXED_OPERATIONS = PLAIN._replace(logits=(K,))

SITES: dict[str, Site] = {
    **dict.fromkeys(("1", "2", "3", "4", "5", "13"), WAV2VEC2),
    "6": Site(  # patches are assigned to groups, and each group averages its own
        lambda x, g, t: (lambda a: (a / (a.sum(-1, keepdim=True) + 1)) @ t)(
            gumbel_softmax(x, g, 1.0, True, -2)
        ),
        lambda x, t: (lambda a: (a / (a.sum(-1, keepdim=True) + 1)) @ t)(
            gapped.gumbel_softmax(x, hard=True, dim=-2, generator=seeded())
        ),
        logits=(2, 4, K),
        dim=-2,
    ),
    "7": PLAIN,
    "9": Site(  # RelaxedOneHotCategorical: logits are normalised first, and the sample is an exponential
        lambda x, g, t: (
            (lambda s: (s - s.logsumexp(-1, keepdim=True)).exp())((x.log_softmax(-1) + g) / TAU) @ t
        ),
        SOFT.ours,
    ),
    "9 gate": Site(
        lambda x, g, t: relaxed_bernoulli(x, g) @ t,
        lambda x, t: gapped.GumbelSoftmax(TAU, hard=False).gate(x, generator=seeded()) @ t,
        noise=logistic,
    ),
    **dict.fromkeys(("10", "15"), FAIRSEQ),
    "10 soft": Site(
        lambda x, g, t: (gumbel_softmax(x, g, TAU).unsqueeze(-1) * t).sum(-2),
        lambda x, t: gapped.gumbel_softmax(x, TAU, generator=seeded()) @ t,
        logits=(N, G, K),
    ),
    **dict.fromkeys(("11", "17"), HALF),
    "12": Site(
        lambda x, g, t: (lambda soft: through((soft > 0.5).to(x), soft))(torch.sigmoid((x + g) / TAU)) @ t,
        lambda x, t: gumbel().gate(x, generator=seeded()) @ t,
        noise=logistic,
    ),
    "14": Site(  # a codebook that is a Linear
        lambda x, g, t: F.linear(gumbel_softmax(x, g, TAU, True), t),
        lambda x, t: gumbel().choose(x, generator=seeded()).select(t.T),
        table=(D, K),
    ),
    "16": Site(
        lambda x, g, t: torch.log(gumbel_softmax(x, g, TAU)) @ t,
        lambda x, t: torch.log(gapped.gumbel_softmax(x, TAU, generator=seeded())) @ t,
    ),
    **dict.fromkeys(("18", "19"), IMAGE),
    **dict.fromkeys(("18 soft", "19 soft"), SOFT_IMAGE),
    "18 reinmax": IMAGE._replace(
        theirs=lambda x, d, t: torch.einsum("bnhw,nd->bdhw", straight_through_reinmax(x, d), t),
        ours=lambda x, t: gapped.ReinMax(TAU).choose(x, dim=1, generator=seeded()).select(t).movedim(-1, 1),
        noise=category,
    ),
    "20": Site(  # the temperature belongs to the law, and the gradient has no noise
        lambda x, d, t: (lambda p: d + p - p.detach())((x / TAU).softmax(-1)) @ t,
        lambda x, t: gapped.StraightThrough().choose(x / TAU, generator=seeded()).select(t),
        drawn=lambda x: x / TAU,
        noise=category,
    ),
    "21": Site(
        lambda x, g, t: gumbel_softmax(x * 100, g, 4.0) @ t,
        lambda x, t: gapped.gumbel_softmax(x * 100, 4.0, generator=seeded()) @ t,
        logits=(N, 6),
        table=(6, 4),
    ),
    "21 mix": Site(
        lambda x, g, t: gumbel_softmax(x * 100, g, 4.0) @ t,
        lambda x, t: gapped.GumbelSoftmax(4.0).mix(x * 100, t, generator=seeded()),
        logits=(N, 6),
        table=(6, 4),
        noise=noise_of_a_key,
    ),
    "22": Site(
        lambda x, g, t: gumbel_softmax(x.repeat(N, 1) * 10, g, TAU, True, dim=1) @ t,
        lambda x, t: gumbel().choose(x.repeat(N, 1) * 10, dim=1, generator=seeded()).select(t),
        logits=(1, 6),
        table=(6, 4),
        drawn=lambda x: x.repeat(N, 1),
    ),
    "25": KEPT,
    "25 gate": KEPT._replace(  # the first of two categories: its log-odds are the difference of the logits
        ours=lambda x, t: (
            gapped.gate(x[:, :, 0:1] - x[:, :, 1:2], estimator="gumbel-softmax:tau=1", generator=seeded()) * t
        )
    ),
    "25 dim=2": KEPT._replace(
        theirs=lambda x, g, t: gumbel_softmax(x, g, 1.0, True, dim=2)[:, :, 0:1] * t,
        ours=lambda x, t: gapped.gumbel_softmax(x, hard=True, dim=2, generator=seeded())[:, :, 0:1] * t,
    ),
    "25 dim=1": Site(
        lambda x, g, t: gumbel_softmax(x, g, 1.0, True, dim=1)[:, 0:1] * t,
        lambda x, t: gapped.gumbel_softmax(x, hard=True, dim=1, generator=seeded())[:, 0:1] * t,
        logits=(2, 2, 3, 3),
        table=(2, 1, 3, 3),
        dim=1,
    ),
    "26": MIXED_OPERATIONS,
    "26 normalised": MIXED_OPERATIONS._replace(
        theirs=lambda x, g, t: gumbel_softmax(x.log_softmax(-1), g, TAU, True) @ t
    ),
    "27": Site(
        lambda x, g, t: gumbel_softmax(x.unsqueeze(0).repeat(4, 1, 1), g, 1.0) @ t,
        lambda x, t: gapped.gumbel_softmax(x.expand(4, N, K), generator=seeded()) @ t,
        drawn=lambda x: x.expand(4, N, K),
    ),
    "27 mix": Site(
        lambda x, g, t: gumbel_softmax(x.unsqueeze(0).repeat(4, 1, 1), g, 1.0) @ t,
        lambda x, t: gapped.GumbelSoftmax(1.0, hard=False).mix(x.expand(4, N, K), t, generator=seeded()),
        drawn=lambda x: x.expand(4, N, K),
        noise=noise_of_a_key,
    ),
    **dict.fromkeys(("28", "29"), SOFT),
    "28 hard": PLAIN._replace(
        theirs=lambda x, g, t: (lambda y: (hot(y) - y).detach() + y)(gumbel_softmax(x, g, TAU)) @ t
    ),
    "30": Site(  # of probabilities
        lambda x, g, t: ((x.exp().log() + g) / TAU).softmax(-1) @ t,
        lambda x, t: gapped.gumbel_softmax(x.exp().log(), TAU, generator=seeded()) @ t,
        logits=(2, N, 4),
        table=(4, D),
    ),
    "31": Site(
        lambda x, d, t: (lambda p: d + (p - p.detach()))(x.softmax(-1)) @ t,
        lambda x, t: gapped.StraightThrough().choose(x, generator=seeded()).select(t),
        noise=category,
    ),
    "31 mixture": Site(
        lambda x, d, t: through(d, with_uniform(x * 10)) @ t,
        lambda x, t: gapped.straight_through(gapped.unimix(x * 10, 0.01), hard=True, generator=seeded()) @ t,
        drawn=lambda x: with_uniform(x * 10).log(),
        noise=category,
    ),
    "31 relaxed": SOFT,
}
OTHERS = {"8", "23", "24"}
"""Rows with tests of their own."""


def test_every_row_is_here() -> None:
    assert {row.split()[0] for row in SITES} | OTHERS == {str(row) for row in range(1, 32)}


@pytest.mark.parametrize("row", SITES)
def test_value_and_gradients_are_the_same(row: str) -> None:
    site = SITES[row]
    inputs = normal(*site.logits, dtype=site.dtype), normal(*site.table, seed=2, dtype=site.dtype)
    rows = site.drawn(inputs[0]).movedim(site.dim, -1).contiguous()
    noise = site.noise(rows, seeded()).movedim(-1, site.dim)

    def given(noise: Tensor) -> tuple[Tensor, ...]:
        return pulled(lambda x, table: site.theirs(x, noise, table), *inputs)

    ours, theirs = pulled(site.ours, *inputs), given(noise)
    assert_all_close(ours, theirs, 1e-9 if site.dtype == torch.float64 else 2e-2)
    assert all(each.abs().max() > 0 for each in ours)
    others = given(site.noise(rows, seeded(1)).movedim(-1, site.dim))
    with pytest.raises(AssertionError, match="not close"):
        assert_all_close(others, theirs, 0.05)


# Rows that are not one expression


def test_row_8_given_the_noise() -> None:
    """Logits far below the largest are masked, then both experts are drawn and weighted by the softmax."""
    x, experts = normal(N, K).requires_grad_(), normal(N, K, D, seed=2)
    results = []
    for is_ours in (True, False):
        generator, weights, allowed = seeded(), [], x.detach() > x.detach().amax(-1, keepdim=True) - 2
        for _ in range(2):
            masked = x.masked_fill(~allowed, -torch.inf)
            if is_ours:
                index = gumbel().choose(x, mask=allowed, generator=generator).index
            else:
                index = (masked + simplex.gumbel(masked, generator)).argmax(-1)
            chosen = F.one_hot(index, K).bool()
            weights.append(masked.softmax(-1).masked_fill(~chosen, 0.0))
            allowed = torch.where(allowed.sum(-1, keepdim=True) > 1, allowed & ~chosen, allowed)
        mixture = sum((weight.unsqueeze(-1) * experts).sum(-2) for weight in weights)
        results.append((mixture.detach(), *torch.autograd.grad(mixture.sum(), x)))
    assert_all_close(*results)


def test_row_23_a_seed_of_its_own() -> None:
    """They seed the global generator, draw, and put its state back; ours is given a generator."""
    x = normal(N, K, dtype=torch.float32)
    before = torch.get_rng_state()
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(7)
        theirs = F.gumbel_softmax(x, TAU, True)
    assert_close(gapped.gumbel_softmax(x, TAU, True, generator=seeded(7)), theirs, 1e-6)
    assert torch.equal(torch.get_rng_state(), before)


def test_row_24_a_draw_without_a_gradient() -> None:
    x = normal(200, K).requires_grad_()
    index = gumbel().choose(x.detach(), generator=seeded()).index
    assert torch.equal(index, (x + simplex.gumbel(x, seeded())).argmax(-1))
