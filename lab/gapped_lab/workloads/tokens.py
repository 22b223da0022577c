"""Tokens: a language model of bytes, tuned by a reward of the texts that it draws.

The model is trained on Python's standard library. The reward, the logit of a frozen network that tells the
text of docstrings from the text of code, is asked for at each drawn text; a divergence keeps the model near
the one that it was. Estimators send the reward's gradient through the drawn tokens by `gapped.rollout`.
Incumbents take rewards as numbers: RLOO over the texts of a prompt, and a GRPO-type objective, which
standardises them, clips ratios and goes over each batch twice. All draw equally many tokens. The first number
is the weighted divergence less the reward, of texts drawn from held-out prompts.
"""

from __future__ import annotations

import ast
import copy
import hashlib
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from filelock import FileLock
from torch import Tensor, nn

import gapped
from gapped.rollouts import Rollout
from gapped_lab.data.sources import cache
from gapped_lab.workloads import Training, at, data, falling, seeded, sizes_of, transformer
from gapped_lab.workloads.transformer import Transformer, dense, places, windows

VOCABULARY = 128
NUMBERS = ("rloo", "grpo")
"""Ways that take rewards as numbers; all others are estimators' texts."""


@dataclass(frozen=True)
class Cell:
    """A way to tune, and the sizes."""

    way: str
    feedback: bool = False
    """For estimators: whether a token's gradient goes through the tokens after it, too."""
    rate: float = 1e-4
    weight: float = 0.3
    """Of the divergence from the model before, in nats a token."""
    steps: int = 100
    every: int = 50
    prompts: int = 16
    texts: int = 4
    """Texts of each prompt: all ways draw as many."""
    prompt: int = 24
    length: int = 24
    width: int = 256
    layers: int = 2
    pretraining: int = 2000


ESTIMATORS = (
    "gapmax",
    "gumbel-softmax:tau=1",
    "gumbel-softmax:tau=0.5",
    "gumbel-rao",
    "reinmax:tau=1.5",
    "gst",
)


SMALL = {"prompts": 8, "prompt": 16, "length": 16}
QUICKLY = {"steps": 20, "every": 10, "width": 32, "layers": 1, "pretraining": 200}
ON_A_CPU = {"steps": 60, "every": 30, "width": 64, "layers": 2, "pretraining": 1000}


def settings(quick: bool) -> dict[str, dict[str, Cell]]:
    """All ways at three learning rates, as many for incumbents as for estimators."""
    changes = sizes_of(quick, SMALL | QUICKLY, SMALL | ON_A_CPU)
    base = replace(Cell(""), **changes)
    ways: dict[str, dict[str, Any]] = {
        way: {"way": way} for way in (*ESTIMATORS, "straight-through", *NUMBERS)
    }
    for way in ("gapmax", "gumbel-softmax:tau=1", "reinmax:tau=1.5", "straight-through"):
        ways[f"{way}, feedback"] = {"way": way, "feedback": True}
    rates = (3e-4, 1e-3) if quick else (3e-4, 1e-3, 3e-3) if changes else (1e-4, 3e-4, 1e-3)
    return {
        "tokens": {
            f"{label}, rate {rate:g}": replace(base, rate=rate, **more)
            for label, more in ways.items()
            for rate in rates
        }
    }


def train(cell: Cell, seed: int) -> Iterator[dict[str, float]]:
    """Tune a copy of the model, and yield what it draws from held-out prompts."""
    with seeded(seed) as device:
        begin, judge, code = _begin(cell, device)
        model = copy.deepcopy(begin).requires_grad_(True)
        # The judge reads the embeddings: they stay as they are.
        model.embedding.weight.requires_grad_(False)
        starts = places(code[0], cell.prompts, cell.prompt, seed, cell.steps)
        held = windows(code[1], places(code[1], 256, cell.prompt, 2**31)[0], cell.prompt)
        tune = _by_number if cell.way in NUMBERS else _by_gradient

        def losses(count: Tensor) -> Iterator[Tensor]:
            prompts = windows(code[0], at(starts, count), cell.prompt)
            yield from tune(cell, model, begin, judge, prompts.repeat_interleave(cell.texts, 0))

        training = Training(model, losses, torch.full((cell.steps,), cell.rate), clip=1.0)
        while training.steps < cell.steps:
            cost = training(cell.every)
            spread = _gradients(model, lambda: next(losses(torch.zeros(1, dtype=torch.long, device=device))))
            yield {**_evaluate(cell, model, begin, judge, held), **spread, **cost}


def _gradients(model: nn.Module, loss: Callable[[], Tensor], draws: int = 6) -> dict[str, float]:
    """Of one batch's gradient over draws of the texts: its size, and the variance's part of its square."""
    parameters = [each for each in model.parameters() if each.requires_grad]
    drawn = [torch.cat([g.flatten() for g in torch.autograd.grad(loss(), parameters)]) for _ in range(draws)]
    together = torch.stack(drawn).double()
    square = together.square().sum(1).mean()
    return {"gradient": square.sqrt().item(), "noise": (together.var(0).sum() / square).item()}


def _by_gradient(
    cell: Cell, model: Transformer, begin: Transformer, judge: nn.Module, prompts: Tensor
) -> Iterator[Tensor]:
    """The loss whose gradient goes through the drawn tokens."""
    text = gapped.rollout(model, prompts, cell.length, estimator=cell.way, feedback=cell.feedback)
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
    return {"loss": cell.weight * divergence - reward, "reward": reward, "divergence": divergence}


class Judge(nn.Module):
    """How much a text reads like a docstring: a logit, bounded so that no reward runs away."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.body = nn.GRU(width, width, batch_first=True)
        self.out = nn.Linear(width, 1)

    def forward(self, embeddings: Tensor) -> Tensor:
        states, _ = self.body(embeddings * embeddings.shape[-1] ** 0.5)
        return 5 * torch.tanh(self.out(states.mean(1)).squeeze(-1) / 5)


def _prose() -> Tensor:
    """Docstrings of the standard library, as bytes."""
    found = []
    for path in data.library():
        tree = ast.parse(path.read_bytes())
        kinds = (ast.Module, ast.ClassDef, ast.FunctionDef)
        found += [ast.get_docstring(node) or "" for node in ast.walk(tree) if isinstance(node, kinds)]
    return data.as_bytes("\n".join(filter(None, found)).encode())


def _trained(model: Transformer, judge: Judge, code: tuple[Tensor, Tensor], context: int, steps: int) -> None:
    """Train the model before tuning and the judge."""
    text, prose = code[0], _prose().to(code[0].device)

    def of_model(count: Tensor) -> Iterator[Tensor]:
        both = windows(text, at(starts, count), context + 1)
        logits = model.head(model(both[:, :-1]).last_hidden_state)
        yield F.cross_entropy(logits.flatten(0, 1), both[:, 1:].flatten())

    starts = places(text, 64, context + 1, 0, steps)
    Training(model, of_model, falling(1e-3, steps, steps // 20), clip=1.0)(steps)
    model.requires_grad_(False)

    def of_judge(count: Tensor) -> Iterator[Tensor]:
        both = [
            windows(part, at(start, count), context // 2) for part, start in zip(parts, first, strict=True)
        ]
        told = judge(model.embedding(torch.cat(both)))
        yield F.binary_cross_entropy_with_logits(told, target)

    parts, target = (prose, text), torch.arange(128, device=text.device).lt(64).float()
    first = [places(part, 64, context // 2, 1, steps) for part in parts]
    Training(judge, of_judge, falling(1e-3, steps), recorded=False)(steps // 3)


def _begin(cell: Cell, device: torch.device) -> tuple[Transformer, Judge, tuple[Tensor, Tensor]]:
    """The model before tuning and the judge, the same for every cell and seed: trained once, and kept."""
    context, code = cell.prompt + cell.length, tuple(part.to(device) for part in data.text())
    sizes = (cell.width, cell.layers, context, cell.pretraining, device.type, len(code[0]))
    sources = [Path(str(module.__file__)).read_bytes() for module in (transformer, sys.modules[__name__])]
    name = hashlib.sha256(repr(sizes).encode() + b"".join(sources)).hexdigest()[:16]
    file = cache() / "workloads" / f"tokens-{name}.pt"
    file.parent.mkdir(parents=True, exist_ok=True)
    with seeded(0), FileLock(f"{file}.lock"):
        model = Transformer(
            VOCABULARY, cell.width, cell.layers, 4, context, lambda size: dense(size, 4 * size)
        ).to(device)
        judge = Judge(cell.width).to(device)
        both = nn.ModuleList([model, judge])
        if file.exists():
            both.load_state_dict(torch.load(file, map_location=device, weights_only=True))
        else:
            _trained(model, judge, (code[0], code[1]), context, cell.pretraining)
            torch.save(both.state_dict(), beside := file.with_suffix(".part"))
            beside.replace(file)
        both.requires_grad_(False)
    return model, judge, (code[0], code[1])
