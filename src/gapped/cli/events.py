"""Curves as TensorBoard event files: a view for people; the record is the JSON line."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from gapped import records
from gapped.errors import GappedError
from gapped.records import Line

__all__ = ["write_events"]


def write_events(made: Iterable[Line], folder: Path) -> Path:
    """Write one event file per run of `made` under ``folder/tensorboard``."""
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError:
        raise GappedError("--tensorboard needs the package tensorboard: pip install tensorboard") from None
    curves = {line["id"]: line for line in records.load(folder / "curves.jsonl")}
    target = folder / "tensorboard"
    for record in made:
        curve = curves.get(record["id"])
        at = "" if record["tau"] is None else f"-tau{record['tau']:g}"
        run = target / f"{record['label']}{at}-seed{record['seed']}".replace("/", "_")
        if curve is None or run.exists():
            continue
        with SummaryWriter(str(run)) as writer:
            for name, values in curve.items():
                if name in ("id", "epoch"):
                    continue
                for epoch, value in zip(curve["epoch"], values, strict=True):
                    if value is not None:
                        writer.add_scalar(name, value, epoch)
    return target
