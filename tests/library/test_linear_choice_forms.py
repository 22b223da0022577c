"""Choices from linear heads in half precision, under autocast, compiled, checkpointed; memory and errors."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
import torch.utils.checkpoint
from conftest import MEMBERS, assert_equal, every_member, normal, pulled, seeded
from forms import RAO
from linear_heads import D, V, problem, small_chunks
from live_bytes import saved_bytes
from torch import Tensor
from variants import make

import gapped
from gapped.vocabulary import head
from gapped_lab.bench.timing import peak_memory

__all__ = ["small_chunks"]
HALVES = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)


def cost(hidden: Tensor, weight: Tensor, bias: Tensor | None = None, **how: Any) -> Tensor:
    """A use of everything that a choice has."""
    choice = gapped.linear_choice(hidden, weight, bias, **how)
    rows = choice.select(weight)
    score = (choice.log_prob - choice.entropy).to(rows.dtype)
    return (rows.square().sum(-1) * choice.gate() + score).sum()


@HALVES
@pytest.mark.usefixtures("small_chunks")
def test_half_precision_is_summed_in_float32(dtype: torch.dtype) -> None:
    """Many rows that each add 1 to one entry: in half precision the sum would stop at 256 or 2048."""
    rows = 4096
    hidden = torch.ones(rows, 1, dtype=dtype)
    weight = torch.tensor([[50.0], [-50.0]], dtype=dtype, requires_grad=True)
    choice = gapped.linear_choice(hidden, weight)
    assert (choice.index == 0).all()
    (gradient,) = torch.autograd.grad(choice.select(weight).sum(), weight)
    assert gradient.dtype == dtype
    assert gradient[0, 0] == rows


@HALVES
@every_member
@pytest.mark.usefixtures("small_chunks")
def test_half_precision_is_near_float32(name: str, dtype: torch.dtype) -> None:
    results = []
    for exact in (False, True):
        parts = problem(dtype=dtype)
        leaves = [(each.detach().float() if exact else each.detach()).requires_grad_() for each in parts]
        hidden, weight, bias, table = leaves
        choice = gapped.linear_choice(hidden, weight, bias, estimator=make(name), generator=seeded())
        assert choice.log_prob.dtype == torch.float32
        assert choice.gate().dtype == hidden.dtype
        gradients = torch.autograd.grad(choice.select(table).float().square().sum(), leaves)
        assert [each.dtype for each in gradients] == [each.dtype for each in leaves]
        results.append((choice.index, gradients))
    (index, ours), (same, theirs) = results
    assert torch.equal(index, same)
    tolerance = 0.15 if dtype == torch.bfloat16 else 0.02
    for gradient, expected in zip(ours, theirs, strict=True):
        assert (gradient.float() - expected).norm() <= tolerance * expected.norm()


@pytest.mark.parametrize("is_inside", [True, False])
def test_autocast(is_inside: bool) -> None:
    """Products in bfloat16 as the dense path has them; gradients in the dtype of the parameters."""
    parts = problem(dtype=torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        choice = gapped.linear_choice(parts.hidden, parts.weight, parts.bias, generator=seeded())
        assert choice.gate().dtype == torch.bfloat16
        total = choice.select(parts.table).sum() + choice.log_prob.sum()
        ours = torch.autograd.grad(total, parts) if is_inside else None
    ours = torch.autograd.grad(total, parts) if ours is None else ours
    halves = [each.detach().bfloat16().requires_grad_() for each in parts[:3]]
    same = gapped.linear_choice(*halves, generator=seeded())
    assert torch.equal(choice.index, same.index)
    total = same.select(parts.table).sum() + same.log_prob.sum()
    for gradient, leaf, expected in zip(
        ours, parts, torch.autograd.grad(total, [*halves, parts.table]), strict=True
    ):
        assert gradient.dtype == leaf.dtype
        torch.testing.assert_close(gradient, expected.to(leaf.dtype), rtol=2e-2, atol=2e-2)


@pytest.mark.filterwarnings(
    "ignore:The .grad attribute:UserWarning"
)  # by the compiler itself, at a graph break
def test_compiled_code_breaks_the_graph_and_agrees() -> None:
    runs = (cost, torch.compile(cost, backend="eager"))
    assert_equal(*(pulled(lambda x, *head, run=run: run(2 * x, *head), *problem()[:3]) for run in runs))


@every_member
@pytest.mark.usefixtures("small_chunks")
def test_decoding_without_gradient_draws_the_same(name: str) -> None:
    parts, states = problem(), []
    choices = []
    for wanted in (True, False):
        generator = seeded()
        with torch.set_grad_enabled(wanted):
            choices.append(gapped.linear_choice(*parts[:2], estimator=make(name), generator=generator))
        states.append(generator.get_state())
    assert_equal(states[:1], states[1:])
    with_graph, without = choices
    assert torch.equal(with_graph.index, without.index)
    assert with_graph.log_prob.requires_grad
    assert not without.log_prob.requires_grad
    # The table is differentiated wherever its use is.
    selected = without.select(parts.table)
    (gradient,) = torch.autograd.grad(selected.sum(), parts.table)
    assert torch.equal(gradient[:, 0, 0], torch.bincount(without.index.reshape(-1), minlength=V).double())


def test_only_what_is_wanted_is_computed() -> None:
    parts = problem()
    choice = gapped.linear_choice(parts.hidden.detach(), parts.weight.detach(), parts.bias)
    (gradient,) = torch.autograd.grad(choice.select(parts.table.detach()).sum(), parts.bias)
    assert gradient.shape == parts.bias.shape


@pytest.mark.parametrize("backward", [False, True])
@pytest.mark.parametrize("which", ["hidden", "weight", "bias", "tau"])
def test_tensors_changed_after_the_draw_are_noticed(which: str, backward: bool) -> None:
    parts = problem()
    tensors = {name: getattr(parts, name) * 1 for name in ("hidden", "weight", "bias")}
    tau = torch.ones(parts.hidden.shape[:-1]).double()
    choice = gapped.GST(tau=tau).choose_linear(**tensors)
    result = choice.select(parts.table).sum()
    with torch.no_grad():
        (tau if which == "tau" else tensors[which]).mul_(2)
    with pytest.raises(RuntimeError, match=r"changed after it was drawn|modified by an inplace operation"):
        result.backward() if backward else choice.gate()


# The backward pass of MVE solves a system of the categories for each row, which is larger than the logits.
@pytest.mark.parametrize("name", [name for name in MEMBERS if name != "mve"])
def test_nothing_of_the_size_of_the_logits_is_kept_or_allocated(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows, categories, width = 40, 20_000, 2
    monkeypatch.setattr(head, "CHUNK_BYTES", 4 * categories)
    monkeypatch.setattr(head, "FEWEST_ROWS", 1)
    hidden = normal(rows, width, dtype=torch.float32).requires_grad_()
    weight = normal(categories, width, seed=2, dtype=torch.float32).requires_grad_()
    estimator = make(name, **({"samples": 1} if name in RAO else {}))
    logits, inputs = 4 * rows * categories, 4 * (rows + categories) * width

    def chunked() -> Tensor:
        return gapped.linear_choice(hidden, weight, estimator=estimator).select(weight).sum()

    def dense() -> Tensor:
        return estimator.choose(hidden @ weight.T).select(weight).sum()

    # Besides the inputs: the selected rows, and a few numbers per row.
    assert saved_bytes(chunked) <= inputs + 4 * rows * (width + 10)
    assert saved_bytes(dense) > logits
    # The gradients, and a few tensors of the size of a chunk.
    peak = peak_memory(lambda: torch.autograd.grad(chunked(), [hidden, weight]), torch.device("cpu"))
    assert peak <= inputs + 12 * head.CHUNK_BYTES < logits / 2


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"hidden": [1.0]}, r"hidden: got an object of type list, expected .* \(\.\.\., d\)"),
        ({"hidden": torch.tensor(1.0)}, r"hidden: got a tensor of shape \(\)"),
        ({"hidden": torch.ones(2, D, dtype=torch.int64)}, r"hidden: got a tensor of torch.int64"),
        ({"weight": torch.ones(V, D + 1)}, r"weight: got a tensor of shape \(11, 7\), expected \(V, 6\)"),
        ({"weight": torch.ones(V)}, r"weight: got a tensor of shape \(11,\)"),
        ({"weight": torch.ones(0, D)}, r"weight: got .* V at least 1"),
        ({"weight": torch.ones(V, D, device="meta")}, "weight: got a tensor on meta, expected one on cpu"),
        ({"weight": torch.ones(V, D).double()}, "weight: got a tensor of torch.float64, .* torch.float32"),
        ({"bias": torch.ones(V - 1)}, r"bias: got a tensor of shape \(10,\), expected \(11,\)"),
        ({"bias": torch.ones(V, device="meta")}, "bias: got a tensor on meta, expected one on cpu"),
        ({"mask": torch.ones(V)}, "mask: got a tensor of dtype torch.float32"),
        ({"mask": torch.ones(V - 1, dtype=torch.bool)}, r"mask: got a tensor of shape \(10,\)"),
        ({"estimator": "rloo"}, "estimator: got 'rloo', expected a pathwise estimator"),
        ({"estimator": "gst:hard=false"}, "hard: got False, expected True"),
        ({"estimator": "gst:detach=false"}, "detach: got False, expected True"),
        ({"estimator": gapped.GST(tau=torch.ones(3))}, r"tau: got a tensor of shape \(3,\)"),
        ({"generator": 1}, "generator: got 1"),
        ({"temperature": 0}, "temperature: got 0, expected a positive number"),
        ({"temperature": torch.ones(2)}, "temperature: got a tensor, expected a positive number"),
        ({"index": 3}, "index: got an object of type int, expected an int64 tensor"),
        ({"index": torch.ones(3, dtype=torch.int64)}, r"index: got a tensor of shape \(3,\)"),
        (
            {"index": torch.tensor([0, -1])},
            "index: got values out of range, expected categories below 11, or 11 for none",
        ),
        ({"estimator": gapped.GST(backend="triton")}, "backend: got 'triton', expected torch or auto here"),
    ],
)
def test_bad_arguments_are_one_line(
    changes: dict[str, Any], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    arguments = {"hidden": torch.ones(2, D), "weight": torch.ones(V, D), **changes}
    with pytest.raises(gapped.GappedError, match=message) as caught:
        gapped.linear_choice(**arguments)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "table", [torch.ones(V - 1, 2), torch.ones(V, dtype=torch.int64), torch.ones(V, device="meta"), 3.0]
)
def test_bad_tables_are_one_line(table: Any) -> None:
    choice = gapped.linear_choice(torch.ones(2, D), torch.ones(V, D))
    with pytest.raises(gapped.GappedError, match=r"table: got .*, expected a floating-point tensor on cpu"):
        choice.select(table)


def test_given_categories_have_neither_rows_nor_gates() -> None:
    weight = torch.ones(V, D)
    choice = gapped.linear_choice(torch.ones(2, D), weight, index=torch.zeros(2, dtype=torch.int64))
    for use in (lambda: choice.select(weight), choice.gate):
        with pytest.raises(gapped.GappedError, match="index: got given categories, expected None for select"):
            use()


def test_a_gap_function_sees_the_rows_of_a_chunk() -> None:
    parts = problem()

    def rows(hidden: Tensor, weight: Tensor, gap: Any) -> Tensor:
        return gapped.linear_choice(hidden, weight, estimator=gapped.GST(gap=gap)).select(parts.table)

    gaps = (gapped.expected_gap, lambda p: gapped.expected_gap(p))
    assert_equal(*(pulled(partial(rows, gap=gap), *parts[:2]) for gap in gaps))


# Tensors that are changed in between


def test_what_is_written_into_the_index_changes_nothing() -> None:
    """As where a decoder pads what is finished: the choice keeps what it has drawn."""
    hidden, weight = normal(3, 4), normal(5, 4, seed=1)
    with torch.no_grad():
        linear = gapped.linear_choice(hidden, weight, generator=seeded())
    plain = gapped.GST().choose(normal(3, 5).requires_grad_(), generator=seeded())
    for choice in (linear, plain):
        drawn, rows = choice.index.clone(), choice.select(weight).detach()
        padded = choice.index
        padded[:] = (drawn + 1) % 5
        assert torch.equal(choice.index, drawn)
        assert torch.equal(choice.select(weight), rows)
    expected = (hidden @ weight.T).log_softmax(-1)[torch.arange(3), linear.index]
    torch.testing.assert_close(linear.log_prob, expected.to(linear.log_prob.dtype))


@pytest.mark.parametrize("which", [0, 1])
def test_a_selected_row_is_not_differentiated_twice(which: int) -> None:
    """Neither by the logits nor by the table, on which their gradient depends."""
    logits, table = normal(3, 5).requires_grad_(), normal(5, 2, seed=1).requires_grad_()
    selected = gapped.GST().choose(logits).select(table)
    (gradient,) = torch.autograd.grad(selected.sum(), logits, create_graph=True)
    with pytest.raises(RuntimeError, match="cannot be differentiated twice"):
        torch.autograd.grad(gradient.square().sum(), (logits, table)[which])


@pytest.mark.filterwarnings("ignore:.torch.jit.script:DeprecationWarning")  # torch's own, in forward mode
def test_meta_tensors_and_function_transforms_are_refused() -> None:
    hidden, weight = torch.randn(4, 3), torch.randn(7, 3)
    drawn = gapped.linear_choice(hidden, weight)

    def total(hidden: Tensor) -> Tensor:
        return gapped.linear_choice(hidden, weight).select(weight).sum()

    message = r"hidden: got one inside of a transform.*, expected an ordinary tensor; elsewhere take GST\(\)"
    for call in (
        lambda: torch.func.grad(total)(hidden),
        lambda: torch.func.vmap(total, randomness="different")(hidden.unsqueeze(1)),
        lambda: torch.func.jvp(total, (hidden,), (hidden,)),
        lambda: torch.func.grad(lambda table: drawn.select(table).sum())(weight),
    ):
        with pytest.raises(gapped.GappedError, match=message):
            call()
    with pytest.raises(gapped.GappedError, match="hidden: got a tensor on meta, expected an ordinary tensor"):
        gapped.linear_choice(hidden.to("meta"), weight.to("meta"))
