"""NVIL: REINFORCE with a memory and a learned baseline."""

from __future__ import annotations

import torch
from torch import Tensor

from gapped.checks import check_count, check_flag
from gapped.errors import reject
from gapped.score import Cost, Draws, score_product
from gapped.score.trainable import Trainable, check_width, is_recomputation, network_of, outputs


class NVIL(Trainable):
    """NVIL: a running mean, a learned baseline, a scale.

    Arguments:
        network: The learned baseline C, a module that maps the `context` given to `gapped.expectation` to one
            number for each example, of the shape of the batch, with or without a last axis of size 1. A
            number is the width of a perceptron's hidden layer. None is no network.
        decay: Weight of earlier calls in the running mean and variance.
        scale: Whether to divide by the running standard deviation where it is above 1.
        samples: How many samples are averaged.

    With the running mean c and variance v of the residual f(D) - C(x) the gradient is::

        (f(D) - C(x) - c) / max(1, √v) · (D - p)

    The network is trained by `variance_loss`, the mean square of f(D) - C(x) - c. `NVIL(scale=False)`,
    without a network, is REINFORCE with a running mean.

    The memory holds earlier calls only: it is used first and updated afterwards, in training mode alone. All
    examples share it; where several runs train as one program, those of each run do. Under activation
    checkpointing the gradient is kept from the forward pass, not computed again: by then the memory has
    changed.

    - Bias: none with `scale=False`; else unbiased up to the positive factor 1/max(1, √v).
    - Cost: `samples` evaluations, no derivative of the cost; one uniform per row and sample.

    >>> import gapped
    >>> logits, x = torch.zeros(8, 3, requires_grad=True), torch.randn(8, 5)
    >>> est = NVIL(torch.nn.Linear(5, 1))
    >>> cost = gapped.expectation(lambda z: z[..., 0], logits, est, context=x)
    >>> (cost.mean() + est.variance_loss()).backward()

    References: Mnih and Gregor (2014).
    """

    name = "nvil"
    mean: Tensor
    variance: Tensor
    steps: Tensor

    def __init__(
        self,
        network: torch.nn.Module | int | None = None,
        *,
        decay: float = 0.9,
        scale: bool = True,
        samples: int = 1,
    ) -> None:
        super().__init__()
        if isinstance(decay, bool) or not isinstance(decay, int | float) or not 0 <= decay < 1:
            raise reject("decay", decay, "a number from 0 to below 1")
        check_flag("scale", scale)
        check_count("samples", samples)
        self.network = None if network is None else network_of(network)
        self.decay, self.scale, self.samples = decay, scale, samples
        for name in ("mean", "variance", "steps"):
            self.register_buffer(name, torch.zeros((), dtype=torch.float64))

    def check(self, cost: Cost) -> None:
        if self.network is None:
            super().check(cost)
        elif not isinstance(cost.context, Tensor):
            raise reject("context", cost.context, "the tensor that NVIL's network maps to a baseline")
        check_width(self.network)

    @property
    def remembers(self) -> bool:
        return self.training

    def gradient(self, cost: Cost, draws: Draws) -> Tensor:
        def estimate() -> tuple[Tensor, Tensor]:
            residual = draws.costs
            if self.network is not None:
                assert cost.context is not None
                residual = residual - outputs(self.network, cost.context.detach(), residual.shape[1:])
            return (residual - self.mean).square(), residual

        with torch.enable_grad():
            residual = (self.learn(estimate) if self.is_trained() else estimate()[1]).detach()
        signal = residual - self.mean
        if self.scale:
            signal = signal / self.variance.sqrt().clamp(min=1.0)
        if self.learns() and residual.numel() and not is_recomputation():
            self._remember(residual)
        return score_product(cost, draws, signal)

    def _remember(self, residual: Tensor) -> None:
        """Move the memory towards this call; at first it is the plain mean of all calls."""
        residual = residual.to(self.mean.dtype)
        self.steps += 1
        rate = (1 / self.steps).clamp(min=1 - self.decay).to(residual.dtype)
        mean = self._pool(residual)
        spread = self._pool((residual - torch.where(self.steps > 1, self.mean, mean)).square())
        # In place, and assigned: some compilers drop a change of a float64 scalar that has no use.
        self.variance = self.variance.lerp_(spread, rate)
        self.mean = self.mean.lerp_(mean, rate)

    def _pool(self, values: Tensor) -> Tensor:
        """The mean of `values` `(n, *batch)` over whatever shares an entry of the memory."""
        return values.sum_to_size(self.mean.shape) / (values.numel() // self.mean.numel())
