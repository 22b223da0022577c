"""How fast the tables were trained, fleet by fleet."""

from __future__ import annotations

from dataclasses import dataclass, field

from gapped.errors import listing
from gapped.lab.report.evidence import Evidence
from gapped.lab.report.tables import Entry, Table, to_markdown

AUTHORS_SECONDS = 4.6
"""Seconds that the authors' script takes for one epoch of one run, measured on the same kind of GPU."""


@dataclass
class _Fleet:
    """Runs that were trained together."""

    seconds: float
    size: int
    epochs: int
    recipes: dict[str, None] = field(default_factory=dict)

    @property
    def pace(self) -> float:
        return self.seconds / self.size / self.epochs


def speed(evidence: Evidence) -> str:
    """Every fleet with its seconds, beside what the authors' script would take for the same runs."""
    fleets = _fleets(evidence)
    body = []
    for one in fleets:
        hours = AUTHORS_SECONDS * one.size * one.epochs / 3600
        body.append(
            (
                Entry(", ".join(one.recipes), code=True),
                Entry(str(one.size), one.size),
                Entry(str(one.epochs), one.epochs),
                Entry(f"{one.seconds:.1f}", one.seconds),
                Entry(f"{1e3 * one.pace:.1f}", one.pace),
                Entry(f"{hours:.1f}", hours),
                Entry(f"{AUTHORS_SECONDS / one.pace:.0f}", AUTHORS_SECONDS / one.pace),
            )
        )
    columns = (
        "tables",
        "runs",
        "epochs",
        "seconds",
        "ms per run and epoch",
        "authors' script, hours",
        "ratio",
    )
    notes = (
        "Seconds of training and of the test after each epoch, the whole fleet together. Starting up is not "
        "in them.",
        f"Authors' script: {AUTHORS_SECONDS} s for one epoch of one run on an H200, where loading the data "
        f"dominates.{_alone(evidence)}",
    )
    return to_markdown(Table(columns, tuple(body), notes))


def _fleets(evidence: Evidence) -> list[_Fleet]:
    found: dict[tuple[object, ...], _Fleet] = {}
    for r in evidence.records:
        seconds, size, epochs = (
            float(r.get("seconds") or 0),
            int(r.get("runs_in_fleet") or 1),
            r.get("epochs"),
        )
        # The authors' script trains this model on MNIST: nothing else can be set beside it.
        same = r.get("data") == "mnist" and str(r.get("protocol", "")).endswith("30x10")
        if not seconds or size == 1 or not epochs or not same:
            continue
        key = (seconds, size, epochs, (r.get("environment") or {}).get("commit"))
        found.setdefault(key, _Fleet(seconds, size, int(epochs))).recipes[str(r["recipe"])] = None
    return list(found.values())


def _alone(evidence: Evidence) -> str:
    """What one run alone takes, so that the gain of training together is not taken for that of one run."""
    alone = {
        c.label: float(c.values("seconds_per_epoch")[0])
        for c in evidence.group("efficiency")
        if c.values("seconds_per_epoch").size
    }
    said = listing(f"{pace:.3f} s ({name})" for name, pace in alone.items())
    lead = " Alone on the GPU, a run of ours takes for an epoch: "
    return f"{lead}{said}. The rest of the ratio comes from training together." if alone else ""
