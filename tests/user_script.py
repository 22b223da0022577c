"""A program as users write it: mypy --strict checks it with the package, and a test runs it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import torch
from torch import Tensor

import gapped


def train(estimator: gapped.Pathwise | gapped.Score, seed: int) -> Iterator[float]:
    generator = torch.Generator().manual_seed(seed)
    logits = torch.zeros(2, 4, requires_grad=True)
    for _ in range(2):
        cost = gapped.expectation(lambda z: z[..., 0].sum(-1), logits, estimator, generator=generator)
        cost.backward()  # type: ignore[no-untyped-call]
        yield cost.item()


def main() -> None:
    logits = torch.zeros(2, 4, requires_grad=True)
    sample: Tensor = gapped.gst(logits, tau=0.5, hard=True, gap="auto")
    sample = gapped.estimator("gst", gap=1.2).sample(logits)
    sample = gapped.estimator("gumbel-softmax")(logits)
    choice = gapped.GST(tau=0.85).choose(logits)
    table: Tensor = choice.select(torch.eye(4))
    layer = gapped.nn.Sample("gst:gap=auto", eval="argmax")
    layer.tau = 0.5
    posterior = gapped.distributions.OneHotCategorical(logits=logits, estimator=gapped.ReinMax())
    loss = sample.sum() + table.sum() + layer(logits).sum() + posterior.rsample().sum()
    loss.backward()
    if TYPE_CHECKING:  # the other family makes no choices, and type checkers know
        gapped.estimator("rloo").choose(logits)  # type: ignore[attr-defined]
    score: gapped.Score = gapped.estimator("rloo", samples=4)
    cost = gapped.expectation(lambda z: z[..., 0], logits, score)
    diagnosis: gapped.Diagnosis = gapped.diagnose(lambda z: z[..., 0], logits, ["gst", score], samples=16)
    comparison: gapped.Comparison = gapped.compare(train, ["gst", "rloo"], seeds=2)
    print(cost.shape, repr(diagnosis), repr(comparison))


if __name__ == "__main__":
    main()
