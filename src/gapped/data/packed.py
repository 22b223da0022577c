"""Files that may be packed with gzip."""

from __future__ import annotations

import gzip
import zlib

from gapped.errors import GappedError

__all__ = ["unpack"]


def unpack(raw: bytes) -> bytes:
    """The content of a file. Told by its first bytes, not its name: browsers unpack and keep the ``.gz``.

    >>> unpack(b"plain"), unpack(gzip.compress(b"packed"))
    (b'plain', b'packed')
    """
    if raw[:2] != b"\x1f\x8b":
        return raw
    try:
        return gzip.decompress(raw)
    except (OSError, EOFError, zlib.error) as problem:
        raise GappedError(f"damaged gzip file ({problem})") from None
