"""A categorical choice inside a network, trained with two estimators, beside the best it could do.

A two-layer network sees a point in the plane and chooses one of eight codes. The cost is the squared
distance from the point to the chosen code, so the best choice is the nearest code and the best cost is known.
Expected costs are enumerated over the eight codes: the numbers below contain no sampling noise of their own.

Run with `python examples/quickstart.py`; it takes a few seconds on one core.
"""

from __future__ import annotations

from statistics import fmean, stdev

import torch
from torch import Tensor

import gapped

CODES, HIDDEN, BATCH, STEPS, SEEDS = 8, 32, 64, 200, 5
ESTIMATORS = {
    "Gumbel-softmax": gapped.GumbelSoftmax(tau=0.5),
    "GST": gapped.GST(tau=0.5, gap=1.0),
}

problem = torch.Generator().manual_seed(0)
codebook = torch.randn(CODES, 2, generator=problem)
test_points = torch.randn(2_000, 2, generator=problem)


def cost(choice: Tensor, points: Tensor) -> Tensor:
    """Squared distance from each point to the code that its one-hot `choice` picks."""
    return (choice @ codebook - points).square().sum(-1)


def distances(points: Tensor) -> Tensor:
    """The cost of every code for every point."""
    return (codebook - points.unsqueeze(1)).square().sum(-1)


def train(estimator: gapped.GST | gapped.GumbelSoftmax, seed: int) -> tuple[float, float]:
    """Train one network. Returns the expected test cost, and the variance of the first gradients."""
    torch.manual_seed(seed)
    network = torch.nn.Sequential(torch.nn.Linear(2, HIDDEN), torch.nn.ReLU(), torch.nn.Linear(HIDDEN, CODES))
    optimiser = torch.optim.Adam(network.parameters(), lr=1e-2)
    noise = gradient_variance(network, estimator)
    for _ in range(STEPS):
        points = torch.randn(BATCH, 2)
        choice = estimator.sample(network(points))
        optimiser.zero_grad()
        cost(choice, points).mean().backward()
        optimiser.step()
    with torch.no_grad():
        expected = (network(test_points).softmax(-1) * distances(test_points)).sum(-1)
    return float(expected.mean()), noise


def gradient_variance(
    network: torch.nn.Sequential, estimator: gapped.GST | gapped.GumbelSoftmax, samples: int = 50
) -> float:
    """Variance over samples of the gradient on a fixed batch, averaged over the weights."""
    points, weights = test_points[:BATCH], list(network.parameters())
    gradients = []
    for _ in range(samples):
        loss = cost(estimator.sample(network(points)), points).mean()
        gradients.append(torch.cat([g.flatten() for g in torch.autograd.grad(loss, weights)]))
    return float(torch.stack(gradients).double().var(0).mean())


def main() -> None:
    best = float(distances(test_points).amin(-1).mean())
    uniform = float(distances(test_points).mean())
    print(f"best possible cost {best:.4f}, uniform choice {uniform:.4f}")
    print(f"{'estimator':16s} {'cost - best':>22s} {'gradient variance':>20s}")
    excess: dict[str, list[float]] = {}
    for name, estimator in ESTIMATORS.items():
        costs, noise = zip(*(train(estimator, seed) for seed in range(SEEDS)), strict=True)
        excess[name] = [value - best for value in costs]
        mean, spread = fmean(excess[name]), stdev(excess[name])
        print(f"{name:16s} {mean:11.4f} +- {spread:.4f} {fmean(noise):20.2e}")
    print(f"mean and standard deviation over {SEEDS} seeds; the variance is that before the first step")
    pairs = [ours - theirs for theirs, ours in zip(*excess.values(), strict=True)]
    print(f"GST minus Gumbel-softmax: {fmean(pairs):+.4f}, standard error {stdev(pairs) / SEEDS**0.5:.4f}")


if __name__ == "__main__":
    main()
