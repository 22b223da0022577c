"""The pages are short: what a reader needs stands there, the rest in docstrings and under Evidence."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from doc_pages import EXAMPLE_PAGES, PAGES, ROOT

DOCS = ROOT / "docs"


def parts() -> dict[str, list[Path]]:
    """The pages of each part, as the tables of contents of the index list them."""
    index = (DOCS / "index.md").read_text("utf-8")
    blocks = re.findall(r"^```\{toctree\}\n:caption: (\w+)\n(.*?)^```", index, flags=re.M | re.S)
    pages = {
        caption: [DOCS / f"{name}.md" for name in re.findall(r"^\w+$", text, re.M)]
        for caption, text in blocks
    }
    return {caption: [page for page in each if page.exists()] for caption, each in pages.items()}


def words(page: Path) -> int:
    """Those with a letter or a digit, in prose, tables and code; those of a file that the page shows."""
    text = page.read_text("utf-8")
    shown = re.findall(r"^```\{include\} (\S+)", text, flags=re.M)
    return sum(bool(re.search(r"\w", word)) for word in text.split()) + sum(
        words(page.parent / path) for path in shown
    )


PARTS = parts()


def test_every_page_has_a_part() -> None:
    listed = [page for pages in PARTS.values() for page in pages]
    assert sorted([*listed, DOCS / "index.md"]) == sorted(DOCS.glob("*.md"))
    assert list(PARTS) == ["Use", "Reference", "Understand", "Evidence"]


@pytest.mark.parametrize("page", [*PARTS["Use"], *PARTS["Understand"][:3]], ids=lambda page: page.stem)
def test_a_page_for_users_is_short(page: Path) -> None:
    assert words(page) <= 1200


def test_all_pages_but_the_evidence_are_short_together() -> None:
    own = [page for caption, pages in PARTS.items() if caption != "Evidence" for page in pages]
    counts = {page.stem: words(page) for page in [DOCS / "index.md", *own, *EXAMPLE_PAGES]}
    assert sum(counts.values()) <= 25_000, counts


@pytest.mark.parametrize("page", PARTS["Evidence"], ids=lambda page: page.stem)
def test_a_page_of_evidence_begins_with_its_purpose(page: Path) -> None:
    title, _, opening = page.read_text("utf-8").splitlines()[:3]
    assert title.startswith("# ")
    assert re.match(r"This page is for .+[.:)] [A-Z\[].+\.$", opening), "its purpose, and its result"


def test_the_readme_is_short() -> None:
    assert len((ROOT / "README.md").read_text("utf-8").split()) <= 1000


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_no_sentence_begins_with_what(page: Path) -> None:
    """A subject says more; questions and headings may."""
    found = re.findall(
        r"(?:^[-*> ]*|[.:!?] |\| )\**(What [^.?|\n]*[.|])", page.read_text("utf-8"), flags=re.M
    )
    assert found == []
