"""Files that may be packed with gzip."""

from __future__ import annotations

import gzip
import io
import zlib

from gapped.errors import GappedError


def unpack(raw: bytes, most: int) -> bytes:
    """The content of a file. Told by its first bytes, not its name: browsers unpack and keep the ``.gz``.

    No more than `most` bytes are unpacked, whatever a file claims to hold.

    >>> unpack(b"plain", 6), unpack(gzip.compress(b"packed"), 6)
    (b'plain', b'packed')
    """
    if raw[:2] != b"\x1f\x8b":
        return raw
    try:
        content = gzip.GzipFile(fileobj=io.BytesIO(raw)).read(most + 1)
    except (OSError, EOFError, zlib.error) as problem:
        raise GappedError(f"damaged gzip file ({problem})") from None
    if len(content) > most:
        raise GappedError(f"too long: it unpacks to more than the {most:,} bytes that are expected")
    return content
