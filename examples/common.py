"""What the examples share: their options, the repetition over seeds, and the table of results."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from statistics import fmean, stdev
from typing import Any

import gapped
from gapped.lab.estimator_text import make, parse

Result = Mapping[str, float | Sequence[float]]


def options(
    description: str | None,
    *,
    steps: int,
    estimators: Sequence[str],
    seeds: int = 3,
    family: type = gapped.Pathwise,
) -> argparse.ArgumentParser:
    """The options that every example has. `family` is what the estimators must be."""

    def named(text: str) -> tuple[str, object]:
        try:
            member = make(*parse(text))
        except gapped.GappedError as problem:
            # Anything else would be reported without its message.
            raise argparse.ArgumentTypeError(str(problem)) from None
        if not isinstance(member, family):
            raise argparse.ArgumentTypeError(
                f"{text}: expected an estimator whose sample carries the gradient"
            )
        return text, member

    title = (description or "").partition("\n")[0]
    parser = argparse.ArgumentParser(description=title)
    shown = f"as text, may be repeated (default: {', '.join(estimators)})"
    parser.add_argument("--estimator", metavar="SPEC", action="append", type=named, help=shown)
    parser.add_argument("--steps", type=count, default=steps, help="training steps (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="the first seed (default: %(default)s)")
    parser.add_argument("--seeds", type=count, default=seeds, help="how many seeds (default: %(default)s)")
    parser.set_defaults(otherwise=[named(text) for text in estimators], title=title)
    return parser


def count(text: str) -> int:
    """A whole number of at least one."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"got {text!r}, expected a whole number of at least one")
    return int(text)


def compare(train: Callable[..., Result], chosen: argparse.Namespace) -> None:
    """Call ``train(estimator, steps, seed)`` for every estimator and seed, and print a row per estimator.

    A cell is the mean over the seeds, with the standard deviation where there is more than one; a sequence of
    numbers gets the mean of each. What the example shows, and each run as it ends, go to standard error.
    """
    estimators = chosen.estimator or chosen.otherwise
    seeds = range(chosen.seed, chosen.seed + chosen.seeds)
    print(chosen.title, file=sys.stderr)
    results = []
    for text, each in estimators:
        runs = []
        for seed in seeds:
            began = time.perf_counter()
            runs.append(train(deepcopy(each), chosen.steps, seed))
            print(f"{text}, seed {seed}: {time.perf_counter() - began:.1f} s", file=sys.stderr, flush=True)
        results.append(runs)
    names = list(results[0][0])
    columns = [_column([[run[name] for run in runs] for runs in results]) for name in names]
    show([["estimator", *names], *zip((text for text, _ in estimators), *columns, strict=True)])
    several = f"seeds {seeds[0]} to {seeds[-1]}; mean ± standard deviation"
    print(f"\n{chosen.steps} steps, {several if len(seeds) > 1 else f'seed {seeds[0]}'}")


def show(rows: Sequence[Sequence[str]]) -> None:
    """Print rows of text as a Markdown table, aligned to be read as it stands; the first row is its head."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    rule = ["-" * widths[0], *("-" * (width - 1) + ":" for width in widths[1:])]
    for first, *rest in [rows[0], rule, *rows[1:]]:
        cells = [cell.rjust(width) for cell, width in zip(rest, widths[1:], strict=True)]
        print("| " + " | ".join([first.ljust(widths[0]), *cells]) + " |")


def _column(cells: list[list[Any]]) -> list[str]:
    """The text of each cell, a list of values over seeds; all cells of a column have as many decimals."""
    if isinstance(cells[0][0], Sequence):
        return [" ".join(f"{fmean(part):.2f}" for part in zip(*values, strict=True)) for values in cells]
    digits = 3 if all(value < 10 for values in cells for value in values) else 1
    means = [f"{fmean(values):.{digits}f}" for values in cells]
    spreads = [f" ± {stdev(values):.{digits}f}" if len(values) > 1 else "" for values in cells]
    return [mean + spread for mean, spread in zip(means, spreads, strict=True)]
