"""The tasks, and their named protocols: every constant that a published number depends on."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from types import MappingProxyType
from typing import Literal, TypeVar

from gapped.errors import reject

_P = TypeVar("_P")


@dataclass(frozen=True)
class VAEProtocol:
    """One way to train and test the VAE."""

    name: str
    latents: int
    """Categorical variables per image."""
    categories: int
    """Categories of each variable."""
    hidden: tuple[int, ...]
    """Widths between pixels and latents; the decoder mirrors them."""
    data: str = "mnist"
    """The data set it is meant for."""
    patch: int = 0
    """If positive, an image is a grid of square patches with this side in pixels, one variable each; layers
    are 3x3 convolutions between patches, but for the 1x1 ones from and to the categories."""
    selects: bool = False
    """Whether the variables select pixels, the same of every image, from which the decoder reconstructs all
    others: the categories are the pixels, and there is neither encoder nor divergence."""
    slope: float = 0.0
    """Of the leaky ReLU between layers, where its input is negative; 0 is the ReLU."""
    rectified_logits: bool = False
    """Whether a ReLU also follows the encoder's last layer, as in the paper's own code."""
    binarised: bool | Literal["once"] = False
    """Whether pixels are Bernoulli draws instead of grey levels: anew at every access, or once for all."""
    batch: int = 100
    learning_rate: float = 1e-3
    rectified_adam: bool = False
    """Whether RAdam trains the weights."""
    weight_decay: float = 0.0
    """If positive, AdamW's, in units of the learning rate."""
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


@dataclass(frozen=True)
class CountProtocol(VAEProtocol):
    """One way to train and test the VAE whose latents are counts: `categories` is 1, the count itself."""

    law: Literal["poisson", "binomial", "negative-binomial"] = "poisson"
    total: int = 0
    """The trials of a binomial count, or the failures of a negative binomial one."""
    prior: float = 0.0
    """The prior's log-rate, or the log-odds of a success."""


_PAPER_32X64 = VAEProtocol(
    "paper-32x64",
    32,
    64,
    (512, 256),
    slope=0.2,
    binarised=True,
    batch=200,
    epochs=2000,
    train_images=50_000,
)
# Dong, Mnih, Tucker (2021): with the same layers, images and batches.
_COUPLED_32X64 = replace(
    _PAPER_32X64,
    name="coupled-32x64",
    learning_rate=1e-4,
    epochs=4000,
    glorot=True,
    centred=True,
    signed=True,
    mean_output=True,
    prior_rate=1e-2,
    sampled_divergence=True,
    bound_samples=100,
)
_PLAIN_30X10 = VAEProtocol("plain-30x10", 30, 10, (512, 256))
# Liu et al. (2023): latents and categories, learning rate, whether RAdam; the paper has the categories first.
_REINMAX = (
    (4, 8, 5e-4, False),
    (24, 4, 5e-4, True),
    (16, 8, 7e-4, True),
    (12, 16, 7e-4, True),
    (8, 64, 5e-4, True),
    (30, 10, 5e-4, True),
)
# Shi et al. (2022): a tenth of their steps; layers, images and the decoder's input as in their public code.
_BINARY = VAEProtocol(
    "binary-200x2",
    200,
    2,
    (200, 200),
    slope=0.3,
    binarised=True,
    epochs=200,
    train_images=50_000,
    glorot=True,
    sampled_divergence=True,
    bound_samples=100,
)


def _of_other_papers() -> Iterator[VAEProtocol]:
    """The protocols of papers that came before or after."""
    for latents, categories, rate, rectified in _REINMAX:
        shape = {"latents": latents, "categories": categories, "rectified_adam": rectified}
        name = f"reinmax-{latents}x{categories}"
        yield replace(_PLAIN_30X10, name=name, **shape, learning_rate=rate, epochs=160)  # type: ignore[arg-type]
    # Hooper and Shekhovtsov (2026), with plain and, as in their code, with leaky rectifiers.
    for latents, categories in ((128, 4), (32, 16), (8, 64)):
        shape = {"latents": latents, "categories": categories, "batch": 200}
        name = f"flows-{latents}x{categories}"
        plain = replace(_PLAIN_30X10, name=name, **shape, weight_decay=0.01, epochs=500)  # type: ignore[arg-type]
        yield plain
        yield replace(plain, name=f"mve-{latents}x{categories}", slope=0.2)
    # Paulus, Maddison and Krause (2021), 50,000 steps; a sample has as many entries whatever the categories.
    # That they are 240 is ours, and so are the layers.
    for latents, categories in ((120, 2), (60, 4), (30, 8), (15, 16)):
        shape = {"latents": latents, "categories": categories, "batch": 200, "epochs": 167}
        name = f"fixed-{latents}x{categories}"
        yield replace(_PLAIN_30X10, name=name, **shape, binarised="once", bound_samples=100)  # type: ignore[arg-type]
    yield _BINARY
    yield replace(_BINARY, name="binary-fashion-200x2", data="fashion-mnist", learning_rate=3e-4)


VAE_PROTOCOLS: Mapping[str, VAEProtocol] = MappingProxyType(
    {
        each.name: each
        for each in (
            VAEProtocol("paper-30x10", 30, 10, (512, 256), rectified_logits=True),
            _PLAIN_30X10,
            VAEProtocol("digits-8x8", 8, 8, (128,), data="digits", epochs=80, learning_rate=5e-3),
            *(
                VAEProtocol(
                    f"codes-49x{categories}",
                    49,
                    categories,
                    (32, 32),
                    data="fashion-mnist",
                    patch=4,
                    batch=128,
                    epochs=8,
                )
                for categories in (2, 10, 64, 512, 4096, 8192)
            ),
            # The concrete autoencoder of Balin, Abid and Zou (2019).
            VAEProtocol("select-25x784", 25, 784, (256,), selects=True, epochs=10, learning_rate=3e-3),
            _PAPER_32X64,
            _COUPLED_32X64,
            replace(_COUPLED_32X64, name="coupled-unsigned-32x64", signed=False),
            *_of_other_papers(),
        )
    }
)


def _of_counts() -> Iterator[CountProtocol]:
    """The protocols of He and Wu (2026): the design of Titsias and Shi (2022) with counts in place of bits.

    The name ends with the number of variables.
    """
    design = {"hidden": (200, 200), "categories": 1, "slope": 0.3, "binarised": True, "epochs": 100}
    design |= {"train_images": 50_000, "glorot": True}
    yield CountProtocol("poisson-1-200", 200, **design)  # type: ignore[arg-type]
    for size in (2, 16, 128):
        poisson, binomial = {"prior": math.log(0.1)}, {"law": "binomial", "total": 8}
        negative = {"law": "negative-binomial", "total": 8}
        yield CountProtocol(f"poisson-0.1-{size}", size, **poisson, **design)  # type: ignore[arg-type]
        yield CountProtocol(f"binomial-8-{size}", size, **binomial, **design)  # type: ignore[arg-type]
        yield CountProtocol(f"negative-binomial-8-{size}", size, **negative, **design)  # type: ignore[arg-type]


COUNT_PROTOCOLS: Mapping[str, CountProtocol] = MappingProxyType({each.name: each for each in _of_counts()})


@dataclass(frozen=True)
class PolynomialProtocol:
    """One way to minimise the mean of ``|z - target| ** power`` over binary variables."""

    name: str
    power: float
    target: float = 0.45
    latents: int = 128
    categories: int = 2
    data: str = "none"
    batch: int = 64
    """Samples of all variables in one step."""
    steps: int = 200
    """Per epoch."""
    epochs: int = 40
    learning_rate: float = 1e-3


# Of Liu et al. (2023).
POLYNOMIAL_PROTOCOLS: Mapping[str, PolynomialProtocol] = MappingProxyType(
    {f"power-{power:g}": PolynomialProtocol(f"power-{power:g}", power) for power in (1.5, 2.0, 3.0)}
)


def by_name(protocols: Mapping[str, _P], name: str) -> _P:
    """The protocol called `name`; an error lists the known ones."""
    if name not in protocols:
        raise reject("protocol", name, f"one of {', '.join(protocols)}")
    return protocols[name]


vae_protocol = partial(by_name, VAE_PROTOCOLS)
count_protocol = partial(by_name, COUNT_PROTOCOLS)
polynomial_protocol = partial(by_name, POLYNOMIAL_PROTOCOLS)
