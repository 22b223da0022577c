"""One file from the first public mirror that delivers it intact. Needs pooch, imported when used."""

from __future__ import annotations

import importlib.util
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from gapped.errors import GappedError, require


def download(file: str, mirrors: Sequence[str], md5: str, progress: bool) -> bytes:
    """The content of `file`, verified against `md5`; an error names each mirror and what it said.

    Nothing is kept on disk: the bytes arrive in a temporary folder that is gone on return, whatever
    happens. The caller stores them, in one atomic step, once it is content with them.
    """
    require("downloading", "pooch")
    failures = []
    for mirror in mirrors:
        try:
            return _retrieve(mirror + file, md5, progress)
        # requests' errors are OSErrors, pooch's word for a wrong checksum is ValueError.
        except (OSError, ValueError) as problem:
            failures.append(f"{urlsplit(mirror).netloc}: {_reason(problem)}")
    raise GappedError(f"{file} could not be downloaded ({'; '.join(failures)})")


def _retrieve(url: str, md5: str, progress: bool) -> bytes:
    import pooch

    # pooch announces the temporary path as if it were the file's home; the bar says enough.
    pooch.get_logger().setLevel("WARNING")
    name = url.rsplit("/", 1)[-1]
    bar = _bar(name) if progress else None
    try:
        with tempfile.TemporaryDirectory(prefix="gapped-") as folder:
            fetch = pooch.HTTPDownloader(progressbar=False if bar is None else bar)
            path = pooch.retrieve(url, f"md5:{md5}", fname=name, path=folder, downloader=fetch)
            return Path(path).read_bytes()
    finally:
        if bar is not None:
            bar.close()


def _bar(name: str) -> Any:
    if importlib.util.find_spec("tqdm") is None:
        return None
    from tqdm import tqdm

    # disable=None: no bar where standard error is not a terminal. pooch asks for the truth value of the
    # bar, which a tqdm without a total refuses, and then sets the true total.
    return tqdm(desc=name, total=1, unit="B", unit_scale=True, leave=False, disable=None)


def _reason(problem: Exception) -> str:
    """A few words: the messages of the libraries below run over several lines."""
    response = getattr(problem, "response", None)
    if response is not None:
        return f"HTTP {response.status_code}"
    if isinstance(problem, ValueError) and not isinstance(problem, OSError):
        return "the checksum does not match"
    return getattr(problem, "strerror", None) or type(problem).__name__
