"""What the examples share: their options, the repetition over seeds, tuning, and the table of results."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

import gapped
from gapped.registry import spell as spell

try:
    from gapped_lab.estimator_text import make, options_of, parse
except ModuleNotFoundError:
    sys.exit("error: the examples need the laboratory: pip install -e . -e lab, in a clone")

Result = Mapping[str, float | Sequence[float]]
TEMPERATURES = (0.3, 0.5, 0.7, 1.0)
"""What `--tune` tries for each estimator, beside the recommended temperature."""


def options(
    description: str | None,
    *,
    steps: int,
    estimators: Sequence[str],
    seeds: int = 3,
    family: type = gapped.Pathwise,
    tunable: bool = True,
) -> argparse.ArgumentParser:
    """The options that every example has.

    - `family`: what the estimators must be.
    - `tunable`: whether the first column of the table is a number that is better if it is lower. Then there
      are `--tune`, which looks for the lowest, and `--figure`, which draws it.
    """

    def named(text: str) -> str:
        try:
            member = estimator(text)
        except gapped.GappedError as problem:
            # Anything else would be reported without its message.
            raise argparse.ArgumentTypeError(str(problem)) from None
        if not isinstance(member, family):
            raise argparse.ArgumentTypeError(
                f"{text}: expected an estimator whose sample carries the gradient"
            )
        return text

    title = (description or "").partition("\n")[0]
    parser = argparse.ArgumentParser(description=title)
    shown = f"as text, may be repeated (default: {', '.join(estimators)})"
    parser.add_argument("--estimator", metavar="SPEC", action="append", type=named, help=shown)
    parser.add_argument("--steps", type=count, default=steps, help="training steps (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="the first seed (default: %(default)s)")
    parser.add_argument("--seeds", type=count, default=seeds, help="how many seeds (default: %(default)s)")
    parser.set_defaults(otherwise=[named(text) for text in estimators], title=title, tune=None, figure=None)
    if tunable:
        tune_help = "also the best of several temperatures, each tried on N other seeds (1 if N is left out)"
        parser.add_argument("--tune", metavar="N", type=count, nargs="?", const=1, help=tune_help)
        parser.add_argument("--figure", metavar="FILE", type=Path, help="an SVG of what the table shows")
    return parser


def count(text: str) -> int:
    """A whole number of at least one."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"got {text!r}, expected a whole number of at least one")
    return int(text)


def compare(
    train: Callable[..., Result],
    chosen: argparse.Namespace,
    draw: Callable[..., object] | None = None,
    height: int = 0,
) -> None:
    """Call ``train(estimator, steps, seed)`` for every estimator and seed, and print a row per estimator.

    A cell is the mean over the seeds, with the standard deviation where there is more than one; a sequence of
    numbers gets the mean of each. What the example shows, and each run as it ends, go to standard error.
    With `--figure`, ``draw(figure, estimator, steps, seed)`` adds to the picture what the first estimator has
    learned, `height` points high.
    """
    texts = chosen.estimator or chosen.otherwise
    seeds = range(chosen.seed, chosen.seed + chosen.seeds)
    print(chosen.title, file=sys.stderr)
    results = {text: [run(train, text, chosen.steps, seed) for seed in seeds] for text in texts}
    several = f"seeds {seeds[0]} to {seeds[-1]}; mean ± standard deviation"
    notes = [f"{chosen.steps} steps, {several if len(seeds) > 1 else f'seed {seeds[0]}'}"]
    if chosen.tune:
        others = range(seeds.stop, seeds.stop + chosen.tune)
        best, tried = tune(train, texts, chosen.steps, others)
        results[f"tuned: {best}"] = results.get(best) or [
            run(train, best, chosen.steps, seed) for seed in seeds
        ]
        which = f"seed {others[0]}" if len(others) == 1 else f"seeds {others[0]} to {others[-1]}"
        notes.append(f"tuned: the best of {tried} settings on {which}, not in the table")
    names = list(results[texts[0]][0])
    columns = [_column([[each[name] for each in runs] for runs in results.values()]) for name in names]
    show([["estimator", *names], *zip(results, *columns, strict=True)])
    print("", *notes, sep="\n")
    if chosen.figure:
        import picture

        first: Any = names[0]
        values = {text: [each[first] for each in runs] for text, runs in results.items()}
        bound = draw and partial(draw, estimator=estimator(texts[0]), steps=chosen.steps, seed=seeds[0])
        picture.save(chosen.figure, chosen.title, values, first, bound, height)


def estimator(text: str) -> Any:
    return make(*parse(text))


def run(train: Callable[..., Result], text: str, steps: int, seed: int) -> Result:
    """One training, reported on standard error."""
    began = time.perf_counter()
    result = train(estimator(text), steps, seed)
    print(f"{text}, seed {seed}: {time.perf_counter() - began:.1f} s", file=sys.stderr, flush=True)
    return result


def tune(train: Callable[..., Result], texts: Sequence[str], steps: int, seeds: range) -> tuple[str, int]:
    """The setting whose first column has the lowest mean over `seeds`, and how many were tried.

    Each estimator is tried at every one of `TEMPERATURES` if it has one, and as it is.
    """
    settings = list(texts)
    for name, values in map(parse, texts):
        if "tau" in options_of(name):
            settings += [spell(name, values | {"tau": tau}) for tau in TEMPERATURES]
    # A temperature that is the recommended one as well is tried once.
    settings = list({repr(estimator(text)): text for text in settings[::-1]}.values())[::-1]

    def score(text: str) -> float:
        results: Any = [run(train, text, steps, seed) for seed in seeds]
        return fmean(next(iter(result.values())) for result in results)

    return min(settings, key=score), len(settings)


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
