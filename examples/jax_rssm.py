"""A small world model in JAX: the recurrent state-space model of Dreamer, with discrete latents and unimix.

A point goes round a circle at one of four speeds, forwards or backwards, and changes its speed now and then.
The model sees its noisy position. Its state at each time is a recurrent vector h and eight categorical
variables z of eight categories: the prior predicts z from h, the posterior corrects it by what is seen, and a
decoder predicts the position from both. One per cent of the uniform distribution is mixed into all logits.

The table has the negative evidence lower bound of unseen sequences, and the error of predictions for eight
steps without seeing anything, beside that of going on at the last observed speed. Run with
`python examples/jax_rssm.py`; it needs `pip install "gapped[jax]"` and no torch.
"""

from __future__ import annotations

import argparse
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from jax.example_libraries import optimizers

import gapped.jax

TIMES, SEEN, BATCH, NOISE = 20, 12, 32, 0.1
HIDDEN, VARIABLES, CATEGORIES = 64, 8, 8
ESTIMATORS = ("gapmax", "gst", "straight-through")


def sequences(key: Any, count: int) -> Any:
    """Noisy positions ``(times, count, 2)``."""
    first, speed, change, noise = jax.random.split(key, 4)
    speeds = jnp.asarray([-0.8, -0.4, 0.4, 0.8])[jax.random.randint(speed, (TIMES, count), 0, 4)]
    changes = jax.random.bernoulli(change, 0.1, (TIMES, count)).at[0].set(True)
    # The speed of the last change is the one that counts.
    last = jax.lax.cummax(jnp.where(changes, jnp.arange(TIMES)[:, None], 0))
    angle = jnp.cumsum(jnp.take_along_axis(speeds, last, 0), 0) + 6.3 * jax.random.uniform(first, (count,))
    position = jnp.stack([jnp.cos(angle), jnp.sin(angle)], -1)
    return position + NOISE * jax.random.normal(noise, position.shape)


def initial(key: Any) -> dict[str, tuple[Any, Any]]:
    """Weights and biases by layer."""
    latent = VARIABLES * CATEGORIES
    sizes = {
        "gates": (HIDDEN + latent, 3 * HIDDEN),
        "prior": (HIDDEN, latent),
        "posterior-1": (HIDDEN + 2, HIDDEN),
        "posterior-2": (HIDDEN, latent),
        "decoder-1": (HIDDEN + latent, HIDDEN),
        "decoder-2": (HIDDEN, 2),
    }
    keys = jax.random.split(key, len(sizes))
    return {
        name: (jax.random.normal(k, (n, m)) / n**0.5, jnp.zeros(m))
        for k, (name, (n, m)) in zip(keys, sizes.items(), strict=True)
    }


def dense(weights: Any, name: str, *inputs: Any) -> Any:
    weight, bias = weights[name]
    return jnp.concatenate(inputs, -1) @ weight + bias


def logits_of(outputs: Any) -> Any:
    """Logits with 1% of the uniform distribution, ``(batch, variables, categories)``."""
    return gapped.jax.unimix(outputs.reshape(-1, VARIABLES, CATEGORIES))


def recur(weights: Any, h: Any, z: Any) -> Any:
    """The next h, by a gated recurrent unit."""
    reset, new, update = jnp.split(dense(weights, "gates", h, z), 3, -1)
    update = jax.nn.sigmoid(update - 1)
    return update * jnp.tanh(jax.nn.sigmoid(reset) * new) + (1 - update) * h


def decode(weights: Any, h: Any, z: Any) -> Any:
    return dense(weights, "decoder-2", jax.nn.silu(dense(weights, "decoder-1", h, z)))


def divergence(p: Any, q: Any) -> Any:
    return (jnp.exp(p) * (p - q)).sum((-1, -2))


def step(estimator: Any, weights: Any, carry: Any, inputs: Any) -> tuple[Any, Any]:
    """One time step: the carry (h, z), and what it costs, for training and as a bound."""
    h, z = carry
    key, seen = inputs
    h = recur(weights, h, z)
    prior = logits_of(dense(weights, "prior", h))
    posterior = logits_of(dense(weights, "posterior-2", jax.nn.silu(dense(weights, "posterior-1", h, seen))))
    z = estimator.sample(key, posterior).reshape(len(h), -1)
    error = 0.5 * ((decode(weights, h, z) - seen) ** 2).sum(-1) / NOISE**2
    stop = jax.lax.stop_gradient
    balanced = 0.8 * divergence(stop(posterior), prior) + 0.2 * divergence(posterior, stop(prior))
    return (h, z), (error + balanced, error + divergence(posterior, prior))


def observe(estimator: Any, weights: Any, key: Any, seen: Any) -> tuple[Any, Any]:
    """The state after a sequence, and the costs ``(times, batch)``."""
    start = (jnp.zeros((seen.shape[1], HIDDEN)), jnp.zeros((seen.shape[1], VARIABLES * CATEGORIES)))
    return jax.lax.scan(partial(step, estimator, weights), start, (jax.random.split(key, len(seen)), seen))


def dream(weights: Any, key: Any, carry: Any, times: int) -> Any:
    """Predicted positions ``(times, batch, 2)``, the mean over eight dreams."""

    def one(key: Any) -> Any:
        def move(carry: Any, key: Any) -> tuple[Any, Any]:
            h = recur(weights, *carry)
            logits = logits_of(dense(weights, "prior", h))
            z = gapped.jax.straight_through(key, logits, hard=True).reshape(len(h), -1)
            return (h, z), decode(weights, h, z)

        return jax.lax.scan(move, carry, jax.random.split(key, times))[1]

    return jax.vmap(one)(jax.random.split(key, 8)).mean(0)


def fit(text: str, steps: int, seed: int) -> Any:
    """The learned weights."""
    estimator = gapped.jax.estimator(text)
    key, first = jax.random.split(jax.random.key(seed))
    start, update, weights_of = optimizers.adam(3e-3)

    @jax.jit
    def advance(state: Any, number: Any) -> tuple[Any, Any]:
        data, noise = jax.random.split(jax.random.fold_in(key, number))

        def loss(weights: Any) -> tuple[Any, Any]:
            costs, bound = observe(estimator, weights, noise, sequences(data, BATCH))[1]
            return costs.mean(), bound.sum(0).mean()

        slope, bound = jax.grad(loss, has_aux=True)(weights_of(state))
        return update(number, slope, state), bound

    state = jax.jit(lambda key: start(initial(key)))(first)
    for number in range(steps):
        state, bound = advance(state, number)
        if (number + 1) % 100 == 0:
            print(f"{text:16} step {number + 1:4}: negative bound {float(bound):6.1f}", flush=True)
    return weights_of(state)


@partial(jax.jit, static_argnums=0)
def evaluate(estimator: Any, weights: Any) -> tuple[Any, Any, Any]:
    """Negative bound and prediction error on unseen sequences, and the predictions."""
    unseen = sequences(jax.random.key(1_000_000), 512)
    keys = jax.random.split(jax.random.key(1))
    _, (_, bound) = observe(estimator, weights, keys[0], unseen)
    state, _ = observe(estimator, weights, keys[0], unseen[:SEEN])
    ahead = dream(weights, keys[1], state, TIMES - SEEN)
    return bound.sum(0).mean(), ((ahead - unseen[SEEN:]) ** 2).sum(-1).mean(), ahead


@jax.jit
def carried_on() -> Any:
    """The error of going on at the last observed speed."""
    unseen = sequences(jax.random.key(1_000_000), 512)
    angle = jnp.arctan2(unseen[..., 1], unseen[..., 0])
    speed = jnp.angle(jnp.exp(1j * (angle[SEEN - 1] - angle[SEEN - 2])))
    ahead = angle[SEEN - 1] + speed * jnp.arange(1, TIMES - SEEN + 1)[:, None]
    return ((jnp.stack([jnp.cos(ahead), jnp.sin(ahead)], -1) - unseen[SEEN:]) ** 2).sum(-1).mean()


def draw(figure: Any, text: str, ahead: Any) -> None:
    """One coordinate of three sequences: what is seen, what comes, and what is predicted."""
    from picture import INK, colours_of

    unseen = sequences(jax.random.key(1_000_000), 512)
    (colour,) = colours_of([text]).values()
    for number, axes in enumerate(figure.subplots(3, 1, sharex=True)):
        axes.plot(range(SEEN), unseen[:SEEN, number, 0], "o-", color=INK, markersize=4)
        axes.plot(range(SEEN, TIMES), unseen[SEEN:, number, 0], "o", color=INK, markersize=4, mfc="none")
        axes.plot(range(SEEN, TIMES), ahead[:, number, 0], "-", color=colour, linewidth=2)
        axes.set_ylim(-1.5, 1.5)
    figure.axes[0].set_title("three points on a circle: seen, coming (open), predicted (line)")
    figure.axes[2].set_xlabel("time")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--estimator", metavar="SPEC", action="append", help="as text, may be repeated")
    parser.add_argument("--steps", type=int, default=300, help="training steps (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="(default: %(default)s)")
    parser.add_argument("--figure", metavar="FILE", type=Path, help="an SVG of what the table shows")
    chosen = parser.parse_args()
    print(f"going on at the last observed speed has the error {carried_on():.2f}\n")
    results = {}
    for text in chosen.estimator or ESTIMATORS:
        results[text] = evaluate(gapped.jax.estimator(text), fit(text, chosen.steps, chosen.seed))
    print("\n| estimator        | negative bound | error ahead |")
    print("| ---------------- | -------------: | ----------: |")
    for text, (bound, error, _) in results.items():
        print(f"| {text:16} | {bound:14.1f} | {error:11.2f} |")
    print(f"\n{chosen.steps} steps, seed {chosen.seed}")
    if chosen.figure:
        import picture

        values = {text: [float(bound)] for text, (bound, _, _) in results.items()}
        text, (*_, ahead) = next(iter(results.items()))
        shown = partial(draw, text=text, ahead=ahead)
        picture.save(chosen.figure, parser.description, values, "negative bound", shown, 260)


if __name__ == "__main__":
    main()
