"""The memory that the page about other code names."""

from __future__ import annotations

from collections.abc import Callable

import torch
from conftest import normal
from torch import Tensor
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import gapped
from gapped_lab.bench.timing import peak_memory


def test_tensors_that_a_soft_sample_times_a_table_needs() -> None:
    """Three of the size of the logits, as in torch; two where blocks of rows are computed again."""
    logits = normal(512, 2_000, dtype=torch.float32).requires_grad_()
    table = normal(2_000, 8, seed=2, dtype=torch.float32)

    def tensors(use: Callable[[Tensor], Tensor]) -> float:
        def call() -> None:
            torch.autograd.grad(use(logits).sum(), logits)

        return peak_memory(call, torch.device("cpu")) / (4 * logits.numel())

    def mixed(rows: Tensor) -> Tensor:
        return gapped.gumbel_softmax(rows, 0.5) @ table

    def in_blocks(rows: Tensor) -> Tensor:
        parts = rows.split(16)
        return torch.cat([checkpoint(mixed, part, use_reentrant=False) for part in parts])

    assert 2.9 < tensors(lambda rows: F.gumbel_softmax(rows, 0.5) @ table) < 3.2
    assert 2.9 < tensors(mixed) < 3.2
    assert tensors(in_blocks) < 2.3
