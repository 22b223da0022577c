"""The kernels of gates against the estimators in torch, for the noise that the kernels draw."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from conftest import normal, seeded
from kernel_cases import DEVICE, ESTIMATORS, GPU_MARKS, TOLERANCE, key, tl, triton
from statistical import binomial, require_law, require_rejected
from torch import Tensor

import gapped
from gapped import simplex
from gapped.gradient import pair_slopes
from gapped.kernels import gates
from gapped.kernels.gates import gate_bits
from gapped.kernels.sampling.rao import rao_bits
from gapped.pathwise import Draw

pytestmark = GPU_MARKS

BLOCK = 128
# All but the NZ ablation, which goes the way of pairs.
NAMES = tuple(name for name in ESTIMATORS if name != "nz-gst")
every_name = pytest.mark.parametrize("name", NAMES)


@pytest.fixture(autouse=True)
def _small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gates, "BLOCK", BLOCK)


def example(count: int = 300) -> Tensor:
    """Log-odds; the last ones are certain, steep, even, or not numbers."""
    odds = 3 * torch.randn(count, generator=seeded(7))
    special = torch.tensor([torch.inf, -torch.inf, 1e4, -1e4, 30.0, -30.0, 0.0, torch.nan])
    odds[-len(special) :] = special
    return odds.to(DEVICE)


@triton.jit
def _bits_kernel(p_seed, p_out, s_count, DRAW: tl.constexpr, BLOCK: tl.constexpr):
    s_seed, b_gates = tl.load(p_seed), tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    if DRAW < 0:
        b_word = gate_bits(s_seed, BLOCK)
    else:
        b_word = rao_bits(s_seed, b_gates, b_gates * 0, b_gates * 0 + DRAW // 4, False)[DRAW % 4]
    tl.store(p_out + b_gates, b_word.to(tl.int64), mask=b_gates < s_count)


def uniforms(count: int, draw: int = -1) -> Tensor:
    """The kernels' uniforms in float64; with `draw` those of that Gumbel-Rao draw."""
    bits = torch.full((count,), -1, dtype=torch.int64, device=DEVICE)
    _bits_kernel[(-(-count // BLOCK),)](key(), bits, count, DRAW=draw, BLOCK=BLOCK)
    assert (bits >= 0).all()
    return ((bits & 0xFFFFFFFF).double() + 0.5) / 2**32


def reference(name: str, estimator: Any, odds: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Gates, soft gates and slopes in float64 by the estimator's own points of the pair."""
    phi, u = torch.where(odds.isnan(), 0.0, odds.double()), uniforms(len(odds))
    both = simplex.pairs(phi)
    logistic = (u / (1 - u)).log()
    if name in ("gumbel-softmax", "decoupled"):
        forward = estimator.tau_forward if name == "decoupled" else 1.0
        on = phi / forward + logistic > 0
    else:
        on = (phi > 0) ^ (u < torch.sigmoid(-phi.abs()))
    category, noise = (~on).long(), None
    shifted = simplex.shift(both)
    if name == "gumbel-softmax":
        noise = simplex.shift(both + torch.stack([logistic, torch.zeros_like(u)], -1))
    elif name == "decoupled":
        noise = -torch.stack([logistic, torch.zeros_like(u)], -1)
    elif name == "gumbel-rao":
        # By the law of the difference of the two scores, given that it has this sign: inverted numerically.
        lead = torch.where(on, phi, -phi)
        draws = torch.stack([uniforms(len(odds), draw) for draw in range(estimator.samples)])
        tail = draws * torch.sigmoid(lead)
        excess = torch.where(lead.isinf(), torch.inf, lead + ((1 - tail) / tail).log())
        winner = simplex.one_hot(category, 2, torch.float64)
        noise = torch.where(winner == 1, 0.0, -excess.unsqueeze(-1))
    gradient = estimator.points(shifted, Draw(category, noise))
    return on.double(), gradient.points.mean(0)[..., 0], pair_slopes(*gradient)


def assert_equals_reference(name: str, estimator: Any, odds: Tensor, tolerance: dict[str, float]) -> None:
    flat = odds.reshape(-1)
    finite = flat == flat
    on, soft, slopes = (each.view(odds.shape) for each in reference(name, estimator, flat))
    grad = normal(*odds.shape, dtype=torch.float32).to(DEVICE).to(odds.dtype)
    fused = estimator.fused()
    value = gates.forward(odds, key(), fused)
    assert value.dtype == odds.dtype
    inside = finite.view(odds.shape)
    assert torch.equal(value[inside].double(), on[inside])
    gradient = gates.backward(odds, grad, key(), fused)
    expected = (slopes * grad.double()).to(odds.dtype)
    torch.testing.assert_close(gradient[inside], expected[inside], **tolerance)
    assert value[~inside].isnan().all()
    assert gradient[~inside].isnan().all()
    if estimator.has_surrogate:
        value = gates.forward(odds, key(), replace(fused, soft=True))
        torch.testing.assert_close(value[inside], soft[inside].to(odds.dtype), **tolerance)
        assert value[~inside].isnan().all()


@every_name
@pytest.mark.parametrize("count", [1, 128, 513])
def test_gates_and_gradients_equal_the_reference(name: str, count: int) -> None:
    odds = example(count) if count > 10 else example(20)[:count]
    assert_equals_reference(name, ESTIMATORS[name], odds, TOLERANCE)


@every_name
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_half_precision(name: str, dtype: torch.dtype) -> None:
    odds = example(100).to(dtype)
    odds[-8:] = odds[-8:].clamp(-1e4, 1e4)
    eps = torch.finfo(dtype).eps
    assert_equals_reference(name, ESTIMATORS[name], odds, {"rtol": eps, "atol": 1e-4})


# The gap of some is no number.
LEVELS = [(name, each) for name in NAMES for each in type(ESTIMATORS[name]).levels]
LEVELS = [each for each in LEVELS if each not in [("gst-expected", "gap"), ("gst-auto", "gap")]]


@pytest.mark.parametrize(("name", "level"), LEVELS)
@pytest.mark.parametrize("shape", [(4, 1, 5), (3, 1)], ids=str)
def test_a_level_per_gate(name: str, level: str, shape: tuple[int, ...]) -> None:
    odds = torch.randn(4, 3, 5, generator=seeded(3)).to(DEVICE)
    levels = (1 + torch.rand(shape, generator=seeded(4))).to(DEVICE)
    estimator = replace(ESTIMATORS[name], **{level: levels})
    per_gate = replace(ESTIMATORS[name], **{level: levels.expand(odds.shape).reshape(-1)})
    _, _, slopes = reference(name, per_gate, odds.reshape(-1))
    gradient = gates.backward(odds, torch.ones_like(odds), key(), estimator.fused())
    torch.testing.assert_close(gradient, slopes.view(odds.shape).float(), **TOLERANCE)


@every_name
def test_a_gate_with_the_backend_triton(name: str) -> None:
    """Any shape and layout; differentiable once; masks; the generator decides."""
    estimator = replace(ESTIMATORS[name], backend="triton")
    odds = torch.randn(6, 50, generator=seeded(3)).to(DEVICE).T.requires_grad_()
    mask = torch.rand(50, 6, generator=seeded(4)).to(DEVICE) < 0.7
    one, same = (
        estimator.gate(odds, mask=mask, generator=torch.Generator(DEVICE).manual_seed(5)) for _ in range(2)
    )
    assert gapped.backend_used() == "triton"
    assert torch.equal(one, same)
    assert (one[~mask] == 0).all()
    (gradient,) = torch.autograd.grad(one.sum(), odds, create_graph=True)
    assert (gradient[~mask] == 0).all()
    assert (gradient[mask] > 0).all()
    with pytest.raises(RuntimeError, match="twice"):
        gradient.square().sum().backward()
    assert estimator.gate(torch.zeros((), device=DEVICE)).shape == ()
    assert estimator.gate(torch.zeros(0, 3, device=DEVICE)).shape == (0, 3)


@pytest.mark.filterwarnings("ignore:.*torch.jit.* is deprecated")
def test_where_there_is_no_kernel() -> None:
    odds = torch.zeros(4, device=DEVICE)
    for estimator, logits, reason in (
        (gapped.GST(draw="argmax", backend="triton"), odds, "gates have no kernel for their argmax"),
        (gapped.GST(gap=lambda p: p, backend="triton"), odds, "has no kernel"),
        (gapped.GST(backend="triton"), odds.double(), "float64"),
    ):
        with pytest.raises(gapped.GappedError, match=f"expected torch or auto here: .*{reason}"):
            estimator.gate(logits)
    compiled = torch.compile(gapped.GST(backend="triton").gate, backend="aot_eager", fullgraph=True)
    with pytest.raises(Exception, match=r"Observed exception|gates have no kernel in compiled code"):
        compiled(odds)
    torch.compiler.reset()


@pytest.mark.parametrize("name", ["gst", "gumbel-softmax"])
@pytest.mark.parametrize("odds", [-2.0, 0.3])
def test_the_law_of_gates(name: str, odds: float, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gates, "BLOCK", 4096)
    count = 60_000
    drawn = gates.forward(torch.full((count,), odds, device=DEVICE), key(3), ESTIMATORS[name].fused())
    p = float(torch.sigmoid(torch.tensor(odds, dtype=torch.float64)))
    require_law(binomial(int(drawn.sum()), count, p))
    require_rejected(binomial(int(drawn.sum()), count, 1.1 * p))
    neighbours = int((drawn[:-1] * drawn[1:])[::2].sum())
    require_law(binomial(neighbours, count // 2, p * p))
