"""ListOps examples as lines of files, as padded tensors, and in buckets."""

from __future__ import annotations

import itertools
import random
from pathlib import Path

import pytest
import torch

from gapped.errors import GappedError
from gapped_lab.listops.examples import buckets, expressions, stack
from gapped_lab.listops.language import parse

MALFORMED = [
    ("9 ( ( ( [MAX 2 ) 9 ) ] )", "no tab"),
    ("", "no tab"),
    ("\t( ( ( [MAX 2 ) 9 ) ] )", "label '', expected a digit"),
    ("10\t( ( ( [MAX 2 ) 9 ) ] )", "label '10', expected a digit"),
    ("x\t9", "label 'x', expected a digit"),
    ("²\t9", r"label '\\\\xc2\\\\xb2', expected a digit"),
    ("8\t( ( ( [MAX 2 ) 9 ) ] )", "label 8, but the expression has the value 9"),
    ("9\t( ( ( [MAX 2 ) 9 ) ]", "unbalanced parentheses: one is opened"),
    ("9\t( ( ( [MAX 2 ) 9 ) ] ) )", "unbalanced parentheses: one is closed"),
    ("9\t) 9", "unbalanced parentheses: one is closed"),
    ("9\t( ( ( [MAX 2 ) 12 ) ] )", "unknown token '12'"),
    ("9\t( ( ( [AVG 2 ) 9 ) ] )", r"unknown token '\[AVG'"),
    ("9\t( ( ( [ MAX 2 ) 9 ) ] )", r"unknown token '\['"),
    ("9\t( ( ( [MAX é ) 9 ) ] )", "unknown token"),
    ("9\t" + "x" * 10_000, r"unknown token 'x{20}\.\.\.'"),
    ("9\t( ( [MAX 9 ) ] )", r"MAX with 1 argument\(s\), expected 2 to 5"),
    ("9\t( [MAX ] )", r"MAX with 0 argument\(s\)"),
    ("9\t( ( ( ( ( ( ( [MAX 1 ) 2 ) 3 ) 4 ) 5 ) 9 ) ] )", r"MAX with 6 argument\(s\)"),
    ("9\t( ( [MAX 2 9 ) ] )", r"parentheses around 3 node\(s\), expected 2"),
    ("9\t( 9 )", r"parentheses around 1 node\(s\)"),
    ("9\t( )", r"parentheses around 0 node\(s\)"),
    ("9\t( ( [MAX 2 ) 9 )", "MAX without a closing bracket"),
    ("9\t( ( ( [MAX 2 ) [MIN ) ] )", "MIN is used as an argument before"),
    ("9\t( 2 9 )", "2 stands where an operator is expected"),
    ("9\t( ] 9 )", "] stands where an operator is expected"),
    ("9\t9 9", "2 expressions, expected 1"),
    ("9\t", "0 expressions, expected 1"),
    ("9\t]", "a closing bracket without an operator"),
]


@pytest.mark.parametrize(("line", "words"), MALFORMED)
def test_a_malformed_line_is_named(line, words):
    content = f"9\t( ( ( [MAX 2 ) 9 ) ] )\n{line}\n9\t9\n".encode()
    with pytest.raises(GappedError, match=rf"^some/file\.tsv, line 2: .*{words}") as caught:
        list(expressions(content, Path("some/file.tsv")))
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 200


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
