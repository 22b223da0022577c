"""What limits double control variates, in the MNIST-VAE of 30 variables with 10 categories.

It is trained by `DoubleCV(2)`. After every so many steps, for a few test images at the weights as they are,
come variances of the logits' gradient relative to RLOO's of as many samples:

- `trained`: at the factor alpha that training has reached; `best`: at the best one for these images;
- `by variable`, `by image`: at the best factor for each variable, or for each image;
- `8 samples`: at the best factor, for eight samples instead of two;
- `mean slope`: two samples whose costs lose what the mean slope over many others predicts. More of the slopes
  cannot be known; what is left is what the cost is beside a sum of one term for each variable.

Usage: python benchmarks/slope_limits.py [steps between [how often [seed]]]
"""

from __future__ import annotations

import math
import sys

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import gapped
from gapped_lab.data import load

LATENTS, CATEGORIES, BATCH, RATE = 30, 10, 100, 1e-3
IMAGES, DRAWS, MANY = 20, 100, 8


class VAE(nn.Module):
    def __init__(self, pixels: int) -> None:
        super().__init__()
        widths = (pixels, 512, 256, LATENTS * CATEGORIES)
        self.encoder, self.decoder = self.layers(*widths), self.layers(*reversed(widths))

    @staticmethod
    def layers(a: int, b: int, c: int, d: int) -> nn.Sequential:
        return nn.Sequential(nn.Linear(a, b), nn.ReLU(), nn.Linear(b, c), nn.ReLU(), nn.Linear(c, d))

    def encode(self, x: Tensor) -> Tensor:
        logits: Tensor = self.encoder(x).unflatten(-1, (LATENTS, CATEGORIES))
        return logits

    def cost(self, z: Tensor, x: Tensor) -> Tensor:
        """The negative log-likelihood of each image."""
        return F.binary_cross_entropy_with_logits(
            self.decoder(z.flatten(-2)), x.expand(*z.shape[:-2], -1), reduction="none"
        ).sum(-1)


def step(model: VAE, estimator: gapped.DoubleCV, optimiser: torch.optim.Optimizer, x: Tensor) -> None:
    logits = model.encode(x)
    log_q = logits.log_softmax(-1)
    divergence = (log_q.exp() * (log_q + math.log(CATEGORIES))).sum((-1, -2))
    cost = gapped.expectation(lambda z: model.cost(z, x), logits, estimator)
    optimiser.zero_grad()
    ((cost + divergence).mean() + estimator.variance_loss()).backward()
    optimiser.step()


def terms(p: Tensor, z: Tensor, costs: Tensor, slopes: Tensor, known: Tensor | None) -> tuple[Tensor, Tensor]:
    """RLOO's gradient, and what each variable's factor adds to it: ``(B, L K)`` and ``(B, L, L K)``.

    The slopes of the others predict the cost, or `known` ones that depend on no sample.
    """
    n, apart = len(z), z - p
    predictor = (slopes.sum(0) - slopes) / (n - 1) if known is None else known.expand_as(slopes)
    mean = predictor.mean(0)
    back = p * (mean - (p * mean).sum(-1, keepdim=True))
    relative = [(x - x.mean(0)) / (n - 1) for x in (costs, (predictor * apart).sum(-1))]
    plain = torch.einsum("nb,nblk->blk", relative[0], apart)
    change = -torch.einsum("nbm,nblk->bmlk", relative[1], apart)
    change[:, range(LATENTS), range(LATENTS)] += back
    return plain.flatten(1), change.flatten(2)


class Moments:
    """Second moments of `terms`, from which the variance at any factors follows."""

    def __init__(self) -> None:
        self.drawn: list[Tensor] = []

    def add(self, plain: Tensor, change: Tensor) -> None:
        self.drawn.append(torch.cat([plain.unsqueeze(1), change], 1).double())

    def covariances(self) -> Tensor:
        """Of RLOO's gradient and the variables' changes, for each image, ``(B, 1 + L, 1 + L)``."""
        mean = torch.stack(self.drawn).mean(0)
        apart = (each - mean for each in self.drawn)
        total: Tensor = sum((each @ each.mT for each in apart), torch.zeros(()))
        return total

    def ratios(self, alpha: float) -> dict[str, float]:
        every = self.covariances()
        shared = every.sum(0)
        one = torch.stack([shared[0, 0], shared[0, 1:].sum(), shared[1:, 1:].sum()])
        each = torch.stack([every[:, 0, 0], every[:, 0, 1:].sum(-1), every[:, 1:, 1:].sum((-1, -2))])
        by_variable = shared[0, 1:] @ torch.linalg.lstsq(shared[1:, 1:], shared[0, 1:]).solution
        return {
            "trained": float((one[0] + 2 * alpha * one[1] + alpha**2 * one[2]) / one[0]),
            "best": float(1 - one[1] ** 2 / (one[0] * one[2])),
            "by variable": float(1 - by_variable / one[0]),
            "by image": float((each[0] - each[1] ** 2 / each[2]).sum() / one[0]),
        }


def draw(model: VAE, p: Tensor, x: Tensor, samples: int) -> tuple[Tensor, Tensor, Tensor]:
    """One-hot samples, their costs and slopes."""
    index = torch.multinomial(p.flatten(0, 1), samples, replacement=True).T.reshape(samples, *p.shape[:2])
    z = F.one_hot(index, CATEGORIES).to(p.dtype).requires_grad_()
    costs = model.cost(z, x)
    (slopes,) = torch.autograd.grad(costs.sum(), z)
    return z.detach(), costs.detach(), slopes


def measure(model: VAE, x: Tensor, alpha: float) -> dict[str, float]:
    with torch.no_grad():
        p = model.encode(x).softmax(-1)
    mean = torch.stack([draw(model, p, x, MANY)[2].mean(0) for _ in range(DRAWS)]).mean(0)
    few, many, known = Moments(), Moments(), Moments()
    for _ in range(DRAWS):
        drawn = draw(model, p, x, MANY)
        two = [each[:2] for each in drawn]
        few.add(*terms(p, *two, None))
        many.add(*terms(p, *drawn, None))
        known.add(*terms(p, *two, mean))
    others = {"8 samples": many.ratios(alpha)["best"], "mean slope": known.ratios(alpha)["best"]}
    return few.ratios(alpha) | others


def main() -> None:
    between, often, seed = (int(word) for word in [*sys.argv[1:], *("600", "10", "0")[len(sys.argv) - 1 :]])
    torch.manual_seed(seed)
    data = load("mnist")
    train, test = (each.float() / data.scale for each in (data.train, data.test))
    model, estimator = VAE(train.shape[1]), gapped.DoubleCV(2)
    optimiser = torch.optim.Adam([*model.parameters(), *estimator.parameters()], RATE)
    for number in range(often + 1):
        alpha = estimator.alpha.item()
        ratios = measure(model, test[:IMAGES], alpha)
        text = ", ".join(f"{name} {value:.3f}" for name, value in ratios.items())
        print(f"step {number * between}: alpha {alpha:.2f}; {text}", flush=True)
        for _ in range(between if number < often else 0):
            step(model, estimator, optimiser, train[torch.randint(len(train), (BATCH,))])


if __name__ == "__main__":
    main()
