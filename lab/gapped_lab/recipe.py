"""Recipes: TOML files that name a grid of runs."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from itertools import product
from pathlib import Path
from string import Formatter
from typing import Any

from gapped.checks import check_count
from gapped.comparison.records import Name
from gapped.comparison.records import from_json as parse_form
from gapped.errors import GappedError, reject, suggestion
from gapped.registry import spell
from gapped_lab.estimator_text import options_of, parse
from gapped_lab.recipe_files import ANSWERED, known_recipes
from gapped_lab.records import file_name
from gapped_lab.spec import Entry, RunSpec
from gapped_lab.task_kinds import TASK_KINDS

# How a label may write a number: sign, width and digits, of two figures at most.
_FORMAT = re.compile(r"\+?0?\d{0,2}(\.\d{1,2})?[defg%]?")

# A seed is easily written where their number belongs.
_MOST_SEEDS = 1_000_000
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
    """The most runs in one fleet; as many as fit if None."""
    quick: bool = False


def load_recipe(path: Path, *, quick: bool = False, **overrides: Any) -> Recipe:
    """Read and check a recipe. `quick` applies its ``[quick]`` table; `overrides` come last."""
    try:
        table = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as problem:
        raise GappedError(f"recipe: {path}: {problem.strerror or problem}") from None
    except (ValueError, RecursionError) as problem:  # TOMLDecodeError and UnicodeDecodeError among them
        raise GappedError(f"recipe: {path}: not valid TOML ({problem})") from None
    return recipe_from(table, str(path), quick=quick, **overrides)


def recipe_from(table: Mapping[str, Any], origin: str, *, quick: bool = False, **overrides: Any) -> Recipe:
    """Make a recipe of a parsed table; `origin` is named in errors."""
    _check_keys(table, _TOP, origin)
    cells = table.get("cell")
    if not isinstance(cells, list) or not cells or not all(isinstance(cell, dict) for cell in cells):
        raise GappedError(f"{origin}: a recipe needs at least one [[cell]] table")
    settings = {k: v for k, v in table.items() if k not in ("cell", "quick")}
    changes: dict[str, Any] = {}
    if quick:
        if "quick" not in table:
            advice = "add one, or use --epochs in place of --quick"
            raise GappedError(f"{origin}: the recipe has no [quick] section: {advice}")
        changes = dict(_table(table["quick"], f"{origin}: quick"))
        _check_keys(changes, (_TOP | {"skip"}) - {"cell", "quick", "name"}, f"{origin} [quick]")
        cells = _skip(cells, changes.pop("skip", []), origin)
        if "protocol" in changes:
            cells = _restrict(cells, _list(changes["protocol"], f"{origin} [quick]: protocol"), origin)
    changes |= {k: v for k, v in overrides.items() if v is not None}
    settings |= changes
    for key in ("name", "task", "protocol"):
        if key not in settings:
            raise GappedError(f"{origin}: missing key {key!r}")
    _text(settings["task"], f"{origin}: task")
    seeds = _seeds(settings.pop("seeds"), origin) if "seeds" in settings else None
    name, title = (_text(settings.pop(key, ""), f"{origin}: {key}") for key in ("name", "title"))
    if file_name(name) != name:
        raise reject(f"{origin}: name", name, "a plain file name, such as vae-30x10")
    per_fleet = settings.pop("runs_per_fleet", None)
    if per_fleet is not None:
        check_count(f"{origin}: runs_per_fleet", per_fleet)
    entries: list[Entry] = []
    for cell in cells:
        own = _seeds_of(cell, seeds, "seeds" in changes, origin)
        entries += _expand(name, cell, settings, own, quick, origin)
    _check_distinct(entries, origin)
    return Recipe(name, title, tuple(entries), per_fleet, quick)


def find_recipe(name: str, *, quick: bool = False, also: Sequence[str] = (), **overrides: Any) -> Recipe:
    """A packaged recipe by name, or any by its path; `also` are names that mean something to the caller."""
    known = known_recipes()
    if name in ANSWERED:
        path = f"results/answered/{name}.toml"
        raise GappedError(f"recipe: {name!r} has been answered; in a clone: gapped reproduce {path}")
    if name not in known and not name.endswith(".toml"):
        names = sorted([*known, *also])
        if hint := suggestion(name, names):
            raise GappedError(
                f"recipe: got {name!r}{hint} (gapped reproduce --help lists all; a file ends in .toml)"
            )
        raise reject("recipe", name, f"one of {', '.join(names)}, or the path of a .toml file")
    return load_recipe(known.get(name, Path(name)), quick=quick, **overrides)


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
    common = {**settings, **{k: v for k, v in cell.items() if k in (*_AXES, "schedule")}}
    options = {**fixed, **_table(cell.get("options", {}), f"{origin} [[cell]]: options")}
    own_tau = "tau" in cell or "tau" in options
    if "tau" in options:
        common["tau"] = options.pop("tau")
    if "tau" not in options_of(kind):
        tau = common.pop("tau", None)
        if own_tau:
            accepted = f"none: {kind} has no temperature"
            raise GappedError(f"{origin} [[cell]]: tau: got {tau!r}, expected {accepted}")
    axes = {k: _list(common.pop(k), f"{origin}: {k}") for k in _AXES if k in common}
    grid = {k: _list(v, f"{origin}: {k}") for k, v in options.items()}
    for values in product(*axes.values(), *grid.values()):
        point = dict(zip([*axes, *grid], values, strict=True))
        own_options = {k: point.pop(k) for k in grid}
        rest = {**common, **point}
        _text(rest["protocol"], f"{origin}: protocol")
        if rest["task"] in TASK_KINDS:
            rules = TASK_KINDS[rest["task"]].rules(rest["protocol"])
            rest.setdefault("data", rules.data)
            rest.setdefault("epochs", rules.epochs)
        rest.setdefault("data", "")  # of an unknown task: the spec says which are known
        label = _label(cell.get("label"), kind, own_options, point, axes, origin)
        for seed in seeds:
            yield Entry(name, label, RunSpec(estimator=kind, options=own_options, seed=seed, **rest), quick)


def _label(
    text: object,
    kind: str,
    options: dict[str, Any],
    point: dict[str, Any],
    axes: Mapping[str, list[Any]],
    origin: str,
) -> str:
    """The label of a cell, in which braces may name options and grid values; by default, whatever varies.

    A temperature is shown beside every label.
    """
    what = f"{origin} [[cell]]: label"
    if text is None:
        varied = [f"{k}={point[k]}" for k in _AXES if k != "tau" and len(axes.get(k, ())) > 1]
        return _text(", ".join([spell(kind, options), *varied]), what)
    values = {**options, **point}
    try:
        return _text(_fill(_text(text, what), values), what)
    except GappedError:
        raise
    except (KeyError, ValueError, TypeError):
        accepted = f"braces around {', '.join(values)}, with a number format such as :.2f at most"
        raise reject(what, text, accepted) from None


def _fill(text: str, values: Mapping[str, Any]) -> str:
    """A template with its values. Not `str.format`, which also reads attributes and pads without a limit."""
    label = ""
    for literal, name, form, conversion in Formatter().parse(text):
        label += literal
        if name is not None:
            if conversion or not _FORMAT.fullmatch(form or ""):
                raise ValueError
            label += format(values[name], form or "")
    return label


def _skip(cells: list[Any], skip: object, origin: str) -> list[Any]:
    """The cells that a quick run does not skip."""
    labels = [cell.get("label") for cell in cells]
    if not isinstance(skip, list) or any(label not in labels for label in skip):
        known = ", ".join(str(label) for label in labels)
        raise GappedError(f"{origin} [quick]: skip: got {skip!r}, expected a list of labels among {known}")
    rest = [cell for cell in cells if cell.get("label") not in skip]
    if not rest:
        raise GappedError(f"{origin} [quick]: skip leaves no cell")
    return rest


def _restrict(cells: list[Any], protocols: list[Any], origin: str) -> list[Any]:
    """The cells with those of their own protocols that are among `protocols`, if they have any."""
    rest = []
    for cell in cells:
        own = _list(cell.get("protocol", protocols), f"{origin} [[cell]]: protocol")
        left = [protocol for protocol in own if protocol in protocols]
        if left:
            rest.append({**cell, "protocol": left} if "protocol" in cell else cell)
    if not rest:
        raise GappedError(f"{origin} [quick]: protocol leaves no cell")
    return rest


def _check_distinct(entries: list[Entry], origin: str) -> None:
    """No run twice, and no two runs in one place of the report."""
    ids: set[str] = set()
    places: dict[tuple[Any, ...], RunSpec] = {}
    for entry in entries:
        spec = entry.spec
        at = "" if spec.tau is None else f" at tau {spec.tau:g}"
        what = f"{entry.label}{at}, seed {spec.seed}"
        if spec.id in ids:
            raise GappedError(f"{origin}: the same run is asked for twice: {what}")
        ids.add(spec.id)
        other = places.setdefault((entry.label, spec.tau, spec.protocol, spec.data, spec.seed), spec)
        if other is not spec:
            differ = [f.name for f in fields(RunSpec) if getattr(spec, f.name) != getattr(other, f.name)]
            raise GappedError(
                f"{origin}: two runs are called {what}, and differ in {', '.join(differ)}: give their cells "
                "labels that tell them apart, with braces around what a list varies, as in {learning_rate}"
            )


def _seeds_of(cell: Mapping[str, Any], seeds: list[int] | None, override: bool, origin: str) -> list[int]:
    """The seeds of a cell: its own list, or the first of the recipe's `seeds`.

    With an `override`, `seeds` are not the recipe's own: no cell has more of them, and that is no error.
    """
    if "seeds" not in cell:
        return seeds or [0]
    own = _seeds(cell["seeds"], f"{origin} [[cell]]")
    if seeds is None:
        return own
    if isinstance(cell["seeds"], list):
        return own[: len(seeds)] if override else own
    if len(own) > len(seeds) and not override:
        raise GappedError(
            f"{origin} [[cell]]: seeds: got {len(own)}, expected at most the recipe's {len(seeds)}, or a list"
        )
    return seeds[: len(own)]


def _seeds(value: object, origin: str) -> list[int]:
    if type(value) is int and 1 <= value <= _MOST_SEEDS:
        return list(range(value))
    if isinstance(value, list) and value and all(type(v) is int and v >= 0 for v in value):
        return value
    accepted = f"how many (1 to {_MOST_SEEDS}), or a list of seeds"
    raise GappedError(f"{origin}: seeds: got {value!r}, expected {accepted}")


def _list(value: Any, what: str) -> list[Any]:
    if value == []:
        raise GappedError(f"{what}: got an empty list, expected at least one value")
    return value if isinstance(value, list) else [value]


def _table(value: Any, what: str) -> dict[str, Any]:
    parse_form(value, dict[str, Any], what)
    return value  # type: ignore[no-any-return]


def _text(value: Any, what: str) -> str:
    parse_form(value, Name, what)
    if not value.isprintable():
        raise reject(what, value, "a text that prints, in one line")
    return value  # type: ignore[no-any-return]


def _check_keys(table: Mapping[str, Any], known: set[str], origin: str) -> None:
    for key in table:
        if key not in known:
            raise GappedError(f"{origin}: unknown key {key!r}, expected among {', '.join(sorted(known))}")
