"""Large inputs in blocks, tensors changed in place, activation checkpointing, other devices, peak memory."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest
import torch
import torch.utils.checkpoint
from conftest import (
    INVERSE_CDF,
    MEMBERS,
    TAU,
    TOLERANCE,
    assert_close,
    assert_equal,
    assert_one_hot,
    every_member,
    normal,
    pull,
    seeded,
    through_softmax,
)
from torch import Tensor
from variants import VARIANTS, K, every_kind_of_sample, every_variant, make

import gapped
from gapped_lab.bench.timing import peak_memory

# Blocks of rows


@every_variant
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=str)
def test_blocks_of_rows_change_nothing(
    name: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where noise depends on how it is generated, the gradient must be that of the sample's surrogate."""
    taus = torch.linspace(1, 2, 40, dtype=torch.float64).view(4, 10)
    logits, weight = normal(3, 4, 10, K, dtype=dtype), normal(3, 4, 10, K, seed=2, dtype=dtype)
    whole = pull(make(name, tau=taus), logits, weight)
    monkeypatch.setattr("gapped.simplex.BLOCK", 4 * K + 2)
    in_blocks = pull(make(name, tau=taus), logits, weight)
    assert_one_hot(in_blocks[0])
    if VARIANTS.get(name, (name,))[0] in INVERSE_CDF:
        assert_equal(in_blocks, whole)
    if name in ("gumbel-softmax", "decoupled", "decoupled-warm", "gumbel-rao-1"):
        soft, gradient = pull(make(name, tau=taus, hard=False), logits, weight)
        expected = through_softmax(soft.double(), weight.double()) / taus.unsqueeze(-1)
        assert_close(gradient, expected.to(dtype), TOLERANCE[dtype])


@every_member
def test_a_choice_in_blocks_is_the_sample_in_blocks(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its index, and no one-hot vector beside it."""
    monkeypatch.setattr("gapped.simplex.BLOCK", 4 * K)
    logits = normal(30, K)
    sample = make(name).sample(logits, generator=seeded())
    assert torch.equal(make(name).choose(logits, generator=seeded()).index, sample.argmax(-1))
    assert make(name).outcome(logits, seeded(), False, dense=False).value.numel() == 0


@every_kind_of_sample
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_a_small_batch_is_drawn_as_any_other(name: str, hard: bool, dtype: torch.dtype) -> None:
    """In fewer operations, and with the same bits."""
    logits, weight = 3 * normal(30, K, dtype=dtype), normal(30, K, seed=2, dtype=dtype)
    for tau in (1.0, TAU):
        estimator, leaf = make(name, tau=tau, hard=hard), logits.clone().requires_grad_()
        value = estimator.sample_in_torch(leaf, seeded())
        expected = value.detach().clone(), torch.autograd.grad(value, leaf, weight)[0]
        assert_equal(pull(estimator, logits, weight), expected)
        assert torch.equal(estimator.sample(logits, generator=seeded()), expected[0])


@every_member
def test_one_long_row(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    logits, weight = normal(50), normal(50, seed=2)
    expected = pull(make(name), logits, weight)
    monkeypatch.setattr("gapped.simplex.BLOCK", 40)
    assert_equal(pull(make(name), logits, weight), expected)


# Tensors that the caller changes afterwards


@every_member
@pytest.mark.parametrize("use", ["sample", "choose"])
@pytest.mark.parametrize("reentrant", [True, False])
def test_randomness_afterwards_does_not_depend_on_the_gradient(name: str, use: str, reentrant: bool) -> None:
    """Activation checkpointing repeats the forward pass: dropout after the sample must drop the same."""
    estimator, table = make(name), normal(K, 3)

    def layer(logits: Tensor) -> Tensor:
        used = estimator.sample(logits) @ table if use == "sample" else estimator.choose(logits).select(table)
        return used * torch.nn.functional.dropout(torch.ones_like(used))

    gradients = []
    checkpointed = partial(torch.utils.checkpoint.checkpoint, layer, use_reentrant=reentrant)
    for run in (layer, checkpointed):
        logits = normal(50, K).requires_grad_()
        torch.manual_seed(0)
        run(logits).backward(normal(50, 3, seed=2))
        gradients.append(logits.grad)
    assert torch.equal(*gradients)


@every_member
def test_the_default_device_does_not_matter(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gapped.simplex.BLOCK", 4 * K)
    logits, weight = normal(30, K).requires_grad_(), normal(30, K, seed=2)
    with torch.device("meta"):
        choice = make(name).choose(logits)
        for result, grad in ((make(name).sample(logits), weight), (choice.gate(), weight[:, 0])):
            (gradient,) = torch.autograd.grad(result, logits, grad)
            assert result.device.type == gradient.device.type == choice.index.device.type == "cpu"


def keeps_one_point(name: str) -> bool:
    gradient = make(name).outcome(normal(2, K), seeded(), True).gradient
    return len(gradient.points) == 1


@pytest.mark.parametrize("name", [name for name in MEMBERS if keeps_one_point(name)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("wanted", [True, False])
def test_memory_is_at_most_torchs(name: str, dtype: torch.dtype, wanted: bool) -> None:
    """Gumbel-Rao keeps a point for each of its draws, and ReinMax two."""
    logits, weight = normal(256, 8192, dtype=dtype).requires_grad_(wanted), normal(256, 8192, dtype=dtype)

    def peak(sample: Callable[[Tensor], Tensor]) -> int:
        def call() -> None:
            result = sample(logits)
            if wanted:
                torch.autograd.grad(result, logits, weight)

        return peak_memory(call, torch.device("cpu"))

    assert peak(make(name).sample) <= peak(partial(torch.nn.functional.gumbel_softmax, tau=TAU, hard=True))


def test_tensors_that_a_soft_sample_times_a_table_needs() -> None:
    """As docs/migration.md says: three as in torch; two where blocks of rows are computed again."""
    logits = normal(512, 2_000, dtype=torch.float32).requires_grad_()
    table = normal(2_000, 8, seed=2, dtype=torch.float32)

    def tensors(use: Callable[[Tensor], Tensor]) -> float:
        def call() -> None:
            torch.autograd.grad(use(logits).sum(), logits)

        return peak_memory(call, torch.device("cpu")) / (4 * logits.numel())

    def mixed(rows: Tensor) -> Tensor:
        return gapped.gumbel_softmax(rows, 0.5) @ table

    def in_blocks(rows: Tensor) -> Tensor:
        parts = rows.split(16)
        return torch.cat(
            [torch.utils.checkpoint.checkpoint(mixed, part, use_reentrant=False) for part in parts]
        )

    assert 2.9 < tensors(lambda rows: torch.nn.functional.gumbel_softmax(rows, 0.5) @ table) < 3.2
    assert 2.9 < tensors(mixed) < 3.2
    assert tensors(in_blocks) < 2.3
