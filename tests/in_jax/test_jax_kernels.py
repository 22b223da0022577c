"""The kernels in JAX programs are torch's launches bit for bit, in Triton's interpreter instead of a GPU."""

from __future__ import annotations

import os
import sys
from dataclasses import fields, replace
from functools import partial
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from jax_problems import (
    KEY,
    _quick_compilation,  # noqa: F401
    jax,
    launched,
    pull,
    to_jax,
    to_torch,
    translated,
)
from kernel_cases import DEVICE, ESTIMATORS, LONG, TOLERANCE, example, incoming
from subprocesses import environment, python
from torch import Tensor

import gapped
import gapped.jax
from gapped.jax import kernels
from gapped.kernels import runner
from gapped.kernels.sampling import long

pytestmark = pytest.mark.skipif(
    DEVICE.type != "cpu", reason="a GPU compiles kernels and does not interpret them"
)

jnp = jax.numpy
# Every estimator, and soft samples of those that make them in another way.
CASES = [(name, True) for name in LONG] + [(name, False) for name in ("gst-auto", "decoupled", "gumbel-rao")]
every_case = pytest.mark.parametrize(("name", "hard"), CASES)


def to_tensor(array: np.ndarray) -> Tensor:
    """The same memory, in a dtype that torch has."""
    if array.dtype == jnp.bfloat16:
        return torch.from_numpy(array.view(np.int16).copy()).view(torch.bfloat16)
    return torch.from_numpy(array.view(np.int32).copy() if array.dtype == np.uint32 else array.copy())


def empty(shape: Any, is_zero: bool) -> Tensor:
    dtype = getattr(torch, str(shape.dtype))
    if is_zero or not dtype.is_floating_point:
        return torch.zeros(shape.shape, dtype=dtype)
    return torch.full(shape.shape, torch.nan, dtype=dtype)


def triton_call(
    *arrays: Any,
    kernel: Any,
    out_shape: Any,
    grid: int,
    num_warps: int,
    zeroed_outputs: Any,
    **constants: Any,
) -> Any:
    """jax-triton's function of that name, in the interpreter."""
    # Without jax_enable_x64 no 64-bit integers come back; nobody looks at them.
    shown = [s if s.dtype != "int64" else jax.ShapeDtypeStruct(s.shape, "int32") for s in out_shape]

    def launch_it(*arrays: Any) -> list[np.ndarray]:
        outputs = [empty(shape, i in zeroed_outputs) for i, shape in enumerate(out_shape)]
        tensors = [to_tensor(np.asarray(array)) for array in arrays]
        # The interpreter runs one program after the other: all publish their sums before any waits for them.
        for waits in (False, True) if "WAITS" in constants else (None,):
            flags = constants if waits is None else constants | {"WAITS": waits}
            kernel[(grid,)](*tensors, *outputs, num_warps=num_warps, **flags)
        results = [out.view(torch.int16) if out.dtype == torch.bfloat16 else out for out in outputs]
        return [
            result.numpy().view(shape.dtype)
            if result.dtype == torch.int16
            else result.numpy().astype(shape.dtype)
            for result, shape in zip(results, shown, strict=True)
        ]

    return jax.pure_callback(launch_it, shown, *arrays)


@pytest.fixture(autouse=True)
def _interpreted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "jax_triton", SimpleNamespace(triton_call=triton_call))
    for name, value in {"PLATFORM": "cpu", "FAST": False, "unavailable": lambda: None}.items():
        monkeypatch.setattr(kernels, name, value)
    monkeypatch.setattr(kernels, "_multiprocessors", lambda: 132)


@pytest.fixture
def long_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows of more than 8 categories are long, and read 16 at a time."""
    monkeypatch.setattr(runner, "LONGEST_BLOCK", 8)
    monkeypatch.setattr(long, "FEW_CHUNK", 16)


def assert_launched(estimator: Any, logits: Tensor, weight: Tensor, ours: Any = None) -> None:
    """The same kernels, with the same flags, give the same numbers."""
    ours = ours or replace(translated(estimator), backend="triton")
    results = pull(partial(ours.sample, KEY), to_jax(logits), to_jax(weight))
    for array, tensor in zip(results, launched(estimator, logits, weight), strict=True):
        assert str(array.dtype) == str(tensor.dtype).removeprefix("torch.")
        # A program of XLA's takes the smallest numbers for zero, and so does what it calls.
        torch.testing.assert_close(
            to_torch(array), tensor.to(to_torch(array)), rtol=0, atol=1e-37, equal_nan=True
        )


@pytest.mark.slow_if(
    lambda name, hard: name in ("gumbel-rao", "decoupled", "gst-expected", "straight-through")
)
@every_case
def test_short_rows_are_torchs(name: str, hard: bool) -> None:
    logits = example(6, 7)
    logits[5, 2] = torch.nan
    assert_launched(replace(ESTIMATORS[name], hard=hard), logits, incoming(6, 7))


@pytest.mark.slow_if(
    lambda name, hard: name in ("gumbel-rao", "decoupled", "gst-expected", "straight-through")
)
@pytest.mark.usefixtures("long_rows")
@every_case
def test_long_rows_are_torchs(name: str, hard: bool) -> None:
    """Read in chunks forward; backward too, but for those that programs share."""
    assert_launched(replace(ESTIMATORS[name], hard=hard), example(5, 37), incoming(5, 37))


@pytest.mark.usefixtures("long_rows")
def test_long_rows_in_segments_and_without(monkeypatch: pytest.MonkeyPatch) -> None:
    """Three programs share a row; on a GPU too small for that, one reads it twice."""
    monkeypatch.setattr(long, "SEGMENT_BYTES", 16 * 4)
    estimator, logits, weight = ESTIMATORS["reinmax"], example(3, 37), incoming(3, 37)
    assert long.segments_of(logits, "reinmax")[0] == 3
    assert_launched(estimator, logits, weight)
    monkeypatch.setattr(kernels, "_multiprocessors", lambda: 2)
    monkeypatch.setattr(long, "most_segments", lambda device: 2)
    assert_launched(estimator, logits, weight)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_and_any_batch(dtype: torch.dtype) -> None:
    logits = example(6, 7).view(2, 3, 7).to(dtype)
    assert_launched(ESTIMATORS["gst"], logits, incoming(2, 3, 7).to(dtype))


def test_levels_with_a_value_per_row_or_one_for_all() -> None:
    """A temperature for each row, a gap for all that is traced."""
    logits, weight = example(6, 7).view(2, 3, 7), incoming(2, 3, 7)
    tau, gap = torch.linspace(0.5, 2, 3), torch.tensor([0.7])
    theirs = gapped.GST(tau, gap=gap)
    ours = gapped.jax.GST(to_jax(tau), gap=to_jax(gap), backend="triton")
    assert_launched(theirs, logits, weight, ours)
    decoupled = gapped.DecoupledGumbelSoftmax(tau.view(1, 3), tau_forward=tau.flip(0))
    assert_launched(decoupled, logits, weight)


@pytest.mark.parametrize(
    "name", ["gst", "gst-auto", "gst-expected", "straight-through", "reinmax", "gapmax", "gapmax-tempered"]
)
def test_the_gradient_is_xlas_for_the_same_category(name: str) -> None:
    """On another axis, with a mask: what is kept is the category, and XLA computes from that."""
    logits, weight = to_jax(example(6, 5).T.contiguous()), to_jax(incoming(5, 6))
    where = jnp.asarray(np.random.default_rng(0).random((5, 6)) < 0.8)
    estimator = translated(ESTIMATORS[name])
    draws = type(estimator).draw

    def slopes(estimator: Any, backend: str) -> tuple[Any, Any]:
        sampler = replace(estimator, backend=backend)
        sample, back = jax.vjp(lambda x: sampler.sample(KEY, x, axis=0, where=where), logits)
        return sample, back(weight)[0]

    sample, gradient = jax.jit(lambda: slopes(estimator, "triton"))()
    category = jnp.where(sample.sum(0) > 0, sample.argmax(0), 5)
    kind = type("Given", (type(estimator),), {"draw": lambda *a: draws(*a)._replace(category=category)})
    given = kind(**{field.name: getattr(estimator, field.name) for field in fields(estimator)})
    _, expected = jax.jit(lambda: slopes(given, "xla"))()
    torch.testing.assert_close(to_torch(gradient), to_torch(expected), **TOLERANCE)


def test_vmap_runs_xla_and_a_jacobian_the_kernels() -> None:
    """Each row with its key, which no kernel can; and several gradients of one sample, which has noise."""
    logits, keys = to_jax(example(6, 7)), jax.random.split(KEY, 6)
    for estimator in (gapped.jax.GST(0.5, backend="triton"), gapped.jax.GumbelSoftmax(0.5, backend="triton")):
        plain = replace(estimator, backend="xla")
        weight = jnp.asarray(to_jax(incoming(6, 7)))

        def slopes(estimator: Any, key: Any, x: Any, w: Any) -> Any:
            sample, back = jax.vjp(partial(estimator.sample, key), x)
            return sample, back(w)[0]

        ours, theirs = (
            jax.jit(jax.vmap(partial(slopes, each)))(keys, logits, weight) for each in (estimator, plain)
        )
        for array, other in zip(ours, theirs, strict=True):
            np.testing.assert_allclose(array, other, rtol=1e-5, atol=1e-6)
        _, back = jax.vjp(partial(estimator.sample, KEY), logits)
        stacked = jnp.stack([weight, 2 * weight])
        (several,) = jax.jit(jax.vmap(back))(stacked)
        for w, row in zip(stacked, several, strict=True):
            np.testing.assert_array_equal(back(w)[0], row)


def test_jit_scan_and_the_refused_second_derivative() -> None:
    logits, estimator = to_jax(example(6, 7)), gapped.jax.GST(0.5, backend="triton")

    @jax.jit
    def steps(x: Any) -> Any:
        return jax.lax.scan(lambda _, k: (0, estimator.sample(k, x)), 0, jax.random.split(KEY, 3))[1]

    assert (steps(logits)[2] == estimator.sample(jax.random.split(KEY, 3)[2], logits)).all()
    slope = jax.grad(lambda x: (estimator.sample(KEY, x) @ jnp.arange(7.0)).sum())
    with pytest.raises(RuntimeError, match="cannot be differentiated twice"):
        jax.eval_shape(jax.grad(lambda x: (slope(x) ** 2).sum()), logits)


def test_auto_takes_the_kernels_where_they_run_and_else_xla(monkeypatch: pytest.MonkeyPatch) -> None:
    """Double precision, an estimator of one's own, functions as gaps and learned temperatures are XLA's."""
    calls: list[Any] = []
    monkeypatch.setattr(kernels, "forward", lambda *given: calls.append(given))
    xla = [
        gapped.jax.GST(gap=lambda p: p),
        gapped.jax.GumbelSoftmax(jnp.ones(())),
        type("Own", (gapped.jax.StraightThrough,), {"fused": lambda self: None})(),
        gapped.jax.GST(backend="xla"),
    ]
    for estimator in xla:
        jax.eval_shape(partial(estimator.sample, KEY), jnp.zeros((2, 3)))
    gapped.jax.GST().sample(KEY, jnp.zeros((0, 3)))
    assert not calls
    with pytest.raises(TypeError, match="NoneType"):
        gapped.jax.gst(KEY, jnp.zeros((2, 3)))
    assert len(calls) == 1


BAD: list[tuple[str, Any]] = [
    ("the default device is a cpu", lambda: gapped.jax.gst(KEY, jnp.zeros(3), backend="triton")),
    ("has no kernel", lambda: gapped.jax.gst(KEY, jnp.zeros(3), gap=abs, backend="triton")),
    ("got 'torch', expected one of auto, xla, triton", lambda: gapped.jax.GST(backend="torch")),
]


@pytest.mark.parametrize(("message", "call"), BAD, ids=[message for message, _ in BAD])
def test_what_the_kernels_cannot_do_is_said(message: str, call: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    with pytest.raises(gapped.jax.GappedError, match=message):
        call()


def test_a_newer_jax_triton_gets_shapes_by_their_new_name(monkeypatch: pytest.MonkeyPatch) -> None:
    def renamed(*arrays: Any, out_type: Any, **rest: Any) -> Any:
        return triton_call(*arrays, out_shape=out_type, **rest)

    monkeypatch.setitem(sys.modules, "jax_triton", SimpleNamespace(triton_call=renamed))
    assert_launched(ESTIMATORS["gst"], example(6, 7), incoming(6, 7))


# As constants of a compiled kernel, sizes and numbers must be legal wherever the kernel uses them.
COMPILED = """
import re, sys, types, jax, jax.numpy as jnp, triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
KINDS = {"float32": "*fp32", "bfloat16": "*bf16", "int32": "*i32", "uint32": "*u32", "int64": "*i64"}

def triton_call(*arrays, kernel, out_shape, grid, num_warps, zeroed_outputs, **constants):
    types = [KINDS[str(x.dtype)] for x in (*arrays, *out_shape)]
    signature = dict(zip(kernel.arg_names, types)) | dict.fromkeys(constants, "constexpr")
    aligned = {(i,): [["tt.divisibility", 16]] for i in range(len(types))}
    source = ASTSource(kernel, signature, constants, aligned)
    code = triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": num_warps})
    print(kernel.__name__, bool(re.search(r"ld\\.global[^;]*\\.v[24]", code.asm["ptx"])))
    return [jnp.zeros(s.shape, s.dtype if s.dtype != "int64" else "int32") for s in out_shape]

sys.modules["jax_triton"] = types.SimpleNamespace(triton_call=triton_call)
import gapped.jax
from gapped.jax import kernels
kernels.PLATFORM, kernels.unavailable, kernels._multiprocessors = "cpu", lambda: None, lambda: 132
estimator = gapped.jax.estimator(sys.argv[1], backend="triton")
for shape, dtype in (((4096, 64), "float32"), ((64, 128256), "bfloat16")):
    logits = jax.ShapeDtypeStruct(shape, dtype)
    jax.eval_shape(jax.grad(lambda x: estimator.sample(jax.random.key(0), x).sum()), logits)
assert "torch" not in sys.modules
"""


@pytest.mark.parametrize(
    ("text", "kernels"),
    [
        ("gst:gap=expected,hard=false", "forward backward streamed_forward split_backward"),
        ("gumbel-rao:samples=6", "forward rao streamed_forward streamed_rao"),
    ],
)
def test_the_kernels_compile_with_all_sizes_as_constants(text: str, kernels: str) -> None:
    """With wide loads, for a GPU that need not be there, and without torch."""
    variables = {name: value for name, value in environment().items() if name != "TRITON_INTERPRET"}
    printed = python("-W", "error", "-c", COMPILED, text, env=variables).split("\n")[:-1]
    assert printed == [f"{name}_kernel True" for name in kernels.split()]


def test_a_broken_installation_is_said_and_the_cache_of_triton_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """jax-triton sets the variable when it is imported; where it cannot be, XLA draws."""
    monkeypatch.undo()
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    monkeypatch.setitem(sys.modules, "jax_triton", None)
    reason = kernels.unavailable()
    assert reason is not None
    assert reason.endswith('jax_triton halted; None in sys.modules (pip install "gapped[jax-triton]")')
    gapped.jax.gst(KEY, jnp.zeros((2, 3)))
    folder = {}

    class Careless(ModuleType):
        def __getattr__(self, name: str) -> Any:
            folder["set"] = os.environ["TRITON_CACHE_DIR"] = ""
            return triton_call

    monkeypatch.setenv("TRITON_CACHE_DIR", "mine")
    monkeypatch.setitem(sys.modules, "jax_triton", Careless("jax_triton"))
    assert kernels.unavailable() is None
    assert folder == {"set": ""}
    assert os.environ["TRITON_CACHE_DIR"] == "mine"
