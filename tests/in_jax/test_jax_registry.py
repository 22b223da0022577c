"""Names, text, help and importing of `gapped.jax`."""

from __future__ import annotations

import sys
from dataclasses import fields

import pytest
from docstring_rules import faults
from jax_problems import PATHWISE
from subprocesses import python

import gapped
import gapped.jax


def test_the_surface() -> None:
    """The estimators have torch's names, options and defaults."""
    assert len(PATHWISE) == 7
    for name in PATHWISE:
        theirs, ours = gapped.estimators()[name], gapped.jax.estimators()[name]
        assert ours.__name__ == theirs.__name__
        options = {field.name: field.default for field in fields(theirs)}
        own = {field.name: field.default for field in fields(ours)}
        assert own.items() <= options.items()
    assert gapped.jax.estimator("gst:gap=expected").gap is gapped.jax.expected_gap
    assert hash(gapped.jax.GST(0.5)) == hash(gapped.jax.estimator("gst", tau=0.5))


@pytest.mark.parametrize("name", gapped.jax.__all__)
def test_help_stands_alone(name: str) -> None:
    assert faults(getattr(gapped.jax, name)) == []


def test_importing_brings_jax_and_not_torch() -> None:
    program = (
        "import sys, gapped.jax, jax\n"
        "gapped.jax.gst(jax.random.key(0), jax.numpy.zeros((2, 3)))\n"
        "print({'torch', 'triton', 'jax_triton'} & set(sys.modules), gapped.jax.__name__, jax.__name__)"
    )
    assert python("-W", "error", "-c", program) == "set() gapped.jax jax\n"


@pytest.mark.parametrize(
    ("module", "hidden", "extra"),
    [("jax", "jax", "jax"), ("jax.numpyro", "numpyro", "numpyro"), ("jax.distrax", "distrax", "distrax")],
)
def test_without_its_package_it_says_what_to_install(module: str, hidden: str, extra: str) -> None:
    program = (
        f"import sys; sys.modules['{hidden}'] = None\n"
        f"try:\n    import gapped.{module}\n"
        "except ImportError as problem:\n    print(problem)"
    )
    line = f'gapped.{module} needs {hidden}: pip install "gapped[{extra}]"\n'
    assert python("-c", program) == line
    assert "torch" in sys.modules  # of this process, which the others do not share
