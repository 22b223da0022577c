"""The documentation is true and short: its code runs, its links lead somewhere, its commands exist.

README.md is collected as a doctest as well; here come the blocks without prompts.
"""

from __future__ import annotations

import re
import runpy
from itertools import pairwise
from pathlib import Path

import pytest
import torch
import typer
from conftest import FUNCTIONS
from doc_pages import CALLS, EXAMPLE_PAGES, PAGES, ROOT, SHELL, Block, blocks, blocks_of, commands_in
from subprocesses import python
from typer.main import get_command

import gapped
from gapped.cli.app import app
from gapped.errors import GappedError
from gapped_lab.cli.reproduce import find_recipes, find_workloads
from gapped_lab.estimator_text import parse

TABLE = (ROOT / "docs" / "api_estimators.md").read_text(encoding="utf-8")


def wrong_links(text: str, folder: Path) -> list[str]:
    """Relative links that lead nowhere."""
    prose = re.sub(r"^```.*?^```$", "", text, flags=re.M | re.S)
    targets = [target.partition("#")[0] for target in re.findall(r"\]\(([^)\s]+)\)", prose)]
    return [t for t in targets if t and "://" not in t and not (folder / t).exists()]


def fault_of(arguments: list[str]) -> str | None:
    """The error that the command line would give for `arguments`, without running anything."""
    group = get_command(app)
    try:
        with group.make_context("gapped", list(arguments)) as context:
            name, command, rest = group.resolve_command(context, list(arguments))
            with command.make_context(name, rest, parent=context) as inner:
                parameters = inner.params
        if "names" in parameters and not find_workloads(parameters["names"]):
            find_recipes(parameters["names"], quick=bool(parameters["quick"]))
        for text in parameters.get("estimator") or ():
            parse(text)
    except typer.Exit:  # --help and --version end the parsing
        return None
    except GappedError as problem:
        return str(problem)
    except Exception as problem:
        # Which of click's classes it is depends on the version of typer.
        if not hasattr(problem, "format_message"):
            raise
        return str(problem.format_message())
    return None


PYTHON = [block for block in blocks("python", "py") if ">>>" not in block.code]


@pytest.mark.slow_if(lambda block: block.where in ("jax.md:47", "jax.md:69"))
@pytest.mark.parametrize("block", PYTHON, ids=lambda block: block.where)
def test_python_blocks_run(block: Block, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    script = tmp_path / "block.py"
    script.write_text(block.code, encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    torch.manual_seed(0)
    runpy.run_path(str(script), run_name="__main__")


PRINTED = [
    pair
    for page in PAGES
    for pair in pairwise(blocks_of(page.read_text(encoding="utf-8"), page.name))
    if (pair[0].language, pair[1].language) == ("python", "text") and "print" in pair[0].code
]


@pytest.mark.parametrize(("block", "shown"), PRINTED, ids=lambda block: block.where)
def test_blocks_print_what_is_shown_below_them(
    block: Block, shown: Block, capsys: pytest.CaptureFixture[str]
) -> None:
    """The words are the same; numbers, which are rounded, within one of their last digit."""
    exec(compile(block.code, block.where, "exec"), {"__name__": "__main__"})
    number = r"\d+\.\d+"
    printed = capsys.readouterr().out
    assert re.sub(number, "", printed) == re.sub(number, "", shown.code)
    for mine, theirs in zip(re.findall(number, printed), re.findall(number, shown.code), strict=True):
        digits = len(theirs.partition(".")[2])
        assert abs(float(mine) - float(theirs)) < 1.5 * 10**-digits


def test_blocks_are_found() -> None:
    text = "a\n```python\nx = 1\n```\nb\n```bash\ngapped data \\\n  mnist  # fetch\n```\n"
    first, second = blocks_of(text)
    assert first == ("page:2", "python", "x = 1\n")
    assert commands_in(second, "gapped") == [["data", "mnist"]]
    assert len(PYTHON) >= 5
    assert len(CALLS) >= 6


def test_prompts_are_run_by_the_doctest_of_the_readme_alone() -> None:
    """Only README.md is collected as a doctest, so a prompt elsewhere would never run."""
    prompts = {b.where.partition(":")[0] for b in blocks("python", "py") if ">>>" in b.code}
    assert prompts <= {"README.md"}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_relative_links_lead_to_files(page: Path) -> None:
    assert wrong_links(page.read_text(encoding="utf-8"), page.parent) == []


def test_a_wrong_link_is_found() -> None:
    text = "[a](README.md#top) [b](nowhere.md) [c](https://example.org/x) [d](#here)\n```\n[e](code)\n```\n"
    assert wrong_links(text, ROOT) == ["nowhere.md"]


@pytest.mark.parametrize(("where", "call"), CALLS, ids=lambda value: str(value))
def test_commands_exist_with_their_options(where: str, call: list[str]) -> None:
    assert fault_of(call) is None


@pytest.mark.parametrize(
    "call",
    [
        ["compere"],
        ["compare", "--seedz", "3"],
        ["compare", "--seeds", "three"],
        ["compare", "--estimator", "gts"],
        ["compare", "--estimator", "gst:gab=1"],
        ["reproduce"],
        ["reproduce", "vea"],
        ["report"],
    ],
    ids=" ".join,
)
def test_a_wrong_command_is_found(call: list[str]) -> None:
    assert fault_of(call)


def test_every_command_is_shown_on_its_page() -> None:
    shown = {call[0] for where, call in CALLS if where.startswith("command_line")}
    assert shown == set(get_command(app).commands)  # type: ignore[attr-defined]


def test_make_targets_exist() -> None:
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    targets = set(re.findall(r"^([\w-]+):", makefile, flags=re.M))
    named = {call[0] for block in SHELL for call in commands_in(block, "make")}
    assert {"demo", "test"} <= named <= targets


ROWS = dict(re.findall(r"^\| `([\w-]+)` \| [^|]+ \| `gapped\.(\w+)` \|", TABLE, flags=re.M))


@pytest.mark.parametrize("name", dict.fromkeys([*ROWS, *gapped.estimators()]))
def test_the_table_has_a_row_for_every_estimator(name: str) -> None:
    public = getattr(gapped, ROWS[name])
    assert public in (gapped.estimators()[name], FUNCTIONS.get(name))


def test_quickstart_prints_numbers_that_make_sense() -> None:
    printed = python(str(ROOT / "examples" / "quickstart.py"), "--seeds", "1")
    best, uniform = map(float, re.findall(r"best possible cost (\S+), uniform choice (\S+)", printed)[0])
    excess = dict(re.findall(r"^\| (\S+) +\| +(\S+) \|", printed, flags=re.M))
    for name in ("gapmax", "gumbel-softmax"):
        assert 0 < float(excess[name]) < (uniform - best) / 4


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
