"""Image sets: the 8x8 digits of scikit-learn; MNIST and Fashion-MNIST, with the idx format of their files.

An idx file is two zero bytes, a type code, the number of axes, the axes, each 32 bits wide, then the values.
The images and labels read here are unsigned bytes. Their checksums are known, and so is every header.
"""

from __future__ import annotations

import hashlib
import math
from dataclasses import dataclass, replace
from importlib.util import find_spec
from pathlib import Path

import torch

from gapped.comparison.store import atomic_write
from gapped.errors import GappedError, require
from gapped_lab.data import sources
from gapped_lab.data.sources import Resource

_DIGITS_TRAIN = 1500
_DIGITS_SEED = 0


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

    def limit(self, train: int | None, test: int | None, *, validation: bool = False) -> Dataset:
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
        order = torch.randperm(len(images), generator=torch.Generator().manual_seed(_DIGITS_SEED))
        train, test = order[:_DIGITS_TRAIN], order[_DIGITS_TRAIN:]
        return Dataset(self.name, images[train], images[test], labels[train], labels[test], 8, 8, 16)


@dataclass(frozen=True)
class IdxFile:
    """The form that one file must have.

    `md5` is the publisher's checksum of the packed file (``name.gz``), and every download must match it.
    `sha256` is the checksum of the unpacked content, and every file must match it: files that people bring
    may be plain or packed anew, and the files of MNIST and Fashion-MNIST have the same names and form.
    """

    name: str
    shape: tuple[int, ...]
    md5: str
    sha256: str

    def values(self, raw: bytes) -> torch.Tensor:
        """The values in `raw`, the bytes of the file, packed or not, once they are verified."""
        header = 4 + 4 * len(self.shape)
        content = sources.unpack(raw, header + math.prod(self.shape))
        digest = hashlib.sha256(content).hexdigest()
        if digest != self.sha256:
            raise GappedError(
                f"{len(content):,} bytes of sha256 {digest}, expected {self.sha256} "
                "(damaged, or another data set)"
            )
        # A bytearray is writable, as torch requires of memory that it shares.
        return torch.frombuffer(bytearray(content[header:]), dtype=torch.uint8).reshape(self.shape)


@dataclass(frozen=True)
class IdxSource:
    """A data set of images (`scale` 255) with labels in ten classes.

    Its four `files` are the images and labels for training, then those for testing. `package` is the
    package of Debian and Ubuntu that installs them below `sources.SYSTEM`, where there is one.
    """

    name: str
    summary: str
    mirrors: tuple[str, ...]
    files: tuple[IdxFile, ...]
    package: str | None = None

    def locate(self, data_dir: Path | None) -> list[Resource]:
        return [Resource(file.name, self._find(file, data_dir)) for file in self.files]

    def check(self, data_dir: Path | None) -> None:
        if missing := self._missing(data_dir):
            try:
                require("downloading", "pooch")
            except GappedError as problem:
                raise self._explain_absence(missing, str(problem), data_dir) from None

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
        return sources.find(self.name, file.name, data_dir)

    def _missing(self, data_dir: Path | None) -> list[IdxFile]:
        return [file for file in self.files if self._find(file, data_dir) is None]

    def _complete(self, data_dir: Path | None, progress: bool, download: bool) -> None:
        """Download the missing files. Each is stored as soon as it is verified, so that repeating an
        interrupted download continues with the next file."""
        missing = self._missing(data_dir)
        for i, file in enumerate(missing):
            try:
                if not download:
                    raise GappedError("downloading is off")
                self._download(file, data_dir, progress)
            except GappedError as problem:
                raise self._explain_absence(missing[i:], str(problem), data_dir) from None

    def _download(self, file: IdxFile, data_dir: Path | None, progress: bool) -> None:
        packed = sources.download(f"{file.name}.gz", self.mirrors, file.md5, progress)
        try:
            file.values(packed)
        except GappedError as problem:
            raise GappedError(f"{file.name} was downloaded but is wrong: {problem}") from None
        path = sources.destination(self.name, data_dir) / f"{file.name}.gz"
        try:
            with atomic_write(path) as out:
                out.write(packed)
        except OSError as problem:
            raise GappedError(f"cannot write {path}: {problem.strerror or problem}") from None

    def _explain_absence(self, missing: list[IdxFile], reason: str, data_dir: Path | None) -> GappedError:
        names = ", ".join(file.name for file in missing)
        folder = sources.destination(self.name, data_dir)
        install = f", or on Debian and Ubuntu: apt install {self.package}" if self.package else ""
        return GappedError(
            f"{self.name}: {reason}; put {names} (plain or .gz, from {self.mirrors[0]}) into "
            f"{folder}, or name their folder by --data-dir or $GAPPED_DATA{install}"
        )

    def _read(self, file: IdxFile, data_dir: Path | None) -> tuple[Resource, torch.Tensor]:
        path = self._find(file, data_dir)
        assert path is not None, "called after _complete"
        try:
            values = file.values(path.read_bytes())
        except OSError as problem:
            raise GappedError(f"{path}: cannot be read ({problem.strerror or problem})") from None
        except GappedError as problem:
            advice = f"delete or replace it, then run: gapped data {self.name}"
            raise GappedError(f"{path}: {problem}; {advice}") from None
        return Resource(file.name, path, "sha256"), values


# MNIST: LeCun, Cortes, Burges. Fashion-MNIST: Xiao, Rasul, Vollgraf 2017, who publish the md5. Debian's
# package has their files without the name and time of gzip's header; with both put back, the md5 agree.
_SHAPES = {
    "train-images-idx3-ubyte": (60_000, 28, 28),
    "train-labels-idx1-ubyte": (60_000,),
    "t10k-images-idx3-ubyte": (10_000, 28, 28),
    "t10k-labels-idx1-ubyte": (10_000,),
}


def _files(checksums: str) -> tuple[IdxFile, ...]:
    """The four files; a line of each has the md5 of the packed file and the sha256 of the content."""
    lines = (line.split() for line in checksums.strip().splitlines())
    return tuple(IdxFile(*each, *line) for each, line in zip(_SHAPES.items(), lines, strict=True))


MNIST = IdxSource(
    "mnist",
    "60,000 + 10,000 handwritten digits, 28x28",
    ("https://ossci-datasets.s3.amazonaws.com/mnist/", "https://storage.googleapis.com/cvdf-datasets/mnist/"),
    _files(
        """
        f68b3c2dcbeaaa9fbdd348bbdeb94873 ba891046e6505d7aadcbbe25680a0738ad16aec93bde7f9b65e87a2fc25776db
        d53e105ee54ea40749a09fcbcd1e9432 65a50cbbf4e906d70832878ad85ccda5333a97f0f4c3dd2ef09a8a9eef7101c5
        9fb629c4189551a2d022fa330f9573f3 0fa7898d509279e482958e8ce81c8e77db3f2f8254e26661ceb7762c4d494ce7
        ec29112dd5afa0611ce80d1b7f02629c ff7bcfd416de33731a308c3f266cc351222c34898ecbeaf847f06e48f7ec33f2
        """
    ),
)

FASHION_MNIST = IdxSource(
    "fashion-mnist",
    "60,000 + 10,000 pieces of clothing, 28x28",
    (
        "https://raw.githubusercontent.com/zalandoresearch/fashion-mnist/master/data/fashion/",
        "http://fashion-mnist.s3-website.eu-central-1.amazonaws.com/",
    ),
    _files(
        """
        8d4fb7e6c68d591d4c3dfef9ec88bf0d c59f468a2f672dc815687fe0f83887768d799fd8a3f3276145d20f83aa44d888
        25c81989df183df01b3e8a0aad5dffbe bad3541b69d912435c50bb6ba87bec294ff4f6a2e1246121d8633921760443d9
        bef4ecab320f06d8554ea6380940ec79 5b4141f0afbad91edebe8549f8fcffe087ea10ca49f1dbef5c9a5cd8815ce37b
        bb300cfdad3c16e7a12a480ee83cd310 0402a96d92fd2663957122ceb108a494c5af83dab82d92729df917d7dec38c34
        """
    ),
    package="dataset-fashion-mnist",
)
