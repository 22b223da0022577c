"""REBAR and RELAX: relaxed control variates, with parameters that are trained to lower the variance."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from gapped import simplex
from gapped.checks import ROWS, check_fit, check_level
from gapped.score import Cost, Draws, drop_absent, one_hot_rows, pullback
from gapped.score.trainable import Trainable, check_width, factor, network_of, outputs

# Stands for the logarithm of zero where minus infinity would turn derivatives into NaN.
_LOWEST = -1e30


class _Noise(NamedTuple):
    """Gumbel noise of the sample, and the noise behind the scores given the sample."""

    free: Tensor
    conditional: Tensor


class REBAR(Trainable):
    """REBAR: the relaxed cost as a control variate.

    Arguments:
        eta: Start of the factor η, a number or a tensor that broadcasts against the shape of the batch.
        tau: Start of the temperature τ of the relaxation, a number or a tensor that broadcasts against the
            logits' shape without the category axis.

    Gumbel scores z = log p + G give the sample D = argmax z, fresh noise gives scores z~ of the law of z
    given D. With c(z) = η f(softmax(z/τ)) the gradient is::

        [f(D) - c(z~)] (D - p) + ∇θ c(z) - ∇θ c(z~)

    η and log τ are parameters. Any values are unbiased; `variance_loss`, the mean of the squared norm of the
    gradient, trains them to lower its variance. The cost must accept rows of probabilities, and be
    differentiable there, twice for the training.

    - Bias: none.
    - Cost: three evaluations and one derivative, one of second order more in training; `2 K` noise values per
      row.

    >>> import gapped
    >>> logits, est = torch.zeros(8, 3, requires_grad=True), REBAR(eta=1.0, tau=0.5)
    >>> cost = gapped.expectation(lambda z: (z[..., 0] - 0.4) ** 2, logits, est)
    >>> (cost.mean() + est.variance_loss()).backward()

    References: Tucker, Mnih, Maddison, Lawson, Sohl-Dickstein (2017).
    """

    name = "rebar"
    derivatives = 2

    def __init__(self, eta: float | Tensor = 1.0, tau: float | Tensor = 0.5) -> None:
        super().__init__()
        check_level("tau", tau, positive=True)
        self.eta = torch.nn.Parameter(factor("eta", eta))
        self.log_tau = torch.nn.Parameter(torch.as_tensor(tau, dtype=torch.get_default_dtype()).log())

    @property
    def tau(self) -> Tensor:
        """The temperature of the relaxation."""
        return self.log_tau.exp()

    def check(self, cost: Cost) -> None:
        super().check(cost)
        check_fit("tau", self.log_tau, cost.logits.shape[:-1], ROWS)

    def draw(self, logits: Tensor, generator: torch.Generator | None) -> _Noise:
        # In one call: some compilers take two equal ones for one.
        return _Noise(*simplex.gumbel(logits.expand(2, *logits.shape), generator))

    def index(self, logits: Tensor, noise: _Noise) -> Tensor:
        return simplex.argmax_index(logits + noise.free).unsqueeze(0)

    def gradient(self, cost: Cost, draws: Draws) -> Tensor:
        train = self.is_trained()
        return self.learn_from(draws, lambda: self._estimate(cost, draws, train))

    def control(self, cost: Cost, soft: Tensor, train: bool) -> tuple[Tensor, Tensor]:
        """The control variate `(2, *batch)` at relaxed samples, and its derivative with respect to them."""
        costs, pull = pullback(cost, soft, train)
        check_fit("eta", self.eta, costs.shape[1:], "one number for each example")
        slope = drop_absent(pull(torch.ones_like(costs)), cost.logits)
        control = simplex.accumulated(self.eta) * simplex.accumulated(costs)
        return control, cost.spread(self.eta.expand(costs.shape)) * slope

    def _estimate(self, cost: Cost, draws: Draws, train: bool) -> Tensor:
        exists = cost.logits > -torch.inf
        tau = self.tau.to(cost.logits.dtype).unsqueeze(-1)
        free, conditional = draws.noise

        def relax(log_p: Tensor) -> Tensor:
            scores = torch.stack([log_p + free, conditional_scores(log_p, conditional, draws.category[0])])
            return drop_absent(torch.softmax(scores / tau, -1), cost.logits)

        log_p = torch.where(exists, simplex.log_softmax(cost.logits), _LOWEST)
        soft, pull = pullback(relax, log_p, train)
        control, slope = self.control(cost, soft, train)
        towards = pull(torch.cat([slope[:1], -slope[1:]]))
        p = simplex.normalised(cost.logits)
        # The derivative with respect to log p, taken on to the logits.
        path = towards - p * towards.sum(-1, keepdim=True)
        signal = cost.spread(draws.costs - control[1:])
        return (signal * (one_hot_rows(cost.logits, draws.category) - p)).squeeze(0) + path


class RELAX(REBAR):
    """RELAX: REBAR with a network in its control variate.

    Arguments:
        network: The network r, a module that maps relaxed samples `(n, *batch, *variables, K)` to `(n,
            *batch)`, as the cost does. A number is the width of a perceptron's hidden layer.
        eta: Start of the factor η, a number or a tensor that broadcasts against the shape of the batch.
        tau: Start of the temperature τ of the relaxation, a number or a tensor that broadcasts against the
            logits' shape without the category axis.

    The gradient is that of `gapped.REBAR` with the control variate::

        c(z) = η f(h) + r(h),    h = softmax(z/τ)

    `variance_loss` trains the network together with η and τ. The network sees the relaxed sample instead of
    the scores themselves, so that a masked category is a zero and not minus infinity.

    - Bias: none, whatever the network.
    - Cost: that of REBAR, and the network's.

    >>> import gapped
    >>> logits = torch.zeros(8, 3, requires_grad=True)
    >>> est = RELAX(torch.nn.Sequential(torch.nn.Linear(3, 1), torch.nn.Flatten(-2)))
    >>> cost = gapped.expectation(lambda z: (z[..., 0] - 0.4) ** 2, logits, est)
    >>> (cost.mean() + est.variance_loss()).backward()

    References: Grathwohl, Choi, Wu, Roeder, Duvenaud (2018).
    """

    name = "relax"

    def __init__(
        self, network: torch.nn.Module | int = 64, *, eta: float | Tensor = 1.0, tau: float | Tensor = 0.5
    ) -> None:
        super().__init__(eta, tau)
        self.network = network_of(network)

    def check(self, cost: Cost) -> None:
        super().check(cost)
        check_width(self.network)

    def control(self, cost: Cost, soft: Tensor, train: bool) -> tuple[Tensor, Tensor]:
        relaxed, slope = super().control(cost, soft, train)

        # A copy: a network may write into its input.
        free, pull = pullback(
            lambda points: outputs(self.network, points.clone(), relaxed.shape), soft, train
        )
        return relaxed + free, slope + pull(torch.ones_like(free))


def conditional_scores(log_p: Tensor, noise: Tensor, index: Tensor) -> Tensor:
    """Gumbel scores given that `index` is their argmax, as a differentiable function of `log_p`.

    With `v = exp(-exp(-noise))` uniform: `z~_i = -log(-log v_i)` and
    `z~_j = -log(-log v_j/p_j - log v_i)`, in log space.
    """
    where = simplex.place(index, log_p.shape[-1])
    winner = noise.gather(-1, where)
    return (-torch.logaddexp(-noise - log_p, -winner)).scatter(-1, where, winner)
