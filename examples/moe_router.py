"""A mixture of experts: a router sends each token to one expert, within capacity, around one that is down.

Tokens come from four clusters, and each cluster has a linear map of its own from token to target. Five
linear experts learn the maps; `gapped.nn.Router` must find out which token goes where. Its gradient takes a
running mean for the result of an expert that a token did not choose; the second column has the error where it
takes zero. Three things restrict its choice:

- one expert is out of service: a mask over the experts;
- an expert takes a limited number of tokens per batch while training: those that come too late get zeros;
- a load-balance loss keeps the router from sending everything to the expert that learned first.

The targets carry noise of variance 0.01, so no router does better than that, and a single linear map does
much worse; both are printed. Run with `python examples/moe_router.py`.
"""

from __future__ import annotations

from typing import Any, Literal

import numpy as np
import torch
from common import compare, options
from torch import Tensor, nn

import gapped

CLUSTERS, EXPERTS, DOWN, WIDTH, BATCH = 4, 5, 2, 8, 128
NOISE, CAPACITY, BALANCE = 0.01, 2.0, 0.02

problem = torch.Generator().manual_seed(0)
centres = 3 * torch.randn(CLUSTERS, WIDTH, generator=problem)
maps = torch.randn(CLUSTERS, WIDTH, WIDTH, generator=problem) / WIDTH**0.5
in_service = torch.arange(EXPERTS) != DOWN


def tokens(count: int, generator: torch.Generator) -> tuple[Tensor, Tensor, Tensor]:
    """Tokens, their targets and their clusters."""
    cluster = torch.randint(CLUSTERS, (count,), generator=generator)
    x = centres[cluster] + torch.randn(count, WIDTH, generator=generator)
    noise = NOISE**0.5 * torch.randn(count, WIDTH, generator=generator)
    return x, torch.einsum("bi,bij->bj", x, maps[cluster]) + noise, cluster


class MixtureOfExperts(nn.Module):
    def __init__(self, estimator: gapped.Pathwise, others: Literal["mean", "zero"]) -> None:
        super().__init__()
        self.router = gapped.nn.Router(WIDTH, EXPERTS, estimator=estimator, capacity=CAPACITY, others=others)
        self.experts = nn.Parameter(torch.randn(EXPERTS, WIDTH, WIDTH) / WIDTH**0.5)

    def forward(self, x: Tensor) -> tuple[Tensor, gapped.nn.Routed]:
        """Each token through its expert."""
        route = self.router(x, in_service)
        return route.run(lambda blocks: torch.bmm(blocks, self.experts), x), route


def fit(
    estimator: gapped.Pathwise, steps: int, seed: int, others: Literal["mean", "zero"] = "mean"
) -> MixtureOfExperts:
    torch.manual_seed(seed)
    model, data = MixtureOfExperts(estimator, others), torch.Generator().manual_seed(seed)
    optimiser = torch.optim.Adam(model.parameters(), lr=1e-2)
    for _ in range(steps):
        x, y, _ = tokens(BATCH, data)
        found, route = model(x)
        loss = (found - y).square().mean() + BALANCE * route.balance
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
    # From here on each token goes to its likeliest expert, and none is ever full.
    model.router.capacity = EXPERTS
    return model.eval()


def evaluate(model: MixtureOfExperts) -> tuple[float, list[float]]:
    """The test error, and the share of test tokens of each expert, smallest first."""
    x, y, _ = tokens(4_000, torch.Generator().manual_seed(1_000_000))
    with torch.no_grad():
        found, route = model(x)
    return float((found - y).square().mean()), (route.load / len(x)).sort().values.tolist()


def train(estimator: gapped.Pathwise, steps: int, seed: int) -> dict[str, float | list[float]]:
    error, loads = evaluate(fit(estimator, steps, seed))
    as_zero, _ = evaluate(fit(estimator, steps, seed, "zero"))
    return {"test error": error, "others as zero": as_zero, "load, sorted": loads}


def draw(figure: Any, estimator: gapped.Pathwise, steps: int, seed: int) -> None:
    """Where the tokens of each cluster go."""
    from picture import colour_of, plain

    x, _, cluster = tokens(4_000, torch.Generator().manual_seed(1_000_000))
    model = fit(estimator, steps, seed)
    with torch.no_grad():
        index = model(x)[1].index.squeeze(-1)
    shares = (
        nn.functional.one_hot(cluster, CLUSTERS).float().T @ nn.functional.one_hot(index, EXPERTS).float()
    )
    shares = shares / shares.sum(-1, keepdim=True)
    axes = figure.subplots()
    for (row, column), share in np.ndenumerate(shares.numpy()):
        axes.barh(row, 0.96, 0.92, column - 0.48, color=colour_of(estimator), alpha=0.04 + 0.35 * share)
        axes.text(column, row, f"{share:.2f}", ha="center", va="center")
    experts = [f"expert {e + 1}" + ("" if e != DOWN else ", down") for e in range(EXPERTS)]
    axes.set_xticks(range(EXPERTS), experts)
    axes.set_yticks(range(CLUSTERS), [f"cluster {c + 1}" for c in range(CLUSTERS)])
    axes.set_ylim(CLUSTERS - 0.5, -0.5)
    plain(axes)
    axes.set_title("share of a cluster's test tokens that go to each expert")


def main() -> None:
    estimators = ["gapmax", "gst", "gumbel-softmax", "straight-through", "reinmax"]
    arguments = options(__doc__, steps=500, estimators=estimators).parse_args()
    x, y, _ = tokens(4_000, problem)
    single = x @ torch.linalg.lstsq(x, y).solution
    print(f"best possible error {NOISE}, one linear map {float((single - y).square().mean()):.3f}\n")
    compare(train, arguments, draw, 190)


if __name__ == "__main__":
    main()
