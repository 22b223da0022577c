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


def other_choices(logits: Tensor) -> Tensor:
    """Gates, subsets, counts, a vocabulary, a quantizer: what each returns, by its type."""
    keep: Tensor = gapped.gate(logits, estimator="gst")
    some: Tensor = gapped.subset(logits, 2, estimator=gapped.GST(gap=1.5))
    marginals: Tensor = gapped.subsets.marginals(logits, 2)
    count: Tensor = gapped.counts.poisson(logits)
    token = gapped.linear_choice(logits, torch.eye(9, 4))
    entry: Tensor = token.select(torch.eye(9, 4)) + token.log_prob.unsqueeze(-1)
    layer = gapped.nn.Quantizer(4, 4, codes=3, estimator="gst")
    tau: float = gapped.nn.schedules.Linear(1.0, 0.5, steps=10).apply(layer, 5)
    with gapped.replacing_torch("gst"), gapped.nn.Usage(layer) as usage:
        codes: gapped.nn.Quantized = layer(logits)
        torch.nn.functional.gumbel_softmax(logits)
        numbers: dict[str, float] = usage.read()
    return (keep + some + marginals + count + entry + codes.entries).sum() * tau + len(numbers)


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
    loss = loss + other_choices(logits)
    loss.backward()
    if TYPE_CHECKING:  # the other family makes no choices, and type checkers know
        gapped.estimator("rloo").choose(logits)  # type: ignore[attr-defined]
    score: gapped.Score = gapped.estimator("rloo", samples=4)
    cost = gapped.expectation(lambda z: z[..., 0], logits, score)
    diagnosis: gapped.Diagnosis = gapped.diagnose(lambda z: z[..., 0], logits, ["gst", score], samples=200)
    comparison: gapped.Comparison = gapped.compare(train, ["gst", "rloo"], seeds=2)
    print(cost.shape, repr(diagnosis), repr(comparison))


if __name__ == "__main__":
    main()
