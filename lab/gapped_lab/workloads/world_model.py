"""A world model: DreamerV3's recurrent state-space model on moving digits that answer to actions.

A digit moves over a field of 32 x 32 pixels. An action pushes it; at a wall it bounces, and may turn into
another digit, so that the future is a distribution and latents must hold a choice. Latents, unimix, balanced
divergences and free bits are those of Hafner et al. (2023), whose gradient is straight-through at
temperature 1. The first number is the squared error of frames that the model imagines: after 6 frames seen,
6 more from the prior with the actions known, averaged over 8 samples of the latents.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import gapped
from gapped_lab.workloads import Training, at, data, seeded, sizes_of

FIELD, DIGIT, SEEN, IMAGINED, SAMPLES = 32, 8, 6, 6, 8
PUSHES = ((0, 0), (0, 1), (0, -1), (1, 0), (-1, 0))


@dataclass(frozen=True)
class Cell:
    """An estimator's text, and the sizes."""

    way: str
    latents: int = 32
    classes: int = 32
    unimix: float = 0.01
    steps: int = 1000
    every: int = 500
    """Steps between evaluations."""
    batch: int = 48
    held: int = 256
    """Sequences that the model is evaluated on."""
    width: int = 256
    state: int = 256
    rate: float = 4e-4


WAYS = (
    "straight-through",
    "gapmax",
    "gumbel-softmax:tau=1",
    "reinmax:tau=1",
    "gumbel-softmax:tau=0.5",
    "gst",
    "reinmax:tau=1.5",
    "gumbel-rao",
)


QUICKLY = {"latents": 8, "classes": 8, "steps": 60, "every": 30, "batch": 16, "held": 64}
QUICKLY |= {"width": 32, "state": 64}
ON_A_CPU: dict[str, Any] = {"latents": 16, "classes": 16, "steps": 600, "every": 300, "batch": 16}
ON_A_CPU |= {"width": 64, "state": 128, "rate": 1e-3}


def settings(quick: bool) -> dict[str, dict[str, Cell]]:
    """All estimators, with unimix and without."""
    base = replace(Cell(""), **sizes_of(quick, QUICKLY, ON_A_CPU))
    cells = {way: replace(base, way=way) for way in WAYS}
    cells |= {f"{way}, no unimix": replace(base, way=way, unimix=0.0) for way in WAYS}
    return {f"{base.latents} x {base.classes}": cells}


class World:
    """Sequences of the world: frames `(B, T, 1, 32, 32)` in [0, 1] and actions `(B, T)` before each frame."""

    def __init__(self, images: Tensor, generator: torch.Generator) -> None:
        self.images, self.generator = images.float() / 255, generator

    def sequences(self, batch: int, length: int) -> tuple[Tensor, Tensor]:
        draw, space = self.generator, FIELD - DIGIT
        position = torch.rand(batch, 2, generator=draw) * space
        speed = torch.randn(batch, 2, generator=draw) * 2
        digit = torch.randint(len(self.images), (batch,), generator=draw)
        actions = torch.randint(len(PUSHES), (batch, length), generator=draw)
        pushes = 1.5 * torch.tensor(PUSHES, dtype=torch.float32)
        frames = torch.zeros(batch, length, FIELD + 1, FIELD + 1)
        rows = torch.arange(batch)
        for step in range(length):
            speed = (speed + pushes[actions[:, step]]).clamp(-4, 4)
            position = position + speed
            outside = (position < 0) | (position > space)
            position = torch.where(position < 0, -position, position)
            position = torch.where(position > space, 2 * space - position, position).clamp(0, space)
            speed = torch.where(outside, -speed, speed)
            other = torch.randint(len(self.images), (batch,), generator=draw)
            turns = outside.any(-1) & (torch.rand(batch, generator=draw) < 0.5)
            digit = torch.where(turns, other, digit)
            _paint(frames[:, step], self.images[digit, 0], position, rows)
        return frames[..., None, :FIELD, :FIELD], actions


def _paint(frame: Tensor, images: Tensor, position: Tensor, rows: Tensor) -> None:
    """Add images to the frame at fractional positions, shared among the four nearest pixels."""
    corner = position.floor().long()
    part = position - corner
    offsets = torch.arange(DIGIT)
    for down in (0, 1):
        for right in (0, 1):
            weight = (part[:, 0] if down else 1 - part[:, 0]) * (part[:, 1] if right else 1 - part[:, 1])
            y = (corner[:, :1] + down + offsets)[:, :, None]
            x = (corner[:, 1:] + right + offsets)[:, None, :]
            frame[rows[:, None, None], y, x] += weight[:, None, None] * images


class WorldModel(nn.Module):
    """The recurrent state-space model: deterministic state h, latents z one-hot `(B, latents * classes)`."""

    def __init__(self, cell: Cell) -> None:
        super().__init__()
        self.cell, self.estimator = cell, gapped.estimator(cell.way)
        width, state, size = cell.width, cell.state, cell.latents * cell.classes
        channels = width // 4
        self.encoder = nn.Sequential(
            nn.Conv2d(1, channels, 4, 2, 1),
            nn.SiLU(),
            nn.Conv2d(channels, 2 * channels, 4, 2, 1),
            nn.SiLU(),
            nn.Conv2d(2 * channels, 4 * channels, 4, 2, 1),
            nn.SiLU(),
            nn.Flatten(),
            nn.Linear(4 * channels * 16, width),
        )
        self.inward = nn.Sequential(nn.Linear(size + len(PUSHES), width), nn.LayerNorm(width), nn.SiLU())
        self.cell_of_state = nn.GRUCell(width, state)
        self.prior = nn.Sequential(
            nn.Linear(state, width), nn.LayerNorm(width), nn.SiLU(), nn.Linear(width, size)
        )
        self.posterior = nn.Sequential(
            nn.Linear(state + width, width), nn.LayerNorm(width), nn.SiLU(), nn.Linear(width, size)
        )
        self.decoder = nn.Sequential(
            nn.Linear(state + size, 4 * channels * 16),
            nn.Unflatten(1, (4 * channels, 4, 4)),
            nn.SiLU(),
            nn.ConvTranspose2d(4 * channels, 2 * channels, 4, 2, 1),
            nn.SiLU(),
            nn.ConvTranspose2d(2 * channels, channels, 4, 2, 1),
            nn.SiLU(),
            nn.ConvTranspose2d(channels, 1, 4, 2, 1),
        )

    def logits(self, network: nn.Module, features: Tensor) -> Tensor:
        logits = network(features).unflatten(-1, (self.cell.latents, self.cell.classes))
        return gapped.unimix(logits, self.cell.unimix) if self.cell.unimix else logits.log_softmax(-1)

    def begin(self, batch: int, like: Tensor) -> tuple[Tensor, Tensor]:
        size = self.cell.latents * self.cell.classes
        return like.new_zeros(batch, self.cell.state), like.new_zeros(batch, size)

    def step(self, state: Tensor, latents: Tensor, action: Tensor) -> Tensor:
        pushes = F.one_hot(action, len(PUSHES)).to(latents)
        return self.cell_of_state(self.inward(torch.cat([latents, pushes], -1)), state)

    def observe(self, frames: Tensor, actions: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """States, latents, and the logits of posterior and prior, with time as the second axis."""
        seen = self.encoder(frames.flatten(0, 1)).unflatten(0, frames.shape[:2])
        state, latents = self.begin(len(frames), seen)
        states, drawn, posteriors = [], [], []
        for time in range(frames.shape[1]):
            state = self.step(state, latents, actions[:, time])
            posterior = self.logits(self.posterior, torch.cat([state, seen[:, time]], -1))
            latents = self.estimator.sample(posterior).flatten(1)
            states.append(state)
            drawn.append(latents)
            posteriors.append(posterior)
        together = torch.stack(states, 1)
        return together, torch.stack(drawn, 1), torch.stack(posteriors, 1), self.logits(self.prior, together)

    def decode(self, states: Tensor, latents: Tensor) -> Tensor:
        both = torch.cat([states, latents], -1)
        return self.decoder(both.flatten(0, -2)).unflatten(0, both.shape[:-1])


def divergence(p: Tensor, q: Tensor) -> Tensor:
    """KL(p || q) of each sequence and step, summed over latents; arguments are log-probabilities."""
    return (p.exp() * (p - q)).sum((-2, -1))


def train(cell: Cell, seed: int) -> Iterator[dict[str, float]]:
    """Train one world model, and yield what it imagines of sequences that it has not seen."""
    with seeded(seed) as device:
        train_images, test_images = data.digits()
        world = World(train_images, torch.Generator().manual_seed(seed))
        held = World(test_images, torch.Generator().manual_seed(2**31)).sequences(cell.held, SEEN + IMAGINED)
        frames, actions = (each.to(device) for each in held)
        model = WorldModel(cell).to(device)
        # Sequences are made once for many steps: the world runs on a CPU, and the batches are what is timed.
        count = min(cell.steps, 200) * cell.batch
        pool = [each.to(device) for each in world.sequences(count, SEEN + IMAGINED)]
        # Not from the seed's own numbers, of which estimators draw different amounts.
        rows = torch.randint(count, (cell.steps, cell.batch), generator=world.generator).to(device)

        def losses(count: Tensor) -> Iterator[Tensor]:
            batch = at(rows, count)
            yield _loss(model, pool[0][batch], pool[1][batch])[0]

        training = Training(model, losses, torch.full((cell.steps,), cell.rate), clip=100.0)
        while training.steps < cell.steps:
            cost = training(cell.every)
            yield {**_evaluate(model, frames, actions), **cost}


def _loss(model: WorldModel, frames: Tensor, actions: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The loss, the squared error of frames summed over pixels, and the divergence."""
    states, latents, posterior, prior = model.observe(frames, actions)
    error = (model.decode(states, latents) - frames).square().sum((-3, -2, -1)).mean()
    exact = divergence(posterior, prior).mean()
    dynamics, representation = divergence(posterior.detach(), prior), divergence(posterior, prior.detach())
    loss = error + (0.5 * dynamics.clamp_min(1.0) + 0.1 * representation.clamp_min(1.0)).mean()
    return loss, error, exact


@torch.no_grad()
def _evaluate(model: WorldModel, frames: Tensor, actions: Tensor) -> dict[str, float]:
    model.eval()
    _, error, exact = _loss(model, frames, actions)
    states, latents, _, _ = model.observe(frames[:, :SEEN], actions[:, :SEEN])
    state, drawn = (each[:, -1].repeat_interleave(SAMPLES, 0) for each in (states, latents))
    imagined = []
    for time in range(SEEN, SEEN + IMAGINED):
        state = model.step(state, drawn, actions[:, time].repeat_interleave(SAMPLES, 0))
        drawn = model.estimator.sample(model.logits(model.prior, state)).flatten(1)
        frame = model.decode(state[:, None], drawn[:, None])[:, 0]
        imagined.append(frame.unflatten(0, (-1, SAMPLES)).mean(1))
    off = (torch.stack(imagined, 1) - frames[:, SEEN:]).square().sum((-3, -2, -1)).mean()
    return {"imagined": off.item(), "reconstruction": error.item(), "divergence": exact.item()}
