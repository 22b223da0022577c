"""Docstrings of public functions stand alone: all arguments are named, and no markup is needed to read."""

from __future__ import annotations

import inspect
import re
from pathlib import Path
from types import ModuleType

import pytest
import torch
import user_script
from docstring_rules import EXPLAINED, MARKUP, faults, parameters, public_names

import gapped

MODULES = (gapped, gapped.nn, gapped.nn.schedules, gapped.distributions, gapped.subsets, gapped.counts)
VALUES = {f"{home.__name__}.{name}": each for home in MODULES for name, each in public_names(home).items()}
FUNCTIONS = {each.__name__: each for each in public_names(gapped).values() if inspect.isfunction(each)}
FORWARDS = {name: each.forward for name, each in public_names(gapped.nn).items() if hasattr(each, "forward")}


@pytest.mark.parametrize("name", sorted(VALUES))
def test_help_stands_alone(name: str) -> None:
    assert faults(VALUES[name]) == []


@pytest.mark.parametrize("name", FORWARDS)
def test_help_of_a_call_explains_every_argument(name: str) -> None:
    text = inspect.cleandoc(FORWARDS[name].__doc__ or "")
    assert set(parameters(FORWARDS[name])) - {"self"} <= set(EXPLAINED.findall(text))


@pytest.mark.parametrize("module", [*MODULES, gapped.simplex], ids=lambda module: module.__name__)
def test_help_of_a_module_needs_no_markup(module: ModuleType) -> None:
    names = public_names(module)
    texts = [module.__doc__, *(each.__doc__ for each in names.values())]
    assert [markup for text in texts for markup in MARKUP.findall(text or "")] == []


def test_what_is_wrong_with_a_docstring_is_found() -> None:
    def bad(tau: float, dim: int, _private: int = 0) -> None:
        """The same as :func:`gst`, see `gapped.choice._pull` and `gapped.nothing`, in a line that is too long

        Arguments:
            (tau)
            dim: The axis.
        """

    def good(tau: float) -> None:
        """One sentence.

        Arguments:
            tau: The temperature, see `gapped.nn.Sample`.
        """

    assert faults(good) == []
    assert sorted(faults(bad)) == [
        "a first line of 99 characters",
        "begins with 'The same'",
        "markup: :func:`",
        "not filled in: (tau)",
        "tau is not explained",
        "the first line is not one sentence",
        "there is no gapped.choice._pull",
        "there is no gapped.nothing",
    ]


@pytest.mark.parametrize("name", gapped.estimators("pathwise"))
def test_functions_of_estimators_say_when_they_are_soft(name: str) -> None:
    home = gapped.estimators()[name].__module__
    function = next(each for each in FUNCTIONS.values() if each.__module__ == home)
    text = function.__doc__ or ""
    soft = inspect.signature(function).parameters["hard"].default is False
    assert ("Soft by default" in "".join(text.splitlines()[:4])) == soft
    assert set(parameters(function)) <= set(re.findall(r"^ {4}(\w+): ", text, re.MULTILINE))


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
    diagnosis = gapped.diagnose(lambda z: z[..., 0], torch.zeros(3), two, 200)
    page = diagnosis._repr_html_()
    assert page.count("<tr>") == 3
    assert "&lt;b&gt;" in page
    assert "<b>" not in page
    assert len(repr(diagnosis)) < 80
    assert len(repr(gapped.properties("gst", draws=100))) < 130
