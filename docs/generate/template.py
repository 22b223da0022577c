"""Sentences stand in Markdown, `templates/NAME.md`; Python fills in numbers and tables."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from gapped.comparison.table import Table
from gapped_lab.report.rendering import to_markdown

FOLDER = Path(__file__).with_name("templates")


def fill(name: str, values: Mapping[str, Any]) -> str:
    """The template of that name with its {placeholders} filled, as `str.format` does; tables as Markdown."""
    texts = {
        key: to_markdown(value).rstrip() if isinstance(value, Table) else value
        for key, value in values.items()
    }
    return (FOLDER / f"{name}.md").read_text("utf-8").rstrip().format(**texts)
