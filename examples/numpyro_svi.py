"""Clustering digits in numpyro: a mixture of pictures, with gapped's distribution in the guide.

The model draws one of twenty pictures and then each pixel, black or white. The guide is a network from image
to cluster, and SVI trains both; the sample of the cluster carries the gradient from the pixels to the guide.

The table has the exact negative log-likelihood of test images, summed over the clusters, and how many
clusters are in use. Run with `python examples/numpyro_svi.py`; it needs `pip install "gapped[numpyro]"` and
scikit-learn for its digits, and no torch.
"""

from __future__ import annotations

import argparse
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpyro
import numpyro.distributions as dist
from numpyro.infer import SVI, TraceMeanField_ELBO
from sklearn.datasets import load_digits

from gapped.jax.numpyro import OneHotCategorical

CLUSTERS, PIXELS, HIDDEN, BATCH = 20, 64, 64, 128
IMAGES = jnp.asarray(load_digits().data > 8, jnp.float32)
TRAIN, TEST = IMAGES[:1_400], IMAGES[1_400:]
ESTIMATORS = ("gapmax", "gst", "gumbel-softmax", "straight-through", "reinmax")


def model(images: Any, pictures: Any, estimator: str) -> None:
    pictures = numpyro.param("pictures", pictures)
    with numpyro.plate("images", len(images)):
        cluster = numpyro.sample("cluster", OneHotCategorical(jnp.zeros(CLUSTERS)))
        numpyro.sample("pixels", dist.Bernoulli(logits=cluster @ pictures).to_event(1), obs=images)


def guide(images: Any, pictures: Any, estimator: str) -> None:
    first = numpyro.param("first", lambda key: jax.random.normal(key, (PIXELS, HIDDEN)) / 8)
    second = numpyro.param("second", lambda key: jax.random.normal(key, (HIDDEN, CLUSTERS)) / 8)
    with numpyro.plate("images", len(images)):
        logits = jax.nn.relu(images @ first) @ second
        numpyro.sample("cluster", OneHotCategorical(logits, estimator=estimator))


def fit(estimator: str, steps: int, seed: int) -> dict[str, Any]:
    """The learned pictures and weights."""
    key, start, order = jax.random.split(jax.random.key(seed), 3)
    # Random images, faded: from twenty equal pictures the guide would learn to use a few of them only.
    pictures = 2 * TRAIN[jax.random.choice(order, len(TRAIN), (CLUSTERS,), replace=False)] - 1
    svi = SVI(model, guide, numpyro.optim.Adam(1e-2), TraceMeanField_ELBO(), estimator=estimator)
    state = svi.init(start, TRAIN[:BATCH], pictures)

    @jax.jit
    def advance(state: Any, key: Any) -> tuple[Any, Any]:
        return svi.update(state, TRAIN[jax.random.randint(key, (BATCH,), 0, len(TRAIN))], pictures)

    for number in range(steps):
        state, loss = advance(state, jax.random.fold_in(key, number))
        if (number + 1) % 200 == 0:
            print(
                f"{estimator:16} step {number + 1:4}: loss per image {float(loss) / BATCH:5.1f}", flush=True
            )
    return svi.get_params(state)


def evaluate(learned: dict[str, Any]) -> tuple[float, int]:
    """Test negative log-likelihood, and the clusters that test images are put into."""
    pixels = dist.Bernoulli(logits=learned["pictures"]).log_prob(TEST[:, None]).sum(-1)
    likelihood = jax.nn.logsumexp(pixels - jnp.log(CLUSTERS), -1).mean()
    cluster = (jax.nn.relu(TEST @ learned["first"]) @ learned["second"]).argmax(-1)
    return -float(likelihood), len(set(cluster.tolist()))


def draw(figure: Any, learned: dict[str, Any]) -> None:
    """The learned pictures, as the probabilities of black."""
    from picture import images

    pictures = jax.nn.sigmoid(learned["pictures"]).reshape(2, -1, 8, 8)
    images(figure, {"pictures": pictures[0], " ": pictures[1]})


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--estimator", metavar="SPEC", action="append", help="as text, may be repeated")
    parser.add_argument("--steps", type=int, default=400, help="training steps (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="(default: %(default)s)")
    parser.add_argument("--figure", metavar="FILE", type=Path, help="an SVG of what the table shows")
    chosen = parser.parse_args()
    one = jnp.clip(TRAIN.mean(0), 1e-3, 1 - 1e-3)
    alone = -dist.Bernoulli(one).log_prob(TEST).sum(-1).mean()
    print(f"a single picture has test -log p(x) {float(alone):.1f}\n")
    learned = {text: fit(text, chosen.steps, chosen.seed) for text in chosen.estimator or ESTIMATORS}
    results = {text: evaluate(weights) for text, weights in learned.items()}
    print("\n| estimator        | test -log p(x) | clusters used |")
    print("| ---------------- | -------------: | ------------: |")
    for text, (likelihood, clusters) in results.items():
        print(f"| {text:16} | {likelihood:14.1f} | {clusters:13} |")
    print(f"\n{chosen.steps} steps, seed {chosen.seed}")
    if chosen.figure:
        import picture

        values = {text: [likelihood] for text, (likelihood, _) in results.items()}
        shown = partial(draw, learned=next(iter(learned.values())))
        picture.save(chosen.figure, parser.description, values, "test -log p(x)", shown, 110)


if __name__ == "__main__":
    main()
