"""Curves as TensorBoard event files: a view for people; the record is the JSON line."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from gapped import records
from gapped.errors import require
from gapped.lab.kinds import KINDS
from gapped.records import Line

__all__ = ["event_writer", "write_events"]


def event_writer() -> type[Any]:
    """What writes event files; its absence is an error, better met before training than after."""
    require("--tensorboard", "tensorboard")
    from torch.utils.tensorboard import SummaryWriter

    return SummaryWriter


def write_events(made: Iterable[Line], folder: Path) -> Path:
    """Write one event file per run of `made` under ``folder/tensorboard``, unless it is there already."""
    writer_of = event_writer()
    curves = {line["id"]: line for line in records.load(folder / "curves.jsonl")}
    target = folder / "tensorboard"
    for record in made:
        curve = curves.get(record["id"])
        run = target / _place(record)
        if curve is None or run.exists():
            continue
        with writer_of(str(run)) as writer:
            for name, values in curve.items():
                if name in ("id", "epoch"):
                    continue
                for epoch, value in zip(curve["epoch"], values, strict=True):
                    if value is not None:
                        writer.add_scalar(name, value, epoch)
    return target


def _place(record: Line) -> Path:
    """A folder for each run: recipe, protocol and data, cell and seed.

    The end is the run's id: a cell may have been trained for another number of epochs before.
    """
    data = "" if record["data"] == KINDS[record["task"]].data[0] else f"-{record['data']}"
    at = "" if record["tau"] is None else f"-tau{record['tau']:g}"
    cell = f"{record['label']}{at}-seed{record['seed']}-{record['id'][:6]}"
    return Path(*(part.replace("/", "_") for part in (record["recipe"], record["protocol"] + data, cell)))
