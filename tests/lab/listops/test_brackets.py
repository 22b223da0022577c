"""Merges as spans of tokens, and their agreement with the true parse, against plain loops."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from conftest import seeded
from toy_tasks import toy_expressions

from gapped_lab.listops.spans import agreement, left_branching, merged_spans


def slow_spans(merges: Sequence[int], length: int) -> list[tuple[int, int]]:
    nodes = [(i, i + 1) for i in range(length)]
    spans = []
    for at in merges:
        if at >= 0:
            nodes[at : at + 2] = [(nodes[at][0], nodes[at + 1][1])]
            spans.append(nodes[at])
    return spans


def test_merges_become_spans() -> None:
    g = seeded(0)
    for length in range(1, 9):
        merges = [int(torch.randint(length - 1 - step, (1,), generator=g)) for step in range(length - 1)]
        padded = torch.tensor([merges + [-1] * (10 - length)])
        expected = slow_spans(merges, length)
        spans = merged_spans(padded)[0].tolist()
        assert spans[: length - 1] == [list(span) for span in expected]
        assert spans[length - 1 :] == [[0, 0]] * (10 - length)


def test_true_trees_agree_with_themselves_and_others_as_counted() -> None:
    split = toy_expressions().test
    itself = agreement(split.spans.expand(2, -1, -1, -1), split.spans, split.lengths)
    long = split.lengths > 2
    assert (itself[:, long] == 1).all()
    assert itself[:, ~long].isnan().all()
    assert (~long).any()
    plain = merged_spans(left_branching(split.lengths, split.spans.shape[1]))
    scores = agreement(plain, split.spans, split.lengths)
    for row, length in enumerate(split.lengths.tolist()):
        if length > 2:
            mine = {(0, end) for end in range(2, length)}
            true = {tuple(span) for span in split.spans[row, : length - 1].tolist()} - {(0, length)}
            assert scores[row] == pytest.approx(len(mine & true) / (length - 2))
    assert 0 < scores[long].mean() < 1
