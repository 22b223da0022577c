"""What every data set can be asked: where it is, to come here checked, to be loaded."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, TypeVar

T_co = TypeVar("T_co", covariant=True)


@dataclass(frozen=True)
class Part:
    """A file of a data set, or the package that embeds it."""

    name: str
    place: Path | str | None  # a file, or words; None where it is missing
    checked: str = ""  # what was verified of the content; empty where nothing was read


class Source(Protocol[T_co]):
    """A named data set. `T_co` is what `load` returns: a `Dataset` for images."""

    @property
    def name(self) -> str: ...

    @property
    def summary(self) -> str:
        """One line for people."""

    def locate(self, data_dir: Path | None) -> list[Part]:
        """Where each part is, without reading any."""

    def check(self, data_dir: Path | None) -> None:
        """Refuse at once if `load` needs a package that is not installed; nothing is read or downloaded."""

    def fetch(self, data_dir: Path | None, progress: bool, download: bool) -> list[Part]:
        """Get what is missing, verify everything, say where it is."""

    def load(self, data_dir: Path | None, progress: bool, download: bool) -> T_co:
        """`fetch`, and the content."""
