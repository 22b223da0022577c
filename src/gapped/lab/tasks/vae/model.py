"""The model: an encoder to categorical logits, a decoder back to pixels, and the evidence lower bound."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Protocol as Interface

import torch
import torch.nn.functional as F
from torch import Tensor

from gapped.lab.fleet.grouping import Part
from gapped.lab.fleet.layers import Linear, affine
from gapped.lab.tasks.vae.protocol import Protocol

# How close to 0 and 1 the mean image may come before its logit is taken.
_CLIP = 1e-3

Weights = Sequence[tuple[Tensor, Tensor]]


class Sampler(Interface):
    """What the model needs of an estimator: see `gapped.lab.fleet.grouping.Grouped`."""

    def sample(self, logits: Tensor, *, generator: torch.Generator | None = None) -> Tensor: ...

    def parts(self) -> Sequence[Part]: ...

    def expectation(
        self,
        f: Callable[[Tensor, Part], Tensor],
        logits: Tensor,
        generator: torch.Generator | None = None,
        context: Tensor | None = None,
    ) -> Tensor: ...


class VAE(torch.nn.Module):
    r"""R variational autoencoders with categorical latents, side by side.

    For an image :math:`x` with pixels in [0, 1] the negative evidence lower bound is

    .. math:: \mathbb E_{z \sim q(z|x)}\Big[\sum_i \mathrm{BCE}(x_i, \hat x_i(z))\Big]
              + \sum_l \sum_k q_{lk} \log (q_{lk} K),

    with the uniform prior's divergence in closed form; the expectation is the estimator's. A protocol may
    have the divergence sampled instead, as :math:`\log q(z|x) - \log p(z)` within the expectation, and
    train the prior :math:`p`. `mean` is the mean training image, for protocols that use it.
    """

    def __init__(
        self, protocol: Protocol, pixels: int, runs: Sequence[torch.Generator], mean: Tensor | None = None
    ) -> None:
        super().__init__()
        self.protocol = protocol
        latent, glorot = protocol.latents * protocol.categories, protocol.glorot
        widths = [pixels, *protocol.hidden, latent]
        self.encoder = torch.nn.ModuleList(Linear(a, b, runs, glorot=glorot) for a, b in pairwise(widths))
        self.decoder = torch.nn.ModuleList(
            Linear(a, b, runs, glorot=glorot) for a, b in pairwise(widths[::-1])
        )
        if protocol.prior_rate is not None:
            shape = (len(runs), 1, protocol.latents, protocol.categories)
            self.prior = torch.nn.Parameter(torch.zeros(shape))
        if protocol.centred:
            assert mean is not None
            self.register_buffer("mean", mean.clone())
        if protocol.mean_output:
            assert mean is not None
            with torch.no_grad():
                self.decoder[-1].bias.copy_(mean.clamp(_CLIP, 1 - _CLIP).logit())  # type: ignore[operator]
        self._training_parts = (self.posterior, self.costs)

    def encode(self, x: Tensor) -> Tensor:
        """Logits ``(R, B, latents, categories)`` of images ``(R, B, pixels)``."""
        if self.protocol.centred:
            x = x - self.mean  # type: ignore[operator]
        logits = self._stack(_weights(self.encoder), x)
        if self.protocol.rectified_logits:
            logits = logits.relu()
        return logits.view(*logits.shape[:-1], self.protocol.latents, self.protocol.categories)

    def decode(self, z: Tensor) -> Tensor:
        """Pixel logits ``(R, B, pixels)`` of samples ``(R, B, latents, categories)``."""
        return self._stack(_weights(self.decoder), self._signed(z.flatten(-2)))

    def posterior(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Logits of the images' latents, and their KL to the uniform prior, ``(R, B)``.

        Where the divergence is sampled, in place of it log q - log p of every category, ``(R, B, latents,
        categories)``. Its own derivative with respect to q is zero in the mean, and is left out.
        """
        logits = self.encode(x)
        log_q = logits.log_softmax(-1)
        if self.protocol.sampled_divergence:
            return logits, log_q.detach() - self.log_prior()
        divergence = (log_q.exp() * (log_q + math.log(self.protocol.categories))).sum((-2, -1))
        return logits, divergence

    def reconstruction(self, z: Tensor, x: Tensor) -> Tensor:
        """Bernoulli cross-entropy of the pixels, ``(R, B)``."""
        return self.costs(z.unsqueeze(0), x, _weights(self.decoder)).squeeze(0)

    def log_prior(self) -> Tensor | float:
        """The logarithm of the prior, ``(R, 1, latents, categories)``, or of 1/K if it is uniform."""
        if self.protocol.prior_rate is None:
            return -math.log(self.protocol.categories)
        return self.prior.log_softmax(-1)

    def costs(self, z: Tensor, x: Tensor, decoder: Weights, ratio: Tensor | None = None) -> Tensor:
        """The same for several samples ``(n, r, B, latents, categories)`` of some runs, ``(n, r, B)``.

        With the `ratio` of those runs, log q - log p of every category, the whole negative ELBO.
        """
        n, runs, size = z.shape[:3]
        # Samples are more images to a product over the batch.
        folded = self._signed(z.transpose(0, 1).reshape(runs, n * size, -1))
        pixels = self._stack(decoder, folded).view(runs, n, size, -1)
        target = x.unsqueeze(1).expand_as(pixels)
        entropy = F.binary_cross_entropy_with_logits(pixels, target, reduction="none").sum(-1)
        cost = entropy.transpose(0, 1)
        return cost if ratio is None else cost + (z * ratio).sum((-2, -1))

    def loss(self, x: Tensor, sampler: Sampler, generator: torch.Generator | None = None) -> Tensor:
        """Negative evidence lower bound of each image, ``(R, B)``."""
        plain = (self.posterior, self.costs)
        posterior, costs = self._training_parts if torch.is_grad_enabled() else plain
        logits, divergence = posterior(x)
        parts = sampler.parts()
        shares = _shares(_weights(self.decoder), parts)
        decoders = dict(zip(parts, shares, strict=True))
        sampled = self.protocol.sampled_divergence
        ratios = dict(zip(parts, _split(divergence, parts), strict=True)) if sampled else {}

        def cost(z: Tensor, part: Part) -> Tensor:
            # Compiled code cannot be differentiated twice.
            f = self.costs if part.differentiated else costs
            return f(z, x if len(parts) == 1 else x[part.runs], decoders[part], ratios.get(part))

        expected = sampler.expectation(cost, logits, generator, x)
        return expected if sampled else expected + divergence

    def bound(self, x: Tensor, sampler: Sampler, generator: torch.Generator, samples: int) -> Tensor:
        """The importance-weighted bound on -log p(x) with so many samples of each image, ``(R, B)``."""
        logits = self.encode(x)
        ratio, decoder = logits.log_softmax(-1) - self.log_prior(), _weights(self.decoder)
        total = torch.full(x.shape[:2], -torch.inf, dtype=x.dtype, device=x.device)
        for _ in range(samples):
            z = sampler.sample(logits, generator=generator)
            total = torch.logaddexp(total, -self.costs(z.unsqueeze(0), x, decoder, ratio).squeeze(0))
        return math.log(samples) - total

    def compile_parts(self) -> None:
        """Fuse what lies between the products while training.

        The sampler stays outside, since its generator is an argument.
        """
        compiled = (torch.compile(part, dynamic=False) for part in self._training_parts)
        self._training_parts = tuple(compiled)  # type: ignore[assignment]

    def _signed(self, z: Tensor) -> Tensor:
        return 2 * z - 1 if self.protocol.signed else z

    def _stack(self, layers: Weights, x: Tensor) -> Tensor:
        for weight, bias in layers[:-1]:
            x = affine(x, weight, bias)
            x = x.relu() if self.protocol.activation == "relu" else F.leaky_relu(x, 0.2)
        return affine(x, *layers[-1])


def _weights(layers: torch.nn.ModuleList) -> list[tuple[Tensor, Tensor]]:
    return [(layer.weight, layer.bias) for layer in layers]  # type: ignore[misc]


def _shares(weights: Weights, parts: Sequence[Part]) -> list[Weights]:
    """The weights of each part's runs. One split for all: its gradient is written once, in one piece."""
    if len(parts) == 1:
        return [weights]
    split = [(_split(weight, parts), _split(bias, parts)) for weight, bias in weights]
    return [[(weight[i], bias[i]) for weight, bias in split] for i in range(len(parts))]


def _split(x: Tensor, parts: Sequence[Part]) -> tuple[Tensor, ...]:
    return (x,) if len(parts) == 1 else torch.split(x, [len(part) for part in parts])
