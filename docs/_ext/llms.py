"""llms.txt beside the pages: the API reference, a line for each name, for programs that read."""

from __future__ import annotations

import re
from importlib import import_module
from inspect import cleandoc
from pathlib import Path
from typing import Any

import reference
from sphinx.application import Sphinx

DOCS = Path(__file__).parents[1]
OBJECT = re.compile(r"\.\. auto(?:function|class|exception):: (?:gapped\.)?([\w.]+)")
MODULE = re.compile(r"\.\. automodule:: ([\w.]+)\n +:members:(.*)")
ENTRY = re.compile(rf"^## .+|{OBJECT.pattern}|{MODULE.pattern}", flags=re.M)


def line(page: str, name: str, value: Any) -> str:
    """A name with its address and the first line of its docstring."""
    return f"- [{name}]({page}.html#{name}): {cleandoc(value.__doc__).splitlines()[0]}"


def names(page: str, match: re.Match[str]) -> list[str]:
    """The lines that an entry of a page of the reference becomes: a heading, a name, or those of a module."""
    one, home, members = match[1], match[2], match[3]
    if one:
        room, _, name = f"gapped.{one}".rpartition(".")
        return [line(page, f"gapped.{one}", getattr(import_module(room), name))]
    if home:
        module = import_module(home)
        own = [name for name, value in vars(module).items() if getattr(value, "__module__", "") == home]
        public = getattr(module, "__all__", [name for name in own if not name.startswith("_")])
        listed = re.findall(r"\w+", members) or public
        return [line(page, f"{home}.{name}", getattr(module, name)) for name in listed]
    return ["", match[0], ""]


def title(page: str) -> str:
    text = (DOCS / f"{page}.md").read_text("utf-8")
    heading = re.search(r"^# (.+)", text, flags=re.M)
    return heading[1] if heading else page.capitalize()


def text() -> str:
    """The whole file, in the form of llmstxt.org."""
    index = (DOCS / "index.md").read_text("utf-8")
    about = index.split("\n\n")[1]
    pages = re.findall(r"^([a-z_]+)$", index, flags=re.M)
    listing = [f"- [{title(page)}]({page}.html)" for page in pages if (DOCS / f"{page}.md").is_file()]
    entries = []
    for page in (page for page in pages if page.partition("_")[0] == "api"):
        api = reference.expand((DOCS / f"{page}.md").read_text("utf-8"))
        entries += [each for match in ENTRY.finditer(api) for each in names(page, match)]
    return "\n".join(["# gapped", "", f"> {about}", *entries, "", "## Pages", "", *listing, ""])


def write(app: Sphinx, failure: Exception | None) -> None:
    if failure is None and app.builder.format == "html":
        (Path(app.outdir) / "llms.txt").write_text(text(), encoding="utf-8")


def setup(app: Sphinx) -> dict[str, bool]:
    app.connect("build-finished", write)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
