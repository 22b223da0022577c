"""Latent trees: accuracy by length and depth, agreement with the true parse, brackets and drawings."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from math import isfinite

from gapped.comparison.figures import INK, SERIES, new_figure, style, to_svg
from gapped.comparison.statistics import summary
from gapped.comparison.table import NOTHING, Entry, Row, Table, number, tau_entry
from gapped.errors import GappedError, listing
from gapped_lab.records import Tree, Trees

ACCURACY = "test_accuracy"
F1 = "test_tree_f1"
GRADIENT = "query_gradient_norm"

DEFINITION = (
    "F1: unlabelled bracketing F1 of the greedy tree against the parse in the file, mean over the test "
    "expressions of three tokens or more. Every tree has the single tokens and the whole expression, so "
    "these do not count; an expression of n tokens then has n - 2 spans in both trees, and precision, "
    "recall and F1 are one number. Mean ± standard deviation over seeds."
)
WATCHED = (
    "Query gradient: the norm of the gradient of the vector that scores pairs, before clipping, mean over "
    "the steps of the last epoch and over seeds. Zero steps: the share of steps at which it is exactly zero."
)


def details(rows: Sequence[Row]) -> list[tuple[str, Table]]:
    """Tables, each with a title, for cells whose runs built trees; none for others."""
    if not any({F1, GRADIENT} & row.cell.metrics for row in rows):
        return []
    binned = [
        ("Accuracy by number of tokens", binned_table(rows, "length", "tokens")),
        ("Accuracy by depth", binned_table(rows, "depth", "depth")),
    ]
    return [("Trees", tree_table(rows)), *((title, table) for title, table in binned if table.columns[2:])]


def tree_table(rows: Sequence[Row]) -> Table:
    """Agreement of each cell's trees with the true parse."""
    body, watched = [], any(GRADIENT in row.cell.metrics for row in rows)
    for row in rows:
        f1, best = (summary(row.cell.values(name)) for name in (F1, "best_valid_accuracy"))
        spread = f" ± {f1.std:.3f}" if f1.count > 1 else ""
        body.append(
            (
                Entry(row.label),
                tau_entry(row.tau),
                number(row.value.mean, ACCURACY),
                number(best.mean, ACCURACY),
                Entry(f"{f1.mean:.3f}{spread}" if f1.count else NOTHING, f1.mean if f1.count else None),
                *(gradient_entries(row) if watched else ()),
                Entry(str(row.value.count), row.value.count),
            )
        )
    gradient = ("query gradient", "zero steps") if watched else ()
    columns = ("estimator", "τ", "test accuracy", "best validation accuracy", "F1", *gradient, "seeds")
    known = (row.cell.values("left_branching_f1").tolist() for row in rows)
    plain = sorted({value for values in known for value in values if isfinite(value)})
    means = [f1.mean for row in rows if (f1 := summary(row.cell.values(F1))).count]
    above = sum(mean > max(plain, default=1.0) for mean in means)
    baseline = (
        f"Trees that always branch to the left have F1 {listing(f'{v:.3f}' for v in plain)}; "
        f"{above or 'none'} of the {len(means)} means above {'are' if above > 1 else 'is'} higher."
    )
    notes = (DEFINITION, baseline) if means else ()
    return Table(columns, tuple(body), (*notes, *((WATCHED,) if watched else ())))


def gradient_entries(row: Row) -> tuple[Entry, Entry]:
    """The norm of the query's gradient in the last epoch, and the share of steps at which it is zero."""
    norm, zero = (summary(row.cell.values(name)) for name in (GRADIENT, "query_gradient_zero"))
    if not norm.count:
        return Entry(NOTHING), Entry(NOTHING)
    size = f"{norm.mean:.0e}" if norm.mean else "0"
    return Entry(size, norm.mean), Entry(f"{zero.mean:.0%}", zero.mean)


def binned_table(rows: Sequence[Row], kind: str, what: str) -> Table:
    """Mean test accuracy of each cell in the bins of one kind that its records name."""
    prefix = f"{ACCURACY}_{kind}_"
    names = {name for row in rows for name in row.cell.metrics if re.match(rf"{prefix}\d", name)}
    ordered = sorted(names, key=lambda name: int(re.findall(r"\d+", name)[0]))
    columns = ("estimator", "τ", *(f"{what} {_bin(name.removeprefix(prefix))}" for name in ordered))
    body = [
        (
            Entry(row.label),
            tau_entry(row.tau),
            *(number(summary(row.cell.values(name)).mean, ACCURACY) for name in ordered),
        )
        for row in rows
    ]
    return Table(columns, tuple(body))


def brackets(tokens: Sequence[str], spans: Sequence[Sequence[int]]) -> str:
    """A tree as text, every inner node in parentheses.

    >>> brackets(["[", "MAX", "2"], [[0, 2], [0, 3]])
    '(([ MAX) 2)'
    """
    opening = [sum(start == i for start, _ in spans) for i in range(len(tokens))]
    closing = [sum(end == i + 1 for _, end in spans) for i in range(len(tokens))]
    return " ".join("(" * a + word + ")" * b for a, word, b in zip(opening, tokens, closing, strict=True))


def tree_pictures(rows: Sequence[Row], trees: Mapping[str, Trees], salt: str) -> list[tuple[str, str, str]]:
    """(name, caption, SVG): the true parse of the longest expression shown, and what each estimator found."""
    pictures: list[tuple[str, str, str]] = []
    for row, tree in examples(rows, trees):
        if not pictures:
            svg = draw_tree(tree, tree.true, "the true parse", f"{salt}-tree-true")
            pictures.append(("tree-true", f"The true parse; the value is {tree.label}.", svg))
        name = f"tree-{len(pictures)}"
        caption = f"{row.name}: greedy tree, answer {tree.predicted}. Orange: not in the true parse."
        pictures.append((name, caption, draw_tree(tree, tree.found, row.name, f"{salt}-{name}")))
    return pictures


def draw_tree(tree: Tree, spans: Sequence[Sequence[int]], label: str, salt: str) -> str:
    """One tree above its tokens; nodes that the true parse does not have stand out."""
    tokens = tree.tokens
    true = {tuple(span) for span in tree.true}
    # By their first token, the nodes that have no parent yet: position and height.
    open_: dict[int, tuple[float, float]] = {i: (float(i), 0.0) for i in range(len(tokens))}
    ends = {i: i + 1 for i in range(len(tokens))}
    with style(salt):
        figure, axes = new_figure(180)
        for start, end in spans:
            middle = ends.get(start)
            if start not in open_ or middle not in open_ or ends[middle] != end:
                raise GappedError(f"trees.jsonl, {label}: got {[start, end]}, expected two nodes")
            left, right = open_[start], open_.pop(middle)
            x, y = (left[0] + right[0]) / 2, max(left[1], right[1]) + 1
            colour = SERIES[2] if (start, end) in true else SERIES[1]
            # Right angles: a slanted line to a far leaf would cross a high tree beside it.
            xs, ys = (left[0], left[0], right[0], right[0]), (left[1], y, y, right[1])
            axes.plot(xs, ys, color=colour, linewidth=1.3)
            open_[start], ends[start] = (x, y), end
        for i, word in enumerate(tokens):
            axes.text(i, -0.3, word, ha="center", va="top", color=INK, fontsize=9)
        axes.set_axis_off()
        axes.set_ylim(bottom=-1.5)
        return to_svg(figure, f"{label}: {brackets(tokens, spans)}", [])


def examples(rows: Sequence[Row], trees: Mapping[str, Trees]) -> list[tuple[Row, Tree]]:
    """The longest expression shown, by the first run of each cell that has one."""
    pairs = []
    for row in rows:
        lines = [trees[record.id] for record in row.cell.records if record.id in trees]
        pairs += [(row, line.examples[-1]) for line in lines[:1]]
    return pairs


def _bin(name: str) -> str:
    """A bin as readers write it.

    >>> _bin("10_to_19"), _bin("3"), _bin("70_up")
    ('10 to 19', '3', '70 and more')
    """
    return name.replace("_to_", " to ").replace("_up", " and more")
