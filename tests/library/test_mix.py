"""`Pathwise.mix`: the soft sample times a table, which is never held, against the product written out."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.utils.checkpoint
from conftest import (
    KINDS,
    MEMBERS,
    SOFT,
    assert_all_close,
    assert_close,
    assert_equal,
    normal,
    pulled,
    seeded,
)
from live_bytes import bytes_of, peak_of, saved_bytes
from torch import Tensor
from variants import DTYPES, every_soft_variant, levels_per_row, make

import gapped

ROWS, K, G, STEP = (3, 5), 7, 3, 6
Use = Callable[[Tensor, Tensor], Tensor]


@pytest.fixture
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks of `STEP` rows, whatever the estimator."""
    monkeypatch.setattr("gapped.vocabulary.mix.rows_of_a_chunk", lambda *_: STEP)


several_blocks = pytest.mark.usefixtures("small_blocks")


def sampled(estimator: Any, logits: Tensor, mask: Tensor | None = None) -> Tensor:
    """The soft sample of all rows, with the noise of each block, in the graph."""
    shape, estimator = logits.shape[:-1], replace(estimator, hard=False)
    logits = logits if mask is None else logits.masked_fill(~mask, -torch.inf)
    flat = logits.reshape(-1, logits.shape[-1])
    levels = {name: getattr(estimator, name) for name in estimator.levels}
    levels = {name: v.expand(shape).reshape(-1) for name, v in levels.items() if isinstance(v, Tensor)}
    step = STEP if estimator.is_rowwise() else max(len(flat), 1)
    keys = torch.randint(2**62, (-(-len(flat) // step),), generator=seeded())
    blocks = []
    for number, key in enumerate(keys.tolist()):
        rows = slice(number * step, (number + 1) * step)
        own = replace(estimator, **{name: level[rows] for name, level in levels.items()})
        blocks.append(own.sample(flat[rows], generator=seeded(key)))
    return torch.cat([flat[:0], *blocks]).view(logits.shape)


def product(sample: Tensor, table: Tensor, by_group: bool = False) -> Tensor:
    """The sum over all categories, written out."""
    rest = table.shape[2 if by_group else 1 :]
    rows = sample.view(*sample.shape, *(1 for _ in rest))
    return (rows * table).sum(sample.dim() - 1)


def mixed(estimator: Any, **how: Any) -> Use:
    return lambda logits, table: estimator.mix(logits, table, generator=seeded(), **how)


def dense(estimator: Any, mask: Tensor | None = None, by_group: bool = False) -> Use:
    return lambda logits, table: product(sampled(estimator, logits, mask), table, by_group)


MASKS = {
    "none": None,
    "shared": torch.arange(K) % 3 > 0,
    "per batch": normal(ROWS[0], 1, K, seed=9) > -0.5,
    "per row": normal(*ROWS, K, seed=9) > -0.5,
}


@several_blocks
@every_soft_variant
@pytest.mark.parametrize("mask", list(MASKS))
@pytest.mark.parametrize("hard", [True, False])
def test_value_and_gradients_are_those_of_the_product(name: str, mask: str, hard: bool) -> None:
    estimator = make(name, hard=hard)
    inputs = normal(*ROWS, K), normal(K, 2, seed=2)
    ours = pulled(mixed(estimator, mask=MASKS[mask]), *inputs)
    theirs = pulled(dense(estimator, MASKS[mask]), *inputs)
    assert_all_close(ours, theirs, 1e-10)
    assert all(each.abs().max() > 0 for each in ours)
    if mask == "shared":
        exists = MASKS[mask]
        assert exists is not None
        assert not ours[1][..., ~exists].any()
        assert not ours[2][~exists].any()


@several_blocks
@every_soft_variant
@pytest.mark.parametrize("groups", [(), (G,)], ids=str)
@pytest.mark.parametrize("rest", [(), (1,), (2, 3), (0,)], ids=str)
@pytest.mark.parametrize("rows", [(), (1,), (0,), (2, 4), (13,)], ids=str)
def test_shapes(name: str, rows: tuple[int, ...], rest: tuple[int, ...], groups: tuple[int, ...]) -> None:
    """One table for all rows, or one for each group, which has more than two axes."""
    rest = rest or ((1,) if groups else ())
    inputs = normal(*rows, *groups, K), normal(*groups, K, *rest, seed=2)
    ours, theirs = (
        pulled(use, *inputs) for use in (mixed(make(name)), dense(make(name), by_group=bool(groups)))
    )
    assert ours[0].shape == (*rows, *groups, *rest)
    assert_all_close(ours, theirs, 1e-10)


@several_blocks
@every_soft_variant
@pytest.mark.parametrize("keeps_axis", [False, True])
def test_levels_per_row(name: str, keeps_axis: bool) -> None:
    options = levels_per_row(name, *ROWS)
    ours = make(name, **{level: t.unsqueeze(-1) if keeps_axis else t for level, t in options.items()})
    inputs = normal(*ROWS, K), normal(K, 2, seed=2)
    assert_all_close(pulled(mixed(ours), *inputs), pulled(dense(make(name, **options)), *inputs), 1e-10)


@several_blocks
@pytest.mark.parametrize("shape", [(), (5,), (3, 1), ROWS], ids=str)
def test_a_temperature_is_learned(shape: tuple[int, ...]) -> None:
    taus = normal(*shape, seed=4).abs() + 0.5 if shape else torch.tensor(0.7, dtype=torch.float64)
    inputs = normal(*ROWS, K), normal(K, 2, seed=2), taus
    results = [
        pulled(lambda x, t, tau, use=use: use(gapped.GumbelSoftmax(tau))(x, t), *inputs)  # type: ignore[misc]
        for use in (mixed, dense)
    ]
    assert_all_close(*results, 1e-10)
    assert results[0][3].abs().min() > 0
    with torch.no_grad():
        leaf = taus.clone().requires_grad_()
        assert not gapped.GumbelSoftmax(leaf).mix(*inputs[:2]).requires_grad
    alone = gapped.GumbelSoftmax(leaf).mix(*inputs[:2], generator=seeded())
    (gradient,) = torch.autograd.grad(alone, leaf, normal(*alone.shape, seed=3))
    assert_close(gradient, results[0][3], 1e-10)


@several_blocks
@every_soft_variant
def test_any_axis_holds_the_categories(name: str) -> None:
    """With the mask's axes and the temperatures' as those of the logits; nothing has to be contiguous."""
    logits, table, mask = normal(3, K, 5), normal(2, K, seed=2), normal(3, K, 5, seed=9) > -0.5
    how = {"dim": 1, "mask": mask}
    ours = pulled(lambda x, t: mixed(make(name), **how)(x, t.T), logits, table)
    estimator = dense(make(name), mask.movedim(1, -1))
    theirs = pulled(lambda x, t: estimator(x.movedim(1, -1), t.T), logits, table)
    assert_all_close(ours, theirs, 1e-10)
    strided = normal(K, 2)[:, 0]
    assert_close(mixed(make(name))(strided, table.T), dense(make(name))(strided, table.T), 1e-10)


@several_blocks
@every_soft_variant
def test_rows_without_categories_and_with_a_nan(name: str) -> None:
    """The first are zero with a gradient of zero, the others NaN; further rows do not notice."""
    logits, table = normal(12, K), normal(K, 2, seed=2)
    logits[1], logits[7, 3], logits[8, 0] = -torch.inf, torch.nan, torch.inf
    value, gradient, _ = pulled(mixed(make(name)), logits, table)
    others = [row for row in range(12) if row not in (1, 7, 8)]
    for each in (value, gradient):
        assert not each[1].any()
        assert each[[7, 8]].isnan().all()
        assert each[others].isfinite().all()
    logits[[7, 8]] = 0.0
    assert_all_close(
        pulled(mixed(make(name)), logits, table), pulled(dense(make(name)), logits, table), 1e-10
    )


@several_blocks
def test_only_what_is_wanted_is_computed() -> None:
    logits, table = normal(*ROWS, K).requires_grad_(), normal(K, 2, seed=2).requires_grad_()
    estimator = gapped.GumbelSoftmax(0.7)
    both = torch.autograd.grad(mixed(estimator)(logits, table).sum(), (logits, table))
    (for_logits,) = torch.autograd.grad(mixed(estimator)(logits, table.detach()).sum(), logits)
    (for_table,) = torch.autograd.grad(mixed(estimator)(logits.detach(), table).sum(), table)
    assert_equal((for_logits, for_table), both)
    assert not mixed(estimator)(logits.detach(), table.detach()).requires_grad


def test_blocks_have_noise_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gapped.vocabulary.mix.rows_of_a_chunk", lambda *_: 2)
    rows = gapped.GumbelSoftmax().mix(torch.zeros(8, K), torch.eye(K), generator=seeded())
    assert len(rows.unique(dim=0)) == 8


@several_blocks
@pytest.mark.parametrize("name", SOFT)
@pytest.mark.parametrize("of_table", DTYPES, ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_dtypes_of_logits_and_table_may_differ(name: str, dtype: torch.dtype, of_table: torch.dtype) -> None:
    """The sample has the dtype of the logits, the product that of the table."""
    logits, table = normal(20, K, dtype=dtype), normal(K, 2, seed=2, dtype=of_table)
    ours = pulled(mixed(make(name)), logits, table)
    assert [each.dtype for each in ours] == [of_table, dtype, of_table]
    theirs = pulled(lambda x, t: sampled(make(name), x).to(of_table) @ t, logits, table)
    # Only the sum over rows is divided otherwise; it is rounded once.
    tolerances = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 2e-2, torch.float16: 2e-3}
    assert_all_close(ours[:2], theirs[:2], max(tolerances[dtype], tolerances[of_table]) / 10)
    assert_close(ours[2], theirs[2], tolerances[of_table])


@several_blocks
def test_half_precision_is_summed_in_float32() -> None:
    """Many blocks that each add 6 to one entry: in bfloat16 the sum would stop before 4096."""
    logits = torch.tensor([[0.0, -torch.inf]], dtype=torch.bfloat16).expand(4098, 2)
    table = torch.zeros(2, 1, dtype=torch.bfloat16, requires_grad=True)
    value = gapped.GumbelSoftmax().mix(logits, table)
    (gradient,) = torch.autograd.grad(value.sum(), table)
    assert gradient.tolist() == [[4096.0], [0.0]], "4098, rounded once"


@several_blocks
@pytest.mark.parametrize("is_inside", [True, False])
def test_autocast(is_inside: bool) -> None:
    """The product in bfloat16, as torch's would be; gradients in the dtypes of the inputs."""
    logits, table = (
        normal(*s, seed=n, dtype=torch.float32).requires_grad_() for n, s in enumerate(((9, K), (K, 2)), 1)
    )
    upstream = normal(9, 2, seed=3, dtype=torch.bfloat16)
    results = []
    for use in (mixed(make("gst")), lambda x, t: sampled(make("gst"), x) @ t):
        with torch.autocast("cpu", torch.bfloat16):
            value = use(logits, table)
            found = torch.autograd.grad(value, (logits, table), upstream) if is_inside else None
        found = torch.autograd.grad(value, (logits, table), upstream) if found is None else found
        results.append((value, *found))
    assert [each.dtype for each in results[0]] == [torch.bfloat16, torch.float32, torch.float32]
    torch.testing.assert_close(*results, rtol=2e-2, atol=2e-2)
    doubles = logits.detach().double(), table.detach().double()
    with torch.autocast("cpu", torch.bfloat16):
        assert make("gst").mix(*doubles).dtype == torch.float64


@pytest.mark.filterwarnings(
    "ignore:The .grad attribute:UserWarning"
)  # by the compiler itself, at a graph break
def test_compiled_code_breaks_the_graph_and_agrees() -> None:
    estimator = gapped.GumbelSoftmax(0.7)

    def cost(logits: Tensor, table: Tensor) -> Tensor:
        return estimator.mix(logits * 2, table).square()

    runs = (cost, torch.compile(cost, backend="eager"))
    assert_equal(*(pulled(run, normal(*ROWS, K), normal(K, 2, seed=2)) for run in runs))
    torch.compiler.reset()


@pytest.mark.parametrize("by_group", [False, True])
def test_under_function_transforms(by_group: bool) -> None:
    """vmap(grad) over examples, each with its own table. Straight-through's soft sample has no noise."""
    logits = normal(6, 4, G, K)
    tables = normal(6, G, K, 2, seed=2) if by_group else normal(6, K, 2, seed=2)

    def cost(rows: Tensor, table: Tensor) -> Tensor:
        return gapped.StraightThrough(2.0).mix(rows, table).square().sum()

    def plain(rows: Tensor, table: Tensor) -> Tensor:
        return product(torch.softmax(rows / 2, -1), table, by_group).square().sum()

    ours, theirs = (
        torch.func.vmap(torch.func.grad(each, (0, 1)), randomness="different")(logits, tables)
        for each in (cost, plain)
    )
    assert_all_close(ours, theirs, 1e-10)


@pytest.mark.parametrize("which", ["logits", "table", "tau"])
def test_tensors_changed_before_the_backward_pass_are_noticed(which: str) -> None:
    tensors = {"logits": normal(4, K).requires_grad_() * 1, "table": normal(K, 2), "tau": torch.ones(4)}
    value = gapped.GST(tensors["tau"]).mix(tensors["logits"], tensors["table"])
    tensors[which] *= 2
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        value.sum().backward()


@pytest.mark.parametrize("name", [name for name in MEMBERS if not KINDS[name].has_surrogate])
def test_estimators_without_soft_samples_are_refused(name: str) -> None:
    with pytest.raises(gapped.GappedError, match=r"estimator: got .*soft samples.*select"):
        make(name).mix(normal(4, K), normal(K, 2))


@pytest.mark.parametrize(
    ("table", "message"),
    [
        (normal(K - 1, 2), rf"table: .*a tensor with {K} rows.*\({G}, {K}, ...\)"),
        (normal(G, K), "table: got a tensor of shape"),
        (torch.zeros(K, 2, dtype=torch.int64), "floating-point"),
        ([[1.0]] * K, "an object of type list"),
        (torch.zeros(K, 2, device="meta"), "a tensor on meta"),
    ],
)
def test_other_tables_are_refused(table: Any, message: str) -> None:
    with pytest.raises(gapped.GappedError, match=message):
        gapped.GumbelSoftmax().mix(normal(4, G, K), table)


@pytest.mark.slow_if(lambda name, form: name in ("gumbel-rao", "decoupled"))
@pytest.mark.parametrize("name", SOFT)
@pytest.mark.parametrize("form", ["plain", "masked", "axis"])
def test_nothing_of_the_size_of_the_logits_but_their_gradient(
    name: str, form: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows, categories, width = 4096, 1024, 4
    logits = torch.zeros(rows, categories).requires_grad_()
    table = torch.zeros(categories, width).requires_grad_()
    upstream, mask = torch.ones(rows, width), torch.arange(categories) > 3
    how: dict[str, Any] = {"mask": mask} if form == "masked" else {}
    if form == "axis":
        logits, how = torch.zeros(categories, rows).requires_grad_(), {"dim": 0}
    estimator = make(name, samples=3) if name == "gumbel-rao" else make(name)

    def call() -> object:
        return torch.autograd.grad(estimator.mix(logits, table, **how), (logits, table), upstream)

    results = bytes_of(logits, table, upstream)
    # Blocks of a few rows: a hundredth of the logits.
    monkeypatch.setattr("gapped.vocabulary.mix.rows_of_a_chunk", lambda *_: 48)
    peak = peak_of(call, logits, table, upstream, mask)
    # The gradients and the result, and what a block needs.
    assert results <= peak <= results + logits.nbytes / 2
    kept = saved_bytes(lambda: estimator.mix(logits, table, **how))
    # The keys of the blocks come besides.
    assert kept <= bytes_of(logits, table) + logits.nbytes / 100

    def written_out() -> object:
        sample = replace(estimator, hard=False).sample(logits, **how).movedim(how.get("dim", -1), -1)
        return torch.autograd.grad(sample @ table, (logits, table), upstream)

    assert peak_of(written_out, logits, table, upstream, mask) > results + 1.9 * logits.nbytes


def test_the_gradient_of_a_learned_temperature_is_not_rounded() -> None:
    """Logits in half precision: it is added up in float32."""
    logits, table = normal(64, 9).bfloat16(), normal(9, 3, seed=1).bfloat16()
    tau = torch.tensor(0.7, requires_grad=True)
    gapped.GumbelSoftmax(tau=tau).mix(logits, table, generator=seeded()).float().sum().backward()
    assert tau.grad is not None
    assert tau.grad != tau.grad.bfloat16()
