"""Bad costs, arguments and options of `gapped.expectation` and its estimators: one line each."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
import torch
from conftest import SOFT, normal, seeded
from score_problems import Sum, square, through_argmax
from torch import Tensor
from torch.utils.checkpoint import checkpoint

import gapped
from gapped import GappedError


def only_a_parameter(z: Tensor) -> Tensor:
    return torch.zeros(z.shape[:2]).double() + torch.ones((), dtype=torch.float64, requires_grad=True)


ERRORS: dict[str, tuple[Any, Any, str]] = {
    "variables not summed away": (lambda z: z.sum(-2), gapped.RLOO(), r"f: got costs of shape \(4, 5, 3\)"),
    "no sample axis": (
        lambda z: square(z).mean(0),
        gapped.RLOO(),
        r"f: got costs of shape \(5,\), expected .*n = 4",
    ),
    "no axis": (lambda z: square(z).sum(), gapped.RLOO(), r"f: got costs of shape \(\)"),
    "pathwise shape": (
        lambda z: square(z).sum(0),
        gapped.GST(),
        r"f: got costs of shape \(5,\), expected .*n = 1",
    ),
    "a number": (lambda z: 1.0, gapped.Reinforce(), "f: got a result of type float"),
    "integers": (lambda z: square(z).long(), gapped.Reinforce(), "f: got costs of dtype torch.int64"),
    "elsewhere": (
        lambda z: square(z).to("meta"),
        gapped.Reinforce(),
        "f: got costs on meta, expected .*cpu",
    ),
    "nan": (lambda z: square(z) * torch.nan, gapped.Reinforce(), "f: got costs that are not all finite"),
    "inf": (lambda z: square(z) / 0.0, gapped.DisARMTree(), "f: got costs that are not all finite"),
    "pathwise nan": (lambda z: square(z) * torch.nan, gapped.GST(), "f: got costs that are not all finite"),
    "muprop": (through_argmax, gapped.MuProp(), "f: got costs without a derivative"),
    "muprop, parameter": (only_a_parameter, gapped.MuProp(), "f: got costs without a derivative"),
    "rebar": (through_argmax, gapped.REBAR(), "f: got costs without a derivative"),
    "rebar, parameter": (only_a_parameter, gapped.REBAR(), "f: got costs without a derivative"),
    "double-cv": (through_argmax, gapped.DoubleCV(), "f: got costs without a derivative"),
    "double-cv, parameter": (only_a_parameter, gapped.DoubleCV(), "f: got costs without a derivative"),
    "double-cv alpha": (square, gapped.DoubleCV(alpha=torch.ones(4)), r"alpha: got a tensor of shape \(4,\)"),
    "relax": (through_argmax, gapped.RELAX(Sum(1)), "f: got costs without a derivative"),
    "pathwise": (through_argmax, gapped.GST(), "f: got costs without a derivative.*gapped.RLOO"),
    "not a function": (3.0, gapped.RLOO(), "f: got an object of type float"),
    "disarm": (square, gapped.DisARM(), "logits: got 3 categories for DisARM, expected two"),
    "a name": (square, "rlo", r"estimator: got 'rlo'; did you mean rloo\? Expected one of "),
    "a number for an estimator": (square, 3, "estimator: got an object of type int, expected an estimator"),
    "a class": (square, gapped.RLOO, "estimator: got an object of type ABCMeta"),
    "relax network": (square, gapped.RELAX(torch.nn.Identity()), "network: got a result of shape"),
    "rebar eta": (square, gapped.REBAR(eta=torch.ones(4)), r"eta: got a tensor of shape \(4,\)"),
    "nvil without context": (
        square,
        gapped.NVIL(torch.nn.Identity()),
        "context: got None, expected the tensor",
    ),
}


@pytest.mark.parametrize("case", ERRORS)
def test_errors_are_one_line(case: str) -> None:
    f, estimator, message = ERRORS[case]
    with pytest.raises(GappedError, match=message) as caught:
        gapped.expectation(f, normal(5, 2, 3).requires_grad_(), estimator)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("name", SOFT)
def test_soft_samples_have_no_expected_cost(name: str) -> None:
    message = r"estimator: got \w+ with hard=False, expected hard=True"
    with pytest.raises(GappedError, match=message):
        gapped.expectation(square, normal(5, 2, 3), gapped.estimator(name, hard=False))


def test_errors_of_arguments() -> None:
    logits = normal(5, 2, 3)
    for how in (
        {"mask": torch.ones(4, dtype=torch.bool)},
        {"generator": 3},
        {"context": torch.ones(5)},
    ):
        for estimator in (gapped.RLOO(), gapped.GST()):
            with pytest.raises(GappedError, match=next(iter(how))):
                gapped.expectation(square, logits, estimator, **how)
    with pytest.raises(GappedError, match="logits"):
        gapped.expectation(square, [0.0], gapped.RLOO())  # type: ignore[arg-type]
    with pytest.raises(GappedError, match=r"Exact: got 9 variables of 4 categories, 262,144 combinations"):
        gapped.expectation(square, normal(1, 9, 4), gapped.Exact())


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: gapped.RLOO(1), "samples: got 1, expected an integer of at least 2"),
        (lambda: gapped.RLOO(2.0), "samples"),
        (lambda: gapped.Reinforce("leave-one-out"), "samples: got 1"),
        (
            lambda: gapped.Reinforce("running-mean"),
            r"baseline: got 'running-mean', .*gapped.NVIL\(scale=False\)",
        ),
        (lambda: gapped.Reinforce(samples=True), "samples: got True"),
        (lambda: gapped.DisARMSticks("sorted"), "order: got 'sorted'"),
        (lambda: gapped.NVIL(0), "network: got 0"),
        (lambda: gapped.NVIL(decay=1.0), "decay: got 1.0"),
        (lambda: gapped.NVIL(scale=1), "scale: got 1"),
        (lambda: gapped.DoubleCV(1), "samples: got 1, expected an integer of at least 2"),
        (lambda: gapped.DoubleCV(alpha=torch.nan), "alpha: got nan"),
        (lambda: gapped.REBAR(tau=0.0), "tau: got 0.0"),
        (lambda: gapped.REBAR(eta=float("inf")), "eta: got inf"),
        (lambda: gapped.REBAR(eta="1"), "eta: got '1'"),
        (lambda: gapped.REBAR(eta=torch.tensor([1.0, torch.nan])), "eta: got tensor"),
        (lambda: gapped.REBAR(eta=torch.ones((), requires_grad=True)), "eta: got tensor"),
        (lambda: gapped.RELAX(square), "network"),
    ],
)
def test_options_are_checked(make: Callable[[], Any], message: str) -> None:
    with pytest.raises(GappedError, match=message):
        make()


@pytest.mark.parametrize("eta", [-1, 3, np.float32(-0.5), torch.tensor(2), torch.tensor([0.5, -2.0])])
def test_any_finite_factor_of_the_control_variate(eta: Any) -> None:
    estimator = gapped.REBAR(eta=eta)
    assert estimator.eta.dtype == torch.float32
    assert estimator.eta.tolist() == torch.as_tensor(eta).tolist()


def test_sizes_that_an_estimator_is_not_made_for() -> None:
    gapped.Exact().check_size(2, 256)
    gapped.ARSM().check_size(100, 16)
    gapped.RLOO().check_size(100, 1000)
    with pytest.raises(GappedError, match="17 categories for ARSM, expected at most 16"):
        gapped.ARSM().check_size(1, 17)
    with pytest.raises(GappedError, match="30 variables of 10 categories, 1e\\+30 combinations"):
        gapped.Exact().check_size(30, 10)


@pytest.mark.parametrize("estimator", [gapped.RLOO(2), gapped.GST(), gapped.Exact()], ids=repr)
def test_broken_logits_are_not_called_broken_costs(estimator: Any) -> None:
    logits = torch.tensor([[0.0, torch.nan], [0.0, 1.0]])
    with pytest.raises(GappedError, match="logits: got rows with NaN"):
        gapped.expectation(lambda z: z[..., 0] ** 2, logits, estimator, generator=seeded())


PATHWISE = sorted(gapped.estimators("pathwise"))
WEIGHT = torch.ones((), dtype=torch.float64, requires_grad=True)
FLAT: dict[str, Callable[[Tensor], Tensor]] = {
    "ignores the sample": lambda z: WEIGHT * torch.ones_like(z.detach()).flatten(2).sum(-1),
    "detaches": lambda z: WEIGHT * z.detach().square().flatten(2).sum(-1),
    "compares": lambda z: (WEIGHT * (z > 0.5)).flatten(2).sum(-1),
    "writes first": lambda z: WEIGHT * z.mul_(2.0).detach().flatten(2).sum(-1),
}


@pytest.mark.parametrize("gates", [False, True])
@pytest.mark.parametrize("name", PATHWISE)
@pytest.mark.parametrize("case", FLAT)
def test_a_pathwise_estimator_says_where_a_cost_with_parameters_is_flat(
    case: str, name: str, gates: bool
) -> None:
    logits, f = normal(5, 2, 3).requires_grad_(), FLAT[case]
    with pytest.raises(GappedError, match=r"f: got costs without a derivative.*gapped\.RLOO"):
        gapped.expectation(f, logits, name, gates=gates)
    # Without a gradient to estimate, nothing is missing.
    assert gapped.expectation(f, logits.detach(), name, gates=gates).requires_grad

    def transformed(logits: Tensor) -> Tensor:
        return gapped.expectation(lambda z: f(1 * z), logits, name, gates=gates).sum()

    with pytest.raises(GappedError, match="f: got costs without a derivative"):
        torch.func.grad(transformed)(logits.detach())
    with pytest.raises(GappedError, match="f: got costs without a derivative"):
        torch.func.vmap(torch.func.grad(transformed), randomness="different")(
            logits.detach().expand(4, 5, 2, 3)
        )


@pytest.mark.parametrize("gates", [False, True])
@pytest.mark.parametrize("name", PATHWISE)
def test_a_cost_with_parameters_that_uses_its_sample_is_differentiated(name: str, gates: bool) -> None:
    """Also where it writes into the sample, works in another thread, or takes the sample through a layer."""

    def in_a_thread(z: Tensor) -> Tensor:
        with ThreadPoolExecutor(1) as pool:
            return pool.submit(lambda: WEIGHT * z.square().flatten(2).sum(-1)).result()

    costs: list[Callable[[Tensor], Tensor]] = [
        in_a_thread,
        lambda z: WEIGHT * z.mul_(2.0).flatten(2).sum(-1),
        lambda z: (z.detach() * WEIGHT + z).flatten(2).sum(-1),
        lambda z: checkpoint(lambda z: WEIGHT * z.square().flatten(2).sum(-1), z, use_reentrant=True),
    ]
    for f in costs:
        logits = normal(5, 2, 3).requires_grad_()
        gapped.expectation(f, logits, name, gates=gates).sum().backward()
        assert logits.grad is not None
        assert logits.grad.any()


@pytest.mark.parametrize("case", FLAT)
@pytest.mark.parametrize(
    "estimator", [gapped.Reinforce(), gapped.RLOO(), gapped.ARSM(), gapped.Exact()], ids=repr
)
def test_a_score_function_estimator_takes_a_flat_cost(estimator: Any, case: str) -> None:
    logits = normal(5, 2, 3).requires_grad_()
    value = gapped.expectation(FLAT[case], logits, estimator).sum()
    for_logits, for_weight = torch.autograd.grad(value, (logits, WEIGHT))
    assert for_weight.isfinite()
    assert for_logits.isfinite().all()


@pytest.mark.parametrize("name", sorted(set(gapped.estimators()) - {"disarm"}))
def test_the_default_dtype_changes_no_gradient(name: str) -> None:
    weight, results = torch.arange(6.0), []
    for dtype in (torch.float32, torch.bfloat16):
        estimator = gapped.RELAX(Sum(1)) if name == "relax" else gapped.estimator(name)
        logits = normal(5, 2, 6, dtype=torch.float32).requires_grad_()
        torch.set_default_dtype(dtype)
        try:
            cost = lambda z: ((z @ weight).sum(-1) + 1) ** 2  # noqa: E731
            gapped.expectation(cost, logits, estimator, generator=seeded()).sum().backward()
        finally:
            torch.set_default_dtype(torch.float32)
        results.append(logits.grad)
    assert torch.equal(*results)


@pytest.mark.parametrize("name", ["nvil", "rebar", "rodeo", "double-cv"])
def test_the_text_of_an_estimator_that_learns_makes_a_new_one(name: str) -> None:
    kind = gapped.estimators()[name].__name__
    with pytest.warns(
        UserWarning, match=rf"the text '{name}' makes a new {kind} at every call.*gapped\.{kind}\("
    ):
        gapped.expectation(square, normal(5, 2, 3).requires_grad_(), name)


@pytest.mark.parametrize("name", sorted(set(gapped.estimators("score")) - {"disarm"}))
def test_other_texts_and_all_objects_say_nothing(name: str) -> None:
    estimator: Any = gapped.RELAX(Sum(1)) if name == "relax" else gapped.estimator(name)
    gapped.expectation(square, normal(5, 2, 3).requires_grad_(), estimator)
    if not isinstance(estimator, torch.nn.Module):
        gapped.expectation(square, normal(5, 2, 3).requires_grad_(), name)
