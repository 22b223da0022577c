"""Labels, names and paths are text: no terminal, page, figure, table or file system takes them for more."""

from __future__ import annotations

import html
import re
from pathlib import Path
from typing import Any

import pytest
from report_records import append_json, run_lines
from training_toys import one_line, recipe_file, toy_recipe

from gapped.cli.app import main
from gapped.comparison import records
from gapped.errors import GappedError, printable
from gapped_lab.cli.tensorboard import write_events

LABELS = [
    "GST[/1]",
    "[bold]GST[red]",
    r"$\foo$",
    "a\x1b[31mb\x9b2Jc",
    "two\nlines\r\t",
    "\u202eTSG",
    "\ud800",
    "x|y `z` *w* _v_ <b>&amp; ~~s~~ [a](b)",
    "_hidden",
    "# head",
    ":smile: {tau}",
]


pytestmark = pytest.mark.usefixtures("sandbox")


@pytest.mark.parametrize("label", LABELS)
def test_a_strangers_label_is_shown_as_it_is(label: str, tmp_path: Path, capsys: Any) -> None:
    markdown = pytest.importorskip("markdown_it", reason="reads the tables as a browser shows them")
    runs = run_lines(label, [1.0, 1.2, 1.1]) + run_lines("GST", [2.0, 2.1, 2.2])
    append_json(tmp_path / "records.jsonl", runs)
    logged = {"epoch": [1, 2], "test_negative_elbo": [3, 2]}
    append_json(tmp_path / "curves.jsonl", [{"id": r["id"], **logged} for r in runs])
    assert main(["report", str(tmp_path)]) == 0
    shown, out = printable(label), capsys.readouterr().out
    assert f" {shown} " in out
    assert f"{shown} wins" in out
    assert not re.search(r"[^\n\x20-\U0010ffff]|[\x7f-\x9f\u202e]", out)
    page, text = (tmp_path / "report.html").read_text("utf-8"), html.escape(shown, quote=False)
    assert f'<p class="verdict">{text} wins' in page
    assert f'<th scope="row">{text}</th>' in page
    assert f"</i>{text}</li>" in page, "the legend of the curves"
    read = markdown.MarkdownIt("gfm-like", {"linkify": False})
    rendered = read.render((tmp_path / "tables.md").read_text("utf-8"))
    assert f'<td style="text-align:left">{text}</td>' in rendered
    assert f"<p>{text} wins" in rendered


@pytest.mark.parametrize("terminal", [False, True])
def test_training_ends_well_whatever_the_label_and_the_folder(
    terminal: bool, tmp_path: Path, capsys: Any, monkeypatch: Any
) -> None:
    if terminal:
        monkeypatch.setenv("FORCE_COLOR", "1")
    recipe = recipe_file(tmp_path, r"GST[/1] $\foo$")
    assert main(["reproduce", recipe, "--device", "cpu", "--out", "br[/x]"]) == 0
    out = capsys.readouterr().out
    assert "Report: br[/x]/report.html" in out
    assert r"GST[/1] $\foo$ " in out
    assert Path("br[/x]/report.html").exists()


@pytest.mark.parametrize(
    ("label", "shown"),
    [
        ("GST-{gap}", "GST-1.25"),
        ("{gap:.1f} {gap:g} {gap:6.2f}|{tau:+.1e}", "1.2 1.25   1.25|+5.0e-01"),
        ("{{gap}}", "{gap}"),
        *((bad, None) for bad in ("{gap.real}", "{gap[0]}", "{gap!r}", "{}", "{0}", "{gpa}", "{gap", "}")),
        *((bad, None) for bad in ("{tau:>3000000000}", "{tau:100.2f}", "{tau:.999f}", "{tau:{gap}}")),
        *((bad, None) for bad in ("a\x1b[31m", "a\nb", "\u202ex", "x" * 201)),
    ],
)
def test_a_label_names_values_and_nothing_else(label: str, shown: str | None) -> None:
    cell = {"label": label, "estimator": "gst", "tau": 0.5, "options": {"gap": 1.25}}
    if shown is not None:
        assert toy_recipe(cell=[cell]).entries[0].label == shown
        return
    with pytest.raises(GappedError, match=r"^toy \[\[cell\]\]: label: got .*, expected ") as caught:
        toy_recipe(cell=[cell])
    assert str(caught.value).isprintable()


NAMES = ["../../x", "/x", "a/b", "a\\b", "..", ".x", "x.", "", "a\nb", "x" * 101, "c:x", 3]


@pytest.mark.parametrize("name", NAMES)
def test_a_recipes_name_is_a_file_name(name: Any) -> None:
    with pytest.raises(GappedError, match=r"^toy: name: got .*, expected a (plain file name|text)"):
        toy_recipe(name=name)


def test_events_of_a_stranger_stay_in_their_folder(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard", reason="tensorboard is optional")
    run = records.Record(id="../../..", recipe="..", protocol="..", label="../../x", task="vae", seed=0)
    records.write(tmp_path / "in", [records.Curve(id=run.id, epoch=[1], more={"loss": [2.0]})])
    target = write_events([run], tmp_path / "in")
    files = [path for path in tmp_path.rglob("events.out.*") if path.is_file()]
    assert len(files) == 1
    assert files[0].resolve().is_relative_to(target.resolve())


@pytest.mark.parametrize("out", ["there/page.html", "there"])
def test_a_page_put_elsewhere_touches_nothing_else(out: str, tmp_path: Path, capsys: Any) -> None:
    append_json(tmp_path / "runs" / "records.jsonl", run_lines("GST", [1.0, 1.2]))
    there = tmp_path / "there"
    there.mkdir()
    (there / "tables.md").write_text("mine")
    assert main(["report", "runs", "--out", out]) == 0
    assert (there / "tables.md").read_text() == "mine"
    assert len(list(there.glob("*.html"))) == 1
    assert not (tmp_path / "runs" / "tables.md").exists()


def test_a_page_does_not_replace_records(tmp_path: Path, capsys: Any) -> None:
    path = tmp_path / "runs" / "records.jsonl"
    append_json(path, run_lines("GST", [1.0, 1.2]))
    before = path.read_bytes()
    assert main(["report", "runs", "--out", "runs/records.jsonl"]) == 2
    assert "expected a page to write" in one_line(capsys)
    assert path.read_bytes() == before
