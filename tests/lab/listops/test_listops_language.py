"""The language of ListOps, compared with code written anew; its examples as padded tensors, in buckets."""

from __future__ import annotations

import hashlib
import itertools
import random

import pytest
import torch
from listops_text import encode, spans_of, value_of

from gapped.errors import GappedError
from gapped_lab.listops.examples import buckets, count_tokens, stack
from gapped_lab.listops.language import draw, generate, parse

SAMPLE = [text for _, text in generate(300, seed=11)]


def test_trees_and_values_of_generated_expressions():
    assert max(map(count_tokens, SAMPLE)) > 100
    for text in SAMPLE:
        expression = parse(text)
        assert expression.value == value_of(text)
        assert list(expression.spans) == spans_of(text.split())[1]
        assert list(expression.tokens) == encode(text)
        assert len(expression.spans) + 1 == len(expression.tokens) == count_tokens(text)


def test_a_deep_tree_needs_no_recursion():
    depth = 20_000
    text = "( ( ( [SM 1 ) " * depth + "1" + " ) ] )" * depth
    assert parse(text).value == (depth + 1) % 10


def replay(*numbers: float):
    return iter(numbers).__next__


def test_draw_by_replay():
    # A number below 0.25 makes an operator; then come the arguments and, last, which operator.
    assert draw(replay(0.25, 0.99)) == ("9", 9)
    two_digits = (0.9, 0.31, 0.9, 0.72)
    assert draw(replay(0.249, 0.0, *two_digits, 0.5)) == ("( ( ( [MED 3 ) 7 ) ] )", 5)
    nested = (0.2, 0.24, *two_digits, 0.74)
    expected = "( ( ( ( [SM ( ( ( [MED 3 ) 7 ) ] ) ) 3 ) 7 ) ] )"
    assert draw(replay(0.1, 0.26, *nested, *two_digits, 0.99)) == (expected, 5)
    for number, count in ((0.0, 2), (0.2499, 2), (0.25, 3), (0.5, 4), (0.75, 5), (0.9999, 5)):
        digits = (0.9, 0.0) * count
        assert draw(replay(0.0, number, *digits, 0.0))[0].count("0") == count


def test_generated_expressions_are_unique_disjoint_and_reproducible():
    torch.manual_seed(5)
    random.seed(5)
    states = torch.get_rng_state(), random.getstate()
    assert generate(0) == []
    pairs = generate(500, seed=3)
    assert torch.equal(torch.get_rng_state(), states[0])
    assert random.getstate() == states[1]
    assert len({text for _, text in pairs}) == 500
    assert generate(500, seed=3) == pairs != generate(500, seed=4)
    # Records name the seed alone: the same seed must never mean other expressions.
    digest = hashlib.sha256(repr(pairs).encode()).hexdigest()
    assert digest == "32deb66a80ab4e2b983543b0b39560d01444212b95fa7b78f8f80297b385cd76"
    first = [text for _, text in pairs[:100]]
    again = {text for _, text in generate(500, seed=3, exclude=first)}
    assert len(again) == 500
    assert not again & set(first)


def test_any_slice_of_the_set_has_the_law_of_the_whole():
    """In the order of drawing, the ten single digits are all among the first few dozen expressions."""
    places = [place for place, (_, text) in enumerate(generate(2_000, seed=0)) if len(text) == 1]
    assert len(places) == 10
    assert max(places) > 1_000


@pytest.mark.parametrize(
    ("count", "seed", "words"),
    [(-1, 0, "count: got -1"), (2.5, 0, "count: got 2.5"), (True, 0, "count"), (1, -1, "seed: got -1")],
)
def test_generate_rejects(count, seed, words):
    with pytest.raises(GappedError, match=words):
        generate(count, seed)


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
