"""The registry: estimators by name; functions and objects agree."""

from __future__ import annotations

import inspect
import re
from dataclasses import FrozenInstanceError, fields
from typing import Any

import pytest
import torch
from conftest import FUNCTIONS, KINDS, TAU, assert_one_hot, every_member, normal, seeded
from variants import make

import gapped
from gapped import GappedError


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
    default = function(logits, generator=seeded())
    if name == "gumbel-softmax":  # as torch's is
        assert torch.equal(default, gapped.GumbelSoftmax(1.0, hard=False).sample(logits, generator=seeded()))
    else:
        assert torch.equal(default, gapped.estimator(name).sample(logits, generator=seeded()))
        assert_one_hot(default)


@every_member
def test_function_and_object_take_the_same_options(name: str) -> None:
    parameters = inspect.signature(FUNCTIONS[name]).parameters
    assert list(parameters)[:3] == ["logits", "tau", "hard"]
    keyword = {key for key, value in parameters.items() if value.kind is value.KEYWORD_ONLY}
    assert set(parameters) - keyword == {"logits", "tau", "hard"}
    own = {field.name for field in fields(KINDS[name])} - {"tau", "hard"}
    assert keyword == own | {"dim", "mask", "generator", "eps"}
