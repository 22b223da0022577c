"""The examples in JAX run without torch, learn, and print the columns that their page shows."""

from __future__ import annotations

from pathlib import Path

import pytest
from jax_problems import jax  # noqa: F401
from subprocesses import environment, python

ROOT = Path(__file__).parents[2]
WITHOUT_TORCH = (
    "import sys, runpy; sys.argv = {!r}; runpy.run_path({!r}, run_name='__main__')\n"
    "assert 'torch' not in sys.modules"
)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "package", "steps", "most"),
    [
        # Predicting the centre of the circle costs 51 nats in each of 20 steps.
        ("jax_rssm", "jax", 60, 250.0),
        # 24.2 is what a single picture gives.
        ("numpyro_svi", "numpyro", 150, 24.2),
    ],
)
def test_it_learns(name: str, package: str, steps: int, most: float) -> None:
    pytest.importorskip(package, reason=f"needs {package}, which the extra numpyro brings")
    arguments = [name, "--steps", str(steps), "--estimator", "gst"]
    script = WITHOUT_TORCH.format(arguments, str(ROOT / "examples" / f"{name}.py"))
    quickly = {**environment(), "JAX_DISABLE_MOST_OPTIMIZATIONS": "1"}
    printed = python("-W", "error", "-c", script, env=quickly)
    lines = [line for line in printed.splitlines() if line.startswith("|")]
    assert lines[0] in (ROOT / "docs" / "examples" / f"{name}.md").read_text("utf-8")
    assert float(lines[-1].split("|")[2]) < most
