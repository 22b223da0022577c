"""A choice from a linear head equals that from logits which are written out: index, values, gradients."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from conftest import MEMBERS, assert_all_close, assert_close, normal, seeded
from linear_heads import ROWS, D, Dense, Problem, V, dense, problem, small_chunks
from statistical import chi_squared, counts_of, require_law, require_rejected
from torch import Tensor
from variants import VARIANTS, levels_per_row, make

import gapped

__all__ = ["small_chunks"]
pytestmark = pytest.mark.usefixtures("small_chunks")

CHOOSING = [*MEMBERS, *(name for name in VARIANTS if not name.startswith("nz-"))]
every_choice = pytest.mark.parametrize("name", CHOOSING)
MASKS = {
    "none": None,
    "shared": torch.arange(V) % 3 > 0,
    "per row": normal(*ROWS, V, seed=9) > -0.5,
    "per batch": normal(ROWS[0], 1, V, seed=9) > -0.5,
}


def uses(estimator: Any, parts: Problem, bias: Tensor | None, table: Tensor, mask: Tensor | None) -> Dense:
    choice = gapped.linear_choice(
        parts.hidden, parts.weight, bias, estimator=estimator, mask=mask, generator=seeded()
    )
    return Dense(choice.index, choice.select(table), choice.gate(), choice.log_prob, choice.entropy)


def gradients(result: Tensor, leaves: list[Tensor]) -> list[Tensor]:
    upstream = normal(1, *result.shape, seed=5, dtype=result.dtype)[0]
    return list(torch.autograd.grad(result, leaves, upstream, materialize_grads=True, retain_graph=True))


def assert_same(ours: Dense, theirs: Dense, leaves: list[Tensor]) -> None:
    assert torch.equal(ours.index, theirs.index)
    for own, expected in zip(ours[1:], theirs[1:], strict=True):
        assert_close(own, expected, 1e-10)
        assert_all_close(gradients(own, leaves), gradients(expected, leaves), 1e-10)


@pytest.mark.parametrize("name", MEMBERS)
def test_what_was_drawn_stays_drawn_where_logits_are_rounded_otherwise(name: str) -> None:
    estimator, rows = make(name), normal(64, V)
    index, gradient = estimator.outcome(rows, seeded(), True, dense=False)[1:]
    again = estimator.outcome(rows, seeded(), True, dense=False, given=index)
    assert torch.equal(again.category, index)
    assert torch.equal(again.gradient.points, gradient.points)
    for draw in ("sample", "argmax"):
        moved = replace(estimator, draw=draw).outcome(-rows, seeded(), True, dense=False, given=index)
        assert torch.equal(moved.category, index)


@every_choice
@pytest.mark.parametrize("mask", list(MASKS))
def test_every_value_and_gradient_is_that_of_the_dense_path(name: str, mask: str) -> None:
    parts = problem()
    arguments = (make(name), parts, parts.bias, parts.table, MASKS[mask])
    assert_same(uses(*arguments), dense(*arguments), list(parts))


@every_choice
def test_a_table_may_hold_anything_in_the_rows_of_masked_categories(name: str) -> None:
    """The padding of a vocabulary."""
    parts, mask = problem(), MASKS["shared"]
    found = []
    for padding in (0.0, torch.nan, torch.inf):
        table = torch.where(mask[:, None, None], parts.table.detach(), padding).requires_grad_()
        rows = uses(make(name), parts, parts.bias, table, mask).rows
        found.append([rows, *gradients(rows, [*parts[:3], table])])
    assert all(each.isfinite().all() for each in found[0])
    for other in found[1:]:
        assert all(torch.equal(ours, theirs) for ours, theirs in zip(other, found[0], strict=True))


@every_choice
def test_without_bias_and_with_the_weight_as_table(name: str) -> None:
    parts = problem()
    arguments = (make(name), parts, None, parts.weight, None)
    assert_same(uses(*arguments), dense(*arguments), [parts.hidden, parts.weight])


@every_choice
@pytest.mark.parametrize("keeps_axis", [False, True])
def test_levels_per_row(name: str, keeps_axis: bool) -> None:
    parts, options = problem(), levels_per_row(name, *ROWS)
    ours = make(name, **{level: t.unsqueeze(-1) if keeps_axis else t for level, t in options.items()})
    rest = (parts, parts.bias, parts.table, None)
    assert_same(uses(ours, *rest), dense(make(name, **options), *rest), list(parts))


@every_choice
@pytest.mark.parametrize("rows", [(), (1,), (0,), (2, 0), (9,)], ids=str)
def test_shapes_of_rows(name: str, rows: tuple[int, ...]) -> None:
    parts = problem(rows)
    ours = uses(make(name), parts, parts.bias, parts.table, None)
    assert [each.shape for each in ours] == [rows, (*rows, 2, 3), rows, rows, rows]
    if 0 in rows:
        for result in ours[1:]:
            assert all((each == 0).all() for each in gradients(result, list(parts)))
    else:
        assert_same(ours, dense(make(name), parts, parts.bias, parts.table), list(parts))


@every_choice
def test_one_category(name: str) -> None:
    parts = problem(categories=1)
    ours = uses(make(name), parts, parts.bias, parts.table, None)
    assert not ours.index.any()
    assert (ours.gates == 1).all()
    assert not ours.log_prob.any()
    assert not ours.entropy.any()
    for gradient in gradients(ours.rows, [parts.hidden, parts.weight, parts.bias]):
        assert_close(gradient, torch.zeros_like(gradient))


@every_choice
def test_a_row_without_categories_and_one_with_a_nan(name: str) -> None:
    """The first is zero with a gradient of zero, the second NaN; other rows do not notice."""
    parts = problem((6,))
    with torch.no_grad():
        parts.hidden[4, 2] = torch.nan
    mask = torch.ones(6, V, dtype=torch.bool)
    mask[1] = False
    ours = uses(make(name), parts, parts.bias, parts.table, mask)
    others = [0, 2, 3, 5]
    assert (ours.index[[1, 4]] == torch.tensor([V, V + 1])).all()
    assert (ours.index[others] < V).all()
    for result in ours[1:]:
        for values in (result, *gradients(result, [parts.hidden])):
            assert not values[1].any()
            assert values[4].isnan().all()
            assert values[others].isfinite().all()


@pytest.mark.parametrize("mask", list(MASKS))
@pytest.mark.parametrize("name", ["gapmax", "decoupled-warm"])
@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_given_categories_have_the_law_of_logits_written_out(
    name: str, mask: str, temperature: float
) -> None:
    parts, estimator, exists = problem(), make(name), MASKS[mask]
    drawn = gapped.linear_choice(*parts[:3], estimator=estimator, mask=exists, generator=seeded())
    options: dict[str, Any] = {"estimator": estimator, "mask": exists, "temperature": temperature}
    given = gapped.linear_choice(*parts[:3], index=drawn.index, **options)
    assert torch.equal(given.index, drawn.index)
    logits = (parts.hidden @ parts.weight.T + parts.bias) / (
        temperature * getattr(estimator, "tau_forward", 1)
    )
    logits = logits if exists is None else logits.masked_fill(~exists, -1e9)
    law = torch.distributions.Categorical(logits=logits)
    for ours, expected in ((given.log_prob, law.log_prob(drawn.index)), (given.entropy, law.entropy())):
        assert_close(ours, expected, 1e-10)
        for gradient, other in zip(
            gradients(ours, list(parts)), gradients(expected, list(parts)), strict=True
        ):
            assert_close(gradient, other, 1e-10)


def test_a_temperature_scales_law_and_gradient() -> None:
    """It is the division of the logits, by hand."""
    parts, results = problem(), []
    for scale, options in ((1.0, {"temperature": 0.7}), (0.7, {})):
        choice = gapped.linear_choice(
            parts.hidden / scale, parts.weight, parts.bias / scale, generator=seeded(), **options
        )
        results.append(
            Dense(choice.index, choice.select(parts.table), choice.gate(), choice.log_prob, choice.entropy)
        )
    assert_same(*results, list(parts))


def test_a_given_category_may_be_none_or_forbidden() -> None:
    """Neither has a gradient; the law of the row is what it is."""
    parts, mask = problem((3,)), torch.arange(V) > 0
    index = torch.tensor([V, 0, 5])
    choice = gapped.linear_choice(*parts[:3], index=index, mask=mask)
    log_prob = torch.log_softmax((parts.hidden @ parts.weight.T + parts.bias)[:, 1:], -1)
    assert choice.log_prob[:2].tolist() == [0.0, -torch.inf]
    assert_close(choice.log_prob[2], log_prob[2, 4], 1e-10)
    assert_close(choice.entropy, -(log_prob.exp() * log_prob).sum(-1), 1e-10)
    (gradient,) = torch.autograd.grad(choice.log_prob, parts.hidden, torch.ones(3, dtype=torch.float64))
    assert not gradient[:2].any()
    assert gradient[2].any()
    # In a row without categories any other is forbidden.
    choice = gapped.linear_choice(*parts[:3], index=index, mask=torch.zeros(V, dtype=torch.bool))
    assert choice.log_prob.tolist() == [0.0, -torch.inf, -torch.inf]
    gradients = torch.autograd.grad(choice.log_prob, parts[:3], torch.ones(3, dtype=torch.float64))
    assert not any(each.any() for each in gradients)


def test_the_law_is_the_softmax_of_the_logits() -> None:
    """Every chunk has noise of its own: rows that are alike draw independently."""
    hidden, weight = normal(1, D).expand(4000, D), normal(V, D, seed=2)
    index = gapped.linear_choice(hidden, weight, generator=seeded()).index
    p = torch.softmax(hidden[0] @ weight.T, -1)
    require_law(chi_squared(counts_of(index, V), p))
    repeated = index[:4].repeat(1000)  # as if all chunks had the same noise
    require_rejected(chi_squared(counts_of(repeated, V), p))
