"""Hashes that name runs, fleets and requests."""

from __future__ import annotations

import hashlib


def derived_hash(*keys: object) -> str:
    """Sixteen hexadecimal digits that are a function of the `keys`."""
    return hashlib.sha256("/".join(map(str, keys)).encode()).hexdigest()[:16]
