"""The tables of choices out of a vocabulary: cost of a linear choice, and the word model's tuning."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from statistics import fmean, stdev
from typing import Any

import numpy as np
from evidence import Evidence, LinearTiming
from template import fill

from gapped.comparison.table import NOTHING, Entry, Table, without_empty
from gapped.texts import DEFAULT
from gapped_lab.records import Tuning

LINEAR, PRODUCT = "linear_choice", "product"
WAYS = ("torch", "dense logits", LINEAR)
TABLES = {"own": "own", "weight": "the weight", "none": "no gradient"}
Key = tuple[int, int, int, str]
"""Rows, width, categories, and what rows are selected from."""


def cases(lines: Iterable[LinearTiming]) -> dict[str, dict[Key, dict[str, LinearTiming]]]:
    """The last lines about each case by who computes, case by case, device by device."""
    devices: dict[str, dict[Key, dict[str, LinearTiming]]] = {}
    for line in lines:
        key = (line.rows, line.width, line.categories, line.table)
        device = str(line.environment.get("device") or "an unnamed device")
        devices.setdefault(device, {}).setdefault(key, {})[line.way] = line
    return devices


def linear_choices(evidence: Evidence) -> str:
    """Every case, device by device; a GPU without records is said to have none."""
    texts = []
    for device, mine in cases(evidence.linear).items():
        values = {"device": device, "versions": _versions(mine), "table": _table(mine)}
        texts.append(fill("vocabulary-device", values))
    if all(line.device_type != "cuda" for line in evidence.linear):
        texts.append(fill("vocabulary-unmeasured", {}))
    return "\n\n".join(texts)


def _versions(mine: dict[Key, dict[str, LinearTiming]]) -> str:
    places = [line.environment for ways in mine.values() for line in ways.values()]
    return "; ".join(dict.fromkeys(f"torch {p['torch']}, gapped at {p['commit']}" for p in places))


def _table(mine: dict[Key, dict[str, LinearTiming]]) -> Table:
    body = []
    for (rows, width, categories, table), ways in sorted(mine.items(), key=lambda item: item[0]):
        sizes = f"{rows:,} × {width:,} × {categories:,}"
        product, linear = (_time(ways.get(way)) for way in (PRODUCT, LINEAR))
        count = 1 if table == "none" else 5
        ratio = None if product is None or linear is None else linear / (count * product)
        body.append(
            (
                Entry(sizes),
                Entry(TABLES[table]),
                *(_time_of(ways.get(way)) for way in WAYS),
                Entry(NOTHING) if product is None else Entry(f"{_format(count * product)} ms ({count})"),
                Entry(NOTHING) if ratio is None else Entry(f"{ratio:.2f}", ratio),
            )
        )
    names = ("torch", "dense logits", "`linear_choice`", "its products alone", "ratio")
    return without_empty(Table(("rows × width × categories", "table", *names), tuple(body)))


def _time(line: LinearTiming | None) -> float | None:
    return None if line is None or line.milliseconds is None else line.milliseconds.median


def _format(milliseconds: float) -> str:
    return f"{milliseconds:.3f}" if milliseconds < 10 else f"{milliseconds:.1f}"


def _time_of(line: LinearTiming | None) -> Entry:
    spent = _time(line)
    if line is None or spent is None or line.memory is None:
        return Entry(NOTHING)
    return Entry(f"{_format(spent)} ms, {line.memory:,.0f} MiB", spent)


def word_model(evidence: Evidence) -> dict[str, Any]:
    """The table of `examples/word_model.py`."""
    body = []
    groups = tunings(evidence)
    for name, runs in groups.items():
        quarters = zip(*(_quarters(run.rewards) for run in runs), strict=True)
        body.append(
            (
                Entry(name, code=True),
                Entry(" ".join(f"{fmean(values):.2f}" for values in quarters)),
                _mean([run.nats_lost for run in runs], 3),
                _mean([run.spread for run in runs], 3),
                _mean([run.milliseconds for run in runs], 1),
                _mean([run.memory for run in runs], 1),
            )
        )
    measured = ("nats lost", "gradient sd / mean", "ms a step", "MiB a step")
    table = Table(("estimator", "reward by quarter of the steps", *measured), tuple(body))
    runs = next(iter(groups.values()))
    return {"table": table, "steps": len(runs[0].rewards), "seeds": len(runs)}


def tunings(evidence: Evidence) -> dict[str, list[Tuning]]:
    """The last run of each seed, by estimator, the default first."""
    last = {(line.estimator, line.seed): line for line in evidence.tunings}
    names = sorted(dict.fromkeys(name for name, _ in last), key=lambda name: name != DEFAULT)
    return {name: [line for (own, _), line in last.items() if own == name] for name in names}


def _quarters(rewards: Sequence[float]) -> list[float]:
    return [float(part.mean()) for part in np.array_split(np.array(rewards), 4)]


def _mean(values: Sequence[float], digits: int) -> Entry:
    mean = fmean(values)
    spread = f" ± {stdev(values):.{digits}f}" if len(values) > 1 else ""
    return Entry(f"{mean:.{digits}f}{spread}", mean)
