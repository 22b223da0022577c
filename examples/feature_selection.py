"""Feature selection: a network may read three of thirty inputs and learns which.

Three of the inputs determine the target, the others are noise; which three, the network is not told. It
holds three rows of logits over the inputs. A row draws one input, and what was drawn is masked for the rows
after it, so the three are always different. The predictor sees the chosen inputs and zeros elsewhere.

The table says which part of the relevant inputs the most likely choice contains, and the test error it
gives. The noise that no predictor can avoid, and the error of always answering the mean, are printed first.
Run with `python examples/feature_selection.py`.
"""

from __future__ import annotations

import torch
from common import compare, options
from torch import Tensor, nn

import gapped

INPUTS, PICKS, HIDDEN, BATCH, NOISE = 30, 3, 64, 128, 0.1
relevant = torch.tensor([4, 11, 23])


def draw(count: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Inputs and targets: a linear, a quadratic and a periodic effect, and noise."""
    x = torch.randn(count, INPUTS, generator=generator)
    a, b, c = x[:, relevant].unbind(-1)
    clean = a + (b.square() - 1) / 2**0.5 + torch.sin(2 * c)
    return x, clean + NOISE**0.5 * torch.randn(count, generator=generator)


class Selector(nn.Module):
    """Draws `PICKS` different inputs for each example, as a 0/1 vector."""

    def __init__(self, estimator: gapped.Pathwise) -> None:
        super().__init__()
        self.logits = nn.Parameter(torch.zeros(PICKS, INPUTS))
        self.pick = gapped.nn.Sample(estimator, eval="argmax")

    def forward(self, count: int) -> Tensor:
        picks = torch.zeros(count, INPUTS)
        for row in self.logits:
            picks = picks + self.pick(row.expand(count, -1), mask=picks == 0)
        return picks


def predictor() -> nn.Sequential:
    return nn.Sequential(
        nn.Linear(INPUTS, HIDDEN), nn.ReLU(), nn.Linear(HIDDEN, HIDDEN), nn.ReLU(), nn.Linear(HIDDEN, 1)
    )


def train(estimator: gapped.Pathwise, steps: int, seed: int) -> dict[str, float]:
    torch.manual_seed(seed)
    selector, network, data = Selector(estimator), predictor(), torch.Generator().manual_seed(seed)
    groups = [{"params": selector.parameters(), "lr": 2e-2}, {"params": network.parameters(), "lr": 2e-3}]
    optimiser = torch.optim.Adam(groups)
    for _ in range(steps):
        x, y = draw(BATCH, data)
        loss = (network(x * selector(BATCH)).squeeze(-1) - y).square().mean()
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
    selector.eval()
    x, y = draw(4_000, torch.Generator().manual_seed(1_000_000))
    with torch.no_grad():
        picks = selector(1)
        error = (network(x * picks).squeeze(-1) - y).square().mean()
    return {"relevant found": float(picks[0, relevant].mean()), "test error": float(error)}


def main() -> None:
    estimators = ["gumbel-softmax", "straight-through", "gst", "reinmax"]
    arguments = options(__doc__, steps=600, estimators=estimators).parse_args()
    _, y = draw(4_000, torch.Generator().manual_seed(1_000_000))
    print(f"best possible error {NOISE}, always the mean {float(y.var()):.3f}\n")
    compare(train, arguments)


if __name__ == "__main__":
    main()
