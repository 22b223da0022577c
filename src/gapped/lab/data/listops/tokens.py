"""What a model sees of an expression: a sequence of seventeen symbols, one of them padding."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from gapped.errors import GappedError, reject

OPERATORS = ("MIN", "MAX", "MED", "SM")
# The place of a symbol is its id. The order is part of every stored model and must not change.
VOCABULARY = ("<pad>", "[", "]", *OPERATORS, *"0123456789")
PADDING = VOCABULARY.index("<pad>")
OPEN = VOCABULARY.index("[")
CLOSE = VOCABULARY.index("]")

# The words of a file, parentheses apart, and the ids that each stands for: `[MAX` is two tokens.
LEAVES: Mapping[str, tuple[int, ...]] = {
    **{f"[{operator}": (OPEN, VOCABULARY.index(operator)) for operator in OPERATORS},
    "]": (CLOSE,),
    **{digit: (VOCABULARY.index(digit),) for digit in "0123456789"},
}


def encode(text: str) -> list[int]:
    """The ids of an expression, written with or without the parentheses of its tree.

    >>> encode("( ( ( [MAX 2 ) 9 ) ] )")
    [1, 4, 9, 16, 2]
    """
    ids: list[int] = []
    for word in text.split():
        if word in ("(", ")"):
            continue
        if word not in LEAVES:
            raise unknown(word)
        ids.extend(LEAVES[word])
    return ids


def decode(ids: Iterable[int]) -> str:
    """The expression for people, padding left out.

    >>> decode([1, 4, 9, 16, 2, 0, 0])
    '[MAX 2 9 ]'
    """
    words = []
    for i in ids:
        if not 0 <= i < len(VOCABULARY):
            raise reject("ids", i, f"token ids from 0 to {len(VOCABULARY) - 1}")
        if i != PADDING:
            words.append(VOCABULARY[i])
    return " ".join(words).replace("[ ", "[")


def unknown(word: str) -> GappedError:
    shown = word if len(word) <= 20 else word[:20] + "..."
    return GappedError(f"unknown token {shown!r}, expected one of ( ) {' '.join(LEAVES)}")
