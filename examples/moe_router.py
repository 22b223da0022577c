"""A mixture of experts: a router sends each token to one expert, within capacity, around one that is down.

Tokens come from four clusters, and each cluster has a linear map of its own from token to target. Five
linear experts learn the maps; the router must find out which token goes where. Three things restrict its
choice:

- one expert is out of service: a mask over the experts;
- an expert takes a limited number of tokens per batch: the tokens that come too late choose again, with full
  experts masked, and a token that nobody can take is dropped, since a row without categories gives zeros;
- a load-balance loss keeps the router from sending everything to the expert that learned first.

The targets carry noise of variance 0.01, so no router does better than that, and a single linear map does
much worse; both are printed. Run with `python examples/moe_router.py`.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from common import compare, options
from torch import Tensor, nn

import gapped

CLUSTERS, EXPERTS, DOWN, WIDTH, BATCH = 4, 5, 2, 8, 128
NOISE, CAPACITY, BALANCE = 0.01, 1.5, 0.02

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


def route(logits: Tensor, estimator: gapped.Pathwise, places: int) -> Tensor:
    """Choose an expert for each token, one-hot, with at most `places` tokens for each expert."""
    allowed = in_service.expand_as(logits)
    choice = estimator.sample(logits, mask=allowed)
    while True:
        taken = choice.detach()
        late = ((taken * taken.cumsum(0)).sum(-1) > places).unsqueeze(-1)
        if not late.any():
            return choice
        full = taken.sum(0) >= places
        allowed = torch.where(late, allowed & ~full, allowed)
        choice = torch.where(late, estimator.sample(logits, mask=allowed), choice)


class MixtureOfExperts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(WIDTH, EXPERTS)
        self.experts = nn.Parameter(torch.randn(EXPERTS, WIDTH, WIDTH) / WIDTH**0.5)

    def forward(self, x: Tensor, choice: Tensor) -> Tensor:
        """Each token through its expert; dense, since five small products are cheaper than sorting."""
        return torch.einsum("be,bi,eij->bj", choice, x, self.experts)


def balance(logits: Tensor, choice: Tensor) -> Tensor:
    """How far the load is from even: experts times the sum of share times mean probability; 1 when even."""
    probabilities = logits.masked_fill(~in_service, -torch.inf).softmax(-1).mean(0)
    return in_service.sum() * (choice.detach().mean(0) * probabilities).sum()


def fit(estimator: gapped.Pathwise, steps: int, seed: int) -> MixtureOfExperts:
    torch.manual_seed(seed)
    model, data = MixtureOfExperts(), torch.Generator().manual_seed(seed)
    optimiser = torch.optim.Adam(model.parameters(), lr=1e-2)
    places = int(CAPACITY * BATCH / int(in_service.sum()))
    for _ in range(steps):
        x, y, _ = tokens(BATCH, data)
        logits = model.router(x)
        choice = route(logits, estimator, places)
        loss = (model(x, choice) - y).square().mean() + BALANCE * balance(logits, choice)
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
    return model


def most_likely(model: MixtureOfExperts, x: Tensor) -> Tensor:
    """The expert in service that the router prefers for each token, one-hot."""
    scores = model.router(x).masked_fill(~in_service, -torch.inf)
    return nn.functional.one_hot(scores.argmax(-1), EXPERTS).float()


def train(estimator: gapped.Pathwise, steps: int, seed: int) -> dict[str, float | list[float]]:
    model = fit(estimator, steps, seed)
    x, y, _ = tokens(4_000, torch.Generator().manual_seed(1_000_000))
    with torch.no_grad():
        choice = most_likely(model, x)
        error = float((model(x, choice) - y).square().mean())
    return {"test error": error, "load, sorted": choice.mean(0).sort().values.tolist()}


def draw(figure: Any, estimator: gapped.Pathwise, steps: int, seed: int) -> None:
    """Where the tokens of each cluster go."""
    from picture import colour_of, plain

    x, _, cluster = tokens(4_000, torch.Generator().manual_seed(1_000_000))
    model = fit(estimator, steps, seed)
    with torch.no_grad():
        choice = most_likely(model, x)
    shares = torch.stack([choice[cluster == c].mean(0) for c in range(CLUSTERS)])
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
    estimators = ["gst:gap=auto", "gumbel-softmax", "straight-through", "reinmax"]
    arguments = options(__doc__, steps=500, estimators=estimators).parse_args()
    x, y, _ = tokens(4_000, problem)
    single = x @ torch.linalg.lstsq(x, y).solution
    print(f"best possible error {NOISE}, one linear map {float((single - y).square().mean()):.3f}\n")
    compare(train, arguments, draw, 190)


if __name__ == "__main__":
    main()
