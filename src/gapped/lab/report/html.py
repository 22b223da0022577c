"""One HTML file that holds everything: no script, font, style or picture comes from anywhere else."""

from __future__ import annotations

from collections.abc import Sequence
from importlib.resources import files
from pathlib import Path
from typing import Any

from gapped.errors import reject
from gapped.lab.records import load
from gapped.lab.report.cells import Record, failures
from gapped.lab.report.markdown import write_text
from gapped.lab.report.paper import paper
from gapped.lab.report.sections import Section, sections
from gapped.lab.report.tables import aligned_right

# A key of the environment, and what a reader calls it; unknown keys show under their own name.
NAMES = {"gapped": "gapped", "commit": "commit", "torch": "torch", "device": "device", "python": "Python"}


def write_report(folder: Path, out: Path | None = None) -> Path:
    """Write `report.html` from the records in `folder`, to `out` (a file or an existing folder) if given."""
    path = folder / "report.html" if out is None else out / "report.html" if out.is_dir() else out
    if path.suffix == ".jsonl":
        raise reject("out", str(path), "a page to write, not a file of records")
    page = render_html(sections(folder), failures(load(folder / "records.jsonl")))
    write_text(path, page)
    return path


def render_html(parts: list[Section], failed: Sequence[str] = ()) -> str:
    """The page as text; `failed` are lines from `failures`.

    Nothing in it depends on when or where it was made, only on the records.
    """
    from markupsafe import Markup

    return fill(
        "report.html.j2",
        title=_title(parts),
        sections=parts,
        failed=failed,
        environment=_environment([r for part in parts for r in part.records]),
        citation=paper()["citation"],
        aligned_right=aligned_right,
        safe=Markup,
        css=Markup(packaged("report.css")),
        script=Markup(packaged("report.js")),
    )


def fill(template: str, **values: Any) -> str:
    """A template of this package with its values; what is not `Markup` is escaped, and all must be given."""
    from jinja2 import Environment, StrictUndefined

    environment = Environment(
        autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    return environment.from_string(packaged(template)).render(**values).rstrip() + "\n"


def packaged(name: str) -> str:
    """The text of a file that lies beside this one."""
    return files("gapped.lab.report").joinpath(name).read_text("utf-8")


def _title(parts: list[Section]) -> str:
    recipes = list(dict.fromkeys(part.recipe for part in parts))
    return ", ".join(recipes) if len(recipes) <= 3 else f"{len(recipes)} recipes"


def _environment(records: list[Record]) -> list[tuple[str, str]]:
    """What the runs say about where they ran; where they differ, all of it."""
    found: dict[str, set[str]] = {}
    for record in records:
        for key, value in (record.get("environment") or {}).items():
            if value is not None:
                found.setdefault(str(key), set()).add(str(value))
    order = list(NAMES)
    keys = sorted(found, key=lambda k: (order.index(k) if k in order else len(order), k))
    return [(NAMES.get(key, key.replace("_", " ")), ", ".join(sorted(found[key]))) for key in keys]
