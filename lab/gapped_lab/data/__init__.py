"""Image sets by name. Importing this neither reads the disk nor needs scikit-learn or pooch."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from gapped.errors import reject
from gapped_lab.data.images import FASHION_MNIST, MNIST, Dataset, DigitsSource
from gapped_lab.data.sources import Source

IMAGES: Mapping[str, Source[Dataset]] = {each.name: each for each in (DigitsSource(), MNIST, FASHION_MNIST)}


def load(name: str, data_dir: Path | None = None, progress: bool = True, *, download: bool = True) -> Dataset:
    """The images called `name`, verified.

    Files are looked up in `data_dir`, ``$GAPPED_DATA``, the user's cache and ``/usr/share/datasets``; what is
    in none of them is downloaded, into `data_dir` or else the cache, unless `download` is false.

    >>> load("digits").train.shape
    torch.Size([1500, 64])
    """
    if name not in IMAGES:
        raise reject("data set", name, f"one of {', '.join(IMAGES)}")
    return IMAGES[name].load(data_dir, progress, download)
