"""How many files a call walks through, how often it returns to one, and how many modules it loads."""

from __future__ import annotations

import runpy
from pathlib import Path

import pytest

TOOL = runpy.run_path(str(Path(__file__).parents[1] / "tools" / "trace_calls.py"))
# Files, returns, and modules after the call in a fresh interpreter.
MOST = {
    "gst": (5, 2, 16),
    "sample": (6, 2, 16),
    "linear_choice": (7, 4, 16),
    "expectation": (8, 1, 40),
    "jax.gst": (5, 2, 20),
    # One of these files knows a function of the user by its code: `comparison.identity`.
    "compare": (14, 3, 45),
}


@pytest.mark.parametrize("walk", MOST)
def test_a_call_walks_through_few_files(walk: str) -> None:
    if walk.startswith("jax"):
        pytest.importorskip("jax", reason="needs jax")
    files, returns, modules = MOST[walk]
    _, found_files, found_returns = TOOL["trace"](TOOL["WALKS"][walk]())
    assert found_files <= files
    assert found_returns <= returns
    assert TOOL["modules"](walk) <= modules
