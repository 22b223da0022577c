"""The types that data sets share: a source, the resources it consists of, and images once loaded."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Protocol, TypeVar

import torch

T_co = TypeVar("T_co", covariant=True)


@dataclass(frozen=True)
class Resource:
    """A file of a data set, or the package that embeds it."""

    name: str
    place: Path | str | None  # a file, or words; None where it is missing
    verification: str = ""  # how the content was verified; empty where nothing was read


class Source(Protocol[T_co]):
    """A named data set. `T_co` is what `load` returns: a `Dataset` for images."""

    @property
    def name(self) -> str: ...

    @property
    def summary(self) -> str:
        """One line for people."""

    def locate(self, data_dir: Path | None) -> list[Resource]:
        """Where each resource is, without reading any."""

    def check(self, data_dir: Path | None) -> None:
        """Refuse at once if `load` needs a package that is not installed; nothing is read or downloaded."""

    def fetch(self, data_dir: Path | None, progress: bool, download: bool) -> list[Resource]:
        """Get what is missing, verify everything, and return where it is."""

    def load(self, data_dir: Path | None, progress: bool, download: bool) -> T_co:
        """`fetch`, and return the content."""


@dataclass(frozen=True, eq=False)
class Dataset:
    """Images with labels, split into train and test, as the bytes that the files hold.

    `train` and `test` are uint8 of shape (N, height * width), row-major; labels are int64 of shape (N,).
    A pixel p stands for the grey level p / scale in [0, 1]. Binarising and the dtype of the model are the
    task's choice, so bytes stay bytes here: all of MNIST is 55 MB on a device.
    """

    name: str
    train: torch.Tensor
    test: torch.Tensor
    train_labels: torch.Tensor
    test_labels: torch.Tensor
    height: int
    width: int
    scale: int

    def limited(self, train: int | None, test: int | None, *, validation: bool = False) -> Dataset:
        """The first `train` and `test` images of each split, all if None.

        With `validation`, the last sixth of the training images takes the place of the test images: a
        choice based on them has not seen the test set.
        """
        images, labels = (self.train, self.test), (self.train_labels, self.test_labels)
        if validation:
            cut = len(self.train) * 5 // 6
            images, labels = ((each[0][:cut], each[0][cut:]) for each in (images, labels))
        return replace(
            self,
            train=images[0][:train],
            train_labels=labels[0][:train],
            test=images[1][:test],
            test_labels=labels[1][:test],
        )
