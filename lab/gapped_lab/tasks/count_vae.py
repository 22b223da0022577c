"""The variational autoencoder whose latents are counts: model, estimator, and task for a fleet."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from gapped import counts
from gapped.errors import reject
from gapped.gradient import Points, with_gradient
from gapped.pathwise import Draw, Pathwise
from gapped.score.reinforce import RLOO, leave_one_out
from gapped_lab.fleet.estimator_groups import Group, Grouped, Part
from gapped_lab.tasks import CountProtocol
from gapped_lab.tasks.vae import VAE, VAETask, shares, split, weights


@dataclass(frozen=True, eq=False)
class Fini(Pathwise):
    """The estimators of `gapped.counts`, by their `order`, for the recipes of the task `counts` alone.

    Which law the counts have is the protocol's to say, so the model draws them.
    """

    name = "fini"
    levels = ()
    has_surrogate = False

    tau: float | Tensor = field(default=1.0, init=False, repr=False)
    order: int = 3

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.order not in (2, 3):
            raise reject("fini: order", self.order, "2 or 3")

    def points(self, logits: Tensor, draw: Draw) -> Points:
        raise reject("fini", "logits of categories", "the task counts")


class Law(NamedTuple):
    """A law of counts, log q(z) = t z - A + h(z), given a parameter η: the log-rate, or the log-odds."""

    statistic: Tensor
    """t."""
    normaliser: Tensor
    """A."""
    mean: Tensor
    slope: Tensor
    """Of t in η."""


def law(rules: CountProtocol, eta: Tensor) -> Law:
    """The law of a protocol's counts, given the log-rate or the log-odds."""
    n, odds, one = rules.total, eta.exp(), torch.ones_like(eta)
    if rules.law == "poisson":
        return Law(eta, odds, odds, one)
    if rules.law == "binomial":
        return Law(eta, n * F.softplus(eta), n * torch.sigmoid(eta), one)
    return Law(F.logsigmoid(eta), n * F.softplus(eta), n * odds, torch.sigmoid(-eta))


def draw(rules: CountProtocol, eta: Tensor, order: int, generator: torch.Generator | None) -> Tensor:
    """Counts that carry the gradient of `order`, in the shape of `eta`."""
    if rules.law == "poisson":
        return counts.poisson(eta, order=order, generator=generator)
    drawn = counts.binomial if rules.law == "binomial" else counts.negative_binomial
    return drawn(rules.total, eta, order=order, generator=generator)


class CountVAE(VAE):
    r"""R variational autoencoders with counts as latents, side by side.

    The encoder's output is added to the prior's log-rate, or log-odds: a posterior starts near the prior.
    With :math:`\log q(z) = t_q z - A_q + h(z)`, and :math:`t_p`, :math:`A_p` of the prior,

    .. math:: \mathrm{KL}(q\,\|\,p) = (t_q - t_p)\,\mathbb E_q z - A_q + A_p.
    """

    protocol: CountProtocol

    def __init__(
        self, protocol: CountProtocol, pixels: int, runs: Sequence[torch.Generator], mean: Tensor | None
    ) -> None:
        super().__init__(protocol, pixels, runs, mean)
        self.prior_law = [
            float(each) for each in law(protocol, torch.tensor(protocol.prior, dtype=torch.float64))
        ]

    def encode(self, x: Tensor) -> Tensor:
        """Log-rates or log-odds ``(R, B, latents, 1)`` of images ``(R, B, pixels)``."""
        return super().encode(x) + self.protocol.prior

    def posterior(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Log-rates or log-odds of the images' latents, and their KL to the prior, ``(R, B)``."""
        eta = self.encode(x)
        own = law(self.protocol, eta)
        statistic, normaliser, *_ = self.prior_law
        divergence = own.mean * (own.statistic - statistic) - own.normaliser + normaliser
        return eta, divergence.sum((-2, -1))

    def log_prior(self) -> float:
        """The log-rate or log-odds of the prior."""
        return self.protocol.prior

    def sample(self, logits: Tensor, sampler: Grouped, generator: torch.Generator) -> Tensor:
        """Counts, given their log-rates or log-odds; no estimator draws others."""
        return draw(self.protocol, logits, 3, generator)

    def loss(self, x: Tensor, sampler: Grouped, generator: torch.Generator | None = None) -> Tensor:
        """Negative evidence lower bound of each image, ``(R, B)``."""
        posterior, costs = self._training[:2] if torch.is_grad_enabled() else (self.posterior, self.costs)
        eta, divergence = posterior(x)
        # Runs of Fini, whose counts carry their gradients, are decoded together, whatever their order.
        alike = [list(each) for _, each in groupby(sampler.groups, key=_decoded_with)]
        parts = [Part(groups[0][0], groups[-1][1]) for groups in alike]
        decoders = shares(weights(self.decoder), parts)
        expected = []
        for groups, part, own, decoder in zip(alike, parts, split(eta, parts), decoders, strict=True):
            each = groups[0][2]
            if isinstance(each, Fini):
                drawn = [
                    draw(self.protocol, eta[a:b], fini.order, generator)  # type: ignore[union-attr]
                    for a, b, fini in groups
                ]
                expected.append(costs(torch.cat(drawn).unsqueeze(0), x[part.runs], decoder).squeeze(0))
                continue
            assert isinstance(each, RLOO)
            z = draw(self.protocol, own.detach().expand(each.samples, *own.shape), 3, generator)
            values = costs(z, x[part.runs], decoder)
            expected.append(with_gradient(values.mean(0), own, self._score(z, values.detach(), own)))
        return torch.cat(expected) + divergence

    @torch.no_grad()
    def _score(self, z: Tensor, values: Tensor, eta: Tensor) -> Tensor:
        """The leave-one-out gradient at `eta` of samples ``(n, *eta.shape)`` with these costs."""
        own, signal = law(self.protocol, eta), leave_one_out(values.double()).to(z.dtype)
        return (signal[..., None, None] * (z - own.mean) * own.slope).mean(0)


def _decoded_with(group: Group) -> str | int:
    """The key of groups whose counts are decoded together: others than Fini's differ in samples."""
    start, _, each = group
    return each.name if isinstance(each, Fini) else start


class CountTask(VAETask):
    """R VAEs with counts as latents; trained by `Fini`, or by RLOO, whose gradient is exact in the mean."""

    model_type = CountVAE
