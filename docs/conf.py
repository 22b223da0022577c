"""How the documentation is built: `make docs`. Warnings are errors, and no page loads from the network."""

from __future__ import annotations

import re
import sys
from pathlib import Path

from sphinx.application import Sphinx

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE / "_ext"), str(HERE.parent / "src")]

from gapped import __version__  # noqa: E402

project = "gapped"
author = "The gapped authors"
project_copyright = author
release = version = __version__

extensions = [
    "myst_parser",
    "sphinx.ext.autodoc",
    "sphinx.ext.napoleon",
    "gallery",
    "llms",
    "mathml",
    "reference",
]
exclude_patterns = ["_build", "generate"]

myst_enable_extensions = ["dollarmath"]
myst_heading_anchors = 4
html_math_renderer = "mathml"

# "auto" is an argument, and stays as it is typed.
smartquotes = False
# In docstrings, single backticks name arguments and functions.
default_role = "code"
autodoc_inherit_docstrings = False
# A colon in the first line of Returns does not end a type.
napoleon_use_rtype = False
autodoc_member_order = "bysource"
autodoc_typehints_format = "short"
python_use_unqualified_type_names = True

html_theme = "furo"
# Without the commit of a version between releases, which breaks the line.
html_title = f"gapped {version.partition('+')[0]}"
html_static_path = ["_static"]
html_css_files = ["gapped.css"]
html_js_files = [("copy.js", {"defer": "defer"})]
html_copy_source = False

# Pages of the repository that are pages here too, under another address.
PAGES = {
    "](../README.md": "](index.md",
    "](../CONTRIBUTING.md": "](contributing.md",
    "](../CHANGELOG.md": "](changelog.md",
}


def redirect(app: Sphinx, docname: str, source: list[str]) -> None:
    for there, here in PAGES.items():
        source[0] = source[0].replace(there, here)
    # What stands beside the records is no page here.
    source[0] = re.sub(r"\[([^\]]*)\]\(\.\./results/answered/[^)]*\)", r"\1", source[0])
    if docname == "index":
        # It may name pages that are not written yet, one a line.
        lines = source[0].splitlines()
        bare = [line for line in lines if re.fullmatch(r"[a-z_]+", line)]
        absent = {line for line in bare if not (HERE / f"{line}.md").is_file()}
        source[0] = "\n".join(line for line in lines if line not in absent)


def setup(app: Sphinx) -> None:
    app.connect("source-read", redirect)
    # What it shows depends on which pages there are.
    app.connect("env-get-outdated", lambda *_: ["index"])
