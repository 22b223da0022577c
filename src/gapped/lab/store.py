"""A folder of results: records, curves, pictures, checkpoints."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch

from gapped import records
from gapped.errors import GappedError
from gapped.records import Line

__all__ = ["Store"]


class Store:
    """Where a recipe's results go. What is in it is never recomputed and never overwritten."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._probe()

    def done(self) -> dict[tuple[str, str], Line]:
        """Records by recipe and id."""
        return {(line["recipe"], line["id"]): line for line in records.load(self.folder / "records.jsonl")}

    def add(self, made: Iterable[Line], curves: Iterable[Line] = (), images: Iterable[Line] = ()) -> None:
        """Add what is not there yet. Records come last: a run whose record exists has everything else too."""
        for name, lines in (("curves", curves), ("images", images)):
            path = self.folder / f"{name}.jsonl"
            known = {line["id"] for line in records.load(path)}
            records.append(path, [line for line in lines if line["id"] not in known])
        done = self.done()
        fresh = [line for line in made if (line["recipe"], line["id"]) not in done]
        records.append(self.folder / "records.jsonl", fresh)

    def save_checkpoint(self, key: str, state: dict[str, Any]) -> None:
        with records.atomic_write(self._checkpoint(key)) as file:
            torch.save(state, file)

    def load_checkpoint(self, key: str, device: torch.device) -> dict[str, Any] | None:
        """The state saved under `key`, or None. Only tensors and plain containers are accepted."""
        path = self._checkpoint(key)
        if not path.exists():
            return None
        try:
            state: dict[str, Any] = torch.load(path, map_location=device, weights_only=True)
        except Exception as problem:
            reason = str(problem).splitlines()[0]
            raise GappedError(
                f"{path}: not a checkpoint that can be read safely ({reason}); remove it to start over"
            ) from None
        return state

    def drop_checkpoint(self, key: str) -> None:
        path = self._checkpoint(key)
        path.unlink(missing_ok=True)
        if path.parent.exists() and not any(path.parent.iterdir()):
            path.parent.rmdir()

    def _checkpoint(self, key: str) -> Path:
        return self.folder / "checkpoints" / f"{key}.pt"

    def _probe(self) -> None:
        """Fail before any work is done if nothing can be written here."""
        probe = self.folder / f".probe.{os.getpid()}"
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            probe.write_bytes(b"x")
            probe.unlink()
        except OSError as problem:
            raise GappedError(f"{self.folder}: cannot write here ({problem.strerror})") from None
