"""Products of a few rows with each run's weight: the kernel against torch.

Without a GPU it runs in Triton's interpreter, in float32. How a GPU rounds is a test for a GPU.
"""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch
from torch import Tensor

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"

from gapped.lab.fleet.trainer import matmul_precision
from gapped.lab.tasks.listops import parts

pytest.importorskip("triton", reason="the kernels need Triton")
thin = pytest.importorskip("gapped.kernels.thin")
fused = pytest.importorskip("gapped.lab.tasks.listops.fused")

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
pytestmark = [pytest.mark.gpu] if torch.cuda.is_available() else []
# Sums of tens of products, in another order.
CLOSE = {"rtol": 1e-5, "atol": 1e-5}


@pytest.fixture(autouse=True)
def _blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks smaller than the examples, so that there are several, whatever other tests have set."""
    monkeypatch.setattr(thin, "COLUMNS", 32)
    monkeypatch.setattr(thin, "DEPTH", 16)


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE)


def scattered(rows: Tensor, layout: str) -> Tensor:
    """The same rows in a larger tensor: a place of a table, a step of a sequence, or left halves of lines."""
    runs, batch, width = rows.shape
    shape, where = {
        "plain": ((runs, batch, width), ...),
        "place": ((runs, 3, batch, width), (slice(None), 1)),
        "step": ((runs, batch, 3, width), (slice(None), slice(None), 1)),
        "left": ((runs, 2, batch, 2 * width), (slice(None), 1, ..., slice(width))),
    }[layout]
    view = torch.full(shape, torch.nan, device=DEVICE)[where]
    return view.copy_(rows)


def assert_product(x: Tensor, weight: Tensor, out: Tensor, *, transposed: bool = False) -> None:
    """Compare with torch; around `out` nothing is written."""
    expected = torch.empty_like(out, memory_format=torch.contiguous_format)
    parts.product(x, weight, expected, transposed=transposed)
    whole = out._base if out._base is not None else out
    outside = whole.isnan().sum() - out.isnan().sum()
    fused.product(x, weight, out, transposed=transposed)
    torch.testing.assert_close(out, expected, **CLOSE, equal_nan=True)
    assert whole.isnan().sum() == outside + out.isnan().sum()


@pytest.mark.parametrize("layout", ["plain", "place", "step", "left"])
@pytest.mark.parametrize("batch", [1, 5, 16, 32])
@pytest.mark.parametrize(("depth", "columns", "pieces"), [(20, 40, 1), (7, 33, 1), (13, 9, 2), (36, 64, 3)])
def test_rows_in_any_layout(layout: str, batch: int, depth: int, columns: int, pieces: int) -> None:
    x = scattered(normal(2, batch, depth), layout)
    weight = normal(2, pieces * depth, columns, seed=1)
    out = scattered(torch.full((2, batch, pieces * columns), torch.nan), layout)
    assert_product(x, weight, out)


@pytest.mark.parametrize("layout", ["plain", "place", "step"])
@pytest.mark.parametrize("batch", [1, 5, 16, 32])
@pytest.mark.parametrize(("depth", "columns"), [(40, 20), (33, 7)])
def test_transposed_weights(layout: str, batch: int, depth: int, columns: int) -> None:
    x = scattered(normal(2, batch, depth), layout)
    out = scattered(torch.full((2, batch, columns), torch.nan), layout)
    assert_product(x, normal(2, columns, depth, seed=1), out, transposed=True)


def test_long_sums_take_larger_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(thin, "LONG", 50)
    monkeypatch.setattr(thin, "LONG_DEPTH", 32)
    seen, run = [], thin.run

    def spy(*given: Any) -> None:
        seen.append(given[-1]["DEPTH"])
        run(*given)

    monkeypatch.setattr(thin, "run", spy)
    for depth in (49, 50):
        assert_product(normal(1, 3, depth), normal(1, depth, 5, seed=1), torch.empty(1, 3, 5, device=DEVICE))
    assert seen == [16, 32]


@pytest.mark.filterwarnings("ignore:invalid value encountered in matmul")
@pytest.mark.parametrize("transposed", [False, True])
def test_what_is_not_finite_stays(transposed: bool) -> None:
    """In its own row or column alone; the largest NaN, too, whose bits no rounding may carry over."""
    x, weight = normal(1, 3, 20), normal(1, 20, 40, seed=1)
    x[0, 0, 0] = torch.tensor(0x7FFFFFFF, dtype=torch.int32).view(torch.float32)
    x[0, 1, 1] = torch.inf
    weight[0, 2, 3] = -torch.inf
    weight[0, 3, 4] = torch.nan
    expected = torch.bmm(x, weight)
    out = torch.empty_like(expected)
    given = weight.transpose(1, 2).contiguous() if transposed else weight
    with matmul_precision(DEVICE):  # TF32 on a GPU
        fused.product(x, fused.rounded(given, 3), out, transposed=transposed)
    assert out[0, 0].isnan().all()
    assert out[0, 2].isfinite().sum() == 38
    torch.testing.assert_close(out, expected, rtol=0.01, atol=0.01, equal_nan=True)


@pytest.mark.parametrize("case", ["many rows", "scattered elements"])
def test_elsewhere_torch_multiplies(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(thin, "product", None)
    x = normal(2, 33, 6) if case == "many rows" else normal(2, 6, 4).transpose(1, 2)
    out = torch.empty(2, x.shape[1], 10, device=DEVICE)
    assert_product(x, normal(2, 12, 5, seed=1), out)


def test_the_definition_takes_float64() -> None:
    x, weight = normal(2, 3, 4).double(), normal(2, 8, 5, seed=1).double()
    out = x.new_empty(2, 3, 10)
    parts.product(x, weight, out)
    torch.testing.assert_close(out, torch.cat([x @ weight[:, :4], x @ weight[:, 4:]], -1))


def errors(out: Tensor, exact: Tensor) -> tuple[float, float]:
    """The largest error, and by how much numbers are too large on average, relative to their size."""
    error, size = out.double() - exact, exact.abs().mean()
    return (error.abs().max() / size).item(), ((error * exact.sign()).mean() / size).item()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="TF32 is for GPUs")
@pytest.mark.parametrize(("depth", "columns", "transposed"), [(300, 1500, False), (1500, 600, True)])
@pytest.mark.parametrize("precise", [False, True])
def test_a_gpu_rounds_to_nearest(
    depth: int, columns: int, transposed: bool, precise: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Factors cut off to TF32 would shrink the products by 7e-4 on average."""
    monkeypatch.undo()  # the blocks as they are
    x, weight = normal(54, 16, depth), normal(54, depth, columns, seed=1)
    exact = torch.bmm(x.double(), weight.double())
    out, torchs = exact.float(), exact.float()
    given = weight.transpose(1, 2).contiguous() if transposed else weight
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest" if precise else "high")
    try:
        thin.product(x, thin.rounded(given), out, transposed=transposed)
        torch.bmm(x, weight, out=torchs)
    finally:
        torch.set_float32_matmul_precision(before)
    most, shrinks = errors(out, exact)
    assert most < (1e-5 if precise else 1.5 * errors(torchs, exact)[0])
    assert abs(shrinks) < (1e-6 if precise else 5e-5)
    assert precise or most > 1e-4
