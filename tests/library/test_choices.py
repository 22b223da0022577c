"""k categories by index: laws and gradients against all subsets written out, and what every call promises."""

from __future__ import annotations

from itertools import combinations, permutations
from typing import Any

import pytest
import torch
from conftest import assert_all_close, assert_close, normal, reinmax_gradient, seeded
from statistical import chi_squared, counts_of, require_law, require_rejected
from subset_enumeration import covariances, enumerate_law, gapped_logits, marginals, plackett_luce
from torch import Tensor

import gapped
from gapped import choices

LAWS = ("subset", "sequential")
every_law = pytest.mark.parametrize("law", LAWS)
# Arguments of `choose` for every kind of gradient of k > 1 categories.
KINDS: dict[str, dict[str, Any]] = {
    "default": {},
    "straight-through": {"estimator": gapped.StraightThrough(tau=0.7)},
    "gst": {"estimator": gapped.GST(gap=1.0, tau=0.7)},
    "sequential": {"law": "sequential"},
    "sequential-gst": {"law": "sequential", "estimator": "gst"},
    "argmax": {"draw": "argmax"},
    "one": {"k": 1},
}
every_kind = pytest.mark.parametrize("kind", KINDS)


def choose(logits: Tensor, kind: str, k: int = 3, **more: Any) -> Any:
    return gapped.choose(logits, **{"k": k, "generator": seeded(), **KINDS[kind], **more})


def uses(logits: Tensor, kind: str, **more: Any) -> list[Tensor]:
    """Index, values, and the gradients of the logits for gates, weights and rows of a table."""
    leaf = logits.detach().requires_grad_()
    drawn = choose(leaf, kind, **more)
    table = normal(drawn._rows.shape[-1], 2, seed=4, dtype=logits.dtype)
    values = [drawn.gate(), drawn.weights(), drawn.select(table)]
    gradients = []
    for value in values:
        upstream = normal(*value.shape, seed=5, dtype=value.dtype)
        gradients += torch.autograd.grad(value, leaf, upstream, retain_graph=True)
    return [drawn.index, *(value.detach() for value in values), *gradients]


def force(monkeypatch: pytest.MonkeyPatch, index: Tensor) -> None:
    """Let what is drawn be `index`."""
    for name in ("_draw_set", "_draw_sequence"):
        monkeypatch.setattr(choices, name, lambda *_: index)


def sequence_law(theta: Tensor, sequence: tuple[int, ...]) -> Tensor:
    p, left = torch.ones((), dtype=theta.dtype), theta.exp().sum()
    for i in sequence:
        p, left = p * theta[i].exp() / left, left - theta[i].exp()
    return p


@pytest.mark.parametrize("n", range(2, 9))
def test_log_prob_is_that_of_every_outcome(n: int, monkeypatch: pytest.MonkeyPatch) -> None:
    theta = 2 * normal(n, seed=n)
    for k in range(2, n + 1):
        sets = torch.tensor(list(combinations(range(n), k)))
        force(monkeypatch, sets)
        leaf = theta.clone().requires_grad_()
        log_p = gapped.choose(leaf.expand(len(sets), n), k=k).log_prob
        law = enumerate_law(theta, k)
        assert_close(log_p.exp(), law.p, 1e-10)
        (score,) = torch.autograd.grad(log_p.sum(), leaf)
        assert_close(score, (law.subsets - marginals(theta, k)).sum(0), 1e-9)
        # All sequences are many: those of a few sets.
        sequences = [order for chosen in sets[:3].tolist() for order in permutations(chosen)][:200]
        force(monkeypatch, torch.tensor(sequences))
        drawn = gapped.choose(theta.expand(len(sequences), n), k=k, law="sequential")
        expected = torch.stack([sequence_law(theta, sequence) for sequence in sequences])
        assert_close(drawn.log_prob.exp(), expected, 1e-10)


@every_law
@pytest.mark.parametrize(("n", "k"), [(4, 2), *((8, k) for k in range(2, 8))])
def test_sets_have_their_law(n: int, k: int, law: Any) -> None:
    """The other law is the wrong twin."""
    theta = 1.5 * normal(n, seed=n)
    index = gapped.choose(theta.expand(60_000, n), k=k, law=law, generator=seeded(k)).index
    number = {chosen: i for i, chosen in enumerate(combinations(range(n), k))}
    code = torch.full((1 << n,), -1)
    for chosen, i in number.items():
        code[sum(1 << j for j in chosen)] = i
    which = code[(1 << index).sum(-1)]
    assert (which >= 0).all()
    exact, sequential = enumerate_law(theta, k).p, plackett_luce(theta, k)
    own, other = (exact, sequential) if law == "subset" else (sequential, exact)
    counts = counts_of(which, len(number))
    require_law(chi_squared(counts, own))
    require_rejected(chi_squared(counts, other))


def test_sequences_have_their_order() -> None:
    theta = normal(4)
    index = gapped.choose(theta.expand(30_000, 4), k=2, law="sequential", generator=seeded()).index
    pairs = list(permutations(range(4), 2))
    p = torch.stack([sequence_law(theta, pair) for pair in pairs])
    code = torch.full((4, 4), -1)
    for i, pair in enumerate(pairs):
        code[pair] = i
    counts = counts_of(code[index[:, 0], index[:, 1]], len(pairs))
    require_law(chi_squared(counts, p))
    require_rejected(chi_squared(counts, p.reshape(4, 3).flip(-1).reshape(-1)))


def formula(kind: str, theta: Tensor, chosen: Tensor, g: Tensor) -> Tensor:
    """The gradient at the logits of one row for `g` at the zeros and ones of a set, from the definition."""
    k = int(chosen.sum())
    if kind == "default":
        centred = chosen - marginals(theta, k)
        return (covariances(theta, k) @ g + centred * (centred @ g)) / 2
    t = gapped_logits(theta, chosen, k, 1.0) if kind == "gst" else theta
    return covariances(t / 0.7, k) @ g / 0.7


@pytest.mark.parametrize("kind", ["default", "straight-through", "gst"])
@pytest.mark.parametrize("n", range(3, 9))
def test_the_gradient_of_gates_and_weights(kind: str, n: int) -> None:
    for k in range(2, n):
        theta, g = 2 * normal(n, seed=n), normal(k, seed=2)
        leaf = theta.clone().requires_grad_()
        drawn = choose(leaf, kind, k)
        index, chosen = drawn.index, torch.zeros(n, dtype=theta.dtype)
        chosen[index] = 1.0

        def dense(values: Tensor, index: Tensor = index, zero: Tensor = chosen) -> Tensor:
            return torch.zeros_like(zero).scatter(0, index, values)

        (gradient,) = torch.autograd.grad(drawn.gate(), leaf, g)
        assert_close(gradient, formula(kind, theta, chosen, dense(g)), 1e-10)
        weights = drawn.weights()
        expected = torch.softmax(theta[index], -1)
        assert_close(weights.detach(), expected, 1e-12)
        (gradient,) = torch.autograd.grad(weights, leaf, g)
        own = dense(expected * (g - expected @ g))
        assert_close(gradient, own + formula(kind, theta, chosen, dense(expected * g)), 1e-10)


@pytest.mark.parametrize(("n", "k"), [(4, 2), (6, 3), (6, 5), (7, 2)])
def test_the_default_is_exact_for_quadratic_costs(n: int, k: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """On average over the law; straight-through is not, but for linear ones it is."""
    theta, c, a = normal(n, seed=n), normal(n, seed=2), normal(n, n, seed=3)
    a = a + a.T

    def mean(name: str | None, a: Tensor) -> tuple[Tensor, Tensor]:
        leaf = theta.clone().requires_grad_()
        law = enumerate_law(leaf, k)
        cost = law.subsets @ c + ((law.subsets @ a) * law.subsets).sum(-1) / 2
        (exact,) = torch.autograd.grad((law.p * cost).sum(), leaf)
        force(monkeypatch, torch.stack([each.nonzero().squeeze(-1) for each in law.subsets]))
        logits = theta.expand(len(law.p), n).clone().requires_grad_()
        zeros_and_ones = (
            gapped.choose(logits, k=k, estimator=name).select(torch.eye(n, dtype=theta.dtype)).sum(-2)
        )
        (own,) = torch.autograd.grad(zeros_and_ones, logits, law.subsets @ a + c)
        return law.p.detach() @ own, exact

    for name in (None, "reinmax"):
        assert_close(*mean(name, a), 1e-10)
    assert_close(*mean("straight-through", 0 * a), 1e-10)
    estimate, exact = mean("straight-through", a)
    assert (estimate - exact).norm() > 0.02 * exact.norm()


@pytest.mark.parametrize("k", [2, 4])
def test_the_gradient_of_a_sequence_is_that_of_its_steps(k: int) -> None:
    theta, g, table = normal(5), normal(k, seed=2), normal(5, 3, seed=3)
    leaf = theta.clone().requires_grad_()
    drawn = gapped.choose(leaf, k=k, law="sequential", estimator="reinmax", generator=seeded())
    for at_gate in (True, False):
        expected, left = torch.zeros(5, dtype=theta.dtype), list(range(5))
        upstream = normal(k, 3, seed=4)
        for step, i in enumerate(drawn.index.tolist()):
            at = torch.zeros(5, dtype=theta.dtype).index_fill(0, torch.tensor(i), g[step].item())
            at = at if at_gate else table @ upstream[step]
            expected[left] += reinmax_gradient(theta[left], left.index(i), at[left], 1.0)
            left.remove(i)
        value = drawn.gate() if at_gate else drawn.select(table)
        (gradient,) = torch.autograd.grad(value, leaf, g if at_gate else upstream)
        assert_close(gradient, expected, 1e-10)


@every_law
def test_one_of_k_is_a_choice(law: Any) -> None:
    logits, g, table = normal(5, 6), normal(5, seed=2), normal(6, 3, seed=3)
    for estimator in (None, "gst", "gumbel-softmax"):
        one = gapped.choose(logits.requires_grad_(), estimator=estimator, generator=seeded())
        several = gapped.choose(logits, k=1, law=law, estimator=estimator, generator=seeded())
        assert torch.equal(several.index.squeeze(-1), one.index)
        ours = torch.autograd.grad(several.gate().squeeze(-1), logits, g)
        assert_close(ours[0], torch.autograd.grad(one.gate(), logits, g)[0])
        ours = torch.autograd.grad(several.weights().squeeze(-1), logits, g)
        assert_close(ours[0], torch.autograd.grad(one.gate(), logits, g)[0])
        assert torch.equal(several.select(table).squeeze(-2), one.select(table))
        log_p = torch.log_softmax(logits, -1).gather(-1, several.index).squeeze(-1)
        assert_close(several.log_prob, log_p, 1e-12)


def test_argmax_takes_the_largest_with_the_same_gradient(monkeypatch: pytest.MonkeyPatch) -> None:
    logits = normal(6, 9)
    expected = logits.topk(3).indices
    ours = uses(logits, "argmax")
    assert torch.equal(ours[0], expected)
    force(monkeypatch, expected)
    assert_all_close(ours, uses(logits, "default"))
    text = gapped.choose(logits, k=3, estimator="reinmax:draw=argmax")
    assert torch.equal(text.index, expected)
    assert torch.equal(gapped.choose(logits, draw="argmax").index, logits.argmax(-1))


@every_kind
def test_masking_equals_deleting(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    logits, kept = normal(4, 9), torch.arange(9) % 3 > 0
    for mask in (kept, None):
        given = logits if mask is not None else logits.masked_fill(~kept, -torch.inf)
        masked = uses(given, kind, mask=mask)
        places = kept.nonzero().squeeze(-1)
        assert kept[masked[0]].all()
        assert not masked[-1][:, ~kept].any()
        if kind in ("one", "argmax"):
            continue
        # The same categories, drawn from what is left.
        leaf = logits[:, kept].requires_grad_()
        with monkeypatch.context() as patch:
            force(patch, torch.searchsorted(places, masked[0]))
            small = choose(leaf, kind)
        values = [small.gate(), small.weights(), small.select(normal(9, 2, seed=4)[kept])]
        for value, own, gradient in zip(values, masked[1:4], masked[4:], strict=True):
            assert_close(value.detach(), own)
            upstream = normal(*value.shape, seed=5)
            assert_close(torch.autograd.grad(value, leaf, upstream)[0], gradient[:, kept], 1e-10)


@every_kind
@pytest.mark.parametrize("dim", [0, 1, -2])
def test_any_axis_equals_transposing(kind: str, dim: int) -> None:
    logits = normal(3, 4, 8)
    ours, expected = uses(logits.movedim(-1, dim), kind, dim=dim), uses(logits, kind)
    assert torch.equal(ours[0], expected[0])
    for own, other in zip(ours[4:], expected[4:], strict=True):
        assert_close(own.movedim(dim, -1), other)


@every_kind
def test_rows_with_few_categories_and_rows_with_nan(kind: str) -> None:
    logits = normal(4, 6)
    logits[0] = -torch.inf
    logits[1, 2:] = -torch.inf
    logits[2, 3] = torch.nan
    index, gates, weights, rows, *gradients = uses(logits, kind)
    k = index.shape[-1]
    assert (index[0] == 6).all()
    assert not any(each[0].any() for each in (gates, weights, rows, *gradients))
    assert sorted(index[1].tolist()) == sorted([0, 1, 6, 6][:k]) if k > 1 else (index[1] < 2).all()
    assert gates[1].sum() == min(k, 2)
    assert_close(weights[1].sum(), torch.tensor(1.0))
    assert all(gradient.isfinite().all() for gradient in (each[[0, 1, 3]] for each in gradients))
    assert (index[2] == 7).all()
    assert all(each[2].isnan().all() for each in (gates, weights, rows, *gradients))
    log_prob = choose(logits, kind).log_prob
    assert log_prob[0] == 0
    assert log_prob[2].isnan()
    if "sequential" not in kind and k > 1:
        assert not gradients[0][1].any()
        assert log_prob[1] == 0


@every_kind
def test_all_categories_are_chosen(kind: str) -> None:
    if kind == "one":
        pytest.skip("one category is not all of them")
    index, *_, gradient, _, _ = uses(normal(3, 4), kind, k=4)
    assert torch.equal(index.sort(-1).values, torch.arange(4).expand(3, 4))
    if "sequential" not in kind:
        assert_close(gradient, torch.zeros(3, 4), 1e-12)


def test_logits_that_were_changed_are_noticed() -> None:
    logits = 1 * normal(2, 6).requires_grad_()
    drawn = gapped.choose(logits, k=2)
    logits.mul_(2.0)
    for use in (drawn.gate, drawn.weights, lambda: drawn.log_prob, lambda: drawn.select(torch.eye(6))):
        with pytest.raises(RuntimeError, match="changed after they were drawn"):
            use()


@every_law
def test_temperatures_that_were_changed_are_noticed(law: Any) -> None:
    tau = torch.tensor(0.5)
    drawn = gapped.choose(normal(2, 6).requires_grad_(), k=2, law=law, estimator=gapped.StraightThrough(tau))
    gate = drawn.gate()
    tau.mul_(2.0)
    with pytest.raises(RuntimeError, match="changed after they were drawn"):
        drawn.weights()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        gate.sum().backward()


# Numbers of categories are what a trace may keep, and says that it keeps.
@pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning", "ignore:.*torch.jit.* is deprecated")
@every_kind
def test_a_trace_does_not_keep_the_path_of_its_example(kind: str) -> None:
    leaf, k = normal(4, 9).requires_grad_(), KINDS[kind].get("k", 3)
    program = lambda x: choose(x, kind, generator=None).weights()  # noqa: E731
    trace = torch.jit.trace(program, (leaf,), check_trace=False)
    other = normal(4, 9, seed=2)
    other[1, 3], other[2, 1:] = torch.nan, -torch.inf
    weights = trace(other.requires_grad_())
    assert weights[1].isnan().all()
    assert weights[2].sort().values.tolist() == [0.0] * (k - 1) + [1.0]
    (gradient,) = torch.autograd.grad(weights[0].square().sum(), other)
    assert gradient[0].isfinite().all()
    assert gradient[0].any()


@every_kind
def test_nothing_comes_from_places_without_a_category(kind: str) -> None:
    logits = normal(2, 5).masked_fill_(torch.tensor([True, False, True, True, False]), -torch.inf)
    leaf = logits.requires_grad_()
    drawn = choose(leaf, kind)
    for value in (drawn.gate(), drawn.weights(), drawn.select(normal(5, 2, seed=2))):
        g = normal(*value.shape, seed=3)
        empty = (drawn.index == 5).view(*drawn.index.shape, *(1 for _ in value.shape[2:]))
        expected, found = (
            torch.autograd.grad(value, leaf, torch.where(empty, filling, g), retain_graph=True)[0]
            for filling in (0.0, torch.nan)
        )
        assert_close(found, expected, 0.0)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"k": 0}, "k: got 0, expected an integer from 1 to 4"),
        ({"k": 5}, "k: got 5"),
        ({"k": True}, "k: got True"),
        ({"k": 2, "law": "exact"}, "law: got 'exact', expected 'subset' or 'sequential'"),
        ({"k": 2, "draw": "top"}, "draw: got 'top', expected 'sample' or 'argmax'"),
        ({"draw": "top"}, "draw: got 'top', expected 'sample' or 'argmax'"),
        (
            {"k": 2, "estimator": "gapmax"},
            "estimator: got .*GapMax.*, expected 'reinmax', 'straight-through'",
        ),
        ({"k": 2, "estimator": "gst"}, "gap: got 'auto', expected a number"),
        ({"k": 2, "estimator": gapped.GST(gap=1.0, detach=False)}, "detach: got False"),
        ({"k": 2, "estimator": gapped.ReinMax(tau=2.0)}, "tau: got 2.0, expected 1"),
        ({"k": 2, "estimator": gapped.StraightThrough(hard=False)}, "hard: got False"),
        ({"k": 2, "law": "sequential", "estimator": "gumbel-softmax"}, "estimator: got .*needs no noise"),
        ({"k": 2, "dim": 3}, "dim: got 3"),
        ({"k": 2, "mask": torch.ones(3, dtype=torch.bool)}, "mask: got a tensor of shape"),
        ({"k": 7, "estimator": "gapmax"}, "k: got 7, expected an integer from 1 to"),
        ({"k": torch.tensor([2, 3])}, "k: got "),
    ],
)
def test_bad_arguments(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(gapped.GappedError, match=message):
        gapped.choose(torch.zeros(2, 4), **arguments)


def test_a_table_of_another_size_is_refused() -> None:
    with pytest.raises(gapped.GappedError, match="table: got a tensor of shape"):
        gapped.choose(torch.zeros(2, 4), k=2).select(torch.zeros(3, 2))


@pytest.mark.parametrize(
    "misuse",
    [
        lambda drawn, table: drawn @ table,
        lambda drawn, table: table[drawn],
        lambda drawn, table: torch.nn.functional.embedding(drawn, table),
        lambda drawn, table: drawn == 3,
        lambda drawn, table: torch.stack([drawn, drawn]),
        lambda drawn, table: drawn.shape,
    ],
)
def test_what_is_taken_for_a_tensor_says_what_to_take_instead(misuse: Any) -> None:
    logits, table = normal(4, 5), normal(5, 3)
    linear = gapped.linear_choice(normal(4, 3), table)
    for drawn in (gapped.choose(logits), gapped.choose(logits, k=2), linear):
        with pytest.raises(
            (TypeError, AttributeError), match=r"is no tensor; take select\(table\), or index"
        ):
            misuse(drawn, table)
        assert drawn == drawn
        assert not hasattr(drawn, "nonsense")
