"""Run specs: their content hashes, and what runs must share to train as one fleet."""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Any

import pytest

from gapped_lab.spec import RunSpec

SPEC = RunSpec("vae", "digits-8x8", "digits", "gst", {"gap": 1.2}, tau=0.5, seed=3, epochs=7)


def test_ids_are_stable():
    """Records outlive versions of the code: a changed hash would orphan them."""
    assert SPEC.id == "5556f6987f4463a8"


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
