"""RODEO: RLOO with control variates from a discrete Stein operator, learned from the slopes of the cost."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from gapped import simplex
from gapped.checks import check_count, check_fit
from gapped.score import Cost, Draws, one_hot_rows
from gapped.score.trainable import Trainable, factor


class RODEO(Trainable):
    """RODEO: control variates that resample one variable.

    Arguments:
        samples: How many samples are drawn, n below, at least two.
        hidden: Units of the network's hidden layer.
        alpha: Start of the factor α, a number or a tensor that broadcasts against the shape of the batch.
        beta: Start of the factor β, as `alpha`.

    Let x^{l→k} be the sample x with its variable l set to category k. For any function h the Stein operator
    of single-site resampling::

        (A h)(x) = 1/L Σ_l Σ_k p_lk [h(x^{l→k}) - h(x)]

    has mean zero under p. With samples x_i and their costs f_i, let s_i = f_i + α (A h_i)(x_i). The gradient
    is::

        1/n Σ_i [(f_i - mean_{j≠i} s_j) (x_i - p) + β (A [h~_i · (· - p)])(x_i)]

    where h_i and h~_i are the two outputs of a network, averaged over the *other* samples j. Its inputs at a
    point y are the cost f_j and the linear prediction ⟨f'(x_j), y - x_j⟩, so resampled points cost no
    evaluation.

    α, β and the network are parameters, trained by `variance_loss`, the mean of the squared norm of the
    gradient, for the calls that follow. Both factors start at 0, which is RLOO. The cost is called with
    one-hot rows alone, and is differentiated there.

    - Bias: none, whatever the factors and the network.
    - Cost: `samples` evaluations and one derivative of each; the network is applied to `samples * (samples -
      1) * K` numbers per row. One uniform per row and sample.

    >>> import gapped
    >>> logits, est = torch.zeros(8, 3, requires_grad=True), RODEO(hidden=8)
    >>> cost = gapped.expectation(lambda z: (z[..., 0] - 0.4) ** 2, logits, est)
    >>> (cost.mean() + est.variance_loss()).backward()

    References: Shi, Zhou, Hwang, Titsias, Mackey (2022), for binary variables.
    """

    name = "rodeo"
    derivatives = 1
    needs_slopes = True
    takes_samples_alone = True

    def __init__(
        self, samples: int = 2, *, hidden: int = 100, alpha: float | Tensor = 0.0, beta: float | Tensor = 0.0
    ) -> None:
        super().__init__()
        check_count("samples", samples, 2)
        check_count("hidden", hidden)
        self.samples, self.hidden = samples, hidden
        self.alpha = torch.nn.Parameter(factor("alpha", alpha))
        self.beta = torch.nn.Parameter(factor("beta", beta))
        self.site = SiteNetwork(hidden)

    def extra_repr(self) -> str:
        return f"samples={self.samples}, hidden={self.hidden}"

    def gradient(self, cost: Cost, draws: Draws) -> Tensor:
        for name, value in (("alpha", self.alpha), ("beta", self.beta)):
            check_fit(name, value, draws.costs.shape[1:], "one number for each example")

        return self.learn_from(draws, lambda: self._estimate(cost, draws))

    def _estimate(self, cost: Cost, draws: Draws) -> Tensor:
        n, batch = self.samples, draws.costs.shape[1:]
        # All variables on one axis.
        shape = (*batch, cost.logits.shape[len(batch) : -1].numel(), cost.logits.shape[-1])
        p = simplex.normalised(cost.logits).reshape(shape)
        x = one_hot_rows(cost.logits, draws.category).reshape(n, *shape)
        assert draws.slopes is not None
        own, moved = self._heights(draws.costs, x, draws.slopes.reshape(x.shape))
        # The resampled points, less the point itself: (n, *batch, L, K), and summed over categories.
        first, second = (
            p * (after - before[..., None, None]) for before, after in zip(own, moved, strict=True)
        )
        stein = first.flatten(-2).sum(-1) / p.shape[-2]
        others = draws.costs + self.alpha * simplex.accumulated(stein)
        signal = draws.costs - (others.sum(0) - others) / (n - 1)
        change = second.sum(-1, keepdim=True)
        # Another variable that is resampled leaves the score of this one as it is; this one changes it.
        elsewhere = change.sum(-2, keepdim=True) - change - own[1][..., None, None]
        vector = ((x - p) * elsewhere + second - p * change) / p.shape[-2]
        beta = self.beta.to(p.dtype).expand(batch)[..., None, None]
        total = signal.to(p.dtype)[..., None, None] * (x - p) + beta * vector
        return total.mean(0).reshape(cost.logits.shape)

    def _heights(self, costs: Tensor, x: Tensor, slopes: Tensor) -> tuple[Sequence[Tensor], Sequence[Tensor]]:
        """The outputs of the network at each sample, `(n, *batch)`, and with each variable set to each
        category, `(n, *batch, L, K)`, averaged over the other samples."""
        n, at_sample, at_moved = self.samples, [], []
        for i in range(n):
            # The others in turn: (n - 1, *batch, L, K).
            there, slope = (torch.cat([each[:i], each[i + 1 :]]) for each in (x, slopes))
            level = torch.cat([costs[:i], costs[i + 1 :]])
            linear = (slope * (x[i] - there)).flatten(-2).sum(-1)
            step = slope - (slope * x[i]).sum(-1, keepdim=True)
            at_sample.append(self.site(linear, level, 0).mean(0))
            moved = linear[..., None, None] + step
            at_moved.append(self.site(moved, level[..., None, None], 2).mean(0))
        return torch.stack(at_sample).unbind(-1), torch.stack(at_moved).unbind(-1)


class SiteNetwork(torch.nn.Module):
    """One hidden layer, applied to each entry by itself: two numbers in, two numbers out.

    Its weights may have leading axes that broadcast against `batch`: a fleet gives each run its own.
    """

    def __init__(self, hidden: int) -> None:
        super().__init__()
        generator = torch.Generator("cpu").manual_seed(0)

        def uniform(*shape: int, width: int) -> torch.nn.Parameter:
            values = torch.rand(shape, generator=generator, device="cpu")
            return torch.nn.Parameter((2 * values - 1) / width**0.5)

        self.linear, self.level = uniform(hidden, width=1), uniform(hidden, width=1)
        self.bias = torch.nn.Parameter(torch.zeros(hidden))
        self.outer, self.shift = uniform(hidden, 2, width=hidden), torch.nn.Parameter(torch.zeros(2))

    def forward(self, linear: Tensor, level: Tensor, axes: int) -> Tensor:
        """Two numbers for each prediction `(m, *batch, ...)` with `axes` axes after the batch."""
        dtype = self.bias.dtype
        batch = linear.shape[1 : linear.dim() - axes]

        def spread(weight: Tensor, own: int) -> Tensor:
            # A copy for each example, and axes for what comes after the batch. So gradients are summed within
            # each example first: a single sum has too few results to fill a GPU, and took 46 of 49 ms a step.
            shape = weight.shape[weight.dim() - own :]
            return weight.expand(*batch, *shape).reshape(*batch, *(1 for _ in range(axes)), *shape)

        inner = linear.to(dtype).unsqueeze(-1) * spread(self.linear, 1)
        inner = inner + level.to(dtype).unsqueeze(-1) * spread(self.level, 1) + spread(self.bias, 1)
        inner = torch.nn.functional.leaky_relu(inner, 0.3)
        outer = (inner.unsqueeze(-1) * spread(self.outer, 2)).sum(-2)
        return (outer + spread(self.shift, 1)).to(linear.dtype)
