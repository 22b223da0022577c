"""Image sets that come as four idx files: found or downloaded, verified, read."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from math import prod
from pathlib import Path

import torch

from gapped.errors import GappedError, require
from gapped.lab.data import folders, idx
from gapped.lab.data.dataset import Dataset
from gapped.lab.data.download import download as fetch_bytes
from gapped.lab.data.packed import unpack
from gapped.lab.data.source import Part
from gapped.lab.records import atomic_write


@dataclass(frozen=True)
class IdxFile:
    """What one file must be.

    `md5` is the publisher's checksum of the packed file (``name.gz``), and every download must match it.
    Files that people bring may be plain or packed anew, so they are judged by `sha256`, of the unpacked
    content, where that is known. `twin` is the sha256 of a file of another set with the same name and
    form, the one mistake that the form cannot reveal.
    """

    name: str
    dims: tuple[int, ...]
    md5: str
    sha256: str | None = None
    twin: str | None = None


@dataclass(frozen=True)
class IdxSource:
    """A data set of train and test images (`scale` 255) and their labels, which are below `classes`."""

    name: str
    summary: str
    mirrors: tuple[str, ...]
    train: IdxFile
    train_labels: IdxFile
    test: IdxFile
    test_labels: IdxFile
    classes: int = 10

    @property
    def files(self) -> tuple[IdxFile, ...]:
        return self.train, self.train_labels, self.test, self.test_labels

    def locate(self, data_dir: Path | None) -> list[Part]:
        found = [(file.name, folders.find(self.name, file.name, data_dir)) for file in self.files]
        return [Part(name, path) for name, path in found]

    def check(self, data_dir: Path | None) -> None:
        if missing := self._missing(data_dir):
            try:
                require("downloading", "pooch")
            except GappedError as problem:
                raise self._absent(missing, str(problem), data_dir) from None

    def fetch(self, data_dir: Path | None, progress: bool, download: bool) -> list[Part]:
        self._complete(data_dir, progress, download)
        return [self._read(file, data_dir)[0] for file in self.files]

    def load(self, data_dir: Path | None, progress: bool, download: bool) -> Dataset:
        self._complete(data_dir, progress, download)
        train, train_labels, test, test_labels = (self._read(file, data_dir)[1] for file in self.files)
        _, height, width = self.train.dims
        return Dataset(
            self.name,
            train.flatten(1),
            test.flatten(1),
            train_labels.long(),
            test_labels.long(),
            height,
            width,
            255,
        )

    def _missing(self, data_dir: Path | None) -> list[IdxFile]:
        return [file for file in self.files if folders.find(self.name, file.name, data_dir) is None]

    def _complete(self, data_dir: Path | None, progress: bool, download: bool) -> None:
        """Download what is nowhere to be found. Each file is stored as soon as it is verified, so that
        repeating an interrupted download goes on with the next file."""
        missing = self._missing(data_dir)
        while missing:
            if not download:
                raise self._absent(missing, "downloading is off", data_dir)
            try:
                self._download(missing[0], data_dir, progress)
            except GappedError as problem:
                raise self._absent(missing, str(problem), data_dir) from None
            del missing[0]

    def _download(self, file: IdxFile, data_dir: Path | None, progress: bool) -> None:
        packed = fetch_bytes(f"{file.name}.gz", self.mirrors, file.md5, progress)
        try:
            self._check(file, packed)
        except GappedError as problem:
            raise GappedError(f"{file.name} was downloaded but is wrong: {problem}") from None
        path = folders.destination(self.name, data_dir) / f"{file.name}.gz"
        try:
            with atomic_write(path) as out:
                out.write(packed)
        except OSError as problem:
            raise GappedError(f"cannot write {path}: {problem.strerror or problem}") from None

    def _absent(self, missing: list[IdxFile], reason: str, data_dir: Path | None) -> GappedError:
        names = ", ".join(file.name for file in missing)
        return GappedError(
            f"{self.name}: {reason}; put {names} (plain or .gz, from {self.mirrors[0]}) into "
            f"{folders.destination(self.name, data_dir)}, or name their folder by --data-dir or $GAPPED_DATA"
        )

    def _read(self, file: IdxFile, data_dir: Path | None) -> tuple[Part, torch.Tensor]:
        path = folders.find(self.name, file.name, data_dir)
        assert path is not None, "called after _complete"
        try:
            values, checked = self._check(file, path.read_bytes())
        except OSError as problem:
            raise GappedError(f"{path}: cannot be read ({problem.strerror or problem})") from None
        except GappedError as problem:
            raise GappedError(
                f"{path}: {problem}; delete or replace it, then run: gapped data {self.name}"
            ) from None
        return Part(file.name, path, checked), values

    def _check(self, file: IdxFile, raw: bytes) -> tuple[torch.Tensor, str]:
        """The values in `raw`, packed or not, and in words what vouches for them."""
        content = unpack(raw, 4 + 4 * len(file.dims) + prod(file.dims))
        values = idx.parse(content)
        if values.shape != file.dims:
            raise GappedError(f"shape {tuple(values.shape)}, expected {file.dims}")
        if len(file.dims) == 1 and (highest := int(values.max())) >= self.classes:
            raise GappedError(f"label {highest}, expected 0 to {self.classes - 1}")
        digest = hashlib.sha256(content).hexdigest()
        if file.sha256 is not None and digest != file.sha256:
            raise GappedError(f"sha256 {digest}, expected {file.sha256} (damaged, or another data set)")
        if digest == file.twin:
            raise GappedError(f"another data set, not {self.name}")
        if file.sha256 is not None:
            return values, "sha256"
        intact = hashlib.md5(raw, usedforsecurity=False).hexdigest() == file.md5
        return values, "publisher's md5" if intact else "form only"
