"""The kernels of long rows for choices without logits: parts, gradients in place, the law."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from kernel_cases import DEVICE, FUSED, GPU_MARKS, LONG, TOLERANCE, example, incoming, key
from torch import Tensor

from gapped.kernels.sampling import launch, long

pytestmark = GPU_MARKS
ROWS, CATEGORIES = 6, 4100
every_long = pytest.mark.parametrize("name", LONG)


def drawn(rows: int = ROWS) -> launch.Streamed:
    """Room for what a forward pass leaves, filled with values that it must overwrite."""
    stats, law = (torch.full((rows, 2), torch.nan, device=DEVICE) for _ in range(2))
    return launch.Streamed(torch.full((rows,), -1, dtype=torch.int64, device=DEVICE), stats, law)


def part_of(whole: launch.Streamed, rows: slice) -> launch.Streamed:
    assert whole.law is not None
    return launch.Streamed(whole.indices[rows], whole.stats[rows], whole.law[rows])


@every_long
def test_rows_in_parts_are_the_rows_of_one_launch(name: str) -> None:
    """Forward and backward, with the gradient in the place of the logits."""
    logits, grad, fused = example(ROWS, CATEGORIES), incoming(ROWS, CATEGORIES), FUSED[name]
    plain = launch.forward(logits, key(), fused, dense=False)
    expected = launch.backward(logits, plain.indices, plain.stats, key(), grad, fused)
    to, rows = drawn(), logits.clone()
    for part in (slice(0, 2), slice(2, 6)):
        launch.stream(logits[part], key(), fused, part_of(to, part), first=part.start)
        own = rows[part]
        indices, stats, _ = part_of(to, part)
        result = launch.backward(own, indices, stats, key(), grad[part], fused, out=own, first=part.start)
        assert result is own
    assert torch.equal(to.indices, plain.indices.long())
    assert plain.stats is not None
    assert torch.equal(to.stats, plain.stats)
    torch.testing.assert_close(rows, expected, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("name", ["gst-expected", "reinmax", "gapmax", "gumbel-softmax"])
def test_rows_that_are_read_twice_are_written_in_place(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(long, "most_segments", lambda device: 0)
    logits, fused = example(ROWS, CATEGORIES), FUSED[name]
    grad = incoming(ROWS)
    _, index, stats = launch.forward(logits, key(), fused, dense=False)
    expected = launch.backward(logits, index, stats, key(), grad, fused, at_index=True)
    launch.backward(logits, index, stats, key(), grad, fused, at_index=True, out=logits)
    assert torch.equal(logits, expected)


def law_of(logits: Tensor, fused: Any) -> Tensor:
    warmth = fused.tau_forward
    return logits.double() / (warmth.double().unsqueeze(-1) if isinstance(warmth, Tensor) else warmth)


@pytest.mark.parametrize(("name", "per_row"), [*((name, False) for name in LONG), ("decoupled", True)])
def test_the_law_and_its_gradient(name: str, per_row: bool) -> None:
    """log p(i), the sum it is normalised by, and (e_i - p) u; a row without categories, one with a NaN."""
    logits, fused, to = example(ROWS, CATEGORIES), FUSED[name], drawn()
    if per_row:
        fused = replace(fused, tau_forward=torch.linspace(0.5, 2.0, ROWS, device=DEVICE))
    logits[5, 7] = torch.nan
    launch.stream(logits, key(), fused, to)
    assert to.law is not None
    lawful, index = [0, 2, 3, 4], to.indices
    law = law_of(logits, fused)
    log_sum, log_p = law.logsumexp(-1)[lawful], torch.log_softmax(law, -1)
    expected = log_p.gather(-1, index.clamp(max=CATEGORIES - 1).unsqueeze(-1)).squeeze(-1)[lawful]
    torch.testing.assert_close(to.law[lawful].double(), torch.stack([expected, log_sum], 1), **TOLERANCE)
    assert index[[1, 5]].tolist() == [CATEGORIES, CATEGORIES + 1]
    assert to.law[1, 0] == 0
    assert to.law[5, 0].isnan()

    u = incoming(ROWS)
    launch.pull_log_prob(logits, to, u, fused)
    slope = law_of(torch.ones_like(logits[:, :1]), fused) * u.double().unsqueeze(-1)
    score = torch.zeros_like(log_p[lawful]).scatter_(-1, index[lawful].unsqueeze(-1), 1.0)
    expected = (score - log_p[lawful].exp()) * slope[lawful]
    torch.testing.assert_close(logits[lawful].double(), expected, **TOLERANCE)
    assert not logits[1].any()
    assert logits[5].isnan().all()
