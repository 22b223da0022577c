"""The embedded default: the 8x8 handwritten digits that ship inside scikit-learn."""

from __future__ import annotations

from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

import torch

from gapped.errors import GappedError, require
from gapped.lab.data.sources import Dataset, Resource

_TRAIN = 1500
_SEED = 0


@dataclass(frozen=True)
class DigitsSource:
    """1,797 images with values 0..16, in a fixed split of 1,500 train and 297 test.

    scikit-learn keeps the images in the order of collection, writer after writer, and offers no split.
    Here ``torch.randperm`` permutes them with its own generator, seed 0, and the first 1,500 are train: the
    same on every machine, without touching global random state.
    """

    name: str = "digits"
    summary: str = "1,500 + 297 handwritten digits, 8x8; embedded, works offline"

    def locate(self, data_dir: Path | None) -> list[Resource]:
        present = find_spec("sklearn") is not None
        return [Resource("load_digits", "inside scikit-learn" if present else None)]

    def check(self, data_dir: Path | None) -> None:
        require("the data set digits", "sklearn")

    def fetch(self, data_dir: Path | None, progress: bool, download: bool) -> list[Resource]:
        self.load(data_dir, progress, download)
        return [Resource("load_digits", "inside scikit-learn", "shape")]

    def load(self, data_dir: Path | None, progress: bool, download: bool) -> Dataset:
        self.check(data_dir)
        from sklearn.datasets import load_digits

        bunch = load_digits()
        images = torch.from_numpy(bunch.data).to(torch.uint8)
        labels = torch.from_numpy(bunch.target).to(torch.int64)
        if images.shape != (1797, 64):
            raise GappedError(f"digits: scikit-learn gave shape {tuple(images.shape)}, expected (1797, 64)")
        order = torch.randperm(len(images), generator=torch.Generator().manual_seed(_SEED))
        train, test = order[:_TRAIN], order[_TRAIN:]
        return Dataset(self.name, images[train], images[test], labels[train], labels[test], 8, 8, 16)
