"""The language of ListOps: seventeen symbols, expressions parsed and evaluated in one pass, and random ones.

The tree of ``[OP a b c ]`` is ``( ( ( ( [OP a ) b ) c ) ] )``: the operator takes its arguments one after
the other, then the closing bracket. A node is therefore a digit, a closing bracket, an operator that still
takes arguments, or, once closed, a value. Only text whose checksum is known is parsed: it is well formed.

Random expressions follow the rule of the official set. A node is an operator with probability 1/4, else a
digit; operator, digit and number of arguments (2 to 5) are uniform; the root has depth 1, and at depth 20
there are digits only. Expressions are unique. An operator has 0.875 operators among its arguments on average,
so trees are finite before the bound cuts them, and their sizes vary widely: half the official expressions
have at most 19 tokens, the longest of 10,000 has 1,139.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from random import Random
from typing import Any, NamedTuple

from gapped.errors import reject
from gapped_lab.data.sources import progress_bar

# To be raised by one when a seed gives other random expressions than before.
RULE = 1
MIN_ARGUMENTS = 2
MAX_ARGUMENTS = 5
MAX_DEPTH = 20
_OPERATOR_SHARE = 0.25
_DIGITS = "0123456789"


def _median(values: Sequence[int]) -> int:
    """The middle; of an even number of values the mean of the middle two, rounded down."""
    ordered = sorted(values)
    half = len(ordered) // 2
    return ordered[half] if len(ordered) % 2 else (ordered[half - 1] + ordered[half]) // 2


OPERATIONS: Mapping[str, Callable[[Sequence[int]], int]] = {
    "MIN": min,
    "MAX": max,
    "MED": _median,
    "SM": lambda values: sum(values) % 10,
}
# The position of a symbol is its id. The order is part of every stored model and must not change.
VOCABULARY = ("<pad>", "[", "]", *OPERATIONS, *_DIGITS)
PADDING = VOCABULARY.index("<pad>")
OPEN = VOCABULARY.index("[")
CLOSE = VOCABULARY.index("]")

# The words of a file, parentheses apart, and the ids that each stands for: `[MAX` is two tokens.
WORDS: Mapping[str, bytes] = {
    **{f"[{operator}": bytes([OPEN, VOCABULARY.index(operator)]) for operator in OPERATIONS},
    **{word: bytes([VOCABULARY.index(word)]) for word in "]0123456789"},
}


class Expression(NamedTuple):
    """`tokens` are n ids. `spans` are the n - 1 inner nodes of the binary tree, children before parents,
    each as the half-open range of tokens that it covers.

    In a file ``[MAX`` is one leaf, here it is two tokens, so the pair is a node of its own, the lowest one
    there: with it the tree is binary down to the tokens, as the trees of the models are.
    """

    tokens: bytes
    spans: tuple[tuple[int, int], ...]
    value: int


class _Application(NamedTuple):
    """An operator that has begun to take arguments."""

    operator: str
    arguments: list[int]


def parse(text: str) -> Expression:
    """The expression that `text`, which is well formed, spells in the form of the official files.

    Its value is by MIN, MAX, MED (median, rounded down) and SM (sum modulo 10).

    >>> parse("( ( ( [MAX 2 ) 9 ) ] )")
    Expression(tokens=b'\\x01\\x04\\t\\x10\\x02', spans=((0, 2), (0, 3), (0, 4), (0, 5)), value=9)
    """
    tokens = bytearray()
    spans: list[tuple[int, int]] = []
    starts: list[int] = []
    # Values, operators that take arguments, and "]". Without recursion: trees are deep.
    stack: list[Any] = []
    for word in text.split():
        if word == ")":
            right, left = stack.pop(), stack.pop()
            if right == "]":
                stack.append(OPERATIONS[left.operator](left.arguments))
            else:
                left.arguments.append(right)
                stack.append(left)
            starts.pop()
            spans.append((starts[-1], len(tokens)))
        elif word != "(":
            start = len(tokens)
            starts.append(start)
            tokens += WORDS[word]
            if word[0] == "[":
                stack.append(_Application(word[1:], []))
                spans.append((start, start + 2))
            else:
                stack.append(word if word == "]" else int(word))
    (value,) = stack
    return Expression(bytes(tokens), tuple(spans), value)


def generate(
    count: int, seed: int = 0, *, exclude: Collection[str] = (), progress: bool = False
) -> list[tuple[int, str]]:
    """`count` different expressions, none of them in `exclude`, each as its label and its text.

    Short expressions come up early and then only as repetitions, so the set is shuffled at the end: any
    slice of it has the length law of the whole. For the same reason the law depends on `count`. Equal
    arguments give equal lists on every machine and version of Python: only ``random()`` of `random.Random`
    is used, whose sequence is guaranteed, and no global state is touched.

    >>> generate(20)[1]
    (4, '( ( ( ( ( [SM 5 ) 8 ) 3 ) 8 ) ] )')
    """
    for name, number in (("count", count), ("seed", seed)):
        if type(number) is not int or number < 0:
            raise reject(name, number, "a whole number from 0")
    # A set, whatever came: it is searched once for each draw.
    excluded = set(exclude)
    random = Random(seed).random
    values: dict[str, int] = {}
    with progress_bar("listops", count, "expr", progress) as bar:
        while len(values) < count:
            text, value = draw(random)
            if text not in values and text not in excluded:
                values[text] = value
                if bar is not None:
                    bar.update()
    examples = [(value, text) for text, value in values.items()]
    keys = [random() for _ in examples]
    return [examples[i] for i in sorted(range(count), key=keys.__getitem__)]


def draw(random: Callable[[], float], depth: int = 1) -> tuple[str, int]:
    """One node at `depth` with all below it, as text and value; `random` is uniform on [0, 1).

    The recursion is as deep as the tree, at most `MAX_DEPTH`.
    """
    if depth >= MAX_DEPTH or random() >= _OPERATOR_SHARE:
        digit = int(len(_DIGITS) * random())
        return _DIGITS[digit], digit
    count = MIN_ARGUMENTS + int((MAX_ARGUMENTS - MIN_ARGUMENTS + 1) * random())
    arguments = [draw(random, depth + 1) for _ in range(count)]
    operator = list(OPERATIONS)[int(len(OPERATIONS) * random())]
    inner = "".join([f" {text} )" for text, _ in arguments])
    value = OPERATIONS[operator]([value for _, value in arguments])
    return f"{'( ' * (count + 1)}[{operator}{inner} ] )", value
