"""Feature selection: a network may read three of thirty inputs and learns which.

Three of the inputs determine the target, the others are noise; which three, the network is not told. It
holds three rows of logits over the inputs. A row draws one input, and what was drawn is masked for the rows
after it, so the three are always different. The predictor sees the chosen inputs and zeros elsewhere.

The table has the test error of the most likely choice, and which part of the relevant inputs it contains.
The noise that no predictor can avoid, and the error of always answering the mean, are printed first.
Run with `python examples/feature_selection.py`.
"""

from __future__ import annotations

from typing import Any

import torch
from common import compare, options
from torch import Tensor, nn

import gapped

INPUTS, PICKS, HIDDEN, BATCH, NOISE = 30, 3, 64, 128, 0.1
relevant = torch.tensor([4, 11, 23])


def observe(count: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
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


def fit(estimator: gapped.Pathwise, steps: int, seed: int) -> tuple[Selector, nn.Sequential]:
    torch.manual_seed(seed)
    selector, network, data = Selector(estimator), predictor(), torch.Generator().manual_seed(seed)
    groups = [{"params": selector.parameters(), "lr": 2e-2}, {"params": network.parameters(), "lr": 2e-3}]
    optimiser = torch.optim.Adam(groups)
    for _ in range(steps):
        x, y = observe(BATCH, data)
        loss = (network(x * selector(BATCH)).squeeze(-1) - y).square().mean()
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
    return selector, network


def train(estimator: gapped.Pathwise, steps: int, seed: int) -> dict[str, float]:
    selector, network = fit(estimator, steps, seed)
    selector.eval()
    x, y = observe(4_000, torch.Generator().manual_seed(1_000_000))
    with torch.no_grad():
        picks = selector(1)
        error = (network(x * picks).squeeze(-1) - y).square().mean()
    return {"test error": float(error), "relevant found": float(picks[0, relevant].mean())}


def draw(figure: Any, estimator: gapped.Pathwise, steps: int, seed: int) -> None:
    """How often each input is among the drawn ones after training."""
    from picture import colour_of

    selector, _ = fit(estimator, steps, seed)
    with torch.no_grad():
        shares = selector(1_000).mean(0)
    axes = figure.subplots()
    axes.bar(range(INPUTS), shares.tolist(), color=colour_of(estimator))
    axes.set_xticks(relevant.tolist(), [f"input {number}" for number in relevant.tolist()])
    axes.set_title("how often each of 30 inputs is drawn; the named ones matter")


def main() -> None:
    estimators = ["gapmax", "gst", "gumbel-softmax", "straight-through", "reinmax"]
    arguments = options(__doc__, steps=600, estimators=estimators).parse_args()
    _, y = observe(4_000, torch.Generator().manual_seed(1_000_000))
    print(f"best possible error {NOISE}, always the mean {float(y.var()):.3f}\n")
    compare(train, arguments, draw, 160)


if __name__ == "__main__":
    main()
