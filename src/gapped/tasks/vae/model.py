"""The model: an encoder to categorical logits, a decoder back to pixels, and the evidence lower bound."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise
from typing import Protocol as Interface

import torch
import torch.nn.functional as F
from torch import Tensor

from gapped.fleet.layers import Linear
from gapped.tasks.vae.protocol import Protocol

__all__ = ["VAE", "Sampler"]


class Sampler(Interface):
    """What the model needs of an estimator."""

    def sample(self, logits: Tensor, *, generator: torch.Generator | None = None) -> Tensor: ...


class VAE(torch.nn.Module):
    r"""R variational autoencoders with categorical latents, side by side.

    For an image :math:`x` with pixels in [0, 1] the negative evidence lower bound is

    .. math:: \mathbb E_{z \sim q(z|x)}\Big[\sum_i \mathrm{BCE}(x_i, \hat x_i(z))\Big]
              + \sum_l \sum_k q_{lk} \log (q_{lk} K),

    with the uniform prior's divergence in closed form and one sample for the expectation.
    """

    def __init__(self, protocol: Protocol, pixels: int, runs: Sequence[torch.Generator]) -> None:
        super().__init__()
        self.protocol = protocol
        latent = protocol.latents * protocol.categories
        widths = [pixels, *protocol.hidden, latent]
        self.encoder = torch.nn.ModuleList(Linear(a, b, runs) for a, b in pairwise(widths))
        self.decoder = torch.nn.ModuleList(Linear(a, b, runs) for a, b in pairwise(widths[::-1]))
        self._training_parts = (self.posterior, self.reconstruction)

    def encode(self, x: Tensor) -> Tensor:
        """Logits ``(R, B, latents, categories)`` of images ``(R, B, pixels)``."""
        logits = self._stack(self.encoder, x)
        if self.protocol.rectified_logits:
            logits = logits.relu()
        return logits.view(*logits.shape[:-1], self.protocol.latents, self.protocol.categories)

    def decode(self, z: Tensor) -> Tensor:
        """Pixel logits ``(R, B, pixels)`` of samples ``(R, B, latents, categories)``."""
        return self._stack(self.decoder, z.flatten(-2))

    def posterior(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Logits of the images' latents, and their KL to the uniform prior, ``(R, B)``."""
        logits = self.encode(x)
        log_q = logits.log_softmax(-1)
        divergence = (log_q.exp() * (log_q + math.log(self.protocol.categories))).sum((-2, -1))
        return logits, divergence

    def reconstruction(self, z: Tensor, x: Tensor) -> Tensor:
        """Bernoulli cross-entropy of the pixels, ``(R, B)``."""
        return F.binary_cross_entropy_with_logits(self.decode(z), x, reduction="none").sum(-1)

    def loss(self, x: Tensor, sampler: Sampler, generator: torch.Generator | None = None) -> Tensor:
        """Negative evidence lower bound of each image with one sample, ``(R, B)``."""
        plain = (self.posterior, self.reconstruction)
        posterior, reconstruction = self._training_parts if torch.is_grad_enabled() else plain
        logits, divergence = posterior(x)
        z = sampler.sample(logits, generator=generator)
        return reconstruction(z, x) + divergence

    def compile_parts(self) -> None:
        """Fuse what lies between the products while training.

        The sampler stays outside, since its generator is an argument.
        """
        compiled = (torch.compile(part, dynamic=False) for part in self._training_parts)
        self._training_parts = tuple(compiled)  # type: ignore[assignment]

    def _stack(self, layers: torch.nn.ModuleList, x: Tensor) -> Tensor:
        for layer in layers[:-1]:
            x = layer(x)
            x = x.relu() if self.protocol.activation == "relu" else F.leaky_relu(x, 0.2)
        return layers[-1](x)  # type: ignore[no-any-return]
