"""Estimators as text wherever an object is taken, and as objects that can be called."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from conftest import MEMBERS, every_member, normal, seeded

import gapped
from gapped import GappedError
from gapped.pathwise import resolve_pathwise
from gapped.registry import resolve
from gapped.texts import DEFAULT


def square(z: torch.Tensor) -> torch.Tensor:
    return (z[..., 0].sum(-1) - 1) ** 2


@pytest.mark.parametrize(
    ("text", "options", "expected"),
    [
        ("gst", {}, gapped.GST()),
        ("gst:gap=1.2", {}, gapped.GST(gap=1.2)),
        (" gst: gap = 2 , detach=false ", {}, gapped.GST(gap=2, detach=False)),
        ("gst:gap=1.2", {"tau": 0.5}, gapped.GST(0.5, gap=1.2)),
        ("gst", {"gap": gapped.expected_gap}, gapped.GST(gap=gapped.expected_gap)),
        ("gst:gap=expected", {}, gapped.GST(gap=gapped.expected_gap)),
        (DEFAULT, {}, gapped.GapMax()),
        ("rloo:samples=4", {}, gapped.RLOO(4)),
        ("disarm-sticks:order=given", {}, gapped.DisARMSticks("given")),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_text_names_an_estimator(text: str, options: dict[str, Any], expected: Any) -> None:
    assert gapped.estimator(text, **options) == expected
    if not options:
        assert resolve(text) == expected


@pytest.mark.parametrize(
    ("text", "options", "message"),
    [
        ("gts", {}, "estimator: got 'gts'; did you mean gst? Expected one of arsm, "),
        ("GumbelRao", {}, "did you mean gumbel-rao?"),
        ("reinmax,draw=argmax", {}, "did you mean reinmax:draw=argmax?"),
        ("gst:gab=1", {}, "gst: unknown option 'gab', expected one of tau, .*; did you mean gap?"),
        (
            "rloo:sample=4",
            {},
            "unknown option 'sample', expected one of samples; did you mean samples?",
        ),
        ("gst:gap", {}, "estimator: got 'gst:gap', expected name or name:option=value"),
        ("gst:gap=1,gap=2", {}, "estimator: gst:gap=1,gap=2: option 'gap' is given twice"),
        ("gst:gap=1", {"gap": 2}, "estimator: gst:gap=1: option 'gap' is given twice"),
        ("gst:tau=0", {}, "tau: got 0, expected a positive number"),
    ],
    ids=str,
)
def test_a_wrong_text_in_one_line(text: str, options: dict[str, Any], message: str) -> None:
    with pytest.raises(GappedError, match=message.replace("?", "[?]")) as caught:
        gapped.estimator(text, **options)
    assert "\n" not in str(caught.value)


@every_member
def test_a_call_is_a_sample(name: str) -> None:
    estimator, logits, mask = gapped.estimator(name), normal(4, 3), torch.tensor([[True, True, False]])
    for how in ({}, {"dim": 0}, {"mask": mask}):
        expected = estimator.sample(logits, generator=seeded(), **how)
        assert torch.equal(estimator(logits, generator=seeded(), **how), expected)


@pytest.mark.parametrize("name", gapped.estimators("score"))
def test_a_score_estimator_says_what_takes_the_place_of_its_sample(name: str) -> None:
    estimator = gapped.estimator(name) if name != "relax" else gapped.RELAX(torch.nn.Identity())
    message = rf"{type(estimator).__name__}.sample: .*gapped.expectation\(f, logits, .*gapped.GST\(\)"
    with pytest.raises(GappedError, match=message) as caught:
        estimator.sample(normal(2, 3))
    assert "\n" not in str(caught.value)


def test_text_labels_its_row_in_a_diagnosis() -> None:
    table = gapped.diagnose(square, normal(2, 3), ["gst", "rloo", gapped.GST()], samples=200)
    assert [row.label for row in table.rows] == ["gst", "rloo", "GST"]
    model = gapped.diagnose_model(
        lambda e, g: gapped.expectation(square, weight.view(2, 3), e, generator=g),
        [weight := normal(6).requires_grad_()],
        ["gst", "rloo:samples=4"],
        samples=200,
        reference="rloo:samples=8",
    )
    assert [row.label for row in model.rows] == ["gst", "rloo:samples=4"]
    with pytest.raises(GappedError, match="did you mean gst"):
        gapped.diagnose(square, normal(2, 3), ["gts"], samples=200)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ("rloo", "estimator: got 'rloo', expected a pathwise estimator"),
        (gapped.RLOO(), "estimator: got RLOO"),
        (gapped.GST, "estimator: got an object of type ABCMeta"),
    ],
    ids=str,
)
def test_what_makes_no_choices_is_refused(given: Any, message: str) -> None:
    with pytest.raises(GappedError, match=re.escape(message)):
        resolve_pathwise(given)


def test_a_module_has_a_temperature_to_set() -> None:
    layer = gapped.nn.Sample("gst:gap=1.2")
    layer.tau = 0.25
    assert layer.tau == 0.25
    assert layer.estimator == gapped.GST(0.25, gap=1.2)
    layer.tau = torch.full((4,), 2.0)
    assert torch.equal(layer.tau, torch.full((4,), 2.0))
    with pytest.raises(GappedError, match="tau: got 0"):
        layer.tau = 0
    assert gapped.nn.Sample().estimator == gapped.GapMax()
    assert set(MEMBERS) == {type(gapped.nn.Sample(name).estimator).name for name in MEMBERS}


@pytest.mark.parametrize(
    ("levels", "options"), [((), {"tau": 0.5}), ((), {"hard": True}), ((0.5,), {}), ((0.5, True), {})]
)
def test_a_call_with_torchs_options_is_told_where_they_went(levels: Any, options: Any) -> None:
    with pytest.raises(GappedError, match=r"has no temperature; gapped.gumbel_softmax\(logits, tau, hard\)"):
        gapped.sample(torch.zeros(3), *levels, **options)
    with pytest.raises(GappedError, match=r"^choose: it is hard and has no temperature; "):
        gapped.choose(torch.zeros(3), **options or {"tau": 0.5})


@pytest.mark.parametrize(
    ("name", "ours"), [("STGS", "gumbel-softmax"), ("gumbel", "gumbel-softmax"), ("ste", "straight-through")]
)
def test_usual_names_are_understood(name: str, ours: str) -> None:
    with pytest.raises(GappedError, match=rf"got '{name}'; did you mean {ours}\?"):
        gapped.estimator(name)
