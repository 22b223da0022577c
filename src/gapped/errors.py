"""The one error family of the package, and what its sentences are made of."""

from __future__ import annotations

from collections.abc import Iterable
from difflib import get_close_matches
from importlib.util import find_spec
from typing import Any

TWICE = (
    "gapped: an estimated gradient cannot be differentiated twice: it is the estimator's choice, "
    "not the derivative of a function of the logits"
)

# Characters of an error in one line.
_LONGEST_LINE = 2000


class GappedError(ValueError):
    """Bad input, in one line: which argument, what came, what is accepted."""


class MissingExtra(GappedError, ImportError):
    """A package that an extra brings is not installed."""


def require(what: str, *modules: str, extra: str = "compare") -> None:
    """Say at once that `what` needs packages which `pip install gapped` alone does not bring.

    Without an `extra` that brings them, they are to be installed by name.

    >>> require("counting", "math", "numbers_of_mine")
    Traceback (most recent call last):
    gapped.errors.MissingExtra: counting needs numbers_of_mine: pip install "gapped[compare]"
    """
    absent = ["scikit-learn" if name == "sklearn" else name for name in modules if find_spec(name) is None]
    if absent:
        package = f'"gapped[{extra}]"' if extra else " ".join(absent)
        raise MissingExtra(f"{what} needs {listing(absent)}: pip install {package}")


def reject(argument: str, got: Any, accepted: str) -> GappedError:
    """The error for a bad argument, in the one form that all messages share.

    >>> reject("tau", 0, "a positive number")
    GappedError('tau: got 0, expected a positive number')
    """
    text = printable(got) if isinstance(got, str) and " " in got else repr(got)
    if "\n" in text:
        text = f"an object of type {type(got).__name__}"
    return GappedError(f"{argument}: got {text}, expected {accepted}")


def listing(names: Iterable[str], most: int | None = None) -> str:
    """Names as a phrase; of more than `most` the last ones are only counted.

    >>> listing(["a", "b", "c"]), listing(["a"]), listing([]), listing("abcde", most=4)
    ('a, b and c', 'a', 'none', 'a, b, c and 2 more')
    """
    words = list(names)
    if most is not None and len(words) > most:
        words = [*words[: most - 1], f"{len(words) - most + 1} more"]
    return " and ".join(filter(None, [", ".join(words[:-1]), words[-1]])) if words else "none"


def suggestion(word: str, known: Iterable[str]) -> str:
    """The end of a sentence about an unknown word: the known one that is spelt most alike, if any is.

    >>> suggestion("gts", ["gst", "rloo"]), suggestion("GST", ["gst"]), suggestion("x", ["gst"])
    ('; did you mean gst?', '; did you mean gst?', '')
    """
    close = get_close_matches(word.lower(), known, n=1)
    return f"; did you mean {close[0]}?" if close else ""


def one_line(problem: BaseException) -> str:
    r"""An error with its type, in one line; a text without end is cut.

    >>> one_line(ValueError("two\nlines")), len(one_line(ValueError("long " * 10_000)))
    ('ValueError: two lines', 2003)
    """
    try:
        text = str(problem)
    except Exception as own:
        text = f"its text cannot be shown ({type(own).__name__})"
    # Cut twice, so that nothing copies a text of many megabytes.
    line = " ".join(f"{type(problem).__name__}: {text[: 2 * _LONGEST_LINE]}".split())
    return line if len(line) <= _LONGEST_LINE else f"{line[:_LONGEST_LINE]}..."


def printable(text: str) -> str:
    r"""The text with escapes for what does not print: it cannot move the cursor, end a line or turn round.

    >>> printable("plain τ"), printable("\x1b[31mred\n")
    ('plain τ', '\\x1b[31mred\\n')
    """
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode("ascii") for c in text)
