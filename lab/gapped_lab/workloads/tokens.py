"""Tokens: a language model of bytes, tuned by a reward of the texts that it draws.

The model is trained on Python's standard library. The reward, the logit of a frozen network that tells the
text of docstrings from the text of code, is asked for at each drawn text; a divergence keeps the model near
the one that it was. Estimators send the reward's gradient through the drawn tokens by `gapped.rollout`.
Incumbents take rewards as numbers: RLOO over the texts of a prompt, and a GRPO-type objective, which
standardises them, clips ratios and goes over each batch twice. All draw equally many tokens. The first number
is the reward less the weighted divergence, of texts drawn from held-out prompts.
"""

from __future__ import annotations

import ast
import copy
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cache

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import gapped
from gapped.rollouts import Rollout
from gapped_lab.workloads import Meter, data, seeded
from gapped_lab.workloads.transformer import Transformer, dense, windows

VOCABULARY = 128
NUMBERS = ("rloo", "grpo")
"""Ways that take rewards as numbers; all others are estimators' texts."""


@dataclass(frozen=True)
class Cell:
    """A way to tune, and the sizes."""

    way: str
    rate: float = 3e-5
    weight: float = 0.05
    """Of the divergence from the model before, in nats a token."""
    steps: int = 300
    every: int = 50
    prompts: int = 16
    texts: int = 4
    """Texts of each prompt: all ways draw as many."""
    prompt: int = 64
    length: int = 64
    width: int = 256
    layers: int = 4
    pretraining: int = 3000


ESTIMATORS = (
    "gapmax",
    "gumbel-softmax:tau=1",
    "gumbel-softmax:tau=0.5",
    "gumbel-rao",
    "reinmax:tau=1.5",
    "gst",
)


def settings(quick: bool) -> dict[str, dict[str, Cell]]:
    """All ways at three learning rates, as many for incumbents as for estimators."""
    base = Cell("")
    if quick:
        base = replace(base, steps=20, every=10, prompts=8, prompt=16, length=16, width=32, layers=1)
        base = replace(base, pretraining=200)
    ways = (*ESTIMATORS, "straight-through", *NUMBERS)
    rates = (3e-4, 1e-3) if quick else (1e-5, 3e-5, 1e-4)
    return {
        "tokens": {
            f"{way}, rate {rate:g}": replace(base, way=way, rate=rate) for way in ways for rate in rates
        }
    }


def train(cell: Cell, seed: int) -> Iterator[dict[str, float]]:
    """Tune a copy of the model, and yield what it draws from held-out prompts."""
    with seeded(seed) as device:
        begin, judge, code = _begin(cell, device)
        model = copy.deepcopy(begin).requires_grad_(True)
        # The judge reads the embeddings: they stay as they are.
        model.embedding.weight.requires_grad_(False)
        optimiser = torch.optim.Adam([p for p in model.parameters() if p.requires_grad], cell.rate)
        held = windows(code[1], 128, cell.prompt, torch.Generator().manual_seed(2**31))
        meter, draw = Meter(device), torch.Generator().manual_seed(seed)
        tune = _by_number if cell.way in NUMBERS else _by_gradient
        while meter.steps < cell.steps:
            with meter:
                for _ in range(cell.every):
                    prompts = windows(code[0], cell.prompts, cell.prompt, draw).repeat_interleave(
                        cell.texts, 0
                    )
                    for loss in tune(cell, model, begin, judge, prompts):
                        optimiser.zero_grad()
                        loss.backward()
                        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                        optimiser.step()
                    meter.steps += 1
            yield {**_evaluate(cell, model, begin, judge, held), **meter.numbers()}


def _by_gradient(
    cell: Cell, model: Transformer, begin: Transformer, judge: nn.Module, prompts: Tensor
) -> Iterator[Tensor]:
    """The loss whose gradient goes through the drawn tokens."""
    text = gapped.rollout(model, prompts, cell.length, estimator=cell.way)
    divergence = _divergence(model, begin, prompts, text)
    yield (cell.weight * divergence - judge(text.embeddings)).mean()


def _by_number(
    cell: Cell, model: Transformer, begin: Transformer, judge: nn.Module, prompts: Tensor
) -> Iterator[Tensor]:
    """Losses whose gradient is that of the log-probability of texts, weighted by what they were worth."""
    with torch.no_grad():
        text = gapped.rollout(model, prompts, cell.length)
        before = text.log_prob
        apart = (before - _score(begin, prompts, text.index)).mean(-1)
        worth = judge(text.embeddings) - cell.weight * apart
        worth = worth.unflatten(0, (-1, cell.texts))
        if cell.way == "rloo":
            advantage = (worth - worth.mean(1, keepdim=True)) * cell.texts / (cell.texts - 1)
        else:
            advantage = (worth - worth.mean(1, keepdim=True)) / (worth.std(1, keepdim=True) + 1e-4)
        advantage = advantage.flatten()[:, None]
    if cell.way == "rloo":
        yield -(advantage * _score(model, prompts, text.index)).sum(-1).mean()
        return
    for _ in range(2):
        ratio = (_score(model, prompts, text.index) - before).exp()
        yield -torch.minimum(advantage * ratio, advantage * ratio.clamp(0.8, 1.2)).mean()


def _score(model: Transformer, prompts: Tensor, index: Tensor) -> Tensor:
    """The log-probability of each token of the texts, `(batch, length)`."""
    hidden = model(torch.cat([prompts, index], 1)).last_hidden_state[:, prompts.shape[1] - 1 : -1]
    return gapped.linear_choice(hidden, model.head.weight, index=index).log_prob


def _divergence(model: Transformer, begin: Transformer, prompts: Tensor, text: Rollout) -> Tensor:
    """KL of each token's law from the one before tuning, averaged over a text."""
    inputs = torch.cat([begin.embedding(prompts), text.embeddings], 1)
    hidden = begin(inputs_embeds=inputs).last_hidden_state[:, prompts.shape[1] - 1 : -1]
    now, then = model.head(text.hidden).log_softmax(-1), begin.head(hidden).log_softmax(-1)
    return (now.exp() * (now - then)).sum(-1).mean(-1)


@torch.no_grad()
def _evaluate(
    cell: Cell, model: Transformer, begin: Transformer, judge: nn.Module, prompts: Tensor
) -> dict[str, float]:
    text = gapped.rollout(model, prompts.to(model.head.weight.device), cell.length)
    reward = judge(text.embeddings).mean().item()
    divergence = _divergence(model, begin, prompts, text).mean().item()
    return {"objective": reward - cell.weight * divergence, "reward": reward, "divergence": divergence}


class Judge(nn.Module):
    """How much a text reads like a docstring: a logit, bounded so that no reward runs away."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.body = nn.GRU(width, width, batch_first=True)
        self.out = nn.Linear(width, 1)

    def forward(self, embeddings: Tensor) -> Tensor:
        states, _ = self.body(embeddings * embeddings.shape[-1] ** 0.5)
        return 5 * torch.tanh(self.out(states.mean(1)).squeeze(-1) / 5)


@cache
def _prose() -> Tensor:
    """Docstrings of the standard library, as bytes."""
    found = []
    for path in data.library():
        tree = ast.parse(path.read_bytes())
        kinds = (ast.Module, ast.ClassDef, ast.FunctionDef)
        found += [ast.get_docstring(node) or "" for node in ast.walk(tree) if isinstance(node, kinds)]
    return data.as_bytes("\n".join(filter(None, found)).encode())


@cache
def _trained(
    width: int, layers: int, context: int, steps: int, device: torch.device
) -> tuple[Transformer, Judge, tuple[Tensor, Tensor]]:
    """The model before tuning and the judge, the same for every cell and seed."""
    with seeded(0):
        code = tuple(part.to(device) for part in data.text())
        prose, draw = _prose().to(device), torch.Generator().manual_seed(0)
        model = Transformer(VOCABULARY, width, layers, 4, context, lambda size: dense(size, 4 * size)).to(
            device
        )
        optimiser = torch.optim.Adam(model.parameters(), 1e-3)
        for _ in range(steps):
            text = windows(code[0], 64, context, draw)
            logits = model.head(model(text[:, :-1]).last_hidden_state)
            loss = F.cross_entropy(logits.flatten(0, 1), text[:, 1:].flatten())
            optimiser.zero_grad()
            loss.backward()
            optimiser.step()
        model.requires_grad_(False)
        judge = Judge(width).to(device)
        optimiser = torch.optim.Adam(judge.parameters(), 1e-3)
        for _ in range(steps // 3):
            both = torch.cat([windows(part, 64, context // 2, draw) for part in (prose, code[0])])
            target = torch.arange(len(both), device=device) < len(both) // 2
            loss = F.binary_cross_entropy_with_logits(judge(model.embedding(both)), target.float())
            optimiser.zero_grad()
            loss.backward()
            optimiser.step()
        return model, judge.requires_grad_(False), (code[0], code[1])


def _begin(cell: Cell, device: torch.device) -> tuple[Transformer, Judge, tuple[Tensor, Tensor]]:
    return _trained(cell.width, cell.layers, cell.prompt + cell.length, cell.pretraining, device)
