"""Files that anybody may have written or damaged: an answer in one line, no traceback, no full memory."""

from __future__ import annotations

import contextlib
import copy
import gzip
import io
import json
import random
import re
import time
import tomllib
import tracemalloc
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import pytest
import torch
from report_records import append_json, load_json, run_lines
from tiny_images import TINY_IMAGES, put_tiny_images
from training_toys import recipe_file

from gapped.cli.app import main
from gapped.comparison.records import Curve, Within, from_json
from gapped.errors import GappedError
from gapped_lab.listops import examples
from gapped_lab.planning import prepare
from gapped_lab.recipe import load_recipe, recipe_from
from gapped_lab.recipe_files import known_recipes
from gapped_lab.store import Store

RESULTS = Path(__file__).parents[3] / "results"
SECONDS = 3
"""That a fuzz test may take; one that is out of time has tried fewer files, in the same order."""

BAD: list[Any] = [None, True, -1, 0, 3.5, 1e150, -1e300, float("nan"), float("inf"), 10**30, 10**400]
BAD += ["", "x", r"GST[/1]$\foo$", "a\x1b[31mb\n|", "\ud800", "_x", "../../x", "x" * 5000]
BAD += [[], [1], [[]], [None], {}, {"a": 1}, {"kind": []}]
KEYS = ["", r"$\x$", "a\x1b", "[/b]", "test_accuracy_length_x", "_z"]


# The only warning that a damaged file may give.
pytestmark = [
    pytest.mark.filterwarnings("ignore:.*the last line is torn"),
    pytest.mark.usefixtures("sandbox"),
]


def places(value: Any, at: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """The way to each part of an object; of a list, to the first four."""
    few = enumerate(value[:4]) if isinstance(value, list) else ()
    for key, one in value.items() if isinstance(value, dict) else few:
        yield (*at, key)
        yield from places(one, (*at, key))


def mutant(value: Any, rng: random.Random) -> Any:
    """The object with one part replaced, removed or renamed."""
    changed = copy.deepcopy(value)
    *way, last = rng.choice(list(places(changed)))
    part = changed
    for key in way:
        part = part[key]
    how = rng.random()
    if how < 0.2:
        del part[last]
    elif how < 0.3 and isinstance(part, dict):
        part[rng.choice(KEYS)] = part.pop(last)
    else:
        part[last] = rng.choice(BAD)
    return changed


def damaged(raw: bytes, rng: random.Random) -> bytes:
    """The bytes with some flipped, or without their end."""
    cut = raw[: rng.randrange(1, len(raw))] if rng.random() < 0.2 else raw
    flipped = bytearray(cut)
    for _ in range(3):
        flipped[rng.randrange(len(cut))] = rng.randrange(256)
    return bytes(flipped)


def answer(*arguments: str) -> str:
    """What a command says; it works, or objects in one line that tells what is wrong."""
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        status = main(list(arguments))
    said = err.getvalue()
    assert status in (0, 2), said
    assert "--debug shows where" not in said
    assert "\x1b" not in out.getvalue() + said
    if status:
        assert re.fullmatch(r"gapped: .*: [^\n]+\n", said), said
    return said


@pytest.fixture(scope="module")
def folder() -> dict[str, Any]:
    """A few lines of each file of results, cut short."""
    names = ("records", "curves", "images", "trees", "bench")
    lines = {name: load_json(RESULTS / f"{name}.jsonl") for name in names}
    trees = lines["trees"][:1]
    kept = [r for r in lines["records"] if r["id"] == trees[0]["id"]]
    for recipe in ("compare", "gap-grid"):
        kept += [r for r in lines["records"] if r["recipe"] == recipe][:31:10]
    ids = {r["id"] for r in kept}
    logged = [line for line in lines["curves"] if line["id"] in ids]
    curves = [{k: v[:3] if isinstance(v, list) else v for k, v in line.items()} for line in logged]
    images = [line for line in lines["images"] if line["id"] in ids]
    bench = lines["bench"][:4] + [line for line in lines["bench"] if line["kind"] == "startup"][:1]
    work = {"work": "masks", "sizes": [8, 4], "way": "torch", "gradients": 128, "logits": 128}
    bench.append({**bench[0], **work, "kind": "work", "memory": 512})
    return {"records": kept, "curves": curves, "images": images, "trees": trees, "bench": bench}


@pytest.mark.parametrize("name", ["records", "curves", "images", "trees", "bench"])
def test_damaged_results_are_reported_or_refused(name: str, folder: dict[str, Any], tmp_path: Path) -> None:
    rng, end = random.Random(name), time.monotonic() + SECONDS
    for others in [name] if name == "bench" else ["records", "curves", "images", "trees"]:
        append_json(tmp_path / f"{others}.jsonl", folder[others])
    path = tmp_path / f"{name}.jsonl"
    whole, tried, refused = path.read_bytes(), 0, 0
    while tried < 5 or (tried < 16 and time.monotonic() < end):
        lines = list(folder[name])
        place = rng.randrange(len(lines))
        lines[place] = mutant(lines[place], rng)
        text = "".join(json.dumps(line) + "\n" for line in lines).encode()
        path.write_bytes(damaged(whole, rng) if rng.random() < 0.15 else text)
        said = answer("report", str(tmp_path))
        tried, refused = tried + 1, refused + bool(said)
    assert refused > 1


def test_a_damaged_recipe_is_refused() -> None:
    rng, refused = random.Random(0), 0
    tables = [tomllib.loads(path.read_text("utf-8")) for path in known_recipes().values()]
    for _ in range(500):
        table = rng.choice(tables)
        try:
            recipe_from(mutant({**table, "seeds": 1, "cell": table["cell"][:2]}, rng), "a.toml")
        except GappedError:
            refused += 1
    assert refused > 100


def test_a_damaged_plan_is_refused(tmp_path: Path) -> None:
    rng, end = random.Random(0), time.monotonic() + SECONDS
    prepare([load_recipe(Path(recipe_file(tmp_path, seeds=2)), runs_per_fleet=2)], Store(tmp_path / "whole"))
    (kept,) = (tmp_path / "whole" / "checkpoints").glob("*.plan.json")
    plan, refused = json.loads(kept.read_bytes()), 0
    for attempt in range(40):
        path = tmp_path / f"o{attempt}" / "checkpoints" / kept.name
        path.parent.mkdir(parents=True)
        text = json.dumps(mutant(plan, rng)).encode()
        path.write_bytes(damaged(kept.read_bytes(), rng) if attempt % 5 == 0 else text)
        asked = ["--seeds", "2", "--runs-per-fleet", "2", "--device", "cpu", "--out", f"o{attempt}"]
        said = answer("reproduce", "toy.toml", *asked)
        assert not said or "plan" in said
        refused += bool(said)
        if time.monotonic() > end:
            break
    assert refused > 2


def test_damaged_logits_are_refused(tmp_path: Path) -> None:
    rng, end = random.Random(0), time.monotonic() + SECONDS
    zeros = torch.zeros(3, 4)
    odd: list[Any] = [zeros.to_sparse(), zeros.int(), zeros[0, 0], zeros[:0], zeros[:, :0], [zeros], {"a": 1}]
    odd += [zeros.cfloat(), zeros / 0, torch.zeros(3, 4, device="meta"), torch.nn.Parameter(zeros), None]
    buffer = io.BytesIO()
    torch.save(zeros, buffer)
    for attempt in range(60):
        path = tmp_path / "logits.pt"
        if attempt < len(odd):
            torch.save(odd[attempt], path)
        else:
            path.write_bytes(damaged(buffer.getvalue(), rng))
        answer("diagnose", "--logits", str(path), "--samples", "200", "--estimator", "gst")
        if time.monotonic() > end:
            break
    assert attempt > len(odd)


@pytest.mark.parametrize(
    ("value", "form", "problem"),
    [
        ({"a": [1, None]}, dict[str, list[float]], r"a\[1\]: got None, expected a number"),
        ({"a": True}, dict[str, float | None], "a: got True, expected a number or nothing"),
        (float("nan"), float, "got nan, expected a number"),
        (10**400, float, r"got 10+\.\.\.0+, expected a number"),
        (2**63, int, "got 9223372036854775808, expected a whole number"),
        (0, Annotated[int, Within(1)], "got 0, expected a whole number from 1"),
        ("abc", Annotated[str, Within(0, 2)], "got 'abc', expected a text of 0 to 2 characters"),
        ({"id": "x", "b": {}}, Curve, "b: got {}, expected a list or true or false or .* or nothing"),
        ({"b": []}, Curve, "id: got nothing, expected a text of 0 to 200 characters"),
        ({"a": {"b": "x" * 5000}}, dict[str, dict[str, int]], r"a\.b: got 'x+\.\.\.x+', expected .*"),
    ],
)
def test_a_fault_is_named(value: Any, form: Any, problem: str) -> None:
    with pytest.raises(GappedError, match=f"^a.json, line 3: {problem}$"):
        from_json(value, form, "a.json, line 3")


def test_a_metric_out_of_range_counts_as_a_lost_run(tmp_path: Path, capsys: Any) -> None:
    """The report says so, and shows the other numbers as ever."""
    values = {"GST": [1e150, 1.0, 1.2], "ST": [-1e308, 1e308, 1e39], "big": [1e30, 2e30]}
    runs = [line for label, numbers in values.items() for line in run_lines(label, numbers)]
    append_json(tmp_path / "records.jsonl", runs)
    curves = [{"id": r["id"], "epoch": [1, 2], "test_negative_elbo": [1e308, 1e150]} for r in runs]
    append_json(tmp_path / "curves.jsonl", curves)
    assert main(["report", str(tmp_path)]) == 0
    out = capsys.readouterr().out
    assert "GST: 1 of 3 runs diverged" in out
    assert "ST: 3 of 3 runs diverged" in out
    assert re.search(r"big +0\.5 +1\.5e\+30", out)


@pytest.mark.parametrize("what", ["images", "expressions"])
def test_a_bomb_of_gzip_is_not_unpacked(what: str, tmp_path: Path) -> None:
    """100 MB of zeros in 100 KB: no more than is expected of the file is ever in memory."""
    bomb = gzip.compress(bytes(10**8), 1)
    name = TINY_IMAGES.files[0].name if what == "images" else "valid.tsv"
    put_tiny_images(tmp_path, packed=True)
    path = tmp_path / f"{name}.gz"
    path.write_bytes(bomb)
    tracemalloc.start()
    try:
        with pytest.raises(GappedError, match=rf"{path}: too long: it unpacks to more than the [\d,]+ bytes"):
            TINY_IMAGES.load(tmp_path, False, False) if what == "images" else examples.read(path)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 5e7
