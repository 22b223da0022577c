"""MNIST and Fashion-MNIST: 60,000 + 10,000 grey images of 28x28 in ten classes, as idx files.

MNIST (LeCun, Cortes, Burges) is verified by the sha256 of the unpacked content. The publisher of
Fashion-MNIST (Xiao, Rasul, Vollgraf 2017; the README of github.com/zalandoresearch/fashion-mnist) gives
the md5 of the packed files only. These are pinned: downloads must match them, and files brought by hand
that match are reported so. The content itself has no pinned checksum: a plain or repacked Fashion-MNIST
file is verified by form (magic, type, counts, size, labels) and by not being MNIST's.
"""

from __future__ import annotations

from collections.abc import Sequence

from gapped.lab.data.idx import IdxFile, IdxSource

_SHAPES = {
    "train-images-idx3-ubyte": (60_000, 28, 28),
    "train-labels-idx1-ubyte": (60_000,),
    "t10k-images-idx3-ubyte": (10_000, 28, 28),
    "t10k-labels-idx1-ubyte": (10_000,),
}
_MNIST_SHA256 = (
    "ba891046e6505d7aadcbbe25680a0738ad16aec93bde7f9b65e87a2fc25776db",
    "65a50cbbf4e906d70832878ad85ccda5333a97f0f4c3dd2ef09a8a9eef7101c5",
    "0fa7898d509279e482958e8ce81c8e77db3f2f8254e26661ceb7762c4d494ce7",
    "ff7bcfd416de33731a308c3f266cc351222c34898ecbeaf847f06e48f7ec33f2",
)
_UNKNOWN = (None,) * 4


def _files(
    *md5: str, sha256: Sequence[str | None] = _UNKNOWN, twin: Sequence[str | None] = _UNKNOWN
) -> tuple[IdxFile, ...]:
    return tuple(map(IdxFile, _SHAPES, _SHAPES.values(), md5, sha256, twin))


MNIST = IdxSource(
    "mnist",
    "60,000 + 10,000 handwritten digits, 28x28",
    ("https://ossci-datasets.s3.amazonaws.com/mnist/", "https://storage.googleapis.com/cvdf-datasets/mnist/"),
    _files(
        "f68b3c2dcbeaaa9fbdd348bbdeb94873",
        "d53e105ee54ea40749a09fcbcd1e9432",
        "9fb629c4189551a2d022fa330f9573f3",
        "ec29112dd5afa0611ce80d1b7f02629c",
        sha256=_MNIST_SHA256,
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
        "8d4fb7e6c68d591d4c3dfef9ec88bf0d",
        "25c81989df183df01b3e8a0aad5dffbe",
        "bef4ecab320f06d8554ea6380940ec79",
        "bb300cfdad3c16e7a12a480ee83cd310",
        twin=_MNIST_SHA256,
    ),
)
