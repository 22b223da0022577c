"""The page on which one moves the logits and sees the estimators follow: one file, nothing from elsewhere."""

from __future__ import annotations

from collections.abc import Sequence

from gapped.lab.report.html import fill, packaged
from gapped.lab.report.paper import paper
from gapped.lab.report.triangle import CATEGORIES, COLOURS


def render_playground(logits: Sequence[float], tau: float, gap: float, samples: int) -> str:
    """The page as text; the arguments are where its sliders stand at first.

    Its arithmetic is a second copy, in JavaScript, of what the estimators do;
    `tests/lab/report/test_playground.py` compares the two, number by number.
    """
    from markupsafe import Markup

    return fill(
        "simplex.html.j2",
        categories=list(zip(CATEGORIES, logits, COLOURS, strict=True)),
        tau=tau,
        gap=gap,
        samples=samples,
        citation=paper()["citation"],
        css=Markup(packaged("report.css") + packaged("simplex.css")),
        script=Markup(packaged("simplex.js")),
    )
