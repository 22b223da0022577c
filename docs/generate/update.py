"""Write the tables and figures of the documentation from the records: `python docs/generate/update.py`.

Everything is computed before a file is written, each file appears complete or not at all, and a file with the
right content already is left alone.
"""

from __future__ import annotations

import sys
from pathlib import Path

from blocks import fill_blocks
from board import render_board
from drawings import DRAWINGS
from evidence import gather
from field_board import contests

from gapped.comparison.store import write_text
from gapped.errors import GappedError

ROOT = Path(__file__).parents[2]
DOCUMENTS = (
    "README.md",
    "docs/reproduction.md",
    "docs/choosing.md",
    "docs/defaults.md",
    "docs/variance.md",
    "docs/estimators.md",
    "docs/field.md",
    "docs/performance.md",
    "docs/vocabulary.md",
    "docs/workloads.md",
    "docs/examples/word_model.md",
)
FIGURES = "docs/figures"
BOARD = "docs/_static/board.html"


def update(root: Path = ROOT, results: Path = ROOT / "results") -> list[Path]:
    """Fill the documents and draw the figures under `root`; the files that this changed."""
    evidence = gather(results)
    texts = {}
    for name in DOCUMENTS:
        try:
            texts[root / name] = fill_blocks(evidence, (root / name).read_bytes().decode("utf-8"))
        except GappedError as problem:
            raise GappedError(f"{name}: {problem}") from None
    for name, draw in DRAWINGS.items():
        texts[root / FIGURES / name] = draw(evidence)
    texts[root / BOARD] = render_board(evidence.records, contests())
    changes = {path: text for path, text in texts.items() if _differs(path, text)}
    for path, text in changes.items():
        write_text(path, text)
    return list(changes)


def _differs(path: Path, text: str) -> bool:
    return not path.is_file() or path.read_bytes() != text.encode("utf-8")


if __name__ == "__main__":
    try:
        for changed in update():
            print(f"updated: {changed.relative_to(ROOT)}")
    except GappedError as problem:
        sys.exit(f"update.py: {problem}")
