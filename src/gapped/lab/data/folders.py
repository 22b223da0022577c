"""Where files are looked for, and where downloads go.

In order: the folder that the caller names, ``$GAPPED_DATA``, the user's cache. Inside each, a file of the
set NAME is ``NAME/FILE`` or ``FILE``, plain or with ``.gz``.
"""

from __future__ import annotations

import os
from pathlib import Path

from gapped.errors import GappedError


def cache() -> Path:
    """``$XDG_CACHE_HOME/gapped``, by default ``~/.cache/gapped``."""
    configured = os.environ.get("XDG_CACHE_HOME", "")
    # The XDG specification has relative paths ignored.
    base = Path(configured) if os.path.isabs(configured) else Path.home() / ".cache"
    return base / "gapped"


def roots(data_dir: Path | None) -> list[Path]:
    """The folders to look in, first to last."""
    named = [data_dir, os.environ.get("GAPPED_DATA") or None]
    chosen = [Path(root).expanduser() for root in named if root is not None]
    for root in chosen:
        if root.exists() and not root.is_dir():
            raise GappedError(f"{root}: a file, expected a folder that holds data sets")
    return [*chosen, cache()]


def find(name: str, file: str, data_dir: Path | None) -> Path | None:
    """The first place that holds `file` of the set `name`."""
    for root in roots(data_dir):
        for folder in (root / name, root):
            for candidate in (folder / file, folder / f"{file}.gz"):
                if candidate.is_file():
                    return candidate
    return None


def destination(name: str, data_dir: Path | None) -> Path:
    """Where downloads of the set `name` go: the named folder, else the cache.

    Not ``$GAPPED_DATA``: that one is often shared and read-only.
    """
    return (cache() if data_dir is None else data_dir.expanduser()) / name
