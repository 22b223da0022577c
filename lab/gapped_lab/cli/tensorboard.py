"""Curves as TensorBoard event files, a view for people: the records are the JSON lines."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from gapped.comparison import records
from gapped.comparison.records import Curve, Record, derived_hash
from gapped.errors import require
from gapped_lab.records import file_name
from gapped_lab.task_kinds import TASK_KINDS


def event_writer() -> type[Any]:
    """TensorBoard's writer of event files; called before training, so that its absence is told early."""
    require("--tensorboard", "tensorboard", extra="tensorboard")
    from torch.utils.tensorboard import SummaryWriter

    return SummaryWriter


def write_events(runs: Iterable[Record], folder: Path) -> Path:
    """Write one event file for each of the `runs` under ``folder/tensorboard``, unless it is there already.

    Its name ends with a hash of the curve: if a run was trained again, the new file replaces the old one.
    """
    writer_type = event_writer()
    curves = {curve.id: curve for curve in records.read(folder, Curve)}
    target = folder / "tensorboard"
    for record in runs:
        curve = curves.get(record.id)
        run = target / _place(record)
        if curve is None:
            continue
        ending = f".{derived_hash(curve.encode().decode())}"
        older = list(run.glob("events.out.tfevents.*"))
        if any(path.suffix == ending for path in older):
            continue
        for path in older:
            path.unlink()
        with writer_type(str(run), filename_suffix=ending) as writer:
            for name, values in curve.series.items():
                for epoch, value in zip(curve.epoch, values, strict=False):
                    if value is not None:
                        writer.add_scalar(name, value, epoch)
    return target


def _place(record: Record) -> Path:
    """A folder for each run: recipe, protocol and data, cell and seed.

    The end is the run's id: a cell may have been trained for another number of epochs before.
    """
    kind = TASK_KINDS.get(record.task)
    data = "" if kind and record.data == kind.data[0] else f"-{record.data}"
    at = "" if record.tau is None else f"-tau{record.tau:g}"
    run = f"{at}-seed{record.seed}-{file_name(record.id[:6])}"
    return Path(
        file_name(record.recipe),
        file_name(f"{record.protocol}{data}"),
        file_name(record.label) + run,
    )
