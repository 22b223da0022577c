"""Run specs: content hashes, what a fleet shares, constants of protocols, what each task accepts."""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Any

import pytest

from gapped.errors import GappedError
from gapped_lab.listops import listops_protocol
from gapped_lab.spec import RunSpec
from gapped_lab.tasks import vae_protocol

SPEC = RunSpec("vae", "digits-8x8", "digits", "gst", {"gap": 1.2}, tau=0.5, seed=3, epochs=7)


def changed(name: str) -> Any:
    values: dict[str, Any] = {
        "task": "listops",
        "protocol": "paper-30x10",
        "data": "mnist",
        "estimator": "straight-through",
        "options": {"gap": 1.3},
        "schedule": {"kind": "mixed"},
        "split": "validation",
        "rate_decay": "cosine",
        "variance_every_epoch": True,
    }
    return values.get(name, 11)


@pytest.mark.parametrize("name", [f.name for f in fields(RunSpec)])
def test_ids_change_with_every_field(name):
    # An estimator without options, so that the other estimator accepts them.
    base = replace(SPEC, options={}) if name == "estimator" else SPEC
    # Not through __post_init__, which may know but one task.
    other = object.__new__(RunSpec)
    for f in fields(RunSpec):
        object.__setattr__(other, f.name, getattr(base, f.name))
    object.__setattr__(other, name, changed(name))
    assert other.id != base.id


def test_ids_do_not_depend_on_how_numbers_and_tables_are_written():
    other = replace(SPEC, options={"detach": True, "gap": 1.2})
    assert other.id == replace(SPEC, options={"gap": 1.2, "detach": True}).id
    whole = replace(SPEC, tau=1.0, options={"gap": 1.0})
    written = replace(SPEC, tau=1, options={"gap": 1})
    assert whole == written
    assert whole.id == written.id, "equal specs are the same run"


def test_shape_ignores_what_may_differ_in_a_fleet():
    own = {"estimator": "gumbel-softmax", "options": {}, "tau": 0.1, "seed": 9, "learning_rate": 0.1}
    assert replace(SPEC, **own, schedule={"kind": "mixed"}, rate_decay="cosine").shape == SPEC.shape
    for name, value in {"epochs": 8, "data": "mnist", "train_images": 500, "split": "validation"}.items():
        assert replace(SPEC, **{name: value}).shape != SPEC.shape


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


OF_A_TASK: dict[str, dict[str, Any]] = {
    "vae": {"protocol": "digits-8x8", "data": "digits", "estimator": "gst"},
    "listops": {"protocol": "paper", "data": "listops", "estimator": "gst"},
    "counts": {"protocol": "binomial-8-2", "data": "mnist", "estimator": "fini"},
}
COUNTS_FOR_CATEGORIES = r"estimator: got 'fini', expected one for categories: vae has no counts"


@pytest.mark.parametrize(
    ("task", "changes", "message"),
    [
        ("vae", {"estimator": "disarm"}, ".*8 categories for DisARM, expected two"),
        ("vae", {"estimator": "exact"}, ".*8 variables of 8 categories"),
        (
            "vae",
            {"estimator": "arsm", "protocol": "paper-32x64"},
            ".*64 categories for ARSM, expected at most 16",
        ),
        (
            "vae",
            {"estimator": "rloo", "schedule": {"kind": "mixed"}},
            "schedule: got 'mixed', expected constant for rloo",
        ),
        (
            "vae",
            {"estimator": "rloo", "entropy_steps": 3},
            "entropy_steps: got 3, expected 0: rloo has no surrogate",
        ),
        ("vae", {"test_every": 0}, "test_every: got 0, expected a positive integer"),
        ("vae", {"estimator": "fini", "protocol": "plain-30x10", "data": "mnist"}, COUNTS_FOR_CATEGORIES),
        ("listops", {"data": "mnist"}, "data: got 'mnist', expected one of listops"),
        ("listops", {"protocol": "paper-30x10"}, "protocol: got 'paper-30x10', expected one of paper"),
        (
            "listops",
            {"train_images": 5},
            "train_images: got 5, expected nothing: listops does not support it",
        ),
        ("listops", {"split": "validation"}, "split: got 'validation', expected nothing"),
        ("listops", {"variance_samples": 3}, "variance_samples: got 3, expected nothing"),
        ("counts", {"estimator": "gst"}, "estimator: got 'gst', expected one of fini, rloo"),
        ("counts", {"estimator": "exact"}, "estimator: got 'exact', expected one of fini, rloo"),
        ("counts", {"options": {"order": 4}}, "fini: order: got 4, expected 2 or 3"),
        (
            "counts",
            {"entropy_steps": 3},
            "entropy_steps: got 3, expected nothing: counts does not support it",
        ),
        (
            "counts",
            {"protocol": "binary-200x2"},
            "protocol: got 'binary-200x2', expected one of poisson-1-200",
        ),
    ],
)
def test_what_a_task_cannot_train_is_refused(task: str, changes: dict[str, Any], message: str) -> None:
    RunSpec(task, **OF_A_TASK[task])
    with pytest.raises(GappedError, match=f"^{message}"):
        RunSpec(task, **{**OF_A_TASK[task], **changes})


def test_a_run_without_a_temperature_is_one_run_at_all_of_them():
    assert spec("rloo", tau=0.5) == spec("rloo", tau=1.0)
    assert spec("rloo").tau is None
    assert spec("rebar", tau=0.3).make_estimator().tau.item() == pytest.approx(0.3)
    assert spec("relax", options={"network": 5}).options == {"network": 5}
