"""Docstrings of public functions stand alone: all arguments are named, and no markup is needed to read."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import user_script

import gapped
from gapped.pathwise.argument_help import ARGUMENTS

PUBLIC = [getattr(gapped, name) for name in gapped.__all__]
FUNCTIONS = {each.__name__: each for each in PUBLIC if inspect.isfunction(each)}
LAYERS = {name: getattr(gapped.nn, name) for name in gapped.nn.__all__}
FORWARDS = {name: kind.forward for name, kind in LAYERS.items() if hasattr(kind, "forward")}
CLASSES = [kind.__name__ for kind in gapped.estimators().values()]
# Whose mathematics are still in the markup of Sphinx.
ROLES = {"subset", "linear_choice"}


@pytest.mark.parametrize("name", [*FUNCTIONS, *FORWARDS])
def test_every_argument_is_explained(name: str) -> None:
    function: Callable[..., Any] = {**FUNCTIONS, **FORWARDS}[name]
    text = function.__doc__ or ""
    parameters = [each for each in inspect.signature(function).parameters if each != "self"]
    assert [each for each in parameters if not re.search(rf"\b{each}\b", text)] == []


@pytest.mark.parametrize("name", sorted({*FUNCTIONS, *CLASSES} - ROLES))
def test_help_needs_no_markup(name: str) -> None:
    text = inspect.getdoc(getattr(gapped, name)) or ""
    assert not re.search(r":\w+:`|\.\. \w+::|\\[a-z]+\{", text)
    assert not re.search(r"^ +\([\w, ]+\)$", text, re.MULTILINE), "a line that should have been filled in"
    assert max(map(len, text.splitlines())) <= 110


@pytest.mark.parametrize("name", gapped.estimators("pathwise"))
def test_functions_of_estimators_say_when_they_are_soft(name: str) -> None:
    home = gapped.estimators()[name].__module__
    function = next(each for each in FUNCTIONS.values() if each.__module__ == home)
    text = function.__doc__ or ""
    soft = inspect.signature(function).parameters["hard"].default is False
    assert ("Soft by default" in "".join(text.splitlines()[:4])) == soft
    assert set(ARGUMENTS) <= set(re.findall(r"^ {4}(\w+): ", text, re.MULTILINE))


def test_a_script_of_a_user_runs(capsys: pytest.CaptureFixture[str]) -> None:
    user_script.main()
    assert "Diagnosis(2 estimators, reference: " in capsys.readouterr().out


def test_type_checkers_know_every_estimator_by_its_name() -> None:
    stub = (Path(gapped.__file__).with_suffix(".pyi")).read_text("utf-8")
    for family, alias in (("pathwise", "_Pathwise"), ("score", "_Score")):
        names = re.search(rf"^{alias} = Literal\[(.*?)\]", stub, re.MULTILINE | re.DOTALL)
        assert names is not None
        assert sorted(re.findall(r'"([\w-]+)"', names[1])) == sorted(gapped.estimators(family))


def test_a_notebook_shows_tables() -> None:
    two = {"<b>": gapped.GST(), "RLOO": gapped.RLOO(2)}
    diagnosis = gapped.diagnose(lambda z: z[..., 0], torch.zeros(3), two, 50)
    page = diagnosis._repr_html_()
    assert page.count("<tr>") == 3
    assert "&lt;b&gt;" in page
    assert "<b>" not in page
    assert len(repr(diagnosis)) < 80
    assert len(repr(gapped.properties("gst", draws=100))) < 130
