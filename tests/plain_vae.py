"""A VAE and its training loop as a script would have them, to compare fleets with.

They are written with `torch.nn.Linear` and `torch.optim.Adam`, and share no code with the fleet. Only the
estimators are the package's own, with plain numbers as options.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from conftest import seeded
from torch import Tensor, nn
from toy_tasks import BATCH, CATEGORIES, EPOCHS, LATENTS, PIXELS, STEPS, toy_images, weights

from gapped.lab.fleet import derived_seed
from gapped.lab.tasks.vae import VAETask


class PlainVAE(nn.Module):
    """One VAE."""

    def __init__(self, rectified: bool) -> None:
        super().__init__()
        self.rectified = rectified
        latent = LATENTS * CATEGORIES
        self.encoder = nn.Sequential(
            nn.Linear(PIXELS, 9), nn.ReLU(), nn.Linear(9, 7), nn.ReLU(), nn.Linear(7, latent)
        )
        self.decoder = nn.Sequential(
            nn.Linear(latent, 7), nn.ReLU(), nn.Linear(7, 9), nn.ReLU(), nn.Linear(9, PIXELS)
        )

    def posterior(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Logits of the latents, and the divergence from the uniform prior."""
        logits = self.encoder(x)
        if self.rectified:
            logits = F.relu(logits)
        logits = logits.reshape(len(x), LATENTS, CATEGORIES)
        q = torch.softmax(logits, -1)
        return logits, (q * torch.log(q * CATEGORIES)).sum((1, 2))

    def cross_entropy(self, z: Tensor, x: Tensor) -> Tensor:
        p = torch.sigmoid(self.decoder(z.reshape(len(x), -1)))
        return -(x * torch.log(p) + (1 - x) * torch.log(1 - p)).sum(1)

    def forward(self, x: Tensor, sample: Callable[[Tensor], Tensor]) -> Tensor:
        """Mean negative evidence lower bound of a batch."""
        logits, divergence = self.posterior(x)
        return (self.cross_entropy(sample(logits), x) + divergence).mean()


def plain_twin(task: VAETask, run: int, kind: type[PlainVAE] = PlainVAE) -> PlainVAE:
    """A plain model with the weights that a run of the fleet has now."""
    with torch.random.fork_rng(devices=[]):
        model = kind(task.protocol.rectified_logits).double()
    with torch.no_grad():
        for mine, theirs in zip(weights(model), weights(task.model, run), strict=True):
            mine.copy_(theirs)
    return model


def plain_loop(
    model: PlainVAE,
    learning_rate: float,
    image_seed: int,
    sample: Callable[[Tensor, torch.Generator], Tensor],
    decays: bool = False,
) -> list[float]:
    """Train as a script would, and return the mean loss of each epoch."""
    optimiser = torch.optim.Adam(model.parameters(), lr=learning_rate)
    data = toy_images()
    images = data.train.double() / data.scale
    means = []
    for epoch in range(EPOCHS):
        if decays:
            optimiser.param_groups[0]["lr"] = learning_rate * math.cos(math.pi * epoch / EPOCHS / 2) ** 2
        order = torch.randperm(len(images), generator=seeded(derived_seed(image_seed, epoch)))
        noise = seeded(derived_seed(77, "train", epoch))
        losses = []
        for step in range(STEPS):
            x = images[order[step * BATCH : (step + 1) * BATCH]]
            optimiser.zero_grad()
            loss = model(x, lambda logits: sample(logits, noise))  # noqa: B023 - used at once
            loss.backward()
            optimiser.step()
            losses.append(loss.item())
        means.append(sum(losses) / STEPS)
    return means


class Slot:
    """The estimator of one run, fed with the noise that falls to its place in a fleet.

    A fleet draws group after group, each for all its runs at once. So does this class, with the run's own
    logits in every place, and returns the sample at the run's place.
    """

    def __init__(self, groups: Sequence[Sequence[Any]], run: int) -> None:
        sizes = [len(group) for group in groups]
        self.before = [(group[0], len(group)) for group in groups]
        self.group = next(g for g in range(len(groups)) if run < sum(sizes[: g + 1]))
        self.place = run - sum(sizes[: self.group])
        self.own = groups[self.group][self.place]

    def __call__(self, logits: Tensor, noise: torch.Generator) -> Tensor:
        sample = None
        for number, (estimator, size) in enumerate(self.before):
            copies = logits.expand(size, *logits.shape)
            if number == self.group:
                sample = self.own.sample(copies, generator=noise)[self.place]
            else:
                estimator.sample(copies, generator=noise)
        assert sample is not None
        return sample
