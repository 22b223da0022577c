"""Records to tables, figures and one self-contained HTML file. Needs neither torch nor data."""

from gapped.errors import require

# Before any of these is imported, and so before anything is trained whose report could not be written.
require("gapped.lab.report", "numpy", "scipy", "matplotlib", "jinja2")

from gapped.lab.report.cells import Cell, cells, groups, read
from gapped.lab.report.html import render_html, write_report
from gapped.lab.report.markdown import render_markdown
from gapped.lab.report.paper import FAILED_ABOVE, PaperRow, against_paper, paper_table
from gapped.lab.report.sections import Picture, Section, sections
from gapped.lab.report.statistics import Summary, difference, standard_errors, summary, verdict
from gapped.lab.report.tables import Row, Table, rows, summary_table, to_markdown, to_rich, verdict_of

__all__ = [
    "FAILED_ABOVE",
    "Cell",
    "PaperRow",
    "Picture",
    "Row",
    "Section",
    "Summary",
    "Table",
    "against_paper",
    "cells",
    "difference",
    "groups",
    "paper_table",
    "read",
    "render_html",
    "render_markdown",
    "rows",
    "sections",
    "standard_errors",
    "summary",
    "summary_table",
    "to_markdown",
    "to_rich",
    "verdict",
    "verdict_of",
    "write_report",
]
