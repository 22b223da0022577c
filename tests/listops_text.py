"""ListOps expressions read independently of the package: ids, values and trees."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Sequence

from gapped_lab.listops.language import PADDING, VOCABULARY


def encode(text: str) -> list[int]:
    """The ids of an expression, written with or without the parentheses of its tree."""
    words = text.replace("(", " ").replace(")", " ").replace("[", "[ ").split()
    return [VOCABULARY.index(word) for word in words]


def decode(ids: Iterable[int]) -> str:
    """The expression for people, padding left out."""
    return " ".join(VOCABULARY[i] for i in ids if i != PADDING).replace("[ ", "[")


def value_of(text: str, median: Callable[[Sequence[int]], float] = statistics.median) -> int:
    """The value, by the brackets alone, not the parentheses."""
    stack: list[list] = [[]]
    for word in text.replace("(", " ").replace(")", " ").split():
        if word.startswith("["):
            stack.append([word])
        elif word == "]":
            operator, *values = stack.pop()
            operation = {"[MIN": min, "[MAX": max, "[MED": median, "[SM": lambda v: sum(v) % 10}[operator]
            stack[-1].append(int(operation(values)))
        else:
            stack[-1].append(int(word))
    ((value,),) = stack
    return value


def spans_of(words: list[str], start: int = 0) -> tuple[int, list[tuple[int, int]]]:
    """By the parentheses alone: the end of the tree at the head of `words` (consumed), and all its nodes."""
    word = words.pop(0)
    if word != "(":
        return (start + 2, [(start, start + 2)]) if word.startswith("[") else (start + 1, [])
    middle, left = spans_of(words, start)
    end, right = spans_of(words, middle)
    assert words.pop(0) == ")"
    return end, [*left, *right, (start, end)]
