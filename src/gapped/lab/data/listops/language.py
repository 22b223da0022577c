"""The language of ListOps: seventeen symbols, and expressions that are parsed and evaluated in one pass.

The tree of ``[OP a b c ]`` is ``( ( ( ( [OP a ) b ) c ) ] )``: the operator takes its arguments one after
the other, then the closing bracket. A node is therefore a digit, a closing bracket, an operator that still
takes arguments, or, once closed, a value.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple, TypeAlias

from gapped.errors import GappedError

MIN_ARGUMENTS = 2
MAX_ARGUMENTS = 5


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
VOCABULARY = ("<pad>", "[", "]", *OPERATIONS, *"0123456789")
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


class _Application:
    """An operator that has begun to take arguments."""

    __slots__ = ("arguments", "operator")

    def __init__(self, operator: str) -> None:
        self.operator = operator
        self.arguments: list[int] = []


# A value, an operator at work, or the words "(" and "]".
_Meaning: TypeAlias = int | _Application | str


def parse(text: str) -> Expression:
    """The expression that `text` spells in the form of the official files, without recursion.

    Its value is by MIN, MAX, MED (median, rounded down) and SM (sum modulo 10).

    >>> parse("( ( ( [MAX 2 ) 9 ) ] )")
    Expression(tokens=b'\\x01\\x04\\t\\x10\\x02', spans=((0, 2), (0, 3), (0, 4), (0, 5)), value=9)
    """
    tokens = bytearray()
    spans: list[tuple[int, int]] = []
    starts: list[int] = []
    stack: list[_Meaning] = []
    for word in text.split():
        if word == "(":
            stack.append(word)
        elif word == ")":
            left, right = _children(stack)
            stack[-3:] = (_join(left, right),)
            starts.pop()
            spans.append((starts[-1], len(tokens)))
        elif word in WORDS:
            start = len(tokens)
            starts.append(start)
            tokens += WORDS[word]
            if word[0] == "[":
                stack.append(_Application(word[1:]))
                spans.append((start, start + 2))
            else:
                stack.append(word if word == "]" else int(word))
        else:
            prefix = word if len(word) <= 20 else word[:20] + "..."
            raise GappedError(f"unknown token {prefix!r}, expected one of ( ) {' '.join(WORDS)}")
    return Expression(bytes(tokens), tuple(spans), _only_value(stack))


def _children(stack: list[_Meaning]) -> list[_Meaning]:
    """The two nodes since the last open parenthesis; there must be exactly two."""
    inner = stack[-2:]
    if len(stack) > 2 and stack[-3] == "(" and "(" not in inner:
        return inner
    if "(" not in stack:
        raise GappedError("unbalanced parentheses: one is closed that was not opened")
    inside = stack[::-1].index("(")
    raise GappedError(f"parentheses around {inside} node(s), expected 2: the tree is binary")


def _join(left: _Meaning, right: _Meaning) -> _Meaning:
    """The node whose children are `left` and `right`."""
    if not isinstance(left, _Application):
        raise GappedError(f"{left} stands where an operator is expected")
    if isinstance(right, int):
        left.arguments.append(right)
        return left
    if isinstance(right, _Application):
        raise GappedError(f"{right.operator} is used as an argument before its closing bracket")
    if not MIN_ARGUMENTS <= len(left.arguments) <= MAX_ARGUMENTS:
        arity = f"expected {MIN_ARGUMENTS} to {MAX_ARGUMENTS}"
        raise GappedError(f"{left.operator} with {len(left.arguments)} argument(s), {arity}")
    return OPERATIONS[left.operator](left.arguments)


def _only_value(stack: list[_Meaning]) -> int:
    """The value of the whole expression, which must be all that is on the stack."""
    if "(" in stack:
        raise GappedError("unbalanced parentheses: one is opened that is not closed")
    if len(stack) != 1:
        raise GappedError(f"{len(stack)} expressions, expected 1")
    if isinstance(stack[0], int):
        return stack[0]
    if isinstance(stack[0], _Application):
        raise GappedError(f"{stack[0].operator} without a closing bracket")
    raise GappedError("a closing bracket without an operator")
