"""The paper's pictures show what the estimators do, and the documentation's are the command's."""

from __future__ import annotations

import re
from pathlib import Path
from xml.etree import ElementTree

import numpy as np
import pytest
import torch
from conftest import gst_surrogate, lemma_1, seeded
from doc_pages import same_drawing
from statistical import mean_is, require_law, require_rejected

import gapped
from gapped.cli.app import main
from gapped_lab.cli import reproduce
from gapped_lab.cli.reproduce import LOGITS, PICTURES, PROBABILITIES, figures
from gapped_lab.movements import movements, simulated_gaps, surrogates
from gapped_lab.recipe_files import known_recipes
from gapped_lab.report.triangle import Setting

ROOT = Path(__file__).parents[2]
THETA = torch.tensor(LOGITS, dtype=torch.float64)


@pytest.fixture(scope="module")
def full() -> dict[str, str]:
    return figures()


@pytest.fixture(scope="module")
def quick() -> dict[str, str]:
    return figures(quick=True)


@pytest.mark.parametrize("gap", [0.0, 0.3, 1.0, 2.5])
@pytest.mark.parametrize("tau", [0.5, 1.0])
def test_movements_are_those_of_the_paper(gap: float, tau: float) -> None:
    """With m1 and m2 written out as in its section 4.2."""
    stops = movements(gapped.GST(tau, gap=gap), LOGITS)
    for i in range(3):
        drawn = torch.eye(3, dtype=torch.float64)[i]
        m1 = (THETA.max() - THETA @ drawn) * drawn
        m2 = (THETA + gap - THETA.max()).clamp(min=0) * (1 - drawn)
        ways = [THETA, THETA + m1, THETA + m1 - m2]
        np.testing.assert_allclose(stops[i], [torch.softmax(way / tau, -1) for way in ways], atol=1e-14)


def test_surrogates_of_gst_are_the_ends_of_its_movements() -> None:
    index, points = surrogates(gapped.GST(1.0, gap=1.0), LOGITS, 50, seeded())
    assert points.shape == (1, 50, 3)
    assert set(index.tolist()) == {0, 1, 2}
    for i, point in zip(index, points[0], strict=True):
        np.testing.assert_allclose(point, gst_surrogate(THETA, int(i), 1.0, 1.0), atol=1e-14)


def test_surrogates_of_gumbel_rao_are_means_of_several_points() -> None:
    index, points = surrogates(gapped.GumbelRao(samples=7), LOGITS, 20, seeded())
    assert points.shape == (7, 20, 3)
    assert (points.argmax(-1) == index).all()


def test_simulated_gaps_have_the_mean_of_lemma_1() -> None:
    """All in one comparison: the standardised gaps of all probabilities have mean zero."""
    gaps = torch.from_numpy(simulated_gaps(PROBABILITIES, 3000, seeded(5)))
    expected, scale = lemma_1(torch.tensor(PROBABILITIES, dtype=torch.float64)), gaps.std(0)
    require_law(mean_is(((gaps - expected) / scale).flatten(), 0.0))
    # Wrong on purpose: the limit for small p in place of the lemma.
    require_rejected(mean_is(((gaps - 1.0) / scale).flatten(), 0.0))


@pytest.mark.parametrize("tau", [1.0, 1.5, 2.0])
def test_the_density_is_that_of_gumbel_softmax(tau: float) -> None:
    """Its integral over the region where a category is the largest is that category's probability.

    Below temperature 1 it is unbounded at the corners, where sums over a grid are of no use.
    """
    count = 1500
    middle = (np.arange(count) + 0.5) / count
    x, y = np.meshgrid(middle, middle)
    inside = x + y < 1 - 0.25 / count
    points = np.stack([x[inside], y[inside], 1 - x[inside] - y[inside]], -1)
    mass = Setting(LOGITS, tau).density(points) / count**2
    shares = [mass[points.argmax(-1) == i].sum() for i in range(3)]
    np.testing.assert_allclose(shares, torch.softmax(THETA, -1), atol=4e-3)
    # Wrong on purpose: the density at another temperature, which moves mass between corners and centre.
    central = points.max(-1) < 0.5
    _, samples = surrogates(gapped.GumbelSoftmax(tau), LOGITS, 4000, seeded(2))
    frequency = torch.from_numpy((samples[0].max(-1) < 0.5).astype(float))
    require_law(mean_is(frequency, float(mass[central].sum())))
    wrong = Setting(LOGITS, 2 * tau).density(points) / count**2
    require_rejected(mean_is(frequency, float(wrong[central].sum())))


def test_the_committed_pictures_are_what_the_command_draws(full: dict[str, str]) -> None:
    for name in PICTURES:
        committed = (ROOT / "docs" / "figures" / name).read_text("utf-8")
        assert same_drawing(committed, full[name]), name
    page = (ROOT / "docs" / "pictures.md").read_text("utf-8")
    assert set(re.findall(r"\(figures/([\w.-]+)\)", page)) == set(PICTURES)


def test_pictures_describe_themselves(full: dict[str, str]) -> None:
    for name in PICTURES:
        root = ElementTree.fromstring(full[name])
        assert len(root.attrib["aria-label"]) > 40
        titles = [title.text for title in root.iter("{http://www.w3.org/2000/svg}title")]
        assert len(titles) == (len(PROBABILITIES) if name == "expected-gap.svg" else 3)


def dots(svg: str) -> int:
    """Strokes without length."""
    return len(re.findall(r"M (\S+ \S+) \nL \1 ", svg))


def test_every_sample_is_drawn_and_quick_draws_fewer(full: dict[str, str], quick: dict[str, str]) -> None:
    # STGS and GST 400 each, GR-MC half of that, and the 100 behind one of them.
    assert dots(full["simplex-samples.svg"]) == 400 + 400 + 200 + 100
    assert dots(quick["simplex-samples.svg"]) == 100 + 100 + 50 + 100
    assert "mean of 300 simulated gaps" in quick["expected-gap.svg"]


@pytest.mark.usefixtures("sandbox")
def test_the_command_draws_the_same_bytes_again(
    capsys: pytest.CaptureFixture[str], quick: dict[str, str]
) -> None:
    folder = Path("runs/figures-quick")
    folder.mkdir(parents=True)
    for name in PICTURES[1:]:
        (folder / name).write_text(quick[name], "utf-8")
    assert main(["reproduce", "figures", "--quick"]) == 0
    lines = [f"written: {folder / PICTURES[0]}", *(f"unchanged: {folder / name}" for name in PICTURES[1:])]
    assert capsys.readouterr().out.splitlines() == lines
    assert (folder / PICTURES[0]).read_text("utf-8") == quick[PICTURES[0]]


@pytest.mark.usefixtures("sandbox")
def test_a_folder_that_cannot_be_written_is_one_line(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gapped_lab.cli.reproduce.figures", lambda quick: {"a.svg": ""})
    Path("file").write_text("")
    assert main(["reproduce", "figures", "--quick", "--out", "file"]) == 2
    assert re.fullmatch(r"gapped: file\S* cannot be written \(.*\)\n", capsys.readouterr().err)


@pytest.mark.usefixtures("sandbox")
def test_figures_beside_recipes(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[object] = []
    monkeypatch.setattr(reproduce, "draw_figures", lambda folder, quick: asked.append((str(folder), quick)))
    monkeypatch.setattr(
        reproduce, "execute", lambda recipes, *rest: asked.append([r.name for r in recipes]) or 0
    )
    assert main(["reproduce", "figures", "smoke", "--quick"]) == 0
    assert asked == [("runs/smoke-figures-quick", True), ["smoke"]]
    asked.clear()
    # A wrong name is found before anything is drawn.
    assert main(["reproduce", "figures", "somke"]) == 2
    assert asked == []


def test_all_means_the_figures_too() -> None:
    recipes, drawn = reproduce.find_recipes(["all"], quick=True)
    assert drawn
    assert {recipe.name for recipe in recipes} == set(known_recipes()) - {"smoke"}
    with pytest.raises(gapped.GappedError, match=r"figures.*\.toml"):
        reproduce.find_recipes(["figure"])


def test_the_field_stands_for_the_recipes_of_its_board() -> None:
    recipes, drawn = reproduce.find_recipes(["field", "field-codes"], quick=True)
    assert ([recipe.name for recipe in recipes], drawn) == (list(reproduce.BOARD), False)
