"""The router: the dense program written out, capacity, losses, SparseMixer beside the original, two ranks."""

from __future__ import annotations

import itertools
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from conftest import assert_all_close, assert_close, every_member, normal, seeded, through_softmax
from statistical import chi_squared, require_law, require_rejected
from subprocesses import TESTS, environment, python
from torch import Tensor

import gapped
from gapped.nn import Router, SparseMixer

D, E, N = 4, 5, 24
Tensors = tuple[Tensor, ...]


def router_of(weight: Tensor, *given: Any, **options: Any) -> Router:
    """A router in float64 whose logits are `hidden @ weight.T`."""
    router = Router(weight.shape[1], len(weight), *given, **options).double()
    router.projection.weight = torch.nn.Parameter(weight.clone())
    return router


def experts_of(count: int = E, seed: int = 3) -> list[torch.nn.Linear]:
    experts = [torch.nn.Linear(D, D).double() for _ in range(count)]
    for number, expert in enumerate(experts):
        expert.weight.data = normal(D, D, seed=seed + number)
        expert.bias.data = normal(D, seed=30 + number)
    return experts


def stacked(experts: list[torch.nn.Linear]) -> Any:
    """The same experts as one function of blocks."""
    weight, bias = (torch.stack([getattr(e, name) for e in experts]) for name in ("weight", "bias"))
    return lambda blocks: torch.baddbmm(bias.unsqueeze(1), blocks, weight.mT)


def gradients(value: Tensor, router: Router, experts: list[torch.nn.Linear], hidden: Tensor) -> Tensors:
    leaves = [hidden, router.projection.weight, *(p for e in experts for p in e.parameters())]
    upstream = normal(*value.shape, seed=9)
    return value.detach(), *torch.autograd.grad(value, leaves, upstream, materialize_grads=True)


def dense(router: Router, experts: list[torch.nn.Linear], hidden: Tensor, means: Tensor | None) -> Tensor:
    """Every expert on every token, times a one-hot sample; `means` in the place of those not chosen."""
    sample = router.estimator.sample(router.projection(hidden), generator=seeded())
    results = torch.stack([expert(hidden) for expert in experts], -2)
    if means is None:
        results = torch.where(sample.unsqueeze(-1) > 0, results, 0.0)
    else:
        results = torch.where(sample.unsqueeze(-1) > 0, results, means)
    return torch.einsum("...e,...ed->...d", sample, results)


@every_member
@pytest.mark.parametrize("way", ["list", "blocks", "rows"])
def test_a_layer_is_the_dense_program_with_other_results_as_zero(name: str, way: str) -> None:
    capacity = None if way == "rows" else float(E)
    router = router_of(normal(E, D), estimator=name, capacity=capacity, others="zero")
    experts, hidden = experts_of(), normal(3, N // 3, D, seed=2).requires_grad_()
    run = stacked(experts) if way == "blocks" else experts
    ours = router(hidden, generator=seeded()).run(run, hidden)
    theirs = dense(router, experts, hidden, None)
    assert_all_close(*(gradients(y, router, experts, hidden) for y in (ours, theirs)), 1e-10)


@every_member
def test_others_count_as_the_running_means_of_their_results(name: str) -> None:
    """The values are the same, and so are the gradients of experts; the router's knows the others."""
    router = router_of(normal(E, D), estimator=name, others="mean")
    experts, hidden = experts_of(), normal(N, D, seed=2).requires_grad_()
    for step in range(3):
        route = router(hidden, generator=seeded())
        before, number = router.means.clone(), router.updates.clone()
        ours = gradients(route.run(experts, hidden), router, experts, hidden)
        expected = before.clone()
        for e in set(route.index.flatten().tolist()):
            batch = experts[e](hidden[route.index.squeeze(-1) == e]).mean(0).detach()
            expected[e] += (batch - before[e]) / (number[e] + 1)
        assert_close(router.means, expected)
        theirs = gradients(dense(router, experts, hidden, router.means.clone()), router, experts, hidden)
        assert_all_close(ours, theirs, 1e-10)
        assert_close(router.updates, torch.full((E,), step + 1.0))


@pytest.mark.parametrize("others", ["zero", "mean"])
@pytest.mark.parametrize("estimator", ["straight-through", "gst:gap=1,tau=1"])
def test_several_experts_are_the_dense_program_of_a_subset(estimator: str, others: str) -> None:
    """The weight of an expert that was not drawn is the mean of the others', a kth."""
    k = 2
    router = router_of(normal(E, D), k, estimator=estimator, others=others, capacity=float(E))
    experts, hidden = experts_of(), normal(N, D, seed=2).requires_grad_()
    route = router(hidden, generator=seeded())
    ours = route.run(experts, hidden)
    logits = router.projection(hidden)
    name = "simple" if estimator == "straight-through" else "gst:gap=1"
    sample = gapped.subset(logits, k, estimator=name, generator=seeded())
    drawn = sample.detach() > 0
    assert torch.equal(drawn.nonzero()[:, 1].view(N, k), route.index)
    weights = logits.masked_fill(~drawn, -torch.inf).softmax(-1)
    assert_close(route.gates, weights.gather(-1, route.index))
    results = torch.stack([expert(hidden) for expert in experts], -2) * weights.unsqueeze(-1)
    unchosen = router.means / k if others == "mean" else torch.zeros(E, D).double()
    theirs = (sample.unsqueeze(-1) * torch.where(drawn.unsqueeze(-1), results, unchosen)).sum(-2)
    assert_all_close(*(gradients(y, router, experts, hidden) for y in (ours, theirs)), 1e-10)


def test_choices_are_those_of_choose_and_the_likeliest_by_default() -> None:
    hidden = normal(N, D, seed=2).requires_grad_()
    for k, law, draw in itertools.product((1, 2, E), ("subset", "sequential"), ("argmax", "sample")):
        text = "reinmax" if k > 1 and law == "subset" else "gapmax"
        router = router_of(normal(E, D), k, law=law, estimator=text if draw == "sample" else None)
        route, logits = router(hidden, generator=seeded()), router.projection(hidden)
        choices = gapped.choose(logits, k, law=law, draw=draw, generator=seeded())
        assert torch.equal(route.index, choices.index)
        found = [torch.autograd.grad(g, hidden, normal(N, k))[0] for g in (route.gates, choices.weights())]
        assert torch.equal(*found)
        best = router.eval()(hidden).index
        assert torch.equal(best.sort().values, logits.topk(k).indices.sort().values)


def test_after_the_first_batches_means_forget() -> None:
    router = router_of(torch.eye(2, dtype=torch.float64) * 1e3, others="mean")
    router.updates += 1_000
    hidden = torch.eye(2, dtype=torch.float64)[:1]
    router(hidden).combine(torch.ones(1, 2, dtype=torch.float64))
    assert_close(router.means, torch.tensor([[0.01, 0.01], [0.0, 0.0]]), 1e-8)
    router.eval()(hidden).combine(torch.ones(1, 2, dtype=torch.float64))
    assert_close(router.updates, torch.tensor([1_001.0, 1_000.0]))


def test_with_means_that_are_right_the_gradient_is_densemixers() -> None:
    """DenseMixer runs all experts: where each has one result, the means are those results from the start."""
    router = router_of(normal(E, D), estimator="straight-through:draw=argmax", others="mean")
    results, hidden = normal(E, D, seed=5), normal(N, D, seed=2)
    router.means.copy_(results)
    router.updates += 1_000
    logits, upstream = router.projection(hidden), normal(N, D, seed=9)
    route = router(hidden)
    y = route.combine(results[route.index.squeeze(-1).sort().values])
    assert torch.equal(y, results[logits.argmax(-1)])
    (ours,) = torch.autograd.grad(y, router.projection.weight, upstream)
    dense = (logits.softmax(-1).unsqueeze(-1) * results).sum(-2)
    (theirs,) = torch.autograd.grad(dense, router.projection.weight, upstream)
    assert_close(ours, theirs, 1e-10)
    by_hand = through_softmax(logits.softmax(-1), upstream @ results.T)
    assert_close(ours, by_hand.T @ hidden, 1e-10)


def test_an_expert_that_is_full_takes_the_first_tokens() -> None:
    router = router_of(torch.eye(D, dtype=torch.float64) * 1e4, capacity=1.0)
    wanted = torch.tensor([0, 0, 1, 0, 2, 0, 2, 2])
    hidden = torch.eye(D, dtype=torch.float64)[wanted] * torch.arange(1.0, 9.0).unsqueeze(-1)
    route = router(hidden)
    assert route.index.flatten().tolist() == wanted.tolist()
    assert route.load.tolist() == [4, 1, 3, 0]
    assert route.counts.tolist() == [2, 1, 2, 0]
    assert route.dropped.item() == 3 / 8
    sent = route.dispatch(hidden)
    assert sent.sum(-1).tolist() == [[1.0, 2.0], [3.0, 0.0], [5.0, 7.0], [0.0, 0.0]]
    # What stands in an empty place goes nowhere.
    sent = torch.where(sent.sum(-1, keepdim=True) == 0, torch.nan, sent)
    assert route.combine(sent).sum(-1).tolist() == [1.0, 2.0, 3.0, 0.0, 5.0, 0.0, 7.0, 0.0]
    generous = router_of(router.projection.weight.detach(), capacity=100.0)(hidden)
    assert generous.dispatch(hidden).shape == (D, len(hidden), D)
    assert generous.dropped == 0


def test_a_dropped_token_gets_and_sends_nothing() -> None:
    router = router_of(torch.eye(D, dtype=torch.float64), capacity=0.1)
    hidden = normal(N, D, seed=2).requires_grad_()
    route = router(hidden)
    late = (route.run([torch.nn.Identity()] * D, hidden) == 0).all(-1)
    assert 0 < late.sum() == (route.dropped * N).round()
    (gradient,) = torch.autograd.grad(route.run([torch.nn.Identity()] * D, hidden).square().sum(), hidden)
    assert (gradient[late] == 0).all()
    assert (gradient[~late] != 0).any(-1).all()


@pytest.mark.parametrize("capacity", [None, 2.0])
@pytest.mark.parametrize("estimator", [None, SparseMixer()], ids=str)
def test_masks_padding_and_nan(estimator: Any, capacity: float | None) -> None:
    """One expert is down, one token is padding, one is NaN: the others are as if these were not there."""
    weight, hidden = normal(E, D), normal(N, D, seed=2)
    mask = (torch.arange(E) != 1).repeat(N, 1)
    mask[3] = False
    hidden[5] = torch.nan
    hidden.requires_grad_()
    router = router_of(weight, estimator=estimator, capacity=capacity)
    route = router(hidden, mask)
    fine = [row for row in range(N) if row not in (3, 5)]
    assert (route.index[fine] < E).all()
    assert (route.index[fine] != 1).all()
    assert route.index[[3, 5]].flatten().tolist() == [E, E + 1]
    assert route.load.sum() == len(fine)
    y = route.run([torch.nn.Identity()] * E, hidden)
    assert (y[3] == 0).all()
    assert y[5].isnan().all()
    (gradient,) = torch.autograd.grad(y[fine].square().sum(), hidden)
    assert gradient[fine].isfinite().all()
    assert (gradient[3] == 0).all()


@pytest.mark.parametrize("estimator", [None, SparseMixer()], ids=str)
def test_losses_of_masked_tokens_are_those_of_the_tokens_and_experts_that_are_left(estimator: Any) -> None:
    weight, hidden, mask = normal(E, D), normal(N, D, seed=2), (torch.arange(E) != 1).repeat(N, 1)
    mask[3] = False
    fine, kept = [row for row in range(N) if row != 3], torch.arange(E) != 1
    router = router_of(weight, estimator=estimator)
    route, leaf = router(hidden, mask), router.projection.weight
    logits = hidden[fine] @ leaf[kept].T
    share = route.load[kept].double() / len(fine)
    expected = E * (share * logits.softmax(-1).mean(0)).sum(), logits.logsumexp(-1).square().mean()
    for ours, theirs in zip((route.balance, route.z), expected, strict=True):
        assert_close(ours, theirs)
        assert_close(*(torch.autograd.grad(each, leaf, retain_graph=True)[0] for each in (ours, theirs)))


def test_eval_mode_takes_the_likeliest_without_a_gradient_or_noise() -> None:
    router, hidden = router_of(normal(E, D)).eval(), normal(N, D, seed=2)
    state = torch.get_rng_state()
    route = router(hidden)
    assert torch.equal(torch.get_rng_state(), state)
    assert torch.equal(route.index.squeeze(-1), (hidden @ router.projection.weight.T).argmax(-1))
    assert not route.gates.requires_grad
    assert route.balance.requires_grad


# SparseMixer v2 beside the function of transformers.


def original() -> Any:
    phimoe = pytest.importorskip("transformers.models.phimoe.modeling_phimoe", reason="needs transformers")
    return phimoe.sparsemixer


def mixed(logits: Tensor, k: int, jitter: float = 0.4, **how: Any) -> Tensors:
    """Index and gates of our router at given logits."""
    router = router_of(torch.eye(logits.shape[-1]).double(), k, estimator=SparseMixer(jitter))
    route = router.train(how.pop("training", True))(logits, **how)
    return route.index, route.gates


SCORES = torch.tensor([1.0, 0.3, -0.6, 0.8], dtype=torch.float64)
SPREAD = torch.tensor([3.0, 1.0, -2.0, 2.5], dtype=torch.float64)


@pytest.mark.parametrize("logits", [SCORES, SPREAD], ids=["near", "far"])
@pytest.mark.parametrize("jitter", [0.01, 0.4])
def test_sparsemixer_in_eval_mode_is_the_original(logits: Tensor, jitter: float) -> None:
    found = []
    for leaf in (normal(200, 6).requires_grad_(), logits.clone().unsqueeze(0).requires_grad_()):
        for take in (
            lambda x: mixed(x, 2, jitter, training=False),
            lambda x: original()(x, jitter, False)[::-1],
        ):
            index, gates = take(leaf)
            (gradient,) = torch.autograd.grad(gates, leaf, normal(*gates.shape, seed=4))
            found.append((index, gates, gradient))
    for ours, theirs in (found[:2], found[2:]):
        assert torch.equal(ours[0], theirs[0])
        assert_all_close(ours[1:], theirs[1:], 1e-12)


def outcomes(index: Tensor, gates: Tensor) -> Tensor:
    """Each row's outcome, as a number: the experts, and which of the gates are a third."""
    full = torch.stack([full_gates(i) for i in index.unique(dim=0)])
    rows = index[:, 0] * 4 + index[:, 1]
    keys = index.unique(dim=0) @ torch.tensor([4, 1])
    whole = full[torch.searchsorted(keys, rows)]
    is_third = (gates < 0.5 * whole).long()
    # The original makes its third in float32.
    assert_close(gates, whole * (1 - 0.6667 * is_third.double()), 1e-7)
    return rows * 4 + is_third @ torch.tensor([2, 1])


def likely(logits: Tensor, gone: list[int], jitter: float = 0.4) -> Tensor:
    """The law of a draw, written from the definition, once some experts are gone."""
    left = {i: float(s) for i, s in enumerate(logits) if i not in gone}
    top = max(left.values())
    near = {i: s for i, s in left.items() if (top - s) / max(abs(s), top) <= 2 * jitter}
    total = sum(math.exp(s) for s in near.values())
    law = [math.exp(near[i]) / total if i in near else 0.0 for i in range(len(logits))]
    return torch.tensor(law, dtype=torch.float64)


def full_gates(pair: Tensor) -> Tensor:
    first, second = pair.tolist()
    return torch.stack([likely(SCORES, [])[first], likely(SCORES, [first])[second]])


def law(chance: float = 0.75) -> Tensor:
    """Probabilities of `outcomes`: a gate that is not the likeliest expert's is a third with a chance."""
    result = torch.zeros(4, 4, 2, 2, dtype=torch.float64)
    for first, second in itertools.permutations(range(4), 2):
        laws = likely(SCORES, []), likely(SCORES, [first])
        thirds = [0.0 if i == p.argmax() else chance for i, p in zip((first, second), laws, strict=True)]
        for a, b in itertools.product((0, 1), repeat=2):
            p = laws[0][first] * laws[1][second]
            for third, is_third in zip(thirds, (a, b), strict=True):
                p = p * (third if is_third else 1 - third)
            result[first, second, a, b] = p
    return result.flatten()


def test_sparsemixer_has_the_law_of_the_original() -> None:
    rows = SCORES.expand(200_000, 4)
    ours = outcomes(*mixed(rows, 2, generator=seeded()))
    theirs = outcomes(*original()(rows, 0.4, True)[::-1])
    assert_close(law().sum(), torch.ones(()))
    for index in (ours, theirs):
        counts = np.bincount(index, minlength=64)
        require_law(chi_squared(counts, law()))
        require_rejected(chi_squared(counts, law(0.7)))


def test_sparsemixer_has_the_gradient_of_the_original() -> None:
    """Given the experts both gradients are functions of the logits; every pair occurs in both."""
    upstream, rows = torch.tensor([0.7, -1.3], dtype=torch.float64), SCORES.repeat(2_000, 1)
    found = []
    for take in (lambda x: mixed(x, 2), lambda x: original()(x, 0.4, True)[::-1]):
        leaf = rows.clone().requires_grad_()
        index, gates = take(leaf)
        (gradient,) = torch.autograd.grad(gates, leaf, upstream.expand(len(rows), 2))
        by_pair: dict[tuple[int, ...], Tensor] = {}
        for pair, row in zip(index.tolist(), gradient, strict=True):
            assert_close(by_pair.setdefault(tuple(pair), row), row, 1e-12)
        found.append(by_pair)
    assert found[0].keys() == found[1].keys()
    assert len(found[0]) == int((law().view(16, 4).sum(-1) > 0).sum())
    for pair, row in found[0].items():
        assert_close(row, found[1][pair], 1e-12)


# Where it runs.


class Layer(torch.nn.Module):
    """A layer with a list of experts, as models have it."""

    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.router = Router(D, E, **options)
        self.experts = torch.nn.ModuleList(torch.nn.Linear(D, D) for _ in range(E))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        route = self.router(x)
        return x + route.run(self.experts, x), 0.01 * route.balance + 0.001 * route.z


WAYS: dict[str, dict[str, Any]] = {
    "default": {},
    "capacity": {"capacity": 1.25},
    "mean": {"k": 2, "others": "mean", "capacity": 2.0},
    "sequence": {"k": 2, "law": "sequential"},
    "mixer": {"k": 2, "estimator": SparseMixer(), "capacity": 2.0},
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_autocast(way: str, dtype: torch.dtype) -> None:
    """The router stays in float32 and draws what it draws without autocast; experts are in half precision."""
    layer, x = Layer(**WAYS[way]), torch.randn(N, D)
    torch.manual_seed(1)
    plain = layer.router(x)
    torch.manual_seed(1)
    with torch.autocast("cpu", dtype):
        route = layer.router(x)
        y = route.run(layer.experts, x)
        assert torch.equal(route.index, plain.index)
        assert route.logits.dtype == route.gates.dtype == torch.float32
        assert y.dtype == dtype
    (y.float().square().sum() + route.balance).backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in layer.parameters())
    assert layer.router.projection.weight.grad.any()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_a_model_in_half_precision(dtype: torch.dtype) -> None:
    layer = Layer(others="mean", capacity=2.0).to(dtype)
    y, loss = layer(torch.randn(N, D, dtype=dtype))
    assert (y.dtype, loss.dtype) == (dtype, torch.float32)
    (y.float().square().sum() + loss).backward()
    assert layer.router.projection.weight.grad.dtype == dtype


@pytest.mark.filterwarnings("ignore:.*should not be instantiated")
@pytest.mark.slow_if(lambda way: way != "mean")
@pytest.mark.parametrize("way", ["capacity", "mean", "mixer"])
def test_compile(way: str) -> None:
    """One graph, with the values and gradients of eager code."""
    layer, x = Layer(**WAYS[way]), torch.randn(N, D, requires_grad=True)
    found = []
    state = {name: value.clone() for name, value in layer.state_dict().items()}
    for run in (layer, torch.compile(layer, backend="aot_eager", fullgraph=True)):
        layer.load_state_dict(state)
        torch.manual_seed(0)
        y, loss = run(x)
        leaves = [x, *layer.parameters()]
        found.append((y, loss, *torch.autograd.grad(y.square().sum() + loss, leaves), *layer.buffers()))
        found[-1] = tuple(each.detach().clone() for each in found[-1])
    assert_all_close(*found, 1e-5)


def test_activation_checkpointing() -> None:
    """Run twice, it draws the same and counts its results once."""
    layer, x = Layer(others="mean"), torch.randn(N, D, requires_grad=True)
    y, loss = torch.utils.checkpoint.checkpoint(layer, x, use_reentrant=False)
    means = layer.router.means.clone()
    (y.square().sum() + loss).backward()
    assert torch.equal(layer.router.means, means)
    assert (layer.router.updates <= 1).all()
    assert all(p.grad is not None for p in layer.parameters())


def test_state_and_usage() -> None:
    layer = Layer(others="mean")
    with gapped.nn.Usage(layer) as usage:
        layer(torch.randn(3, N, D))
        assert sorted(usage.read()) == ["router/dead", "router/entropy", "router/perplexity"]
        layer.router.projection.weight.data[1:] = 0
        layer.router.projection.weight.data[0] = 1e4
        layer(torch.rand(3, N, D) + 0.1)
        assert usage.read() == {"router/dead": E - 1, "router/entropy": 0.0, "router/perplexity": 1.0}
    other = Layer(others="mean")
    other.load_state_dict(layer.state_dict())
    assert torch.equal(other.router.means, layer.router.means)
    assert repr(layer.router).startswith("Router(\n  k=1, estimator=GapMax(")


def test_two_ranks(tmp_path: Path) -> None:
    """Under DDP, with a `group`: gradients of losses and means of all tokens, as one process has them."""
    if not torch.distributed.is_available() or not torch.distributed.is_gloo_available():
        pytest.skip("needs torch.distributed with gloo")
    python(
        str(TESTS / "router_ranks.py"),
        str(tmp_path),
        env=environment(Path(gapped.__file__).parents[1], TESTS),
    )
    found = [torch.load(tmp_path / f"{rank}.pt") for rank in range(2)]
    for each in found:
        assert_close(each["balance"], each["expected balance"], 1e-10)
        assert_close(each["means"], each["expected means"], 1e-10)
        assert each["is even"]
    assert_all_close(*(each["gradients"] for each in found), 0.0)


def test_what_does_not_fit_is_refused_in_one_line() -> None:
    def message(call: Any) -> str:
        with pytest.raises(gapped.GappedError) as caught:
            call()
        return str(caught.value)

    assert message(lambda: Router(D, 0)).startswith("experts: got 0")
    assert message(lambda: Router(D, 2, 3)).startswith("k: got 3, expected at most 2")
    assert message(lambda: Router(D, 2, capacity=0)).startswith("capacity: got 0")
    assert message(lambda: Router(D, 2, law="top-k")).startswith("law: got 'top-k'")
    assert message(lambda: Router(D, 2, others="dense")).startswith("others: got 'dense'")
    assert [Router(D, 2, k).others for k in (1, 2)] == ["mean", "zero"]
    assert Router(D, 2, estimator=SparseMixer()).others == "zero"
    assert message(lambda: Router(D, 2, estimator=SparseMixer(), others="mean")).startswith("others: ")
    assert message(lambda: SparseMixer(-1.0)).startswith("jitter: got -1.0")
    assert message(lambda: Router(D, 3, 2, estimator="gapmax")).startswith("estimator: got GapMax")
    assert message(lambda: Router(D, 3, 2, estimator="gst")).startswith("gap: got 'auto'")
    assert message(lambda: Router(D, 3, estimator="gumbel-softmax:hard=False")).startswith("hard: got False")
    router, x = Router(D, E), torch.randn(N, D)
    assert "expected f(rows, counts) without cap" in message(lambda: router(x).run(lambda rows: rows, x))
    blocks = Router(D, E, capacity=1.0)
    assert "expected f(blocks) with cap" in message(lambda: blocks(x).run(lambda rows, counts: rows, x))
    assert "expected (*rows, 4)" in message(lambda: router(torch.randn(N, 3)))
    assert "of (24,) tokens" in message(lambda: router(x).dispatch(x[1:]))
    assert "hidden: got a ModuleList of" in message(lambda: router(x).run(x, torch.nn.ModuleList()))
    assert message(lambda: router(x).run([torch.nn.Identity()], x)).startswith("experts: got ")
    wide = Router(D, E, others="mean")
    assert message(lambda: wide(x).combine(torch.randn(N, 3))).startswith("outputs: got ")
    inside = torch.func.grad(lambda x: wide(x).run([torch.nn.Identity()] * E, x).sum())
    assert message(lambda: inside(x)).startswith("others: got 'mean' in training mode, inside of a transform")
    for capacity, form in ((None, "(24, 'width')"), (1.0, "(5, 5, 'width')")):
        route = Router(D, E, capacity=capacity)(x)
        # Fewer rows than were sent: the last tokens would silently get nothing.
        assert message(lambda route=route: route.combine(route.dispatch(x)[:-1])).endswith(form)


@pytest.mark.parametrize("capacity", [None, 1.25])
def test_no_tokens_at_all(capacity: float | None) -> None:
    x, experts = torch.randn(2, 0, D), [torch.nn.Linear(D, 3)] * E
    route = Router(D, E, capacity=capacity, others="zero")(x)
    assert route.run(experts, x).shape == (2, 0, 3)
    same = [torch.nn.Linear(D, D)] * E
    assert Router(D, E, capacity=capacity)(x).run(same, x).shape == (2, 0, D)
    assert route.balance == route.z == route.dropped == 0


def test_running_means_keep_their_digits_in_half_precision() -> None:
    router = Router(4, 3)
    router.means.fill_(0.123456)
    router.updates.fill_(70_000.0)
    router = router.half().to(torch.bfloat16)
    assert router.updates[0] == 70_000
    assert router.means[0, 0] == torch.tensor(0.123456)
    assert router.projection.weight.dtype == torch.bfloat16
    assert router.means.dtype == router.updates.dtype == torch.float32
    assert Router(4, 3).double().means.dtype == torch.float64


def test_an_infinite_mean_leaves_other_tokens_as_they_are() -> None:
    router = router_of(normal(E, D), others="mean").eval()
    router.means[0, 0] = torch.inf
    assert router(normal(N, D)).run(experts_of(), normal(N, D)).isfinite().all()


def test_estimator_and_capacity_may_be_set_as_they_are_given() -> None:
    router = Router(4, 3, 2, capacity=1.0)
    router.estimator, router.capacity = "straight-through", math.inf
    route = router(normal(5, 4, dtype=torch.float32))
    assert isinstance(router.estimator, gapped.StraightThrough)
    assert route.dropped == 0
    assert repr(route) == "Routed(tokens=(5,), k=2, experts=3)"
    router.estimator = None
    assert isinstance(router.estimator, gapped.ReinMax)
    assert router.estimator.draw == "argmax"
    with pytest.raises(gapped.GappedError, match="estimator: got GapMax"):
        router.estimator = "gapmax"
    with pytest.raises(gapped.GappedError, match="others: got 'mean'"):
        Router(4, 3).estimator = SparseMixer()
    router = Router(4, 3, 2, estimator=SparseMixer())
    router.estimator = "straight-through"
    assert router.sparse_mixer is None
