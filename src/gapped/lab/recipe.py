"""Recipes: TOML files that name a grid of runs."""

from __future__ import annotations

import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields
from importlib import resources
from itertools import product
from pathlib import Path
from typing import Any

from gapped.errors import GappedError, reject
from gapped.lab.kinds import KINDS
from gapped.lab.spec import Entry, RunSpec
from gapped.lab.text import parse, show

__all__ = ["Recipe", "find_recipe", "known_recipes", "load_recipe"]

_AXES = ("tau", "protocol", "learning_rate", "rate_decay")
_SPEC_KEYS = {f.name for f in fields(RunSpec)} - {"seed", "options", "estimator", "tau", "schedule"}
_TOP = _SPEC_KEYS | {"name", "title", "seeds", "tau", "schedule", "runs_per_fleet", "cell", "quick"}
_CELL = {"label", "estimator", "options", "schedule", "seeds", *_AXES}


@dataclass(frozen=True)
class Recipe:
    """A grid of runs with a name."""

    name: str
    title: str
    entries: tuple[Entry, ...]
    runs_per_fleet: int | None = None
    """At most so many runs in one fleet; as many as fit if None."""
    quick: bool = False


def load_recipe(path: Path, *, quick: bool = False, **overrides: Any) -> Recipe:
    """Read and check a recipe. `quick` applies its ``[quick]`` table; `overrides` come last."""
    try:
        table = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as problem:
        raise GappedError(f"recipe: {path}: {problem.strerror or problem}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as problem:
        raise GappedError(f"recipe: {path}: not valid TOML ({problem})") from None
    return recipe_from(table, str(path), quick=quick, **overrides)


def recipe_from(table: Mapping[str, Any], origin: str, *, quick: bool = False, **overrides: Any) -> Recipe:
    """Make a recipe of a parsed table; `origin` is named in errors."""
    _check_keys(table, _TOP, origin)
    cells = table.get("cell")
    if not isinstance(cells, list) or not cells or not all(isinstance(cell, dict) for cell in cells):
        raise GappedError(f"{origin}: a recipe needs at least one [[cell]] table")
    settings = {k: v for k, v in table.items() if k not in ("cell", "quick")}
    if quick:
        shrunk = dict(_table(table.get("quick", {}), f"{origin}: quick"))
        _check_keys(shrunk, (_TOP | {"skip"}) - {"cell", "quick", "name"}, f"{origin} [quick]")
        cells = _kept(cells, shrunk.pop("skip", []), origin)
        settings |= shrunk
    settings |= {k: v for k, v in overrides.items() if v is not None}
    for key in ("name", "task", "protocol"):
        if key not in settings:
            raise GappedError(f"{origin}: missing key {key!r}")
    seeds = _seeds(settings.pop("seeds", 1), origin)
    name, title = settings.pop("name"), settings.pop("title", "")
    if not isinstance(name, str) or not name:
        raise GappedError(f"{origin}: name: got {name!r}, expected a text")
    per_fleet = settings.pop("runs_per_fleet", None)
    if per_fleet is not None and (not isinstance(per_fleet, int) or per_fleet < 1):
        raise GappedError(f"{origin}: runs_per_fleet: got {per_fleet!r}, expected a positive integer")
    entries = [entry for cell in cells for entry in _expand(name, cell, settings, seeds, quick, origin)]
    _check_distinct(entries, origin)
    return Recipe(name, title, tuple(entries), per_fleet, quick)


def known_recipes() -> dict[str, Path]:
    """The recipes that come with the package, by name."""
    packaged = Path(str(resources.files("gapped"))) / "recipes"
    # An editable install has them beside the sources instead.
    folder = packaged if packaged.is_dir() else Path(__file__).parents[3] / "recipes"
    return {path.stem: path for path in sorted(folder.glob("*.toml"))}


def find_recipe(name: str, *, quick: bool = False, **overrides: Any) -> Recipe:
    """A packaged recipe by name, or any by its path."""
    known = known_recipes()
    if name in known:
        return load_recipe(known[name], quick=quick, **overrides)
    if name.endswith(".toml"):
        return load_recipe(Path(name), quick=quick, **overrides)
    raise reject("recipe", name, f"one of {', '.join(known)}, or the path of a .toml file")


def _expand(
    name: str,
    cell: Mapping[str, Any],
    settings: Mapping[str, Any],
    seeds: list[int],
    quick: bool,
    origin: str,
) -> Iterator[Entry]:
    _check_keys(cell, _CELL, f"{origin} [[cell]]")
    if "estimator" not in cell:
        raise GappedError(f"{origin} [[cell]]: missing key 'estimator'")
    kind, fixed = parse(_text(cell["estimator"], f"{origin} [[cell]]: estimator"))
    merged = {**settings, **{k: v for k, v in cell.items() if k in (*_AXES, "schedule")}}
    options = {**fixed, **_table(cell.get("options", {}), f"{origin} [[cell]]: options")}
    if "tau" in options:
        merged["tau"] = options.pop("tau")
    axes = {k: _listed(merged.pop(k), f"{origin}: {k}") for k in _AXES if k in merged}
    grid = {k: _listed(v, f"{origin}: {k}") for k, v in options.items()}
    own = seeds[: len(_seeds(cell["seeds"], f"{origin} [[cell]]"))] if "seeds" in cell else seeds
    for values in product(*axes.values(), *grid.values()):
        point = dict(zip([*axes, *grid], values, strict=True))
        chosen = {k: point.pop(k) for k in grid}
        rest = {**merged, **point}
        if rest["task"] in KINDS:  # else the spec says what is accepted
            rest.setdefault("data", KINDS[rest["task"]].data[0])
            rest.setdefault("epochs", KINDS[rest["task"]].rules(rest["protocol"]).epochs)
        label = _label(cell.get("label"), kind, chosen, point, origin)
        for seed in own:
            yield Entry(name, label, RunSpec(estimator=kind, options=chosen, seed=seed, **rest), quick)


def _label(text: object, kind: str, chosen: dict[str, Any], point: dict[str, Any], origin: str) -> str:
    """The label of a cell; options and grid values may be named in braces."""
    if text is None:
        return show(kind, chosen)
    try:
        return _text(text, f"{origin} [[cell]]: label").format(**chosen, **point)
    except (KeyError, IndexError, ValueError):
        known = ", ".join([*chosen, *point])
        raise GappedError(f"{origin} [[cell]]: label: got {text!r}, expected braces around {known}") from None


def _kept(cells: list[Any], skip: object, origin: str) -> list[Any]:
    """The cells that a quick run does not skip."""
    labels = [cell.get("label") for cell in cells]
    if not isinstance(skip, list) or any(label not in labels for label in skip):
        known = ", ".join(str(label) for label in labels)
        raise GappedError(f"{origin} [quick]: skip: got {skip!r}, expected a list of labels among {known}")
    kept = [cell for cell in cells if cell.get("label") not in skip]
    if not kept:
        raise GappedError(f"{origin} [quick]: skip leaves no cell")
    return kept


def _check_distinct(entries: list[Entry], origin: str) -> None:
    seen: set[str] = set()
    for entry in entries:
        if entry.spec.id in seen:
            at = "" if entry.spec.tau is None else f" at tau {entry.spec.tau:g}"
            what = f"{entry.label}{at}, seed {entry.spec.seed}"
            raise GappedError(f"{origin}: the same run is asked for twice: {what}")
        seen.add(entry.spec.id)


def _seeds(value: object, origin: str) -> list[int]:
    if isinstance(value, int) and not isinstance(value, bool) and value >= 1:
        return list(range(value))
    if isinstance(value, list) and value and all(type(v) is int and v >= 0 for v in value):
        return value
    raise GappedError(f"{origin}: seeds: got {value!r}, expected how many (at least 1), or a list of seeds")


def _listed(value: Any, what: str) -> list[Any]:
    if value == []:
        raise GappedError(f"{what}: got an empty list, expected at least one value")
    return value if isinstance(value, list) else [value]


def _table(value: object, what: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise GappedError(f"{what}: got {value!r}, expected a table")
    return value


def _text(value: object, what: str) -> str:
    if not isinstance(value, str):
        raise GappedError(f"{what}: got {value!r}, expected a text")
    return value


def _check_keys(table: Mapping[str, Any], known: set[str], origin: str) -> None:
    for key in table:
        if key not in known:
            raise GappedError(f"{origin}: unknown key {key!r}, expected among {', '.join(sorted(known))}")
