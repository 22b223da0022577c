"""The report as a reader meets it: in a browser, on a phone and on a desk, by day and by night."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from board import Contest, render_board
from browsing import check_whole, contrast, luminance, style, visit
from report_records import write_compare, write_vae

from gapped_lab.report.page import write_report

# A real browser takes too long for the suite: test_page.py reads the same pages as text.
pytestmark = pytest.mark.slow
# Of the first spot in the first figure.
NUMBER = "GST-1.0: 21.10 (95%: 20.50 to 21.71), 3 seeds"


@pytest.fixture(scope="module")
def pages(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("reports")
    for name, write in (("compare", write_compare), ("vae", write_vae)):
        (folder / name).mkdir()
        write(folder / name)
    return {name: write_report(folder / name) for name in ("compare", "vae")}


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [390, 1400])
@pytest.mark.parametrize("name", ["compare", "vae"])
def test_the_page_is_whole(browser: Any, pages: dict[str, Path], name: str, width: int, scheme: str) -> None:
    visit(browser, pages[name], width, scheme)
    check_whole(browser)
    images = browser.execute_script("return [...document.images].map(i => i.naturalWidth)")
    assert len(images) == (11 if name == "compare" else 0)
    assert all(wide > 0 for wide in images)
    boxes = browser.execute_script(
        "return [...document.querySelectorAll('figure svg')].map(s => [s.getBBox().width, s.clientWidth])"
    )
    assert len(boxes) >= 4
    assert all(drawn > 0 and 200 < shown <= width for drawn, shown in boxes)
    tables = "[...document.querySelectorAll('.scroll')].map(s => s.scrollWidth <= s.clientWidth)"
    assert browser.execute_script("return [...document.querySelectorAll('.hint')].map(h => h.hidden)") == (
        browser.execute_script(f"return {tables}")
    ), "a table that is cut says so"
    if width == 390:
        labels = (
            "[...document.querySelectorAll('.gallery figcaption')].map(f => f.getClientRects()[0].height)"
        )
        assert all(high < 30 for high in browser.execute_script(f"return {labels}")), "a line each"


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_text_and_lines_stand_out(browser: Any, pages: dict[str, Path], scheme: str) -> None:
    """WCAG's 4.5 for text, in the figures too, and 2.5 for lines, which a table repeats."""
    visit(browser, pages["compare"], scheme=scheme)
    page = style(browser, "body", "backgroundColor")
    assert (luminance(page) > 0.5) == (scheme == "light")
    for where in ("h1", "figcaption", "thead th", "footer p"):
        assert contrast(style(browser, where, "color"), page) >= 4.5
    assert contrast(style(browser, "figure svg text", "fill"), page) >= 4.5
    lines = browser.execute_script(
        "return [...document.querySelectorAll('figure svg path')].map(p => getComputedStyle(p))"
        ".filter(s => parseFloat(s.strokeWidth) == 1.5 && s.stroke != 'none').map(s => s.stroke)"
    )
    assert len(set(lines)) >= 5
    assert min(contrast(line, page) for line in lines) >= 2.5


def column(browser: Any, index: int) -> list[str]:
    rows = "[...document.querySelector('table').tBodies[0].rows]"
    texts: list[str] = browser.execute_script(f"return {rows}.map(r => r.cells[{index}].textContent)")
    return texts


def test_a_click_on_a_header_sorts(browser: Any, pages: dict[str, Path]) -> None:
    visit(browser, pages["compare"])
    heads = browser.find_elements("css selector", "table:first-of-type thead th button")
    means = [float(text) for text in column(browser, 1)]
    assert means == sorted(means)
    heads[1].click()
    heads[1].click()
    assert [float(text) for text in column(browser, 1)] == sorted(means, reverse=True)
    assert heads[1].find_element("xpath", "..").get_attribute("aria-sort") == "descending"
    heads[0].click()
    assert column(browser, 0) == sorted(column(browser, 0))
    variance = next(i for i, head in enumerate(heads) if head.text.startswith("gradient"))
    heads[variance].click()
    shown = [float(text) for text in column(browser, variance)]
    assert shown == sorted(shown)


def board(folder: Path) -> Path:
    """A long table: numbers that a paper published."""
    protocols = ("fixed-120x2", "fixed-60x4", "fixed-30x8", "fixed-15x16")
    path = folder / "board.html"
    path.write_text(render_board([], [Contest("field-rao", "Rao", protocols, frozenset())]), "utf-8")
    return path


def test_a_long_table_is_filtered_by_words(browser: Any, tmp_path: Path) -> None:
    """Rows in which every word begins a word stay; sorting keeps what is hidden hidden."""
    visit(browser, board(tmp_path))
    check_whole(browser)
    field = browser.find_element("css selector", "input.filter")
    shown = "return [...document.querySelectorAll('tbody tr')].filter(r => !r.hidden).map(r => r.textContent)"
    everything = browser.execute_script(shown)
    count = browser.find_element("css selector", "output")
    assert count.text == f"{len(everything)} of {len(everything)} rows"
    field.send_keys("15X16 gr")
    few = browser.execute_script(shown)
    assert few == [text for text in everything if "fixed-15x16" in text and "GR-MC" in text]
    assert 0 < len(few) < len(everything)
    heads = browser.find_elements("css selector", "thead button")
    next(head for head in heads if head.text.startswith("published")).click()
    assert sorted(browser.execute_script(shown)) == sorted(few)
    assert count.text == f"{len(few)} of {len(everything)} rows"
    field.clear()
    field.send_keys("st")
    names = "return [...document.querySelectorAll('tbody tr:not([hidden]) th')].map(r => r.textContent)"
    assert set(browser.execute_script(names)) == {"ST", "STGS"}, "not all, though all show a test loss"
    field.send_keys("x(")
    assert count.text == "No row has all of these words."
    field.clear()
    field.send_keys(" ")
    assert len(browser.execute_script(shown)) == len(everything)


def test_without_javascript_the_essentials_are_there(browser: Any, pages: dict[str, Path]) -> None:
    browser.execute_cdp_cmd("Emulation.setScriptExecutionDisabled", {"value": True})
    try:
        visit(browser, pages["compare"])
        text = browser.find_element("tag name", "body").text
        assert "GST-1.0 has the lowest test negative ELBO" in text
        assert "23.03 to 25.83" in text
        assert browser.find_elements("css selector", "thead button") == []
        assert len(browser.find_elements("css selector", "figure svg")) == 4
        spot = browser.find_element("css selector", "figure:first-of-type .tip title")
        assert spot.get_attribute("textContent").startswith(NUMBER)
    finally:
        browser.execute_cdp_cmd("Emulation.setScriptExecutionDisabled", {"value": False})


@pytest.mark.parametrize("how", ["point", "tap"])
@pytest.mark.parametrize("width", [390, 1400])
def test_a_spot_shows_its_number(browser: Any, pages: dict[str, Path], width: int, how: str) -> None:
    from selenium.webdriver import ActionChains

    visit(browser, pages["compare"], width)
    label = browser.find_element("class name", "tooltip")
    assert not label.is_displayed()
    spot = browser.find_element("css selector", "figure:first-of-type .tip")
    move = ActionChains(browser).move_to_element(spot)
    (move if how == "point" else move.click()).perform()
    assert label.text.startswith(NUMBER)
    box = label.rect
    assert box["x"] >= 0
    assert box["x"] + box["width"] <= width
    ActionChains(browser).move_to_element(browser.find_element("tag name", "h1")).perform()
    assert not label.is_displayed()
