"""Named protocols of the VAE: every constant that a published number depends on."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Literal

from gapped.errors import reject


@dataclass(frozen=True)
class Protocol:
    """One way to train and test the VAE."""

    name: str
    latents: int
    """Categorical variables per image."""
    categories: int
    """Categories of each variable."""
    hidden: tuple[int, ...]
    """Widths between pixels and latents; the decoder mirrors them."""
    activation: Literal["relu", "leaky-relu"] = "relu"
    """Between layers; the leaky one has slope 0.2."""
    rectified_logits: bool = False
    """Whether a ReLU also follows the encoder's last layer, as in the paper's own code."""
    binarised: bool = False
    """Whether pixels are Bernoulli draws, anew at every access, instead of grey levels."""
    batch: int = 100
    learning_rate: float = 1e-3
    epochs: int = 40
    train_images: int | None = None
    """How many training images are used, from the first; all if None."""
    glorot: bool = False
    """Whether weights start uniform with Glorot's bound and biases at zero, instead of as torch's do."""
    centred: bool = False
    """Whether the encoder sees images less the mean training image."""
    signed: bool = False
    """Whether the decoder sees 2 z - 1 instead of z."""
    mean_output: bool = False
    """Whether the decoder's last bias starts at the logit of the mean training image, clipped."""
    prior_rate: float | None = None
    """The rate of the plain gradient descent that trains the prior's logits; the prior is uniform if None."""
    sampled_divergence: bool = False
    """Whether the divergence is part of the sampled cost, instead of its closed form."""
    bound_samples: int = 1
    """Samples per image in the test bound; more than one make it importance-weighted."""


PROTOCOLS: Mapping[str, Protocol] = MappingProxyType(
    {
        each.name: each
        for each in (
            Protocol("paper-30x10", 30, 10, (512, 256), rectified_logits=True),
            Protocol("plain-30x10", 30, 10, (512, 256)),
            Protocol("digits-8x8", 8, 8, (128,), epochs=80, learning_rate=5e-3),
            Protocol(
                "paper-32x64",
                32,
                64,
                (512, 256),
                activation="leaky-relu",
                binarised=True,
                batch=200,
                epochs=2000,
                train_images=50_000,
            ),
            # Dong, Mnih, Tucker (2021).
            Protocol(
                "coupled-32x64",
                32,
                64,
                (512, 256),
                activation="leaky-relu",
                binarised=True,
                batch=200,
                learning_rate=1e-4,
                epochs=4000,
                train_images=50_000,
                glorot=True,
                centred=True,
                signed=True,
                mean_output=True,
                prior_rate=1e-2,
                sampled_divergence=True,
                bound_samples=100,
            ),
        )
    }
)


def protocol(name: str) -> Protocol:
    """The protocol called `name`."""
    if name not in PROTOCOLS:
        raise reject("protocol", name, f"one of {', '.join(PROTOCOLS)}")
    return PROTOCOLS[name]
