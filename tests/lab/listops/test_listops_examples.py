"""ListOps examples as padded tensors, and in buckets."""

from __future__ import annotations

import itertools
import random

import pytest
import torch

from gapped_lab.listops.examples import buckets, stack
from gapped_lab.listops.language import parse


def test_stack_pads():
    split = stack(
        map(parse, ["7", "( ( ( [SM 0 ) ( ( ( [MIN 7 ) 8 ) ] ) ) ] )", "( ( ( [MED 4 ) 7 ) ] )"]), True, 5
    )
    assert split.tokens.dtype == torch.uint8
    assert split.tokens.tolist() == [
        [14, 0, 0, 0, 0, 0, 0, 0, 0],
        [1, 6, 7, 1, 3, 14, 15, 2, 2],
        [1, 5, 11, 14, 2, 0, 0, 0, 0],
    ]
    assert split.lengths.tolist() == [1, 9, 5]
    assert split.labels.tolist() == [7, 7, 5]
    assert split.lengths.dtype == split.labels.dtype == torch.int64
    assert split.spans.shape == (3, 8, 2)
    assert split.spans.dtype == torch.int16
    assert split.spans[0].count_nonzero() == 0
    assert split.spans[2].tolist() == [[0, 2], [0, 3], [0, 4], [0, 5], *[[0, 0]] * 4]
    assert (len(split), split.official, split.complete) == (3, True, 5)


def padding(lengths: list[int]) -> int:
    return sum(max(lengths) - n for n in lengths)


def fewest_groups(lengths: list[int], waste: float) -> tuple[int, int]:
    """Groups and padding of the best division, by trying all."""
    distinct = sorted(set(lengths))
    divisions = []
    for marks in itertools.product([False, True], repeat=len(distinct) - 1):
        groups = [[distinct[0]]]
        for value, new in zip(distinct[1:], marks, strict=True):
            groups.append([value]) if new else groups[-1].append(value)
        filled = [[n for n in lengths if n in group] for group in groups]
        if all(padding(group) <= waste * len(group) * max(group) for group in filled):
            divisions.append((len(filled), sum(map(padding, filled))))
    return min(divisions)


@pytest.mark.parametrize("waste", [0, 0.02, 0.1, 0.3, 0.9])
def test_buckets_are_the_best_division(waste):
    rng = random.Random(int(100 * waste))
    for _ in range(20):
        lengths = [rng.randint(1, 10) for _ in range(rng.randint(1, 40))]
        groups = buckets(torch.tensor(lengths), waste)
        assert sorted(torch.cat(groups).tolist()) == list(range(len(lengths)))
        filled = [[lengths[i] for i in group.tolist()] for group in groups]
        assert (len(groups), sum(map(padding, filled))) == fewest_groups(lengths, waste)
        assert all(padding(group) <= waste * len(group) * max(group) for group in filled)
        assert all(max(one) < min(two) for one, two in itertools.pairwise(filled))
        assert all(group.tolist() == sorted(group.tolist()) for group in groups)
        assert all(group.dtype == torch.int64 for group in groups)
