"""The tasks, and their named protocols: every constant that a published number depends on."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
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
    """If positive, an image is a grid of square patches of so many pixels a side, one variable each; layers
    are 3x3 convolutions between patches, but for the 1x1 ones from and to the categories."""
    selects: bool = False
    """Whether the variables select pixels, the same of every image, from which the decoder reconstructs all
    others: the categories are the pixels, and there is neither encoder nor divergence."""
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


@dataclass(frozen=True)
class ListOpsProtocol:
    """One way to train and test the tree-LSTM."""

    name: str
    data: str = "listops"
    width: int = 300
    """Of word vectors, leaves, nodes, and the classifier's hidden layer."""
    dropout: float = 0.5
    """On word vectors, on the classifier's input and on its hidden layer."""
    count: int = 90_000
    """Training expressions drawn, before the long ones are left out."""
    max_tokens: int = 100
    """Expressions have fewer tokens, in all splits."""
    batch: int = 16
    learning_rate: float = 1e-3
    epochs: int = 20
    clip: float = 5.0
    """Largest norm of a run's gradient."""
    validations: int = 2
    """How often per epoch the validation accuracy is taken."""
    patience: int = 4
    """Validations without progress after which one more halves the learning rate."""
    waste: float = 0.1
    """Largest share of padding in a group of expressions of similar length; 1 puts all into one group."""
    characters: bool = False
    """Whether the model reads characters, spaces included, instead of tokens."""


_PAPER_32X64 = VAEProtocol(
    "paper-32x64",
    32,
    64,
    (512, 256),
    activation="leaky-relu",
    binarised=True,
    batch=200,
    epochs=2000,
    train_images=50_000,
)
VAE_PROTOCOLS: Mapping[str, VAEProtocol] = MappingProxyType(
    {
        each.name: each
        for each in (
            VAEProtocol("paper-30x10", 30, 10, (512, 256), rectified_logits=True),
            VAEProtocol("plain-30x10", 30, 10, (512, 256)),
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
                for categories in (2, 10, 64, 512, 8192)
            ),
            # The concrete autoencoder of Balin, Abid and Zou (2019).
            VAEProtocol("select-25x784", 25, 784, (256,), selects=True, epochs=10, learning_rate=3e-3),
            _PAPER_32X64,
            # Dong, Mnih, Tucker (2021): with the same layers, images and batches.
            replace(
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
            ),
        )
    }
)

_SHORT = ListOpsProtocol(
    "short",
    width=48,
    dropout=0.1,
    count=10_000,
    max_tokens=12,
    batch=32,
    epochs=10,
    learning_rate=4e-3,
    waste=0.2,
)
LISTOPS_PROTOCOLS: Mapping[str, ListOpsProtocol] = MappingProxyType(
    {
        each.name: each
        for each in (
            ListOpsProtocol("paper"),
            # What the paper's script does with its data: characters, batches of all lengths.
            ListOpsProtocol("authors", characters=True, waste=1.0),
            _SHORT,
            replace(_SHORT, name="authors-short", characters=True, waste=1.0, epochs=2),
            ListOpsProtocol(
                "tiny", width=8, dropout=0.1, count=200, max_tokens=12, epochs=1, batch=8, waste=0.3
            ),
        )
    }
)


def vae_protocol(name: str) -> VAEProtocol:
    """The VAE's protocol called `name`."""
    return _by_name(VAE_PROTOCOLS, name)


def listops_protocol(name: str) -> ListOpsProtocol:
    """The protocol of ListOps called `name`."""
    return _by_name(LISTOPS_PROTOCOLS, name)


def _by_name(protocols: Mapping[str, _P], name: str) -> _P:
    if name not in protocols:
        raise reject("protocol", name, f"one of {', '.join(protocols)}")
    return protocols[name]
