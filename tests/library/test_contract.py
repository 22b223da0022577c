"""One contract for every registered estimator: shapes, dtypes, axes, masks, randomness, options.

Samples are compared under equal generator seeds, so that almost everything here is exact.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable
from dataclasses import FrozenInstanceError, fields
from functools import partial
from typing import Any

import pytest
import torch
import torch.utils.checkpoint
from conftest import (
    DTYPES,
    FUNCTIONS,
    INVERSE_CDF,
    MEMBERS,
    SOFT,
    TAU,
    TOLERANCE,
    USES,
    assert_close,
    assert_one_hot,
    every_member,
    normal,
    pull,
    seeded,
    through_softmax,
)
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

import gapped
from gapped.gradient import jacobian_product
from gapped.lab.bench.timing import peak_memory

K = 5
SHAPES = [(K,), (1, K), (7, K), (2, 3, K), (2, 1, 4, K)]
every_shape = pytest.mark.parametrize("shape", SHAPES, ids=str)
every_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=str)
INF = math.inf


# Options that change the arithmetic, held to the same contract as the members themselves.
VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "nz-gst": ("gst", {"detach": False}),
    "nz-gst-expected": ("gst", {"detach": False, "gap": gapped.expected_gap}),
    "gst-expected": ("gst", {"gap": gapped.expected_gap}),
    "gumbel-rao-1": ("gumbel-rao", {"samples": 1}),
    "decoupled-warm": ("decoupled", {"tau_forward": 3.0}),
}
every_variant = pytest.mark.parametrize("name", [*MEMBERS, *VARIANTS])
every_soft_variant = pytest.mark.parametrize("name", [*SOFT, *VARIANTS])


def assert_alive(name: str, gradient: Tensor) -> None:
    """No row is without a gradient, but for NZ-GST: where all lie within the gap it moves none of them."""
    if not name.startswith("nz-gst"):
        assert (gradient.abs().amax(-1) > 1e-4).all(), "a row lost its gradient"


def make(name: str, **options: Any) -> Any:
    member, own = VARIANTS.get(name, (name, {}))
    return gapped.estimator(member, **{"tau": TAU, **own, **options})


# The registry


def test_the_registry_names_every_pathwise_estimator() -> None:
    assert set(FUNCTIONS) <= set(MEMBERS)
    assert gapped.estimators()["gst"] is gapped.GST
    assert gapped.estimators()["decoupled"] is gapped.DecoupledGumbelSoftmax


def test_the_registry_has_two_families() -> None:
    pathwise, score = gapped.estimators("pathwise"), gapped.estimators("score")
    assert {**pathwise, **score} == dict(gapped.estimators())
    assert set(pathwise) == set(MEMBERS)
    assert all(gapped.estimator(name).__class__ is kind for name, kind in score.items())
    with pytest.raises(gapped.GappedError, match="family: got 'both', expected one of pathwise, score"):
        gapped.estimators("both")  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("name", "known"), [("rloo", "one of samples"), ("muprop", "none"), ("rebar", "one of eta, tau")]
)
def test_an_unknown_option_lists_the_known_ones(name: str, known: str) -> None:
    with pytest.raises(gapped.GappedError, match=f"{name}: unknown option 'gap', expected {known}"):
        gapped.estimator(name, gap=1.0)


def test_the_registry_cannot_be_written_to_by_accident() -> None:
    with pytest.raises(TypeError):
        gapped.estimators()["gst"] = gapped.ReinMax  # type: ignore[index]


@every_member
def test_an_estimator_by_name_is_a_frozen_value(name: str) -> None:
    estimator = gapped.estimator(name, tau=TAU)
    assert type(estimator) is gapped.estimators()[name]
    assert estimator == gapped.estimators()[name](tau=TAU)
    assert estimator != gapped.estimator(name)
    assert {estimator, gapped.estimator(name, tau=TAU)} == {estimator}
    with pytest.raises(FrozenInstanceError):
        estimator.tau = 3.0


@every_member
def test_objects_are_hard_at_temperature_one_by_default(name: str) -> None:
    estimator = gapped.estimator(name)
    assert estimator.tau == 1.0
    assert estimator.hard is True


@pytest.mark.parametrize("name", FUNCTIONS)
def test_function_and_object_are_one(name: str) -> None:
    logits = normal(20, K)
    function, hard = FUNCTIONS[name], make(name)
    assert torch.equal(
        function(logits, TAU, True, generator=seeded()), hard.sample(logits, generator=seeded())
    )
    if name == "reinmax":
        assert_one_hot(function(logits, generator=seeded()))
        return
    soft = gapped.estimator(name, hard=False).sample(logits, generator=seeded())
    assert torch.equal(function(logits, generator=seeded()), soft)
    assert not torch.equal(soft, soft.round()), "the function is soft by default, as torch's is"


@pytest.mark.parametrize("name", FUNCTIONS)
def test_function_and_object_take_the_same_options(name: str) -> None:
    parameters = inspect.signature(FUNCTIONS[name]).parameters
    assert list(parameters)[:3] == ["logits", "tau", "hard"]
    keyword = {key for key, value in parameters.items() if value.kind is value.KEYWORD_ONLY}
    assert set(parameters) - keyword == {"logits", "tau", "hard"}
    own = {field.name for field in fields(gapped.estimators()[name])} - {"tau", "hard"}
    assert keyword == own | {"dim", "mask", "generator"}


# Values


@every_variant
@every_shape
@every_dtype
def test_hard_samples_are_exactly_one_hot(name: str, shape: tuple[int, ...], dtype: torch.dtype) -> None:
    logits = 3 * normal(*shape, dtype=dtype)
    sample = make(name).sample(logits, generator=seeded())
    assert sample.shape == logits.shape
    assert sample.dtype == dtype
    assert_one_hot(sample)


@every_variant
@every_dtype
def test_many_hard_samples_with_a_gradient_are_exactly_one_hot(name: str, dtype: torch.dtype) -> None:
    """D - h + h rounds to something else about once in a hundred rows."""
    logits = normal(3_000, 11, dtype=dtype)
    sample, _ = pull(make(name), logits, torch.ones_like(logits))
    assert_one_hot(sample)


@every_soft_variant
@every_shape
@every_dtype
def test_soft_samples_lie_on_the_simplex(name: str, shape: tuple[int, ...], dtype: torch.dtype) -> None:
    logits = normal(*shape, dtype=dtype)
    sample = make(name, hard=False).sample(logits, generator=seeded())
    assert sample.shape == logits.shape
    assert sample.dtype == dtype
    assert ((sample > 0) & (sample < 1)).all()
    assert_close(sample.sum(-1), torch.ones(shape[:-1], dtype=dtype), TOLERANCE[dtype])


@every_variant
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("hard", [True, False])
def test_half_precision_is_float32_rounded_once(name: str, dtype: torch.dtype, hard: bool) -> None:
    if name == "reinmax" and not hard:
        pytest.skip("ReinMax has no soft sample")
    logits, weight = normal(100, K, dtype=dtype), normal(100, K, seed=2, dtype=dtype)
    half, half_gradient = pull(make(name, hard=hard), logits, weight)
    full, full_gradient = pull(make(name, hard=hard), logits.float(), weight.float())
    assert torch.equal(half, full.to(dtype))
    assert half_gradient.dtype == dtype
    assert_close(half_gradient, full_gradient.to(dtype), 2 * torch.finfo(dtype).eps)


@every_variant
def test_the_input_is_left_as_it_was(name: str) -> None:
    logits, mask = normal(4, K), torch.tensor([True, True, False, True, True])
    before = logits.clone(), mask.clone()
    make(name).sample(logits, mask=mask, generator=seeded())
    assert torch.equal(logits, before[0])
    assert torch.equal(mask, before[1])


# Gradients


@every_variant
@every_shape
@every_dtype
def test_gradients_are_finite_and_sum_to_zero(name: str, shape: tuple[int, ...], dtype: torch.dtype) -> None:
    """Adding a constant to the logits changes nothing, so no gradient may point that way."""
    logits, weight = normal(*shape, dtype=dtype), normal(*shape, seed=2, dtype=dtype)
    _, gradient = pull(make(name), logits, weight)
    assert gradient.shape == logits.shape
    assert gradient.dtype == dtype
    assert torch.isfinite(gradient).all()
    assert_close(gradient.sum(-1), torch.zeros(shape[:-1], dtype=dtype), TOLERANCE[dtype])
    assert_alive(name, gradient)


@every_variant
def test_a_constant_upstream_gradient_is_annihilated(name: str) -> None:
    """`sum` sends a broadcast, zero-stride gradient; the sample always sums to one."""
    logits = normal(8, K).requires_grad_()
    make(name).sample(logits, generator=seeded()).sum().backward()
    assert_close(logits.grad, torch.zeros(8, K, dtype=torch.float64))


@every_variant
def test_rows_do_not_mix(name: str) -> None:
    logits, weight = normal(6, K), normal(6, K, seed=2)
    _, whole = pull(make(name), logits, weight)
    for row in range(6):
        alone = torch.zeros_like(weight)
        alone[row] = weight[row]
        _, gradient = pull(make(name), logits, alone)
        assert_close(gradient[row], whole[row])
        gradient[row] = 0
        assert (gradient == 0).all()


@every_soft_variant
@pytest.mark.parametrize("tau", [0.3, 1.0, TAU])
def test_hard_samples_carry_the_gradient_of_the_surrogate(name: str, tau: float) -> None:
    """D - sg(h) + h: for the same noise and the same gradient at the sample, hard and soft agree."""
    logits, weight = normal(30, K), normal(30, K, seed=2)
    _, hard = pull(make(name, tau=tau), logits, weight)
    _, soft = pull(make(name, tau=tau, hard=False), logits, weight)
    assert_close(hard, soft)


@every_variant
def test_a_gradient_is_asked_for_only_where_it_is_wanted(name: str) -> None:
    logits = normal(3, K)
    assert not make(name).sample(logits).requires_grad
    assert make(name).sample(logits.clone().requires_grad_()).requires_grad
    with torch.no_grad():
        assert not make(name).sample(logits.clone().requires_grad_()).requires_grad
    with torch.inference_mode():
        assert_one_hot(make(name).sample(logits))


@every_variant
def test_the_sample_does_not_depend_on_whether_a_gradient_is_wanted(name: str) -> None:
    logits = normal(100, K)
    with_gradient, _ = pull(make(name), logits, torch.ones_like(logits))
    assert torch.equal(make(name).sample(logits, generator=seeded()), with_gradient)


@every_variant
@every_dtype
@pytest.mark.parametrize("mirror", [1, -1])
def test_large_logits_give_finite_gradients(name: str, dtype: torch.dtype, mirror: int) -> None:
    """exp(1e4) is infinite in every dtype."""
    row = torch.tensor([1e4, -1e4, 0.0, 1e4, -1e4, 9.9e3]) * mirror
    logits = torch.stack([row, row.flip(0), torch.full((6,), 1e4), torch.full((6,), -1e4)]).to(dtype)
    sample, gradient = pull(make(name), logits, normal(4, 6, dtype=dtype))
    assert_one_hot(sample)
    assert torch.isfinite(gradient).all()
    # Equal logits are an ordinary row.
    assert_alive(name, gradient[2:])


@every_soft_variant
@pytest.mark.parametrize("tau", [1e-4, 1e4])
def test_extreme_temperatures_stay_on_the_simplex(name: str, tau: float) -> None:
    logits, weight = 30 * normal(50, K, dtype=torch.float32), normal(50, K, seed=2, dtype=torch.float32)
    soft, gradient = pull(make(name, tau=tau, hard=False), logits, weight)
    assert_close(soft.sum(-1), torch.ones(50), 1e-5)
    assert torch.isfinite(gradient).all()


# Masks


def masked_problem(batch: int = 40) -> tuple[Tensor, Tensor, Tensor]:
    logits, weight = normal(batch, K), normal(batch, K, seed=2)
    mask = torch.rand(batch, K, generator=seeded(3)) < 0.6
    mask[torch.arange(batch), torch.arange(batch) % K] = True
    return logits, weight, mask


@every_variant
def test_masked_categories_get_no_mass_and_no_gradient(name: str) -> None:
    logits, weight, mask = masked_problem()
    sample, gradient = pull(make(name), logits, weight, mask=mask)
    assert_one_hot(sample)
    assert (sample[~mask] == 0).all()
    assert (gradient[~mask] == 0).all()
    assert gradient[mask].abs().sum() > 0.1


@every_soft_variant
def test_masked_categories_get_no_soft_mass(name: str) -> None:
    logits, weight, mask = masked_problem()
    sample, gradient = pull(make(name, hard=False), logits, weight, mask=mask)
    assert (sample[~mask] == 0).all()
    assert (sample[mask] > 0).all()
    assert_close(sample.sum(-1), torch.ones(len(logits), dtype=torch.float64))
    assert (gradient[~mask] == 0).all()


@every_variant
@pytest.mark.parametrize("filling", [-INF, 1e4, -1e4, INF, math.nan])
def test_what_stands_behind_a_mask_does_not_matter(name: str, filling: float) -> None:
    logits, weight, mask = masked_problem()
    expected = pull(make(name), logits, weight, mask=mask)
    filled = logits.masked_fill(~mask, filling)
    for ours, theirs in zip(pull(make(name), filled, weight, mask=mask), expected, strict=True):
        assert_close(ours, theirs)


@every_variant
def test_minus_infinity_masks(name: str) -> None:
    logits, weight, mask = masked_problem()
    expected = pull(make(name), logits, weight, mask=mask)
    without = pull(make(name), logits.masked_fill(~mask, -INF), weight)
    for ours, theirs in zip(without, expected, strict=True):
        assert_close(ours, theirs)


@every_variant
def test_the_gradient_at_a_masked_category_does_not_leak(name: str) -> None:
    """A downstream cost may well be wild where nothing can be drawn."""
    logits, weight, mask = masked_problem()
    _, expected = pull(make(name), logits, weight, mask=mask)
    _, gradient = pull(make(name), logits, weight.masked_fill(~mask, 1e6), mask=mask)
    assert_close(gradient, expected)


@pytest.mark.parametrize("name", [*INVERSE_CDF, "nz-gst", "gst-expected", "gumbel-rao-1"])
def test_masking_equals_deleting(name: str) -> None:
    """Same uniforms, same draws; and the same gradients where no further noise is used."""
    logits, weight = normal(500, K), normal(500, K, seed=2)
    kept = torch.tensor([0, 1, 4])
    mask = torch.zeros(K, dtype=torch.bool)
    mask[kept] = True
    logits[:, ~mask] += 20
    sample, gradient = pull(make(name), logits, weight, mask=mask)
    deleted, gradient_deleted = pull(make(name), logits[:, kept], weight[:, kept])
    assert torch.equal(sample[:, kept], deleted)
    if not name.startswith("gumbel-rao"):
        assert_close(gradient[:, kept], gradient_deleted)


@every_variant
def test_masks_broadcast(name: str) -> None:
    logits, weight = normal(3, 4, K), normal(3, 4, K, seed=2)
    for shape in [(K,), (1, K), (4, K), (3, 1, K), (1, 1, K)]:
        mask = torch.rand(shape, generator=seeded(4)) < 0.5
        mask[..., 1] = True
        spread = mask.expand_as(logits).clone()
        for ours, theirs in zip(
            pull(make(name), logits, weight, mask=mask),
            pull(make(name), logits, weight, mask=spread),
            strict=True,
        ):
            assert torch.equal(ours, theirs)


@every_variant
def test_a_mask_that_allows_everything_changes_nothing(name: str) -> None:
    logits, weight = normal(6, K), normal(6, K, seed=2)
    allowed = torch.ones(K, dtype=torch.bool)
    for ours, theirs in zip(
        pull(make(name), logits, weight, mask=allowed), pull(make(name), logits, weight), strict=True
    ):
        assert_close(ours, theirs)


@every_variant
@every_dtype
@pytest.mark.parametrize("how", ["mask", "-inf"])
@pytest.mark.parametrize("hard", [True, False])
def test_a_row_with_nothing_allowed_is_zero(name: str, dtype: torch.dtype, how: str, hard: bool) -> None:
    if name == "reinmax" and not hard:
        pytest.skip("ReinMax has no soft sample")
    logits, weight = normal(3, K, dtype=dtype), normal(3, K, seed=2, dtype=dtype)
    mask = torch.ones(3, K, dtype=torch.bool)
    mask[1] = False
    if how == "mask":
        sample, gradient = pull(make(name, hard=hard), logits, weight, mask=mask)
    else:
        sample, gradient = pull(make(name, hard=hard), logits.masked_fill(~mask, -INF), weight)
    assert (sample[1] == 0).all()
    assert (gradient[1] == 0).all()
    assert_close(sample[[0, 2]].sum(-1), torch.ones(2, dtype=dtype), TOLERANCE[dtype])
    assert_alive(name, gradient[[0, 2]])


@every_variant
@every_dtype
@pytest.mark.parametrize("hard", [True, False])
def test_nan_and_infinite_logits_give_nan_rows(name: str, dtype: torch.dtype, hard: bool) -> None:
    if name == "reinmax" and not hard:
        pytest.skip("ReinMax has no soft sample")
    logits = normal(7, K, dtype=dtype)
    logits[1, 0] = math.nan
    logits[2] = math.nan
    logits[3, 0] = logits[4, -1] = INF
    logits[5, :2] = INF
    for result in pull(make(name, hard=hard), logits, normal(7, K, dtype=dtype, seed=1)):
        assert torch.isnan(result[1:6]).all()
        assert torch.isfinite(result[[0, 6]]).all()


@every_variant
def test_nan_beside_minus_infinity_is_still_nan(name: str) -> None:
    logits = torch.tensor([[math.nan, -INF, -INF], [0.5, -INF, math.nan]])
    assert torch.isnan(make(name).sample(logits, generator=seeded())).all()


# Shapes and axes


@every_variant
@pytest.mark.parametrize("dim", [0, 1, 2, -1, -2, -3])
@pytest.mark.parametrize("masked", [False, True])
def test_any_dim_equals_transposing(name: str, dim: int, masked: bool) -> None:
    logits, weight = normal(3, 4, 6), normal(3, 4, 6, seed=2)
    mask = torch.rand(3, 4, 6, generator=seeded(3)) < 0.7 if masked else None
    last = None if mask is None else mask.movedim(dim, -1).contiguous()
    sample, gradient = pull(make(name), logits, weight, dim=dim, mask=mask)
    expected = pull(
        make(name), logits.movedim(dim, -1).contiguous(), weight.movedim(dim, -1).contiguous(), mask=last
    )
    assert torch.equal(sample, expected[0].movedim(-1, dim))
    assert_close(gradient, expected[1].movedim(-1, dim))


@every_variant
@pytest.mark.parametrize("layout", ["transposed", "strided", "expanded"])
def test_memory_layout_does_not_matter(name: str, layout: str) -> None:
    logits = {
        "transposed": normal(K, 40).T,
        "strided": normal(80, 2 * K)[::2, 1::2],
        "expanded": normal(1, K).expand(40, K),
    }[layout]
    assert not logits.is_contiguous()
    weight = normal(K, 40, seed=2).T
    sample, gradient = pull(make(name), logits, weight)
    expected = pull(make(name), logits.contiguous(), weight.contiguous())
    assert torch.equal(sample, expected[0])
    assert_close(gradient, expected[1])
    assert len(sample.argmax(-1).unique()) > 1, "one draw was shared by all rows"


@every_variant
@pytest.mark.parametrize("shape", [(0, K), (2, 0, K), (0, 1)], ids=str)
def test_zero_rows(name: str, shape: tuple[int, ...]) -> None:
    sample, gradient = pull(make(name), torch.empty(shape), torch.empty(shape))
    assert sample.shape == gradient.shape == shape


@every_variant
@every_dtype
def test_one_category_is_certain(name: str, dtype: torch.dtype) -> None:
    sample, gradient = pull(make(name), normal(9, 1, dtype=dtype), normal(9, 1, seed=2, dtype=dtype))
    assert (sample == 1).all()
    assert_close(gradient, torch.zeros_like(gradient), 1e-6)


@every_variant
def test_a_row_alone_is_a_batch_of_one(name: str) -> None:
    logits, weight = normal(K), normal(K, seed=2)
    single, batch = pull(make(name), logits, weight), pull(make(name), logits[None], weight[None])
    assert torch.equal(single[0], batch[0][0])
    assert_close(single[1], batch[1][0])


# Randomness


@every_variant
def test_a_generator_decides_everything(name: str) -> None:
    logits = normal(200, K)
    torch.manual_seed(1)
    first = make(name).sample(logits, generator=seeded(7))
    torch.manual_seed(2)
    before = torch.get_rng_state()
    second = make(name).sample(logits, generator=seeded(7))
    assert torch.equal(first, second)
    assert torch.equal(torch.get_rng_state(), before), "the global generator was used"
    assert not torch.equal(first, make(name).sample(logits, generator=seeded(8)))


@every_variant
def test_a_generator_moves_on(name: str) -> None:
    generator = seeded()
    logits = normal(200, K)
    samples = [make(name).sample(logits, generator=generator) for _ in range(2)]
    assert not torch.equal(samples[0], samples[1])


@every_variant
def test_the_default_generator_is_used_otherwise(name: str) -> None:
    logits = normal(200, K)
    torch.manual_seed(3)
    first = make(name).sample(logits)
    assert not torch.equal(first, make(name).sample(logits))
    torch.manual_seed(3)
    assert torch.equal(first, make(name).sample(logits))


@every_variant
def test_the_backward_draws_nothing(name: str) -> None:
    generator = seeded()
    logits = normal(20, K).requires_grad_()
    sample = make(name).sample(logits, generator=generator)
    states = generator.get_state(), torch.get_rng_state()
    (sample * normal(20, K)).sum().backward()
    assert torch.equal(generator.get_state(), states[0])
    assert torch.equal(torch.get_rng_state(), states[1])


# Options that are tensors


def per_row(name: str, logits: Tensor, weight: Tensor, taus: Tensor, **how: Any) -> tuple[Tensor, Tensor]:
    """Row r as the whole batch has it when every row is given the temperature of row r."""
    runs = [pull(make(name, tau=float(tau)), logits, weight, **how) for tau in taus]
    return (
        torch.stack([run[0][row] for row, run in enumerate(runs)]),
        torch.stack([run[1][row] for row, run in enumerate(runs)]),
    )


@every_variant
def test_a_temperature_per_row_equals_a_loop(name: str) -> None:
    logits, weight = normal(4, 3, K), normal(4, 3, K, seed=2)
    taus = torch.tensor([1.0, 1.5, 2.0, 4.0], dtype=torch.float64)
    sample, gradient = pull(make(name, tau=taus[:, None]), logits, weight)
    expected = per_row(name, logits, weight, taus)
    assert torch.equal(sample, expected[0])
    assert_close(gradient, expected[1])


@every_soft_variant
def test_a_soft_temperature_per_row_equals_a_loop(name: str) -> None:
    logits = normal(4, K)
    taus = torch.tensor([0.1, 0.5, 1.0, 4.0], dtype=torch.float64)
    sample = make(name, tau=taus, hard=False).sample(logits, generator=seeded())
    for row, tau in enumerate(taus):
        alone = make(name, tau=float(tau), hard=False).sample(logits, generator=seeded())
        assert_close(sample[row], alone[row])


@every_variant
def test_a_temperature_per_row_follows_the_category_axis(name: str) -> None:
    """With dim=0 the temperature broadcasts against what is left, (4, 3)."""
    logits, weight = normal(K, 4, 3), normal(K, 4, 3, seed=2)
    taus = 1 + torch.rand(4, 3, generator=seeded(3), dtype=torch.float64)
    sample, gradient = pull(make(name, tau=taus), logits, weight, dim=0)
    expected = pull(make(name, tau=taus), logits.movedim(0, -1), weight.movedim(0, -1))
    assert torch.equal(sample, expected[0].movedim(-1, 0))
    assert_close(gradient, expected[1].movedim(-1, 0))


@every_variant
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("shape", [(), (1,), (20,), (3, 1), (3, 20)], ids=str)
def test_a_tensor_of_equal_temperatures_is_a_number(
    name: str, dtype: torch.dtype, shape: tuple[int, ...]
) -> None:
    logits, weight = normal(3, 20, K, dtype=dtype), normal(3, 20, K, seed=2, dtype=dtype)
    sample, gradient = pull(make(name, tau=torch.full(shape, TAU)), logits, weight)
    expected = pull(make(name), logits, weight)
    assert sample.dtype == gradient.dtype == dtype
    assert torch.equal(sample, expected[0])
    assert_close(gradient, expected[1], max(1e-12, 2 * torch.finfo(dtype).eps))


def test_a_gap_per_row_equals_a_loop() -> None:
    logits, weight = normal(4, 3, K), normal(4, 3, K, seed=2)
    gaps = torch.tensor([[0.0], [0.5], [1.0], [3.0]], dtype=torch.float64)
    sample, gradient = pull(gapped.GST(gap=gaps), logits, weight)
    for row in range(4):
        alone = pull(gapped.GST(gap=float(gaps[row])), logits, weight)
        assert torch.equal(sample[row], alone[0][row])
        assert_close(gradient[row], alone[1][row])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_an_integer_gap_is_the_same_number(dtype: torch.dtype) -> None:
    """It once selected the expected gap instead."""
    logits, weight = normal(50, K, dtype=dtype), normal(50, K, seed=2, dtype=dtype)
    as_int, as_float = (pull(gapped.GST(gap=gap), logits, weight) for gap in (1, 1.0))
    assert torch.equal(as_int[0], as_float[0])
    assert torch.equal(as_int[1], as_float[1])
    expected = pull(gapped.GST(gap=gapped.expected_gap), logits, weight)
    assert not torch.equal(as_int[1], expected[1])


@every_variant
def test_an_integer_temperature_is_the_same_number(name: str) -> None:
    logits, weight = normal(50, K), normal(50, K, seed=2)
    for ours, theirs in zip(
        pull(make(name, tau=2), logits, weight), pull(make(name, tau=2.0), logits, weight), strict=True
    ):
        assert torch.equal(ours, theirs)


def test_a_forward_temperature_per_row_equals_a_loop() -> None:
    logits, weight = normal(3, 200, K), normal(3, 200, K, seed=2)
    taus = torch.tensor([[0.2], [1.0], [5.0]], dtype=torch.float64)
    sample, gradient = pull(gapped.DecoupledGumbelSoftmax(tau_forward=taus), logits, weight)
    for row in range(3):
        alone = pull(gapped.DecoupledGumbelSoftmax(tau_forward=float(taus[row])), logits, weight)
        assert torch.equal(sample[row], alone[0][row])
        assert_close(gradient[row], alone[1][row])


# What the caller may do to tensors afterwards


@every_variant
@every_dtype
@pytest.mark.parametrize("hard", [True, False])
def test_sample_and_logits_may_be_changed_in_place(name: str, dtype: torch.dtype, hard: bool) -> None:
    """`z *= w` has the gradient of `z * w`, and logits that are overwritten later do not matter."""
    if name == "reinmax" and not hard:
        pytest.skip("ReinMax has no soft sample")
    logits, weight = normal(20, K, dtype=dtype), normal(20, K, seed=2, dtype=dtype)
    gone = normal(20, K, seed=3) > 0
    value, expected = pull(make(name, hard=hard), logits, (weight * weight).masked_fill(gone, 0.0))
    leaf = logits.clone().requires_grad_()
    rows = leaf * 1
    sample = make(name, hard=hard).sample(rows, generator=seeded())
    if not name.startswith("nz-gst"):  # whose perturbation is differentiated by torch, which needs the logits
        rows.zero_()
    sample *= weight
    sample.masked_fill_(gone, 0.0)
    assert torch.equal(sample, (value * weight).masked_fill(gone, 0.0))
    (gradient,) = torch.autograd.grad(sample, leaf, weight)
    assert_close(gradient, expected, 2 * TOLERANCE[dtype])


LEVELS = [(name, f.name) for name in MEMBERS for f in fields(gapped.estimators()[name]) if "tau" in f.name]


@pytest.mark.parametrize(("name", "level"), [*LEVELS, ("gst", "gap"), ("nz-gst", "gap")])
@pytest.mark.parametrize("use", USES)
def test_a_level_changed_after_the_draw_does_not_change_the_gradient(name: str, level: str, use: str) -> None:
    """Annealing in place between forward and backward: the gradient is that of what was drawn."""
    if name == "nz-gst" and use != "sample":
        pytest.skip("a choice has no path through its perturbation")
    gradients = []
    for factor in (1.0, 0.25):
        levels = torch.linspace(1.0, 2.0, 20, dtype=torch.float64)
        logits = normal(20, K).requires_grad_()
        result = USES[use](make(name, **{level: levels}), logits, generator=seeded())
        levels *= factor
        gradients.append(torch.autograd.grad(result.square().sum(), logits)[0])
    assert torch.equal(*gradients)


@every_member
@pytest.mark.parametrize("use", ["select", "gate"])
def test_logits_changed_after_a_choice_do_not_matter(name: str, use: str) -> None:
    gradients = []
    for factor in (1.0, 5.0):
        leaf = normal(20, K).requires_grad_()
        rows = leaf * 1
        choice = make(name).choose(rows, generator=seeded())
        rows *= factor
        result = choice.select(normal(K, 3)) if use == "select" else choice.gate()
        gradients.append(torch.autograd.grad(result.square().sum(), leaf)[0])
    assert torch.equal(*gradients)


class Stop(torch.autograd.Function):
    """Lets no gradient through."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> None:
        return None


@every_variant
def test_a_gradient_that_is_cut_off_is_none(name: str) -> None:
    logits = normal(2, K).requires_grad_()
    Stop.apply(make(name).sample(logits)).sum().backward()
    assert logits.grad is None or (logits.grad == 0).all()


@every_member
def test_the_default_device_does_not_matter(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gapped.gradient.BLOCK", 4 * K)
    monkeypatch.setattr("gapped.pathwise.BLOCK", 4 * K)
    logits, weight = normal(30, K).requires_grad_(), normal(30, K, seed=2)
    with torch.device("meta"):
        choice = make(name).choose(logits)
        for result, grad in ((make(name).sample(logits), weight), (choice.gate(), weight[:, 0])):
            (gradient,) = torch.autograd.grad(result, logits, grad)
            assert result.device.type == gradient.device.type == choice.index.device.type == "cpu"


@every_member
def test_fake_tensors(name: str) -> None:
    with FakeTensorMode():
        logits = torch.zeros(4, K, requires_grad=True)
        sample = make(name).sample(logits)
        assert torch.autograd.grad(sample.sum(), logits)[0].shape == sample.shape == (4, K)


@every_member
@pytest.mark.parametrize("use", ["sample", "choose"])
@pytest.mark.parametrize("reentrant", [True, False])
def test_what_is_random_afterwards_does_not_depend_on_the_gradient(
    name: str, use: str, reentrant: bool
) -> None:
    """Activation checkpointing repeats the forward pass: dropout after the sample must drop the same."""
    estimator, table = make(name), normal(K, 3)

    def layer(logits: Tensor) -> Tensor:
        used = estimator.sample(logits) @ table if use == "sample" else estimator.choose(logits).select(table)
        return used * torch.nn.functional.dropout(torch.ones_like(used))

    def plain(run: Any, *rest: Any, **options: Any) -> Tensor:
        return run(*rest)

    gradients = []
    for wrapper in (plain, torch.utils.checkpoint.checkpoint):
        logits = normal(50, K).requires_grad_()
        torch.manual_seed(0)
        output = wrapper(layer, logits, use_reentrant=reentrant)
        gradients.append(torch.autograd.grad(output, logits, normal(50, 3, seed=2)) if not reentrant else ())
        if reentrant:
            output.backward(normal(50, 3, seed=2))
            gradients[-1] = (logits.grad,)
    assert torch.equal(gradients[0][0], gradients[1][0])


# Large inputs, in blocks


@every_variant
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=str)
def test_blocks_of_rows_change_nothing(
    name: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where noise depends on how it is asked for, the gradient must be that of the sample's surrogate."""
    taus = torch.linspace(1, 2, 40, dtype=torch.float64).view(4, 10)
    logits, weight = normal(3, 4, 10, K, dtype=dtype), normal(3, 4, 10, K, seed=2, dtype=dtype)
    member = VARIANTS.get(name, (name, {}))[0]
    results = []
    for block in (None, 4 * K + 2):
        if block is not None:
            monkeypatch.setattr("gapped.gradient.BLOCK", block)
            monkeypatch.setattr("gapped.pathwise.BLOCK", block)
        results.append(pull(make(name, tau=taus), logits, weight))
    (sample, gradient), (in_blocks, gradient_in_blocks) = results
    assert_one_hot(in_blocks)
    if member in INVERSE_CDF and member != "gumbel-rao":
        assert torch.equal(sample, in_blocks)
        assert torch.equal(gradient, gradient_in_blocks)
    if name in ("gumbel-softmax", "decoupled", "decoupled-warm", "gumbel-rao-1"):
        soft, gradient = pull(make(name, tau=taus, hard=False), logits, weight)
        expected = through_softmax(soft.double(), weight.double()) / taus.unsqueeze(-1)
        assert_close(gradient, expected.to(dtype), TOLERANCE[dtype])


@every_member
def test_a_choice_in_blocks_is_the_sample_in_blocks(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its index, and no one-hot vector beside it."""
    monkeypatch.setattr("gapped.pathwise.BLOCK", 4 * K)
    logits = normal(30, K)
    sample = make(name).sample(logits, generator=seeded())
    assert torch.equal(make(name).choose(logits, generator=seeded()).index, sample.argmax(-1))
    assert make(name).outcome(logits, seeded(), False, dense=False).value.numel() == 0


@every_member
def test_one_long_row(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    logits, weight = normal(50), normal(50, seed=2)
    expected = pull(make(name), logits, weight)
    monkeypatch.setattr("gapped.gradient.BLOCK", 40)
    monkeypatch.setattr("gapped.pathwise.BLOCK", 40)
    for ours, theirs in zip(pull(make(name), logits, weight), expected, strict=True):
        assert torch.equal(ours, theirs)


@pytest.mark.parametrize("weights", [0.5, (2.0, -0.5), normal(6, 1)], ids=["number", "tuple", "tensor"])
def test_the_backward_in_blocks_is_the_backward(weights: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    points, grad = torch.softmax(normal(2, 6, K), -1), normal(6, K, seed=2)
    expected = jacobian_product(grad, points, weights, grad)
    monkeypatch.setattr("gapped.gradient.BLOCK", 4 * K)
    assert torch.equal(jacobian_product(grad, points, weights, grad), expected)


@pytest.mark.parametrize("name", [name for name in MEMBERS if name not in ("reinmax", "gumbel-rao")])
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
