"""The documentation as pages: built without a warning, whole, and readable without a network."""

from __future__ import annotations

import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from browsing import check_whole, visit
from subprocesses import python

import gapped

DOCS = Path(__file__).parents[2] / "docs"
LOADING = {"src", "srcset", "poster", "data", "href", "xlink:href", "style"}


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    pytest.importorskip("sphinx", reason="needs the extra docs")
    folder = tmp_path_factory.mktemp("site")
    folders = ("-d", str(folder / "trees"), str(DOCS), str(folder / "html"))
    python("-m", "sphinx", "--fail-on-warning", "--quiet", "-b", "html", *folders)
    return folder / "html"


class Loads(HTMLParser):
    """Collects the addresses that a browser fetches by itself; links that a reader may click are not."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.addresses: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        if tag != "a":
            self.addresses += [value for name, value in attributes if name in LOADING and value]


def from_elsewhere(text: str, kind: str) -> list[str]:
    """The addresses that a page or a style sheet takes from the network."""
    if kind == ".html":
        addresses = Loads(text).addresses
        styles = "\n".join(re.findall(r"<style[^>]*>(.*?)</style>", text, flags=re.S))
        return [a for a in addresses if re.search(r"(https?:)?//", a)] + from_elsewhere(styles, ".css")
    return re.findall(r"(?:url\(\s*|@import\s+)[\"']?((?:https?:)?//[^\"')\s]+)", text)


@pytest.mark.slow
def test_no_page_loads_anything_from_the_network(site: Path) -> None:
    checked = [path for path in site.rglob("*") if path.suffix in (".html", ".css")]
    assert len(checked) > 10
    for path in checked:
        assert from_elsewhere(path.read_text("utf-8"), path.suffix) == [], path.name


@pytest.mark.parametrize(
    ("text", "kind"),
    [
        ('<script src="https://example.org/a.js"></script>', ".html"),
        ('<link rel="stylesheet" href="//example.org/a.css">', ".html"),
        ('<img alt="" srcset="http://example.org/a.png 2x">', ".html"),
        ('<p style="background: url(https://example.org/a.png)">', ".html"),
        ("<style>@import 'https://example.org/a.css';</style>", ".html"),
        ('@font-face { src: url("https://example.org/a.woff2"); }', ".css"),
    ],
)
def test_what_comes_from_the_network_is_found(text: str, kind: str) -> None:
    assert from_elsewhere(text, kind)
    assert from_elsewhere('<a href="https://example.org">x</a><img src="a.png">', ".html") == []


@pytest.mark.slow
def test_every_page_is_in_the_site(site: Path) -> None:
    start = (site / "index.html").read_text("utf-8")
    for page in DOCS.glob("*.md"):
        assert (site / f"{page.stem}.html").is_file()
        assert page.stem == "index" or f'href="{page.stem}.html' in start, page.name


@pytest.mark.slow
def test_every_public_name_is_in_the_reference(site: Path) -> None:
    page = "".join(page.read_text("utf-8") for page in site.glob("api*.html"))
    for name in set(gapped.__all__) - {"__version__"}:
        assert f'id="gapped.{name}"' in page or f'id="module-gapped.{name}"' in page, name


@pytest.mark.slow
def test_formulas_are_mathml(site: Path) -> None:
    page = (site / "estimators.html").read_text("utf-8")
    assert "<math " in page
    assert "<mtable" in page, "aligned lines are rows"
    for page in ("estimators.html", "api_estimators.html"):
        assert "\\mathrm" not in (site / page).read_text("utf-8"), page


@pytest.mark.slow
def test_pages_can_be_copied_from(site: Path) -> None:
    assert (site / "_static" / "copy.js").is_file()
    assert "_static/copy.js" in (site / "tutorial.html").read_text("utf-8")


@pytest.mark.slow
def test_formulas_bring_their_font(site: Path) -> None:
    (font,) = re.findall(r'url\("(\S+?)"\)', (site / "_static" / "gapped.css").read_text("utf-8"))
    data = (site / "_static" / font).read_bytes()
    assert data.startswith(b"wOF2")
    assert len(data) < 500_000
    (licence,) = (site / "_static" / font).parent.glob("*OFL.txt")
    assert "SIL Open Font License" in licence.read_text("utf-8")


@pytest.mark.slow
def test_examples_have_pages_with_source_and_notebook(site: Path) -> None:
    gallery = (site / "examples.html").read_text("utf-8")
    for page in (DOCS / "examples").glob("*.md"):
        text = (site / "examples" / f"{page.stem}.html").read_text("utf-8")
        assert f'href="examples/{page.stem}.html"' in gallery
        assert f"{page.stem}.py" in text
        assert "__future__" in text, "the source"
        # A script that torchrun starts is no notebook.
        assert (site / "examples" / f"{page.stem}.ipynb").is_file() == (page.stem != "ddp")
        assert (f'href="{page.stem}.ipynb"' in text) == (page.stem != "ddp")


@pytest.mark.slow
def test_a_text_for_programs_has_every_public_name(site: Path) -> None:
    """A line each, with an address that leads to it."""
    text = (site / "llms.txt").read_text("utf-8")
    assert len(text) < 24_000
    found = dict(re.findall(r"^- \[(gapped[.\w]+)\]\((\w+\.html)#\1\): \S", text, flags=re.M))
    public = {f"gapped.{name}" for name in gapped.__all__ if callable(getattr(gapped, name))}
    assert public <= set(found)
    for name, page in found.items():
        if name != "gapped.nn.schedules":
            assert f'id="{name}"' in (site / page).read_text("utf-8"), name
    pages = set(re.findall(r"\]\((\w+\.html)\)", text))
    assert {f"{page.stem}.html" for page in DOCS.glob("*.md")} <= pages | {"index.html"}


@pytest.mark.slow
@pytest.mark.parametrize("width", [390, 1280])
@pytest.mark.parametrize("page", ["index", "masks", "api", "defaults", "field", "examples"])
def test_nothing_is_cut_without_a_hint(browser: Any, site: Path, page: str, width: int) -> None:
    """On a phone and on a desk: the page fits, and what scrolls in a box of its own says so."""
    visit(browser, site / f"{page}.html", width)
    check_whole(browser)
    wide = browser.execute_script(
        "return [...document.querySelectorAll('article *')].filter(e => e.scrollWidth > e.clientWidth"
        " && getComputedStyle(e).overflowX == 'auto' && e.clientWidth).map(e => e.previousElementSibling)"
        ".map(e => e && e.className == 'sideways' && !e.hidden)"
    )
    assert all(wide)
    if page == "defaults" and width == 1280:
        assert wide == [], "the widest table fits a desk"
