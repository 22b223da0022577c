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
from gapped.lab.spec import Entry, RunSpec
from gapped.lab.text import parse, show
from gapped.tasks.vae.protocol import protocol as vae_protocol

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
    if not isinstance(cells, list) or not cells:
        raise GappedError(f"{origin}: a recipe needs at least one [[cell]] table")
    settings = {k: v for k, v in table.items() if k not in ("cell", "quick")}
    if quick:
        shrunk = table.get("quick", {})
        _check_keys(shrunk, (_TOP | {"skip"}) - {"cell", "quick", "name"}, f"{origin} [quick]")
        cells = [cell for cell in cells if cell.get("label") not in shrunk.get("skip", [])]
        settings |= {k: v for k, v in shrunk.items() if k != "skip"}
    settings |= {k: v for k, v in overrides.items() if v is not None}
    for key in ("name", "task", "protocol"):
        if key not in settings:
            raise GappedError(f"{origin}: missing key {key!r}")
    seeds = _seeds(settings.pop("seeds", 1), origin)
    name, title = settings.pop("name"), settings.pop("title", "")
    per_fleet = settings.pop("runs_per_fleet", None)
    entries = [entry for cell in cells for entry in _expand(name, cell, settings, seeds, quick, origin)]
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
    kind, fixed = parse(cell["estimator"])
    merged = {**settings, **{k: v for k, v in cell.items() if k in (*_AXES, "schedule")}}
    options = {**fixed, **cell.get("options", {})}
    merged.update({k: options.pop(k) for k in ("tau",) if k in options})
    axes = {k: _listed(merged.pop(k)) for k in _AXES if k in merged}
    grid = {k: _listed(v) for k, v in options.items()}
    for values in product(*axes.values(), *grid.values()):
        point = dict(zip([*axes, *grid], values, strict=True))
        chosen = {k: point.pop(k) for k in grid}
        rest = {**merged, **point}
        rest.setdefault("data", "mnist")
        rest.setdefault("epochs", vae_protocol(rest["protocol"]).epochs)
        label = cell.get("label") or show(kind, chosen)
        for seed in _seeds(min(cell["seeds"], len(seeds)), origin) if "seeds" in cell else seeds:
            spec = RunSpec(estimator=kind, options=chosen, seed=seed, **rest)
            yield Entry(name, label.format(**chosen, **point), spec, quick)


def _seeds(value: object, origin: str) -> list[int]:
    if isinstance(value, int) and not isinstance(value, bool) and value >= 1:
        return list(range(value))
    if isinstance(value, list) and value and all(isinstance(v, int) and v >= 0 for v in value):
        return value
    raise GappedError(f"{origin}: seeds: got {value!r}, expected how many (at least 1), or a list of seeds")


def _listed(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [value]


def _check_keys(table: Mapping[str, Any], known: set[str], origin: str) -> None:
    for key in table:
        if key not in known:
            raise GappedError(f"{origin}: unknown key {key!r}, expected among {', '.join(sorted(known))}")
