"""The interactive page in a real browser: it computes what the estimators do, and answers to its controls."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from browsing import check_whole, contrast, style, visit
from conftest import assert_close, normal, seeded
from torch import Tensor

import gapped
from gapped import simplex
from gapped_lab.cli.reproduce import GAP, LOGITS, SAMPLES, TAU
from gapped_lab.report.page import render_playground

N, K = 40, 3
TEMPERATURES = (0.2, 1.0, 2.5)
# What the page calls a member and its options, and the member itself; the temperature comes from the list.
MEMBERS: list[tuple[str, dict[str, Any], Any]] = [
    ("gumbel-softmax", {}, gapped.GumbelSoftmax()),
    ("straight-through", {}, gapped.StraightThrough()),
    ("gumbel-rao", {"samples": 1}, gapped.GumbelRao(samples=1)),
    ("gumbel-rao", {"samples": 6}, gapped.GumbelRao(samples=6)),
    ("gst", {"gap": 0}, gapped.GST(gap=0.0)),
    ("gst", {"gap": 1.3}, gapped.GST(gap=1.3)),
    ("gst", {"gap": "expected"}, gapped.GST(gap=gapped.expected_gap)),
    ("reinmax", {}, gapped.ReinMax()),
]
IDS = [":".join([name, *map(str, options.values())]) for name, options, _ in MEMBERS]


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("page") / "simplex.html"
    path.write_text(render_playground(LOGITS, TAU, GAP, SAMPLES), "utf-8")
    return path


# The arithmetic


def noise_of(name: str, samples: int) -> list[dict[str, Any]]:
    """The very numbers that an estimator draws for N rows of three logits from a fresh generator."""
    source = seeded()
    if name == "gumbel-softmax":
        return [{"e": row} for row in torch.empty(N, K).double().exponential_(generator=source).tolist()]
    uniform = torch.rand(N, 1, dtype=torch.float64, generator=source).squeeze(-1)
    source = seeded(int(torch.randint(2**63 - 1, (), generator=source)))
    many = torch.empty(samples, N, K).double().exponential_(generator=source).transpose(0, 1)
    return [{"u": u, "many": rows} for u, rows in zip(uniform.tolist(), many.tolist(), strict=True)]


def in_the_page(browser: Any, name: str, logits: Tensor, options: dict[str, Any]) -> tuple[Tensor, Tensor]:
    """Category and surrogate of each row, by the page's own functions."""
    samples: Sequence[dict[str, Any]] = browser.execute_script(
        "const [name, rows, options, noise] = arguments;"
        "return rows.map((theta, i) => sample(name, theta, options, noise[i]))",
        name,
        logits.tolist(),
        options,
        noise_of(name, options.get("samples", 1)),
    )
    surrogate = torch.tensor([one["surrogate"] for one in samples], dtype=torch.float64)
    return torch.tensor([one["chosen"] for one in samples]), surrogate


def by_the_estimator(estimator: Any, logits: Tensor) -> tuple[Tensor, Tensor]:
    """Category and surrogate from torch; ReinMax has no surrogate, and shows the first of its two points."""
    rows = simplex.shift(logits)
    draws = estimator.draw_category(rows, seeded(), True)
    points = estimator.points(rows, draws).points
    return draws.category, points[0] if isinstance(estimator, gapped.ReinMax) else points.mean(0)


@pytest.mark.parametrize(("name", "options", "estimator"), MEMBERS, ids=IDS)
def test_the_page_computes_what_the_estimator_does(
    browser: Any, page: Path, name: str, options: dict[str, Any], estimator: Any
) -> None:
    visit(browser, page)
    logits = 2 * normal(N, K)
    for tau in TEMPERATURES:
        index, surrogate = in_the_page(browser, name, logits, {"tau": tau, **options})
        twin = type(estimator)(**{**vars(estimator), "tau": tau})
        expected_index, expected = by_the_estimator(twin, logits)
        assert index.tolist() == expected_index.tolist()
        assert len(set(index.tolist())) == K
        assert_close(surrogate, expected, 1e-9)
    # The comparison would notice a relative error of a millionth.
    _, off = in_the_page(browser, name, logits, {"tau": tau * (1 + 1e-6), **options})
    assert (off - expected).abs().max() > 1e-9


def test_the_noise_is_what_the_estimators_sample_with(browser: Any, page: Path) -> None:
    """`sample` itself, soft, so that nothing hangs on `draw` and `points`."""
    visit(browser, page)
    logits = normal(N, K)
    for name, estimator in (
        ("gumbel-softmax", gapped.GumbelSoftmax(0.7, hard=False)),
        ("gst", gapped.GST(0.7, hard=False)),
        ("gumbel-rao", gapped.GumbelRao(0.7, hard=False, samples=4)),
    ):
        _, surrogate = in_the_page(browser, name, logits, {"tau": 0.7, "gap": 1, "samples": 4})
        assert_close(surrogate, estimator.sample(logits, generator=seeded()), 1e-9)


def test_movements_and_the_expected_gap(browser: Any, page: Path) -> None:
    visit(browser, page)
    logits = normal(10, K)
    moves = browser.execute_script(
        "return arguments[0].map(theta => theta.map((_, i) => movements(theta, i, 1.2)))", logits.tolist()
    )
    one_hot = torch.eye(K, dtype=torch.float64)
    top, selected = logits.amax(-1)[:, None, None], (logits @ one_hot).unsqueeze(-1)
    for name, expected in (
        ("m1", (top - selected) * one_hot),
        ("m2", (logits.unsqueeze(1) + 1.2 - top).clamp(min=0) * (1 - one_hot)),
    ):
        values = torch.tensor([[move[name] for move in row] for row in moves], dtype=torch.float64)
        assert_close(values, expected, 1e-9)
    p = torch.tensor([0.001, 0.1, 0.5, 0.9, 1.0], dtype=torch.float64)
    gap = browser.execute_script("return arguments[0].map(expectedGap)", p.tolist())
    assert_close(torch.tensor(gap, dtype=torch.float64), gapped.expected_gap(p), 1e-9)


# The page


def shown(browser: Any) -> dict[str, str]:
    """Everything that a slider may change."""
    texts: dict[str, str] = browser.execute_script(
        "const all = {summary: document.getElementById('summary').textContent};"
        "for (const p of document.querySelectorAll('svg path[id], svg circle[id]'))"
        "  all[p.id] = p.getAttribute('d') ?? p.getAttribute('cx') + ' ' + p.getAttribute('cy');"
        "for (const c of document.querySelectorAll('[data-key]'))"
        "  all[c.parentElement.dataset.category + ' ' + c.dataset.key] = c.textContent;"
        "return all"
    )
    return texts


def changed(browser: Any, before: dict[str, str]) -> set[str]:
    """What differs, once the next frame has been drawn."""
    browser.execute_async_script("requestAnimationFrame(() => requestAnimationFrame(arguments[0]))")
    return {key for key, value in shown(browser).items() if value != before[key]}


def press(browser: Any, control: str, *keys: str) -> None:
    browser.find_element("css selector", control).send_keys(*keys)


@pytest.fixture
def keys() -> Any:
    return pytest.importorskip("selenium.webdriver.common.keys", reason="needs selenium").Keys


def choose(browser: Any, name: str) -> None:
    browser.find_element("css selector", f"input[value={name}]").click()


def test_a_slider_moves_points_and_numbers(browser: Any, page: Path, keys: Any) -> None:
    visit(browser, page)
    choose(browser, "gumbel-softmax")
    changed(browser, shown(browser))
    before = shown(browser)
    press(browser, "#logit-1", *[keys.ARROW_RIGHT] * 6)
    moved = changed(browser, before)
    assert {"dots-0", "dots-1", "dots-2", "mean-1", "start", "left p", "top p", "left drawn"} <= moved
    assert browser.find_element("id", "logit-1-value").text == "0.40"
    probability = torch.softmax(torch.tensor([LOGITS[0], 0.4, LOGITS[2]]), -1)[1]
    assert shown(browser)["left p"] == f"{probability:.3f}"


def test_the_gap_moves_gst_and_only_after_m1(browser: Any, page: Path, keys: Any) -> None:
    visit(browser, page)
    before = shown(browser)
    press(browser, "#gap", *[keys.ARROW_LEFT] * 4)
    moved = changed(browser, before)
    assert {"m2-0", "m2-1", "m2-2", "dots-1", "left gap", "left m2"} <= moved
    assert not moved & {"m1-0", "m1-1", "m1-2", "start", "left p", "left drawn", "left m1", "left lemma"}
    assert shown(browser)["left gap"] == "0.80"
    press(browser, "#expected", " ")
    changed(browser, before)
    after = shown(browser)
    assert [after[f"{name} gap"] for name in ("top", "left", "right")] == [
        after[f"{name} lemma"] for name in ("top", "left", "right")
    ]


def test_temperature_points_and_noise(browser: Any, page: Path, keys: Any) -> None:
    visit(browser, page)
    choose(browser, "gumbel-rao")
    for control, key in (("#tau", keys.ARROW_LEFT), ("#samples", keys.HOME), ("#points", keys.END)):
        changed(browser, shown(browser))
        before = shown(browser)
        press(browser, control, *[key] * 4)
        assert {"dots-0", "dots-1", "dots-2", "top centre"} <= changed(browser, before), control
    count = sum(int(shown(browser)[f"{name} drawn"]) for name in ("top", "left", "right"))
    assert count == 2000 == sum(shown(browser)[f"dots-{i}"].count("M") for i in range(3))
    before = shown(browser)
    press(browser, "#noise", keys.ENTER)
    assert "dots-0" in changed(browser, before)
    press(browser, "button[type=reset]", keys.ENTER)
    changed(browser, before)
    first = shown(browser)
    visit(browser, page)
    assert shown(browser) == first


@pytest.mark.parametrize("name", ["gumbel-softmax", "straight-through", "gumbel-rao", "gst", "reinmax"])
def test_each_estimator_says_what_it_shows(browser: Any, page: Path, name: str) -> None:
    visit(browser, page)
    choose(browser, name)
    changed(browser, shown(browser))
    now = shown(browser)
    agree, total = (int(word) for word in now["summary"].split(": ")[1].split()[:3:2])
    assert total == 400
    assert (agree < total) == (name == "straight-through")
    visible = {k for k in ("gap", "samples", "tau") if browser.find_element("id", k).is_displayed()}
    assert visible == {"tau"} | {"gst": {"gap"}, "gumbel-rao": {"samples"}}.get(name, set())
    assert (now["m2-1"] != "") == (name == "gst")
    assert (float(now["top spread"]) > 0.001) == name.startswith("gumbel")
    assert (now["top gap"] == "–") == (name == "reinmax")


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [390, 1400])
def test_the_page_is_whole(browser: Any, page: Path, width: int, scheme: str) -> None:
    visit(browser, page, width, scheme)
    check_whole(browser)
    background = style(browser, "body", "backgroundColor")
    for where in ("h1", "#about", ".slider label", "output", "#summary", "tbody td", "#noise"):
        assert contrast(style(browser, where, "color"), background) >= 4.5, where
    for i in range(3):
        assert contrast(style(browser, f"#mean-{i}", "stroke"), background) >= 3


def test_every_control_is_labelled_and_reached_by_keyboard(browser: Any, page: Path, keys: Any) -> None:
    visit(browser, page, 390)
    unnamed = browser.execute_script(
        "return [...document.querySelectorAll('input')].filter(i => !i.labels[0]?.textContent.trim()).length"
    )
    assert unnamed == 0
    reached = []
    browser.find_element("tag name", "body").send_keys(keys.TAB)
    for _ in range(12):
        active = browser.switch_to.active_element
        reached.append(
            active.get_attribute("id") or active.get_attribute("value") or active.get_attribute("class")
        )
        active.send_keys(keys.TAB)
    wanted = ["gst", "logit-0", "logit-1", "logit-2", "tau", "gap", "expected", "points", "noise"]
    assert [name for name in reached if name in wanted] == wanted
    browser.find_element("css selector", "input[value=gst]").send_keys(keys.ARROW_LEFT)
    assert browser.find_element("css selector", "input:checked").get_attribute("value") == "gumbel-rao"
