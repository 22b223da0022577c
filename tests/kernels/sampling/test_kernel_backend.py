"""Samples and choices with `backend="triton"`: as torch's, differentiable once, and in compiled programs."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise, product
from typing import Any

import pytest
import torch
from conftest import USES, normal
from kernel_cases import DEVICE, ESTIMATORS, GPU_MARKS, LONG, backward, example, incoming, key
from torch import Tensor

import gapped
from gapped.kernels.sampling import launch, operators
from gapped.kernels.sampling.fused import Fused

pytestmark = GPU_MARKS

ALL = ESTIMATORS | {"reinmax-rao": gapped.ReinMaxRao(tau=0.7, samples=3)}
both_backends = pytest.mark.parametrize("backend", ["torch", "triton"])


@pytest.mark.parametrize("hard", [True, False])
def test_an_explicit_backend_runs_or_raises(hard: bool) -> None:
    logits = normal(8, 10, dtype=torch.float32).to(DEVICE).requires_grad_()
    gapped.gst(logits, hard=hard, backend="torch").square().sum().backward()
    assert gapped.backend_used() == "torch"
    z = gapped.gst(logits, hard=hard, backend="triton")
    assert gapped.backend_used() == "triton"
    z.square().sum().backward()
    gapped.gst(logits, hard=hard)
    assert gapped.backend_used() == ("triton" if DEVICE.type == "cuda" else "torch")
    gapped.gst(logits.double(), hard=hard)
    assert gapped.backend_used() == "torch"
    with pytest.raises(gapped.GappedError, match=r"backend.*float64"):
        gapped.gst(logits.double(), hard=hard, backend="triton")
    with pytest.raises(gapped.GappedError, match="no kernel"):
        gapped.gst(logits, gap=lambda p: p, hard=hard, backend="triton")
    with pytest.raises(gapped.GappedError, match="this estimator, or this option of it, has no kernel"):
        gapped.mve(logits, backend="triton")
    with pytest.raises(gapped.GappedError, match="detach=False has no kernel for rows longer than 4096"):
        gapped.gst(torch.zeros(4097, device=DEVICE), 1.0, hard, gap=1.0, detach=False, backend="triton")
    with pytest.raises(gapped.GappedError, match="one of auto, torch, triton"):
        gapped.GST(backend="cuda")


@both_backends
@pytest.mark.parametrize("gap", [1.0, torch.ones(4)])
def test_the_nz_ablation_does_not_move_a_logit_at_the_gap(gap: float | Tensor, backend: str) -> None:
    logits = torch.tensor([0.0, 1.0, 2.0], device=DEVICE).repeat(4, 1).requires_grad_()
    z = gapped.gst(logits, gap=gap, detach=False, hard=True, backend=backend)
    (z * torch.tensor([3.0, 5.0, 11.0], device=DEVICE)).sum().backward()
    assert not logits.grad[:, 1].any()
    torch.testing.assert_close(logits.grad[:, 0], -logits.grad[:, 2])


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize(
    ("name", "categories"),
    [
        *product(("gst", "gst-expected", "gapmax", "gumbel-softmax", "decoupled"), (6, 4100)),
        ("reinmax-rao", 6),
    ],
)
def test_one_graph_with_the_kernel_inside(name: str, categories: int) -> None:
    """As an operator of a compiled program: same key, same sample, same gradient as the plain call."""
    fused = replace(ALL[name], tau=torch.linspace(0.5, 1.5, 4, device=DEVICE)).fused()
    logits, grad = example(4, categories).requires_grad_(), incoming(4, categories)

    def program(x: Tensor) -> Tensor:
        return operators.sample(2 * x, key(), fused)

    double = (2 * logits).detach()
    plain = launch.forward(double, key(), fused)
    for run in (torch.compile(program, backend="aot_eager", fullgraph=True), program):
        value = run(logits)
        (gradient,) = torch.autograd.grad(value, logits, grad)
        assert torch.equal(value, plain.value)
        assert torch.equal(gradient, 2 * backward(double, plain, grad, fused))
    torch._dynamo.reset()


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")
@pytest.mark.parametrize(("taus", "axes"), [(None, 0), (torch.ones(4, device=DEVICE), 0), (None, 1)])
def test_the_operators_keep_their_promises(taus: Tensor | None, axes: int) -> None:
    """torch's own check of a custom operator: schema, shapes without data, autograd."""
    logits = example(4, 6) if axes == 0 else example(4, 6).t().contiguous().t()
    logits.requires_grad_()
    options = (taus, None, None, None if taus is not None else 0.5, 1.0, 1.0, "gst", True, 1, False, False)
    torch.library.opcheck(operators._sample, (logits, key(), axes, *options))


@both_backends
@pytest.mark.parametrize("name", [*LONG, "reinmax-rao"])
@pytest.mark.parametrize("rows", [slice(5), 0, slice(0)], ids=["rows", "one-row", "no-rows"])
def test_a_choice_equals_the_one_hot_sample(name: str, backend: str, rows: slice | int) -> None:
    estimator = replace(ALL[name], backend=backend)
    table = normal(6, 3, seed=3, dtype=torch.float32).to(DEVICE).requires_grad_()
    results = []
    for dense in (True, False):
        logits = example(5, 6)[rows].requires_grad_()
        generator = torch.Generator(DEVICE).manual_seed(5)
        if dense:
            z = estimator.sample(logits, generator=generator)
            selected, gate = z @ table, (z * z.detach()).sum(-1)
            index = torch.where(z.any(-1), z.argmax(-1), 6)
        else:
            choice = estimator.choose(logits, generator=generator)
            assert gapped.backend_used() == backend
            selected, gate, index = choice.select(table), choice.gate(), choice.index
        cost = (selected * incoming(*selected.shape)).sum() + (gate * incoming(*gate.shape)).sum()
        results.append((index, selected, gate, *torch.autograd.grad(cost, (logits, table))))
    torch.testing.assert_close(*results, rtol=1e-4, atol=1e-5)


def test_a_choice_refuses_what_it_cannot_do() -> None:
    logits = torch.zeros(2, 3, device=DEVICE, requires_grad=True)
    attempts: dict[str, Callable[[], object]] = {
        "table": lambda: gapped.choose(logits).select(torch.zeros(4, 2)),
        r"table: got a tensor of torch\.int64": lambda: gapped.choose(logits).select(torch.arange(3)),
        "hard": lambda: gapped.GST(hard=False).choose(logits),
        "detach": lambda: gapped.GST(gap=1.0, detach=False).choose(logits),
    }
    for message, attempt in attempts.items():
        with pytest.raises(gapped.GappedError, match=message):
            attempt()


@pytest.mark.parametrize("linear", [True, False])
@pytest.mark.parametrize("use", USES)
def test_differentiating_a_kernel_twice_is_refused(use: str, linear: bool) -> None:
    logits = example(4, 6).requires_grad_()
    output = USES[use](gapped.GST(backend="triton"), logits)
    cost = output.sum() if linear else output.square().sum()
    (gradient,) = torch.autograd.grad(cost, logits, create_graph=True)
    with pytest.raises(RuntimeError, match="twice"):
        (gradient.pow(2).sum() + logits.sum()).backward()


@pytest.mark.parametrize("name", ["logits", "tau", "gap"])
@pytest.mark.parametrize("use", [*USES, "a choice that is not used yet"])
def test_changing_what_the_backward_pass_reads_is_noticed(use: str, name: str) -> None:
    """A kernel reads logits, temperatures and gaps again in the backward pass."""
    leaf = torch.zeros(4, 6, device=DEVICE, requires_grad=True)
    tensors = {"logits": 1 * leaf} | {each: torch.ones(4, device=DEVICE) for each in ("tau", "gap")}
    estimator = gapped.GST(tau=tensors["tau"], gap=tensors["gap"], backend="triton")
    if use in USES:
        output, message = USES[use](estimator, tensors["logits"]), "inplace"
    else:
        choice, message = estimator.choose(tensors["logits"]), "were changed after it was drawn"
    with torch.no_grad():
        tensors[name] += 1
    with pytest.raises(RuntimeError, match=message):
        (output if use in USES else choice.gate()).sum().backward()


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="native code for the kernels needs a GPU")
def test_native_compiled_code_uses_the_kernel() -> None:
    targets = []

    def spy(graph: torch.fx.GraphModule, inputs: object) -> object:
        targets.extend(str(node.target) for node in graph.graph.nodes)
        return graph

    def program(x: Tensor) -> Tensor:
        return gapped.gst(2 * x, 0.5, True, gap=1.2)

    logits = torch.randn(64, 10, device="cuda", requires_grad=True)
    torch.compile(program, backend=spy, fullgraph=True)(logits)
    assert any("gapped.sample" in target for target in targets)
    torch._dynamo.reset()
    z = torch.compile(program, fullgraph=True)(logits)
    z.square().sum().backward()
    assert set(z.flatten().tolist()) == {0.0, 1.0}
    torch._dynamo.reset()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="CUDA graphs need a GPU")
@pytest.mark.parametrize(
    "draw",
    [
        lambda logits, g: gapped.gst(logits, hard=True, generator=g),
        lambda logits, g: gapped.subset(logits, 2, generator=g),
        lambda logits, g: gapped.choose(logits, k=2, generator=g).select(torch.eye(8, device="cuda")).sum(1),
    ],
    ids=("gst", "subset", "select"),
)
def test_a_captured_graph_draws_afresh_at_every_replay(draw: Any) -> None:
    generator = torch.Generator("cuda").manual_seed(0)
    logits = torch.zeros(4096, 8, device="cuda", requires_grad=True)
    out = torch.empty_like(logits)

    def step() -> None:
        value = draw(logits, generator)
        torch.autograd.grad(value.square().sum(), logits)
        out.copy_(value.detach())

    with torch.cuda.stream(torch.cuda.Stream()):
        step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    graph.register_generator_state(generator)
    with torch.cuda.graph(graph):
        step()
    samples = []
    for _ in range(3):
        graph.replay()
        samples.append(out.clone())
    assert all(0 < (a == b).all(-1).float().mean() < 0.2 for a, b in pairwise(samples))


# What the host keeps between calls: launches and estimators, but no tensors or temperatures.


def test_an_annealed_temperature_needs_no_new_launch() -> None:
    logits = torch.randn(6, 5, device=DEVICE, requires_grad=True)
    before = None
    for tau in (1, 0.75, 0.5):
        gapped.gst(logits, tau, True, gap=tau, backend="triton").square().sum().backward()
        sizes = [each.cache_info().currsize for each in (launch._forward, launch._backward)]
        assert before in (None, sizes)
        before = sizes


def test_a_whole_temperature_leaves_the_next_its_own() -> None:
    """Triton would compile a 1 into the code, which then has no use for the next temperature."""
    assert all(type(number) is float for number in Fused("decoupled", 1, gap=2, tau_forward=1).numbers)
    assert Fused("gst", torch.tensor(3.0)).numbers == (0.0, 0.0, 1.0)
    logits, grad = torch.randn(2, 7, 11, device=DEVICE)
    sample = launch.forward(logits, key(), Fused("gst", 1))
    whole, half, real = (backward(logits, sample, grad, Fused("gst", tau, gap=1.0)) for tau in (1, 0.5, 1.0))
    assert torch.equal(whole, real)
    assert not torch.allclose(whole, half)


def test_tensors_are_not_kept() -> None:
    tau = torch.full((6,), 0.5, device=DEVICE)
    reference = weakref.ref(tau)
    logits = torch.randn(6, 5, device=DEVICE, requires_grad=True)
    gapped.gst(logits, tau, True, gap=tau, backend="triton").sum().backward()
    # On a GPU a thread of its own may still hold that pass, until it takes the next one.
    torch.ones((), device=DEVICE, requires_grad=True).backward()
    del tau
    gc.collect()
    assert reference() is None


@pytest.mark.parametrize("wrong", [{"hard": 1}, {"gap": [1.0]}, {"gap": True}, {"tau": True}, {"detach": 1}])
def test_what_was_accepted_once_does_not_let_its_like_pass(wrong: dict[str, Any]) -> None:
    gapped.gst(torch.zeros(3), 1, True)
    with pytest.raises(gapped.GappedError, match=next(iter(wrong))):
        gapped.gst(torch.zeros(3), **{"tau": 1, "hard": True, **wrong})
