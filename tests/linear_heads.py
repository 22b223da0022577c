"""A linear head in front of a choice, and the same choice from logits that are written out."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, NamedTuple

import pytest
import torch
from conftest import normal, seeded
from torch import Tensor

D, V, STEP = 6, 11, 4
ROWS = (3, 5)


class Problem(NamedTuple):
    """The tensors of a head, leaves."""

    hidden: Tensor
    weight: Tensor
    bias: Tensor
    table: Tensor


def problem(rows: tuple[int, ...] = ROWS, categories: int = V, dtype: torch.dtype = torch.float64) -> Problem:
    shapes = ((*rows, D), (categories, D), (categories,), (categories, 2, 3))
    return Problem(
        *(normal(*shape, seed=n, dtype=dtype).requires_grad_() for n, shape in enumerate(shapes, 1))
    )


@pytest.fixture
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Chunks of `STEP` rows, whatever the estimator."""
    monkeypatch.setattr("gapped.vocabulary.rows_of_a_chunk", lambda *_: STEP)


class Dense(NamedTuple):
    """The uses of a choice."""

    index: Tensor
    rows: Tensor
    gates: Tensor
    log_prob: Tensor
    entropy: Tensor


def dense(
    estimator: Any, parts: Problem, bias: Tensor | None, table: Tensor, mask: Tensor | None = None
) -> Dense:
    """`gapped.Pathwise.choose` on the logits of all rows, with the noise of each chunk of `STEP` rows."""
    shape = parts.hidden.shape[:-1]
    logits = parts.hidden @ parts.weight.T
    logits = (logits if bias is None else logits + bias).reshape(-1, len(parts.weight))
    masks = torch.ones_like(logits, dtype=torch.bool)
    if mask is not None:
        masks = mask.expand(*shape, len(parts.weight)).reshape(logits.shape)
    levels = {name: getattr(estimator, name) for name in estimator.levels}
    per_row = {
        name: level.expand(shape).reshape(-1) for name, level in levels.items() if isinstance(level, Tensor)
    }
    keys = torch.randint(2**62, (-(-len(logits) // STEP),), generator=seeded())
    results = []
    for number, key in enumerate(keys.tolist()):
        rows = slice(number * STEP, (number + 1) * STEP)
        own = replace(estimator, **{name: level[rows] for name, level in per_row.items()})
        choice = own.choose(logits[rows], mask=masks[rows], generator=seeded(key))
        results.append((choice.index, choice.select(table), choice.gate()))
    index, selected, gates = map(torch.cat, zip(*results, strict=True))
    warmth = getattr(estimator, "tau_forward", 1.0)
    warmth = warmth.reshape(-1, 1) if isinstance(warmth, Tensor) else warmth
    law = torch.log_softmax(logits.masked_fill(~masks, -torch.inf) / warmth, -1)
    log_prob = law.gather(-1, index.unsqueeze(-1)).squeeze(-1)
    entropy = -(law.exp() * law.masked_fill(~masks, 0.0)).sum(-1)
    numbers = (gates.view(shape), log_prob.view(shape), entropy.view(shape))
    return Dense(index.view(shape), selected.view(*shape, *table.shape[1:]), *numbers)
