"""Time of gapped.jax beside straight-through Gumbel-softmax in jax.numpy, each compiled as one program.

A program draws a hard sample and the gradient of the logits. Kernels are measured where jax-triton is
installed; their gradient is compared with XLA's for the same categories, and their draws with the softmax.
Usage: python benchmarks/bench_jax.py [--estimator TEXT] [--shapes ROWSxCATEGORIES:DTYPE ...] [--few N]
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
from jax import Array

import gapped.jax
from gapped.jax import kernels, simplex
from gapped.jax.simplex import rows_of

SHAPES = ["1048576x64:float32", "8192x128256:bfloat16", "4096x32:float32", "1024x512:float32"]
Program = Callable[[Array, Array, Array], tuple[Array, Array]]


def straight_through(key: Array, logits: Array, tau: float = 0.85) -> Array:
    """As it is commonly written."""
    noise = jax.random.gumbel(key, logits.shape, logits.dtype)
    soft = jax.nn.softmax((logits + noise) / tau)
    hard = jax.nn.one_hot(soft.argmax(-1), logits.shape[-1], dtype=logits.dtype)
    return jax.lax.stop_gradient(hard - soft) + soft


def program_of(sample: Callable[[Array, Array], Array]) -> Program:
    """Sample and gradient in one program."""

    @jax.jit
    def program(key: Array, logits: Array, grad: Array) -> tuple[Array, Array]:
        value, back = jax.vjp(partial(sample, key), logits)
        return value, back(grad)[0]

    return program


def milliseconds(program: Program, key: Array, logits: Array, grad: Array) -> float:
    """The least time of a call, of several rounds of calls."""
    jax.block_until_ready(program(key, logits, grad))
    calls = 5 if logits.size > 1 << 24 else 100
    rounds = []
    for _ in range(4):
        began = time.perf_counter()
        for _ in range(calls):
            results = program(key, logits, grad)
        jax.block_until_ready(results)
        rounds.append(1e3 * (time.perf_counter() - began) / calls)
        del results
    return min(rounds)


@partial(jax.jit, static_argnums=0)
def deviations(
    estimator: gapped.jax.Pathwise, key: Array, logits: Array, grad: Array, value: Array, gradient: Array
) -> tuple[Array, Array]:
    """The largest difference of gradients for the same categories, and of counts in standard deviations."""
    rows = rows_of(logits)
    total = jnp.exp(rows.logits).sum(-1)
    expected = estimator.pull(grad, {}, key, logits, value.argmax(-1), rows.top, total)
    # Categories in 64 groups: most of many thousands are never drawn.
    group = jnp.arange(logits.shape[-1]) % 64
    expected_counts, counts = (
        jax.ops.segment_sum(x.astype(jnp.float32).sum(0), group, 64)
        for x in (jnp.exp(rows.logits) / total[:, None], value)
    )
    off = jnp.abs(counts - expected_counts) / jnp.sqrt(jnp.maximum(expected_counts, 1.0))
    return jnp.abs(gradient - expected).max() / jnp.abs(expected).max(), off.max()


def measure(text: str, estimator: gapped.jax.Pathwise) -> None:
    """One line for each program at one shape."""
    shape, dtype = text.split(":")
    keys = jax.random.split(jax.random.key(0), 3)
    logits, grad = (jax.random.normal(k, tuple(map(int, shape.split("x"))), dtype) for k in keys[:2])
    programs = {"jax.numpy": program_of(straight_through)}
    programs["gapped, XLA"] = program_of(replace(estimator, backend="xla").sample)
    if kernels.refusal(logits, estimator.fused()) is None:
        programs["gapped, kernels"] = program_of(replace(estimator, backend="triton").sample)
    reference = milliseconds(programs["jax.numpy"], keys[2], logits, grad)
    for name, program in programs.items():
        took = reference if name == "jax.numpy" else milliseconds(program, keys[2], logits, grad)
        line = f"{text:24s} {name:16s} {took:9.3f} ms {took / reference:6.2f} x jax.numpy"
        if name != "jax.numpy" and not estimator.has_noise:
            plain = replace(estimator, backend="xla")
            gap, counts = deviations(plain, keys[2], logits, grad, *program(keys[2], logits, grad))
            line += f"   gradient off by {float(gap):.1e}, counts by {float(counts):.1f} deviations"
        print(line, flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--estimator", default="gst:tau=0.85", help="text of a pathwise estimator")
    parser.add_argument("--shapes", nargs="+", default=SHAPES, metavar="SHAPE")
    parser.add_argument(
        "--few", type=int, default=simplex._FEW, help="weights that XLA sums up without cutting"
    )
    options = parser.parse_args()
    simplex._FEW = options.few
    print(f"jax {jax.__version__}, {jax.devices()[0].device_kind}, kernels: {kernels.unavailable() or 'yes'}")
    for shape in options.shapes:
        measure(shape, gapped.jax.estimator(options.estimator))


if __name__ == "__main__":
    main()
