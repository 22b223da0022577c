"""One contract for every form of discrete choice under every registered estimator: see `forms.FORMS`.

Samples are compared under equal generator seeds, so that almost everything here is exact.
"""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.utils.checkpoint
from conftest import DTYPES, SOFT, TOLERANCE, assert_close, assert_equal, normal, seeded
from conftest import pulled as weighed
from forms import COMPILED, FORMS, SEVERAL, every_form
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

import gapped

SHAPES = [(5,), (7, 5), (2, 1, 4, 5), (2, 0, 5), (0, 1), (3, 1)]
every_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=str)


def pulled(form: str, logits: Tensor, weight: Tensor, seed: int = 0, **how: Any) -> tuple[Tensor, Tensor]:
    """A sample, and the gradient of the logits for the gradient `weight` at the sample."""
    leaf = logits.detach().requires_grad_()
    sample = FORMS[form].draw(leaf, generator=seeded(seed), **how)
    return sample.detach(), torch.autograd.grad(sample, leaf, weight)[0]


def problem(*shape: int, dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor]:
    return normal(*shape, dtype=dtype), normal(*shape, seed=2, dtype=dtype)


def assert_valid(form: str, sample: Tensor) -> None:
    """Zeros and ones, exactly, or numbers in between; with the right sum."""
    hard, total = FORMS[form].hard, FORMS[form].total
    if hard:
        assert ((sample == 0) | (sample == 1)).all()
    else:
        assert ((sample >= 0) & (sample <= 1)).all()
    if total is not None:
        expected = torch.full(sample.shape[:-1], float(min(total, sample.shape[-1])), dtype=sample.dtype)
        assert_close(sample.sum(-1), expected, 0.0 if hard else TOLERANCE[sample.dtype])


def assert_alive(form: str, gradient: Tensor) -> None:
    """Every row has a gradient, which does not point where all logits move together."""
    assert gradient.isfinite().all()
    if FORMS[form].total is not None:
        nothing = torch.zeros(gradient.shape[:-1], dtype=gradient.dtype)
        assert_close(gradient.sum(-1), nothing, TOLERANCE[gradient.dtype])
    if gradient.shape[-1] == 1 and FORMS[form].total:
        assert_close(gradient, torch.zeros_like(gradient), 1e-6)
    elif FORMS[form].may_be_still:
        assert gradient.numel() < 20 or (gradient != 0).any()
    else:
        assert (gradient.abs().amax(-1) > 1e-4).all(), "a row lost its gradient"


@every_form
@every_dtype
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_samples_and_gradients(form: str, dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    logits, weight = problem(*shape, dtype=dtype)
    copy = logits.clone()
    sample, gradient = pulled(form, logits, weight)
    assert sample.shape == gradient.shape == shape
    assert sample.dtype == gradient.dtype == dtype
    assert_valid(form, sample)
    assert_alive(form, gradient)
    assert not FORMS[form].draw(logits).requires_grad
    with torch.no_grad():
        without = FORMS[form].draw(logits.requires_grad_(), generator=seeded())
    assert not without.requires_grad
    assert torch.equal(without, sample), "the sample depends on whether a gradient is wanted"
    assert torch.equal(logits, copy)
    with torch.inference_mode():
        assert_valid(form, FORMS[form].draw(copy))


@every_form
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_half_precision_is_float32_rounded_once(form: str, dtype: torch.dtype) -> None:
    logits, weight = problem(100, 5, dtype=dtype)
    half, half_gradient = pulled(form, logits, weight)
    full, full_gradient = pulled(form, logits.float(), weight.float())
    assert torch.equal(half, full.to(dtype))
    assert_close(half_gradient, full_gradient.to(dtype), 2 * torch.finfo(dtype).eps)


@every_form
def test_what_is_masked_is_zero_and_gets_nothing(form: str) -> None:
    """Whatever stands there, and whatever gradient comes; the others keep a sample and a gradient."""
    logits, weight = problem(40, 5)
    mask = torch.rand(40, 5, generator=seeded(3)) < 0.6
    mask[:, :2] = True
    sample, gradient = pulled(form, logits, weight, mask=mask)
    assert (sample[~mask] == 0).all()
    assert_valid(form, sample)
    assert (gradient[~mask] == 0).all()
    assert gradient[mask].abs().sum() > 0.1
    for filling in (-torch.inf, 1e4, -1e4, torch.inf, torch.nan):
        poisoned, wild = logits.masked_fill(~mask, filling), weight.masked_fill(~mask, 1e6)
        assert_equal(pulled(form, poisoned, wild, mask=mask), (sample, gradient))
    if FORMS[form].total is not None:  # a gate of infinite odds is certain, and exists
        assert_equal(pulled(form, logits.masked_fill(~mask, -torch.inf), weight), (sample, gradient))


@pytest.mark.parametrize("form", [form for form in FORMS if FORMS[form].total and form != "choices-weights"])
@every_dtype
def test_rows_without_a_law(form: str, dtype: torch.dtype) -> None:
    """A row without categories is zero with a gradient of zero; a NaN or +inf makes its row NaN."""
    logits, weight = problem(10, 5, dtype=dtype)
    mask = torch.ones(10, 5, dtype=torch.bool)
    mask[1] = False
    logits[2, 0], logits[3], logits[4, 0], logits[5, -1] = torch.nan, torch.nan, torch.inf, torch.inf
    logits[6, :2], logits[7, 1:], logits[8, 1] = torch.inf, -torch.inf, -torch.inf
    logits[7, 0] = logits[8, -1] = torch.nan
    results = pulled(form, logits, weight, mask=mask)
    by_logits = pulled(form, logits.masked_fill(~mask, -torch.inf), weight)
    for each, same in zip(results, by_logits, strict=True):
        assert not each[1].any()
        assert each[2:9].isnan().all()
        assert each[[0, 9]].isfinite().all()
        torch.testing.assert_close(each, same, rtol=0, atol=0, equal_nan=True)
    assert_valid(form, results[0][[0, 9]])


@every_form
@every_dtype
@pytest.mark.parametrize("extreme", [1e4, -1e4])
def test_large_logits_give_finite_gradients(form: str, extreme: float, dtype: torch.dtype) -> None:
    """exp(1e4) is infinite in every dtype."""
    rows = [[extreme, 0.0, -extreme, 0.99 * extreme], [extreme] * 4, [0.0] * 4]
    sample, gradient = pulled(form, torch.tensor(rows).to(dtype), normal(3, 4, seed=2, dtype=dtype))
    assert_valid(form, sample)
    assert gradient.isfinite().all()
    # Equal logits are an ordinary row.
    assert FORMS[form].may_be_still or (gradient[2].abs().amax(-1) > 1e-4).all()


@every_form
def test_the_generator_decides_and_the_backward_draws_nothing(form: str) -> None:
    """The given one, else torch's default."""
    logits, generator = normal(50, 5).requires_grad_(), seeded(7)
    default = torch.get_rng_state()
    first = FORMS[form].draw(logits, generator=generator)
    state = generator.get_state()
    first.sum().backward()
    assert torch.equal(generator.get_state(), state)
    with torch.no_grad():
        generator = seeded(7)
        FORMS[form].draw(logits, generator=generator)
    assert torch.equal(generator.get_state(), state), "the state depends on whether a gradient is wanted"
    assert torch.equal(torch.get_rng_state(), default)
    second = FORMS[form].draw(logits, generator=generator)
    assert torch.equal(first, second) != FORMS[form].is_random
    own = FORMS[form].draw(logits)
    assert torch.equal(own, FORMS[form].draw(logits)) != FORMS[form].is_random
    torch.set_rng_state(default)
    assert torch.equal(own, FORMS[form].draw(logits))


LAYOUTS = [
    (form, layout)
    for form in FORMS
    for layout in ("transposed", "strided", "expanded")
    # The noise of gates lies in memory as their logits do.
    if layout != "transposed" or FORMS[form].total is not None
]


@pytest.mark.parametrize(("form", "layout"), LAYOUTS)
def test_memory_layout_does_not_matter(form: str, layout: str) -> None:
    logits = {
        "transposed": normal(5, 40).T,
        "strided": normal(80, 10)[::2, 1::2],
        "expanded": normal(1, 5).expand(40, 5),
    }[layout]
    assert not logits.is_contiguous()
    weight = normal(5, 40, seed=2).T
    sample, gradient = pulled(form, logits, weight)
    expected = pulled(form, logits.contiguous(), weight.contiguous())
    assert_close(sample, expected[0], 0.0 if FORMS[form].hard else 1e-12)
    assert_close(gradient, expected[1])
    rows = sample.unique(dim=0)
    assert len(rows) > 1 or not FORMS[form].is_random, "one draw was shared by all rows"


@every_form
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=str)
def test_sample_and_logits_may_be_changed_in_place(form: str, dtype: torch.dtype) -> None:
    """`z *= w` has the gradient of `z * w`, and logits that are overwritten later do not matter."""
    logits, weight = problem(40, 5, dtype=dtype)
    gone = normal(40, 5, seed=3) > 0
    value, expected = pulled(form, logits, (weight * weight).masked_fill(gone, 0.0))
    leaf = logits.clone().requires_grad_()
    rows = leaf * 1
    sample = FORMS[form].draw(rows, generator=seeded())
    # These need the logits, and notice: torch differentiates NZ-GST, and choices keep nothing else.
    if not form.startswith(("nz-gst", "choices")):
        rows *= 5
    sample *= weight
    sample.masked_fill_(gone, 0.0)
    assert torch.equal(sample, (value * weight).masked_fill(gone, 0.0))
    (gradient,) = torch.autograd.grad(sample, leaf, weight)
    assert_close(gradient, expected, 2 * TOLERANCE[dtype])


@every_form
@pytest.mark.parametrize("linear", [True, False])
def test_differentiating_twice_is_refused(form: str, linear: bool) -> None:
    logits = normal(4, 5).requires_grad_()
    sample = FORMS[form].draw(logits, generator=seeded()) * normal(4, 5)
    cost = sample.sum() if linear else sample.square().sum()
    (gradient,) = torch.autograd.grad(cost, logits, create_graph=True)
    with pytest.raises(RuntimeError, match="twice"):
        (gradient.square().sum() + logits.sum()).backward()


@every_form
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_autocast_changes_nothing(form: str, dtype: torch.dtype) -> None:
    logits, weight = problem(40, 5, dtype=dtype)
    expected = pulled(form, logits, weight)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        sample, gradient = pulled(form, logits, weight)
    assert sample.dtype == gradient.dtype == dtype
    assert torch.equal(sample, expected[0])
    assert_close(gradient, expected[1], 1e-6)


@every_form
def test_vmap_and_gradients_per_sample(form: str) -> None:
    """vmap(grad) draws for each entry by itself, and gives the gradient that the draw has."""
    logits, weight = problem(60, 5)

    def cost(row: Tensor, g: Tensor, allowed: Tensor) -> tuple[Tensor, Tensor]:
        sample = FORMS[form].draw(row, mask=allowed)
        return (sample * g).sum(), sample.detach()

    transformed = torch.func.vmap(torch.func.grad(cost, has_aux=True), randomness="different")
    mask = torch.tensor([True, True, False, True, True]).expand(60, 5)
    gradient, sample = transformed(logits, weight, mask)
    assert_valid(form, sample)
    assert (sample[:, 2] == 0).all()
    assert (gradient[:, 2] == 0).all()
    assert gradient.isfinite().all()
    assert (gradient != 0).any()
    outside = torch.func.vmap(
        lambda row, allowed: FORMS[form].draw(row, mask=allowed), randomness="different"
    )
    torch.manual_seed(0)
    expected = transformed(logits, weight, mask)[0]
    torch.manual_seed(0)
    leaf = logits.clone().requires_grad_()
    assert_close(torch.autograd.grad(outside(leaf, mask), leaf, weight)[0], expected, 1e-6)
    same = transformed(logits[:1].expand(60, 5), weight, mask)[1]
    assert (len(same.unique(dim=0)) > 1) == FORMS[form].is_random


@pytest.mark.slow_if(lambda form: form.startswith(("mve", "decoupled", "reinmax-rao", "gumbel-rao")))
@pytest.mark.parametrize("form", COMPILED)
@pytest.mark.filterwarnings("ignore:.*should not be instantiated", "ignore:.*torch.jit.* is deprecated")
def test_it_compiles_to_one_graph(form: str) -> None:
    """Under the same seed, with a mask, the compiled program gives what the eager one gives."""
    mask = torch.tensor([True, False, True, True, True])

    def program(logits: Tensor) -> Tensor:
        return FORMS[form].draw(logits, mask=mask)

    torch.compiler.reset()
    runs = (program, torch.compile(program, backend="aot_eager", fullgraph=True))
    (eager, expected), (compiled, gradient) = (weighed(run, normal(20, 5)) for run in runs)
    torch.compiler.reset()
    if FORMS[form].has_own_noise:
        assert_valid(form, compiled)
        assert ((gradient != 0) == (expected != 0)).all()
    else:
        assert_close(compiled, eager, 1e-12)
        assert_close(gradient, expected)


@pytest.mark.parametrize("form", [form for form in FORMS if form not in SEVERAL])
def test_nothing_is_copied_from_the_host(form: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A CUDA graph could not capture a tensor made of a list of numbers."""
    logits, weight = problem(4, 5)
    for maker in ("tensor", "as_tensor", "from_numpy"):
        monkeypatch.delattr(torch, maker)
    pulled(form, logits, weight)


@every_form
@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_tensors_without_values(form: str, device: str) -> None:
    with FakeTensorMode() if device == "cpu" else nullcontext():
        logits = torch.empty(4, 5, requires_grad=True, device=device)
        sample = FORMS[form].draw(logits)
        assert sample.device.type == device
        assert torch.autograd.grad(sample.sum(), logits)[0].shape == sample.shape == (4, 5)


@pytest.mark.parametrize("name", SOFT)
def test_a_mixture_without_values(name: str) -> None:
    logits, table = (torch.empty(*shape, device="meta", requires_grad=True) for shape in ((4, 5), (5, 3)))
    value = gapped.estimator(name).mix(logits, table)
    assert value.is_meta
    assert torch.autograd.grad(value.sum(), logits)[0].shape == (4, 5)
