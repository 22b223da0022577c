"""A network learns to choose one of eight codes by gradient, and the best possible cost is known.

A two-layer network sees a point in the plane and chooses one of eight codes. The cost is the squared
distance from the point to the chosen code, so the best choice is the nearest code and the best cost is known.
Expected costs are enumerated over the eight codes: the table contains no sampling noise of its own. Its last
column is the standard deviation of the gradient before the first step, a root mean square over the weights.

Run with `python examples/quickstart.py`; it takes a few seconds on one core.
"""

from __future__ import annotations

from typing import Any

import torch
from common import compare, options
from torch import Tensor, nn

import gapped

CODES, HIDDEN, BATCH = 8, 32, 64

problem = torch.Generator().manual_seed(0)
codebook = torch.randn(CODES, 2, generator=problem)
test_points = torch.randn(2_000, 2, generator=problem)


def cost(choice: Tensor, points: Tensor) -> Tensor:
    """Squared distance from each point to the code that its one-hot `choice` picks."""
    return (choice @ codebook - points).square().sum(-1)


def distances(points: Tensor) -> Tensor:
    """The cost of every code for every point."""
    return (codebook - points.unsqueeze(1)).square().sum(-1)


def new_network(seed: int) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(2, HIDDEN), nn.ReLU(), nn.Linear(HIDDEN, CODES))


def fit(network: nn.Sequential, estimator: gapped.Pathwise, steps: int) -> None:
    optimiser = torch.optim.Adam(network.parameters(), lr=1e-2)
    for _ in range(steps):
        points = torch.randn(BATCH, 2)
        choice = estimator.sample(network(points))
        optimiser.zero_grad()
        cost(choice, points).mean().backward()
        optimiser.step()


def gradient_noise(network: nn.Sequential, estimator: gapped.Pathwise, samples: int = 50) -> float:
    """Standard deviation over samples of the gradient on a fixed batch, a root mean square over weights."""
    points, weights = test_points[:BATCH], list(network.parameters())
    gradients = []
    for _ in range(samples):
        loss = cost(estimator.sample(network(points)), points).mean()
        gradients.append(torch.cat([g.flatten() for g in torch.autograd.grad(loss, weights)]))
    return float(torch.stack(gradients).double().var(0).mean().sqrt())


def train(estimator: gapped.Pathwise, steps: int, seed: int) -> dict[str, float]:
    network = new_network(seed)
    noise = gradient_noise(network, estimator)
    fit(network, estimator, steps)
    with torch.no_grad():
        expected = (network(test_points).softmax(-1) * distances(test_points)).sum(-1)
    best = distances(test_points).amin(-1)
    return {"cost above the best": float((expected - best).mean()), "first gradient sd": noise}


def draw(figure: Any, estimator: gapped.Pathwise, steps: int, seed: int) -> None:
    """A line from each point to its most likely code, thick where another code is nearer."""
    from picture import INK, colour_of

    network = new_network(seed)
    fit(network, estimator, steps)
    points = test_points[:500]
    with torch.no_grad():
        chosen = network(points).argmax(-1)
    axes = figure.subplots()
    wrong = chosen != distances(points).argmin(-1)
    # One line with a break after each point, for a smaller file.
    lines = torch.stack([points, codebook[chosen], torch.full_like(points, torch.nan)], 1)
    for some, width in ((lines[~wrong], 0.5), (lines[wrong], 2.5)):
        axes.plot(*some.flatten(0, 1).T, color=colour_of(estimator), linewidth=width)
    axes.plot(*codebook.T, "s", color=INK, markersize=7)
    thick = f"where the line is thick ({int(wrong.sum())}), another code is nearer"
    axes.set_title(f"500 points and their most likely codes;\n{thick}")
    axes.set_aspect("equal")


def main() -> None:
    estimators = ["gapmax", "gst", "gumbel-softmax", "straight-through", "reinmax"]
    arguments = options(__doc__, steps=200, estimators=estimators, seeds=5).parse_args()
    best, uniform = distances(test_points).amin(-1).mean(), distances(test_points).mean()
    print(f"best possible cost {float(best):.4f}, uniform choice {float(uniform):.4f}\n")
    compare(train, arguments, draw, 300)


if __name__ == "__main__":
    main()
