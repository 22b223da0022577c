"""The public surface, the direction of imports, and what importing does: nothing."""

from __future__ import annotations

import ast
import re
import runpy
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import FUNCTIONS

import gapped

PACKAGE = Path(gapped.__file__).parent

# The public names beside the estimators: those are pinned by the table of README.md.
NAMES = {
    "Diagnosis",
    "GappedError",
    "Pathwise",
    "Score",
    "__version__",
    "backend_used",
    "diagnose",
    "diagnose_model",
    "distributions",
    "estimator",
    "estimators",
    "expectation",
    "expected_gap",
    "gst_index",
    "nn",
    "properties",
    "simplex",
}

# Lowest first; a module imports from lower lines, or from its own subpackage.
LAYERS = (
    ("errors", "_version"),
    ("checks",),
    ("simplex", "gradient"),
    ("kernels",),
    ("choice",),
    ("pathwise", "score"),
    ("registry", "objective"),
    ("nn", "distributions"),
    ("diagnostics",),
    # From here on the laboratory: the library never imports it.
    ("lab.records",),
    ("lab.fleet", "lab.data"),
    ("lab.tasks",),
    ("lab", "lab.report"),
    ("lab.cli",),
    ("__main__",),
)
RANK = {part: rank for rank, parts in enumerate(LAYERS) for part in parts}
CORE = {part for parts in LAYERS[: RANK["nn"] + 1] for part in parts}


def imported(source: str, module: str) -> set[str]:
    """Absolute names of everything that a module imports, wherever in the file the statement stands."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                base = ".".join([*module.split(".")[: -node.level], *([base] if base else [])])
            names |= {f"{base}.{alias.name}" for alias in node.names}
    return names


def part_of(name: str) -> str | None:
    """The layer's name in `gapped.part.rest`; rooms of the laboratory have their own."""
    pieces = name.split(".")
    if pieces[0] != "gapped" or len(pieces) < 2:
        return None
    room = ".".join(pieces[1:3])
    return room if room in RANK else pieces[1]


def upward_imports(source: str, module: str) -> list[str]:
    own = part_of(module)
    found = []
    for name in sorted(imported(source, module)):
        part = part_of(name)
        if part is None or part == own:
            continue
        # A name that is no layer was taken from the package itself, which imports everything.
        if part not in RANK or RANK[part] >= RANK[own]:
            found.append(f"{module} imports {name}")
    return found


def modules() -> dict[str, str]:
    """Every module of the package but `gapped/__init__.py`, by dotted name."""
    found = {}
    for path in PACKAGE.rglob("*.py"):
        pieces = path.relative_to(PACKAGE.parent).with_suffix("").parts
        if pieces != ("gapped", "__init__"):
            found[".".join(pieces)] = path.read_text(encoding="utf-8")
    return found


def test_the_surface_is_pinned() -> None:
    estimators = {kind.__name__ for kind in gapped.estimators().values()}
    functions = {function.__name__ for function in FUNCTIONS.values()}
    assert sorted(gapped.__all__) == sorted([*NAMES, *estimators, *functions])
    for name in gapped.__all__:
        assert hasattr(gapped, name)


def test_every_public_name_is_in_the_reference() -> None:
    docs = PACKAGE.parents[1] / "docs"
    expand = runpy.run_path(str(docs / "_ext" / "reference.py"))["expand"]
    page = expand((docs / "api.md").read_text("utf-8"))
    names = re.findall(r"^\.\. auto\w+:: (?:gapped\.)?(\w+)$", page, flags=re.M)
    assert sorted(names) == sorted(set(gapped.__all__) - {"__version__"})


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


def test_every_module_has_a_layer() -> None:
    unknown = {part_of(name) for name in modules()} - set(RANK)
    assert not unknown, f"give these a line in LAYERS: {unknown}"


@pytest.mark.parametrize("module", sorted(modules()))
def test_imports_go_downward(module: str) -> None:
    assert upward_imports(modules()[module], module) == []


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("gapped.simplex", "from gapped.registry import estimator"),
        ("gapped.simplex", "import gapped.pathwise.gst"),
        ("gapped.simplex", "from gapped import nn"),
        ("gapped.simplex", "from . import registry"),
        ("gapped.pathwise.gst", "from ..registry import estimator"),
        ("gapped.pathwise.gst", "def f():\n    from gapped.score import rloo"),
        ("gapped.nn", "from gapped import GST"),
        ("gapped.diagnostics.measure", "from gapped.lab import records"),
        ("gapped.lab.fleet.trainer", "from gapped.lab.tasks import vae"),
    ],
)
def test_an_upward_import_is_found(module: str, source: str) -> None:
    assert len(upward_imports(source, module)) == 1


@pytest.mark.parametrize("module", sorted(name for name in modules() if part_of(name) in CORE - {"kernels"}))
def test_the_core_needs_torch_and_nothing_else(module: str) -> None:
    roots = {name.split(".")[0] for name in imported(modules()[module], module)}
    assert roots - set(sys.stdlib_module_names) <= {"torch", "gapped"}


def python(program: str) -> str:
    """What a fresh interpreter prints for `program` once torch is there, warnings being errors."""
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
    slow = ("torch._dynamo", "torch._inductor", "gapped.kernels.fused")
    assert not [name for name in added if name.startswith(slow)]


def test_importing_does_nothing() -> None:
    """No seeding, no thread setting, no default dtype, nothing printed."""
    printed = python(
        "look = lambda: (torch.get_rng_state().tolist(), torch.get_num_threads(),\n"
        "    torch.get_default_dtype(), torch.is_grad_enabled())\n"
        "before = look(); import gapped, gapped.nn, gapped.distributions; print(look() == before)"
    )
    assert printed == "True"
