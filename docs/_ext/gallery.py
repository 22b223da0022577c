"""Pages of examples: each ends with the source of its script and a notebook, made from it at build time.

Nothing is run: `tools/gallery.py` does that, and what it found is in the pages.
"""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

from sphinx.application import Sphinx

EXAMPLES = Path(__file__).parents[2] / "examples"
# The last cell calls `main`, whose options are not those of the notebook's own process.
START = """import sys

__doc__ = {!r}
sys.argv = [{!r}]  # options follow, such as "--steps", "100"
main()"""
TAIL = """
## The script

{links}

```{{literalinclude}} ../../examples/{name}.py
:language: python
```
"""


def code_cells(path: Path) -> Iterator[str]:
    """The code of a script in pieces: each function and class alone, what stands between them together.

    What it imports from another example is put in its place, so that a notebook needs no second file.
    """
    lines = path.read_text("utf-8").splitlines()
    body = ast.parse("\n".join(lines)).body
    loose: list[str] = []
    for before, node in pairwise(body):  # the first is the docstring
        # Comments above a statement are its own; the blank lines between two functions are not.
        source = "\n".join(lines[before.end_lineno : node.end_lineno])
        helper = EXAMPLES / f"{node.module}.py" if isinstance(node, ast.ImportFrom) else None
        if isinstance(node, ast.If):
            continue
        if not isinstance(node, ast.FunctionDef | ast.ClassDef) and not (helper and helper.is_file()):
            loose.append(source)
            continue
        if loose:
            yield "\n".join(loose).strip()
            loose = []
        yield from code_cells(helper) if helper else [source.strip()]
    if loose:
        yield "\n".join(loose).strip()


def notebook(path: Path) -> dict[str, Any]:
    """A script as a notebook without output: its docstring, its code in pieces, and a call of `main`."""
    text = ast.get_docstring(ast.parse(path.read_text("utf-8"))) or ""
    sources = [f"# {text}", *code_cells(path), START.format(text.partition("\n")[0], path.name)]
    cells = []
    for number, source in enumerate(sources):
        cell = {"cell_type": "code" if number else "markdown", "id": f"cell-{number}", "metadata": {}}
        outputs = {"execution_count": None, "outputs": []} if number else {}
        cells.append(cell | outputs | {"source": source.splitlines(keepends=True)})
    kernel = {"display_name": "Python 3", "language": "python", "name": "python3"}
    return {"cells": cells, "metadata": {"kernelspec": kernel}, "nbformat": 4, "nbformat_minor": 5}


def has_notebook(page: str) -> bool:
    """Whether an example runs in one process: what its page starts with `torchrun` does not."""
    return not re.search(r"^torchrun ", page, flags=re.M)


def helpers(path: Path) -> dict[str, bool]:
    """The other examples that a script imports, and whether at its start or only to draw its picture."""
    found: dict[str, bool] = {}
    for indent, name in re.findall(r"^( *)(?:from|import) (\w+)", path.read_text("utf-8"), flags=re.M):
        helper = EXAMPLES / f"{name}.py"
        if helper.is_file():
            for each, first in {name: True, **helpers(helper)}.items():
                found[each] = found.get(each, False) or (first and not indent)
    return found


def downloads(name: str, *, notebook: bool) -> str:
    """Sentences with links to the files of an example: what needs no other file comes first."""
    files = {each: f"[`{each}.py`](../../examples/{each}.py)" for each in (name, "common", "picture")}
    needed = helpers(EXAMPLES / f"{name}.py")
    beside = [files[each] for each, first in needed.items() if first]
    beside += [f"for `--figure` {files[each]}" for each, first in needed.items() if not first]
    script = files[name] + (f", with {' and '.join(beside)} beside it" if beside else "")
    alone = f'<a href="{name}.ipynb" download>the notebook</a>, which needs no other file; or the script '
    return f"Download: {alone if notebook else ''}{script}."


def read(app: Sphinx, docname: str, source: list[str]) -> None:
    folder, _, name = docname.rpartition("/")
    if folder == "examples":
        source[0] += TAIL.format(name=name, links=downloads(name, notebook=has_notebook(source[0])))


def write_notebooks(app: Sphinx, problem: Exception | None) -> None:
    if problem is None and app.builder.format == "html":
        for page in Path(app.srcdir, "examples").glob("*.md"):
            if has_notebook(page.read_text("utf-8")):
                text = json.dumps(notebook(EXAMPLES / f"{page.stem}.py"), indent=1)
                Path(app.outdir, "examples", f"{page.stem}.ipynb").write_text(text + "\n", "utf-8")


def setup(app: Sphinx) -> dict[str, bool]:
    app.connect("source-read", read)
    app.connect("build-finished", write_notebooks)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
