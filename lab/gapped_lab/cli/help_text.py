"""Help texts: words for values in place of Python's types, and lists that are read when they are shown."""

from __future__ import annotations

import re
from typing import Any

from typer.core import TyperCommand

# What newer Typers write for a value, and the word that stands for it here.
_WORDS = {"str": "TEXT", "int": "N", "float": "NUMBER", "path": "PATH"}


class Command(TyperCommand):
    """A command whose help names a value by a word, and an argument by its own name."""

    def collect_usage_pieces(self, ctx: Any) -> list[str]:
        return [re.sub(r"(\.\.\.)?[{}]", "", piece) for piece in super().collect_usage_pieces(ctx)]

    def format_options(self, ctx: Any, formatter: Any) -> None:
        for title, kind in (("Arguments", "argument"), ("Options", "option")):
            parameters = [each for each in self.get_params(ctx) if each.param_type_name == kind]
            records = filter(None, (each.get_help_record(ctx) for each in parameters))
            if rows := [(_name(name, kind == "option"), _without_range(text)) for name, text in records]:
                with formatter.section(title):
                    formatter.write_dl(rows)


def _name(text: str, is_option: bool) -> str:
    """An option with a word for its value; an argument alone.

    >>> _name("--estimator <list[str]>", True), _name("--seed <int range>", True), _name("RUNS <path>", False)
    ('--estimator TEXT', '--seed N', 'RUNS')
    """
    name, _, value = text.partition(" <")
    kind = re.search("|".join(_WORDS), value)
    return f"{name} {_WORDS[kind[0]]}" if is_option and kind else name


def _without_range(text: str) -> str:
    """The help of an option without the range of its values, which an error names.

    >>> _without_range("Of the samples.  [default: 0; 0<=x<=99]"), _without_range("Stop.  [x>=0.0]")
    ('Of the samples.  [default: 0]', 'Stop.')
    """
    return re.sub(r"  \[\]$", "", re.sub(r"(; )?([\d.]+<=)?x[<>]=[\d.]+", "", text))
