"""`Pathwise.mix` with `backend="triton"`: the kernels draw the soft sample of each block, twice."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from conftest import normal
from kernel_cases import DEVICE, ESTIMATORS, GPU_MARKS, LONG
from live_bytes import bytes_of, peak_of
from torch import Tensor

import gapped
from gapped.kernels.sampling import launch
from gapped.kernels.sampling.fused import Fused
from gapped.linear import chunk_sizes

pytestmark = GPU_MARKS
SOFT = [name for name, estimator in ESTIMATORS.items() if estimator.has_surrogate]
ROWS, STEP = (2, 5), 4


@pytest.fixture
def small_blocks(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Room for `STEP` rows of float32 logits: the ten rows are cut into blocks of four, four and two."""
    categories = request.getfixturevalue("categories")
    monkeypatch.setattr(chunk_sizes, "MEMORY", 4 * STEP * 4 * categories)
    monkeypatch.setattr(chunk_sizes, "TILE", 1)


def estimators(name: str, **options: Any) -> gapped.Pathwise:
    # The interpreter takes as long for each draw as for a sample.
    options |= {"samples": 2} if name == "gumbel-rao" else {}
    return replace(ESTIMATORS[name], backend="triton", **options)


def sampled(estimator: gapped.Pathwise, logits: Tensor) -> Tensor:
    """The soft sample of all rows by the kernels, with the key of each block, in the graph."""
    rows = logits.reshape(-1, logits.shape[-1])
    generator = torch.Generator(DEVICE).manual_seed(1)
    keys = torch.randint(2**62, (-(-len(rows) // STEP),), device=DEVICE, generator=generator)
    fused = replace(estimator, hard=False)._fused
    assert fused is not None
    blocks = zip(rows.split(STEP), keys.split(1), strict=True)
    return torch.cat([launch._Sample.apply(own, key, fused) for own, key in blocks]).view(logits.shape)


def pulled(value: Tensor, *leaves: Tensor) -> list[Tensor]:
    weight = normal(*value.shape, seed=5, dtype=torch.float32).to(DEVICE, value.dtype)
    return [value.detach(), *torch.autograd.grad(value, leaves, weight)]


def leaves_of(*shapes: tuple[int, ...], dtype: torch.dtype = torch.float32) -> list[Tensor]:
    return [
        normal(*shape, seed=n, dtype=torch.float32).to(DEVICE, dtype).requires_grad_()
        for n, shape in enumerate(shapes, 1)
    ]


@pytest.mark.usefixtures("small_blocks")
@pytest.mark.parametrize(
    ("name", "categories"), [*((n, 7) for n in SOFT), *((n, 4100) for n in LONG if n in SOFT)]
)
@pytest.mark.parametrize("is_masked", [False, True])
def test_value_and_gradients_are_those_of_the_product(name: str, categories: int, is_masked: bool) -> None:
    estimator = estimators(name)
    logits, table = leaves_of((*ROWS, categories), (categories, 3))
    mask = (torch.arange(categories, device=DEVICE) % 3 > 0) if is_masked else None
    generator = torch.Generator(DEVICE).manual_seed(1)
    ours = pulled(estimator.mix(logits, table, mask=mask, generator=generator), logits, table)
    assert gapped.backend_used() == "triton"
    rows = logits if mask is None else logits.masked_fill(~mask, -torch.inf)
    theirs = pulled(sampled(estimator, rows) @ table, logits, table)
    for own, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(own, other, rtol=2e-4, atol=2e-5)


@pytest.mark.usefixtures("small_blocks")
@pytest.mark.parametrize("categories", [7])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_groups_half_precision_and_levels_per_row(categories: int, dtype: torch.dtype) -> None:
    """Blocks hold whole groups. A row without categories is zero."""
    logits, tables = leaves_of((5, 2, categories), (2, categories, 3), dtype=dtype)
    with torch.no_grad():
        logits[2, 1] = -torch.inf
    taus = torch.linspace(0.5, 1.0, 10, device=DEVICE).view(5, 2)
    generator = torch.Generator(DEVICE).manual_seed(1)
    # In half precision there is room for eight rows: two blocks of five, less what is no whole group.
    ours = pulled(
        gapped.GST(taus, gap="auto", backend="triton").mix(logits, tables, generator=generator),
        logits,
        tables,
    )
    keys = torch.randint(
        2**62, (-(-10 // STEP),), device=DEVICE, generator=torch.Generator(DEVICE).manual_seed(1)
    )
    rows, levels = logits.view(10, categories).split(STEP), taus.view(10).split(STEP)
    blocks = [
        launch._Sample.apply(own, key, Fused("gst-auto", tau, soft=True))
        for own, key, tau in zip(rows, keys.split(1), levels, strict=True)
    ]
    sample = torch.cat(blocks).view_as(logits)
    theirs = pulled(torch.einsum("ngk,gkd->ngd", sample, tables), logits, tables)
    tolerance = 1e-4 if dtype == torch.float32 else 3e-2
    for own, other in zip(ours, theirs, strict=True):
        assert own.dtype == dtype
        torch.testing.assert_close(own, other, rtol=tolerance, atol=tolerance)
    assert not ours[0][2, 1].any()
    assert not ours[1][2, 1].any()


@pytest.mark.usefixtures("small_blocks")
@pytest.mark.parametrize("categories", [4100])
def test_the_sample_is_drawn_again_only_for_the_table(
    categories: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a table that is given, the backward pass draws indices alone; the gradient is the same."""
    logits, table = leaves_of((*ROWS, categories), (categories, 3))
    estimator, results, dense = estimators("gumbel-softmax"), [], []
    forward = launch.forward

    def watched(*arguments: Any, **how: Any) -> launch.Forward:
        dense.append(how.get("dense", True))
        return forward(*arguments, **how)

    monkeypatch.setattr(launch, "forward", watched)
    for own in (table, table.detach()):
        value = estimator.mix(logits, own, generator=torch.Generator(DEVICE).manual_seed(1))
        results.append(torch.autograd.grad(value.square().sum(), logits))
        assert dense == [True] * 3 + [own is table] * 3
        dense.clear()
    torch.testing.assert_close(*results)


def test_memory_beyond_the_gradients(monkeypatch: pytest.MonkeyPatch) -> None:
    """No more than `MEMORY`, though the logits have eight times as much.

    The kernels are replaced, since the interpreter holds the arguments of the last launch: they allocate the
    sample and a few numbers per row.
    """
    rows, categories, width = 512, 4100, 16
    monkeypatch.setattr(chunk_sizes, "MEMORY", 64 * 2 * categories)
    monkeypatch.setattr(chunk_sizes, "TILE", 1)

    def forward(logits: Tensor, key: Tensor, fused: Any, *, dense: bool = True) -> launch.Forward:
        numbers = torch.zeros(len(logits), 2, device=DEVICE)
        return launch.Forward(
            torch.zeros_like(logits) if dense else logits.new_empty(0), numbers[:, 0], numbers
        )

    monkeypatch.setattr(launch, "forward", forward)
    monkeypatch.setattr(launch, "backward", lambda *_, out, **how: out)
    half: dict[str, Any] = {"dtype": torch.bfloat16, "device": DEVICE, "requires_grad": True}
    logits, table = torch.ones(rows, categories, **half), torch.ones(categories, width, **half)
    upstream = torch.ones(rows, width, dtype=torch.bfloat16, device=DEVICE)
    mask = torch.arange(categories, device=DEVICE) > 3
    estimator = gapped.GumbelSoftmax(backend="triton")

    def call() -> object:
        return torch.autograd.grad(estimator.mix(logits, table, mask=mask), (logits, table), upstream)

    beyond = peak_of(call, logits, table, upstream, mask) - bytes_of(logits, table, upstream)
    # The sum of the table's gradient is in float32, with a product beside it.
    beyond -= 3 * table.nbytes
    assert 2 * rows * categories == 8 * chunk_sizes.MEMORY
    assert chunk_sizes.MEMORY / 2 < beyond <= chunk_sizes.MEMORY
