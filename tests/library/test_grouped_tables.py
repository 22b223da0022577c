"""`choice.select` with a table for each group: the one-hot sample times the tables, not formed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from conftest import (
    DTYPES,
    TOLERANCE,
    assert_all_close,
    assert_close,
    every_member,
    normal,
    pulled,
    seeded,
)
from torch import Tensor
from variants import make

import gapped
from gapped_lab.bench.timing import peak_memory

G, K = 3, 5


def by_hand(sample: Tensor, table: Tensor) -> Tensor:
    """The one-hot sample of each group times the table of that group."""
    products = [sample[..., g, :] @ table[g].flatten(1) for g in range(len(table))]
    return torch.stack(products, -2).view(*sample.shape[:-1], *table.shape[2:])


def looked_up(estimator: Any, logits: Tensor, table: Tensor, **how: Any) -> tuple[Tensor, ...]:
    """The selected rows, and the gradients of a cost for logits and table, without the one-hot sample."""
    return pulled(lambda x, t: estimator.choose(x, generator=seeded(), **how).select(t), logits, table)


def multiplied(estimator: Any, logits: Tensor, table: Tensor, **how: Any) -> tuple[Tensor, ...]:
    """The same with it."""
    return pulled(lambda x, t: by_hand(estimator.sample(x, generator=seeded(), **how), t), logits, table)


@every_member
@pytest.mark.parametrize("rest", [(1,), (2,), (2, 3)], ids=str)
@pytest.mark.parametrize("rows", [(), (7,), (2, 4), (0,)], ids=str)
def test_each_group_looks_up_its_own_table(name: str, rows: tuple[int, ...], rest: tuple[int, ...]) -> None:
    logits, table = normal(*rows, G, K), normal(G, K, *rest, seed=2)
    ours, theirs = (use(make(name), logits, table) for use in (looked_up, multiplied))
    assert ours[0].shape == (*rows, G, *rest)
    assert_all_close(ours, theirs, 1e-12)


@every_member
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_dtypes_of_logits_and_table_may_differ(name: str, dtype: torch.dtype) -> None:
    logits, table = normal(20, G, K, dtype=dtype), normal(G, K, 2, seed=2, dtype=torch.float32)
    rows, slope, slope_of_table = looked_up(make(name), logits, table)
    assert [each.dtype for each in (rows, slope, slope_of_table)] == [torch.float32, dtype, torch.float32]
    in_one_dtype = torch.promote_types(dtype, torch.float32)
    expected = multiplied(make(name), logits.to(in_one_dtype), table.to(in_one_dtype))
    assert torch.equal(rows, expected[0].float())
    assert_close(slope, expected[1].to(dtype), max(TOLERANCE[dtype], 1e-5))
    assert_close(slope_of_table, expected[2].float(), 1e-5)


def test_one_group_is_a_plain_table() -> None:
    logits, table = normal(6, 1, K), normal(1, K, 2, seed=2)
    grouped, plain = looked_up(make("gst"), logits, table), looked_up(make("gst"), logits, table[0])
    assert_all_close(grouped, (*plain[:2], plain[2].unsqueeze(0)), 0.0)


def test_three_axes_decide_where_groups_and_categories_are_equally_many() -> None:
    choice = make("gst").choose(normal(6, K, K), generator=seeded())
    plain, grouped = normal(K, K), normal(K, K, 2)
    assert torch.equal(choice.select(plain), plain[choice.index])
    assert torch.equal(choice.select(grouped), grouped[torch.arange(K), choice.index])
    # Other tables with three axes have one row per category.
    cube = normal(K, 4, 2)
    assert torch.equal(choice.select(cube), cube[choice.index])


@every_member
def test_masked_rows_without_categories_and_nan(name: str) -> None:
    """A masked code is never selected; a row without codes gives zeros; a NaN stays one."""
    logits, table = normal(40, G, K), normal(G, K, 2, seed=2)
    mask = normal(40, G, K, seed=4) > -0.5
    logits[~mask] = 40.0
    mask[0, 1] = False
    rows, slope, slope_of_table = looked_up(make(name), logits, table, mask=mask)
    expected = multiplied(make(name), logits, table, mask=mask)
    assert_all_close((rows, slope, slope_of_table), expected, 1e-12)
    assert (rows[0, 1] == 0).all()
    assert (slope[~mask] == 0).all()
    logits[2, 0, 3] = torch.nan
    rows = make(name).choose(logits, generator=seeded()).select(table)
    assert rows.isnan().nonzero().tolist() == [[2, 0, 0], [2, 0, 1]]


@pytest.mark.parametrize("table", [normal(K - 1, 2), normal(G, K), normal(G, K - 1, 2)])
def test_other_shapes_are_refused(table: Tensor) -> None:
    choice = make("gst").choose(normal(4, G, K))
    message = rf"table: got a tensor of shape .* expected a tensor with {K} rows.*\({G}, {K}, ...\)"
    with pytest.raises(gapped.GappedError, match=message):
        choice.select(table)


# Transforms. A second derivative is refused, and kernels agree: see USES in conftest.py.


@every_member
def test_under_function_transforms(name: str) -> None:
    """vmap(grad) over examples, each with its own table: as over a loop."""
    logits, tables = normal(6, 4, G, K), normal(6, G, K, 2, seed=2)

    def cost(rows: Tensor, table: Tensor) -> tuple[Tensor, Tensor]:
        choice = make(name).choose(rows)
        return choice.select(table).square().sum(), choice.index

    per_example = torch.func.vmap(torch.func.grad(cost, (0, 1), has_aux=True), randomness="different")
    (slopes, slopes_of_tables), index = per_example(logits, tables)
    hot = torch.nn.functional.one_hot(index, K).double()
    rows = torch.einsum("engk,egkd->engd", hot, tables)
    assert_close(slopes_of_tables, torch.einsum("engk,engd->egkd", hot, 2 * rows))
    if name == "straight-through":
        p = torch.softmax(logits / 2, -1)
        dense = torch.einsum("engd,egkd->engk", 2 * rows, tables)
        assert_close(slopes, p * (dense - (p * dense).sum(-1, keepdim=True)) / 2)


def test_memory() -> None:
    """Beside the surrogate and the two gradients that autograd needs in any case, nothing of that size."""
    logits, table = normal(4_000, 2, 320, dtype=torch.float32), normal(2, 320, 8, dtype=torch.float32)
    x, t = logits.requires_grad_(), table.requires_grad_()

    def peak(use: Callable[[], Tensor]) -> float:
        def call() -> None:
            torch.autograd.grad(use().square().sum(), (x, t))

        return peak_memory(call, torch.device("cpu")) / (4 * logits.numel())

    estimator = gapped.GST(0.5)
    assert peak(lambda: estimator.choose(x).select(t)) < 3.2
    assert peak(lambda: torch.einsum("ngk,gkd->ngd", estimator.sample(x), t)) > 3.2


def test_a_single_row_selects_from_a_table_of_numbers() -> None:
    logits = torch.tensor([0.0, 99.0, 0.0], requires_grad=True)
    entry = gapped.choose(logits).select(torch.tensor([1.0, 2.0, 3.0]))
    assert entry.shape == ()
    assert entry.item() == 2


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("groups", [None, 2])
def test_tables_of_half_precision_add_up_many_rows(dtype: torch.dtype, groups: int | None) -> None:
    """A sum that is rounded at every row would stop at 256 or 2,048."""
    group = () if groups is None else (groups,)
    logits = torch.zeros(12_000, *group, 3, dtype=dtype, requires_grad=True)
    table = torch.zeros(*group, 3, 1, dtype=dtype, requires_grad=True)
    choice = gapped.GST().choose(logits, generator=seeded())
    choice.select(table).sum().backward()
    one_hot = torch.nn.functional.one_hot(choice.index, 3)
    assert torch.equal(table.grad, one_hot.sum(0).unsqueeze(-1).to(dtype))
