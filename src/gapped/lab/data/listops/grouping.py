"""Groups of examples of similar length, so that a batch can be padded to its group's longest."""

from __future__ import annotations

import torch

from gapped.errors import reject


def buckets(lengths: torch.Tensor, waste: float = 0.1) -> list[torch.Tensor]:
    """Indices of the examples, in the fewest groups that keep the padding in bounds, shortest first.

    In each group at most the share `waste` of ``size * longest`` cells is padding, and lengths do not
    interleave: all examples of one length are in one group. Among the divisions with fewest groups the one
    with least padding is taken. Each example is in exactly one group, in its original order. Index tensors
    are int64, on the device of `lengths`.

    >>> buckets(torch.tensor([9, 3, 10, 3]), waste=0.1)
    [tensor([1, 3]), tensor([0, 2])]
    """
    if lengths.dim() != 1 or lengths.is_floating_point() or lengths.is_complex():
        raise reject("lengths", f"{lengths.dtype} of shape {tuple(lengths.shape)}", "integers of shape (N,)")
    if len(lengths) and int(lengths.min()) < 1:
        raise reject("lengths", int(lengths.min()), "lengths of at least 1")
    if not 0 <= waste < 1:
        raise reject("waste", waste, "a number from 0 to below 1")
    values, counts = torch.unique(lengths.long(), return_counts=True)
    found = []
    for low, high in _cuts(values.tolist(), counts.tolist(), waste):
        found.append(((lengths >= low) & (lengths <= high)).nonzero().flatten())
    return found


def _cuts(values: list[int], counts: list[int], waste: float) -> list[tuple[int, int]]:
    """Shortest and longest of each group, by dynamic programming over the distinct lengths."""
    sizes, totals = [0], [0]
    for value, count in zip(values, counts, strict=True):
        sizes.append(sizes[-1] + count)
        totals.append(totals[-1] + count * value)
    # best[j]: groups, padding, and start of the last group, for the j shortest lengths.
    best: list[tuple[int, int, int]] = [(0, 0, 0)]
    for j, longest in enumerate(values, start=1):
        options = []
        for i in range(j):
            cells = (sizes[j] - sizes[i]) * longest
            padding = cells - (totals[j] - totals[i])
            if padding <= waste * cells:
                options.append((best[i][0] + 1, best[i][1] + padding, i))
        best.append(min(options))
    cuts = []
    j = len(values)
    while j:
        i = best[j][2]
        cuts.append((values[i], values[j - 1]))
        j = i
    return cuts[::-1]
