"""The part of `gapped doctor` that is about the laboratory: its packages and data sets."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

from gapped.cli.doctor import ABSENT, BROKEN, OK, Finding, find_versions
from gapped.errors import GappedError
from gapped_lab.cli.data import whereabouts

PACKAGES = {
    "scikit-learn": "the data set digits",
    "pooch": "downloads",
    "tqdm": "progress of downloads",
    "tensorboard": "--tensorboard",
}


def findings(data_dir: Path | None, has_torch: bool) -> Iterator[Finding]:
    """The packages, and the data sets, which need torch."""
    yield from find_versions(PACKAGES, "pip install ./lab")
    if has_torch:
        yield from _data(data_dir)


def _data(data_dir: Path | None) -> Iterator[Finding]:
    from gapped_lab.task_kinds import SOURCES

    variable = os.environ.get("GAPPED_DATA")
    for what, folder, remedy in (
        ("--data-dir", data_dir, "leave it out"),
        ("$GAPPED_DATA", variable, "unset it"),
    ):
        if folder and not Path(folder).expanduser().exists():
            yield Finding(what, ABSENT, f"{folder} does not exist", f"{remedy}, or name a folder")
    for name, source in SOURCES.items():
        try:
            here, missing = whereabouts(source.locate(data_dir))
        except GappedError as problem:
            yield Finding(f"data {name}", BROKEN, str(problem))
            continue
        state, hint = (ABSENT, f"gapped data {name}") if missing else (OK, "")
        yield Finding(f"data {name}", state, "; ".join(filter(None, (here, missing))), hint)
