"""The parser of ListOps before the first step: how far its scores spread, and its query's gradient."""

from __future__ import annotations

from functools import cache
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from evidence import ACCURACY, Evidence, require
from torch import Tensor

from gapped.pathwise import Pathwise
from gapped_lab.fleet.run_layers import generators
from gapped_lab.listops import listops_protocol
from gapped_lab.listops.examples import Split, stack
from gapped_lab.listops.language import generate, parse
from gapped_lab.listops.model import TreeClassifier
from gapped_lab.listops.reference_tree import Sampler
from gapped_lab.recipe import find_recipe
from gapped_lab.report.cells import rows_of
from gapped_lab.report.tabular import Entry, Table, tau_entry
from gapped_lab.spec import Entry as RecipeEntry

# Batches by the least and the largest number of tokens, out of so many expressions drawn by the rule.
LENGTHS = ((8, 12), (20, 24))
DRAWN = 1200
# What Adam adds to the root of the second moment.
EPSILON = 1e-8

Values = dict[str, Any]


class Start(NamedTuple):
    """What a cell has before its first step."""

    label: str
    tau: float
    norms: tuple[float, ...]
    """Of the gradient of the query, batch by batch."""
    spread: float
    """The largest distance of two scores of one layer."""


class Observed:
    """A sampler that notes how far the scores of a layer spread."""

    hard = True

    def __init__(self, sampler: Sampler) -> None:
        self.sampler, self.spread = sampler, 0.0

    def sample(
        self, logits: Tensor, *, mask: Tensor | None = None, generator: torch.Generator | None = None
    ) -> Tensor:
        scores = logits.detach()
        low = torch.where(scores > -torch.inf, scores, torch.inf).amin(-1)
        spreads = scores.amax(-1) - low
        self.spread = max(self.spread, float(spreads[spreads.isfinite()].max()))
        return self.sampler.sample(logits, mask=mask, generator=generator)


def parser_start(evidence: Evidence) -> Values:
    """The norms of the first gradients of every cell of the table, in float32."""
    starts = measured()
    body = tuple(
        (Entry(each.label), tau_entry(each.tau), *(Entry(_scientific(norm), norm) for norm in each.norms))
        for each in starts
    )
    columns = ("estimator", "τ", *(f"{low} to {high} tokens" for low, high in LENGTHS))
    cold = [each for each in starts if each.tau == 0.01 and each.label.startswith("GST")]
    others = [each for each in starts if each not in cold]
    spread = max(each.spread for each in starts)
    largest = max(norm for each in cold for norm in each.norms)
    least = min(norm for each in others if each.tau == 1.0 for norm in each.norms)
    rules = listops_protocol("paper")
    cool = [each for each in starts if each.tau == 0.1 and each.label.startswith("GST")]
    entry = max(norm for each in cool for norm in each.norms) / rules.width**0.5
    require("scores spread by less than every gap", spread < 0.8)
    require("Adam's epsilon is above the gradients of GST at 0.1", entry < EPSILON)
    require("the parser of GST gets no gradient at 0.01", largest < 1e-37)
    require("the parser of the others gets one", min(min(each.norms) for each in others) > 1e-12)
    best = rows_of(evidence.group("listops", "paper"), ACCURACY)[0]
    require("the best cell has such a parser", (best.label, best.tau) in [(e.label, e.tau) for e in cold])
    return {
        "table": Table(columns, body),
        "spread": spread,
        "largest": _scientific(largest),
        "least": _scientific(least),
        "batch": rules.batch,
        "step": _scientific(rules.learning_rate * largest / EPSILON),
        "entry": _scientific(entry),
    }


@cache
def measured() -> tuple[Start, ...]:
    """Every cell of the recipe, with the initial weights of seed 0."""
    batches = _batches()
    entries = [each for each in find_recipe("listops").entries if each.spec.seed == 0]
    model = TreeClassifier(listops_protocol("paper"), generators([0]))
    return tuple(_start(model, entry, batches) for entry in entries)


def _start(model: TreeClassifier, entry: RecipeEntry, batches: list[Split]) -> Start:
    estimator, noise = entry.spec.make_estimator(), torch.Generator().manual_seed(0)
    assert isinstance(estimator, Pathwise)
    sampler, norms = Observed(estimator), []
    for batch in batches:
        logits, _ = model(batch.tokens.long().unsqueeze(0), batch.lengths.unsqueeze(0), sampler, noise)
        (gradient,) = torch.autograd.grad(F.cross_entropy(logits[0], batch.labels), model.query)
        norms.append(float(torch.linalg.vector_norm(gradient, dtype=torch.float64)))
    return Start(entry.label, entry.spec.tau or 1.0, tuple(norms), sampler.spread)


def _batches() -> list[Split]:
    size = listops_protocol("paper").batch
    drawn = [parse(text) for _, text in generate(DRAWN, seed=0)]
    return [
        stack([each for each in drawn if low <= len(each.tokens) <= high][:size], False, size)
        for low, high in LENGTHS
    ]


def _scientific(value: float) -> str:
    return f"{value:.0e}" if value else "0"
