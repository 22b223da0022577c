"""Strips of small grey images as PNG data URIs, which need no file beside the report."""

from __future__ import annotations

import base64
import binascii
import struct
import zlib
from math import prod
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gapped.errors import GappedError

Pixels = NDArray[np.uint8]

GAP = 1


def tiles(line: dict[str, Any], kind: str) -> Pixels | None:
    """The (count, height, width) images of a line of `images.jsonl`; none where it has no such kind."""
    if not line.get(kind):
        return None
    shape = (line.get("count", 0), line.get("height", 0), line.get("width", 0))
    try:
        raw = base64.b64decode(line[kind], validate=True)
    except (binascii.Error, ValueError):
        raise GappedError(f"images.jsonl, {line.get('id')}: {kind} is not base64") from None
    if len(raw) != prod(shape):
        raise GappedError(f"images.jsonl, {line.get('id')}: {kind} has {len(raw)} bytes, expected {shape}")
    return np.frombuffer(raw, dtype=np.uint8).reshape(shape)


def strip(images: Pixels) -> str:
    """The images side by side, a transparent pixel between them, as the address of an `<img>`."""
    count, height, width = images.shape
    canvas = np.zeros((height, count * (width + GAP) - GAP, 2), dtype=np.uint8)
    for i, image in enumerate(images):
        left = i * (width + GAP)
        canvas[:, left : left + width] = np.stack([image, np.full_like(image, 255)], axis=-1)
    return "data:image/png;base64," + base64.b64encode(_png(canvas)).decode("ascii")


def _png(canvas: Pixels) -> bytes:
    """8-bit grey with alpha (colour type 4), every row unfiltered."""
    height, width, _ = canvas.shape
    raw = b"".join(b"\0" + row.tobytes() for row in canvas)
    header = struct.pack(">IIBBBBB", width, height, 8, 4, 0, 0, 0)
    chunks = [(b"IHDR", header), (b"IDAT", zlib.compress(raw, 9)), (b"IEND", b"")]
    return b"\x89PNG\r\n\x1a\n" + b"".join(_chunk(kind, data) for kind, data in chunks)


def _chunk(kind: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))
