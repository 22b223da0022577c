"""The idx format, and image sets that come as four idx files.

An idx file is two zero bytes, a type code, the number of axes, the axes, then the values. All header integers
are big-endian and 32 bits wide. The images and labels read here are unsigned bytes.
"""

from __future__ import annotations

import hashlib
import math
import struct
from dataclasses import dataclass
from pathlib import Path

import torch

from gapped.errors import GappedError, require
from gapped.lab.data import retrieval
from gapped.lab.data.sources import Dataset, Resource
from gapped.lab.records import atomic_write

_CLASSES = 10


def parse(raw: bytes) -> torch.Tensor:
    """The uint8 tensor in `raw`, the whole content of an idx file.

    The number of bytes must be exactly what the header announces: one too few is a torn file, one too
    many is something else.

    >>> parse(bytes([0, 0, 8, 1, 0, 0, 0, 3, 7, 8, 9]))
    tensor([7, 8, 9], dtype=torch.uint8)
    """
    if len(raw) < 4:
        raise GappedError(f"truncated: {len(raw)} bytes, an idx header has at least 4")
    if raw[:3] != b"\0\0\x08":
        magic = raw[:4].hex(" ")
        raise GappedError(f"not an idx file of bytes: it starts with {magic}, expected 00 00 08 and a rank")
    rank = raw[3]
    start = 4 + 4 * rank
    if len(raw) < start:
        raise GappedError(f"truncated: {len(raw)} bytes, the header of {rank} axes alone has {start}")
    shape = struct.unpack_from(f">{rank}I", raw, 4)
    announced = start + math.prod(shape)
    if len(raw) != announced:
        kind = "truncated" if len(raw) < announced else "too long"
        axes = " x ".join(map(str, shape))
        raise GappedError(f"{kind}: {len(raw):,} bytes, the header ({axes}) announces {announced:,}")
    if start == announced:
        return torch.zeros(shape, dtype=torch.uint8)
    # A bytearray is writable, as torch requires of memory that it shares.
    return torch.frombuffer(bytearray(memoryview(raw)[start:]), dtype=torch.uint8).reshape(shape)


@dataclass(frozen=True)
class IdxFile:
    """What one file must be.

    `md5` is the publisher's checksum of the packed file (``name.gz``), and every download must match it.
    Files that people bring may be plain or packed anew, so they are judged by `sha256`, of the unpacked
    content, where that is known. `twin` is the sha256 of a file of another set with the same name and
    form, the one mistake that the form cannot reveal.
    """

    name: str
    shape: tuple[int, ...]
    md5: str
    sha256: str | None = None
    twin: str | None = None


@dataclass(frozen=True)
class IdxSource:
    """A data set of images (`scale` 255) with labels in ten classes.

    Its four `files` are the images and labels for training, then those for testing.
    """

    name: str
    summary: str
    mirrors: tuple[str, ...]
    files: tuple[IdxFile, ...]

    def locate(self, data_dir: Path | None) -> list[Resource]:
        return [Resource(file.name, self._find(file, data_dir)) for file in self.files]

    def check(self, data_dir: Path | None) -> None:
        if missing := self._missing(data_dir):
            try:
                require("downloading", "pooch")
            except GappedError as problem:
                raise self._absent(missing, str(problem), data_dir) from None

    def fetch(self, data_dir: Path | None, progress: bool, download: bool) -> list[Resource]:
        self._complete(data_dir, progress, download)
        return [self._read(file, data_dir)[0] for file in self.files]

    def load(self, data_dir: Path | None, progress: bool, download: bool) -> Dataset:
        self._complete(data_dir, progress, download)
        train, train_labels, test, test_labels = (self._read(file, data_dir)[1] for file in self.files)
        images, labels = (train.flatten(1), test.flatten(1)), (train_labels.long(), test_labels.long())
        _, height, width = self.files[0].shape
        return Dataset(self.name, *images, *labels, height, width, scale=255)

    def _find(self, file: IdxFile, data_dir: Path | None) -> Path | None:
        return retrieval.find(self.name, file.name, data_dir)

    def _missing(self, data_dir: Path | None) -> list[IdxFile]:
        return [file for file in self.files if self._find(file, data_dir) is None]

    def _complete(self, data_dir: Path | None, progress: bool, download: bool) -> None:
        """Download the missing files. Each is stored as soon as it is verified, so that repeating an
        interrupted download continues with the next file."""
        missing = self._missing(data_dir)
        while missing:
            try:
                if not download:
                    raise GappedError("downloading is off")
                self._download(missing[0], data_dir, progress)
            except GappedError as problem:
                raise self._absent(missing, str(problem), data_dir) from None
            del missing[0]

    def _download(self, file: IdxFile, data_dir: Path | None, progress: bool) -> None:
        packed = retrieval.download(f"{file.name}.gz", self.mirrors, file.md5, progress)
        try:
            self._check(file, packed)
        except GappedError as problem:
            raise GappedError(f"{file.name} was downloaded but is wrong: {problem}") from None
        path = retrieval.destination(self.name, data_dir) / f"{file.name}.gz"
        try:
            with atomic_write(path) as out:
                out.write(packed)
        except OSError as problem:
            raise GappedError(f"cannot write {path}: {problem.strerror or problem}") from None

    def _absent(self, missing: list[IdxFile], reason: str, data_dir: Path | None) -> GappedError:
        names = ", ".join(file.name for file in missing)
        folder = retrieval.destination(self.name, data_dir)
        return GappedError(
            f"{self.name}: {reason}; put {names} (plain or .gz, from {self.mirrors[0]}) into "
            f"{folder}, or name their folder by --data-dir or $GAPPED_DATA"
        )

    def _read(self, file: IdxFile, data_dir: Path | None) -> tuple[Resource, torch.Tensor]:
        path = self._find(file, data_dir)
        assert path is not None, "called after _complete"
        try:
            values, verification = self._check(file, path.read_bytes())
        except OSError as problem:
            raise GappedError(f"{path}: cannot be read ({problem.strerror or problem})") from None
        except GappedError as problem:
            advice = f"delete or replace it, then run: gapped data {self.name}"
            raise GappedError(f"{path}: {problem}; {advice}") from None
        return Resource(file.name, path, verification), values

    def _check(self, file: IdxFile, raw: bytes) -> tuple[torch.Tensor, str]:
        """The values in `raw`, packed or not, and in words how they were verified."""
        content = retrieval.unpack(raw, 4 + 4 * len(file.shape) + math.prod(file.shape))
        values = parse(content)
        if values.shape != file.shape:
            raise GappedError(f"shape {tuple(values.shape)}, expected {file.shape}")
        if len(file.shape) == 1 and (highest := int(values.max())) >= _CLASSES:
            raise GappedError(f"label {highest}, expected 0 to {_CLASSES - 1}")
        digest = hashlib.sha256(content).hexdigest()
        if file.sha256 is not None and digest != file.sha256:
            raise GappedError(f"sha256 {digest}, expected {file.sha256} (damaged, or another data set)")
        if digest == file.twin:
            raise GappedError(f"another data set, not {self.name}")
        if file.sha256 is not None:
            return values, "sha256"
        intact = hashlib.md5(raw, usedforsecurity=False).hexdigest() == file.md5
        return values, "publisher's md5" if intact else "form only"
