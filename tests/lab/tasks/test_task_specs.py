"""Specs and protocols: constants of the paper, and what each task accepts before any training."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from gapped.errors import GappedError
from gapped_lab.listops import listops_protocol
from gapped_lab.spec import RunSpec
from gapped_lab.tasks import vae_protocol


def test_constants_of_the_published_protocols():
    """Replacing them by the published ones changes nothing."""
    paper, plain = map(vae_protocol, ("paper-30x10", "plain-30x10"))
    large, coupled = map(vae_protocol, ("paper-32x64", "coupled-32x64"))
    shape = {"latents": 30, "categories": 10, "hidden": (512, 256), "batch": 100, "epochs": 40}
    assert paper == replace(paper, **shape, learning_rate=1e-3, rectified_logits=True)
    assert plain == replace(paper, name="plain-30x10", rectified_logits=False)
    shape = {"latents": 32, "categories": 64, "batch": 200, "train_images": 50_000, "binarised": True}
    assert large == replace(large, **shape, slope=0.2)
    for rules, steps in ((large, 500_000), (coupled, 1_000_000)):
        assert rules.epochs * (rules.train_images // rules.batch) == steps
    trees = listops_protocol("paper")
    assert trees == replace(
        trees, width=300, dropout=0.5, count=90_000, max_tokens=100, batch=16, learning_rate=1e-3
    )
    assert trees == replace(trees, epochs=20, clip=5.0, validations=2, patience=4)


@pytest.mark.parametrize(
    ("lookup", "message"),
    [
        (vae_protocol, "expected one of paper-30x10, plain-30x10, digits-8x8"),
        (listops_protocol, r"^protocol: got 'papers', expected one of paper"),
    ],
)
def test_an_unknown_protocol_lists_the_known_ones(lookup, message):
    with pytest.raises(GappedError, match=message):
        lookup("papers")


def spec(estimator: str, **changes: Any) -> RunSpec:
    return RunSpec("vae", changes.pop("protocol", "digits-8x8"), "digits", estimator, **changes)


@pytest.mark.parametrize(
    ("estimator", "changes", "message"),
    [
        ("disarm", {}, "8 categories for DisARM, expected two"),
        ("exact", {}, "8 variables of 8 categories"),
        ("arsm", {"protocol": "paper-32x64"}, "64 categories for ARSM, expected at most 16"),
        ("rloo", {"schedule": {"kind": "mixed"}}, "schedule: got 'mixed', expected constant for rloo"),
        ("rloo", {"entropy_steps": 3}, "entropy_steps: got 3, expected 0: rloo has no surrogate"),
        ("rloo", {"test_every": 0}, "test_every: got 0, expected a positive integer"),
    ],
)
def test_what_cannot_be_trained_is_refused_before_any_training(estimator, changes, message):
    with pytest.raises(GappedError, match=message):
        spec(estimator, **changes)


def test_a_run_without_a_temperature_is_one_run_at_all_of_them():
    assert spec("rloo", tau=0.5) == spec("rloo", tau=1.0)
    assert spec("rloo").tau is None
    assert spec("rebar", tau=0.3).make_estimator().tau.item() == pytest.approx(0.3)
    assert spec("relax", options={"network": 5}).options == {"network": 5}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"data": "mnist"}, r"data: got 'mnist', expected one of listops"),
        ({"protocol": "paper-30x10"}, r"protocol: got 'paper-30x10', expected one of paper"),
        ({"train_images": 5}, r"train_images: got 5, expected nothing: listops does not support it"),
        ({"split": "validation"}, r"split: got 'validation', expected nothing"),
        ({"variance_samples": 3}, r"variance_samples: got 3, expected nothing"),
    ],
)
def test_specs_accept_what_the_task_has(change: dict[str, Any], message: str) -> None:
    plain = {"task": "listops", "protocol": "paper", "data": "listops", "estimator": "gst"}
    RunSpec(**plain)
    with pytest.raises(GappedError, match=f"^{message}"):
        RunSpec(**{**plain, **change})
