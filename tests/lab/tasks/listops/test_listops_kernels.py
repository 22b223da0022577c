"""The kernels of the tree and of the leaf LSTM against their definition in torch, one by one and together.

Without a GPU they run in Triton's interpreter, and are compiled for one. Buffers start as NaN: what a kernel
leaves out shows.
"""

from __future__ import annotations

import copy
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import seeded
from subprocesses import environment, python
from torch import Tensor
from toy_tasks import tree_inputs

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"

import gapped
from gapped_lab.fleet.estimator_groups import Grouped
from gapped_lab.tasks.listops.model import lstm
from gapped_lab.tasks.listops.reference_tree import Greedy
from gapped_lab.tasks.listops.sweep import Sweep
from gapped_lab.tasks.listops.tree import latent_tree
from gapped_lab.tasks.listops.tree_tables import Layer, Tables, lines, uses_kernels
from gapped_lab.tasks.listops.tree_variants import SHAPES, LateMaskGumbelSoftmax, TreeShape, late_masked

pytest.importorskip("triton", reason="the kernels need Triton")
tree_launch = pytest.importorskip("gapped_lab.tasks.listops.tree_launch")
variant_launch = pytest.importorskip("gapped_lab.tasks.listops.variant_launch")

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
if DEVICE.type == "cpu":
    # The interpreter takes milliseconds for every program, whatever its size.
    tree_launch._ROWS, tree_launch._COLUMNS, tree_launch._FEW = 64, 256, 0
pytestmark = [pytest.mark.gpu] if torch.cuda.is_available() else []
# Sums of hundreds of products, of size one in all, in another order.
CLOSE = {"rtol": 1e-5, "atol": 1e-5}
RUNS, BATCH, COUNT = 2, 2, 5
FUSED: dict[type, type] = {Tables: tree_launch.FusedTables, Sweep: tree_launch.FusedSweep}


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=seeded(seed)).to(DEVICE)


def garden(width: int) -> tuple[Tables, Layer]:
    """Tables of trees in their second layer, and that layer; what is not yet known is NaN."""
    g = seeded(1)
    nodes, pairs = 2 * COUNT - 1, 3 * COUNT - 5
    tables = Tables(
        normal(RUNS, nodes, BATCH, 2 * width, seed=1),
        normal(RUNS, nodes, BATCH, 10 * width, seed=2),
        normal(RUNS, pairs, BATCH, 2 * width, seed=3),
        normal(RUNS, pairs, BATCH, seed=4),
        torch.randint(RUNS * nodes * BATCH, (RUNS, pairs, BATCH, 2), generator=g).to(DEVICE),
        torch.full((RUNS, pairs, BATCH), -1, device=DEVICE),
        torch.full((RUNS, COUNT - 1, BATCH), -7, device=DEVICE),
        torch.full((RUNS, COUNT - 1, BATCH, 11), -7, device=DEVICE),
        torch.tensor([[5, 2], [1, 4]], device=DEVICE),
        normal(RUNS, 1, 5 * width, seed=5),
        normal(RUNS, 1, width, seed=6) / width**0.5,
    )
    return tables, Layer(1, lines(tables.states, 1, COUNT), lines(tables.pair_scores, 2, COUNT))


def flat(values: Any) -> list[Tensor]:
    """All tensors in nested tuples, tables and sweeps."""
    if isinstance(values, Tables | Sweep):
        values = tuple(vars(values).values())
    if isinstance(values, Tensor):
        return [values]
    return [each for value in values for each in flat(value)] if isinstance(values, tuple) else []


def assert_same(owner: Tables | Sweep, call: Callable[..., Any], *arguments: Any) -> Any:
    """Compare what a method returns in torch and with the kernel, and what it does to all tensors."""
    results = []
    for kind in (type(owner), FUSED[type(owner)]):
        fields, own = copy.deepcopy((vars(owner), arguments))
        subject = kind(**fields)
        results.append((call(subject, *own), subject, own))
    for plain, fast in zip(*map(flat, results), strict=True):
        torch.testing.assert_close(fast, plain, **CLOSE, equal_nan=True)
    return results[0][0]


widths = pytest.mark.parametrize("width", [5, 300])


@widths
@pytest.mark.parametrize(("start", "count"), [(0, COUNT - 1), (COUNT - 1, 2)])
@pytest.mark.parametrize("few", [0, 8192])
def test_pairs_are_formed(
    width: int, start: int, count: int, few: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tree_launch, "_FEW", few)
    tables, _ = garden(width)
    tables.pair_states[:, start : start + count] = torch.nan
    tables.pair_scores[:, start : start + count] = torch.nan
    assert_same(tables, lambda own: own.form(start, count))


@pytest.mark.parametrize("number", [0, 1, 3])
def test_scores_end_with_the_expression(number: int) -> None:
    tables, layer = garden(5)
    scores = assert_same(
        tables, lambda own, at: own.scores(at, own.lengths).contiguous(), layer._replace(number=number)
    )
    assert (scores == -torch.inf).any()
    assert scores.shape == (RUNS, BATCH, 3)


@widths
@pytest.mark.parametrize("place", [0, 1, 2])
def test_a_merge_enters_node_and_children(width: int, place: int) -> None:
    """One row has its merge at `place`, one elsewhere; two expressions of lengths 2 and 1 are exhausted."""
    tables, layer = garden(width)
    sample = torch.zeros(RUNS, BATCH, 3, device=DEVICE)
    sample[0, :, place] = sample[1, :, (place + 1) % 3] = 1
    following = assert_same(tables, lambda own, *given: own.merge(*given), layer, sample)
    tables.merge(layer, sample)
    assert tables.merges[:, 1].flatten().tolist() == [place, -1, -1, (place + 1) % 3]
    assert following.nodes.shape == (RUNS, 3, BATCH)
    assert following.pairs.shape == (RUNS, 2, BATCH)


def test_the_last_merge_has_no_new_pairs() -> None:
    tables, layer = garden(5)
    sample = torch.ones(RUNS, BATCH, 1, device=DEVICE)
    last = Layer(COUNT - 2, layer.nodes[:, :2].contiguous(), layer.pairs[:, :1].contiguous())
    following = assert_same(tables, lambda own, *given: own.merge(*given), last, sample)
    assert following.nodes[0, 0, 0] == lines(tables.states, 2 * COUNT - 2, 2 * COUNT - 1)[0, 0, 0]
    assert following.pairs.shape == (RUNS, 0, BATCH)


MERGES = [[[0, 4]], [[2, 1]]]


def half_swept(width: int) -> tuple[Sweep, Layer]:
    """A sweep that has come to the second layer, and that layer.

    All numbers are random, also those that must have no effect, except for the inner products: only one pair
    of the layer is neither beside a merge nor beyond its expression, and has some already.
    """
    tables, layer = garden(width)
    sample = torch.zeros(RUNS, BATCH, 3, device=DEVICE)
    sample.scatter_(2, torch.tensor(MERGES, device=DEVICE).clamp(max=2).transpose(1, 2), 1.0)
    tables.merge(layer, sample)
    tables.around[:, [0, 2, 3]] = -1
    shapes = [tables.pair_states.shape] * 2 + [tables.states.shape, tables.pair_scores.shape]
    shapes += [(*tables.pair_scores.shape, 4)] * 2
    shapes += [(RUNS, COUNT - 1, BATCH, 4, 4), (*tables.states.shape[:3], 4)]
    sweep = Sweep(tables, *(normal(*shape, seed=10 + number) / 4 for number, shape in enumerate(shapes)))
    sweep.gains.zero_()
    sweep.gains.flatten(0, 2)[layer.pairs[0, 2, 0]] = normal(4, seed=20)
    return sweep, layer


@widths
def test_what_weights_will_do(width: int) -> None:
    sweep, _ = half_swept(width)
    sweep.own.zero_()
    assert_same(sweep, lambda own: own.relate())
    sweep.relate()
    assert sweep.own.any()
    assert sweep.cross[:, 1].any()
    assert not sweep.cross[:, 0].any()


@widths
def test_gradient_of_the_merged_pair(width: int) -> None:
    sweep, layer = half_swept(width)
    selected = torch.full((RUNS, COUNT - 1, BATCH, 5 * width), torch.nan, device=DEVICE)
    cells = assert_same(sweep, lambda own, at, to: own.select(at, to[:, 1]), layer, selected)
    assert not cells[0, 1].any()


@widths
@pytest.mark.parametrize("scored", [True, False])
def test_the_sweep_goes_down_a_layer(width: int, scored: bool) -> None:
    """The merged children have no adjoints yet. What scores beyond an expression are given is not used."""
    sweep, layer = half_swept(width)
    near = sweep.tables.neighbours(1)
    for line in (near.left, near.right):
        sweep.adjoints.flatten(0, 2)[line[line >= 0]] = 0
    g_h, g_cells = normal(2, RUNS, BATCH, 2 * width, seed=8).unbind()
    delta = normal(RUNS, BATCH, 3, seed=9)

    def push(own: Sweep, *given: Any) -> None:
        own.push(*given)
        # The line of the node that is gone is never read.
        own.links[:, COUNT + 1] = 0

    assert_same(sweep, push, layer, g_h.clone(), g_cells.clone(), delta if scored else None)


@widths
def test_slopes_of_all_pairs_the_samples_gradient_and_adjoints_of_the_leaves(width: int) -> None:
    assert_same(garden(width)[0], lambda own: own.slopes())
    sweep, layer = half_swept(width)
    assert_same(sweep, lambda own, at: own.pull(at).contiguous(), layer)
    assert_same(sweep, lambda own: own.collect())


@widths
def test_gradients_of_all_gates(width: int) -> None:
    sweep, _ = half_swept(width)
    gates = normal(*sweep.weights.shape, 5 * width, seed=1)
    selected = normal(RUNS, COUNT - 1, BATCH, 5 * width, seed=3)
    g = seeded(0)
    sweep.tables.merged_at.copy_(torch.randint(-1, COUNT - 1, sweep.weights.shape, generator=g))
    # In place, or not: only the result counts.
    expected = sweep.totals(gates, selected)
    fused = tree_launch.FusedSweep(**vars(sweep)).totals(gates, selected)
    torch.testing.assert_close(fused, expected, **CLOSE)


@pytest.mark.parametrize("width", [4, 300])
@pytest.mark.parametrize("permuted", [False, True])
def test_the_leaf_lstm(width: int, permuted: bool) -> None:
    """With incoming gradients in lines, as the tree gives them, and not."""
    inputs = normal(RUNS, BATCH, 3, 4 * width).requires_grad_()
    weight = (normal(RUNS, width, 4 * width, seed=1) / width**0.5).requires_grad_()
    direction = normal(RUNS, 3, BATCH, 2 * width, seed=2).transpose(1, 2)
    if permuted:
        direction = direction.permute(3, 0, 1, 2).contiguous().permute(1, 2, 3, 0)
    results = []
    for how in (False, True):
        states = lstm(inputs, weight, fused=how)
        results.append((states.detach(), *torch.autograd.grad(states, (inputs, weight), direction)))
    for plain, fast in zip(*results, strict=True):
        torch.testing.assert_close(fast, plain, **CLOSE)


def scores_of_all_lengths(rows: int, places: int) -> Tensor:
    """A layer's scores; the row number r has r pairs, as long as there are places."""
    beyond = torch.arange(places) >= torch.arange(rows).view(-1, 1)
    return normal(rows, places).masked_fill(beyond.to(DEVICE), -torch.inf)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("places", [2, 33, 230])
def test_trees_of_a_fixed_shape(shape: str, places: int) -> None:
    scores = scores_of_all_lengths(235, places)
    plain, fast = (
        TreeShape(shape=shape, backend=backend).sample(
            scores, generator=torch.Generator(DEVICE).manual_seed(1)
        )
        for backend in ("torch", "triton")
    )
    assert torch.equal(plain, fast)
    assert plain.sum(-1).tolist() == [0.0] + [1.0] * 234


@pytest.mark.parametrize("tau", [1.0, 0.1, 0.01])
@pytest.mark.parametrize("places", [3, 65, 230])
def test_masks_after_the_softmax(places: int, tau: float) -> None:
    """Samples and gradients, where padding wins too; in some rows nothing is allowed, or nothing exists."""
    scores = scores_of_all_lengths(12, places).repeat(2, 1, 1).requires_grad_()
    mask = torch.arange(places, device=DEVICE) < torch.arange(12, device=DEVICE).view(-1, 1) - 3
    mask = mask.expand(2, -1, -1)
    noise = torch.empty_like(scores).exponential_(generator=torch.Generator(DEVICE).manual_seed(2))
    taus = torch.tensor([[tau], [2 * tau]], device=DEVICE)
    plain = late_masked(scores, mask, -noise.log(), taus)
    fast = variant_launch.LateMasked.apply(scores, mask, noise, taus)
    assert torch.equal(plain.round(), fast)
    mine, theirs = (torch.autograd.grad(each, scores, normal(2, 12, places))[0] for each in (fast, plain))
    torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-5 / tau)
    assert mine.abs().max() > 1e-3
    # A temperature that is a number, and noise of its own.
    sample = LateMaskGumbelSoftmax(tau=tau, backend="triton").sample(scores, mask=mask)
    assert torch.equal(sample.sum(-1) > 0, mask.any(-1) & (scores > -torch.inf).any(-1))


def poisoned(monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory that was not written is NaN."""
    empty, empty_like = Tensor.new_empty, torch.empty_like

    def fill(x: Tensor) -> Tensor:
        return x.fill_(torch.nan) if x.is_floating_point() else x.fill_(2**40)

    monkeypatch.setattr(Tensor, "new_empty", lambda self, *a, **k: fill(empty(self, *a, **k)))
    monkeypatch.setattr(torch, "empty_like", lambda *a, **k: fill(empty_like(*a, **k)))


SAMPLERS = {
    "fleet": [gapped.GST(tau=0.7, gap=1.2, backend="torch"), gapped.ReinMax(backend="torch")],
    "late": [LateMaskGumbelSoftmax(tau=0.3), TreeShape(shape="balanced")],
    "greedy": None,
}


@pytest.mark.parametrize(
    ("name", "sizes"),
    [("fleet", (1, 2)), ("fleet", (1, 3, 5)), ("fleet", (8,)), ("late", (2, 5)), ("greedy", (1, 4))],
    ids=str,
)
def test_a_whole_tree(name: str, sizes: tuple[int, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    """Values, merges and every gradient, with expressions of all lengths."""
    poisoned(monkeypatch)
    inputs = tree_inputs(2, len(sizes), max(sizes), 5, dtype=torch.float32, device=DEVICE)
    lengths = torch.tensor([sizes, sizes], device=DEVICE)
    estimators = SAMPLERS[name]
    sampler = Grouped.of(estimators, 1, DEVICE, torch.float32) if estimators else Greedy()
    results = []
    for how in (False, True):
        noise = torch.Generator(DEVICE).manual_seed(3)
        root, merges = latent_tree(*inputs, lengths, sampler, noise, fused=how)
        results.append((root.detach(), merges, *torch.autograd.grad(root.square().sum(), inputs)))
    for plain, fast in zip(*results, strict=True):
        scale = plain.abs().max().item()
        torch.testing.assert_close(fast, plain, rtol=1e-5, atol=1e-5 * scale)
    assert all(each.abs().max() > 1e-3 for each in results[0][2:] if max(sizes) > 2 and name == "fleet")


@pytest.mark.filterwarnings("ignore:The AccumulateGrad node.s stream")
@pytest.mark.skipif(not torch.cuda.is_available(), reason="graphs need a GPU")
def test_a_tree_is_captured() -> None:
    """A graph of both passes gives, on new leaves, what plain calls give."""
    inputs = tree_inputs(3, 4, 7, 12, dtype=torch.float32, device=DEVICE)
    lengths = torch.tensor([[7, 1, 4, 6]] * 3, device=DEVICE)

    def both() -> tuple[Tensor, ...]:
        root, merges = latent_tree(*inputs, lengths, Greedy(), fused=True)
        return root, merges, *torch.autograd.grad(root.square().sum(), inputs)

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        both()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = both()
    with torch.no_grad():
        inputs[0].mul_(-0.7)
    graph.replay()
    for mine, theirs in zip(captured, both(), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=1e-6)


def test_kernels_work_in_float32_where_they_are_asked_to() -> None:
    assert uses_kernels(torch.zeros(1, device=DEVICE), True)
    assert not uses_kernels(torch.zeros(1, device=DEVICE), False)
    assert not uses_kernels(torch.zeros(1, dtype=torch.float64, device=DEVICE), True)


COMPILE = """
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from gapped_lab.tasks.listops import sweep_kernels, tree_kernels, variant_kernels

MODULES = (tree_kernels, sweep_kernels, variant_kernels)
FLAGS = {"WIDTH": 300, "ROWS": 4, "COLUMNS": 128, "PLACES": 32, "BLOCK": 256, "SCORED": True, "SHAPE": 3}
OTHERS = {"p_mask": "*i1", "p_uniform": "*fp64"}
WHOLE = ("p_children", "p_pairs", "p_nodes", "p_merged_at", "p_merges", "p_lengths",
         "p_next_nodes", "p_next_pairs", "p_around")
for name, kernel in [(name, kernel) for module in MODULES for name, kernel in vars(module).items()]:
    if not name.endswith("_kernel"):
        continue
    flags = {key: value for key, value in FLAGS.items() if key in kernel.arg_names}
    if name == "merge_kernel":
        flags["COLUMNS"] = 1024
    types = {each: "*i64" if each in WHOLE else "*fp32" for each in kernel.arg_names}
    types |= {each: OTHERS[each] for each in types if each in OTHERS}
    types |= {each: "i32" for each in types if each[0] == "s"} | dict.fromkeys(flags, "constexpr")
    pointers = [place for place, each in enumerate(types) if each[0] == "p"]
    aligned = {(place,): [["tt.divisibility", 16]] for place in pointers}
    options = {"num_warps": 1 if name in ("relate_kernel", "collect_kernel") else 4}
    if name in ("pull_kernel", "push_kernel"):
        flags["COLUMNS"] = 512
    source = ASTSource(kernel, types, flags, aligned)
    binary = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)
    print(name, "ld.global.v4.b32" in binary.asm["ptx"])
"""


@pytest.mark.skipif(torch.cuda.is_available(), reason="there they are compiled anyway")
def test_every_kernel_compiles_for_a_gpu() -> None:
    """In a process without the interpreter; lines are read four elements at a time."""
    package = Path(gapped.__file__).parents[1]
    printed = python("-c", COMPILE, env=environment(package, bare=True))
    wide = dict(line.split() for line in printed.splitlines())
    assert len(wide) == 15
    narrow = ["scores_kernel", "shape_kernel", "late_forward_kernel", "late_backward_kernel"]
    assert [name for name, value in wide.items() if value != "True"] == narrow
