"""Expressions by the rule of the official set.

A node is an operator with probability 1/4, else a digit; operator, digit and number of arguments (2 to 5)
are uniform; the root has depth 1, and at depth 20 there are digits only. Expressions are unique. An operator
has 0.875 operators among its arguments on average, so trees are finite before the bound cuts them, and their
sizes vary widely: half the official expressions have at most 19 tokens, the longest of 10,000 has 1,139.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from random import Random

from gapped.errors import reject
from gapped.lab.data.listops.language import MAX_ARGUMENTS, MIN_ARGUMENTS, OPERATIONS
from gapped.lab.data.sources import progress_bar

# To be raised by one when a seed gives other expressions than before.
RULE = 1
MAX_DEPTH = 20
_OPERATOR_SHARE = 0.25
_OPERATORS = tuple(OPERATIONS)
_DIGITS = "0123456789"


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
    operator = _OPERATORS[int(len(_OPERATORS) * random())]
    inner = "".join([f" {text} )" for text, _ in arguments])
    value = OPERATIONS[operator]([value for _, value in arguments])
    return f"{'( ' * (count + 1)}[{operator}{inner} ] )", value
