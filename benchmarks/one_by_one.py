"""Run each cell of a recipe in a process of its own, so that no run inherits the memory of another.

Usage: python benchmarks/one_by_one.py efficiency runs/efficiency --device cuda
What follows recipe and folder is passed on to `gapped reproduce`.
"""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

from gapped_lab.recipe_files import known_recipes


def single_cells(text: str) -> list[str]:
    """A recipe for each cell of the recipe `text`."""
    head, *cells = re.split(r"^(?=\[\[cell\]\]|\[quick\])", text, flags=re.M)
    tail = cells.pop() if cells[-1].startswith("[quick]") else ""
    return [head + cell + tail for cell in cells]


def main() -> None:
    name, folder, *options = sys.argv[1:]
    with TemporaryDirectory() as scratch:
        for i, text in enumerate(single_cells(known_recipes()[name].read_text("utf-8"))):
            path = Path(scratch, f"{name}-{i}.toml")
            path.write_text(text, "utf-8")
            command = [sys.executable, "-m", "gapped", "reproduce", str(path), "--out", folder, *options]
            subprocess.run(command, check=True)


if __name__ == "__main__":
    main()
