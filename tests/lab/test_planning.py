"""Planning: which runs form a fleet, what is skipped and shared, and what an interrupted command leaves."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import replace

import pytest
from training_toys import Recorder, interrupt, toy_recipe, train

from gapped.comparison import records
from gapped.comparison.records import Curve, Record
from gapped.errors import GappedError
from gapped_lab.planning import plan, request_hash
from gapped_lab.recipe import find_recipe

# Fleets


def test_runs_that_tables_share_are_planned_once_and_recorded_twice():
    ablation, vae = find_recipe("ablation"), find_recipe("vae")
    fleets = plan([ablation, vae])
    planned = [spec.id for fleet in fleets for spec in fleet.specs]
    assert len(planned) == len(set(planned)) == len(ablation.entries) + len(vae.entries) - 20
    entries = {id_: each for fleet in fleets for id_, each in fleet.entries.items()}
    assert list(entries) == planned
    assert Counter(entry.recipe for each in entries.values() for entry in each) == {
        "ablation": len(ablation.entries),
        "vae": len(vae.entries),
    }
    twice = {id_ for id_ in planned if len(entries[id_]) == 2}
    assert len(twice) == 20
    assert {(e.label, e.spec.tau) for e in ablation.entries if e.spec.id in twice} == {
        ("GST-1.0", 1.0),
        ("GST-1.0", 0.5),
    }


def test_fleets_are_as_even_as_their_limit_allows():
    recipe = toy_recipe(seeds=5, runs_per_fleet=2)
    assert [len(fleet.specs) for fleet in plan([recipe])] == [2, 2, 1]
    assert [len(fleet.specs) for fleet in plan([replace(recipe, runs_per_fleet=4)])] == [3, 2]
    assert [len(fleet.specs) for fleet in plan([find_recipe("efficiency")])] == [1, 1, 1, 1]
    sizes = [len(fleet.specs) for fleet in plan([toy_recipe(seeds=450)])]
    assert sum(sizes) == 450
    assert max(sizes) <= 400, "more do not fit on a device"
    assert max(sizes) - min(sizes) < len(sizes)
    assert request_hash([recipe]) != request_hash([replace(recipe, runs_per_fleet=4)])


def test_estimators_with_equally_many_samples_are_neighbours():
    """Whatever their names: they share the evaluation of the cost."""
    texts = ("rloo:samples=4", "rloo:samples=2", "gst", "double-cv:samples=4", "double-cv:samples=2", "rebar")
    (fleet,) = plan([toy_recipe(*texts, seeds=1)])
    names = [(spec.estimator, spec.options.get("samples")) for spec in fleet.specs]
    assert names == [
        *(("gst", None), ("rebar", None)),
        *(("double-cv", 2), ("rloo", 2), ("double-cv", 4), ("rloo", 4)),
    ]


def test_a_finished_recipe_trains_nothing(tmp_path):
    recipe, recorder = toy_recipe("gst", "straight-through", seeds=2), Recorder()
    lines = train(recipe, tmp_path)
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    assert train(recipe, tmp_path, callbacks=recorder) == lines
    assert (recorder.fleets, recorder.epochs, recorder.finished) == ([], [], [])
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before
    assert set(before) == {".lock", "records.jsonl", "curves.jsonl", "images.jsonl"}


def test_another_recipe_reuses_the_runs_it_shares(tmp_path):
    first = toy_recipe("gst", "straight-through", name="a")
    second = toy_recipe("gst", "reinmax:tau=1.0", name="b")
    lines, recorder = train(first, tmp_path), Recorder()
    both = train([first, second], tmp_path, callbacks=recorder)
    assert recorder.runs == [second.entries[1].spec.id], "a finished run is never recomputed"
    assert [each.recipe for each in both] == ["a", "a", "b", "b"]
    assert both[:3] == [*lines, replace(lines[0], recipe="b")]
    keys = [each.key for each in records.read(tmp_path, Record)]
    assert len(keys) == len(set(keys)) == 4
    assert len(records.read(tmp_path, Curve)) == 3
    again = Recorder()
    for recipe in (second, first):
        train(recipe, tmp_path, callbacks=again)
    assert again.fleets == []


def test_removed_records_are_trained_again_beside_an_interrupted_command(tmp_path):
    """Also where the runs were not part of what was interrupted."""
    recipe = toy_recipe("gst", "reinmax")
    train(toy_recipe("gst"), tmp_path)
    interrupt(recipe, tmp_path)
    (tmp_path / "records.jsonl").unlink()
    lines = train(recipe, tmp_path)
    assert [each.id for each in lines] == [entry.spec.id for entry in recipe.entries]
    assert [each.status for each in lines] == ["ok", "ok"]


def test_checkpoints_of_runs_that_another_command_has_finished_go(tmp_path):
    """Those that may still be used stay, until they are."""
    small, large = (toy_recipe("gst", "reinmax", runs_per_fleet=n) for n in (1, 2))
    longer, recorder = toy_recipe("gst", epochs=3), Recorder()
    for recipe in (small, longer):
        interrupt(recipe, tmp_path)
    orphan = tmp_path / "checkpoints" / "0123456789abcdef.pt"
    orphan.touch()
    train(large, tmp_path)
    assert len(list((tmp_path / "checkpoints").iterdir())) == 2
    train(longer, tmp_path, callbacks=recorder)
    assert len(recorder.epochs) == 2, "its checkpoint was not used"
    assert not (tmp_path / "checkpoints").exists()


OTHER_FLEETS = {
    "another order": lambda runs: runs[::-1],
    "a repeated run": lambda runs: [*runs, runs[0]],
    "a run less": lambda runs: runs[1:],
    "no run": lambda runs: [],
}
CONTENTS = {
    "open": b"{",
    "list": b"[]",
    "number": b'{"k": 3}',
    "unknown": b'{"k": ["unknown run"]}',
    "deep": b"[" * 200_000,
    "large": b'{"k": "' + b"x" * 2**24 + b'"}',
}


@pytest.mark.parametrize("what", [*CONTENTS, *OTHER_FLEETS])
def test_a_plan_that_is_none_or_another_is_one_clear_line(tmp_path, what):
    """A fleet of other runs would draw other numbers than the one that was interrupted."""
    recipe, message = toy_recipe("gst", "reinmax", seeds=2), "not .* plan .*; remove it to start over"
    interrupt(recipe, tmp_path)
    (path,) = (tmp_path / "checkpoints").glob("*.plan.json")
    if what in CONTENTS:
        path.write_bytes(CONTENTS[what])
    else:
        plan, message = json.loads(path.read_bytes()), "not the plan of this command; remove it"
        path.write_text(json.dumps({key: OTHER_FLEETS[what](runs) for key, runs in plan.items()}))
    with pytest.raises(GappedError, match=rf"{path.name}: {message}"):
        train(recipe, tmp_path)
