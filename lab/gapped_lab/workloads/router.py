"""Routers: a language model of bytes whose feed-forward parts are mixtures of experts.

Incumbents are softmax with top-k, as Switch and Mixtral have it, the same with noise (Shazeer et al., 2017),
SparseMixer v2 (Liu et al., 2024) and DenseMixer's gradient (Yao et al., 2025), which asks all experts of
every token. Capacity, losses for balance and size of the logits, data and steps are the same for all. The
first number is the loss of validation text in bits a byte, with the likeliest experts.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from math import log
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import gapped
from gapped.choices import Law
from gapped.nn.router import Routed
from gapped_lab.workloads import Training, at, data, falling, seeded, sizes_of
from gapped_lab.workloads.transformer import Transformer, dense, places, windows

VOCABULARY, CAPACITY, BALANCE, SIZE = 128, 1.5, 0.01, 0.001


@dataclass(frozen=True)
class Cell:
    """A way to route, and the sizes."""

    way: str
    """ A key of `INCUMBENTS`, or an estimator's text."""
    experts: int = 8
    k: int = 1
    law: Law = "subset"
    """For estimators and several experts: "subset", or "sequential" for one by one."""
    others: Literal["mean", "zero"] | None = None
    """For estimators: what the gradient takes for experts that were not asked."""
    hidden: int = 512
    steps: int = 1500
    every: int = 500
    batch: int = 32
    context: int = 128
    width: int = 256
    layers: int = 3
    rate: float = 1e-3


INCUMBENTS: dict[str, dict[str, Any]] = {
    way: {} for way in ("top-k", "noisy", "gumbel-top-k", "densemixer", "sparsemixer", "dense")
}
ONE: dict[str, dict[str, Any]] = {
    **INCUMBENTS,
    "gapmax": {},
    **{way: {} for way in ("gapmax:draw=argmax", "gumbel-softmax:tau=1", "gumbel-softmax:tau=0.5")},
    **{f"{way}, others=zero": {"others": "zero"} for way in ("gapmax", "gapmax:draw=argmax")},
    **{way: {} for way in ("reinmax", "reinmax:draw=argmax", "gst", "straight-through")},
}
SEVERAL: dict[str, dict[str, Any]] = {
    **INCUMBENTS,
    **{way: {} for way in ("reinmax", "reinmax:draw=argmax", "straight-through", "gst:gap=1")},
    **{f"{way}, one by one": {"law": "sequential"} for way in ("gapmax", "gapmax:draw=argmax", "gst")},
    "reinmax:draw=argmax, others=mean": {"others": "mean"},
}


QUICKLY = {"steps": 150, "every": 50, "batch": 16, "context": 64, "width": 32, "layers": 2, "hidden": 32}
ON_A_CPU = {"steps": 1000, "batch": 16, "context": 64, "width": 64, "layers": 2, "hidden": 64, "rate": 2e-3}


def settings(quick: bool) -> dict[str, dict[str, Cell]]:
    """All ways with 8 and 64 experts, top-1 and top-2, beside a dense model of as many active parameters."""
    sizes = sizes_of(quick, QUICKLY, ON_A_CPU)
    base, cells = replace(Cell(""), **sizes), {}
    kinds = ((8, 1, ONE), (8, 2, SEVERAL), (64, 2, SEVERAL), (64, 1, ONE))
    for experts, k, ways in kinds[:2] if sizes else kinds:
        size = replace(base, experts=experts, k=k, hidden=base.hidden * 8 // experts)
        cells[f"{experts} experts, top-{k}"] = {
            label: replace(size, way=label.split(", ")[0], **more) for label, more in ways.items()
        }
    return cells


class TopK(gapped.nn.Router):
    """Softmax with top-k: gates are the probabilities of the chosen, whose sum is 1 for several."""

    def __init__(self, cell: Cell) -> None:
        super().__init__(cell.width, cell.experts, cell.k, capacity=CAPACITY, others="zero")
        self.way = cell.way
        self.noise = nn.Linear(cell.width, cell.experts, bias=False) if cell.way == "noisy" else None
        if self.noise is not None:
            nn.init.zeros_(self.noise.weight)

    def forward(self, hidden: Tensor, mask: object = None, generator: object = None) -> Routed:
        logits = self.projection(hidden)
        if self.noise is not None and self.training:
            logits = logits + torch.randn_like(logits) * F.softplus(self.noise(hidden))
        if self.way == "gumbel-top-k" and self.training:
            logits = logits - torch.empty_like(logits).exponential_().log()
        gates, index = logits.softmax(-1).topk(self.k)
        if self.k > 1:
            gates = gates / gates.sum(-1, keepdim=True)
        return fixed(self, index, gates, logits)


def fixed(router: gapped.nn.Router, index: Tensor, gates: Tensor, logits: Tensor) -> Routed:
    """The way of tokens whose experts and gates are given."""
    load, counts, where, source = router._plan(index.flatten(0, -2))
    return Routed(index, gates, logits, load, counts, router, None, where, source)


class Mixture(nn.Module):
    """Experts of two layers with stacked weights, and their router."""

    def __init__(self, cell: Cell) -> None:
        super().__init__()
        self.way, shape = cell.way, (cell.experts, cell.width, cell.hidden)
        if cell.way in ("top-k", "noisy", "gumbel-top-k", "densemixer"):
            self.router: gapped.nn.Router = TopK(cell)
        else:
            estimator = gapped.nn.SparseMixer() if cell.way == "sparsemixer" else cell.way
            self.router = gapped.nn.Router(
                cell.width,
                cell.experts,
                cell.k,
                estimator=estimator,
                capacity=CAPACITY,
                others=cell.others,
                law=cell.law,
            )
        self.inward = nn.Parameter(torch.randn(shape) * cell.width**-0.5)
        self.outward = nn.Parameter(torch.randn(shape).mT * cell.hidden**-0.5)
        self.losses, self.load = torch.zeros(()), torch.zeros(cell.experts)

    def forward(self, hidden: Tensor) -> Tensor:
        route = self.router(hidden)
        self.losses, self.load = BALANCE * route.balance + SIZE * route.z, route.load.detach()
        result = route.run(self.ask, hidden)
        if self.way == "densemixer" and self.training:
            with torch.no_grad():
                rows = hidden.flatten(0, -2)
                every = self.ask(rows.expand(len(self.inward), *rows.shape))
            p = route.logits.softmax(-1).flatten(0, -2)
            full = torch.einsum("ne,end->nd", p, every).view_as(result)
            # The gates of the chosen experts have their gradient here, and only here.
            route = fixed(self.router, route.index, route.gates.detach(), route.logits)
            result = route.run(self.ask, hidden) + full - full.detach()
        return result

    def ask(self, blocks: Tensor) -> Tensor:
        """The results of each expert for its block of tokens, `(experts, places, d)`."""
        return F.gelu(blocks @ self.inward) @ self.outward


def train(cell: Cell, seed: int) -> Iterator[dict[str, float]]:
    """Train one language model, and yield its loss on validation text."""
    with seeded(seed) as device:
        text, held = (part.to(device) for part in data.text())

        def feed(width: int) -> nn.Module:
            return dense(width, cell.k * cell.hidden) if cell.way == "dense" else Mixture(cell)

        length = cell.context + 1
        model = Transformer(VOCABULARY, cell.width, cell.layers, 4, cell.context, feed).to(device)
        mixtures = [part for part in model.modules() if isinstance(part, Mixture)]
        starts = places(text, cell.batch, length, seed, cell.steps)
        tests = windows(held, places(held, 8 * cell.batch, length, 2**31)[0], length)

        def losses(count: Tensor) -> Iterator[Tensor]:
            loss = _loss(model, windows(text, at(starts, count), length))
            for mixture in mixtures:
                loss = loss + mixture.losses
            yield loss

        rates = falling(cell.rate, cell.steps, cell.steps // 20)
        training = Training(model, losses, rates, clip=1.0, decay=0.1)
        while training.steps < cell.steps:
            cost = training(cell.every)
            yield {**_evaluate(model, mixtures, tests, cell.batch), **cost}


def _loss(model: Transformer, text: Tensor) -> Tensor:
    logits = model.head(model(text[:, :-1]).last_hidden_state)
    return F.cross_entropy(logits.flatten(0, 1), text[:, 1:].flatten())


@torch.no_grad()
def _evaluate(model: Transformer, mixtures: list[Mixture], tests: Tensor, batch: int) -> dict[str, float]:
    model.eval()
    losses, loads = [], []
    for part in tests.split(batch):
        losses.append(_loss(model, part))
        loads.append([mixture.load for mixture in mixtures])
    numbers = {"bits": torch.stack(losses).mean().item() / log(2)}
    if mixtures:
        load = torch.stack([torch.stack(each).double().sum(0) for each in zip(*loads, strict=True)])
        share = load / load.sum(-1, keepdim=True)
        # An expert is dead that gets less than a hundredth of its part.
        numbers["dead"] = (share < 0.01 / share.shape[-1]).double().mean().item()
        numbers["busiest"] = (share.amax(-1) * share.shape[-1]).mean().item()
    return numbers
