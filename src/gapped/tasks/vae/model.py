"""The model: an encoder to categorical logits, a decoder back to pixels, and the evidence lower bound."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Protocol as Interface

import torch
import torch.nn.functional as F
from torch import Tensor

from gapped.fleet.grouping import Part
from gapped.fleet.layers import Linear, affine
from gapped.tasks.vae.protocol import Protocol

__all__ = ["VAE", "Sampler"]


Weights = Sequence[tuple[Tensor, Tensor]]


class Sampler(Interface):
    """What the model needs of an estimator: see `gapped.fleet.grouping.Grouped`."""

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

    with the uniform prior's divergence in closed form; the expectation is the estimator's.
    """

    def __init__(self, protocol: Protocol, pixels: int, runs: Sequence[torch.Generator]) -> None:
        super().__init__()
        self.protocol = protocol
        latent = protocol.latents * protocol.categories
        widths = [pixels, *protocol.hidden, latent]
        self.encoder = torch.nn.ModuleList(Linear(a, b, runs) for a, b in pairwise(widths))
        self.decoder = torch.nn.ModuleList(Linear(a, b, runs) for a, b in pairwise(widths[::-1]))
        self._training_parts = (self.posterior, self.costs)

    def encode(self, x: Tensor) -> Tensor:
        """Logits ``(R, B, latents, categories)`` of images ``(R, B, pixels)``."""
        logits = self._stack(_weights(self.encoder), x)
        if self.protocol.rectified_logits:
            logits = logits.relu()
        return logits.view(*logits.shape[:-1], self.protocol.latents, self.protocol.categories)

    def decode(self, z: Tensor) -> Tensor:
        """Pixel logits ``(R, B, pixels)`` of samples ``(R, B, latents, categories)``."""
        return self._stack(_weights(self.decoder), z.flatten(-2))

    def posterior(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Logits of the images' latents, and their KL to the uniform prior, ``(R, B)``."""
        logits = self.encode(x)
        log_q = logits.log_softmax(-1)
        divergence = (log_q.exp() * (log_q + math.log(self.protocol.categories))).sum((-2, -1))
        return logits, divergence

    def reconstruction(self, z: Tensor, x: Tensor) -> Tensor:
        """Bernoulli cross-entropy of the pixels, ``(R, B)``."""
        return self.costs(z.unsqueeze(0), x, _weights(self.decoder)).squeeze(0)

    def costs(self, z: Tensor, x: Tensor, decoder: Weights) -> Tensor:
        """The same for several samples ``(n, r, B, latents, categories)`` of some runs, ``(n, r, B)``."""
        n, runs, size = z.shape[:3]
        # Samples are more images to a product over the batch.
        folded = z.transpose(0, 1).reshape(runs, n * size, -1)
        pixels = self._stack(decoder, folded).view(runs, n, size, -1)
        target = x.unsqueeze(1).expand_as(pixels)
        entropy = F.binary_cross_entropy_with_logits(pixels, target, reduction="none").sum(-1)
        return entropy.transpose(0, 1)

    def loss(self, x: Tensor, sampler: Sampler, generator: torch.Generator | None = None) -> Tensor:
        """Negative evidence lower bound of each image, ``(R, B)``."""
        plain = (self.posterior, self.costs)
        posterior, costs = self._training_parts if torch.is_grad_enabled() else plain
        logits, divergence = posterior(x)
        parts = sampler.parts()
        decoders = dict(zip(parts, _shares(_weights(self.decoder), parts), strict=True))

        def reconstruction(z: Tensor, part: Part) -> Tensor:
            # Compiled code cannot be differentiated twice.
            f = self.costs if part.differentiated else costs
            return f(z, x if len(parts) == 1 else x[part.runs], decoders[part])

        return sampler.expectation(reconstruction, logits, generator, x) + divergence

    def compile_parts(self) -> None:
        """Fuse what lies between the products while training.

        The sampler stays outside, since its generator is an argument.
        """
        compiled = (torch.compile(part, dynamic=False) for part in self._training_parts)
        self._training_parts = tuple(compiled)  # type: ignore[assignment]

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
    sizes = [len(part) for part in parts]
    split = [(torch.split(weight, sizes), torch.split(bias, sizes)) for weight, bias in weights]
    return [[(weight[i], bias[i]) for weight, bias in split] for i in range(len(parts))]
