"""Estimators as text with options."""

from __future__ import annotations

import pytest

from gapped.registry import spell
from gapped_lab.estimator_text import make, parse


@pytest.mark.parametrize(
    "text",
    ["gst", "gst:gap=1.2,tau=0.5", "gst:gap=expected", "gumbel-rao:samples=100", "gst:detach=False,gap=0.0"],
)
def test_estimators_survive_the_way_through_text(text):
    name, options = parse(text)
    assert spell(name, options) == text
    assert make(*parse(spell(name, options))) == make(name, options)


def test_options_get_their_types():
    assert parse(" gst: gap = 2 , detach=false ")[1] == {"gap": 2, "detach": False}
    assert isinstance(parse("gst:tau=1e-2")[1]["tau"], float)
