"""Data sets and their files: where they are looked up, how they are downloaded and unpacked.

Files are looked up in the folder that the caller names, in ``$GAPPED_DATA``, in the user's cache, and where
Debian's packages put data sets, in this order. Inside each, a file of the set NAME is ``NAME/FILE`` or
``FILE``, plain or with ``.gz``.
"""

from __future__ import annotations

import gzip
import io
import os
import tempfile
import zlib
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Protocol, TypeVar
from urllib.parse import urlsplit

from gapped.errors import GappedError, require

T_co = TypeVar("T_co", covariant=True)

SYSTEM = Path("/usr/share/datasets")
"""The folder of Debian's packages ``dataset-NAME``."""


@dataclass(frozen=True)
class Resource:
    """A file of a data set, or the package that embeds it."""

    name: str
    place: Path | str | None  # a file, or words; None where it is missing
    verification: str = ""  # how the content was verified; empty where nothing was read


class Source(Protocol[T_co]):
    """A named data set. `T_co` is what `load` returns: a `Dataset` for images."""

    @property
    def name(self) -> str: ...

    @property
    def summary(self) -> str:
        """One line for people."""

    def locate(self, data_dir: Path | None) -> list[Resource]:
        """Where each resource is, without reading any."""

    def check(self, data_dir: Path | None) -> None:
        """Refuse at once if `load` needs a package that is not installed; nothing is read or downloaded."""

    def fetch(self, data_dir: Path | None, progress: bool, download: bool) -> list[Resource]:
        """Get what is missing, verify everything, and return where it is."""

    def load(self, data_dir: Path | None, progress: bool, download: bool) -> T_co:
        """`fetch`, and return the content."""


def cache() -> Path:
    """``$XDG_CACHE_HOME/gapped``, by default ``~/.cache/gapped``."""
    setting = os.environ.get("XDG_CACHE_HOME", "")
    # The XDG specification says to ignore relative paths.
    base = Path(setting) if os.path.isabs(setting) else Path.home() / ".cache"
    return base / "gapped"


def roots(data_dir: Path | None) -> list[Path]:
    """The folders to look in, first to last."""
    candidates = [data_dir, os.environ.get("GAPPED_DATA") or None]
    folders = [Path(root).expanduser() for root in candidates if root is not None]
    for root in folders:
        if root.exists() and not root.is_dir():
            raise GappedError(f"{root}: a file, expected a folder that holds data sets")
    return [*folders, cache(), SYSTEM]


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

    Not ``$GAPPED_DATA``: that folder is often shared and read-only.
    """
    return (cache() if data_dir is None else data_dir.expanduser()) / name


def unpack(raw: bytes, most: int) -> bytes:
    """The content of a file that may be packed with gzip.

    The first bytes decide, not the name: browsers unpack files and keep the ``.gz``. No more than `most`
    bytes are unpacked, whatever the file claims to hold.

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


def download(file: str, mirrors: Sequence[str], md5: str, progress: bool) -> bytes:
    """The content of `file` from the first mirror that delivers it intact, verified against `md5`.

    An error names each mirror and its reason. Nothing stays on disk: the bytes arrive in a temporary folder
    that is removed in any case. The caller stores them, in one atomic step, once it has checked them.
    """
    require("downloading", "pooch")
    failures = []
    for mirror in mirrors:
        try:
            return _retrieve(mirror + file, md5, progress)
        # requests raises OSErrors, pooch a ValueError for a wrong checksum.
        except (OSError, ValueError) as problem:
            failures.append(f"{urlsplit(mirror).netloc}: {_reason(problem)}")
    raise GappedError(f"{file} could not be downloaded ({'; '.join(failures)})")


def _retrieve(url: str, md5: str, progress: bool) -> bytes:
    import pooch

    # pooch announces the temporary path as if the file stayed there; the bar says enough.
    pooch.get_logger().setLevel("WARNING")
    name = url.rsplit("/", 1)[-1]
    # pooch asks for the truth value of the bar, which tqdm refuses without a total, and sets the total.
    with tempfile.TemporaryDirectory(prefix="gapped-") as folder, progress_bar(name, 1, "B", progress) as bar:
        downloader = pooch.HTTPDownloader(progressbar=False if bar is None else bar)
        path = pooch.retrieve(url, f"md5:{md5}", fname=name, path=folder, downloader=downloader)
        return Path(path).read_bytes()


def progress_bar(name: str, total: int, unit: str, visible: bool = True) -> AbstractContextManager[Any]:
    """A tqdm bar; None if it is not `visible`, or tqdm is not installed."""
    if not visible or find_spec("tqdm") is None:
        return nullcontext()
    from tqdm import tqdm

    # disable=None: no bar where standard error is not a terminal.
    bar: AbstractContextManager[Any] = tqdm(
        desc=name, total=total, unit=unit, unit_scale=True, leave=False, disable=None
    )
    return bar


def _reason(problem: Exception) -> str:
    """A few words: the messages of the libraries below run over several lines."""
    response = getattr(problem, "response", None)
    if response is not None:
        return f"HTTP {response.status_code}"
    if isinstance(problem, ValueError) and not isinstance(problem, OSError):
        return "the checksum does not match"
    return getattr(problem, "strerror", None) or type(problem).__name__
