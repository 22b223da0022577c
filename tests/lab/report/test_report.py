"""The report from synthetic records: tables, markers, figures, and the HTML file."""

from __future__ import annotations

import ast
import base64
import io
import json
import re
import xml.etree.ElementTree as ET
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from rich.console import Console

from gapped.errors import GappedError
from gapped.lab import records
from gapped.lab.cli.app import main
from gapped.lab.report import (
    FAILED_ABOVE,
    against_paper,
    cells,
    paper_table,
    render_markdown,
    rows,
    sections,
    summary,
    summary_table,
    to_markdown,
    to_rich,
    verdict_of,
    write_report,
)
from gapped.lab.report.images import strip, tiles
from gapped.lab.report.paper import paper, paper_label

Record = dict[str, Any]

ENVIRONMENT = {
    "gapped": "0.1.0",
    "commit": "1a2b3c4",
    "torch": "2.11.0",
    "device": "NVIDIA H200",
    "python": "3.12.3",
}


def record(label: str, seed: int, value: float | None, **more: Any) -> Record:
    """One run as the laboratory writes it."""
    base: Record = {
        "schema": 1,
        "recipe": "compare",
        "task": "vae",
        "protocol": "digits",
        "label": label,
        "estimator": "gst",
        "options": {"gap": 1.0},
        "tau": 0.5,
        "seed": seed,
        "status": "ok" if value is not None else "diverged",
        "epochs": 20,
        "metrics": {"test_negative_elbo": value},
        "seconds": 30.0,
        "runs_in_fleet": 15,
        "environment": ENVIRONMENT,
    }
    base |= more
    return base | {"id": f"{base['recipe']}/{base['protocol']}/{label}/{base['tau']}/{seed}"}


def many(label: str, values: list[float | None], **more: Any) -> list[Record]:
    return [record(label, seed, value, **more) for seed, value in enumerate(values)]


def write_compare(folder: Path, seeds: int = 3, quick: bool = True) -> Path:
    """A folder as `gapped compare` leaves it: five estimators, one of whose runs diverged."""
    rng = np.random.default_rng(0)
    levels = {"GST-1.0": 21.0, "ReinMax": 21.3, "STGS": 23.5, "ST": 24.2, "GR-MC10": 23.0}
    epoch = np.arange(1, 21)
    digit = (np.hypot(*np.mgrid[-1:1:8j, -1:1:8j]) < 0.8) * np.linspace(90, 255, 8)
    originals = np.stack([np.roll(digit, i, axis=1) for i in range(10)])
    runs, curves, pictures = [], [], []
    for rank, (label, level) in enumerate(levels.items()):
        for seed in range(seeds):
            series = level + 18 * np.exp(-epoch / 4) + rng.normal(0, 0.15, 20) + rng.normal(0, 0.2)
            lost = label == "ST" and seed == 2
            variance = 1e-5 * (rank + 1) * np.exp(-epoch / 15 + rng.normal(0, 0.1, 20))
            run = record(label, seed, None if lost else float(series[-1]), quick=quick)
            run["metrics"] |= {
                "train_negative_elbo": float(series[-1]) - 1,
                "gradient_variance": variance[-1],
            }
            runs.append(run)
            test = [
                None if lost and e > 8 else round(float(v), 4) for e, v in zip(epoch, series, strict=True)
            ]
            curves.append(
                {
                    "id": run["id"],
                    "epoch": epoch.tolist(),
                    "test_negative_elbo": test,
                    "train_negative_elbo": (series - 1).tolist(),
                    "gradient_variance": [None, *variance[1:].tolist()],
                }
            )
        noise = {"original": 0, "reconstruction": 12 + 6 * rank, "sample": 40}
        drawn = {
            k: np.clip(originals + rng.normal(0, s, originals.shape) * (s > 0), 0, 255)
            for k, s in noise.items()
        }
        encoded = {k: base64.b64encode(v.astype(np.uint8).tobytes()).decode() for k, v in drawn.items()}
        pictures.append({"id": runs[-seeds]["id"], "height": 8, "width": 8, "count": 10} | encoded)
    records.append(folder / "records.jsonl", runs)
    records.append(folder / "curves.jsonl", curves)
    records.append(folder / "images.jsonl", pictures)
    return folder


def write_vae(folder: Path) -> Path:
    """A folder as `gapped reproduce vae` leaves it, drawn around the paper's own numbers."""
    rng = np.random.default_rng(1)
    runs, curves = [], []
    table = [*paper()["vae"]["rows"], ["GST-1.2", 0.1, 162.0, 9.0], ["GST-1.2", 0.01, 205.9, 0.1]]
    epoch = np.arange(1, 41)
    for label, tau, mean, std in [*table, ["ReinMax", 1.0, 114.0, 0.5]]:
        gap = float(label[4:]) if label[4:].replace(".", "").isdigit() and label.startswith("GST") else None
        options = {"gap": gap} if gap is not None else {}
        for seed in range(10):
            end = mean + std * rng.standard_normal()
            given = {"recipe": "vae", "protocol": "paper-30x10", "tau": tau, "options": options, "epochs": 40}
            name = "gst" if gap is not None else "other"
            run = record(label, seed, end, estimator=name, seconds=170.0, runs_in_fleet=240, **given)
            runs.append(run)
            curve = end + 60 * np.exp(-epoch / 5) + 0.3 * rng.standard_normal(40)
            curves.append({"id": run["id"], "epoch": epoch.tolist(), "test_negative_elbo": curve.tolist()})
    records.append(folder / "records.jsonl", runs)
    records.append(folder / "curves.jsonl", curves)
    return folder


@pytest.fixture
def compare(tmp_path: Path) -> Path:
    return write_compare(tmp_path)


def loads(page: str) -> list[str]:
    """Every address in the page that a browser would fetch."""
    found = re.findall(r"""(?:src|href|srcset|data|action)\s*=\s*["']([^"']+)["']""", page)
    found += re.findall(r"""url\(\s*["']?([^"')]+)|@import\s+["']?([^"';]+)""", page)
    return ["".join(one) for one in found]


def test_rows_are_best_first_and_count_what_was_lost() -> None:
    runs = many("B", [5.0, 6.0, 7.0]) + many("A", [1.0, 2.0, None]) + many("lost", [None])
    made = rows(runs)
    assert [r.label for r in made] == ["A", "B", "lost"]
    assert made[0].value == summary([1.0, 2.0])
    assert [r.diverged for r in made] == [1, 0, 1]
    # 30 s for a fleet of 15 runs and 20 epochs.
    assert made[0].seconds_per_epoch == pytest.approx(0.1)


def test_accuracy_sorts_downward_and_shows_three_digits() -> None:
    runs = [
        r | {"metrics": {"test_accuracy": r["seed"] / 10 + (r["label"] == "A") / 2}}
        for r in many("A", [0] * 3)
    ]
    runs += [r | {"metrics": {"test_accuracy": r["seed"] / 10}} for r in many("B", [0] * 3)]
    made = rows(runs)
    assert [r.label for r in made] == ["A", "B"]
    assert "| A | 0.5 | 0.600 |" in to_markdown(summary_table(made))


def test_cells_differ_in_more_than_the_seed() -> None:
    plain = {**record("", 0, 1.0), "label": None, "options": {"gap": 1.2}}
    again = plain | {"metrics": {"test_negative_elbo": 3.0}}
    mixed = plain | {
        "id": "m",
        "tau": 0.1,
        "schedule": {"kind": "mixed", "mid": 0.5, "period": 20},
    }
    slow = plain | {"id": "s", "schedule": {"kind": "exponential"}}
    made = cells([plain, again, mixed, slow])
    assert [(c.label, c.tau) for c in made] == [
        ("gst:gap=1.2", 0.5),
        ("gst:gap=1.2", 0.1),
        ("gst:gap=1.2 (exponential)", 0.5),
    ]
    assert made[0].values("test_negative_elbo").tolist() == [3.0]


def test_a_verdict_names_the_temperature_only_where_it_differs() -> None:
    one, two = many("A", [1.0, 1.1]), many("B", [5.0, 5.1])
    assert verdict_of(cells(one + two)).startswith("A wins")
    assert verdict_of(cells(one + [r | {"tau": 1.0} for r in two])).startswith("A (τ=0.5) wins")


def vae(label: str, tau: float, values: list[float | None], **more: Any) -> list[Record]:
    return many(label, values, **({"recipe": "vae", "protocol": "paper-30x10", "tau": tau} | more))


def test_against_paper_by_hand() -> None:
    made = against_paper(vae("GST-1.2", 0.5, [108.0, 109.0, 110.0]), "vae")
    (row,) = [r for r in made if r.ours]
    assert row.difference == pytest.approx(109 - 107.33)
    assert row.standard_errors == pytest.approx(1.67 / (1 / 3 + 0.69**2 / 10) ** 0.5)
    assert row.disagrees
    assert (row.paper_mean, row.paper_std, row.paper_count) == (107.33, 0.69, 10)
    assert len(made) == len(paper()["vae"]["rows"])
    assert all(r.note == "not run here" for r in made if not r.ours)


def test_small_or_uncertain_differences_carry_no_mark() -> None:
    # 0.22 nats are 13 standard errors here, and still not worth a mark.
    precise = against_paper(vae("NZ-GST-1.0", 1.0, [206.09, 206.10, 206.11], recipe="ablation"), "ablation")
    assert max(r.standard_errors or 0 for r in precise) > 10
    uncertain = against_paper(vae("GST-1.2", 0.5, [100.0, 108.0, 118.0]), "vae")
    single = against_paper(vae("GST-1.2", 0.5, [120.0]), "vae")
    scaled = against_paper(vae("GST-1.2", 0.5, [120.0, 120.1, 120.2], quick=True), "vae")
    assert not any(r.disagrees for r in precise + uncertain + single + scaled)
    assert "not comparable" in to_markdown(paper_table(scaled))


def test_cells_marked_x_are_judged_by_the_stated_rule() -> None:
    worst = max(row[2] + 2 * row[3] for row in paper()["vae"]["rows"] if row[2] == 141.61)
    assert pytest.approx(worst) == FAILED_ABOVE
    fails = against_paper(vae("GST-1.0", 0.1, [None, 160.0, 120.0, 130.0]), "vae")[-1]
    works = against_paper(vae("GST-1.0", 0.1, [None, 110.0, 120.0, 130.0]), "vae")[-1]
    assert fails.note == "paper: X; here 2 of 4 seeds fail, so it fails too"
    assert works.note == "paper: X; here 1 of 4 seeds fail, so it converges"
    assert (fails.disagrees, works.disagrees) == (False, True)
    assert str(FAILED_ABOVE) in to_markdown(paper_table([fails]))


def test_other_protocols_do_not_meet_the_paper() -> None:
    made = against_paper(vae("GST-1.2", 0.5, [104.0, 104.1], protocol="linear-30x10"), "vae")
    assert not any(r.ours for r in made)
    beyond = against_paper(vae("ReinMax", 0.5, [104.0, 104.1]), "vae")[-1]
    assert (beyond.label, beyond.note, beyond.paper_mean) == ("ReinMax", "not in the paper", None)


@pytest.mark.parametrize(
    ("recipe", "label", "metrics", "measures"),
    [
        ("listops", "STGS", {"test_accuracy": 0.66}, {"test_accuracy"}),
        ("coupled", "STGS", {"test_negative_elbo": 97.0}, {"test_negative_elbo"}),
        ("entropy", "STGS", {"surrogate_entropy": 0.15}, {"surrogate_entropy"}),
        ("efficiency", "STGS", {"gpu_memory_gb": 0.02}, {"gpu_memory_gb", "seconds_per_epoch"}),
    ],
)
def test_every_table_of_the_paper_finds_its_cells(
    recipe: str, label: str, metrics: dict[str, float], measures: set[str]
) -> None:
    runs = [
        r | {"metrics": metrics} for r in many(label, [0.0, 0.0], recipe=recipe, protocol="paper", tau=1.0)
    ]
    made = [r for r in against_paper(runs, recipe) if r.ours and r.paper_mean is not None]
    assert {r.metric for r in made} == measures
    assert all(r.ours and r.ours.count == 2 for r in made)


def test_labels_of_the_paper_follow_from_options() -> None:
    assert paper_label({"estimator": "gst", "options": {"gap": 1.2}}) == "GST-1.2"
    assert paper_label({"estimator": "gst", "options": {"gap": "expected"}}) == "GST-pi"
    assert paper_label({"estimator": "gst"}) == "GST-1.0"
    unlabelled = [{**r, "label": None, "options": {"gap": 1.2}} for r in vae("", 0.5, [107.0, 107.5])]
    assert [r.paper_mean for r in against_paper(unlabelled, "vae") if r.ours] == [107.33]


def test_markdown_states_where_it_comes_from(tmp_path: Path) -> None:
    folder = write_vae(tmp_path)
    text = render_markdown(folder, "vae")
    assert text == render_markdown(records.load(folder / "records.jsonl"), "vae")
    assert "`gapped reproduce vae` on NVIDIA H200: 190 runs in 2.2 minutes." in text
    assert "| GST-1.2 | 0.5 |" in text
    with pytest.raises(GappedError, match=r"recipe: got 'nope'.*vae"):
        render_markdown(folder, "nope")


def test_the_page_loads_nothing_and_is_reproducible(compare: Path) -> None:
    first = write_report(compare).read_bytes()
    assert first == write_report(compare, compare / "again.html").read_bytes()
    page = first.decode()
    assert loads(page)
    assert [one for one in loads(page) if not one.startswith(("#", "data:"))] == []
    # Names of XML vocabularies look like addresses; nothing fetches them.
    names = {"http://www.w3.org/2000/svg", "http://www.w3.org/1999/xlink"}
    assert set(re.findall(r"https?://[^\s\"'<]+", page)) <= names
    assert str(compare) not in page
    assert not list(compare.glob(".*part"))


def test_the_page_begins_with_the_verdict(compare: Path) -> None:
    page = write_report(compare).read_text("utf-8")
    order = [
        page.index(f'class="{name}"') for name in ("quick", "verdict", "pictures", "sortable", "gallery")
    ]
    assert order == sorted(order)
    assert "1 of 3 runs of ST diverged" in page
    for value in ENVIRONMENT.values():
        assert value in page
    assert page.count("<img ") == 11


def test_ids_in_the_page_are_unique(tmp_path: Path) -> None:
    page = write_report(write_vae(tmp_path)).read_text("utf-8")
    ids = re.findall(r'\bid="([^"]+)"', page)
    assert len(ids) == len(set(ids))


@pytest.mark.parametrize("twins", [False, True])
def test_cells_that_would_hide_each_other_get_no_map(tmp_path: Path, twins: bool) -> None:
    """With the perturbation differentiated, gap and temperature are the same, and the method is another."""
    made = [
        record(f"{'NZ-' * nz}{gap}", 0, 100 + gap + tau + 100 * nz, tau=tau, options={"gap": gap} | extra)
        for gap in (0.5, 1.0)
        for tau in (0.5, 1.0)
        for nz, extra in [(False, {}), (True, {"detach": False})][: 1 + twins]
    ]
    (tmp_path / "records.jsonl").write_text("".join(json.dumps(line) + "\n" for line in made))
    (part,) = sections(tmp_path)
    assert ("heat" in [picture.name for picture in part.pictures]) is not twins


def test_figures_stand_alone_and_speak(tmp_path: Path) -> None:
    (part,) = sections(write_vae(tmp_path))
    names = [p.name for p in part.pictures]
    assert names[:2] == ["final", "test-negative-elbo-tau-0.5"]
    assert names[-1] == "heat"
    for picture in part.pictures:
        root = ET.fromstring(picture.svg)
        assert root.get("aria-label")
        assert root.get("role") == "img"
        titles = [t.text for t in root.iter("{http://www.w3.org/2000/svg}title")]
        assert len(titles) > 5
    final = next(p.svg for p in part.pictures if p.name == "final")
    assert "the paper 107.33" in final


def test_drawing_leaves_matplotlib_alone(compare: Path) -> None:
    import matplotlib

    before = dict(matplotlib.rcParams)
    sections(compare)
    assert dict(matplotlib.rcParams) == before


def test_many_cells_are_drawn_with_a_short_legend(tmp_path: Path) -> None:
    runs = [r for i in range(14) for r in many(f"E{i:02}", [float(i), i + 0.5])]
    curves = [{"id": r["id"], "epoch": [1, 2], "test_negative_elbo": [9.0, 8.0 + r["seed"]]} for r in runs]
    records.append(tmp_path / "records.jsonl", runs)
    records.append(tmp_path / "curves.jsonl", curves)
    svg = sections(tmp_path)[0].pictures[1].svg
    assert ">7 more<" in svg
    assert ">E06<" in svg
    assert ">E07<" not in svg


@pytest.mark.parametrize("runs", [many("A", [1.0]), many("A", [None]), many("A", [None], metrics=None)])
def test_the_least_that_a_folder_can_hold(tmp_path: Path, runs: list[Record]) -> None:
    bare = [
        {k: v for k, v in r.items() if k not in ("environment", "seconds", "epochs", "tau")} for r in runs
    ]
    records.append(tmp_path / "records.jsonl", bare)
    assert "A" in write_report(tmp_path).read_text("utf-8")
    assert render_markdown(tmp_path, "compare")


def test_names_are_escaped(tmp_path: Path) -> None:
    records.append(tmp_path / "records.jsonl", many("<script>alert(1)</script>", [1.0, 2.0]))
    assert "<script>alert" not in write_report(tmp_path).read_text("utf-8")


def test_a_metric_s_name_breaks_no_table() -> None:
    head, rule, *_ = to_markdown(summary_table(rows([record("a", 0, 1.0, metrics={"x|<b>": 1.0})]))).split(
        "\n"
    )
    assert len(re.findall(r"(?<!\\)\|", head)) == rule.count("|")
    assert r"x\|\<b\>" in head


def test_a_torn_last_line_still_gives_a_report(compare: Path) -> None:
    with open(compare / "records.jsonl", "ab") as file:
        file.write(b'{"schema": 1, "id": "to')
    with pytest.warns(UserWarning, match="torn"):
        path = write_report(compare)
    assert "15 runs" in path.read_text("utf-8")


def test_nothing_to_report_is_one_clear_line(tmp_path: Path) -> None:
    with pytest.raises(GappedError, match=r"no records.jsonl in it"):
        write_report(tmp_path)
    (tmp_path / "records.jsonl").touch()
    with pytest.raises(GappedError, match="no finished run yet"):
        write_report(tmp_path)


def test_a_report_that_cannot_be_written_says_so(compare: Path) -> None:
    with pytest.raises(GappedError, match="cannot be written"):
        write_report(compare, compare / "records.jsonl" / "report.html")


def test_strips_are_pngs_with_gaps() -> None:
    from io import BytesIO

    from PIL import Image

    pixels = np.arange(2 * 3 * 4, dtype=np.uint8).reshape(2, 3, 4)
    raw = base64.b64decode(strip(pixels).removeprefix("data:image/png;base64,"))
    shown = np.asarray(Image.open(BytesIO(raw)))
    assert shown.shape == (3, 9, 2)
    assert (shown[:, :4, 0] == pixels[0]).all()
    assert (shown[:, 5:, 0] == pixels[1]).all()
    assert shown[0, :, 1].tolist() == [255] * 4 + [0] + [255] * 4


@pytest.mark.parametrize("broken", ["!!", base64.b64encode(b"abc").decode()])
def test_broken_images_are_named(broken: str) -> None:
    with pytest.raises(GappedError, match=r"images.jsonl, x: sample"):
        tiles({"id": "x", "height": 2, "width": 2, "count": 1, "sample": broken}, "sample")


def test_the_command_prints_table_verdict_and_path(compare: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from gapped.lab.cli.report import report

    report(compare, None)
    shown = capsys.readouterr().out
    assert "GST-1.0" in shown
    assert "1 of 3 runs of ST diverged" in shown
    assert str(compare / "report.html") in shown.replace("\n", "")
    assert "gapped compare" in (compare / "tables.md").read_text("utf-8")
    out = compare / "elsewhere"
    out.mkdir()
    report(compare, out)
    assert [p.name for p in out.iterdir()] == ["report.html"]


@pytest.mark.parametrize("write", [write_compare, write_vae])
def test_tables_fit_an_ordinary_terminal(
    tmp_path: Path, write: Any, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from gapped.lab.report.terminal import console, show

    monkeypatch.setenv("COLUMNS", "80")
    show(records.load(write(tmp_path) / "records.jsonl"), console())
    narrow = capsys.readouterr().out
    monkeypatch.delenv("COLUMNS")
    show(records.load(tmp_path / "records.jsonl"), console())
    wide = capsys.readouterr().out
    numbers = r"[-+]?\d+\.\d+(?:e-\d+)?|≠"
    assert re.findall(numbers, narrow) == re.findall(numbers, wide)
    assert max(len(line.rstrip()) for line in narrow.splitlines() if " has the " not in line) <= 80


def test_the_report_needs_no_other_layer() -> None:
    import gapped.lab.report

    allowed = ("gapped.errors", "gapped.lab.records", "gapped.lab.report")
    for path in Path(gapped.lab.report.__file__).parent.glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text("utf-8"))):
            modules = [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            modules += [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            for module in modules:
                assert module.split(".")[0] != "torch", path
                assert not module.startswith("gapped") or module.startswith(allowed), (path, module)


def test_a_report_of_very_many_cells_shows_the_best(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """As many pictures, rows and marks as anybody looks at; tables.md has every cell."""
    from gapped.lab.cli.report import report

    grid = [(gap, tau) for gap in range(20) for tau in range(1, 14)]
    runs = [
        record(f"GST-{gap}", 0, 20 + gap + tau, tau=tau, options={"gap": float(gap)}) for gap, tau in grid
    ]
    records.append(tmp_path / "records.jsonl", runs)
    logged = {"epoch": [1, 2], "test_negative_elbo": [3.0, 2.0]}
    records.append(tmp_path / "curves.jsonl", [{"id": r["id"], **logged} for r in runs])
    pixel = dict.fromkeys(("original", "reconstruction", "sample"), base64.b64encode(b"x").decode())
    shown = {"height": 1, "width": 1, "count": 1, **pixel}
    records.append(tmp_path / "images.jsonl", [{"id": r["id"], **shown} for r in runs])
    report(tmp_path, None)
    out, page = capsys.readouterr().out, (tmp_path / "report.html").read_text("utf-8")
    for text in (out, page):
        assert "The best 200 of 260 cells; gapped report writes all of them to tables.md." in text
    assert "the best 40 of 260 cells" in page
    assert len(page) < 5e5
    assert len(out) < 3e4
    assert page.count("<svg") == 1 + 8 + 1
    assert page.count("<img") == 81
    assert (tmp_path / "tables.md").read_text("utf-8").count("\n| GST-") == 260


def test_failed_runs_are_named_wherever_a_report_lasts(tmp_path, capsys):
    """But not those that a later attempt has finished, and not only beside others."""
    lost = [
        line | {"status": "failed", "error": "RuntimeError: <b>"} for line in many("GST", [1.0, 2.0, 3.0])
    ]
    path = tmp_path / "records.jsonl"
    records.append(path, lost)
    with pytest.raises(GappedError, match="no finished run yet, compare: 3 runs of GST failed: RuntimeError"):
        sections(tmp_path)
    records.append(path, [*many("ST", [4.0, 5.0]), *many("GST", [1.0])])
    assert main(["report", str(tmp_path)]) == 0
    said = "compare: 2 runs of GST failed: RuntimeError: "
    assert f"{said}<b>" in capsys.readouterr().out
    assert f"{said}\\<b\\>" in (tmp_path / "tables.md").read_text()
    assert f"{said}&lt;b&gt;" in (tmp_path / "report.html").read_text()


LONG = ("gumbel-rao:samples=10, learning_rate=0.001, rate_decay=cosine", 200 * "x", "a " * 90 + "b")


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("name", LONG)
def test_long_labels_leave_room_for_what_they_label(name: str, tmp_path: Path) -> None:
    both = [*many(name, [1.0, 1.01]), *many(f"{name[1:]}y", [2.0, 2.01])]
    runs = [run | {"id": f"{i}"} for i, run in enumerate(both)]
    records.append(tmp_path / "records.jsonl", runs)
    curves = [{"id": run["id"], "epoch": [1, 2], "test_negative_elbo": [2.0, 1.0]} for run in runs]
    records.append(tmp_path / "curves.jsonl", curves)
    final, curve = (ET.fromstring(each.svg) for each in sections(tmp_path)[0].pictures)
    for picture in (final, curve):
        assert (
            max(len("".join(text.itertext())) for text in picture.iter() if text.tag.endswith("text")) <= 62
        )
    spots = [float(spot.get("cx", 0)) for spot in final.iter() if spot.get("class") == "tip"]
    assert max(spots) - min(spots) > 50
    assert float(str(final.get("width")).removesuffix("pt")) - min(spots) > 150


def test_a_narrow_table_gives_its_labels_what_is_left() -> None:
    label = "gumbel-rao:samples=10, learning_rate=0.001"
    file = io.StringIO()
    Console(width=70, file=file).print(to_rich(summary_table(rows(many(label, [1.0, 2.0]))), width=70))
    shown = [line[:23].strip() for line in file.getvalue().splitlines()]
    assert "gumbel-rao:samples=10," in shown
    assert "learning_rate=0.001" in shown
