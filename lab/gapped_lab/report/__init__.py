"""Records to tables, figures and one self-contained HTML file. Needs neither torch nor data."""

from gapped.errors import require

# Before a module of this package is imported, and so before anything is trained that could not be reported.
require("gapped_lab.report", "numpy", "scipy", "matplotlib", "jinja2")
