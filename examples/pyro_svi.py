"""Clustering digits in Pyro: a mixture of pictures, with gapped's distribution in the guide.

The model draws one of twenty pictures and then each pixel, black or white. The guide is a network from image
to cluster, and SVI trains both; the sample of the cluster carries the gradient from the pixels to the guide.
Pyro asks a distribution for a few methods of its own, which its mix-in adds: `PyroOneHot` below is all it
takes.

The table has the exact negative log-likelihood of test images, summed over the clusters, and the share of
test images whose label is the most frequent one of their cluster. Run with `python examples/pyro_svi.py`; it
needs `pip install pyro-ppl`.
"""

from __future__ import annotations

from typing import Any

import pyro
import pyro.distributions as dist
import torch
from common import compare, options
from pyro.distributions.torch_distribution import TorchDistributionMixin
from pyro.infer import SVI, TraceMeanField_ELBO
from torch import Tensor, nn

import gapped
from gapped_lab.data import load

CLUSTERS, PIXELS, HIDDEN, BATCH = 20, 64, 64, 128
digits = load("digits")
train_images, test_images = ((part > digits.scale / 2).float() for part in (digits.train, digits.test))


class PyroOneHot(gapped.distributions.OneHotCategorical, TorchDistributionMixin):
    """gapped's one-hot categorical as a distribution of Pyro."""


class Mixture(nn.Module):
    def __init__(self, estimator: gapped.Pathwise) -> None:
        super().__init__()
        self.estimator = estimator
        # Random images, faded: from twenty equal pictures the guide would learn to use a few of them only.
        self.pictures = nn.Parameter(2 * train_images[torch.randperm(len(train_images))[:CLUSTERS]] - 1)
        self.encoder = nn.Sequential(nn.Linear(PIXELS, HIDDEN), nn.ReLU(), nn.Linear(HIDDEN, CLUSTERS))

    def model(self, images: Tensor) -> None:
        pyro.module("mixture", self)
        with pyro.plate("images", len(images)):
            cluster = pyro.sample("cluster", dist.OneHotCategorical(logits=torch.zeros(CLUSTERS)))
            pyro.sample("pixels", dist.Bernoulli(logits=cluster @ self.pictures).to_event(1), obs=images)

    def guide(self, images: Tensor) -> None:
        with pyro.plate("images", len(images)):
            pyro.sample("cluster", PyroOneHot(logits=self.encoder(images), estimator=self.estimator))

    def log_joint(self, images: Tensor) -> Tensor:
        """The log-probability of each image together with each cluster, ``(images, clusters)``."""
        pixels = dist.Bernoulli(logits=self.pictures).log_prob(images.unsqueeze(1)).sum(-1)
        return pixels - torch.tensor(float(CLUSTERS)).log()


def purity(cluster: Tensor, labels: Tensor) -> float:
    """The share of images whose label is the most frequent one of their cluster."""
    counts = torch.zeros(CLUSTERS, 10).index_put((cluster, labels), torch.ones(len(labels)), accumulate=True)
    return float(counts.amax(-1).sum() / len(labels))


def fit(estimator: gapped.Pathwise, steps: int, seed: int) -> Mixture:
    pyro.clear_param_store()
    pyro.set_rng_seed(seed)
    mixture = Mixture(estimator)
    svi = SVI(mixture.model, mixture.guide, pyro.optim.Adam({"lr": 1e-2}), TraceMeanField_ELBO())
    for _ in range(steps):
        svi.step(train_images[torch.randint(len(train_images), (BATCH,))])
    return mixture


def train(estimator: gapped.Pathwise, steps: int, seed: int) -> dict[str, float]:
    mixture = fit(estimator, steps, seed)
    with torch.no_grad():
        likelihood = mixture.log_joint(test_images).logsumexp(-1).mean()
        cluster = mixture.encoder(test_images).argmax(-1)
    return {
        "test -log p(x)": -float(likelihood),
        "clusters used": float(len(cluster.unique())),
        "purity": purity(cluster, digits.test_labels),
    }


def draw(figure: Any, estimator: gapped.Pathwise, steps: int, seed: int) -> None:
    """The learned pictures, as the probabilities of black."""
    from picture import images

    pictures = fit(estimator, steps, seed).pictures.detach().sigmoid().view(2, -1, 8, 8).numpy()
    images(figure, {"pictures": pictures[0], " ": pictures[1]})


def main() -> None:
    estimators = ["gapmax", "gst", "gumbel-softmax", "straight-through", "reinmax"]
    arguments = options(__doc__, steps=400, estimators=estimators).parse_args()
    one = train_images.mean(0).clamp(1e-3, 1 - 1e-3)
    alone = -dist.Bernoulli(one).log_prob(test_images).sum(-1).mean()
    print(f"a single picture has test -log p(x) {float(alone):.1f}\n")
    compare(train, arguments, draw, 110)


if __name__ == "__main__":
    main()
