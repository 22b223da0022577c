"""Double control variates: RLOO whose costs and gradient both lose what the slopes of the cost predict."""

from __future__ import annotations

import torch
from torch import Tensor

from gapped import simplex
from gapped.checks import check_count, check_fit
from gapped.score import Cost, Draws, one_hot_rows, score_product
from gapped.score.reinforce import leave_one_out
from gapped.score.trainable import Trainable, factor


class DoubleCV(Trainable):
    """RLOO with slopes of the cost as control variates.

    Arguments:
        samples: How many samples are drawn, n below, at least two.
        alpha: Start of the factor α, a number or a tensor that broadcasts against the shape of the batch. It
            is a parameter: `variance_loss`, the mean of the squared norm of the gradient, trains it for the
            calls that follow. Any value that does not depend on the samples is unbiased.

    Draw D_i ~ p = softmax(θ), with costs f_i and slopes f'(D_i). Let h_i be the mean slope of the *other*
    samples and J(p) = diag(p) - p pᵀ. The signals are::

        s_i = f_i - α ⟨h_i, D_i - p⟩

    the gradient is::

        1/n Σ_i (s_i - mean_{j≠i} s_j) (D_i - p) + α/n Σ_i J(p) h_i

    With several variables the inner product runs over all of them, and s_i is shared. The first term removes
    from the cost what its slopes predict; the second adds back what that changes in the mean, and is the
    straight-through gradient. α = 0 is RLOO; at α = 1 a linear cost has no variance. The cost is called with
    one-hot rows alone, and is differentiated there.

    - Bias: none.
    - Cost: `samples` evaluations and one derivative of each; one uniform per row and sample.

    >>> import gapped
    >>> logits, est = torch.zeros(8, 3, requires_grad=True), DoubleCV()
    >>> cost = gapped.expectation(lambda z: (z[..., 0] - 0.4) ** 2, logits, est)
    >>> (cost.mean() + est.variance_loss()).backward()

    References: Titsias and Shi (2022), for binary variables.
    """

    name = "double-cv"
    derivatives = 1
    needs_slopes = True
    takes_samples_alone = True

    def __init__(self, samples: int = 2, *, alpha: float | Tensor = 0.5) -> None:
        super().__init__()
        check_count("samples", samples, 2)
        self.samples = samples
        self.alpha = torch.nn.Parameter(factor("alpha", alpha))

    def extra_repr(self) -> str:
        return f"samples={self.samples}"

    def gradient(self, cost: Cost, draws: Draws) -> Tensor:
        plain, change = self._parts(cost, draws)
        check_fit("alpha", self.alpha, draws.costs.shape[1:], "one number for each example")

        def estimate() -> Tensor:
            return plain + cost.spread(self.alpha.expand(1, *draws.costs.shape[1:])).squeeze(0) * change

        return self.learn_from(draws, estimate)

    def _parts(self, cost: Cost, draws: Draws) -> tuple[Tensor, Tensor]:
        """RLOO's gradient, and what is added to it for each unit of alpha."""
        assert draws.slopes is not None
        n, slopes, p = self.samples, draws.slopes, simplex.normalised(cost.logits)
        others = (slopes.sum(0) - slopes) / (n - 1)
        apart = one_hot_rows(cost.logits, draws.category) - p
        product = simplex.accumulated(others * apart).flatten(draws.costs.dim()).sum(-1)
        mean = slopes.mean(0)
        back = p * (mean - (p * mean).sum(-1, keepdim=True))
        plain = score_product(cost, draws, leave_one_out(draws.costs))
        return plain, back - score_product(cost, draws, leave_one_out(product))
