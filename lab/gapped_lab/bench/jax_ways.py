"""One of K in JAX, as jnp code writes it and as `gapped.jax` has it; how they are prepared and timed."""

from __future__ import annotations

import itertools
import os
import time
from collections.abc import Callable
from importlib.metadata import version
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

import torch

from gapped.errors import GappedError, require
from gapped_lab.bench.timing import Call, Clock

if TYPE_CHECKING:
    from jax import Array

DTYPES = {"f32": "float32", "bf16": "bfloat16"}


def installed_version() -> str | None:
    """The version of JAX, if it is installed."""
    return version("jax") if find_spec("jax") else None


def gumbel_softmax(key: Array, logits: Array) -> Array:
    """The straight-through Gumbel-softmax sample of plain jnp code."""
    import jax
    import jax.numpy as jnp

    soft = jax.nn.softmax(logits + jax.random.gumbel(key, logits.shape, logits.dtype), -1)
    hard = jax.nn.one_hot(jnp.argmax(soft, -1), logits.shape[-1], dtype=logits.dtype)
    return soft + jax.lax.stop_gradient(hard - soft)


def gst(key: Array, logits: Array, backend: str) -> Array:
    """`gapped.jax.gst`."""
    import gapped.jax

    return gapped.jax.gst(key, logits, 1.0, gap=1.0, backend=backend)


class JaxInputs:
    """Keys, logits and incoming gradients that take turns, on JAX's device of the same type."""

    def __init__(self, shape: tuple[int, ...], dtype: str, device: torch.device, sets: int) -> None:
        require("the workload jax", "jax", extra="jax")
        # JAX would take three quarters of a GPU's memory when it starts; it reads this then.
        os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
        import jax

        try:
            self.device = jax.devices(device.type)[device.index or 0]
        except (RuntimeError, IndexError):
            raise GappedError(f"JAX has no {device.type} device here") from None
        with jax.default_device(self.device):
            keys = jax.random.split(jax.random.key(0), (sets, 3))
            kind = DTYPES[dtype]
            made = [
                (draw, jax.random.normal(first, shape, kind), jax.random.normal(second, shape, kind))
                for draw, first, second in keys
            ]
        # Bound to the device: programs are compiled for where their arguments are.
        self.sets = jax.device_put(made, self.device)

    def prepare(self, way: Callable[[Array, Array], Array]) -> tuple[Call, int | None]:
        """Sample and gradient by one compiled program; the bytes that it allocates."""
        import jax

        def forward_backward(key: Array, logits: Array, gradient: Array) -> tuple[Array, Array]:
            sample, pull = jax.vjp(lambda x: way(key, x), logits)
            # Both are results, or the compiler would leave the sample out.
            return sample, pull(gradient)[0]

        program = jax.jit(forward_backward).lower(*self.sets[0]).compile()
        needs: Any = program.memory_analysis()
        memory = None if needs is None else needs.temp_size_in_bytes + needs.output_size_in_bytes
        turns = itertools.cycle(self.sets)

        def call() -> object:
            results = program(*next(turns))
            # On a CPU, programs that do not depend on each other may run side by side.
            return jax.block_until_ready(results) if self.device.platform == "cpu" else results  # type: ignore[no-untyped-call]

        for _ in range(2):
            jax.block_until_ready(call())  # type: ignore[no-untyped-call]
        return call, memory


def _seconds(call: Call, count: int, is_long: bool) -> float:
    """Seconds a call by the host's clock, from idle to idle."""
    import jax

    jax.block_until_ready(call())  # type: ignore[no-untyped-call]
    began = time.perf_counter()
    for _ in range(count):
        last = call()
    jax.block_until_ready(last)  # type: ignore[no-untyped-call]
    return (time.perf_counter() - began) / count


# Starting and waiting are part of what this clock measures, so its batches are long.
CLOCK = Clock(_seconds, 4e-2)
