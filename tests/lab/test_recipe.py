"""Recipes: the packaged grids, their expansion and labels, what is rejected and how; text of estimators."""

from __future__ import annotations

import math
import re
import tomllib
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from golden import recipes

from gapped.errors import GappedError
from gapped.registry import spell
from gapped_lab.estimator_text import make, parse
from gapped_lab.recipe import Recipe, find_recipe, load_recipe, recipe_from

TABLE: dict[str, Any] = {
    "name": "toy",
    "task": "vae",
    "protocol": "digits-8x8",
    "data": "digits",
    "seeds": 2,
    "tau": 0.5,
    "cell": [{"label": "GST", "estimator": "gst:gap=1.0"}],
}


def toy(**changes: Any) -> Recipe:
    return recipe_from({**TABLE, **changes}, "toy.toml")


def rejected(table: dict[str, Any], **how: Any) -> str:
    """The one line that a bad table gives."""
    with pytest.raises(GappedError) as caught:
        recipe_from(table, "toy.toml", **how)
    message = str(caught.value)
    assert message
    assert "\n" not in message
    return message


@pytest.mark.parametrize("quick", [False, True], ids=["full", "quick"])
@pytest.mark.parametrize("name", recipes())
def test_every_recipe_loads(name, quick):
    recipe = load_recipe(recipes()[name], quick=quick)
    assert recipe.name == name
    assert recipe.title
    assert recipe.quick == quick
    assert all(entry.recipe == name and entry.quick == quick for entry in recipe.entries)
    assert len({entry.spec.id for entry in recipe.entries}) == len(recipe.entries)
    places = {(e.label, e.spec.protocol, e.spec.tau, e.spec.seed) for e in recipe.entries}
    assert len(places) == len(recipe.entries)


def test_quick_recipes_are_smaller():
    for name, path in recipes().items():
        specs = [[e.spec for e in load_recipe(path, quick=quick).entries] for quick in (False, True)]
        full, quick = (sum(spec.epochs * (spec.train_images or 60_000) for spec in each) for each in specs)
        assert quick < full, name


def test_grid_expansion():
    recipe = toy(
        tau=[1.0, 0.5],
        seeds=[4, 7],
        cell=[
            {"estimator": "gst", "options": {"gap": [0.8, 1.2]}, "label": "GST-{gap}"},
            {"estimator": "reinmax", "tau": 1.5, "learning_rate": [0.1, 0.2], "label": "R{learning_rate}"},
            {"estimator": "straight-through:tau=0.25"},
        ],
    )
    cells = Counter((e.label, e.spec.tau, e.spec.learning_rate) for e in recipe.entries)
    assert cells == Counter(
        {
            **{(f"GST-{gap}", tau, None): 2 for gap in (0.8, 1.2) for tau in (1.0, 0.5)},
            **{(f"R{rate}", 1.5, rate): 2 for rate in (0.1, 0.2)},
            ("straight-through", 0.25, None): 2,
        }
    )
    assert {e.spec.seed for e in recipe.entries} == {4, 7}
    assert all(e.spec.options == {"gap": float(e.label[4:])} for e in recipe.entries if e.label[:3] == "GST")
    assert {e.spec.epochs for e in recipe.entries} == {80}, "the protocol's own"


def seeds_of_a_cell(own: Any, **how: Any) -> list[int]:
    """Of a cell with `own`, where the recipe has three; `how` may have other ones, or None."""
    table = {**TABLE, "seeds": how.pop("recipe", [4, 7, 9]), "cell": [{"estimator": "gst", "seeds": own}]}
    recipe = recipe_from({k: v for k, v in table.items() if v is not None}, "toy.toml", **how)
    return [entry.spec.seed for entry in recipe.entries]


def test_the_seeds_of_a_cell_are_its_list_or_the_first_of_the_recipe():
    assert seeds_of_a_cell([7, 8, 1, 0]) == [7, 8, 1, 0]
    assert seeds_of_a_cell(2) == [4, 7]
    assert seeds_of_a_cell(2, recipe=None) == [0, 1]
    assert seeds_of_a_cell([7, 8], recipe=None) == [7, 8]
    assert seeds_of_a_cell(3, recipe=10) == [0, 1, 2]
    cells = [{"estimator": "gst", "seeds": 1}, {"estimator": "straight-through"}]
    assert [e.spec.seed for e in toy(cell=cells).entries] == [0, 0, 1], "each cell has its own"
    message = rejected({**TABLE, "cell": [{"estimator": "gst", "seeds": 5}]})
    assert "[[cell]]: seeds: got 5, expected at most the recipe's 2" in message


def test_overrides_come_last():
    table = {**TABLE, "epochs": 5, "quick": {"epochs": 2, "seeds": 1, "tau": [0.1]}}
    full, quick = recipe_from(table, "t"), recipe_from(table, "t", quick=True)
    assert [(len(r.entries), r.entries[0].spec.epochs) for r in (full, quick)] == [(2, 5), (1, 2)]
    assert quick.entries[0].spec.tau == 0.1
    forced = recipe_from(table, "t", quick=True, epochs=3, seeds=4, tau=None)
    assert (len(forced.entries), forced.entries[0].spec.epochs, forced.entries[0].spec.tau) == (4, 3, 0.1)


def test_labels_may_name_what_the_grid_varies_and_do_by_default():
    cell = {"estimator": "gst", "options": {"gap": [0.5, 2.0]}, "label": "{gap} at {tau}"}
    labels = [entry.label for entry in toy(tau=[0.5, 1.0], seeds=1, cell=[cell]).entries]
    assert sorted(labels) == ["0.5 at 0.5", "0.5 at 1.0", "2.0 at 0.5", "2.0 at 1.0"]
    cell = {"estimator": "gst", "options": {"gap": 1.0}, "rate_decay": ["cosine"]}
    rates = {**cell, "learning_rate": [1e-5, 1e-2], "tau": [0.5, 1.0]}
    labels = [entry.label for entry in toy(seeds=1, cell=[rates]).entries]
    assert sorted(set(labels)) == ["gst:gap=1.0, learning_rate=0.01", "gst:gap=1.0, learning_rate=1e-05"]
    assert [entry.label for entry in toy(seeds=1, cell=[cell]).entries] == ["gst:gap=1.0"]


TWINS: dict[str, tuple[list[dict[str, Any]], str]] = {
    "a list": ([{"estimator": "gst", "label": "R", "learning_rate": [0.1, 0.2]}], "learning_rate"),
    "options": ([{"estimator": "gst", "label": "R", "options": {"gap": [0.1, 0.2]}}], "options"),
    "two cells": ([{"estimator": "gst"}, {"estimator": "gst", "schedule": {"kind": "annealed"}}], "schedule"),
}


@pytest.mark.parametrize("what", TWINS)
def test_runs_that_a_report_would_take_for_seeds_of_one_cell_are_rejected(what):
    cells, differ = TWINS[what]
    message = rejected({**TABLE, "cell": cells})
    assert f"at tau 0.5, seed 0, and differ in {differ}: give their cells labels" in message


@pytest.mark.parametrize("how", [{"seeds": [0, 0]}, {"cell": [{"estimator": "gst"}, {"estimator": "gst"}]}])
def test_the_same_run_cannot_be_asked_for_twice(how):
    assert "the same run is asked for twice: " in rejected({**TABLE, **how})


def test_quick_may_skip_cells():
    cells = [{"estimator": "gst", "label": "a"}, {"estimator": "straight-through", "label": "b"}]
    table = {**TABLE, "cell": cells, "quick": {"skip": ["a"], "seeds": 1}}
    assert [entry.label for entry in recipe_from(table, "t").entries] == ["a", "a", "b", "b"]
    assert [entry.label for entry in recipe_from(table, "t", quick=True).entries] == ["b"]


def test_quick_restricts_cells_with_protocols_of_their_own():
    cells = [
        {"estimator": "gst", "label": "both", "protocol": ["plain-30x10", "digits-8x8"]},
        {"estimator": "gst:gap=2.0", "label": "other", "protocol": "plain-30x10"},
        {"estimator": "reinmax", "label": "none"},
    ]
    table = {**TABLE, "seeds": 1, "cell": cells, "quick": {"protocol": "digits-8x8"}}
    entries = recipe_from(table, "t", quick=True).entries
    assert [(e.label, e.spec.protocol) for e in entries] == [("both", "digits-8x8"), ("none", "digits-8x8")]
    assert len(recipe_from({**table, "quick": {"seeds": 1}}, "t", quick=True).entries) == 4
    assert "[quick]: protocol leaves no cell" in rejected({**table, "cell": cells[1:2]}, quick=True)


def test_quick_without_a_section_is_refused():
    message = rejected(TABLE, quick=True)
    assert message.startswith("toy.toml: the recipe has no [quick] section: add one, or use --epochs")


@pytest.mark.parametrize("skip", [["GTS"], ["GST"], "GST"], ids=["misspelt", "everything", "not a list"])
def test_quick_may_not_skip_what_is_not_there_or_everything(skip):
    assert "skip" in rejected({**TABLE, "quick": {"skip": skip}}, quick=True)
    assert "quick" in rejected({**TABLE, "quick": 3}, quick=True)


def test_files(tmp_path):
    path = tmp_path / "mine.toml"
    text = (
        'name = "mine"\ntask = "vae"\nprotocol = "digits-8x8"\ndata = "digits"\n[[cell]]\nestimator = "gst"\n'
    )
    path.write_text(text)
    recipe = find_recipe(str(path), epochs=2)
    assert recipe.name == "mine"
    assert [(e.label, e.spec.epochs, e.spec.tau) for e in recipe.entries] == [("gst", 2, 1.0)]
    assert recipe.entries == recipe_from({**tomllib.loads(text), "epochs": 2}, "t").entries


def test_unknown_and_missing_keys_are_named():
    for key in ("name", "task", "protocol"):
        assert f"missing key '{key}'" in rejected({k: v for k, v in TABLE.items() if k != key})
    message = rejected({**TABLE, "epoch": 3})
    assert "toy.toml: unknown key 'epoch'" in message
    assert "epochs" in message
    assert "protocol" in message
    message = rejected({**TABLE, "cell": [{"estimator": "gst", "gap": 1.0}]})
    assert "[[cell]]: unknown key 'gap'" in message
    assert "options" in message
    message = rejected({**TABLE, "quick": {"sedes": 1}}, quick=True)
    assert "[quick]: unknown key 'sedes'" in message
    assert "seeds" in message


BAD: dict[str, tuple[dict[str, Any], str]] = {
    "no cells": ({"cell": []}, r"at least one \[\[cell\]\]"),
    "cell is a table": ({"cell": {"estimator": "gst"}}, r"at least one \[\[cell\]\]"),
    "seeds 0": ({"seeds": 0}, "seeds: got 0"),
    "seeds negative": ({"seeds": -2}, "seeds: got -2"),
    "seeds true": ({"seeds": True}, "seeds: got True"),
    "seeds text": ({"seeds": "ten"}, "seeds: got 'ten'"),
    "seeds none": ({"seeds": []}, r"seeds: got \[\]"),
    "estimator": (
        {"cell": [{"estimator": "gts"}]},
        r"estimator: got 'gts'; did you mean gst\? Expected one of ",
    ),
    "no estimator": ({"cell": [{"label": "x"}]}, "missing key 'estimator'"),
    "option in table": ({"cell": [{"estimator": "gst", "options": {"gpa": 1.0}}]}, "unknown option 'gpa'"),
    "protocol": ({"protocol": "digits"}, "protocol: got 'digits', expected one of .*digits-8x8"),
    "task": ({"task": "vea"}, "task: got 'vea', expected .*vae"),
    "data": ({"data": "minst"}, "got 'minst', expected one of .*mnist"),
    "split": ({"split": "valid"}, "split: got 'valid', expected .*validation"),
    "rate_decay": (
        {"rate_decay": "cosin"},
        "rate_decay: got 'cosin', expected one of none, cosine, warm-cosine",
    ),
    "tau 0": ({"tau": 0.0}, "tau: got 0.0"),
    "tau text": ({"tau": "low"}, "tau: got 'low'"),
    "tau nan": ({"tau": math.nan}, "tau: got nan"),
    "schedule kind": ({"schedule": {"kind": "mxied"}}, "schedule: got 'mxied'"),
    "schedule text": ({"schedule": "mixed"}, "schedule"),
    "label field": ({"cell": [{"estimator": "gst", "label": "GST-{gapp}"}]}, "label"),
    "label braces": ({"cell": [{"estimator": "gst", "label": "GST-{"}]}, "label"),
    "label number": ({"cell": [{"estimator": "gst", "label": 3}]}, "label"),
    "estimator number": ({"cell": [{"estimator": 3}]}, "estimator"),
    "options text": ({"cell": [{"estimator": "gst", "options": "gap=1"}]}, "options"),
    "cell number": ({"cell": [3]}, "cell"),
    # Accepted, each of these would train something else than what was written, or nothing.
    "no temperatures": ({"tau": []}, "tau"),
    "no options": ({"cell": [{"estimator": "gst", "options": {"gap": []}}]}, "gap"),
    "learning_rate 0": ({"learning_rate": 0.0}, "learning_rate"),
    "learning_rate negative": ({"learning_rate": -1e-3}, "learning_rate"),
    "learning_rate text": ({"learning_rate": "slow"}, "learning_rate"),
    "variance_samples negative": ({"variance_samples": -1}, "variance_samples: got -1"),
    "entropy_steps negative": ({"entropy_steps": -1}, "entropy_steps: got -1"),
    "variance_samples 1": ({"variance_samples": 1}, "variance_samples"),
    "variance_images 0": ({"variance_samples": 9, "variance_images": 0}, "variance_images"),
    "seeds of a cell 0": ({"cell": [{"estimator": "gst", "seeds": 0}]}, "seeds"),
    "seeds of a cell text": ({"cell": [{"estimator": "gst", "seeds": "ten"}]}, "seeds"),
    "name number": ({"name": 3}, "name"),
    "title number": ({"title": 3}, "title"),
    "variance_every_epoch text": ({"variance_every_epoch": "no"}, "variance_every_epoch: got 'no'"),
    "tau without use": ({"cell": [{"estimator": "rloo", "tau": 0.5}]}, "tau: got 0.5, .* rloo has no temp"),
    "tau as option": ({"cell": [{"estimator": "rloo", "options": {"tau": 0.5}}]}, "tau: got 0.5"),
    # Each of these once ended in an error of Python's.
    "task list": ({"task": ["vae"]}, r"task: got \['vae'\]"),
    "protocol list": ({"protocol": [["x"]]}, r"protocol: got \['x'\]"),
    "schedule kind list": ({"schedule": {"kind": ["mixed"]}}, r"schedule: got \['mixed'\]"),
    "seed large": ({"seeds": [2**63]}, "seed: got 9223372036854775808"),
    "seeds large": ({"seeds": 2**63}, "seeds: got 9223372036854775808"),
    "label attribute": ({"cell": [{"estimator": "gst", "label": "{tau.foo}"}]}, "label: got '{tau.foo}'"),
    "label index": ({"cell": [{"estimator": "gst", "label": "{tau[0]}"}]}, r"label: got '{tau\[0\]}'"),
}


@pytest.mark.parametrize("name", ["epochs", "train_images", "test_images", "test_every", "runs_per_fleet"])
@pytest.mark.parametrize("value", [0, -1, 1.5, True, "all"])
def test_counts_are_whole_and_positive(name, value):
    assert f"{name}: got {value!r}" in rejected({**TABLE, name: value})


@pytest.mark.parametrize("what", BAD)
def test_bad_values_are_rejected_in_one_line(what):
    changes, pattern = BAD[what]
    assert re.search(pattern, rejected({**TABLE, **changes}))


@pytest.mark.parametrize(
    ("content", "pattern"),
    [
        (b"", r"at least one \[\[cell\]\]"),
        (b"name = \n", "not valid TOML"),
        (b"name = 'a'\nname = 'b'\n", "not valid TOML"),
        (b"\xff\xfe\x00", "not valid TOML"),
        (b"name = " + b"[" * 5000, "not valid TOML"),
        (b"seeds = " + b"9" * 5000, "not valid TOML"),
        (b'nmae = "x"\n[[cell]]\nestimator = "gst"\n', "unknown key 'nmae', expected among .*name"),
    ],
)
def test_bad_files(tmp_path: Path, content: bytes, pattern: str):
    path = tmp_path / "bad.toml"
    path.write_bytes(content)
    with pytest.raises(GappedError, match=pattern) as caught:
        load_recipe(path)
    assert str(path) in str(caught.value)
    assert "\n" not in str(caught.value)


def test_absent_files_and_unknown_names(tmp_path):
    with pytest.raises(GappedError, match=r"absent\.toml: No such file"):
        find_recipe(str(tmp_path / "absent.toml"))
    with pytest.raises(GappedError, match=r"got 'albation'; did you mean ablation\? \(gapped .*\.toml"):
        find_recipe("albation")
    with pytest.raises(GappedError, match=r"got 'mine', expected one of ablation, .*vae.*\.toml file"):
        find_recipe("mine")


@pytest.mark.parametrize(
    "text",
    ["gst", "gst:gap=1.2,tau=0.5", "gst:gap=expected", "gumbel-rao:samples=100", "gst:detach=False,gap=0.0"],
)
def test_estimators_survive_the_way_through_text(text):
    name, options = parse(text)
    assert spell(name, options) == text
    assert make(*parse(spell(name, options))) == make(name, options)


def test_options_get_their_types():
    assert parse(" gst: gap = 2 , detach=false ")[1] == {"gap": 2, "detach": False}
    assert isinstance(parse("gst:tau=1e-2")[1]["tau"], float)
