"""A tiny set of images in idx files, and the place of the real data sets."""

from __future__ import annotations

import gzip
import hashlib
import os
import struct
from pathlib import Path

import torch

from gapped_lab.data.images import IdxFile, IdxSource

# Looked up before a test hides the environment.
REAL_DATA = Path(
    os.environ.get("GAPPED_DATA") or Path(__file__).resolve().parents[2] / "shared" / "data"
).expanduser()

MIRRORS = ("https://mirror.invalid/tiny/", "https://second.invalid/tiny/")


def encode_idx(values: torch.Tensor) -> bytes:
    """An idx file, written independently of the parser."""
    header = struct.pack(">HBB", 0, 8, values.dim()) + b"".join(struct.pack(">I", n) for n in values.shape)
    return header + bytes(values.flatten().tolist())


def _tiny_images() -> tuple[IdxSource, dict[str, bytes]]:
    g = torch.Generator().manual_seed(1)
    shapes = {"train": (6, 2, 4), "train_labels": (6,), "test": (3, 2, 4), "test_labels": (3,)}
    files, contents = [], {}
    for role, shape in shapes.items():
        raw = encode_idx(torch.randint(0, 10, shape, generator=g, dtype=torch.uint8))
        md5 = hashlib.md5(gzip.compress(raw, mtime=0)).hexdigest()
        files.append(IdxFile(f"{role}-idx", shape, md5, sha256=hashlib.sha256(raw).hexdigest()))
        contents[f"{role}-idx"] = raw
    return IdxSource("tiny", "for tests", MIRRORS, tuple(files)), contents


# A set of 6 + 3 images of 2x4, and the unpacked content of its files.
TINY_IMAGES, TINY_CONTENTS = _tiny_images()


def put_tiny_images(folder: Path, packed: bool = False) -> None:
    """Write the files of `TINY_IMAGES`."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, raw in TINY_CONTENTS.items():
        path = folder / (f"{name}.gz" if packed else name)
        path.write_bytes(gzip.compress(raw) if packed else raw)
