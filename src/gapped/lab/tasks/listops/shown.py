"""A few test expressions with the trees that models find in them, as plain values."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch

from gapped.lab.data.listops.examples import Split
from gapped.lab.data.listops.language import VOCABULARY
from gapped.lab.tasks.listops.brackets import merged_spans
from gapped.lab.tasks.listops.task import ListOpsTask

# The first test expression of each of these numbers of tokens, or the next larger.
_SIZES = (6, 11, 16)


def shown_trees(task: ListOpsTask, places: Sequence[int]) -> Iterator[dict[str, Any]]:
    """For each of the runs at `places`: tokens, label, prediction, and both trees as lists of spans."""
    few = _few(task.test)
    parsed = task.parse(few)
    spans = merged_spans(parsed.merges)
    for place in places:
        examples = []
        for row, length in enumerate(few.lengths.tolist()):
            inner = slice(0, length - 1)
            examples.append(
                {
                    "tokens": [VOCABULARY[i] for i in few.tokens[row, :length].tolist()],
                    "label": int(few.labels[row]),
                    "predicted": int(parsed.predicted[place, row]),
                    "true": few.spans[row, inner].tolist(),
                    "found": spans[place, row, inner].tolist(),
                }
            )
        yield {"examples": examples}


def _few(split: Split) -> Split:
    """The expressions to be shown."""
    known = sorted(set(split.lengths.tolist()))
    wanted = [next((n for n in known if n >= size), known[-1]) for size in _SIZES]
    pick = torch.tensor([int((split.lengths == n).nonzero()[0]) for n in dict.fromkeys(wanted)])
    parts = {name: getattr(split, name)[pick] for name in ("tokens", "lengths", "labels", "spans")}
    return replace(split, **parts)
