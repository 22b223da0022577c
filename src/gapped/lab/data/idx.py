"""The idx format: two zero bytes, a type code, the number of axes, the axes, then the values.

All header integers are big-endian and 32 bits wide. The images and labels read here are unsigned bytes.
"""

from __future__ import annotations

import math
import struct

import torch

from gapped.errors import GappedError

UNSIGNED_BYTE = 0x08
_TYPES = {0x08: "uint8", 0x09: "int8", 0x0B: "int16", 0x0C: "int32", 0x0D: "float32", 0x0E: "float64"}


def parse(raw: bytes) -> torch.Tensor:
    """The uint8 tensor in `raw`, the whole content of an idx file.

    The number of bytes must be exactly what the header announces: one too few is a torn file, one too
    many is something else.

    >>> parse(bytes([0, 0, 8, 1, 0, 0, 0, 3, 7, 8, 9]))
    tensor([7, 8, 9], dtype=torch.uint8)
    """
    dims, start = _header(raw)
    announced = start + math.prod(dims)
    if len(raw) != announced:
        kind = "truncated" if len(raw) < announced else "too long"
        shape = " x ".join(map(str, dims))
        raise GappedError(f"{kind}: {len(raw):,} bytes, the header ({shape}) announces {announced:,}")
    if start == announced:
        return torch.zeros(dims, dtype=torch.uint8)
    # A bytearray is writable, which is what torch asks of memory that it shares.
    return torch.frombuffer(bytearray(memoryview(raw)[start:]), dtype=torch.uint8).reshape(dims)


def _header(raw: bytes) -> tuple[tuple[int, ...], int]:
    """The axes, and where the values start."""
    if len(raw) < 4:
        raise GappedError(f"truncated: {len(raw)} bytes, an idx header has at least 4")
    if raw[0] or raw[1] or raw[2] not in _TYPES:
        raise GappedError(f"not an idx file: it starts with {raw[:4].hex(' ')}, expected 00 00 08 and a rank")
    if raw[2] != UNSIGNED_BYTE:
        raise GappedError(f"idx values of type {_TYPES[raw[2]]} (0x{raw[2]:02x}), expected uint8 (0x08)")
    rank = raw[3]
    start = 4 + 4 * rank
    if rank == 0:
        raise GappedError("idx file without axes, expected at least one")
    if len(raw) < start:
        raise GappedError(f"truncated: {len(raw)} bytes, the header of {rank} axes alone has {start}")
    return struct.unpack_from(f">{rank}I", raw, 4), start
