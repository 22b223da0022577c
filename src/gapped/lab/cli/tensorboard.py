"""Curves as TensorBoard event files, a view for people: the records are the JSON lines."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from gapped.errors import require
from gapped.lab import records
from gapped.lab.fleet.trainer import derived_hash
from gapped.lab.kinds import KINDS
from gapped.lab.records import Line, file_name
from gapped.lab.report.cells import label


def event_writer() -> type[Any]:
    """TensorBoard's writer of event files; called before training, so that its absence is told early."""
    require("--tensorboard", "tensorboard")
    from torch.utils.tensorboard import SummaryWriter

    return SummaryWriter


def write_events(made: Iterable[Line], folder: Path) -> Path:
    """Write one event file per run of `made` under ``folder/tensorboard``, unless it is there already.

    Its name ends with a hash of the curve: if a run was trained again, the new file replaces the old one.
    """
    writer_type = event_writer()
    curves = {line["id"]: line for line in records.load(folder / "curves.jsonl")}
    target = folder / "tensorboard"
    for record in made:
        curve = curves.get(record["id"])
        run = target / _place(record)
        if curve is None:
            continue
        ending = f".{derived_hash(json.dumps(curve, sort_keys=True))}"
        older = list(run.glob("events.out.tfevents.*"))
        if any(path.suffix == ending for path in older):
            continue
        for path in older:
            path.unlink()
        with writer_type(str(run), filename_suffix=ending) as writer:
            epochs = curve.get("epoch") or ()
            series = {name: v for name, v in curve.items() if isinstance(v, list) and name != "epoch"}
            for name, values in series.items():
                for epoch, value in zip(epochs, values, strict=False):
                    if value is not None:
                        writer.add_scalar(name, value, epoch)
    return target


def _place(record: Line) -> Path:
    """A folder for each run: recipe, protocol and data, cell and seed.

    The end is the run's id: a cell may have been trained for another number of epochs before.
    """
    kind = KINDS.get(record.get("task", ""))
    data = record.get("data")
    named = "" if data is None or (kind and data == kind.data[0]) else f"-{data}"
    tau = record.get("tau")
    at = "" if tau is None else f"-tau{tau:g}"
    run = f"{at}-seed{record.get('seed', 0)}-{file_name(record['id'][:6])}"
    table = file_name(f"{record.get('protocol') or ''}{named}")
    return Path(file_name(record["recipe"]), table, file_name(label(record)) + run)
