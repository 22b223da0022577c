"""The public names, and what importing does: nothing."""

from __future__ import annotations

import re
import runpy
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from conftest import FUNCTIONS

import gapped

PACKAGE = Path(gapped.__file__).parent

# The public names beside the estimators: those are pinned by the table of docs/api_estimators.md.
NAMES = {
    "Choice",
    "Choices",
    "Comparison",
    "Diagnosis",
    "GappedError",
    "LinearChoice",
    "Pathwise",
    "Rollout",
    "Score",
    "__version__",
    "backend_used",
    "choose",
    "compare",
    "counts",
    "diagnose",
    "diagnose_model",
    "distributions",
    "estimator",
    "estimators",
    "expectation",
    "expected_gap",
    "gate",
    "nm_mask",
    "linear_choice",
    "nn",
    "properties",
    "replacing_torch",
    "rollout",
    "sample",
    "simplex",
    "subset",
    "subsets",
    "unimix",
}


def test_the_surface_is_pinned() -> None:
    estimators = {kind.__name__ for kind in gapped.estimators().values()}
    functions = {function.__name__ for function in FUNCTIONS.values()}
    assert sorted(gapped.__all__) == sorted([*NAMES, *estimators, *functions])
    for name in gapped.__all__:
        assert hasattr(gapped, name)


def test_every_public_name_is_in_the_reference() -> None:
    docs = PACKAGE.parents[1] / "docs"
    expand = runpy.run_path(str(docs / "_ext" / "reference.py"))["expand"]
    pages = [expand(path.read_text("utf-8")) for path in docs.glob("api*.md")]
    names = re.findall(r"^\.\. auto\w+:: (?:gapped\.)?(\w+)$", "".join(pages), flags=re.M)
    assert sorted(name for name in names if name != "jax") == sorted(set(gapped.__all__) - {"__version__"})


@pytest.mark.slow
def test_a_misspelt_name_is_an_error_for_a_type_checker() -> None:
    pytest.importorskip("mypy", reason="needs mypy")
    program = "import gapped\ngapped.GST(tau=0.5).sample\ngapped.anything_misspelt"
    command = [sys.executable, "-m", "mypy", "--strict", "--config-file=", "-c", program]
    done = subprocess.run(command, capture_output=True, text=True, cwd=PACKAGE.parents[1])
    assert "anything_misspelt" in done.stdout
    assert "Found 1 error" in done.stdout


def test_every_public_name_is_documented() -> None:
    for name in set(gapped.__all__) - {"__version__"}:
        assert (getattr(gapped, name).__doc__ or "").strip(), name


def python(program: str) -> str:
    """The output of a fresh interpreter for `program` once torch is there, warnings being errors."""
    prelude = "import warnings, sys\nimport torch\nwarnings.simplefilter('error')\n"
    command = [sys.executable, "-c", prelude + program]
    return subprocess.run(command, check=True, capture_output=True, text=True, timeout=120).stdout.strip()


def test_importing_brings_only_torch() -> None:
    """Using an estimator loads no more than that either."""
    added = python(
        "before = set(sys.modules); import gapped, gapped.nn, gapped.distributions\n"
        "gapped.estimator('gst').sample(torch.zeros(2, 3))\n"
        "print(*sorted(set(sys.modules) - before))"
    ).split()
    assert "gapped.pathwise.gst" in added
    roots = {name.split(".")[0] for name in added} - set(sys.stdlib_module_names)
    assert roots <= {"gapped", "torch"}
    slow = ("torch._dynamo", "torch._inductor", "gapped.kernels.sampling.launch", "triton")
    assert not [name for name in added if name.startswith(slow)]


def test_importing_does_nothing() -> None:
    """No seeding, no thread setting, no default dtype, nothing printed."""
    printed = python(
        "look = lambda: (torch.get_rng_state().tolist(), torch.get_num_threads(),\n"
        "    torch.get_default_dtype(), torch.is_grad_enabled())\n"
        "before = look(); import gapped, gapped.nn, gapped.distributions; print(look() == before)"
    )
    assert printed == "True"


@pytest.mark.parametrize("module", [gapped, gapped.nn, gapped.distributions, gapped.subsets])
def test_completion_offers_what_is_public(module: Any) -> None:
    assert dir(module) == sorted(module.__all__)
    assert all((getattr(module, name).__doc__ or "").strip() for name in dir(module) if name != "__version__")
