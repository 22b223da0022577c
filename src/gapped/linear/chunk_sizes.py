"""How many rows of logits exist at a time: what can be tuned for choices from linear heads."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

# Bytes of the logits of one chunk in float32, where torch computes; four such tensors exist at a time.
CHUNK_BYTES = 1 << 23
GPU_CHUNK_BYTES = 1 << 25
# With fewer rows the products wait for the weight and for the sum of its gradients: on a CPU, at 32,000 x
# 256, chunks of 64, 32 and 16 rows take 1.08, 1.35 and 1.64 times as long as chunks of 128.
FEWEST_ROWS = 64
# Where kernels compute: bytes beyond the gradients, the result of `select` included, and what numbers per row
# and kernels need of them.
MEMORY, MARGIN = 1 << 28, 1 << 22
# Bytes of a mask that is broadcast over some of the rows, or not contiguous, as far as it exists at a time.
MASK_BYTES = 1 << 22
# Rows of a product come in multiples of this, as its tiles do.
TILE = 128
# On a GPU a half-precision gradient of the weight is rounded after each span of rows: no more than so often.
MOST_ROUNDINGS = 32


class Spans(NamedTuple):
    """How many rows a backward pass holds."""

    part: int
    """Of incoming gradients at the sample, which exist beside their logits."""
    span: int
    """Of logits, whose gradients take their place before they are multiplied."""


def rows_of_a_chunk(estimator: Any, categories: int, device: torch.device, has_kernel: bool) -> int:
    """How many rows are computed at a time by torch, or, if `has_kernel`, by the kernels of short rows."""
    # Gumbel-Rao and ReinMax-Rao in torch have a point for each draw.
    samples = 1 if has_kernel else getattr(estimator, "samples", 1)
    most = GPU_CHUNK_BYTES if device.type == "cuda" else CHUNK_BYTES
    return max(most // (4 * categories * samples), FEWEST_ROWS // samples, 1)


class Pass(NamedTuple):
    """What decides how many rows a backward pass holds."""

    rows: int
    """All of them."""
    row_bytes: int
    """Of the logits of a row."""
    spare: int
    """Bytes that are there anyway, for the gradient of a table, which is filled last."""
    result: int
    """Bytes that the caller holds: the result whose gradient comes in."""
    is_dense: bool
    """Whether the incoming gradient has a number for each logit, not one for each row."""
    is_rounded: bool
    """Whether the gradient of the weight is rounded after each span."""

    @property
    def least(self) -> int:
        """Rows that a span must have."""
        return -(-self.rows // (MOST_ROUNDINGS * TILE)) * TILE if self.is_rounded else 1


def spans_of_chunks(this: Pass, step: int) -> Spans:
    """Rows of a backward pass in torch, whose noise belongs to chunks of `step` rows.

    The span fits where there is room to spare, but has one chunk at least.
    """
    return Spans(step, max(this.spare // (step * this.row_bytes), -(-this.least // step)) * step)


def spans_of_kernels(this: Pass) -> Spans:
    """Rows of a backward pass by kernels, whose noise does not depend on how rows are divided."""
    free = max(MEMORY - MARGIN - this.result, MEMORY // 4)
    if not this.is_dense:
        span = equal_rows(this.rows, max(max(this.spare, free) // this.row_bytes, this.least))
        return Spans(span, span)
    # Without room to spare, a third is for the incoming gradient.
    most, rest = (this.spare, free) if 3 * this.spare >= 2 * free else (2 * free // 3, free // 3)
    span = equal_rows(this.rows, max(most // this.row_bytes, this.least))
    return Spans(equal_rows(span, rest // this.row_bytes), span)


def equal_rows(rows: int, most: int) -> int:
    """Rows of a chunk, if there are at most `most` in each and the chunks are as equal as tiles allow.

    >>> equal_rows(8192, 4096), equal_rows(8192, 700), equal_rows(100, 700), equal_rows(500, 90)
    (4096, 640, 100, 84)
    """
    tile = TILE if most >= TILE else 1
    most = max(most // tile * tile, 1)
    chunks = max(-(-rows // most), 1)
    each = -(-rows // chunks)
    return max(each if chunks == 1 else -(-each // tile) * tile, 1)


def of_rows(values: Tensor, rows: slice) -> Tensor:
    """Some rows; `values` as they are, if those are all: a view takes the host longer than it seems."""
    return values if rows.start == 0 and rows.stop == values.shape[0] else values[rows]


def slices(rows: int, step: int) -> Iterator[slice]:
    """So many rows, `step` at a time."""
    return (slice(start, min(start + step, rows)) for start in range(0, rows, step))
