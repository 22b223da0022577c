"""The registry: estimators by name and as text; functions and objects agree; calls of objects."""

from __future__ import annotations

import inspect
import re
from dataclasses import FrozenInstanceError, fields
from typing import Any

import pytest
import torch
from conftest import FUNCTIONS, KINDS, TAU, every_member, normal, seeded
from variants import make

import gapped
from gapped import GappedError
from gapped.registry import resolve
from gapped.texts import DEFAULT


def test_the_registry_has_two_families() -> None:
    pathwise, score = gapped.estimators("pathwise"), gapped.estimators("score")
    assert {**pathwise, **score} == dict(gapped.estimators())
    assert len(pathwise) >= 6
    assert len(score) >= 11
    assert pathwise["decoupled"] is gapped.DecoupledGumbelSoftmax
    assert score["disarm-sticks"] is gapped.DisARMSticks
    with pytest.raises(GappedError, match="family: got 'both', expected one of pathwise, score"):
        gapped.estimators("both")
    with pytest.raises(TypeError):
        gapped.estimators()["gst"] = gapped.ReinMax


def test_every_public_estimator_is_registered() -> None:
    public = [getattr(gapped, name) for name in gapped.__all__]
    classes = {each for each in public if isinstance(each, type)}
    concrete = {each for each in classes if issubclass(each, (gapped.Pathwise, gapped.Score))}
    assert set(gapped.estimators().values()) == concrete - {gapped.Pathwise, gapped.Score}


@pytest.mark.parametrize("name", gapped.estimators())
def test_an_estimator_by_name(name: str) -> None:
    kind = gapped.estimators()[name]
    assert type(gapped.estimator(name)) is kind
    assert kind.name == name


@pytest.mark.parametrize("name", ["", "GST", None, 3, "gts"], ids=repr)
def test_an_unknown_name_lists_the_known_ones(name: Any) -> None:
    with pytest.raises(GappedError, match=re.escape(repr(name))) as caught:
        gapped.estimator(name)
    assert all(known in str(caught.value) for known in gapped.estimators())


@pytest.mark.parametrize("name", gapped.estimators())
def test_an_unknown_option_lists_the_known_ones(name: str) -> None:
    known = ", ".join(inspect.signature(gapped.estimators()[name]).parameters)
    accepted = f"one of {known}" if known else "none"
    with pytest.raises(GappedError, match=f"{name}: unknown option 'gapp', expected {accepted}"):
        gapped.estimator(name, gapp=1.0)


@every_member
def test_pathwise_estimators_are_frozen_values(name: str) -> None:
    estimator, default = gapped.estimator(name, tau=TAU), gapped.estimator(name)
    assert default.hard
    assert estimator == KINDS[name](tau=TAU) != default
    assert {estimator, gapped.estimator(name, tau=TAU)} == {estimator}
    with pytest.raises(FrozenInstanceError):
        estimator.tau = 3.0


@every_member
def test_estimators_with_tensors_can_be_compared(name: str) -> None:
    one, same, other = (gapped.estimator(name, tau=torch.tensor([t, 2.0])) for t in (1.0, 1.0, 1.5))
    assert one == same
    assert hash(one) == hash(same)
    assert one != other
    assert one != gapped.estimator(name)


def test_stateless_score_estimators_are_frozen_values() -> None:
    assert gapped.RLOO(3) == gapped.RLOO(3) != gapped.RLOO(2)
    assert len({gapped.DisARMTree(), gapped.DisARMTree(), gapped.ARSM()}) == 2
    with pytest.raises(FrozenInstanceError):
        gapped.RLOO(3).samples = 2


@every_member
def test_function_and_object_agree(name: str) -> None:
    logits, function = normal(20, 5), FUNCTIONS[name]
    hard = function(logits, TAU, True, generator=seeded())
    assert torch.equal(hard, make(name).sample(logits, generator=seeded()))


@every_member
def test_function_and_object_take_the_same_options(name: str) -> None:
    parameters = inspect.signature(FUNCTIONS[name]).parameters
    assert list(parameters)[:3] == ["logits", "tau", "hard"]
    keyword = {key for key, value in parameters.items() if value.kind is value.KEYWORD_ONLY}
    assert set(parameters) - keyword == {"logits", "tau", "hard"}
    own = {field.name for field in fields(KINDS[name])} - {"tau", "hard"}
    assert keyword == own | {"dim", "mask", "generator", "eps"}


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
        ("STGS", {}, "got 'STGS'; did you mean gumbel-softmax?"),
        ("gumbel", {}, "got 'gumbel'; did you mean gumbel-softmax?"),
        ("ste", {}, "got 'ste'; did you mean straight-through?"),
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
    ("levels", "options"), [((), {"tau": 0.5}), ((), {"hard": True}), ((0.5,), {}), ((0.5, True), {})]
)
def test_a_call_with_torchs_options_is_told_where_they_went(levels: Any, options: Any) -> None:
    with pytest.raises(GappedError, match=r"has no temperature; gapped.gumbel_softmax\(logits, tau, hard\)"):
        gapped.sample(torch.zeros(3), *levels, **options)
    with pytest.raises(GappedError, match=r"^choose: it is hard and has no temperature; "):
        gapped.choose(torch.zeros(3), **options or {"tau": 0.5})
