"""Bad input is refused at once, by one error that names the argument, what came and what is accepted."""

from __future__ import annotations

import math
import re
from typing import Any

import numpy as np
import pytest
import torch
from conftest import FUNCTIONS, MEMBERS, SOFT, every_member, normal, seeded

import gapped
from gapped import GappedError

LOGITS = normal(4, 3)
NAN, INF = math.nan, math.inf


def rejects(argument: str, shown: str = "") -> Any:
    """A context that demands `argument: got ..., expected ...`."""
    return pytest.raises(GappedError, match=rf"{argument}: got .*{re.escape(shown)}.*, expected .+")


def test_a_message_in_full() -> None:
    assert issubclass(GappedError, ValueError)
    with pytest.raises(GappedError) as caught:
        gapped.gst(LOGITS, 0)
    assert str(caught.value).startswith("tau: got 0, expected a positive number")


@every_member
@pytest.mark.parametrize(
    "tau", [0, 0.0, -1, -0.5, 1e-39, 1e39, NAN, INF, -INF, "x", True, None, [1.0]], ids=repr
)
def test_temperatures(name: str, tau: Any) -> None:
    with rejects("tau", repr(tau)):
        gapped.estimator(name, tau=tau)
    with rejects("tau", repr(tau)):
        FUNCTIONS[name](LOGITS, tau, True)


@every_member
@pytest.mark.parametrize(
    "tau",
    [
        torch.tensor(0.0),
        torch.tensor(0.0, dtype=torch.float16),
        torch.tensor(1e-39, dtype=torch.float64),
        torch.tensor([1.0, 2.0, -1.0, 1.0]),
        torch.tensor([1.0, NAN, 1.0, 1.0]),
        torch.tensor([1.0, INF, 1.0, 1.0]),
        torch.tensor(INF, dtype=torch.float16),
        torch.ones(3),
        torch.ones(4, 3),
        torch.ones(2, 4),
        torch.ones(4, 1, 1),
        torch.ones(3, 1),
    ],
    ids=str,
)
def test_tensor_temperatures(name: str, tau: torch.Tensor) -> None:
    """Four rows of three categories: a temperature for each row has the shape (4,)."""
    with rejects("tau"):
        gapped.estimator(name, tau=tau).sample(LOGITS)


@pytest.mark.parametrize("name", [name for name in MEMBERS if name != "gumbel-softmax"])
def test_a_learned_temperature_where_it_has_no_meaning(name: str) -> None:
    with rejects("tau", "requires grad"):
        gapped.estimator(name, tau=torch.ones(4, requires_grad=True))


OPTIONS: dict[tuple[str, str], list[Any]] = {
    ("gst", "gap"): [-1, -0.1, NAN, "x", None, -INF],
    ("gumbel-rao", "samples"): [0, -1, 2.5, "3", True, None],
    ("decoupled", "tau_forward"): [0, -1.0, NAN, INF, "x", True],
    **{(name, "hard"): [False] for name in MEMBERS if name not in SOFT},
}


@pytest.mark.parametrize(
    ("name", "option", "value"), [(*key, value) for key, values in OPTIONS.items() for value in values]
)
def test_options(name: str, option: str, value: Any) -> None:
    """Without a surrogate there is no soft sample."""
    with rejects(option, repr(value)):
        gapped.estimator(name, **{option: value})
    with rejects(option, repr(value)):
        FUNCTIONS[name](LOGITS, **{option: value})


@pytest.mark.parametrize(
    "gap",
    [
        torch.tensor(-1.0),
        torch.tensor([1.0, 1.0, -0.5, 1.0]),
        torch.tensor([1.0, 1.0, NAN, 1.0]),
        torch.ones(3),
        torch.ones(4, requires_grad=True),
        lambda p: -p,
        lambda p: p * NAN,
        lambda p: p.repeat(2),
        lambda p: "x",
        lambda p: p * torch.ones((), requires_grad=True),
    ],
)
def test_gaps_that_are_tensors_or_functions(gap: Any) -> None:
    with rejects("gap"):
        gapped.gst(LOGITS, hard=False, gap=gap)


def test_a_gap_function_may_answer_in_another_dtype() -> None:
    logits = torch.zeros(4, 3, requires_grad=True)
    gapped.gst(logits, hard=True, gap=lambda p: p.double() + 1)[:, 0].sum().backward()
    assert logits.grad.abs().sum() > 0


@every_member
@pytest.mark.parametrize("tau", [np.float32(2), np.int64(2), torch.tensor(2), torch.full((4,), 2)], ids=repr)
def test_temperatures_of_any_kind_of_number(name: str, tau: Any) -> None:
    ours, expected = (gapped.estimator(name, tau=t).sample(LOGITS, generator=seeded()) for t in (tau, 2.0))
    assert torch.equal(ours, expected)


ARGUMENTS: list[tuple[str, Any, str]] = [
    ("logits", torch.zeros(4, 3, dtype=torch.int64), "torch.int64"),
    ("logits", torch.zeros(4, 3, dtype=torch.bool), "torch.bool"),
    ("logits", torch.zeros(4, 3, dtype=torch.complex64), "torch.complex64"),
    ("logits", [0.1, 0.2], "type list"),
    ("logits", 1.0, "type float"),
    ("logits", None, "type NoneType"),
    ("logits", torch.zeros(()), "without any axis"),
    *(("logits", torch.zeros(shape), str(shape)) for shape in [(0,), (4, 0), (0, 0)]),
    ("logits", torch.eye(3).to_sparse(), "sparse"),
    *(("dim", dim, repr(dim)) for dim in (2, -3, 7, 0.5, "last", None)),
    ("mask", torch.ones(4, 3), ""),
    ("mask", torch.ones(4, 3, dtype=torch.int64), ""),
    *(("mask", torch.ones(shape, dtype=torch.bool), "") for shape in [(4,), (4, 4), (2, 4, 3)]),
    ("mask", [True, True, False], ""),
    ("generator", 0, "0"),
]


@every_member
@pytest.mark.parametrize(("argument", "value", "shown"), ARGUMENTS)
def test_arguments_of_a_sample(name: str, argument: str, value: Any, shown: str) -> None:
    with rejects(argument, shown):
        gapped.estimator(name).sample(**{"logits": LOGITS, argument: value})


@every_member
@pytest.mark.filterwarnings("ignore:.*prototype stage:UserWarning")
def test_nested_logits(name: str) -> None:
    with rejects("logits", "nested"):
        gapped.estimator(name).sample(torch.nested.nested_tensor([torch.zeros(3), torch.zeros(2)]))


@every_member
def test_a_mask_with_fewer_axes_needs_the_categories_last(name: str) -> None:
    """Its own last axis would be taken for the logits' last one, and rows be emptied without a word."""
    logits, mask = torch.zeros(2, 3, 3), torch.tensor([True, False, True])
    for use in (
        lambda: gapped.estimator(name).sample(logits, dim=1, mask=mask),
        lambda: gapped.estimator(name).choose(logits, dim=1, mask=mask),
        lambda: gapped.nn.Sample(gapped.estimator(name), dim=1, eval="argmax").eval()(logits, mask),
    ):
        with rejects("mask"):
            use()
    sample = gapped.estimator(name).sample(logits, dim=1, mask=mask.view(1, 3, 1))
    assert (sample[:, 1] == 0).all()
    assert (sample.sum(1) == 1).all()


@every_member
def test_nothing_is_drawn_before_arguments_are_checked(name: str) -> None:
    generator = seeded()
    before = generator.get_state()
    for bad in ({"mask": torch.ones(4, 4, dtype=torch.bool)}, {"dim": 5}):
        with pytest.raises(GappedError):
            gapped.estimator(name).sample(LOGITS, generator=generator, **bad)
    assert torch.equal(generator.get_state(), before)
