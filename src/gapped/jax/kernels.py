"""The kernels of `gapped.kernels.sampling` inside of JAX programs, through jax-triton.

A kernel draws its own noise from a key of 64 bits, so it gives other samples for a key than XLA does, of the
same law. Shapes are known when a program is compiled, and so all that a kernel is told besides arrays is a
constant of the compiled kernel.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from functools import partial
from inspect import signature
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

from gapped.errors import one_line
from gapped.jax.gradient import attach
from gapped.jax.simplex import rows_of
from gapped.kernels import runner

if TYPE_CHECKING:
    from gapped.jax.pathwise import Pathwise

Levels = dict[str, Array]
"""The levels of an estimator that are arrays, by name; the estimator beside them has numbers instead."""

PLATFORM = "cuda"
"""Where the kernels run; on other platforms the same program is compiled by XLA."""
FAST = True
"""Whether kernels use instructions of a GPU, which an interpreter lacks."""
_DTYPES = ("float32", "bfloat16", "float16")
# JAX does not use rows side by side, parts of a batch, results in place of the logits, and ReinMax-Rao.
_UNUSED: Mapping[str, Any] = {
    "DETACHED": True,
    "WAITS": True,
    **dict.fromkeys(("ARGMAX", "AT_INDEX", "IN_PLACE", "LAW", "REINMAX"), False),
    **dict.fromkeys(("s_inner", "s_step", "s_grad_step"), 1),
    "s_first": 0,
}


class Fused(NamedTuple):
    """The arguments of the kernels that describe an estimator."""

    mode: str
    """A key of `surrogates.MODES`."""
    soft: bool
    """Whether the sample is the surrogate itself."""
    levels: Mapping[str, Any]
    """Temperature, gap and forward temperature, as `tau`, `gap` and `tau_forward`: numbers, arrays for
    the rows, or the gap None for the expected one."""
    samples: int = 1


def refusal(scores: Array, fused: Fused | None) -> str | None:
    """Why the kernels cannot sample these logits; None if they can."""
    if fused is None:
        return "this estimator, or this option of it, has no kernel"
    if scores.dtype not in _DTYPES:
        return f"the logits are {scores.dtype}, the kernels take float32, bfloat16 and float16"
    if scores.size == 0:
        return "there are no rows"
    return unavailable()


def unavailable() -> str | None:
    """Why no kernel runs in this process; None if kernels do."""
    if jax.default_backend() != "gpu":
        return f"the default device is a {jax.default_backend()}, the kernels run on GPUs"
    try:
        _triton_call()
    except ImportError as problem:
        return f'{one_line(problem)} (pip install "gapped[jax-triton]")'
    return None


def sample(plain: Pathwise, levels: Levels, key: Array, scores: Array) -> Array:
    """A sample of masked logits `(*rows, K)` that carries the estimator's gradient."""
    rows = jax.lax.stop_gradient(scores)
    draw = _by_platform(partial(forward, plain), partial(_plain_forward, plain), False)
    value, category, stats = draw(levels, key, rows)
    pull = _by_platform(partial(backward, plain), partial(_plain_backward, plain), True)
    return attach(pull, value, scores, levels, key, rows, category, stats)


def _by_platform(kernel: Callable[..., Any], plain: Callable[..., Any], is_pull: bool) -> Callable[..., Any]:
    """`kernel` where it runs, else `plain`, the same computation for XLA.

    `jax.vmap` replaces the kernel by `plain`. But a pull, whose first argument is a gradient, is done for one
    gradient after the other if nothing else has a batch axis: then the kernel drew the sample, by its noise.
    """
    function = jax.custom_batching.custom_vmap(kernel)

    @function.def_vmap
    def _(size: int, is_batched: Any, first: Any, *rest: Any) -> tuple[Any, Any]:
        if is_pull and not any(jax.tree.leaves(is_batched[1:])):
            result = jax.lax.map(lambda one: function(one, *rest), first)
        else:
            axes = jax.tree.map(lambda batch: 0 if batch else None, is_batched)
            result = jax.vmap(plain, tuple(axes), axis_size=size)(first, *rest)
        return result, jax.tree.map(lambda _: True, result)

    platforms = {PLATFORM: function}
    return partial(jax.lax.platform_dependent, default=plain, **platforms)


def _plain_forward(plain: Pathwise, levels: Levels, key: Array, scores: Array) -> tuple[Array, Array, Array]:
    """`forward` by XLA, but for the numbers per row, which `_plain_backward` computes again."""
    estimator, rows = plain.with_levels(levels), rows_of(scores)
    draw = estimator.draw_category(key, rows.logits)
    value, category = estimator.evaluate(rows.logits, draw).outcome(rows, draw)
    return value, category.astype(jnp.int32), jnp.zeros(stats_shape(scores), jnp.float32)


def _plain_backward(
    plain: Pathwise, grad: Array, levels: Levels, key: Array, scores: Array, category: Array, stats: Array
) -> Array:
    """`backward` by XLA."""
    rows = rows_of(scores)
    total = jnp.exp(rows.logits).sum(-1)
    return plain.pull(grad, levels, key, scores, category, rows.top, total).astype(scores.dtype)


def stats_shape(scores: Array) -> tuple[int, ...]:
    """The shape of the numbers per row that the backward pass of long rows needs; short rows need none."""
    return (*scores.shape[:-1], 2 if scores.shape[-1] > runner.LONGEST_BLOCK else 0)


def forward(plain: Pathwise, levels: Levels, key: Array, scores: Array) -> tuple[Array, Array, Array]:
    """Sample, category of each row in int32, and numbers for the backward pass, of logits `(*rows, K)`."""
    from gapped.kernels.sampling import long, short

    fused, (*rows, categories) = _fused_of(plain, levels), scores.shape
    count, shape = scores.size // categories, stats_shape(scores)
    averages = fused.soft and fused.mode == "gumbel-rao"
    inputs, values = _describe(fused, scores, key, ("tau", "gap", "tau_forward"))
    values |= {"SOFT": fused.soft, "DENSE": not averages}
    outputs = {"p_value": _output(scores.shape, scores.dtype), "p_index": _output((count,), "int32")}
    if shape[-1]:
        outputs |= {"p_stats": _output((count, 2), "float32"), "p_law": _output((1,), "float32")}
        values |= long.chunk_sizes(count, categories)
        kernel, programs = long.streamed_forward_kernel, count
    else:
        programs, block = runner.partition(count, categories)
        kernel, values = short.forward_kernel, values | block
    value, index, *stats = _call(kernel, programs, inputs, outputs, values)
    kept = stats[0].reshape(shape) if stats else jnp.zeros(shape, jnp.float32)
    if averages:
        value = _average_draws(fused, key, scores, index, kept, None)
    return value, index.reshape(rows), kept


def backward(
    plain: Pathwise, grad: Array, levels: Levels, key: Array, scores: Array, category: Array, stats: Array
) -> Array:
    """The gradient of the logits in their dtype; `grad` is that of the sample."""
    from gapped.kernels.sampling import long, short

    fused, categories = _fused_of(plain, levels), scores.shape[-1]
    count = scores.size // categories
    if fused.mode == "gumbel-rao":
        return _average_draws(fused, key, scores, category, stats, grad)
    inputs, values = _describe(fused, scores, key, ("tau", "gap"))
    inputs = {"p_logits": scores, "p_index": category, "p_stats": stats, "p_grad": grad, **inputs}
    outputs, zeroed = {"p_out": _output(scores.shape, scores.dtype)}, False
    if not stats.shape[-1]:
        del inputs["p_stats"]
        programs, block = runner.partition(count, categories)
        kernel, values = short.backward_kernel, values | block
    else:
        segments, sizes = long.segments_of(scores, fused.mode)
        kernel, programs = long.split_backward_kernel, count * segments
        if segments > min(long.MOST_SEGMENTS, _multiprocessors()):
            kernel, programs = long.streamed_backward_kernel, count
            sizes = {"BLOCK": long.BACKWARD_CHUNK, "num_warps": long.BACKWARD_WARPS}
        else:
            # Two words for each segment, which are 0 before.
            outputs["p_words"], zeroed = _output((count, 2, segments), "int64"), True
        values |= sizes
    return _call(kernel, programs, inputs, outputs, values, zeroed)[0]


def _fused_of(plain: Pathwise, levels: Levels) -> Fused:
    fused = plain.with_levels(levels).fused()
    assert fused is not None
    return fused


def _average_draws(
    fused: Fused, key: Array, scores: Array, category: Array, stats: Array, grad: Array | None
) -> Array:
    """The mean of Gumbel-Rao's draws, or with `grad` the gradient of the logits."""
    from gapped.kernels.sampling import rao

    categories, tau = scores.shape[-1], fused.levels["tau"]
    count = scores.size // categories
    inputs, values = _describe(fused, scores, key, ("tau",))
    incoming = scores if grad is None else grad
    inputs = {"p_logits": scores, "p_index": category, "p_stats": stats, "p_grad": incoming, **inputs}
    values |= {"s_samples": fused.samples, "POWER": rao.power_of(tau), "SOFT": grad is None}
    outputs = {"p_out": _output(scores.shape, scores.dtype)}
    if not stats.shape[-1]:
        del inputs["p_stats"]
        programs, sizes = rao.block_of(count, categories, scores.itemsize)
        values |= {"LEFT": fused.samples % 4, **sizes}
        return _call(rao.rao_kernel, programs, inputs, outputs, values)[0]
    batches, sizes = rao.batches_of(fused.samples)
    outputs = {"p_draws": _output((count, batches * sizes["BATCH"], 3), "float32"), **outputs}
    return _call(rao.streamed_rao_kernel, count, inputs, outputs, values | sizes)[1]


def _describe(
    fused: Fused, scores: Array, key: Array, names: tuple[str, ...]
) -> tuple[dict[str, Array], dict[str, Any]]:
    """Arrays and constants that all kernels have: key, levels, sizes, the estimator's number."""
    from gapped.kernels.sampling.surrogates import MODES

    rows, categories = scores.shape[:-1], scores.shape[-1]
    count = scores.size // categories
    words = jax.random.bits(key, (2,), "uint32")
    arrays = {"p_logits": scores, "p_seed": words}
    expected = fused.levels.get("gap", 0.0) is None
    values: dict[str, Any] = {"MODE": MODES[fused.mode], "FAST": FAST, "EXPECTED_GAP": expected}
    values |= {"s_rows": count, **dict.fromkeys(("s_categories", "s_stride", "s_grad_stride"), categories)}
    for name in names:
        level = fused.levels.get(name, 1.0)
        is_array = not (level is None or isinstance(level, int | float))
        # The logits stand in for a level that is a number.
        array, every = scores, 0
        if is_array:
            level = jnp.asarray(level, jnp.float32)
            array, every = (level, count) if level.size == 1 else (jnp.broadcast_to(level, rows), 1)
        arrays[f"p_{name}"] = array
        values |= {f"s_{name}_every": every, f"{name.upper()}_PER_ROW": is_array}
        values[f"s_{name}"] = 0.0 if is_array or level is None else float(level)
    return arrays, values


def _call(
    kernel: Any,
    programs: int,
    inputs: Mapping[str, Array],
    outputs: Mapping[str, Any],
    values: Mapping[str, Any],
    zeroed: bool = False,
) -> list[Array]:
    """Launch a kernel whose parameters are these arrays, in this order, and then constants among `values`.

    `zeroed` says that the last output must be zero before.
    """
    arrays, rest = [*inputs, *outputs], kernel.arg_names[len(inputs) + len(outputs) :]
    assert kernel.arg_names[: len(arrays)] == arrays, (kernel.arg_names, arrays)
    values = {**_UNUSED, **values}
    call = _triton_call()
    # jax-triton 0.4 renamed it.
    shapes = "out_type" if "out_type" in signature(call).parameters else "out_shape"
    results = call(
        *inputs.values(),
        kernel=kernel,
        grid=programs,
        num_warps=values["num_warps"],
        zeroed_outputs=(len(outputs) - 1,) if zeroed else (),
        **{shapes: tuple(outputs.values())},
        **{name: values[name] for name in rest},
    )
    return list(results)


def _triton_call() -> Any:
    """The function of jax-triton that launches kernels."""
    folder = os.environ.get("TRITON_CACHE_DIR")
    import triton  # noqa: F401  jax_triton can be imported without it
    from jax_triton import triton_call

    # Importing jax_triton empties this variable, and torch's kernels would be cached in the current folder.
    if folder is None:
        os.environ.pop("TRITON_CACHE_DIR", None)
    else:
        os.environ["TRITON_CACHE_DIR"] = folder
    return triton_call


def _output(shape: tuple[int, ...], dtype: Any) -> Any:
    return jax.ShapeDtypeStruct(shape, dtype)  # type: ignore[no-untyped-call]


def _multiprocessors() -> int:
    """How many multiprocessors the GPU has; 0 if there is none."""
    return int(getattr(jax.devices()[0], "core_count", 0))
